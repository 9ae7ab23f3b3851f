/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A network interface and its link
 *
 * The clauses R-… and N-… are those of the project's specification, parts 2
 * and 9. What the peer writes is read once into private memory and checked
 * there. Nothing is read from our own segment.
 *
 * A link begins and ends under rtnl_lock, with polling and the queue stopped.
 * Between these, sending is under the queue's lock, and receiving is a poll.
 * Either may end the link by itself: then nobody touches its memory any more,
 * and user space is told to give the link up.
 */
#ifndef _TOMBOLO_NET_H
#define _TOMBOLO_NET_H

#include <linux/if_vlan.h>
#include <linux/netdevice.h>
#include <linux/virtio_net.h>
#include <linux/wait.h>

#include "tombolo.h"

#define NET_HEAD	sizeof(struct virtio_net_hdr_v1)
/* The longest frame: a segment of 64 KiB, addresses, kind, a tag. */
#define NET_FRAME_MOST	(65535 + VLAN_ETH_HLEN)
/* The queue is stopped when there is less room: enough for the longest frame. */
#define NET_ROOM	(2 * sizeof(u64) + NET_HEAD + NET_FRAME_MOST)

/* Our segment and the peer's, and the positions of the pipes. */
struct net_port {
	struct file *own_file;
	struct file *peer_file;
	struct window *own;
	struct window *peer;
	u8 *words;		/* ours */
	u8 *data;
	u64 capacity;
	const u8 *peer_words;
	const u8 *peer_data;
	u64 peer_capacity;
	const u8 *peer_state;	/* the state byte of the peer's window */
	u8 over;
	bool any_source;
	u8 source[ETH_ALEN];
	u64 gives;
	u64 takes;
	u32 gives_most;
	u32 takes_most;

	/* Sending. */
	u64 tail;
	u64 head_seen;
	u64 completed;		/* the same, without what user space had sent */
	u64 notified_data;
	bool owes_notification;

	/* Receiving. */
	u64 head;
	u64 told_head;
	u64 tail_seen;
	u64 notified_space;
	unsigned int idle;	/* polls in a row that found nothing */
	struct page *page;	/* the page for payload, and how much of it is used */
	unsigned int used;
};

struct tombolo_netdev {
	struct net_device *dev;
	struct net_file *file;
	struct napi_struct napi;
	struct delayed_work poll_again;
	/* Written under rtnl_lock and the queue's lock, while polling is off. */
	bool linked;
	/* TOMBOLO_NET_ENDED_*, once; and the clause that was broken. */
	u32 ended;
	u32 clause;
	struct net_port port;
	struct tombolo_net_stat stat;
};

/* An open file. Under rtnl_lock. */
struct net_file {
	struct tombolo_netdev *net;
	bool gone;
	bool news;		/* the link has ended by itself */
	wait_queue_head_t wq;
};

/* Features that this kernel's frame headers can express, both ways. */
#define TOMBOLO_NET_TAKES						\
	(TOMBOLO_NET_CHECKSUM | TOMBOLO_NET_TSO4 | TOMBOLO_NET_TSO6 |	\
	 TOMBOLO_NET_ECN | TOMBOLO_KERNEL_USO)

/* frame.c */
bool tombolo_head_may_go(const struct net_port *port, const struct virtio_net_hdr_v1 *head);
int tombolo_head_check(const struct net_port *port, struct virtio_net_hdr_v1 *head, u32 len);

/* pipe.c */
bool tombolo_port_is_alive(const struct tombolo_netdev *net);
void tombolo_port_end(struct tombolo_netdev *net, u32 how, u32 clause);
netdev_tx_t tombolo_port_send(struct sk_buff *skb, struct net_device *dev);
int tombolo_port_poll(struct napi_struct *napi, int budget);
void tombolo_port_tell_head(struct tombolo_netdev *net);

/* port.c */
void tombolo_port_init(struct tombolo_netdev *net, struct net_device *dev);
void tombolo_port_schedule(struct tombolo_netdev *net);
int tombolo_port_take_over(struct tombolo_netdev *net, const struct tombolo_net_link *arg);
void tombolo_port_give_up(struct tombolo_netdev *net, struct tombolo_net_turn *turn);

#endif /* _TOMBOLO_NET_H */
