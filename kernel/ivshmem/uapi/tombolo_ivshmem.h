/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note OR MIT */
/*
 * tombolo_ivshmem: shared memory between virtual machines, in slices
 *
 * Three kinds of file descriptors, each of which can do less than the one it
 * comes from:
 *
 *   node   /dev/tomboloN, one for each ivshmem device. Its owners (the group
 *          that udev gives it) reach all of the device. Made for one program,
 *          the broker.
 *   link   what two machines share: a part that we write, a part that the
 *          peer writes, and how each rings the other. From a node, by
 *          TOMBOLO_IOC_LINK.
 *   slice  a range of one of the parts, with event channels of its own. From a
 *          link, by TOMBOLO_IOC_SLICE. The broker passes it to a program
 *          (SCM_RIGHTS), which can map the range, wait and ring, and nothing
 *          else.
 *
 * Parts and marks
 * ---------------
 * Of each part the upper half of the first page belongs to the driver of the
 * machine that writes the part: 512 *marks*, little-endian 32-bit counters at
 * TOMBOLO_MARKS_OFFSET, one for each event channel of the link. To ring
 * channel c is to increment mark c in our own part and then to ring the
 * doorbell of the peer, whose driver compares our marks with those that it saw
 * before. So a few interrupt vectors carry many channels, and nobody writes
 * the other's memory. The marks are all that the driver ever reads of what the
 * peer wrote. The lower half of the page is the broker's.
 *
 * A channel has one number at both ends and goes both ways.
 *
 * Node
 * ----
 * TOMBOLO_IOC_INFO   what the device is. It counts interrupts, and how often
 *	one of its vectors was closed for a while because too many came, since
 *	the driver was bound. ENODEV: unplugged. The same for everybody to read:
 *	/sys/class/misc/tomboloN/{interrupts,storms,write_back}.
 *
 * TOMBOLO_IOC_LINK   on the node that holds our part; returns a descriptor of
 *	the link. A link with these parts and this wait_vector that exists
 *	already is returned again, so that a broker that was restarted finds its
 *	links; it rings as said here from now on. A link lasts until it has
 *	neither descriptors nor slices.
 *	EBUSY: our part overlaps that of another link, or the link was hung up
 *	and is not gone yet. EINVAL: a part is empty, not of whole pages or not
 *	within its device, the bell has no such vector, flags are not 0.
 *	EBADF, EINVAL: a descriptor is none of ours. ENODEV: unplugged.
 *	EPERM: the node was not opened for writing.
 *
 * Link
 * ----
 * TOMBOLO_IOC_SLICE   makes a slice and returns its descriptor. Channels start
 *	without an event: rings from before are forgotten. EBUSY: a channel is
 *	taken. EINVAL: the range is empty, not of whole pages or not within the
 *	part; more than TOMBOLO_SLICE_CHANNELS channels, or beyond
 *	TOMBOLO_CHANNELS; a state beyond a byte, beyond the slice, or in one
 *	that cannot be written; unknown flags. ENODEV: hung up, or unplugged.
 *
 * TOMBOLO_IOC_SLICES   lists the slices that exist. `count` is the room in
 *	entries, and comes back as the number of slices, which may be greater.
 *
 * TOMBOLO_IOC_RING   whom the link rings from now on, for the host may take a
 *	doorbell away while a link lasts, and give another. Rings of before are
 *	made up for: the new one is rung once. TOMBOLO_NOBODY: no doorbell is
 *	rung; marks are counted all the same, and a peer that polls or reads
 *	finds them. ENODEV: hung up, or unplugged.
 *
 * TOMBOLO_IOC_CLEAR   makes a range of our part zero, in whole pages, for the
 *	next slice of it; the maker sees to it that nobody has one. It costs as
 *	much as there was to write: pages that no slice had writable since they
 *	were cleared are left alone. EINVAL: the range is empty, not of whole
 *	pages or not within the part. ENODEV: unplugged.
 *
 * TOMBOLO_IOC_HANG_UP   the peer is gone. Waiters on all slices are told, rings
 *	do nothing from now on, memory stays mapped. There is no way back.
 *
 * poll   readable after a slice went, until the next TOMBOLO_IOC_SLICES by
 *	this open file; POLLHUP once the link was hung up or unplugged; POLLPRI
 *	while interrupts come without end where the link waits, which other
 *	links may do as well. It wakes each time that they have to be held back.
 *
 * Slice
 * -----
 * mmap   MAP_SHARED only, within the slice, never executable. Write-back
 *	cached where the processor allows it (TOMBOLO_INFO_WRITE_BACK). A slice
 *	of the peer's part, or made read-only, maps for reading (EACCES), and
 *	mprotect cannot change that. After the device was unplugged, every
 *	access faults with SIGBUS.
 *
 * read   8 bytes: one bit for each channel that was rung since the last read,
 *	in the processor's byte order, bit 0 for the first. Waits for one
 *	unless O_NONBLOCK (EAGAIN). 0 at the end: hung up, or unplugged, and
 *	nothing left.
 *
 * poll   readable if read would not wait; POLLHUP as for the link.
 *
 * write  8 bytes, the same bits: rings these channels. Does not block. Without
 *	a peer it does nothing. EINVAL: a bit beyond the slice's channels.
 *
 * TOMBOLO_IOC_EVENTFD   from now on the channel's rings go to an eventfd and
 *	not to read; fd -1 for read again. At the end it is signalled, too.
 *	EBADF, EINVAL: no eventfd. EINVAL: no such channel.
 *
 * last close   when neither a descriptor nor a mapping of the slice is left,
 *	whatever the reason, each state byte less than `below` becomes `closed`,
 *	and all channels of the slice are rung: so the peer hears of a program
 *	that was killed. Channels and range are free again after that; poll on
 *	the link says when.
 */
#ifndef _UAPI_TOMBOLO_IVSHMEM_H
#define _UAPI_TOMBOLO_IVSHMEM_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Changes if a program would be misled by a driver of before, or miss something. */
#define TOMBOLO_UAPI_VERSION	2

#define TOMBOLO_MARKS_OFFSET	0x800
#define TOMBOLO_CHANNELS	512	/* of a link */
#define TOMBOLO_SLICE_CHANNELS	64	/* of a slice */

/* It has interrupts: an ivshmem-doorbell, not an ivshmem-plain device. */
#define TOMBOLO_INFO_BELL	(1U << 0)
/* Its memory is mapped write-back; if not, everything works and crawls. */
#define TOMBOLO_INFO_WRITE_BACK	(1U << 1)

struct tombolo_info {
	__u32 version;		/* TOMBOLO_UAPI_VERSION */
	__u32 flags;		/* TOMBOLO_INFO_* */
	__u64 size;		/* bytes of shared memory */
	__u32 peer;		/* our number among those that can be rung */
	__u32 vectors;		/* ways in which we can be rung */
	__u64 interrupts;	/* that came */
	__u64 storms;		/* how often a vector was closed for a while */
	__u64 reserved[3];	/* 0 */
};

struct tombolo_link {
	__u64 own_offset;	/* our part, in this node's device */
	__u64 own_length;
	__u64 peer_offset;	/* the peer's part, in the device of peer_fd */
	__u64 peer_length;
	__s32 peer_fd;		/* a node */
	__s32 bell_fd;		/* a node with TOMBOLO_INFO_BELL */
	__u16 ring_peer;	/* whom to ring, or TOMBOLO_NOBODY */
	__u16 ring_vector;	/* at which of its vectors */
	__u16 wait_vector;	/* where the peer rings us */
	__u16 flags;		/* 0 */
};

#define TOMBOLO_NOBODY	0xffff

struct tombolo_ring {
	__u16 peer;		/* whom to ring, or TOMBOLO_NOBODY */
	__u16 vector;		/* at which of its vectors */
};

/* A range of the peer's part, not of ours. */
#define TOMBOLO_SLICE_PEER	(1U << 0)
/* Maps for reading only. Implied by TOMBOLO_SLICE_PEER. */
#define TOMBOLO_SLICE_READ_ONLY	(1U << 1)

struct tombolo_slice {
	__u64 cookie;		/* the maker's own, for TOMBOLO_IOC_SLICES */
	__u64 offset;		/* within the part */
	__u64 length;
	__u32 flags;		/* TOMBOLO_SLICE_* */
	__u32 channel;		/* the first of its channels */
	__u32 channels;		/* how many */
	__u16 below;		/* what states are open; 0: no state bytes */
	__u16 closed;		/* what they become at the last close */
	__u32 state[2];		/* where they are, within the slice */
};

struct tombolo_slices {
	__u64 entries;		/* address of struct tombolo_slice[count] */
	__u32 count;
	__u32 reserved;		/* 0 */
};

struct tombolo_range {
	__u64 offset;		/* within our part */
	__u64 length;
};

struct tombolo_eventfd {
	__u32 channel;		/* 0 is the first of the slice */
	__s32 fd;
};

/* An interface. Names and addresses as the network has them. */
struct tombolo_net {
	__u8 name[16];		/* may have %d; comes back as it is called */
	__u8 address[6];
	__u16 reserved;		/* 0 */
	__u32 mtu;
	__u32 index;		/* comes back */
	__u64 takes;		/* comes back: what it can take, TOMBOLO_NET_* */
};

/* Frames whose checksum is to be computed. */
#define TOMBOLO_NET_CHECKSUM	(1U << 0)
/* Segments of TCP over IPv4, over IPv6. */
#define TOMBOLO_NET_TSO4	(1U << 1)
#define TOMBOLO_NET_TSO6	(1U << 2)
/* The same with congestion marks. */
#define TOMBOLO_NET_ECN	(1U << 3)
/* Datagrams of UDP that are to be divided. */
#define TOMBOLO_NET_USO	(1U << 4)

struct tombolo_net_link {
	__s32 own_fd;		/* a slice of our part, with our segment */
	__s32 peer_fd;		/* a slice of the peer's part, with its segment */
	__u64 own_segment;	/* where in that slice */
	__u64 peer_segment;
	__u64 tail;		/* how far we have written */
	__u64 head_seen;	/* how far the peer has read of that */
	__u64 rung_data;	/* the wait word that we rang for last */
	__u64 head;		/* how far we have read */
	__u64 tail_seen;	/* how far the peer had written */
	__u64 rung_space;	/* the wait word that we rang for last */
	__u64 gives;		/* what the peer takes: TOMBOLO_NET_* */
	__u64 takes;		/* what we said that we take */
	__u32 gives_most;	/* the longest frame that the peer takes */
	__u32 takes_most;	/* the longest that we said we take */
	__u32 life;		/* where in the peer's slice its state byte is */
	__u32 over;		/* from which state on it is over */
	__u8 source[6];		/* the peer's address */
	__u16 flags;		/* TOMBOLO_NET_ANY_SOURCE */
};

/* Frames may come from other addresses than the peer's. */
#define TOMBOLO_NET_ANY_SOURCE	(1U << 0)

struct tombolo_net_turn {
	__u64 tail;		/* as in struct tombolo_net_link */
	__u64 head_seen;
	__u64 rung_data;
	__u64 head;
	__u64 tail_seen;
	__u64 rung_space;
	__u32 ended;		/* TOMBOLO_NET_ENDED_*; 0: it had not */
	__u32 clause;		/* what a corrupt ring broke: R-... */
};

#define TOMBOLO_NET_ENDED_CLOSED	1	/* the peer closed */
#define TOMBOLO_NET_ENDED_ABORTED	2	/* it gave up */
#define TOMBOLO_NET_ENDED_GONE	3	/* its slice was closed */
#define TOMBOLO_NET_ENDED_CORRUPT	4	/* its ring is */
#define TOMBOLO_NET_ENDED_REVOKED	5	/* hung up, or unplugged */

/* Counters of each direction, and of both. Those without a name are 0. */
#define TOMBOLO_NET_FRAMES	0
#define TOMBOLO_NET_BYTES	1
#define TOMBOLO_NET_SEGMENTS	2	/* frames that are still to be divided */
#define TOMBOLO_NET_FULL	3	/* times that the queue was stopped */
#define TOMBOLO_NET_SHORT	4	/* dropped: from here on */
#define TOMBOLO_NET_LONG	5
#define TOMBOLO_NET_HEADER	6
#define TOMBOLO_NET_FEATURE	7
#define TOMBOLO_NET_SOURCE	8
#define TOMBOLO_NET_STALE	9	/* there was no link any more */
#define TOMBOLO_NET_REFUSED	10	/* the kernel did not take its header */
#define TOMBOLO_NET_MEMORY	11
#define TOMBOLO_NET_BELLS	12	/* that were rung */
#define TOMBOLO_NET_KICKS	0	/* bells that came */
#define TOMBOLO_NET_POLLS	1
#define TOMBOLO_NET_REARMS	2	/* something came just when nobody was to ring */
#define TOMBOLO_NET_TIMEOUTS	3
#define TOMBOLO_NET_LINKS	4
#define TOMBOLO_NET_CORRUPT	5	/* links that ended so */

struct tombolo_net_stat {
	__u64 sent[16];
	__u64 received[16];
	__u64 both[8];
};

/*
 * Where an interface is now: it may have been moved and renamed. The call
 * returns a descriptor of its network namespace. It takes CAP_NET_ADMIN there.
 */
struct tombolo_net_place {
	__u8 name[16];
	__u32 index;
	__u32 reserved;		/* 0 */
};

#define TOMBOLO_IOC_MAGIC	0xE7
#define TOMBOLO_IOC_INFO	_IOR(TOMBOLO_IOC_MAGIC, 0, struct tombolo_info)
#define TOMBOLO_IOC_LINK	_IOW(TOMBOLO_IOC_MAGIC, 1, struct tombolo_link)
#define TOMBOLO_IOC_SLICE	_IOW(TOMBOLO_IOC_MAGIC, 2, struct tombolo_slice)
#define TOMBOLO_IOC_SLICES	_IOWR(TOMBOLO_IOC_MAGIC, 3, struct tombolo_slices)
#define TOMBOLO_IOC_HANG_UP	_IO(TOMBOLO_IOC_MAGIC, 4)
#define TOMBOLO_IOC_EVENTFD	_IOW(TOMBOLO_IOC_MAGIC, 5, struct tombolo_eventfd)
#define TOMBOLO_IOC_RING	_IOW(TOMBOLO_IOC_MAGIC, 6, struct tombolo_ring)
#define TOMBOLO_IOC_CLEAR	_IOW(TOMBOLO_IOC_MAGIC, 7, struct tombolo_range)
#define TOMBOLO_IOC_NET	_IOWR(TOMBOLO_IOC_MAGIC, 8, struct tombolo_net)
#define TOMBOLO_IOC_NET_LINK	_IOW(TOMBOLO_IOC_MAGIC, 9, struct tombolo_net_link)
#define TOMBOLO_IOC_NET_UNLINK	_IOR(TOMBOLO_IOC_MAGIC, 10, struct tombolo_net_turn)
#define TOMBOLO_IOC_NET_STAT	_IOR(TOMBOLO_IOC_MAGIC, 11, struct tombolo_net_stat)
#define TOMBOLO_IOC_NET_PLACE	_IOR(TOMBOLO_IOC_MAGIC, 12, struct tombolo_net_place)

#endif /* _UAPI_TOMBOLO_IVSHMEM_H */
