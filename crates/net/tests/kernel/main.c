// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Has frame.c judge headers. 24 bytes come in for each: the header, the frame's length, and the
 * features of both ends. 14 bytes go out: the reason why it is dropped, or -1; whether it could be
 * sent; the header as frame.c left it.
 */
#include <stdio.h>

#include "linux/etherdevice.h"
#include "net.h"

int main(void)
{
	struct {
		struct virtio_net_hdr_v1 head;
		u32 len;
		u32 takes;
		u32 gives;
	} in;

	_Static_assert(sizeof(in) == 24, "no room between the fields");
	while (fread(&in, sizeof(in), 1, stdin) == 1) {
		struct net_port port = { .takes = in.takes, .gives = in.gives };
		char may_go = tombolo_head_may_go(&port, &in.head);
		char counter = tombolo_head_check(&port, &in.head, in.len);

		putchar(counter);
		putchar(may_go);
		fwrite(&in.head, sizeof(in.head), 1, stdout);
	}
	return 0;
}
