// SPDX-License-Identifier: GPL-2.0
/* Gives an interface its link, which user space made, and takes it back. */

#include <linux/etherdevice.h>
#include <linux/file.h>

#include "net.h"

#define MTU_LEAST	68
#define PAGE_LEN	4096	/* of a segment's first page (M-4), whatever the processor's page size */
#define RING_LEAST	(256ULL << 10)
#define RING_MOST	(1ULL << 30)
/* Interval at which a link without notifications is polled. */
#define POLL_AGAIN		HZ

static const u8 magic[8] = "TOMBOLO";

/* The beginning of a segment (M-1). */
struct segment_head {
	u8 magic[8];
	__le16 version;
	__le16 zero;
	__le16 generation;
	__le16 zero_too;
	__le64 len;
	__le64 data_offset;
	__le64 capacity;
};

/* Handles a notification. Returns whether the link is polled for it. Under vector->lock. */
bool tombolo_net_kick(struct tombolo_netdev *net)
{
	/* A link that is over ignores notifications. */
	if (READ_ONCE(net->ended))
		return false;
	net->stat.both[TOMBOLO_NET_KICKS]++;
	if (napi_schedule_prep(&net->napi))
		__napi_schedule(&net->napi);
	return true;
}

void tombolo_port_schedule(struct tombolo_netdev *net)
{
	local_bh_disable();
	if (napi_schedule_prep(&net->napi))
		__napi_schedule(&net->napi);
	local_bh_enable();
}

/*
 * Polls a link without notifications: its peer may be paused, or notifications
 * may be held back. A queue that waits for a paused peer is no driver's fault.
 */
static void poll_again(struct work_struct *work)
{
	struct tombolo_netdev *net = container_of(work, struct tombolo_netdev, poll_again.work);

	netif_tx_lock_bh(net->dev);
	if (netif_xmit_stopped(netdev_get_tx_queue(net->dev, 0)))
		netif_trans_update(net->dev);
	netif_tx_unlock_bh(net->dev);
	tombolo_port_schedule(net);
	schedule_delayed_work(&net->poll_again, POLL_AGAIN);
}

void tombolo_port_init(struct tombolo_netdev *net, struct net_device *dev)
{
	net->dev = dev;
	INIT_DELAYED_WORK(&net->poll_again, poll_again);
}

static int segment_find(const struct window *window, u64 at, u8 **words, u8 **data, u64 *capacity)
{
	const struct half *half = window->half;
	struct segment_head head;
	u64 left, offset, len;

	/* The first page is for user space's messages. */
	if (!at || !IS_ALIGNED(at, PAGE_LEN) || at >= window->is.length)
		return -EINVAL;
	left = window->is.length - at;
	if (left < PAGE_LEN + RING_LEAST)
		return -EINVAL;
	*words = half->dev->mem + half->offset + window->is.offset + at;
	/* Reads the header once (M-8). */
	memcpy(&head, *words, sizeof(head));
	barrier();
	offset = le64_to_cpu(head.data_offset);
	*capacity = le64_to_cpu(head.capacity);
	if (memcmp(head.magic, magic, sizeof(magic)) || le16_to_cpu(head.version) != 1 ||
	    head.zero || head.generation || head.zero_too)
		return -EINVAL;
	if (*capacity < RING_LEAST || *capacity > RING_MOST || !is_power_of_2(*capacity))
		return -EINVAL;
	len = le64_to_cpu(head.len);
	if (offset < PAGE_LEN || !IS_ALIGNED(offset, PAGE_LEN) || len > left || offset > len ||
	    *capacity != len - offset)
		return -EINVAL;
	*data = *words + offset;
	return 0;
}

static bool limits_are_valid(const struct tombolo_net_link *arg, const struct net_port *port)
{
	const u64 all = TOMBOLO_NET_CHECKSUM | TOMBOLO_NET_TSO4 | TOMBOLO_NET_TSO6 |
			TOMBOLO_NET_ECN | TOMBOLO_NET_USO;
	u64 positions = arg->tail | arg->head_seen | arg->head | arg->tail_seen;

	if (arg->flags & ~TOMBOLO_NET_ANY_SOURCE || !is_valid_ether_addr(arg->source))
		return false;
	if (positions % sizeof(u64) || arg->tail - arg->head_seen > port->capacity ||
	    arg->tail_seen - arg->head > port->peer_capacity)
		return false;
	if (arg->gives & ~all || arg->takes & ~TOMBOLO_NET_TAKES)
		return false;
	if (arg->gives_most < MTU_LEAST + VLAN_ETH_HLEN || arg->takes_most > NET_FRAME_MOST ||
	    arg->takes_most < MTU_LEAST + VLAN_ETH_HLEN)
		return false;
	return arg->state < PAGE_LEN && arg->state < port->peer->is.length && arg->over &&
	       arg->over <= U8_MAX;
}

/* Within tombolo_srcu. */
static int port_fill(struct net_port *port, const struct tombolo_net_link *arg)
{
	const struct link *link = port->own->link;
	const struct half *half = port->peer->half;
	u8 *words, *data;
	int err;

	if (port->peer->link != link || !port->own->writable ||
	    !(port->peer->is.flags & TOMBOLO_WINDOW_PEER) ||
	    port->own->is.channels < TOMBOLO_NET_CHANNELS)
		return -EINVAL;
	if (!tombolo_is_alive(link->own.dev) || !tombolo_is_alive(link->peer.dev) ||
	    !tombolo_is_alive(link->doorbell) || READ_ONCE(link->hung_up))
		return -ENODEV;
	err = segment_find(port->own, arg->own_segment, &port->words, &port->data, &port->capacity);
	if (err)
		return err;
	err = segment_find(port->peer, arg->peer_segment, &words, &data, &port->peer_capacity);
	if (err)
		return err;
	port->peer_words = words;
	port->peer_data = data;
	if (!limits_are_valid(arg, port))
		return -EINVAL;

	port->peer_state = half->dev->mem + half->offset + port->peer->is.offset + arg->state;
	port->over = arg->over;
	port->any_source = arg->flags & TOMBOLO_NET_ANY_SOURCE;
	ether_addr_copy(port->source, arg->source);
	port->gives = arg->gives;
	port->takes = arg->takes;
	port->gives_most = arg->gives_most;
	port->takes_most = arg->takes_most;
	port->tail = arg->tail;
	port->head_seen = arg->head_seen;
	port->completed = arg->tail;
	port->notified_data = arg->notified_data;
	port->head = arg->head;
	port->told_head = arg->head;
	port->tail_seen = arg->tail_seen;
	port->notified_space = arg->notified_space;
	/* The kernel's own stores cause no faults of a mapping that would note this. */
	tombolo_link_soil(port->own->link, port->own->is.offset + arg->own_segment,
			  port->own->is.offset + port->own->is.length);
	return 0;
}

/* Claims the window for @net. Returns false if it is another interface's. Under rtnl_lock. */
static bool window_enter_net(struct window *window, struct tombolo_netdev *net)
{
	struct vector *vector = window->link->vector;
	bool free;

	spin_lock_irq(&vector->lock);
	free = !window->net;
	if (free)
		window->net = net;
	spin_unlock_irq(&vector->lock);
	return free;
}

static void window_leave_net(struct window *window)
{
	struct vector *vector = window->link->vector;

	spin_lock_irq(&vector->lock);
	window->net = NULL;
	spin_unlock_irq(&vector->lock);
}

/* Sets @linked while nobody moves frames. Under rtnl_lock. */
static void port_switch(struct tombolo_netdev *net, bool linked)
{
	struct net_device *dev = net->dev;
	bool runs = netif_running(dev);

	if (runs)
		napi_disable(&net->napi);
	netif_tx_lock_bh(dev);
	WRITE_ONCE(net->linked, linked);
	netdev_reset_queue(dev);
	netif_tx_unlock_bh(dev);
	if (runs)
		napi_enable(&net->napi);
}

/* Under rtnl_lock, while there is a link. */
void tombolo_port_give_up(struct tombolo_netdev *net, struct tombolo_net_turn *turn)
{
	struct net_port *port = &net->port;
	int idx;

	netif_carrier_off(net->dev);
	window_leave_net(port->own);
	cancel_delayed_work_sync(&net->poll_again);
	/* Publishes all that was read, while the memory is there. */
	idx = srcu_read_lock(&tombolo_srcu);
	if (netif_running(net->dev))
		napi_disable(&net->napi);
	local_bh_disable();
	if (tombolo_port_is_alive(net))
		tombolo_port_tell_head(net);
	local_bh_enable();
	if (netif_running(net->dev))
		napi_enable(&net->napi);
	srcu_read_unlock(&tombolo_srcu, idx);
	port_switch(net, false);
	/* Frames that wait were made for the link that is over. */
	if (netif_running(net->dev))
		netif_wake_queue(net->dev);

	if (turn) {
		turn->tail = port->tail;
		turn->head_seen = port->head_seen;
		turn->notified_data = port->notified_data;
		turn->head = port->told_head;
		turn->tail_seen = port->tail_seen;
		turn->notified_space = port->notified_space;
		turn->ended = net->ended;
		turn->clause = net->clause;
	}
	if (net->file)
		WRITE_ONCE(net->file->news, false);
	if (port->page)
		put_page(port->page);
	fput(port->own_file);
	fput(port->peer_file);
	memset(port, 0, sizeof(*port));
}

/* Makes the link of @arg that of @net. Under rtnl_lock. */
int tombolo_port_take_over(struct tombolo_netdev *net, const struct tombolo_net_link *arg)
{
	struct net_port port = {};
	int err, idx;

	if (net->linked)
		return -EBUSY;
	port.own_file = tombolo_get_window(arg->own_fd);
	if (IS_ERR(port.own_file))
		return PTR_ERR(port.own_file);
	port.peer_file = tombolo_get_window(arg->peer_fd);
	err = PTR_ERR_OR_ZERO(port.peer_file);
	if (err)
		goto err_own;
	port.own = tombolo_window_of(port.own_file);
	port.peer = tombolo_window_of(port.peer_file);

	idx = srcu_read_lock(&tombolo_srcu);
	err = port_fill(&port, arg);
	srcu_read_unlock(&tombolo_srcu, idx);
	if (err)
		goto err_peer;
	net->port = port;
	WRITE_ONCE(net->ended, 0);
	WRITE_ONCE(net->file->news, false);
	net->clause = 0;
	if (!window_enter_net(port.own, net)) {
		memset(&net->port, 0, sizeof(net->port));
		err = -EBUSY;
		goto err_peer;
	}
	port_switch(net, true);
	net->stat.both[TOMBOLO_NET_LINKS]++;
	netdev_update_features(net->dev);
#ifdef CONFIG_BQL
	/* Fewer bytes than this never stop the queue. */
	netdev_get_tx_queue(net->dev, 0)->dql.min_limit = port.capacity / 4;
#endif
	netif_carrier_on(net->dev);
	if (netif_running(net->dev))
		netif_wake_queue(net->dev);
	schedule_delayed_work(&net->poll_again, POLL_AGAIN);
	/* Notifications may have come before they could be heard. */
	tombolo_port_schedule(net);
	return 0;

err_peer:
	fput(port.peer_file);
err_own:
	fput(port.own_file);
	return err;
}
