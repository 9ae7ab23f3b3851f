/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* The part of a port that frame.c uses. */
#include "tombolo_ivshmem.h"

#define TOMBOLO_GSO_UDP	5

struct net_port {
	u64 gives;
	u64 takes;
};

bool tombolo_head_may_go(const struct net_port *port, const struct virtio_net_hdr_v1 *head);
int tombolo_head_check(const struct net_port *port, struct virtio_net_hdr_v1 *head, u32 len);
