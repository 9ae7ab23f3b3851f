// SPDX-License-Identifier: GPL-2.0
/* Messages that cross a link: its two pipes, by the specification's part 2. */

#include <linux/etherdevice.h>

#include "net.h"

/* Offsets of the words in a segment (M-5). */
#define AT_TAIL		0x80
#define AT_HEAD		0x100
#define AT_WANT_DATA	0x180
#define AT_READER_STATE	0x188
#define AT_WANT_SPACE	0x200
#define AT_WRITER_STATE	0x208

/* Phases of a state word. */
#define PHASE_OPEN	1
#define PHASE_CLOSED	2
#define PHASE_ABORTED	3

#define RECORD_HEAD	sizeof(u64)
#define RECORD_ALIGN	8

/* Most bytes that are read before the head is published. */
#define UNTOLD_MOST	(64U << 10)
/* A frame up to the first of these lies in the linear part of its buffer; of a longer one, the second. */
#define LINEAR_MOST	1800
#define LINEAR_HEAD	256
/* Polls in a row that find nothing, before the peer is asked to notify. */
#define IDLE_POLLS	2

/* The two channels of a connection that wake the peer's reader and its writer. */
#define NOTIFY_DATA	BIT_ULL(0)
#define NOTIFY_SPACE	BIT_ULL(1)

static u64 peer_word(const struct net_port *port, unsigned int at)
{
	return le64_to_cpu(smp_load_acquire((const __le64 *)(port->peer_words + at)));
}

static void set_word(struct net_port *port, unsigned int at, u64 value)
{
	smp_store_release((__le64 *)(port->words + at), cpu_to_le64(value));
}

static u64 record_span(u64 len)
{
	return ALIGN(RECORD_HEAD + len, RECORD_ALIGN);
}

/* Returns whether @want asks for a @position that was reached and not yet notified for. */
static bool is_to_be_notified(u64 want, u64 position, u64 notified)
{
	return want & 1 && (s64)(2 * position - (want - 1)) >= 0 && (s64)(want - notified) > 0;
}

static u64 armed(u64 target)
{
	return target << 1 | 1;
}

/*
 * Returns whether the memory of the link may be touched while soft interrupts are
 * off: whoever takes it away waits until they are on again.
 */
bool tombolo_port_is_alive(const struct tombolo_netdev *net)
{
	const struct net_port *port = &net->port;
	const struct link *link;

	if (!READ_ONCE(net->linked) || READ_ONCE(net->ended))
		return false;
	link = port->own->link;
	return !READ_ONCE(link->hung_up) && tombolo_is_alive(link->own.dev) &&
	       tombolo_is_alive(link->peer.dev) && tombolo_is_alive(link->doorbell);
}

/*
 * Ends the link by itself. Frames in the queue were made for it, and are dropped
 * when they are sent, so the queue goes on.
 */
void tombolo_port_end(struct tombolo_netdev *net, u32 how, u32 clause)
{
	if (cmpxchg(&net->ended, 0, how))
		return;
	WRITE_ONCE(net->clause, clause);
	if (how == TOMBOLO_NET_ENDED_CORRUPT) {
		net->stat.both[TOMBOLO_NET_CORRUPT]++;
		netdev_warn(net->dev, "the peer's ring is corrupt (R-%u): its link ends\n", clause);
	}
	netif_carrier_off(net->dev);
	netif_wake_queue(net->dev);
	WRITE_ONCE(net->file->news, true);
	wake_up_all(&net->file->wq);
}

/* Sending */

static u64 room(const struct net_port *port)
{
	return port->capacity - (port->tail - port->head_seen);
}

static struct netdev_queue *only_queue(struct tombolo_netdev *net)
{
	return netdev_get_tx_queue(net->dev, 0);
}

/* Reads the peer's head. Returns false if it is invalid. Under the queue's lock. */
static bool see_head(struct tombolo_netdev *net)
{
	struct net_port *port = &net->port;
	u64 head = peer_word(port, AT_HEAD);

	if (head == port->head_seen)
		return true;
	/* The peer has read at most what was written, and whole records. */
	if (head - port->head_seen > port->tail - port->head_seen || head % RECORD_ALIGN) {
		tombolo_port_end(net, TOMBOLO_NET_ENDED_CORRUPT, 8);
		return false;
	}
	port->head_seen = head;
	/* The limit is on our own bytes that wait, however many frames they are. */
	if ((s64)(head - port->completed) > 0) {
		netdev_tx_completed_queue(only_queue(net), 1, head - port->completed);
		port->completed = head;
	}
	return true;
}

/* Wakes the queue if there is room again. Under the queue's lock. */
static void send_again(struct tombolo_netdev *net)
{
	if (see_head(net) && netif_queue_stopped(net->dev) && room(&net->port) >= NET_ROOM)
		netif_wake_queue(net->dev);
}

/*
 * Asks to be notified once the peer has read half of what waits. Under the
 * queue's lock, while the queue is stopped for want of room or because enough
 * waits.
 */
static void await_room(struct tombolo_netdev *net)
{
	struct net_port *port = &net->port;
	u64 waits = port->tail - port->head_seen;

	if (!waits)
		return;
	set_word(port, AT_WANT_SPACE,
		 armed(port->head_seen + max_t(u64, round_down(waits / 2, RECORD_ALIGN), RECORD_ALIGN)));
	/* Pairs with the peer's barrier between its head and our word (R-12, A2). */
	smp_mb();
	send_again(net);
}

/* Notifies the reader of what was published, if it waits for that (R-12, B2 to B4). */
static void notify_reader(struct tombolo_netdev *net)
{
	struct net_port *port = &net->port;
	u64 want;

	port->owes_notification = false;
	/* B2: pairs with the peer's barrier between its word and our tail. */
	smp_mb();
	want = peer_word(port, AT_WANT_DATA);
	if (!is_to_be_notified(want, port->tail, port->notified_data))
		return;
	port->notified_data = want;
	net->stat.sent[TOMBOLO_NET_NOTIFICATIONS]++;
	tombolo_window_notify(port->own, NOTIFY_DATA);
}

/* Copies into our ring, across its end if need be. */
static void put_bytes(struct net_port *port, u64 position, const void *from, u64 len)
{
	u64 at = position & (port->capacity - 1);
	u64 first = min(len, port->capacity - at);

	memcpy(port->data + at, from, first);
	memcpy(port->data, from + first, len - first);
}

static int put_frame(struct net_port *port, u64 position, struct sk_buff *skb)
{
	u64 at = position & (port->capacity - 1);
	int first = min_t(u64, skb->len, port->capacity - at);
	int err = skb_copy_bits(skb, 0, port->data + at, first);

	return err ?: skb_copy_bits(skb, first, port->data, skb->len - first);
}

/* Puts a frame into the ring and publishes it. Returns the counter of why it is dropped, or -1. */
static int send_frame(struct tombolo_netdev *net, struct sk_buff *skb)
{
	struct net_port *port = &net->port;
	struct virtio_net_hdr_v1 head = {};
	u64 len = NET_HEAD + skb->len;

	if (skb->len < ETH_HLEN)
		return TOMBOLO_NET_SHORT;
	if (skb->len > min_t(u32, port->gives_most, NET_FRAME_MOST))
		return TOMBOLO_NET_LONG;
	if (virtio_net_hdr_from_skb(skb, (struct virtio_net_hdr *)&head, true, false, 0))
		return TOMBOLO_NET_HEADER;
	/* A segment needs its checksum computed; else it is invalid (N-8). */
	if (head.gso_type && !(head.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM))
		return TOMBOLO_NET_HEADER;
	if (!tombolo_head_may_go(port, &head))
		return TOMBOLO_NET_FEATURE;
	if (put_frame(port, port->tail + RECORD_HEAD + NET_HEAD, skb))
		return TOMBOLO_NET_MEMORY;
	put_bytes(port, port->tail + RECORD_HEAD, &head, NET_HEAD);
	/* A record's header never crosses the end. The kind is 0. */
	*(__le64 *)(port->data + (port->tail & (port->capacity - 1))) = cpu_to_le64(len);

	port->tail += record_span(len);
	set_word(port, AT_TAIL, port->tail);
	port->owes_notification = true;
	netdev_tx_sent_queue(only_queue(net), record_span(len));
	net->stat.sent[TOMBOLO_NET_FRAMES]++;
	net->stat.sent[TOMBOLO_NET_BYTES] += skb->len;
	net->stat.sent[TOMBOLO_NET_SEGMENTS] += !!head.gso_type;
	return -1;
}

/* Sends a frame. There is room for it, because the queue is stopped otherwise. */
netdev_tx_t tombolo_port_send(struct sk_buff *skb, struct net_device *dev)
{
	struct tombolo_netdev *net = netdev_priv(dev);
	struct net_port *port = &net->port;
	int counter;

	if (!tombolo_port_is_alive(net) || !see_head(net)) {
		net->stat.sent[TOMBOLO_NET_STALE]++;
		dev_kfree_skb_any(skb);
		return NETDEV_TX_OK;
	}
	if (room(port) < NET_ROOM) {
		netif_stop_queue(dev);
		net->stat.sent[TOMBOLO_NET_FULL]++;
		await_room(net);
		if (netif_queue_stopped(dev)) {
			if (port->owes_notification)
				notify_reader(net);
			return NETDEV_TX_BUSY;
		}
	}

	counter = send_frame(net, skb);
	if (counter < 0) {
		dev_consume_skb_any(skb);
	} else {
		net->stat.sent[counter]++;
		dev_kfree_skb_any(skb);
	}

	if (room(port) < NET_ROOM) {
		netif_stop_queue(dev);
		net->stat.sent[TOMBOLO_NET_FULL]++;
	}
	if (netif_xmit_stopped(only_queue(net)))
		await_room(net);
	/* Even if this frame was dropped, earlier ones may wait for a notification. */
	if (port->owes_notification && (!netdev_xmit_more() || netif_xmit_stopped(only_queue(net))))
		notify_reader(net);
	return NETDEV_TX_OK;
}

/* Receiving */

/* Copies out of the peer's ring, across its end if need be. */
static void get_bytes(const struct net_port *port, u64 position, void *to, u64 len)
{
	u64 at = position & (port->peer_capacity - 1);
	u64 first = min(len, port->peer_capacity - at);

	memcpy(to, port->peer_data + at, first);
	memcpy(to + first, port->peer_data, len - first);
}

/* Gets room for payload, in pages of order 0. */
static unsigned int get_room(struct net_port *port, u32 len)
{
	if (port->page && port->used == PAGE_SIZE) {
		put_page(port->page);
		port->page = NULL;
	}
	if (!port->page) {
		port->page = dev_alloc_page();
		port->used = 0;
		if (!port->page)
			return 0;
	}
	return min_t(u32, len, PAGE_SIZE - port->used);
}

/* Returns a private copy of a frame, or NULL if there is no memory for it. */
static struct sk_buff *get_frame(struct tombolo_netdev *net, u64 position, u32 len)
{
	struct net_port *port = &net->port;
	u32 linear = len <= LINEAR_MOST ? len : LINEAR_HEAD;
	struct sk_buff *skb = napi_alloc_skb(&net->napi, linear);

	if (!skb)
		return NULL;
	get_bytes(port, position, skb_put(skb, linear), linear);
	while (skb->len < len) {
		int i = skb_shinfo(skb)->nr_frags;
		unsigned int part = get_room(port, len - skb->len);

		if (!part || i == MAX_SKB_FRAGS) {
			kfree_skb(skb);
			return NULL;
		}
		get_bytes(port, position + skb->len, page_address(port->page) + port->used, part);
		get_page(port->page);
		skb_add_rx_frag(skb, i, port->page, port->used, part, part);
		port->used += part;
	}
	return skb;
}

/* Hands a message to the stack. Returns the counter of why it is dropped, or -1. */
static int receive_message(struct tombolo_netdev *net, u64 position, u32 len)
{
	struct net_port *port = &net->port;
	struct virtio_net_hdr_v1 head;
	struct sk_buff *skb;
	int counter;

	if (len < NET_HEAD + ETH_HLEN)
		return TOMBOLO_NET_SHORT;
	len -= NET_HEAD;
	if (len > port->takes_most)
		return TOMBOLO_NET_LONG;
	get_bytes(port, position, &head, NET_HEAD);
	/* From here on only the copy is used, whatever the peer stores. */
	barrier();
	counter = tombolo_head_check(port, &head, len);
	if (counter >= 0)
		return counter;
	skb = get_frame(net, position + NET_HEAD, len);
	if (!skb)
		return TOMBOLO_NET_MEMORY;
	if (!port->any_source && !ether_addr_equal_unaligned(skb->data + ETH_ALEN, port->source)) {
		kfree_skb(skb);
		return TOMBOLO_NET_SOURCE;
	}
	if (head.flags & VIRTIO_NET_HDR_F_DATA_VALID && net->dev->features & NETIF_F_RXCSUM)
		skb->ip_summed = CHECKSUM_UNNECESSARY;
	if (virtio_net_hdr_to_skb(skb, (struct virtio_net_hdr *)&head, true)) {
		kfree_skb(skb);
		return TOMBOLO_NET_REFUSED;
	}
	net->stat.received[TOMBOLO_NET_FRAMES]++;
	net->stat.received[TOMBOLO_NET_BYTES] += len;
	net->stat.received[TOMBOLO_NET_SEGMENTS] += !!head.gso_type;
	skb->protocol = eth_type_trans(skb, net->dev);
	napi_gro_receive(&net->napi, skb);
	return -1;
}

/* Publishes the head, and notifies a peer that waits for room. */
void tombolo_port_tell_head(struct tombolo_netdev *net)
{
	struct net_port *port = &net->port;
	u64 want;

	if (port->told_head == port->head)
		return;
	port->told_head = port->head;
	set_word(port, AT_HEAD, port->head);
	/* B2: pairs with the peer's barrier between its word and our head. */
	smp_mb();
	want = peer_word(port, AT_WANT_SPACE);
	if (!is_to_be_notified(want, port->head, port->notified_space))
		return;
	port->notified_space = want;
	net->stat.received[TOMBOLO_NET_NOTIFICATIONS]++;
	tombolo_window_notify(port->own, NOTIFY_SPACE);
}

/* Reads the peer's tail. Returns false if it is invalid. */
static bool see_tail(struct tombolo_netdev *net)
{
	struct net_port *port = &net->port;
	u64 tail = peer_word(port, AT_TAIL);

	/* The peer wrote at most a ring, no less than before, and whole records. */
	if (tail - port->head > port->peer_capacity || tail - port->head < port->tail_seen - port->head ||
	    tail % RECORD_ALIGN) {
		tombolo_port_end(net, TOMBOLO_NET_ENDED_CORRUPT, 7);
		return false;
	}
	port->tail_seen = tail;
	return true;
}

/* Returns how the peer's side ended, TOMBOLO_NET_ENDED_*, or 0. */
static u32 find_end(const struct net_port *port)
{
	u64 writer = peer_word(port, AT_WRITER_STATE), reader = peer_word(port, AT_READER_STATE);

	/* Only known phases, and no other ring, because none is followed (H-1). */
	if (writer > PHASE_ABORTED || reader > PHASE_ABORTED)
		return TOMBOLO_NET_ENDED_CORRUPT;
	if (writer == PHASE_ABORTED || reader == PHASE_ABORTED)
		return TOMBOLO_NET_ENDED_ABORTED;
	if (writer == PHASE_CLOSED || reader == PHASE_CLOSED)
		return TOMBOLO_NET_ENDED_CLOSED;
	return READ_ONCE(*port->peer_state) < port->over ? 0 : TOMBOLO_NET_ENDED_GONE;
}

/*
 * Checks whether the peer has ended. The carrier goes at once, but the link is
 * over only when all is received that the peer published before (R-17, N-10).
 * @is_all: all that this end has seen is received.
 */
static void see_end(struct tombolo_netdev *net, bool is_all)
{
	struct net_port *port = &net->port;
	u32 how = find_end(port);

	if (!how)
		return;
	if (how == TOMBOLO_NET_ENDED_CORRUPT) {
		tombolo_port_end(net, how, 15);
		return;
	}
	netif_carrier_off(net->dev);
	/* Pairs with the peer's release of its state: what it published first is received first. */
	smp_rmb();
	if (is_all && peer_word(port, AT_TAIL) == port->tail_seen)
		tombolo_port_end(net, how, 0);
}

/*
 * Receives at most @budget messages, and returns how many, or less than 0 if the
 * ring is corrupt. @reach is set to the tail from which there is more.
 */
static int receive(struct tombolo_netdev *net, int budget, u64 *reach)
{
	struct net_port *port = &net->port;
	int done = 0;

	if (!see_tail(net))
		return -1;
	*reach = port->head + RECORD_ALIGN;
	while (done < budget && port->head != port->tail_seen) {
		u64 at = port->head & (port->peer_capacity - 1);
		u64 head = le64_to_cpu(READ_ONCE(*(const __le64 *)(port->peer_data + at)));
		u64 span = record_span((u32)head);
		int counter;

		/* The kind, the reserved bytes, and the length. */
		if (head >> 32 || span > port->peer_capacity) {
			tombolo_port_end(net, TOMBOLO_NET_ENDED_CORRUPT, head >> 32 ? 20 : 21);
			return -1;
		}
		*reach = port->head + span;
		/* The rest of the record is not published yet. */
		if (span > port->tail_seen - port->head)
			break;
		counter = receive_message(net, port->head + RECORD_HEAD, (u32)head);
		if (counter >= 0)
			net->stat.received[counter]++;
		port->head += span;
		*reach = port->head + RECORD_ALIGN;
		done++;
		if (port->head - port->told_head >= min_t(u64, port->peer_capacity / 8, UNTOLD_MOST))
			tombolo_port_tell_head(net);
	}
	return done;
}

/* Wakes the queue if the peer has made room for what waits. */
static void wake_for_room(struct tombolo_netdev *net)
{
	struct netdev_queue *queue = only_queue(net);

	if (!netif_xmit_stopped(queue))
		return;
	__netif_tx_lock(queue, smp_processor_id());
	if (tombolo_port_is_alive(net)) {
		send_again(net);
		if (netif_xmit_stopped(queue))
			await_room(net);
	}
	__netif_tx_unlock(queue);
}

int tombolo_port_poll(struct napi_struct *napi, int budget)
{
	struct tombolo_netdev *net = container_of(napi, struct tombolo_netdev, napi);
	struct net_port *port = &net->port;
	u64 reach;
	int done;

	net->stat.both[TOMBOLO_NET_POLLS]++;
	if (READ_ONCE(net->linked) && !tombolo_port_is_alive(net))
		tombolo_port_end(net, TOMBOLO_NET_ENDED_REVOKED, 0);
	if (!tombolo_port_is_alive(net)) {
		napi_complete(napi);
		return 0;
	}
	wake_for_room(net);
	/* With a budget of 0 only sending is wanted. */
	if (!budget)
		return 0;
	done = receive(net, budget, &reach);
	if (done < 0) {
		napi_complete(napi);
		return 0;
	}
	if (done == budget) {
		see_end(net, false);
		return done;
	}
	tombolo_port_tell_head(net);
	port->idle = done ? 0 : port->idle + 1;
	/* A peer that is sending is polled: it need not notify. */
	if (port->idle < IDLE_POLLS)
		return budget;

	see_end(net, true);
	port->idle = 0;
	if (!napi_complete_done(napi, done) || READ_ONCE(net->ended))
		return done;
	set_word(port, AT_WANT_DATA, armed(reach));
	/* A2: pairs with the peer's barrier between its tail and our word. */
	smp_mb();
	if ((s64)(peer_word(port, AT_TAIL) - reach) >= 0 && napi_schedule_prep(napi)) {
		net->stat.both[TOMBOLO_NET_REARMS]++;
		__napi_schedule(napi);
	}
	return done;
}
