/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note OR MIT */
/*
 * tombolo_ivshmem: shared memory between virtual machines, in windows
 *
 * There are three kinds of file descriptors. Each is made from the one before
 * it, and can do less:
 *
 *   node    /dev/tomboloN, one for each ivshmem device. Its owners (the group
 *           that udev gives it) reach all of the device. It is made for one
 *           program, the broker.
 *   link    what two machines share: a region half that we write, a region
 *           half that the peer writes, and how each notifies the other. Made
 *           from a node by TOMBOLO_IOC_LINK.
 *   window  a range of one of the halves, with event channels of its own. Made
 *           from a link by TOMBOLO_IOC_WINDOW. The broker passes it to a
 *           program (SCM_RIGHTS), which can map the range, wait and notify,
 *           and nothing else.
 *
 * Halves and sequence words
 * -------------------------
 * The first page of each half is reserved. Its upper part belongs to the driver
 * of the machine that writes the half: 512 *sequence words*, little-endian
 * 32-bit counters at TOMBOLO_SEQUENCE_OFFSET, one for each event channel of the
 * link. To notify channel c is to increment sequence word c in our own half and
 * then to write to the peer's doorbell. The peer's driver compares our words
 * with those that it saw before. So a few interrupt vectors carry many
 * channels, and nobody writes the other's memory. The driver reads nothing
 * else that the peer wrote. The lower part of the page is the broker's.
 *
 * A channel has one number at both ends and goes both ways.
 *
 * Node
 * ----
 * TOMBOLO_IOC_INFO   describes the device. It counts interrupts, and how often
 *	one of its vectors was closed for a while because too many came, since
 *	the driver was bound. ENODEV: unplugged. Everybody may read the same in
 *	/sys/class/misc/tomboloN/{interrupts,storms,write_back}.
 *
 * TOMBOLO_IOC_LINK   on the node that holds our half; returns a descriptor of
 *	the link. If a link with these halves and this wait_vector exists, that
 *	one is returned, so that a broker that was restarted finds its links;
 *	from now on it notifies as this call says. A link lasts until it has
 *	neither descriptors nor windows.
 *	EBUSY: our half overlaps that of another link, or the link was hung up
 *	and is not gone yet. EINVAL: a half is empty, not of whole pages or not
 *	within its device, the doorbell has no such vector, flags are not 0.
 *	EBADF, EINVAL: a descriptor is not the driver's. ENODEV: unplugged.
 *	EPERM: the node was not opened for writing.
 *
 * Link
 * ----
 * TOMBOLO_IOC_WINDOW   makes a window and returns its descriptor. Channels
 *	start without an event: earlier notifications are forgotten. EBUSY: a
 *	channel is taken. EINVAL: the range is empty, not of whole pages or not
 *	within the half; more than TOMBOLO_WINDOW_CHANNELS channels, or beyond
 *	TOMBOLO_CHANNELS; a state beyond a byte, beyond the window, or in one
 *	that cannot be written; unknown flags. ENODEV: hung up, or unplugged.
 *
 * TOMBOLO_IOC_WINDOWS   lists the windows that exist. `count` is the room in
 *	entries, and comes back as the number of windows, which may be greater.
 *
 * TOMBOLO_IOC_NOTIFY   sets whom the link notifies from now on: the host may
 *	take a doorbell away while a link lasts, and give another. The new peer
 *	is notified once, in place of earlier notifications that may be lost.
 *	TOMBOLO_NOBODY: no doorbell is written to; sequence words are counted
 *	all the same, and a peer that polls or reads finds them. ENODEV: hung
 *	up, or unplugged.
 *
 * TOMBOLO_IOC_CLEAR   zeroes a range of our half, in whole pages, for the next
 *	window of it; the caller makes sure that no window has it. It costs as
 *	much as there was to write: pages that no window could write since they
 *	were cleared are left alone. EINVAL: the range is empty, not of whole
 *	pages or not within the half. ENODEV: unplugged.
 *
 * TOMBOLO_IOC_HANG_UP   says that the peer is gone. Waiters on all windows are
 *	woken, notifications do nothing from now on, memory stays mapped. It
 *	cannot be undone.
 *
 * poll   readable after a window was closed, until the next
 *	TOMBOLO_IOC_WINDOWS by this open file; POLLHUP once the link was hung up
 *	or unplugged; POLLPRI during an interrupt storm at the vector where the
 *	link waits, which other links may share. It wakes each time that
 *	interrupts have to be held back.
 *
 * Window
 * ------
 * mmap   MAP_SHARED only, within the window, never executable. Write-back
 *	cached where the processor allows it (TOMBOLO_INFO_WRITE_BACK). A window
 *	of the peer's half, or made read-only, maps for reading (EACCES), and
 *	mprotect cannot change that. After the device was unplugged, every
 *	access faults with SIGBUS.
 *
 * read   8 bytes: one bit for each channel that was notified since the last
 *	read, in the processor's byte order, bit 0 for the first. Waits for one
 *	unless O_NONBLOCK (EAGAIN). Returns 0 at the end: hung up, or unplugged,
 *	and nothing left.
 *
 * poll   readable if read would not wait; POLLHUP as for the link.
 *
 * write  8 bytes, the same bits: notifies these channels. Does not block. Does
 *	nothing without a peer. EINVAL: a bit beyond the window's channels.
 *
 * TOMBOLO_IOC_EVENTFD   sends the channel's notifications to an eventfd from
 *	now on, and not to read; fd -1 for read again. The eventfd is signalled
 *	at the end, too. EBADF, EINVAL: no eventfd. EINVAL: no such channel.
 *
 * last close   when neither a descriptor nor a mapping of the window is left,
 *	whatever the reason, each state byte less than `below` becomes `closed`,
 *	and all channels of the window are notified: so the peer learns of a
 *	program that was killed. Channels and range are free again after that;
 *	poll on the link says when.
 */
#ifndef _UAPI_TOMBOLO_IVSHMEM_H
#define _UAPI_TOMBOLO_IVSHMEM_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Changes if an older driver would mislead a program, or lack what it needs. */
#define TOMBOLO_UAPI_VERSION	2

#define TOMBOLO_SEQUENCE_OFFSET	0x800
#define TOMBOLO_CHANNELS	512	/* of a link */
#define TOMBOLO_WINDOW_CHANNELS	64	/* of a window */

/* It has interrupts: an ivshmem-doorbell, not an ivshmem-plain device. */
#define TOMBOLO_INFO_DOORBELL	(1U << 0)
/* Its memory is mapped write-back; if not, everything works, but slowly. */
#define TOMBOLO_INFO_WRITE_BACK	(1U << 1)

struct tombolo_info {
	__u32 version;		/* TOMBOLO_UAPI_VERSION */
	__u32 flags;		/* TOMBOLO_INFO_* */
	__u64 size;		/* bytes of shared memory */
	__u32 peer;		/* our number among those that can be notified */
	__u32 vectors;		/* number of vectors at which we can be notified */
	__u64 interrupts;	/* how many came */
	__u64 storms;		/* how often a vector was closed for a while */
	__u64 reserved[3];	/* 0 */
};

struct tombolo_link {
	__u64 own_offset;	/* our half, in this node's device */
	__u64 own_length;
	__u64 peer_offset;	/* the peer's half, in the device of peer_fd */
	__u64 peer_length;
	__s32 peer_fd;		/* a node */
	__s32 doorbell_fd;		/* a node with TOMBOLO_INFO_DOORBELL */
	__u16 notify_peer;	/* whom to notify, or TOMBOLO_NOBODY */
	__u16 notify_vector;	/* at which of its vectors */
	__u16 wait_vector;	/* where the peer notifies us */
	__u16 flags;		/* 0 */
};

#define TOMBOLO_NOBODY	0xffff

struct tombolo_notify {
	__u16 peer;		/* whom to notify, or TOMBOLO_NOBODY */
	__u16 vector;		/* at which of its vectors */
};

/* A range of the peer's half, not of ours. */
#define TOMBOLO_WINDOW_PEER	(1U << 0)
/* Maps for reading only. Implied by TOMBOLO_WINDOW_PEER. */
#define TOMBOLO_WINDOW_READ_ONLY	(1U << 1)

struct tombolo_window {
	__u64 cookie;		/* the caller's own, for TOMBOLO_IOC_WINDOWS */
	__u64 offset;		/* within the half */
	__u64 length;
	__u32 flags;		/* TOMBOLO_WINDOW_* */
	__u32 channel;		/* the first of its channels */
	__u32 channels;		/* how many */
	__u16 below;		/* states below this are open; 0: no state bytes */
	__u16 closed;		/* the state after the last close */
	__u32 state[2];		/* where they are, within the window */
};

struct tombolo_windows {
	__u64 entries;		/* address of struct tombolo_window[count] */
	__u32 count;
	__u32 reserved;		/* 0 */
};

struct tombolo_range {
	__u64 offset;		/* within our half */
	__u64 length;
};

struct tombolo_eventfd {
	__u32 channel;		/* 0 is the first of the window */
	__s32 fd;
};

/* An interface. Names and addresses as the network has them. */
struct tombolo_net {
	__u8 name[16];		/* may have %d; comes back as the interface is called */
	__u8 address[6];
	__u16 reserved;		/* 0 */
	__u32 mtu;
	__u32 index;		/* comes back */
	__u64 takes;		/* comes back: the features it can take, TOMBOLO_NET_* */
};

/* Frames whose checksum has yet to be computed. */
#define TOMBOLO_NET_CHECKSUM	(1U << 0)
/* Segments of TCP over IPv4, over IPv6. */
#define TOMBOLO_NET_TSO4	(1U << 1)
#define TOMBOLO_NET_TSO6	(1U << 2)
/* The same with congestion marks. */
#define TOMBOLO_NET_ECN	(1U << 3)
/* UDP datagrams that have yet to be divided. */
#define TOMBOLO_NET_USO	(1U << 4)

struct tombolo_net_link {
	__s32 own_fd;		/* a window of our half, with our segment */
	__s32 peer_fd;		/* a window of the peer's half, with its segment */
	__u64 own_segment;	/* offset in that window */
	__u64 peer_segment;
	__u64 tail;		/* position up to which we have written */
	__u64 head_seen;	/* position up to which the peer has read that */
	__u64 notified_data;	/* the wait word that we notified for last */
	__u64 head;		/* position up to which we have read */
	__u64 tail_seen;	/* position up to which the peer had written */
	__u64 notified_space;	/* the wait word that we notified for last */
	__u64 gives;		/* features that the peer takes: TOMBOLO_NET_* */
	__u64 takes;		/* features that we said we take */
	__u32 gives_most;	/* the longest frame that the peer takes */
	__u32 takes_most;	/* the longest that we said we take */
	__u32 state;		/* offset of its state byte in the peer's window */
	__u32 over;		/* the lowest state in which the peer is gone */
	__u8 source[6];		/* the peer's address */
	__u16 flags;		/* TOMBOLO_NET_ANY_SOURCE */
};

/* Frames may come from other addresses than the peer's. */
#define TOMBOLO_NET_ANY_SOURCE	(1U << 0)

struct tombolo_net_turn {
	__u64 tail;		/* as in struct tombolo_net_link */
	__u64 head_seen;
	__u64 notified_data;
	__u64 head;
	__u64 tail_seen;
	__u64 notified_space;
	__u32 ended;		/* TOMBOLO_NET_ENDED_*; 0: it had not ended */
	__u32 clause;		/* the clause that a corrupt ring broke: R-... */
};

#define TOMBOLO_NET_ENDED_CLOSED	1	/* the peer closed */
#define TOMBOLO_NET_ENDED_ABORTED	2	/* the peer aborted */
#define TOMBOLO_NET_ENDED_GONE	3	/* the peer's window was closed */
#define TOMBOLO_NET_ENDED_CORRUPT	4	/* the peer's ring is corrupt */
#define TOMBOLO_NET_ENDED_REVOKED	5	/* hung up, or unplugged */

/* Counters of each direction, and of both together. Those without a name are 0. */
#define TOMBOLO_NET_FRAMES	0
#define TOMBOLO_NET_BYTES	1
#define TOMBOLO_NET_SEGMENTS	2	/* frames that have yet to be divided */
#define TOMBOLO_NET_FULL	3	/* times that the queue was stopped */
#define TOMBOLO_NET_SHORT	4	/* from here on: frames dropped */
#define TOMBOLO_NET_LONG	5
#define TOMBOLO_NET_HEADER	6
#define TOMBOLO_NET_FEATURE	7
#define TOMBOLO_NET_SOURCE	8
#define TOMBOLO_NET_STALE	9	/* the link had ended */
#define TOMBOLO_NET_REFUSED	10	/* the kernel refused its header */
#define TOMBOLO_NET_MEMORY	11
#define TOMBOLO_NET_NOTIFICATIONS	12	/* sent to the peer */
#define TOMBOLO_NET_KICKS	0	/* notifications that came */
#define TOMBOLO_NET_POLLS	1
#define TOMBOLO_NET_REARMS	2	/* something came while notifications were being turned on */
#define TOMBOLO_NET_TIMEOUTS	3
#define TOMBOLO_NET_LINKS	4
#define TOMBOLO_NET_CORRUPT	5	/* links that ended with a corrupt ring */

struct tombolo_net_stat {
	__u64 sent[16];
	__u64 received[16];
	__u64 both[8];
};

/*
 * Where an interface is now: it may have been moved and renamed. The call
 * returns a descriptor of its network namespace and needs CAP_NET_ADMIN there.
 */
struct tombolo_net_place {
	__u8 name[16];
	__u32 index;
	__u32 reserved;		/* 0 */
};

#define TOMBOLO_IOC_MAGIC	0xE7
#define TOMBOLO_IOC_INFO	_IOR(TOMBOLO_IOC_MAGIC, 0, struct tombolo_info)
#define TOMBOLO_IOC_LINK	_IOW(TOMBOLO_IOC_MAGIC, 1, struct tombolo_link)
#define TOMBOLO_IOC_WINDOW	_IOW(TOMBOLO_IOC_MAGIC, 2, struct tombolo_window)
#define TOMBOLO_IOC_WINDOWS	_IOWR(TOMBOLO_IOC_MAGIC, 3, struct tombolo_windows)
#define TOMBOLO_IOC_HANG_UP	_IO(TOMBOLO_IOC_MAGIC, 4)
#define TOMBOLO_IOC_EVENTFD	_IOW(TOMBOLO_IOC_MAGIC, 5, struct tombolo_eventfd)
#define TOMBOLO_IOC_NOTIFY	_IOW(TOMBOLO_IOC_MAGIC, 6, struct tombolo_notify)
#define TOMBOLO_IOC_CLEAR	_IOW(TOMBOLO_IOC_MAGIC, 7, struct tombolo_range)
#define TOMBOLO_IOC_NET	_IOWR(TOMBOLO_IOC_MAGIC, 8, struct tombolo_net)
#define TOMBOLO_IOC_NET_LINK	_IOW(TOMBOLO_IOC_MAGIC, 9, struct tombolo_net_link)
#define TOMBOLO_IOC_NET_UNLINK	_IOR(TOMBOLO_IOC_MAGIC, 10, struct tombolo_net_turn)
#define TOMBOLO_IOC_NET_STAT	_IOR(TOMBOLO_IOC_MAGIC, 11, struct tombolo_net_stat)
#define TOMBOLO_IOC_NET_PLACE	_IOR(TOMBOLO_IOC_MAGIC, 12, struct tombolo_net_place)

#endif /* _UAPI_TOMBOLO_IVSHMEM_H */
