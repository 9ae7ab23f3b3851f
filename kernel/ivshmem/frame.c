// SPDX-License-Identifier: GPL-2.0
/* Headers of frames, by the specification's part 9: those that we make, and the peer's. */

#include <linux/etherdevice.h>

#include "net.h"

#define KIND_MARKED	VIRTIO_NET_HDR_GSO_ECN

/* Returns whether the peer takes segments of this kind (N-4). The stack may not know yet. */
bool tombolo_head_may_go(const struct net_port *port, const struct virtio_net_hdr_v1 *head)
{
	u64 needs = 0;

	if (head->flags & VIRTIO_NET_HDR_F_NEEDS_CSUM)
		needs |= TOMBOLO_NET_CHECKSUM;
	switch (head->gso_type & ~KIND_MARKED) {
	case VIRTIO_NET_HDR_GSO_NONE:
		break;
	case VIRTIO_NET_HDR_GSO_TCPV4:
		needs |= TOMBOLO_NET_TSO4;
		break;
	case VIRTIO_NET_HDR_GSO_TCPV6:
		needs |= TOMBOLO_NET_TSO6;
		break;
	default:
		needs |= TOMBOLO_NET_USO;
	}
	if (head->gso_type & KIND_MARKED)
		needs |= TOMBOLO_NET_ECN;
	return !(needs & ~port->gives);
}

/*
 * Checks the private copy of a header before a frame of @len bytes (N-8), and
 * clears the fields without a meaning. Returns the counter of why the frame is
 * dropped, or -1.
 */
int tombolo_head_check(const struct net_port *port, struct virtio_net_hdr_v1 *head, u32 len)
{
	const u8 flags = VIRTIO_NET_HDR_F_NEEDS_CSUM | VIRTIO_NET_HDR_F_DATA_VALID;
	struct virtio_net_hdr_v1 was = *head;
	u64 needs;

	memset(head, 0, sizeof(*head));
	if (was.flags & ~flags || was.num_buffers)
		return TOMBOLO_NET_HEADER;
	head->flags = was.flags;
	if (was.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM) {
		u32 start = le16_to_cpu((__force __le16)was.csum_start);

		if (start < ETH_HLEN || start + le16_to_cpu((__force __le16)was.csum_offset) + 2 > len)
			return TOMBOLO_NET_HEADER;
		if (!(port->takes & TOMBOLO_NET_CHECKSUM))
			return TOMBOLO_NET_FEATURE;
		head->csum_start = was.csum_start;
		head->csum_offset = was.csum_offset;
	}
	switch (was.gso_type) {
	case VIRTIO_NET_HDR_GSO_NONE:
		return -1;
	case VIRTIO_NET_HDR_GSO_TCPV4:
	case VIRTIO_NET_HDR_GSO_TCPV4 | KIND_MARKED:
		needs = TOMBOLO_NET_TSO4;
		break;
	case VIRTIO_NET_HDR_GSO_TCPV6:
	case VIRTIO_NET_HDR_GSO_TCPV6 | KIND_MARKED:
		needs = TOMBOLO_NET_TSO6;
		break;
	case TOMBOLO_GSO_UDP:
		needs = TOMBOLO_NET_USO;
		break;
	default:
		return TOMBOLO_NET_HEADER;
	}
	if (!(was.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM) || !was.gso_size ||
	    le16_to_cpu((__force __le16)was.hdr_len) > len)
		return TOMBOLO_NET_HEADER;
	if (was.gso_type & KIND_MARKED)
		needs |= TOMBOLO_NET_ECN;
	if (needs & ~port->takes)
		return TOMBOLO_NET_FEATURE;
	head->gso_type = was.gso_type;
	head->gso_size = was.gso_size;
	head->hdr_len = was.hdr_len;
	return -1;
}
