// SPDX-License-Identifier: GPL-2.0
/* An ivshmem device, and its node. */

#include <linux/file.h>
#include <linux/idr.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "tombolo.h"

#define VENDOR_QUMRANET	0x1af4
#define DEVICE_IVSHMEM	0x1110
#define REVISION	1	/* the older one has other registers */

#define BAR_REGISTERS	0
#define BAR_MEMORY	2
#define REG_POSITION	8

DEFINE_SRCU(tombolo_life);

static DEFINE_IDA(tombolo_ids);

static void tombolo_free(struct kref *ref)
{
	struct tombolo *dev = container_of(ref, struct tombolo, ref);

	ida_free(&tombolo_ids, dev->id);
	kfree(dev->vector);
	kfree(dev);
}

static int node_open(struct inode *inode, struct file *file)
{
	/* misc_deregister() takes the lock under which we are called. */
	struct tombolo *dev = container_of(file->private_data, struct tombolo, misc);

	kref_get(&dev->ref);
	file->private_data = dev;
	return 0;
}

static int node_release(struct inode *inode, struct file *file)
{
	struct tombolo *dev = file->private_data;

	kref_put(&dev->ref, tombolo_free);
	return 0;
}

static void count(struct tombolo *dev, u64 *interrupts, u64 *storms)
{
	unsigned int i;

	*interrupts = 0;
	*storms = 0;
	for (i = 0; i < dev->vectors; i++) {
		struct vector *vector = &dev->vector[i];

		spin_lock_irq(&vector->lock);
		*interrupts += vector->interrupts;
		*storms += vector->storms;
		spin_unlock_irq(&vector->lock);
	}
}

static long node_info(struct tombolo *dev, struct tombolo_info __user *arg)
{
	struct tombolo_info info = {
		.version = TOMBOLO_UAPI_VERSION,
		.size = dev->size,
		.vectors = dev->vectors,
	};
	int err = -ENODEV, idx;

	if (dev->vectors)
		info.flags |= TOMBOLO_INFO_BELL;
	if (dev->write_back)
		info.flags |= TOMBOLO_INFO_WRITE_BACK;
	count(dev, &info.interrupts, &info.storms);

	idx = srcu_read_lock(&tombolo_life);
	if (tombolo_is_alive(dev)) {
		info.peer = ioread32(dev->regs + REG_POSITION);
		err = 0;
	}
	srcu_read_unlock(&tombolo_life, idx);

	if (!err && copy_to_user(arg, &info, sizeof(info)))
		err = -EFAULT;
	return err;
}

static long node_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	switch (cmd) {
	case TOMBOLO_IOC_INFO:
		return node_info(file->private_data, (void __user *)arg);
	case TOMBOLO_IOC_LINK:
		return tombolo_link_open(file, (void __user *)arg);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations node_fops = {
	.owner = THIS_MODULE,
	.open = node_open,
	.release = node_release,
	.unlocked_ioctl = node_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

/* A reference to the node that @fd is, if it is one and open for writing. */
struct file *tombolo_get_node(int fd)
{
	struct file *file = fget(fd);

	if (!file)
		return ERR_PTR(-EBADF);
	if (file->f_op != &node_fops) {
		fput(file);
		return ERR_PTR(-EINVAL);
	}
	if (!(file->f_mode & FMODE_WRITE)) {
		fput(file);
		return ERR_PTR(-EPERM);
	}
	return file;
}

struct tombolo *tombolo_of_node(struct file *node)
{
	return node->private_data;
}

static struct tombolo *tombolo_of_misc(struct device *misc)
{
	return container_of(dev_get_drvdata(misc), struct tombolo, misc);
}

static ssize_t interrupts_show(struct device *misc, struct device_attribute *attr, char *buf)
{
	u64 interrupts, storms;

	count(tombolo_of_misc(misc), &interrupts, &storms);
	return sysfs_emit(buf, "%llu\n", interrupts);
}
static DEVICE_ATTR_RO(interrupts);

static ssize_t storms_show(struct device *misc, struct device_attribute *attr, char *buf)
{
	u64 interrupts, storms;

	count(tombolo_of_misc(misc), &interrupts, &storms);
	return sysfs_emit(buf, "%llu\n", storms);
}
static DEVICE_ATTR_RO(storms);

static ssize_t write_back_show(struct device *misc, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", tombolo_of_misc(misc)->write_back);
}
static DEVICE_ATTR_RO(write_back);

static struct attribute *tombolo_attrs[] = {
	&dev_attr_interrupts.attr,
	&dev_attr_storms.attr,
	&dev_attr_write_back.attr,
	NULL
};
ATTRIBUTE_GROUPS(tombolo);

static int tombolo_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct tombolo *dev;
	int err;

	if (pdev->revision != REVISION)
		return -ENODEV;
	if (!pci_resource_len(pdev, BAR_MEMORY) ||
	    !PAGE_ALIGNED(pci_resource_start(pdev, BAR_MEMORY)) ||
	    !PAGE_ALIGNED(pci_resource_len(pdev, BAR_MEMORY)))
		return -ENODEV;

	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return -ENOMEM;
	kref_init(&dev->ref);
	dev->pdev = pdev;
	dev->phys = pci_resource_start(pdev, BAR_MEMORY);
	dev->size = pci_resource_len(pdev, BAR_MEMORY);
	dev->id = ida_alloc(&tombolo_ids, GFP_KERNEL);
	if (dev->id < 0) {
		err = dev->id;
		kfree(dev);
		return err;
	}

	err = pci_enable_device_mem(pdev);
	if (err)
		goto err_free;
	err = pci_request_regions(pdev, KBUILD_MODNAME);
	if (err)
		goto err_disable;
	dev->regs = pci_iomap(pdev, BAR_REGISTERS, 0);
	if (!dev->regs) {
		err = -ENOMEM;
		goto err_regions;
	}
	/* Also reserves the memory type, which is what user mappings get. */
	dev->mem = memremap(dev->phys, dev->size, MEMREMAP_WB);
	if (!dev->mem) {
		err = -ENOMEM;
		goto err_regs;
	}
	dev->write_back = tombolo_write_back(dev->mem);
	if (!dev->write_back)
		dev_warn(&pdev->dev, "memory at %pa is not write-back: plug it in later, or make it 1 GiB, so that it lies above 4 GiB\n",
			 &dev->phys);
	pci_set_master(pdev);
	err = tombolo_vectors_start(dev);
	if (err)
		goto err_master;

	snprintf(dev->name, sizeof(dev->name), "tombolo%d", dev->id);
	dev->misc.minor = MISC_DYNAMIC_MINOR;
	dev->misc.name = dev->name;
	dev->misc.fops = &node_fops;
	dev->misc.parent = &pdev->dev;
	dev->misc.groups = tombolo_groups;
	dev->misc.mode = 0660;
	pci_set_drvdata(pdev, dev);
	err = misc_register(&dev->misc);
	if (err)
		goto err_vectors;
	return 0;

err_vectors:
	tombolo_vectors_stop(dev);
err_master:
	pci_clear_master(pdev);
	memunmap(dev->mem);
err_regs:
	pci_iounmap(pdev, dev->regs);
err_regions:
	pci_release_regions(pdev);
err_disable:
	pci_disable_device(pdev);
err_free:
	kref_put(&dev->ref, tombolo_free);
	return err;
}

static void tombolo_remove(struct pci_dev *pdev)
{
	struct tombolo *dev = pci_get_drvdata(pdev);

	misc_deregister(&dev->misc);
	/*
	 * Only faults map pages, and only of a device that lives. So whatever
	 * was mapped is found by the revocation below: the vma of a fault is
	 * linked, that of an mmap need not be yet. That is why mmap maps none.
	 */
	WRITE_ONCE(dev->dead, true);
	synchronize_srcu(&tombolo_life);
	tombolo_links_revoke(dev);

	tombolo_vectors_stop(dev);
	pci_clear_master(pdev);
	memunmap(dev->mem);
	pci_iounmap(pdev, dev->regs);
	pci_release_regions(pdev);
	pci_disable_device(pdev);
	kref_put(&dev->ref, tombolo_free);
}

static const struct pci_device_id tombolo_table[] = {
	{ PCI_DEVICE(VENDOR_QUMRANET, DEVICE_IVSHMEM) },
	{ }
};
MODULE_DEVICE_TABLE(pci, tombolo_table);

static struct pci_driver tombolo_driver = {
	.name = KBUILD_MODNAME,
	.id_table = tombolo_table,
	.probe = tombolo_probe,
	.remove = tombolo_remove,
};
module_pci_driver(tombolo_driver);

MODULE_DESCRIPTION("Slices of ivshmem devices for Tombolo");
MODULE_AUTHOR("The Tombolo authors");
MODULE_LICENSE("GPL");
