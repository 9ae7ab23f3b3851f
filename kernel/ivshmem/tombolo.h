/* SPDX-License-Identifier: GPL-2.0 */
/*
 * How the driver is built
 *
 * device.c	a PCI device and its node
 * vector.c	its interrupts, and how many are too many
 * link.c	links
 * window.c	windows
 * net.c	network interfaces
 * port.c	their links
 * pipe.c	messages that cross these
 * frame.c	headers of frames
 *
 * References: a window holds its link, a link holds the open files of its
 * nodes, and these hold their devices. So nothing is freed before its users are
 * gone. Unplugging frees nothing: it marks the device dead, hangs up the links,
 * removes the mappings and leaves the rest to the last close.
 *
 * Code that uses or maps a device's memory or registers does so within
 * tombolo_srcu, and only if the device is not dead. Unplugging marks the device
 * dead and waits for such code (SRCU). In interrupts vector->lock and
 * link->hung_up have that role, and while frames are moved RCU and
 * link->hung_up have it.
 *
 * Locks, outermost first:
 *
 * tombolo_links_lock	the list of links
 * link->lock		a link's windows and channels
 * vector->lock		the windows that a vector wakes, their events and interfaces
 *
 * window->notify_lock is within all of these and within the lock of a queue of
 * frames, which soft interrupts take: so these are off under it. rtnl_lock is
 * outside of vector->lock and never taken together with the two above it.
 */
#ifndef _TOMBOLO_H
#define _TOMBOLO_H

#include <linux/bitmap.h>
#include <linux/fs.h>
#include <linux/interrupt.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/spinlock.h>
#include <linux/srcu.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "compat.h"
#include "uapi/tombolo_ivshmem.h"

#define TOMBOLO_VECTORS	32

/* The first channels of a connection: for data, and for space. */
#define TOMBOLO_NET_CHANNELS	2

struct vector {
	spinlock_t lock;
	struct list_head windows;
	unsigned int irq;
	u64 interrupts;
	u64 storms;
	/* See vector.c. */
	unsigned long storm_period_end;
	unsigned long last_storm;
	unsigned long penalty;
	unsigned int spent;
	u64 took;
	bool closed;
	bool stopping;
	struct delayed_work rearm;
};

struct tombolo {
	struct kref ref;
	struct pci_dev *pdev;
	struct miscdevice misc;
	char name[16];
	int id;

	bool dead;		/* see tombolo_srcu */
	u8 __iomem *regs;
	resource_size_t phys;
	resource_size_t size;
	u8 *mem;		/* all of the shared memory, write-back */
	bool write_back;

	unsigned int vectors;
	struct vector *vector;
};

/* One side of a link: a range of a device's memory (region half). */
struct half {
	struct file *node;
	struct tombolo *dev;
	u64 offset;
	u64 length;
};

struct link {
	struct kref ref;
	struct list_head node;	/* of the list of links */
	struct half own;
	struct half peer;
	struct file *doorbell_node;
	struct tombolo *doorbell;
	struct vector *vector;
	u32 target;		/* whom tombolo_notify() notifies; see link_set_target() */

	struct mutex lock;
	struct list_head windows;
	unsigned int count;
	u32 departures;
	DECLARE_BITMAP(channels, TOMBOLO_CHANNELS);
	unsigned long *dirty;	/* pages of our half that may not be zero */
	wait_queue_head_t wq;
	bool hung_up;		/* written under vector->lock */
};

struct channel {
	u32 seen;		/* the peer's sequence word when we last looked */
	u32 notified;		/* our own sequence word */
	struct eventfd_ctx *eventfd;
};

struct tombolo_netdev;

struct window {
	struct link *link;
	struct half *half;
	struct list_head on_link;
	struct list_head on_vector;
	struct tombolo_window is;
	bool writable;
	spinlock_t notify_lock;
	wait_queue_head_t wq;
	u64 pending;		/* under vector->lock */
	unsigned int from;	/* likewise: the channel that the next look begins with */
	struct tombolo_netdev *net;	/* likewise: the interface that its first two channels wake */
	struct channel channel[];
};

/* Encodes whom to notify as the device's register wants it. */
static inline u32 tombolo_whom(u16 peer, u16 vector)
{
	return (u32)peer << 16 | vector;
}

extern struct srcu_struct tombolo_srcu;

static inline bool tombolo_is_alive(const struct tombolo *dev)
{
	return !READ_ONCE(dev->dead);
}

/* device.c */
struct file *tombolo_get_node(int fd);
struct tombolo *tombolo_of_node(struct file *node);

/* vector.c */
int tombolo_vectors_start(struct tombolo *dev);
void tombolo_vectors_resume(struct tombolo *dev);
void tombolo_vectors_stop(struct tombolo *dev);
void tombolo_notify(struct tombolo *doorbell, u32 whom);
bool tombolo_vector_storms(struct vector *vector);

/* link.c */
void tombolo_link_soil(struct link *link, u64 from, u64 to);
long tombolo_link_open(struct file *node, const struct tombolo_link __user *arg);
void tombolo_link_put(struct link *link);
void tombolo_links_revoke(struct tombolo *dev);

/* window.c */
struct file *tombolo_get_window(int fd);
struct window *tombolo_window_of(struct file *file);
void tombolo_window_notify(struct window *window, u64 which);
long tombolo_window_open(struct link *link, const struct tombolo_window __user *arg);
bool tombolo_window_check(struct window *window, u64 until, unsigned int *woke);
void tombolo_window_hang_up(struct window *window);

/* net.c and port.c */
int tombolo_net_start(void);
void tombolo_net_stop(void);
bool tombolo_net_kick(struct tombolo_netdev *net);

#endif /* _TOMBOLO_H */
