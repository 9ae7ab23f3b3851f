// SPDX-License-Identifier: GPL-2.0
/* How an interface gets its link from user space, and gives it back. */

#include <linux/etherdevice.h>
#include <linux/file.h>

#include "net.h"

#define MTU_LEAST	68
#define PAGE_LEN	4096	/* of a segment's first page (M-4), whatever the processor's have */
#define RING_LEAST	(256ULL << 10)
#define RING_MOST	(1ULL << 30)
/* How often a link is looked at that nobody rings for. */
#define LOOK		HZ

static const u8 magic[8] = "TOMBOLO";

/* What begins a segment (M-1). */
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

/* Under vector->lock: it was rung for us. Says whether anybody is to look. */
bool tombolo_net_kick(struct tombolo_netdev *net)
{
	/* A link that is over hears no more bells. */
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
 * Looks at a link that nobody rings for: its peer may be paused, or bells held
 * back. A queue that waits for a paused peer is no fault of a driver's.
 */
static void look(struct work_struct *work)
{
	struct tombolo_netdev *net = container_of(work, struct tombolo_netdev, look.work);

	netif_tx_lock_bh(net->dev);
	if (netif_xmit_stopped(netdev_get_tx_queue(net->dev, 0)))
		netif_trans_update(net->dev);
	netif_tx_unlock_bh(net->dev);
	tombolo_port_schedule(net);
	schedule_delayed_work(&net->look, LOOK);
}

void tombolo_port_init(struct tombolo_netdev *net, struct net_device *dev)
{
	net->dev = dev;
	INIT_DELAYED_WORK(&net->look, look);
}

static int segment_find(const struct slice *slice, u64 at, u8 **words, u8 **data, u64 *capacity)
{
	const struct part *part = slice->part;
	struct segment_head head;
	u64 left, offset, len;

	/* The first page is what user space talks by. */
	if (!at || !IS_ALIGNED(at, PAGE_LEN) || at >= slice->is.length)
		return -EINVAL;
	left = slice->is.length - at;
	if (left < PAGE_LEN + RING_LEAST)
		return -EINVAL;
	*words = part->dev->mem + part->offset + slice->is.offset + at;
	/* Reads it once (M-8). */
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
	return arg->life < PAGE_LEN && arg->life < port->peer->is.length && arg->over &&
	       arg->over <= U8_MAX;
}

/* Within tombolo_life. */
static int port_fill(struct net_port *port, const struct tombolo_net_link *arg)
{
	const struct link *link = port->own->link;
	const struct part *part = port->peer->part;
	u8 *words, *data;
	int err;

	if (port->peer->link != link || !port->own->writable ||
	    !(port->peer->is.flags & TOMBOLO_SLICE_PEER) ||
	    port->own->is.channels < TOMBOLO_NET_CHANNELS)
		return -EINVAL;
	if (!tombolo_is_alive(link->own.dev) || !tombolo_is_alive(link->peer.dev) ||
	    !tombolo_is_alive(link->bell) || READ_ONCE(link->hung_up))
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

	port->life = part->dev->mem + part->offset + port->peer->is.offset + arg->life;
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
	port->rung_data = arg->rung_data;
	port->head = arg->head;
	port->told_head = arg->head;
	port->tail_seen = arg->tail_seen;
	port->rung_space = arg->rung_space;
	/* Not by faults of a mapping, as what user space writes. */
	tombolo_link_soil(port->own->link, port->own->is.offset + arg->own_segment,
			  port->own->is.offset + port->own->is.length);
	return 0;
}

/* Under rtnl_lock: whether the slice was another's. */
static bool slice_enter_net(struct slice *slice, struct tombolo_netdev *net)
{
	struct vector *vector = slice->link->vector;
	bool free;

	spin_lock_irq(&vector->lock);
	free = !slice->net;
	if (free)
		slice->net = net;
	spin_unlock_irq(&vector->lock);
	return free;
}

static void slice_leave_net(struct slice *slice)
{
	struct vector *vector = slice->link->vector;

	spin_lock_irq(&vector->lock);
	slice->net = NULL;
	spin_unlock_irq(&vector->lock);
}

/* Under rtnl_lock: nobody moves frames while @linked changes. */
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

/* Under rtnl_lock, there being a link. */
void tombolo_port_give_up(struct tombolo_netdev *net, struct tombolo_net_turn *turn)
{
	struct net_port *port = &net->port;
	int idx;

	netif_carrier_off(net->dev);
	slice_leave_net(port->own);
	cancel_delayed_work_sync(&net->look);
	/* All that was read is told, while the memory is there. */
	idx = srcu_read_lock(&tombolo_life);
	if (netif_running(net->dev))
		napi_disable(&net->napi);
	local_bh_disable();
	if (tombolo_port_is_alive(net))
		tombolo_port_tell_head(net);
	local_bh_enable();
	if (netif_running(net->dev))
		napi_enable(&net->napi);
	srcu_read_unlock(&tombolo_life, idx);
	port_switch(net, false);
	/* What waits was made for the link that is over. */
	if (netif_running(net->dev))
		netif_wake_queue(net->dev);

	if (turn) {
		turn->tail = port->tail;
		turn->head_seen = port->head_seen;
		turn->rung_data = port->rung_data;
		turn->head = port->told_head;
		turn->tail_seen = port->tail_seen;
		turn->rung_space = port->rung_space;
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

/* Under rtnl_lock: the link of @arg becomes that of @net. */
int tombolo_port_take_over(struct tombolo_netdev *net, const struct tombolo_net_link *arg)
{
	struct net_port port = {};
	int err, idx;

	if (net->linked)
		return -EBUSY;
	port.own_file = tombolo_get_slice(arg->own_fd);
	if (IS_ERR(port.own_file))
		return PTR_ERR(port.own_file);
	port.peer_file = tombolo_get_slice(arg->peer_fd);
	err = PTR_ERR_OR_ZERO(port.peer_file);
	if (err)
		goto err_own;
	port.own = tombolo_slice_of(port.own_file);
	port.peer = tombolo_slice_of(port.peer_file);

	idx = srcu_read_lock(&tombolo_life);
	err = port_fill(&port, arg);
	srcu_read_unlock(&tombolo_life, idx);
	if (err)
		goto err_peer;
	net->port = port;
	WRITE_ONCE(net->ended, 0);
	WRITE_ONCE(net->file->news, false);
	net->clause = 0;
	if (!slice_enter_net(port.own, net)) {
		memset(&net->port, 0, sizeof(net->port));
		err = -EBUSY;
		goto err_peer;
	}
	port_switch(net, true);
	net->stat.both[TOMBOLO_NET_LINKS]++;
	netdev_update_features(net->dev);
#ifdef CONFIG_BQL
	/* Less than that waits for nobody. */
	netdev_get_tx_queue(net->dev, 0)->dql.min_limit = port.capacity / 4;
#endif
	netif_carrier_on(net->dev);
	if (netif_running(net->dev))
		netif_wake_queue(net->dev);
	schedule_delayed_work(&net->look, LOOK);
	/* What came before it was ours to hear. */
	tombolo_port_schedule(net);
	return 0;

err_peer:
	fput(port.peer_file);
err_own:
	fput(port.own_file);
	return err;
}
