// SPDX-License-Identifier: GPL-2.0
/* Links: two parts, and how their owners ring each other. */

#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "tombolo.h"

static DEFINE_MUTEX(tombolo_links_lock);
static LIST_HEAD(tombolo_links);

/* An open link: what its holder knows of it. */
struct view {
	struct link *link;
	u32 departures;		/* when it last listed the slices */
};

static void link_free(struct link *link)
{
	if (link->own.node)
		fput(link->own.node);
	if (link->peer.node)
		fput(link->peer.node);
	if (link->bell_node)
		fput(link->bell_node);
	mutex_destroy(&link->lock);
	kvfree(link->dirty);
	kfree(link);
}

static void link_release(struct kref *ref)
{
	struct link *link = container_of(ref, struct link, ref);

	list_del(&link->node);
	mutex_unlock(&tombolo_links_lock);
	link_free(link);
}

void tombolo_link_put(struct link *link)
{
	kref_put_mutex(&link->ref, link_release, &tombolo_links_lock);
}

static void link_hang_up(struct link *link)
{
	struct slice *slice;

	mutex_lock(&link->lock);
	spin_lock_irq(&link->vector->lock);
	WRITE_ONCE(link->hung_up, true);
	spin_unlock_irq(&link->vector->lock);
	list_for_each_entry(slice, &link->slices, on_link)
		tombolo_slice_hang_up(slice);
	mutex_unlock(&link->lock);
	wake_up_all(&link->wq);
}

/* Within tombolo_life, the link being alive. */
static void link_ring(struct link *link, u32 whom)
{
	WRITE_ONCE(link->ring, whom);
	/* With slice_ring(), whose marks of before nobody may have been told. */
	smp_mb();
	tombolo_ring(link->bell, whom);
}

/* @dev is dead: ends its links, and takes its memory from whoever mapped it. */
void tombolo_links_revoke(struct tombolo *dev)
{
	struct link *link;

	mutex_lock(&tombolo_links_lock);
	list_for_each_entry(link, &tombolo_links, node) {
		if (link->own.dev != dev && link->peer.dev != dev && link->bell != dev)
			continue;
		link_hang_up(link);
		if (link->own.dev == dev)
			unmap_mapping_range(link->own.node->f_mapping, 0, 0, 1);
		if (link->peer.dev == dev)
			unmap_mapping_range(link->peer.node->f_mapping, 0, 0, 1);
	}
	mutex_unlock(&tombolo_links_lock);
}

static long link_list(struct view *view, struct tombolo_slices __user *arg)
{
	struct link *link = view->link;
	struct tombolo_slice __user *entry;
	struct tombolo_slices slices;
	struct slice *slice;
	u32 room;
	long err = 0;

	if (copy_from_user(&slices, arg, sizeof(slices)))
		return -EFAULT;
	if (slices.reserved)
		return -EINVAL;
	entry = u64_to_user_ptr(slices.entries);
	room = slices.count;

	mutex_lock(&link->lock);
	list_for_each_entry(slice, &link->slices, on_link) {
		if (!room--)
			break;
		if (copy_to_user(entry++, &slice->is, sizeof(slice->is))) {
			err = -EFAULT;
			break;
		}
	}
	slices.count = link->count;
	if (!err)
		view->departures = link->departures;
	mutex_unlock(&link->lock);

	if (!err && copy_to_user(arg, &slices, sizeof(slices)))
		err = -EFAULT;
	return err;
}

static bool link_is_alive(const struct link *link)
{
	return tombolo_is_alive(link->own.dev) && tombolo_is_alive(link->peer.dev) &&
	       tombolo_is_alive(link->bell);
}

static long link_ring_other(struct link *link, const struct tombolo_ring __user *user)
{
	struct tombolo_ring arg;
	long err = -ENODEV;
	int idx;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	idx = srcu_read_lock(&tombolo_life);
	if (link_is_alive(link) && !READ_ONCE(link->hung_up)) {
		link_ring(link, tombolo_whom(arg.peer, arg.vector));
		err = 0;
	}
	srcu_read_unlock(&tombolo_life, idx);
	return err;
}

/* Bytes of our part from @from to before @to may be written from now on. */
void tombolo_link_soil(struct link *link, u64 from, u64 to)
{
	unsigned long page;

	for (page = PHYS_PFN(from); page < PHYS_PFN(PAGE_ALIGN(to)); page++)
		set_bit(page, link->dirty);
	/* With link_clear(): it sees the bit, or what it writes is there before the mapping is. */
	smp_mb();
}

static long link_clear(struct link *link, const struct tombolo_range __user *user)
{
	const struct part *part = &link->own;
	struct tombolo_range range;
	unsigned long page, end;
	long err = -ENODEV;
	int idx;

	if (copy_from_user(&range, user, sizeof(range)))
		return -EFAULT;
	if (!range.length || !PAGE_ALIGNED(range.offset) || !PAGE_ALIGNED(range.length) ||
	    range.offset >= part->length || range.length > part->length - range.offset)
		return -EINVAL;

	page = PHYS_PFN(range.offset);
	end = page + PHYS_PFN(range.length);
	idx = srcu_read_lock(&tombolo_life);
	if (tombolo_is_alive(part->dev)) {
		for_each_set_bit_from(page, link->dirty, end) {
			clear_bit(page, link->dirty);
			smp_mb__after_atomic();
			memset(part->dev->mem + part->offset + PFN_PHYS(page), 0, PAGE_SIZE);
			cond_resched();
		}
		err = 0;
	}
	srcu_read_unlock(&tombolo_life, idx);
	return err;
}

static long link_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct view *view = file->private_data;

	switch (cmd) {
	case TOMBOLO_IOC_SLICE:
		return tombolo_slice_open(view->link, (void __user *)arg);
	case TOMBOLO_IOC_SLICES:
		return link_list(view, (void __user *)arg);
	case TOMBOLO_IOC_HANG_UP:
		link_hang_up(view->link);
		return 0;
	case TOMBOLO_IOC_RING:
		return link_ring_other(view->link, (void __user *)arg);
	case TOMBOLO_IOC_CLEAR:
		return link_clear(view->link, (void __user *)arg);
	default:
		return -ENOTTY;
	}
}

static __poll_t link_poll(struct file *file, poll_table *wait)
{
	struct view *view = file->private_data;
	struct link *link = view->link;
	__poll_t events = 0;

	poll_wait(file, &link->wq, wait);
	if (READ_ONCE(link->departures) != READ_ONCE(view->departures))
		events |= EPOLLIN | EPOLLRDNORM;
	if (tombolo_vector_storms(link->vector))
		events |= EPOLLPRI;
	if (READ_ONCE(link->hung_up))
		events |= EPOLLHUP;
	return events;
}

static int link_close(struct inode *inode, struct file *file)
{
	struct view *view = file->private_data;

	tombolo_link_put(view->link);
	kfree(view);
	return 0;
}

static const struct file_operations link_fops = {
	.owner = THIS_MODULE,
	.release = link_close,
	.poll = link_poll,
	.unlocked_ioctl = link_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static bool part_is_valid(const struct part *part)
{
	return part->length && PAGE_ALIGNED(part->offset) && PAGE_ALIGNED(part->length) &&
	       part->offset < part->dev->size && part->length <= part->dev->size - part->offset;
}

static bool parts_are_equal(const struct part *a, const struct part *b)
{
	return a->dev == b->dev && a->offset == b->offset && a->length == b->length;
}

static bool parts_overlap(const struct part *a, const struct part *b)
{
	return a->dev == b->dev && a->offset < b->offset + b->length &&
	       b->offset < a->offset + a->length;
}

static bool links_are_equal(const struct link *a, const struct link *b)
{
	return parts_are_equal(&a->own, &b->own) && parts_are_equal(&a->peer, &b->peer) &&
	       a->vector == b->vector;
}

static struct link *link_make(struct file *node, const struct tombolo_link *arg)
{
	struct link *link;
	struct file *file;
	int err;

	link = kzalloc(sizeof(*link), GFP_KERNEL_ACCOUNT);
	if (!link)
		return ERR_PTR(-ENOMEM);
	kref_init(&link->ref);
	mutex_init(&link->lock);
	INIT_LIST_HEAD(&link->slices);
	init_waitqueue_head(&link->wq);
	link->ring = tombolo_whom(arg->ring_peer, arg->ring_vector);

	link->own.node = get_file(node);
	link->own.dev = tombolo_of_node(node);
	link->own.offset = arg->own_offset;
	link->own.length = arg->own_length;

	file = tombolo_get_node(arg->peer_fd);
	err = PTR_ERR_OR_ZERO(file);
	if (err)
		goto err_free;
	link->peer.node = file;
	link->peer.dev = tombolo_of_node(file);
	link->peer.offset = arg->peer_offset;
	link->peer.length = arg->peer_length;

	file = tombolo_get_node(arg->bell_fd);
	err = PTR_ERR_OR_ZERO(file);
	if (err)
		goto err_free;
	link->bell_node = file;
	link->bell = tombolo_of_node(file);

	err = -EINVAL;
	if (arg->wait_vector >= link->bell->vectors)
		goto err_free;
	link->vector = &link->bell->vector[arg->wait_vector];
	if (!part_is_valid(&link->own) || !part_is_valid(&link->peer) ||
	    parts_overlap(&link->own, &link->peer))
		goto err_free;

	err = -ENOMEM;
	link->dirty = kvcalloc(BITS_TO_LONGS(PHYS_PFN(link->own.length)), sizeof(*link->dirty),
			       GFP_KERNEL_ACCOUNT);
	if (!link->dirty)
		goto err_free;
	/* What it was used for before nobody knows. */
	bitmap_fill(link->dirty, PHYS_PFN(link->own.length));
	return link;

err_free:
	link_free(link);
	return ERR_PTR(err);
}

/* Puts a new link on the list, or returns the one that is there already. */
static struct link *link_enter(struct link *new)
{
	struct link *link, *found = new;
	int idx = srcu_read_lock(&tombolo_life);

	mutex_lock(&tombolo_links_lock);
	if (!link_is_alive(new))
		found = ERR_PTR(-ENODEV);
	list_for_each_entry(link, &tombolo_links, node) {
		if (IS_ERR(found) || !parts_overlap(&link->own, &new->own))
			continue;
		if (links_are_equal(link, new) && !READ_ONCE(link->hung_up)) {
			kref_get(&link->ref);
			link_ring(link, new->ring);
			found = link;
		} else {
			found = ERR_PTR(-EBUSY);
		}
		break;
	}
	if (found == new)
		list_add(&new->node, &tombolo_links);
	mutex_unlock(&tombolo_links_lock);
	srcu_read_unlock(&tombolo_life, idx);

	if (found != new)
		link_free(new);
	return found;
}

long tombolo_link_open(struct file *node, const struct tombolo_link __user *user)
{
	struct tombolo_link arg;
	struct link *link;
	struct view *view;
	int fd;

	if (!(node->f_mode & FMODE_WRITE))
		return -EPERM;
	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	if (arg.flags)
		return -EINVAL;

	link = link_make(node, &arg);
	if (IS_ERR(link))
		return PTR_ERR(link);
	link = link_enter(link);
	if (IS_ERR(link))
		return PTR_ERR(link);

	view = kzalloc(sizeof(*view), GFP_KERNEL_ACCOUNT);
	if (!view) {
		tombolo_link_put(link);
		return -ENOMEM;
	}
	view->link = link;
	view->departures = READ_ONCE(link->departures);
	fd = anon_inode_getfd("[tombolo-link]", &link_fops, view, O_RDWR | O_CLOEXEC);
	if (fd < 0) {
		tombolo_link_put(link);
		kfree(view);
	}
	return fd;
}
