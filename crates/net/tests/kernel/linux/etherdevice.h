/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* The part of the kernel's headers that frame.c needs. */
#include <endian.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <linux/if_ether.h>
#include <linux/virtio_net.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#define __force
#define le16_to_cpu(number) le16toh(number)
