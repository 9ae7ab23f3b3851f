// SPDX-License-Identifier: GPL-2.0
/* Windows: the ranges of a link that programs map, and their channels. */

#include <linux/anon_inodes.h>
#include <linux/eventfd.h>
#include <linux/file.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>

#include "tombolo.h"

/*
 * One fault maps at most this many pages, those around it. They are few,
 * because each costs time when a channel begins, and a channel may carry a byte
 * or two only.
 */
#define FAULT_AROUND	16UL

static const __le32 *peer_sequence(const struct window *window, unsigned int channel)
{
	const struct half *half = &window->link->peer;
	const u8 *words = half->dev->mem + half->offset + TOMBOLO_SEQUENCE_OFFSET;

	return (const __le32 *)words + window->is.channel + channel;
}

static __le32 *own_sequence(const struct window *window, unsigned int channel)
{
	const struct half *half = &window->link->own;
	u8 *words = half->dev->mem + half->offset + TOMBOLO_SEQUENCE_OFFSET;

	return (__le32 *)words + window->is.channel + channel;
}

static u64 all_channels(const struct window *window)
{
	return window->is.channels ? ~0ULL >> (64 - window->is.channels) : 0;
}

/*
 * Finds the channels that were notified, and wakes their waiters. Returns false
 * if it was not done at the time `until`: the next call begins with the rest.
 * Under vector->lock.
 */
bool tombolo_window_check(struct window *window, u64 until, unsigned int *woke)
{
	bool fresh = false, late = false;
	unsigned int i, done;

	if (window->link->hung_up)
		return true;
	for (done = 0; done < window->is.channels && !late; done++) {
		struct channel *channel;
		u32 sequence;

		i = window->from;
		channel = &window->channel[i];
		sequence = le32_to_cpu(READ_ONCE(*peer_sequence(window, i)));
		window->from = i + 1 < window->is.channels ? i + 1 : 0;
		if (sequence == channel->seen)
			continue;
		channel->seen = sequence;
		if (window->net && i < TOMBOLO_NET_CHANNELS) {
			*woke += tombolo_net_kick(window->net);
		} else if (channel->eventfd) {
			tombolo_signal(channel->eventfd);
			++*woke;
			late = ktime_get_ns() >= until;
		} else if (!(window->pending & BIT_ULL(i))) {
			window->pending |= BIT_ULL(i);
			fresh = true;
		}
	}
	if (fresh) {
		wake_up_all(&window->wq);
		++*woke;
		late = late || ktime_get_ns() >= until;
	}
	return !late;
}

/* Ends all waits, once the link is hung up. Under link->lock. */
void tombolo_window_hang_up(struct window *window)
{
	struct vector *vector = window->link->vector;
	unsigned int i;

	local_bh_disable();
	spin_lock_irq(&vector->lock);
	for (i = 0; i < window->is.channels; i++)
		if (window->channel[i].eventfd)
			tombolo_signal(window->channel[i].eventfd);
	if (window->net)
		tombolo_net_kick(window->net);
	spin_unlock_irq(&vector->lock);
	local_bh_enable();
	wake_up_all(&window->wq);
}

void tombolo_window_notify(struct window *window, u64 which)
{
	struct link *link = window->link;
	int idx = srcu_read_lock(&tombolo_srcu);
	unsigned long flags;
	unsigned int i;

	if (tombolo_is_alive(link->own.dev) && tombolo_is_alive(link->doorbell) &&
	    !READ_ONCE(link->hung_up)) {
		spin_lock_irqsave(&window->notify_lock, flags);
		for (i = 0; i < window->is.channels; i++)
			if (which & BIT_ULL(i))
				WRITE_ONCE(*own_sequence(window, i),
					   cpu_to_le32(++window->channel[i].notified));
		spin_unlock_irqrestore(&window->notify_lock, flags);
		/* Pairs with link_set_target(): either it notifies for us, or we see its target. */
		smp_mb();
		tombolo_notify(link->doorbell, READ_ONCE(link->target));
	}
	srcu_read_unlock(&tombolo_srcu, idx);
}

static ssize_t window_read(struct file *file, char __user *buf, size_t count, loff_t *pos)
{
	struct window *window = file->private_data;
	struct link *link = window->link;
	struct vector *vector = link->vector;
	unsigned int woke = 0;
	bool hung_up;
	u64 bits;
	int err;

	if (count < sizeof(bits) || !window->is.channels)
		return -EINVAL;
	for (;;) {
		/* An interface that is woken here runs once soft interrupts are on again. */
		local_bh_disable();
		spin_lock_irq(&vector->lock);
		tombolo_window_check(window, U64_MAX, &woke);
		bits = window->pending;
		window->pending = 0;
		hung_up = link->hung_up;
		spin_unlock_irq(&vector->lock);
		local_bh_enable();
		if (bits)
			break;
		if (hung_up)
			return 0;
		if (file->f_flags & O_NONBLOCK)
			return -EAGAIN;
		err = wait_event_interruptible(window->wq, READ_ONCE(window->pending) ||
					       READ_ONCE(link->hung_up));
		if (err)
			return err;
	}
	if (put_user(bits, (u64 __user *)buf)) {
		spin_lock_irq(&vector->lock);
		window->pending |= bits;
		spin_unlock_irq(&vector->lock);
		wake_up_all(&window->wq);
		return -EFAULT;
	}
	return sizeof(bits);
}

static ssize_t window_write(struct file *file, const char __user *buf, size_t count, loff_t *pos)
{
	struct window *window = file->private_data;
	u64 bits;

	if (count != sizeof(bits))
		return -EINVAL;
	if (get_user(bits, (const u64 __user *)buf))
		return -EFAULT;
	if (bits & ~all_channels(window))
		return -EINVAL;
	if (bits)
		tombolo_window_notify(window, bits);
	return sizeof(bits);
}

static __poll_t window_poll(struct file *file, poll_table *wait)
{
	struct window *window = file->private_data;
	struct vector *vector = window->link->vector;
	unsigned int woke = 0;
	__poll_t events = 0;

	poll_wait(file, &window->wq, wait);
	local_bh_disable();
	spin_lock_irq(&vector->lock);
	tombolo_window_check(window, U64_MAX, &woke);
	if (window->pending)
		events |= EPOLLIN | EPOLLRDNORM;
	if (window->link->hung_up)
		events |= EPOLLIN | EPOLLRDNORM | EPOLLHUP;
	spin_unlock_irq(&vector->lock);
	local_bh_enable();
	return events;
}

static long window_eventfd(struct window *window, const struct tombolo_eventfd __user *user)
{
	struct vector *vector = window->link->vector;
	struct eventfd_ctx *ctx = NULL;
	struct tombolo_eventfd arg;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	if (arg.channel >= window->is.channels || arg.fd < -1)
		return -EINVAL;
	if (arg.fd >= 0) {
		ctx = eventfd_ctx_fdget(arg.fd);
		if (IS_ERR(ctx))
			return PTR_ERR(ctx);
	}

	spin_lock_irq(&vector->lock);
	/* What is pending goes where notifications go from now on. */
	if (ctx && (window->link->hung_up || window->pending & BIT_ULL(arg.channel)))
		tombolo_signal(ctx);
	if (ctx)
		window->pending &= ~BIT_ULL(arg.channel);
	swap(ctx, window->channel[arg.channel].eventfd);
	spin_unlock_irq(&vector->lock);

	if (ctx)
		eventfd_ctx_put(ctx);
	return 0;
}

static long window_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	switch (cmd) {
	case TOMBOLO_IOC_EVENTFD:
		return window_eventfd(file->private_data, (void __user *)arg);
	default:
		return -ENOTTY;
	}
}

/* Notes that the window may be written from now on, from @at to before @end of @vma. */
static void window_soil(struct window *window, struct vm_area_struct *vma, unsigned long at,
			unsigned long end)
{
	u64 from = window->is.offset + PFN_PHYS(vma->vm_pgoff) + (at - vma->vm_start);

	tombolo_link_soil(window->link, from, from + (end - at));
}

/*
 * Pages are mapped here and not by mmap, and only while the device lives:
 * tombolo_remove() says why. vmf_insert_pfn() takes the memory type that
 * probing reserved: write-back.
 */
static vm_fault_t window_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct window *window = vma->vm_private_data;
	struct tombolo *dev = window->half->dev;
	unsigned long around = FAULT_AROUND * PAGE_SIZE;
	unsigned long at = max(round_down(vmf->address, around), vma->vm_start);
	unsigned long end = min(round_down(vmf->address, around) + around, vma->vm_end);
	unsigned long pfn = PHYS_PFN(dev->phys + window->half->offset + window->is.offset) +
			    vma->vm_pgoff;
	vm_fault_t result = VM_FAULT_SIGBUS;
	int idx = srcu_read_lock(&tombolo_srcu);

	if (tombolo_is_alive(dev)) {
		if (window->writable)
			window_soil(window, vma, at, end);
		result = vmf_insert_pfn(vma, vmf->address & PAGE_MASK,
					pfn + PHYS_PFN(vmf->address - vma->vm_start));
		for (; result == VM_FAULT_NOPAGE && at < end; at += PAGE_SIZE)
			if (vmf_insert_pfn(vma, at, pfn + PHYS_PFN(at - vma->vm_start)) !=
			    VM_FAULT_NOPAGE)
				break;
	}
	srcu_read_unlock(&tombolo_srcu, idx);
	return result;
}

static const struct vm_operations_struct window_vm_ops = {
	.fault = window_fault,
};

static int window_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct window *window = file->private_data;
	unsigned long pages = PHYS_PFN(window->is.length);
	unsigned long clear = VM_MAYEXEC;

	if (!(vma->vm_flags & VM_SHARED) || vma->vm_flags & VM_EXEC)
		return -EINVAL;
	if (vma->vm_pgoff >= pages || vma_pages(vma) > pages - vma->vm_pgoff)
		return -EINVAL;
	if (!window->writable) {
		if (vma->vm_flags & VM_WRITE)
			return -EACCES;
		clear |= VM_MAYWRITE;
	}
	vm_flags_mod(vma, VM_PFNMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP, clear);
	vma->vm_ops = &window_vm_ops;
	vma->vm_private_data = window;
	return 0;
}

/* Tells the peer that nobody has the window any more. */
static void window_bequeath(struct window *window)
{
	const struct half *half = window->half;
	int idx = srcu_read_lock(&tombolo_srcu);
	unsigned int i;

	if (window->is.below && tombolo_is_alive(half->dev)) {
		u8 *mem = half->dev->mem + half->offset + window->is.offset;

		for (i = 0; i < ARRAY_SIZE(window->is.state); i++) {
			u64 at = window->is.offset + window->is.state[i];

			if (READ_ONCE(mem[window->is.state[i]]) >= window->is.below)
				continue;
			tombolo_link_soil(window->link, at, at + 1);
			WRITE_ONCE(mem[window->is.state[i]], window->is.closed);
		}
	}
	srcu_read_unlock(&tombolo_srcu, idx);
	if (window->is.channels)
		tombolo_window_notify(window, all_channels(window));
}

static void window_free(struct window *window)
{
	struct link *link = window->link;
	unsigned int i;

	if (window->is.channels) {
		spin_lock_irq(&link->vector->lock);
		list_del(&window->on_vector);
		spin_unlock_irq(&link->vector->lock);
	}
	mutex_lock(&link->lock);
	list_del(&window->on_link);
	bitmap_clear(link->channels, window->is.channel, window->is.channels);
	WRITE_ONCE(link->count, link->count - 1);
	WRITE_ONCE(link->departures, link->departures + 1);
	mutex_unlock(&link->lock);
	wake_up_all(&link->wq);

	for (i = 0; i < window->is.channels; i++)
		if (window->channel[i].eventfd)
			eventfd_ctx_put(window->channel[i].eventfd);
	tombolo_link_put(link);
	kfree(window);
}

static int window_release(struct inode *inode, struct file *file)
{
	struct window *window = file->private_data;

	window_bequeath(window);
	window_free(window);
	return 0;
}

static const struct file_operations window_fops = {
	.owner = THIS_MODULE,
	.release = window_release,
	.read = window_read,
	.write = window_write,
	.poll = window_poll,
	.mmap = window_mmap,
	.unlocked_ioctl = window_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

/* Returns a reference to the window that @fd is, if it is one. */
struct file *tombolo_get_window(int fd)
{
	struct file *file = fget(fd);

	if (!file)
		return ERR_PTR(-EBADF);
	if (file->f_op != &window_fops) {
		fput(file);
		return ERR_PTR(-EINVAL);
	}
	return file;
}

struct window *tombolo_window_of(struct file *file)
{
	return file->private_data;
}

static bool window_is_valid(const struct tombolo_window *is, const struct half *half)
{
	bool writable = !(is->flags & (TOMBOLO_WINDOW_PEER | TOMBOLO_WINDOW_READ_ONLY));
	unsigned int i;

	if (is->flags & ~(TOMBOLO_WINDOW_PEER | TOMBOLO_WINDOW_READ_ONLY))
		return false;
	if (!is->length || !PAGE_ALIGNED(is->offset) || !PAGE_ALIGNED(is->length) ||
	    is->offset >= half->length || is->length > half->length - is->offset)
		return false;
	if (is->channels > TOMBOLO_WINDOW_CHANNELS || is->channel > TOMBOLO_CHANNELS ||
	    is->channels > TOMBOLO_CHANNELS - is->channel)
		return false;
	if (is->below > U8_MAX || is->closed > U8_MAX || (is->below && !writable))
		return false;
	for (i = 0; is->below && i < ARRAY_SIZE(is->state); i++)
		if (is->state[i] >= is->length)
			return false;
	return true;
}

/* Under link->lock, within tombolo_srcu. */
static int window_enter(struct link *link, struct window *window)
{
	const struct tombolo_window *is = &window->is;
	unsigned int i, end = is->channel + is->channels;

	if (link->hung_up || !tombolo_is_alive(link->own.dev) || !tombolo_is_alive(link->peer.dev))
		return -ENODEV;
	if (find_next_bit(link->channels, end, is->channel) < end)
		return -EBUSY;
	bitmap_set(link->channels, is->channel, is->channels);
	list_add(&window->on_link, &link->windows);
	WRITE_ONCE(link->count, link->count + 1);
	for (i = 0; i < is->channels; i++) {
		window->channel[i].seen = le32_to_cpu(READ_ONCE(*peer_sequence(window, i)));
		window->channel[i].notified = le32_to_cpu(READ_ONCE(*own_sequence(window, i)));
	}
	if (is->channels) {
		spin_lock_irq(&link->vector->lock);
		list_add(&window->on_vector, &link->vector->windows);
		spin_unlock_irq(&link->vector->lock);
	}
	return 0;
}

long tombolo_window_open(struct link *link, const struct tombolo_window __user *user)
{
	struct tombolo_window is;
	struct window *window;
	struct half *half;
	struct file *file;
	int fd, err, idx;

	if (copy_from_user(&is, user, sizeof(is)))
		return -EFAULT;
	half = is.flags & TOMBOLO_WINDOW_PEER ? &link->peer : &link->own;
	if (!window_is_valid(&is, half))
		return -EINVAL;
	window = kzalloc(struct_size(window, channel, is.channels), GFP_KERNEL_ACCOUNT);
	if (!window)
		return -ENOMEM;
	window->link = link;
	window->half = half;
	window->is = is;
	window->writable = !(is.flags & (TOMBOLO_WINDOW_PEER | TOMBOLO_WINDOW_READ_ONLY));
	spin_lock_init(&window->notify_lock);
	init_waitqueue_head(&window->wq);

	fd = get_unused_fd_flags(O_CLOEXEC);
	if (fd < 0) {
		kfree(window);
		return fd;
	}
	idx = srcu_read_lock(&tombolo_srcu);
	mutex_lock(&link->lock);
	err = window_enter(link, window);
	mutex_unlock(&link->lock);
	srcu_read_unlock(&tombolo_srcu, idx);
	if (err) {
		kfree(window);
		goto err_fd;
	}
	kref_get(&link->ref);

	file = anon_inode_getfile("[tombolo-window]", &window_fops, window, O_RDWR);
	if (IS_ERR(file)) {
		err = PTR_ERR(file);
		window_free(window);
		goto err_fd;
	}
	/* Mappings are then found through their device's node, apart from other anonymous files. */
	file->f_mapping = half->node->f_mapping;
	fd_install(fd, file);
	return fd;

err_fd:
	put_unused_fd(fd);
	return err;
}
