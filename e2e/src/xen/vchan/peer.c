/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * One end of a vchan, with the function names of Xen's library. The file is compiled twice, for both programs of the
 * cases: linked with Debian's libxenvchan, and with libtombolo-vchan.
 *
 *   peer serve DOMAIN PATH RING WORK...     peer join DOMAIN PATH RING WORK...
 *
 * WORK is one of:
 *   both BYTES    sends and checks BYTES bytes in each direction, without blocking; prints "verified"
 *   turns BYTES   the same, first from the client and then from the server, with calls that block
 *   packets COUNT sends and checks packets of many sizes there and back, with the calls that move all or nothing
 *   flow          sends and checks until the other end is gone; prints "flows" once bytes have come, then how it ended
 *   await         waits on the descriptor until a client comes or can come no more, and prints which
 *   cross BYTES   like `both`, but spoils what it sends: the canary of the other end's check
 */
#include <errno.h>
#include <libxenvchan.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 40000
#define SAY(...) (printf(__VA_ARGS__), fflush(stdout))

static struct libxenvchan *vchan;
/* From the command line: in the original the field is a signed bit, and reads as -1. */
static int serves, spoils;

static void fail(const char *what)
{
    SAY("%s: %s\n", what, strerror(errno));
    exit(1);
}

/* One direction: pseudo-random bytes, the same in each run, in pieces of pseudo-random lengths. */
struct flow {
    uint64_t state, pieces;
    unsigned long long done, all;
};

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static struct flow flow(int of_server, unsigned long long all)
{
    return (struct flow){ of_server ? 0x9e3779b97f4a7c15u : 0xd1b54a32d192ed03u, 88172645463325252u, 0, all };
}

/* Makes the next `len` bytes of a direction; each byte can be made only once, in order. */
static void make(struct flow *flow, unsigned char *to, int len)
{
    for (int i = 0; i < len; i++)
        to[i] = next(&flow->state) >> 32;
}

/* Returns the length of the next piece: mostly short, sometimes more than a small ring. */
static int piece(struct flow *flow)
{
    uint64_t random = next(&flow->pieces), left = flow->all - flow->done;
    uint64_t len = 1 + (random >> 8) % (random % 8 ? 700 : CHUNK);
    return len < left ? len : left;
}

static unsigned char out[CHUNK], in[CHUNK], want[CHUNK];
static int out_from, out_to;

/* Sends a piece if there is room. Returns the bytes sent, or -1. */
static int push(struct flow *flow)
{
    if (out_from == out_to) {
        out_from = 0, out_to = piece(flow);
        make(flow, out, out_to);
        if (spoils)
            out[out_to / 2] ^= 1;
    }
    if (out_from == out_to)
        return 0;
    int sent = libxenvchan_write(vchan, out + out_from, out_to - out_from);
    if (sent > 0)
        out_from += sent, flow->done += sent;
    return sent;
}

/* Receives a piece if there is one. Returns the bytes received, or -1. */
static int pull(struct flow *flow)
{
    int len = piece(flow), taken = len ? libxenvchan_read(vchan, in, len) : 0;
    if (taken <= 0)
        return taken;
    make(flow, want, taken);
    for (int i = 0; i < taken; i++)
        if (in[i] != want[i]) {
            SAY("byte %llu is %02x instead of %02x\n", flow->done + i, in[i], want[i]);
            exit(3);
        }
    flow->done += taken;
    return taken;
}

static void both(unsigned long long bytes)
{
    struct flow to = flow(serves, bytes), from = flow(!serves, bytes);
    while (to.done < bytes || from.done < bytes) {
        int taken = pull(&from), sent = push(&to);
        if ((from.done < bytes && taken < 0) || (to.done < bytes && sent < 0))
            fail("broken off");
        if (taken <= 0 && sent <= 0 && libxenvchan_wait(vchan) < 0)
            fail("wait");
    }
    SAY("verified %llu bytes each way\n", bytes);
}

static void turns(unsigned long long bytes)
{
    vchan->blocking = 1;
    for (int turn = 0; turn < 2; turn++) {
        struct flow way = flow(turn, bytes);
        while (way.done < bytes)
            if ((turn == serves ? push(&way) : pull(&way)) <= 0)
                fail("broken off");
    }
    SAY("verified %llu bytes each way\n", bytes);
}

/* Sends a packet as a whole, and waits until there is room. */
static void put(struct flow *flow, int len)
{
    int room, sent;
    make(flow, out, len);
    do {
        room = libxenvchan_buffer_space(vchan);
        sent = libxenvchan_send(vchan, out, len);
    } while (sent == 0 && room < len && libxenvchan_wait(vchan) == 0);
    if (sent != len)
        fail("a packet that fits is not sent");
}

static void get(struct flow *flow, int len)
{
    int ready, got;
    make(flow, want, len);
    do {
        ready = libxenvchan_data_ready(vchan);
        got = libxenvchan_recv(vchan, in, len);
    } while (got == 0 && ready < len && libxenvchan_wait(vchan) == 0);
    if (got != len || memcmp(in, want, len))
        fail("a packet that is there does not come as it was sent");
}

static void packets(unsigned long long count)
{
    struct flow to = flow(serves, ~0ull), from = flow(!serves, ~0ull);
    for (unsigned long long number = 0; number < count; number++) {
        int len = 1 + number * 37 % 4000;
        if (!serves)
            put(&to, len);
        get(&from, len);
        if (serves)
            put(&to, len);
    }
    if (libxenvchan_data_ready(vchan) != 0)
        fail("there is more than was sent");
    SAY("verified %llu packets each way\n", count);
}

static void flows(void)
{
    struct flow to = flow(serves, ~0ull), from = flow(!serves, ~0ull);
    int said = 0, taken, sent;
    do {
        taken = pull(&from), sent = push(&to);
        if (!said && from.done > 100000)
            said = SAY("flows\n") == 0;
    } while (taken >= 0 && sent >= 0 && (taken || sent || libxenvchan_wait(vchan) >= 0));
    SAY("ended, open %d\n", libxenvchan_is_open(vchan));
}

static void await(void)
{
    struct pollfd news = { .fd = libxenvchan_fd_for_select(vchan), .events = POLLIN };
    int open;
    SAY("waits\n");
    while ((open = libxenvchan_is_open(vchan)) == 2) {
        poll(&news, 1, -1);
        libxenvchan_wait(vchan);
    }
    SAY("open %d\n", open);
}

int main(int argc, char **argv)
{
    if (argc < 6)
        return 2;
    int domain = atoi(argv[2]);
    serves = strcmp(argv[1], "serve") == 0;
    size_t ring = atol(argv[4]);
    if (serves)
        vchan = libxenvchan_server_init(NULL, domain, argv[3], ring, ring);
    else
        for (int tries = 0; !vchan && tries < 600; tries++) {
            vchan = libxenvchan_client_init(NULL, domain, argv[3]);
            if (!vchan)
                poll(NULL, 0, 100);
        }
    if (!vchan)
        fail("no vchan");
    const char *work = argv[5];
    spoils = strcmp(work, "cross") == 0;
    if (serves && strcmp(work, "await")) {
        SAY("serves\n");
        while (libxenvchan_is_open(vchan) == 2)
            libxenvchan_wait(vchan);
    }
    if (strcmp(work, "turns") == 0)
        turns(strtoull(argv[6], NULL, 10));
    else if (strcmp(work, "packets") == 0)
        packets(strtoull(argv[6], NULL, 10));
    else if (strcmp(work, "flow") == 0)
        flows();
    else if (strcmp(work, "await") == 0)
        await();
    else
        both(strtoull(argv[6], NULL, 10));
    libxenvchan_close(vchan);
    return 0;
}
