// SPDX-License-Identifier: GPL-2.0
/* Slices: what a program gets. */

#include <linux/anon_inodes.h>
#include <linux/eventfd.h>
#include <linux/file.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>

#include "tombolo.h"

/*
 * How many pages one fault maps, at most: those around it. Few, for each costs
 * something when a channel begins, and a byte or two may be all it carries.
 */
#define FAULT_AROUND	16UL

static const __le32 *peer_mark(const struct slice *slice, unsigned int channel)
{
	const struct part *part = &slice->link->peer;
	const u8 *marks = part->dev->mem + part->offset + TOMBOLO_MARKS_OFFSET;

	return (const __le32 *)marks + slice->is.channel + channel;
}

static __le32 *own_mark(const struct slice *slice, unsigned int channel)
{
	const struct part *part = &slice->link->own;
	u8 *marks = part->dev->mem + part->offset + TOMBOLO_MARKS_OFFSET;

	return (__le32 *)marks + slice->is.channel + channel;
}

static u64 all_channels(const struct slice *slice)
{
	return slice->is.channels ? ~0ULL >> (64 - slice->is.channels) : 0;
}

/*
 * Under vector->lock: notes what was rung, and wakes who waits for it. False if
 * that was not over at the time `until`: the next look begins with the rest.
 */
bool tombolo_slice_look(struct slice *slice, u64 until, unsigned int *woke)
{
	bool fresh = false, late = false;
	unsigned int i, done;

	if (slice->link->hung_up)
		return true;
	for (done = 0; done < slice->is.channels && !late; done++) {
		struct channel *channel;
		u32 mark;

		i = slice->from;
		channel = &slice->channel[i];
		mark = le32_to_cpu(READ_ONCE(*peer_mark(slice, i)));
		slice->from = i + 1 < slice->is.channels ? i + 1 : 0;
		if (mark == channel->seen)
			continue;
		channel->seen = mark;
		if (slice->net && i < TOMBOLO_NET_CHANNELS) {
			*woke += tombolo_net_kick(slice->net);
		} else if (channel->eventfd) {
			tombolo_signal(channel->eventfd);
			++*woke;
			late = ktime_get_ns() >= until;
		} else if (!(slice->pending & BIT_ULL(i))) {
			slice->pending |= BIT_ULL(i);
			fresh = true;
		}
	}
	if (fresh) {
		wake_up_all(&slice->wq);
		++*woke;
		late = late || ktime_get_ns() >= until;
	}
	return !late;
}

/* Under link->lock, the link being hung up: ends all waits. */
void tombolo_slice_hang_up(struct slice *slice)
{
	struct vector *vector = slice->link->vector;
	unsigned int i;

	local_bh_disable();
	spin_lock_irq(&vector->lock);
	for (i = 0; i < slice->is.channels; i++)
		if (slice->channel[i].eventfd)
			tombolo_signal(slice->channel[i].eventfd);
	if (slice->net)
		tombolo_net_kick(slice->net);
	spin_unlock_irq(&vector->lock);
	local_bh_enable();
	wake_up_all(&slice->wq);
}

void tombolo_slice_ring(struct slice *slice, u64 which)
{
	struct link *link = slice->link;
	int idx = srcu_read_lock(&tombolo_life);
	unsigned long flags;
	unsigned int i;

	if (tombolo_is_alive(link->own.dev) && tombolo_is_alive(link->bell) &&
	    !READ_ONCE(link->hung_up)) {
		spin_lock_irqsave(&slice->ring_lock, flags);
		for (i = 0; i < slice->is.channels; i++)
			if (which & BIT_ULL(i))
				WRITE_ONCE(*own_mark(slice, i),
					   cpu_to_le32(++slice->channel[i].rung));
		spin_unlock_irqrestore(&slice->ring_lock, flags);
		/* With link_ring(): it rings for us, or we ring whom it says. */
		smp_mb();
		tombolo_ring(link->bell, READ_ONCE(link->ring));
	}
	srcu_read_unlock(&tombolo_life, idx);
}

static ssize_t slice_read(struct file *file, char __user *buf, size_t count, loff_t *pos)
{
	struct slice *slice = file->private_data;
	struct link *link = slice->link;
	struct vector *vector = link->vector;
	unsigned int woke = 0;
	bool hung_up;
	u64 bits;
	int err;

	if (count < sizeof(bits) || !slice->is.channels)
		return -EINVAL;
	for (;;) {
		/* What an interface is woken for is done when these are on again. */
		local_bh_disable();
		spin_lock_irq(&vector->lock);
		tombolo_slice_look(slice, U64_MAX, &woke);
		bits = slice->pending;
		slice->pending = 0;
		hung_up = link->hung_up;
		spin_unlock_irq(&vector->lock);
		local_bh_enable();
		if (bits)
			break;
		if (hung_up)
			return 0;
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		err = wait_event_interruptible(slice->wq, READ_ONCE(slice->pending) ||
					       READ_ONCE(link->hung_up));
		if (err)
			return err;
	}
	if (put_user(bits, (u64 __user *)buf)) {
		spin_lock_irq(&vector->lock);
		slice->pending |= bits;
		spin_unlock_irq(&vector->lock);
		wake_up_all(&slice->wq);
		return -EFAULT;
	}
	return sizeof(bits);
}

static ssize_t slice_write(struct file *file, const char __user *buf, size_t count, loff_t *pos)
{
	struct slice *slice = file->private_data;
	u64 bits;

	if (count != sizeof(bits))
		return -EINVAL;
	if (get_user(bits, (const u64 __user *)buf))
		return -EFAULT;
	if (bits & ~all_channels(slice))
		return -EINVAL;
	if (bits)
		tombolo_slice_ring(slice, bits);
	return sizeof(bits);
}

static __poll_t slice_poll(struct file *file, poll_table *wait)
{
	struct slice *slice = file->private_data;
	struct vector *vector = slice->link->vector;
	unsigned int woke = 0;
	__poll_t events = 0;

	poll_wait(file, &slice->wq, wait);
	local_bh_disable();
	spin_lock_irq(&vector->lock);
	tombolo_slice_look(slice, U64_MAX, &woke);
	if (slice->pending)
		events |= EPOLLIN | EPOLLRDNORM;
	if (slice->link->hung_up)
		events |= EPOLLIN | EPOLLRDNORM | EPOLLHUP;
	spin_unlock_irq(&vector->lock);
	local_bh_enable();
	return events;
}

static long slice_eventfd(struct slice *slice, const struct tombolo_eventfd __user *user)
{
	struct vector *vector = slice->link->vector;
	struct eventfd_ctx *ctx = NULL;
	struct tombolo_eventfd arg;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	if (arg.channel >= slice->is.channels || arg.fd < -1)
		return -EINVAL;
	if (arg.fd >= 0) {
		ctx = eventfd_ctx_fdget(arg.fd);
		if (IS_ERR(ctx))
			return PTR_ERR(ctx);
	}

	spin_lock_irq(&vector->lock);
	/* What is pending goes where the rings go from now on. */
	if (ctx && (slice->link->hung_up || slice->pending & BIT_ULL(arg.channel)))
		tombolo_signal(ctx);
	if (ctx)
		slice->pending &= ~BIT_ULL(arg.channel);
	swap(ctx, slice->channel[arg.channel].eventfd);
	spin_unlock_irq(&vector->lock);

	if (ctx)
		eventfd_ctx_put(ctx);
	return 0;
}

static long slice_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	switch (cmd) {
	case TOMBOLO_IOC_EVENTFD:
		return slice_eventfd(file->private_data, (void __user *)arg);
	default:
		return -ENOTTY;
	}
}

/* From @at to before @end of @vma the slice may be written from now on. */
static void slice_soil(struct slice *slice, struct vm_area_struct *vma, unsigned long at,
		       unsigned long end)
{
	u64 from = slice->is.offset + PFN_PHYS(vma->vm_pgoff) + (at - vma->vm_start);

	tombolo_link_soil(slice->link, from, from + (end - at));
}

/*
 * Pages are mapped here and not by mmap, and only while the device lives:
 * tombolo_remove() says why. vmf_insert_pfn() takes the memory type that
 * probing reserved: write-back.
 */
static vm_fault_t slice_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct slice *slice = vma->vm_private_data;
	struct tombolo *dev = slice->part->dev;
	unsigned long around = FAULT_AROUND * PAGE_SIZE;
	unsigned long at = max(round_down(vmf->address, around), vma->vm_start);
	unsigned long end = min(round_down(vmf->address, around) + around, vma->vm_end);
	unsigned long pfn = PHYS_PFN(dev->phys + slice->part->offset + slice->is.offset) +
			    vma->vm_pgoff;
	vm_fault_t result = VM_FAULT_SIGBUS;
	int idx = srcu_read_lock(&tombolo_life);

	if (tombolo_is_alive(dev)) {
		if (slice->writable)
			slice_soil(slice, vma, at, end);
		result = vmf_insert_pfn(vma, vmf->address & PAGE_MASK,
					pfn + PHYS_PFN(vmf->address - vma->vm_start));
		for (; result == VM_FAULT_NOPAGE && at < end; at += PAGE_SIZE)
			if (vmf_insert_pfn(vma, at, pfn + PHYS_PFN(at - vma->vm_start)) !=
			    VM_FAULT_NOPAGE)
				break;
	}
	srcu_read_unlock(&tombolo_life, idx);
	return result;
}

static const struct vm_operations_struct slice_vm_ops = {
	.fault = slice_fault,
};

static int slice_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct slice *slice = file->private_data;
	unsigned long pages = PHYS_PFN(slice->is.length);
	unsigned long clear = VM_MAYEXEC;

	if (!(vma->vm_flags & VM_SHARED) || vma->vm_flags & VM_EXEC)
		return -EINVAL;
	if (vma->vm_pgoff >= pages || vma_pages(vma) > pages - vma->vm_pgoff)
		return -EINVAL;
	if (!slice->writable) {
		if (vma->vm_flags & VM_WRITE)
			return -EACCES;
		clear |= VM_MAYWRITE;
	}
	vm_flags_mod(vma, VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP, clear);
	vma->vm_ops = &slice_vm_ops;
	vma->vm_private_data = slice;
	return 0;
}

/* Nobody has it any more: tells the peer. */
static void slice_bequeath(struct slice *slice)
{
	const struct part *part = slice->part;
	int idx = srcu_read_lock(&tombolo_life);
	unsigned int i;

	if (slice->is.below && tombolo_is_alive(part->dev)) {
		u8 *mem = part->dev->mem + part->offset + slice->is.offset;

		for (i = 0; i < ARRAY_SIZE(slice->is.state); i++) {
			u64 at = slice->is.offset + slice->is.state[i];

			if (READ_ONCE(mem[slice->is.state[i]]) >= slice->is.below)
				continue;
			tombolo_link_soil(slice->link, at, at + 1);
			WRITE_ONCE(mem[slice->is.state[i]], slice->is.closed);
		}
	}
	srcu_read_unlock(&tombolo_life, idx);
	if (slice->is.channels)
		tombolo_slice_ring(slice, all_channels(slice));
}

static void slice_free(struct slice *slice)
{
	struct link *link = slice->link;
	unsigned int i;

	if (slice->is.channels) {
		spin_lock_irq(&link->vector->lock);
		list_del(&slice->on_vector);
		spin_unlock_irq(&link->vector->lock);
	}
	mutex_lock(&link->lock);
	list_del(&slice->on_link);
	bitmap_clear(link->channels, slice->is.channel, slice->is.channels);
	WRITE_ONCE(link->count, link->count - 1);
	WRITE_ONCE(link->departures, link->departures + 1);
	mutex_unlock(&link->lock);
	wake_up_all(&link->wq);

	for (i = 0; i < slice->is.channels; i++)
		if (slice->channel[i].eventfd)
			eventfd_ctx_put(slice->channel[i].eventfd);
	tombolo_link_put(link);
	kfree(slice);
}

static int slice_release(struct inode *inode, struct file *file)
{
	struct slice *slice = file->private_data;

	slice_bequeath(slice);
	slice_free(slice);
	return 0;
}

static const struct file_operations slice_fops = {
	.owner = THIS_MODULE,
	.release = slice_release,
	.read = slice_read,
	.write = slice_write,
	.poll = slice_poll,
	.mmap = slice_mmap,
	.unlocked_ioctl = slice_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

/* A reference to the slice that @fd is, if it is one. */
struct file *tombolo_get_slice(int fd)
{
	struct file *file = fget(fd);

	if (!file)
		return ERR_PTR(-EBADF);
	if (file->f_op != &slice_fops) {
		fput(file);
		return ERR_PTR(-EINVAL);
	}
	return file;
}

struct slice *tombolo_slice_of(struct file *file)
{
	return file->private_data;
}

static bool slice_is_valid(const struct tombolo_slice *is, const struct part *part)
{
	bool writable = !(is->flags & (TOMBOLO_SLICE_PEER | TOMBOLO_SLICE_READ_ONLY));
	unsigned int i;

	if (is->flags & ~(TOMBOLO_SLICE_PEER | TOMBOLO_SLICE_READ_ONLY))
		return false;
	if (!is->length || !PAGE_ALIGNED(is->offset) || !PAGE_ALIGNED(is->length) ||
	    is->offset >= part->length || is->length > part->length - is->offset)
		return false;
	if (is->channels > TOMBOLO_SLICE_CHANNELS || is->channel > TOMBOLO_CHANNELS ||
	    is->channels > TOMBOLO_CHANNELS - is->channel)
		return false;
	if (is->below > U8_MAX || is->closed > U8_MAX || (is->below && !writable))
		return false;
	for (i = 0; is->below && i < ARRAY_SIZE(is->state); i++)
		if (is->state[i] >= is->length)
			return false;
	return true;
}

/* Under link->lock, within tombolo_life. */
static int slice_enter(struct link *link, struct slice *slice)
{
	const struct tombolo_slice *is = &slice->is;
	unsigned int i, end = is->channel + is->channels;

	if (link->hung_up || !tombolo_is_alive(link->own.dev) || !tombolo_is_alive(link->peer.dev))
		return -ENODEV;
	if (find_next_bit(link->channels, end, is->channel) < end)
		return -EBUSY;
	bitmap_set(link->channels, is->channel, is->channels);
	list_add(&slice->on_link, &link->slices);
	WRITE_ONCE(link->count, link->count + 1);
	for (i = 0; i < is->channels; i++) {
		slice->channel[i].seen = le32_to_cpu(READ_ONCE(*peer_mark(slice, i)));
		slice->channel[i].rung = le32_to_cpu(READ_ONCE(*own_mark(slice, i)));
	}
	if (is->channels) {
		spin_lock_irq(&link->vector->lock);
		list_add(&slice->on_vector, &link->vector->slices);
		spin_unlock_irq(&link->vector->lock);
	}
	return 0;
}

long tombolo_slice_open(struct link *link, const struct tombolo_slice __user *user)
{
	struct tombolo_slice is;
	struct slice *slice;
	struct part *part;
	struct file *file;
	int fd, err, idx;

	if (copy_from_user(&is, user, sizeof(is)))
		return -EFAULT;
	part = is.flags & TOMBOLO_SLICE_PEER ? &link->peer : &link->own;
	if (!slice_is_valid(&is, part))
		return -EINVAL;
	slice = kzalloc(struct_size(slice, channel, is.channels), GFP_KERNEL_ACCOUNT);
	if (!slice)
		return -ENOMEM;
	slice->link = link;
	slice->part = part;
	slice->is = is;
	slice->writable = !(is.flags & (TOMBOLO_SLICE_PEER | TOMBOLO_SLICE_READ_ONLY));
	spin_lock_init(&slice->ring_lock);
	init_waitqueue_head(&slice->wq);

	fd = get_unused_fd_flags(O_CLOEXEC);
	if (fd < 0) {
		kfree(slice);
		return fd;
	}
	idx = srcu_read_lock(&tombolo_life);
	mutex_lock(&link->lock);
	err = slice_enter(link, slice);
	mutex_unlock(&link->lock);
	srcu_read_unlock(&tombolo_life, idx);
	if (err) {
		kfree(slice);
		goto err_fd;
	}
	kref_get(&link->ref);

	file = anon_inode_getfile("[tombolo-slice]", &slice_fops, slice, O_RDWR);
	if (IS_ERR(file)) {
		err = PTR_ERR(file);
		slice_free(slice);
		goto err_fd;
	}
	/* Mappings are found through their device's node, not with everybody's anonymous files. */
	file->f_mapping = part->node->f_mapping;
	fd_install(fd, file);
	return fd;

err_fd:
	put_unused_fd(fd);
	return err;
}
