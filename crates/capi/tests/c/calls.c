/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* What each call does and what it refuses, with two ends in one process. The argument is a free address. */
#include "test.h"

#include <poll.h>
#include <unistd.h>

static int polls(int fd, int timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, timeout_ms);
}

static void bad_places(const char *address)
{
    tombolo_channel *stream;
    tombolo_listener *listener, *second;
    char other[4096];

    REFUSES(EINVAL, "\"nowhere\" is no address", tombolo_stream_connect("nowhere", NULL, &stream));
    REFUSES(EAFNOSUPPORT, "no backend for \"pigeon\"", tombolo_stream_connect("pigeon:post", NULL, &stream));
    REFUSES(EINVAL, "not UTF-8", tombolo_stream_connect("local:\xff", NULL, &stream));
    REFUSES(EFAULT, "address is a null pointer", tombolo_stream_connect(NULL, NULL, &stream));
    REFUSES(EFAULT, "place for the result", tombolo_stream_connect(address, NULL, NULL));
    REFUSES(EFAULT, "place for the result", tombolo_stream_listen(address, NULL, NULL));
    REFUSES(ENOENT, "nobody listens at", tombolo_stream_connect(address, NULL, &stream));

    snprintf(other, sizeof other, "%s/no/such/folder", address);
    CLAIM(tombolo_stream_listen(other, NULL, &listener) < 0);
    CLAIM(strlen(tombolo_last_error()) > 0 && !strchr(tombolo_last_error(), '\n'));

    CLAIM(tombolo_stream_listen(address, NULL, &listener) == 0);
    REFUSES(EADDRINUSE, "in use", tombolo_stream_listen(address, NULL, &second));
    REFUSES(EAGAIN, "not now", tombolo_listener_accept(listener, 0, &stream));
    REFUSES(ETIMEDOUT, "timed out", tombolo_listener_accept(listener, 1000, &stream));
    REFUSES(EFAULT, "place for the result", tombolo_listener_accept(listener, 0, NULL));
    CLAIM(polls((int)tombolo_listener_poll_fd(listener), 0) == 0);
    CLAIM(tombolo_listener_close(listener) == 0);
    CLAIM(tombolo_listener_close(NULL) == 0);
}

static void bad_options(const char *address)
{
    /* A caller built against a later header: everything that this library does not know must be zero, or the call
       fails. */
    struct {
        struct tombolo_options known;
        uint64_t later;
    } larger = {.known = {.size = sizeof larger}};
    struct tombolo_options options = {.size = 3};
    tombolo_listener *listener;

    REFUSES(EINVAL, "struct of 3 bytes", tombolo_stream_listen(address, &options, &listener));
    options.size = sizeof options;
    options.flags = 0x80;
    REFUSES(EINVAL, "flags 0x80", tombolo_stream_listen(address, &options, &listener));
    options = (struct tombolo_options){.size = 8};
    CLAIM(tombolo_stream_listen(address, &options, &listener) == 0);
    CLAIM(tombolo_listener_close(listener) == 0);
    CLAIM(tombolo_stream_listen(address, &larger.known, &listener) == 0);
    CLAIM(tombolo_listener_close(listener) == 0);
    larger.later = 1;
    REFUSES(E2BIG, "more than this version", tombolo_stream_listen(address, &larger.known, &listener));
}

static void null_handles(void)
{
    struct tombolo_statistics statistics = {.size = sizeof statistics};
    struct tombolo_peer peer = {.size = sizeof peer};
    struct iovec parts[2];
    char byte;

    REFUSES(EFAULT, "handle is a null", tombolo_stream_read(NULL, &byte, 1, 0));
    REFUSES(EFAULT, "handle is a null", tombolo_stream_write(NULL, &byte, 1, 0));
    REFUSES(EFAULT, "handle is a null", tombolo_channel_reserve(NULL, 1, 0, parts));
    REFUSES(EFAULT, "handle is a null", tombolo_stream_peek(NULL, 0, parts));
    REFUSES(EFAULT, "handle is a null", tombolo_channel_life(NULL));
    REFUSES(EFAULT, "handle is a null", tombolo_channel_peer(NULL, &peer));
    REFUSES(EFAULT, "handle is a null", tombolo_messages_send(NULL, &byte, 1, 0));
    REFUSES(EFAULT, "handle is a null", tombolo_messages_recv(NULL, &byte, 1, 0));
    REFUSES(EFAULT, "handle is a null", tombolo_channel_statistics(NULL, TOMBOLO_READ, &statistics));
    REFUSES(EFAULT, "handle is a null", tombolo_listener_poll_fd(NULL));
    CLAIM(tombolo_channel_close(NULL) == 0 && tombolo_channel_close(NULL) == 0);
}

static void streams(const char *address)
{
    struct tombolo_options options = {.size = sizeof options, .ring_size = 4096};
    tombolo_channel *ends[2];
    char buffer[8192], more[16];
    struct iovec parts[2];
    ssize_t len, full = 0;

    stream_pair(address, &options, ends);
    REFUSES(EAGAIN, "not now", tombolo_stream_read(ends[0], buffer, sizeof buffer, 0));
    REFUSES(ETIMEDOUT, "timed out", tombolo_stream_read(ends[0], buffer, sizeof buffer, 1000));
    REFUSES(EFAULT, "buffer is a null", tombolo_stream_read(ends[0], NULL, 1, 0));
    REFUSES(EFAULT, "buffer is a null", tombolo_stream_write(ends[0], NULL, 1, 0));
    REFUSES(EINVAL, "length is impossible", tombolo_stream_write(ends[0], buffer, SIZE_MAX, 0));
    REFUSES(EINVAL, "-1 parts", tombolo_stream_writev(ends[0], parts, -1, 0));
    REFUSES(EFAULT, "parts is a null", tombolo_stream_readv(ends[0], NULL, 1, 0));
    REFUSES(EPROTOTYPE, "carries a stream", tombolo_messages_send(ends[0], buffer, 1, 0));
    REFUSES(EPROTOTYPE, "carries a stream", tombolo_messages_recv(ends[0], buffer, 1, 0));
    CLAIM(tombolo_stream_write(ends[0], NULL, 0, 0) == 0);

    /* Vectored calls, and reading to the last byte. */
    parts[0] = (struct iovec){.iov_base = "hello, ", .iov_len = 7};
    parts[1] = (struct iovec){.iov_base = "neighbour", .iov_len = 9};
    CLAIM(tombolo_stream_writev(ends[1], parts, 2, 0) == 16);
    parts[0] = (struct iovec){.iov_base = buffer, .iov_len = 5};
    parts[1] = (struct iovec){.iov_base = more, .iov_len = 2};
    CLAIM(tombolo_stream_readv(ends[0], parts, 2, SOON) == 7 && memcmp(buffer, "hello", 5) == 0);
    CLAIM(tombolo_stream_read_all(ends[0], buffer, 9, SOON) == 9 && memcmp(buffer, "neighbour", 9) == 0);

    /* Holding: only held bytes can be published or handed back. */
    REFUSES(EINVAL, "nothing is held", tombolo_channel_commit(ends[0], 1));
    REFUSES(EINVAL, "nothing is held", tombolo_stream_consume(ends[1], 1));
    REFUSES(EMSGSIZE, "4096", tombolo_channel_reserve(ends[0], 4097, 0, parts));
    CLAIM(tombolo_channel_reserve(ends[0], 3, 0, parts) == 0 && parts[0].iov_len + parts[1].iov_len == 3);
    memcpy(parts[0].iov_base, "abc", 3);
    REFUSES(EINVAL, "4 bytes where 3 are held", tombolo_channel_commit(ends[0], 4));
    REFUSES(EINVAL, "nothing is held", tombolo_channel_commit(ends[0], 3));
    CLAIM(tombolo_channel_reserve(ends[0], 3, 0, parts) == 0);
    memcpy(parts[0].iov_base, "abc", 3);
    CLAIM(tombolo_channel_commit(ends[0], 2) == 0);
    CLAIM(tombolo_stream_peek(ends[1], SOON, parts) == 2 && memcmp(parts[0].iov_base, "ab", 2) == 0);
    CLAIM(tombolo_stream_consume(ends[1], 1) == 0);
    REFUSES(EINVAL, "nothing is held", tombolo_stream_consume(ends[1], 1));
    CLAIM(tombolo_stream_read(ends[1], buffer, sizeof buffer, 0) == 1 && buffer[0] == 'b');

    /* A full ring, and the state of the writing half's descriptor. */
    int room = tombolo_channel_poll_fd(ends[0], TOMBOLO_WRITE);
    CLAIM(room >= 0);
    REFUSES(EINVAL, "no such half", tombolo_channel_poll_fd(ends[0], TOMBOLO_BOTH));
    memset(buffer, 7, sizeof buffer);
    while ((len = tombolo_stream_write(ends[0], buffer, sizeof buffer, 0)) > 0)
        full += len;
    CLAIM(len == -EAGAIN && 0 < full && full <= 4096);
    REFUSES(EAGAIN, "not now", tombolo_stream_write_all(ends[0], buffer, 1, 0));
    REFUSES(EAGAIN, "not now", tombolo_channel_drain(ends[0], 0));
    REFUSES(ETIMEDOUT, "timed out", tombolo_channel_drain(ends[0], 1000));
    REFUSES(EAGAIN, "not now", tombolo_stream_write(ends[0], buffer, 1, 0));
    CLAIM(polls(room, 0) == 0);
    CLAIM(tombolo_stream_read_all(ends[1], buffer, (size_t)full, SOON) == full);
    CLAIM(polls(room, 30000) == 1);
    CLAIM(tombolo_stream_write(ends[0], buffer, 1, 0) == 1);
    CLAIM(tombolo_stream_read(ends[1], buffer, sizeof buffer, SOON) == 1);
    REFUSES(EAGAIN, "not now", tombolo_stream_read(ends[1], buffer, 1, 0)); /* this call tells the writer of room */
    CLAIM(tombolo_channel_drain(ends[0], SOON) == 0);

    /* Ends of file, and writing to a peer that reads no more. */
    REFUSES(EINVAL, "no such half", tombolo_channel_shutdown(ends[0], 0));
    CLAIM(tombolo_channel_ending(ends[1]) == TOMBOLO_ENDING_NONE);
    CLAIM(tombolo_channel_shutdown(ends[0], TOMBOLO_WRITE) == 0);
    REFUSES(EPIPE, "", tombolo_stream_write(ends[0], buffer, 1, SOON));
    CLAIM(tombolo_stream_read(ends[1], buffer, sizeof buffer, SOON) == 0);
    CLAIM(tombolo_stream_peek(ends[1], SOON, parts) == 0 && parts[0].iov_len == 0);
    CLAIM(tombolo_channel_ending(ends[1]) == TOMBOLO_ENDING_CLOSED);
    CLAIM(tombolo_channel_shutdown(ends[0], TOMBOLO_READ) == 0);
    REFUSES(EPIPE, "does not read", tombolo_stream_write_all(ends[1], buffer, sizeof buffer, SOON));
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);

    stream_pair(address, &options, ends);
    CLAIM(tombolo_channel_abort(ends[0]) == 0);
    CLAIM(tombolo_stream_read(ends[1], buffer, sizeof buffer, SOON) == 0);
    CLAIM(tombolo_channel_ending(ends[1]) == TOMBOLO_ENDING_ABORTED);
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);
}

static void messages(const char *address)
{
    struct tombolo_options options = {.size = sizeof options, .ring_size = 4096};
    tombolo_channel *ends[2];
    tombolo_channel *stream;
    tombolo_listener *listener;
    char buffer[8192] = {0};
    struct iovec parts[2];

    message_pair(address, &options, ends);
    CLAIM(tombolo_messages_max(ends[0]) == 4088);
    REFUSES(EPROTOTYPE, "carries messages", tombolo_stream_write(ends[0], buffer, 1, 0));
    REFUSES(EPROTOTYPE, "carries messages", tombolo_stream_read(ends[0], buffer, 1, 0));
    REFUSES(EMSGSIZE, "at most 4088", tombolo_messages_send(ends[0], buffer, 4089, SOON));
    REFUSES(EMSGSIZE, "at most 4088", tombolo_channel_reserve(ends[0], 4089, 0, parts));
    REFUSES(EAGAIN, "not now", tombolo_messages_recv(ends[1], buffer, sizeof buffer, 0));
    REFUSES(ETIMEDOUT, "timed out", tombolo_messages_peek(ends[1], 1000, parts));

    /* Messages stay separate, empty ones too, and are never cut. */
    parts[0] = (struct iovec){.iov_base = "one ", .iov_len = 4};
    parts[1] = (struct iovec){.iov_base = "message", .iov_len = 7};
    CLAIM(tombolo_messages_sendv(ends[0], parts, 2, 0) == 0);
    CLAIM(tombolo_messages_send(ends[0], NULL, 0, 0) == 0);
    REFUSES(EMSGSIZE, "11 bytes", tombolo_messages_recv(ends[1], buffer, 10, SOON));
    CLAIM(tombolo_messages_peek(ends[1], SOON, parts) == 11);
    CLAIM(tombolo_messages_recv(ends[1], buffer, 11, SOON) == 11 && memcmp(buffer, "one message", 11) == 0);
    REFUSES(EINVAL, "nothing is held", tombolo_messages_consume(ends[1]));
    CLAIM(tombolo_messages_peek(ends[1], SOON, parts) == 0);
    CLAIM(tombolo_messages_consume(ends[1]) == 0);

    CLAIM(tombolo_channel_reserve(ends[0], 100, 0, parts) == 0);
    memcpy(parts[0].iov_base, "short", 5);
    CLAIM(tombolo_channel_commit(ends[0], 5) == 0);
    CLAIM(tombolo_messages_recv(ends[1], buffer, sizeof buffer, SOON) == 5 && memcmp(buffer, "short", 5) == 0);

    /* A full ring gives -EAGAIN, at once or by poll. */
    REFUSES(EAGAIN, "not now", tombolo_messages_recv(ends[1], buffer, 1, 0)); /* this call tells the sender of room */
    CLAIM(tombolo_messages_send(ends[0], buffer, 4088, 0) == 0);
    REFUSES(EAGAIN, "not now", tombolo_messages_send(ends[0], buffer, 1, 0));
    CLAIM(polls(tombolo_channel_poll_fd(ends[1], TOMBOLO_READ), 30000) == 1);
    CLAIM(tombolo_messages_recv(ends[1], buffer, sizeof buffer, 0) == 4088);
    REFUSES(EAGAIN, "not now", tombolo_messages_recv(ends[1], buffer, 1, 0)); /* this call tells the sender of room */
    CLAIM(tombolo_channel_flush(ends[0]) == 0 && tombolo_channel_drain(ends[0], SOON) == 0);

    CLAIM(tombolo_channel_shutdown(ends[0], TOMBOLO_BOTH) == 0);
    REFUSES(ENODATA, "the end", tombolo_messages_recv(ends[1], buffer, sizeof buffer, SOON));
    REFUSES(ENODATA, "the end", tombolo_messages_peek(ends[1], SOON, parts));
    CLAIM(tombolo_channel_ending(ends[1]) == TOMBOLO_ENDING_CLOSED);
    REFUSES(EPIPE, "does not read", tombolo_messages_send(ends[1], buffer, 1, SOON));
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);

    message_pair(address, &options, ends);
    CLAIM(tombolo_messages_send(ends[0], "last", 4, 0) == 0);
    CLAIM(tombolo_channel_abort(ends[0]) == 0);
    CLAIM(tombolo_messages_recv(ends[1], buffer, sizeof buffer, SOON) == 4);
    REFUSES(ENODATA, "the end", tombolo_messages_recv(ends[1], buffer, sizeof buffer, SOON));
    CLAIM(tombolo_channel_ending(ends[1]) == TOMBOLO_ENDING_ABORTED);
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);

    /* A caller that asks for a stream at a listener for messages is refused with a text, once the listener looks at it.
       */
    CLAIM(tombolo_messages_listen(address, NULL, &listener) == 0);
    struct tombolo_options hasty = {.size = sizeof hasty, .handshake_timeout_ns = 1000000};
    REFUSES(ETIMEDOUT, "timed out", tombolo_stream_connect(address, &hasty, &stream));
    CLAIM(tombolo_listener_close(listener) == 0);
}

static void *answer(void *arg)
{
    char byte;

    while (tombolo_stream_read(arg, &byte, 1, SOON) == 1)
        CLAIM(tombolo_stream_write(arg, &byte, 1, SOON) == 1);
    return NULL;
}

/* Bytes that flush_bytes holds back are published before this end waits for an answer to them. */
static void nothing_is_held_back_by_who_waits(const char *address)
{
    struct tombolo_options options = {
        .size = sizeof options,
        .flags = TOMBOLO_NO_SPIN,
        .flush_bytes = 1 << 20,
        .flush_ns = 3600 * (uint64_t)SECONDS,
    };
    tombolo_channel *ends[2];
    pthread_t answering;
    char byte;

    stream_pair(address, &options, ends);
    CLAIM(pthread_create(&answering, NULL, answer, ends[1]) == 0);
    for (byte = 0; byte < 100; byte++) {
        char back = -1;
        CLAIM(tombolo_stream_write(ends[0], &byte, 1, 0) == 1);
        CLAIM(tombolo_stream_read(ends[0], &back, 1, SOON / 3) == 1 && back == byte); /* before the other gives up */
    }
    CLAIM(tombolo_channel_shutdown(ends[0], TOMBOLO_WRITE) == 0);
    CLAIM(pthread_join(answering, NULL) == 0);
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);
}

/* A ring changes its size in use, and unread bytes arrive; a spin and a flush policy change too. */
static void knobs_under_way(const char *address)
{
    struct tombolo_options options = {.size = sizeof options, .ring_size = 4096, .largest_peer_ring = 1 << 20};
    struct tombolo_statistics sent = {.size = sizeof sent};
    tombolo_channel *ends[2];
    tombolo_channel *pair[2];
    char out[3000], in[9000];

    memset(out, 'x', sizeof out);
    stream_pair(address, &options, ends);
    CLAIM(tombolo_channel_is_moving(ends[0]) == 0);
    CLAIM(tombolo_stream_write_all(ends[0], out, sizeof out, 0) == 0);
    CLAIM(tombolo_channel_resize(ends[0], 60000) == 0 && tombolo_channel_is_moving(ends[0]) == 1);
    REFUSES(EOPNOTSUPP, "not finished", tombolo_channel_resize(ends[0], 1 << 20));
    CLAIM(tombolo_stream_read_all(ends[1], in, sizeof out, SOON) == sizeof out && memcmp(in, out, sizeof out) == 0);
    for (int steps = 0; tombolo_channel_is_moving(ends[0]); steps++) {
        ssize_t written = tombolo_stream_write(ends[0], out, sizeof out, 0);

        CLAIM(steps < 10 && (written > 0 || written == -EAGAIN));
        if (written > 0)
            CLAIM(tombolo_stream_read_all(ends[1], in, (size_t)written, SOON) == written && in[0] == 'x');
        REFUSES(EAGAIN, "not now", tombolo_stream_read(ends[1], in, 1, 0)); /* this call makes the reader follow */
    }
    CLAIM(tombolo_channel_statistics(ends[0], TOMBOLO_WRITE, &sent) == 0 && sent.ring_size == 1 << 16);
    REFUSES(EMSGSIZE, "", tombolo_channel_resize(ends[0], 1 << 21));

    /* The reader is checked for at each write, then at none, and then for the held-back bytes as soon as the holding
       ends. */
    CLAIM(tombolo_channel_set_flush(ends[1], 1 << 20, 3600 * (uint64_t)SECONDS) == 0);
    CLAIM(tombolo_channel_set_flush(ends[1], 0, 0) == 0);
    CLAIM(tombolo_channel_set_spin(ends[0], TOMBOLO_READ, 0) == 0);
    CLAIM(tombolo_channel_set_spin(ends[0], TOMBOLO_WRITE, TOMBOLO_FOREVER) == 0);
    REFUSES(EINVAL, "no such half", tombolo_channel_set_spin(ends[0], TOMBOLO_BOTH, 0));
    REFUSES(ETIMEDOUT, "timed out", tombolo_stream_read(ends[0], in, 1, SECONDS / 5));
    CLAIM(tombolo_channel_statistics(ends[0], TOMBOLO_READ, &sent) == 0 && sent.sleeps >= 1 && sent.spins_wasted == 0);
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);

    message_pair(address, &options, pair);
    CLAIM(tombolo_channel_set_spin(pair[0], TOMBOLO_WRITE, 0) == 0);
    CLAIM(tombolo_channel_set_flush(pair[0], 1 << 20, 3600 * (uint64_t)SECONDS) == 0);
    CLAIM(tombolo_channel_resize(pair[0], 1 << 14) == 0 && tombolo_channel_is_moving(pair[0]) == 1);
    for (int steps = 0; tombolo_channel_is_moving(pair[0]); steps++) {
        CLAIM(steps < 10 && tombolo_messages_send(pair[0], out, 1, 0) == 0);
        CLAIM(tombolo_messages_recv(pair[1], in, sizeof in, SOON) == 1);
        REFUSES(EAGAIN, "not now", tombolo_messages_recv(pair[1], in, sizeof in, 0));
    }
    CLAIM(tombolo_messages_max(pair[0]) > 4096);
    CLAIM(tombolo_messages_send(pair[0], in, 5000, 0) == 0);
    CLAIM(tombolo_messages_recv(pair[1], in, sizeof in, SOON) == 5000);
    CLAIM(tombolo_channel_close(pair[0]) == 0 && tombolo_channel_close(pair[1]) == 0);
}

/* A ring that follows its load begins small, grows in bulk, and shrinks while its owner waits to read. */
static void growth(const char *address)
{
    struct tombolo_options options = {
        .size = sizeof options, .flags = TOMBOLO_RING_GROWTH, .ring_size = 1 << 16, .ring_idle_ns = SECONDS / 50};
    struct tombolo_statistics sent = {.size = sizeof sent};
    static char out[100000], in[100000];
    tombolo_channel *ends[2];
    ssize_t moved;

    stream_pair(address, &options, ends);
    CLAIM(tombolo_channel_statistics(ends[0], TOMBOLO_WRITE, &sent) == 0 && sent.ring_size == 8 << 10);
    CLAIM(sent.ring_target == 1 << 16 && sent.ring_reason == TOMBOLO_RING_FIRST);
    for (int steps = 0; sent.ring_reason != TOMBOLO_RING_BULK; steps++) {
        CLAIM(steps < 100000 && sent.ring_reason != TOMBOLO_RING_BUDGET);
        while (tombolo_stream_write(ends[0], out, sizeof out, 0) > 0)
            ;
        while ((moved = tombolo_stream_read(ends[1], in, sizeof in, 0)) > 0)
            ;
        CLAIM(moved == -EAGAIN && tombolo_channel_statistics(ends[0], TOMBOLO_WRITE, &sent) == 0);
        if (sent.ring_reason == TOMBOLO_RING_PRESSURE)
            break; /* this machine has no memory to spare */
    }
    CLAIM(sent.ring_size == 1 << 16 || sent.ring_reason == TOMBOLO_RING_PRESSURE);
    for (int steps = 0; sent.ring_size == 1 << 16; steps++) {
        CLAIM(steps < 1000);
        REFUSES(ETIMEDOUT, "timed out", tombolo_stream_read(ends[0], in, 1, SECONDS / 20));
        REFUSES(EAGAIN, "not now", tombolo_stream_read(ends[1], in, 1, 0)); /* this call makes the reader follow */
        CLAIM(tombolo_channel_statistics(ends[0], TOMBOLO_WRITE, &sent) == 0);
    }
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);
    options.flags = 8;
    REFUSES(EINVAL, "flags 0x8", tombolo_stream_connect(address, &options, &ends[0]));
}

static void what_it_tells(const char *address)
{
    struct tombolo_statistics sent = {.size = sizeof sent}, short_ = {.size = 16, .messages = 77};
    struct tombolo_peer peer = {.size = sizeof peer};
    tombolo_channel *ends[2];
    char byte = 1;

    stream_pair(address, NULL, ends);
    CLAIM(tombolo_channel_peer(ends[0], &peer) == 0);
    CLAIM(peer.pid == getpid() && peer.uid == getuid() && strcmp(peer.domain, "local") == 0);
    CLAIM(tombolo_channel_life(ends[0]) == TOMBOLO_LIFE_RUNNING);
    CLAIM(tombolo_stream_write(ends[0], &byte, 1, 0) == 1);
    CLAIM(tombolo_channel_statistics(ends[0], TOMBOLO_WRITE, &sent) == 0);
    CLAIM(sent.size == sizeof sent && sent.bytes == 1 && sent.messages == 1 && sent.ring_size == 1 << 20);
    /* A caller that knows fewer fields gets fewer. */
    CLAIM(tombolo_channel_statistics(ends[0], TOMBOLO_WRITE, &short_) == 0);
    CLAIM(short_.size == 16 && short_.bytes == 1 && short_.messages == 77);
    REFUSES(EINVAL, "no such half", tombolo_channel_statistics(ends[0], 7, &sent));
    REFUSES(EFAULT, "place for the result", tombolo_channel_statistics(ends[0], TOMBOLO_READ, NULL));
    sent.size = 0;
    REFUSES(EINVAL, "struct of 0 bytes", tombolo_channel_statistics(ends[0], TOMBOLO_READ, &sent));
    CLAIM(tombolo_channel_close(ends[1]) == 0);
    CLAIM(tombolo_stream_read(ends[0], &byte, 1, SOON) == 0);
    CLAIM(tombolo_channel_close(ends[0]) == 0);
}

int main(int argc, char **argv)
{
    CLAIM(argc == 2);
    CLAIM(strcmp(tombolo_last_error(), "") == 0);
    CLAIM(strlen(tombolo_version()) >= 5);
    bad_places(argv[1]);
    bad_options(argv[1]);
    null_handles();
    streams(argv[1]);
    messages(argv[1]);
    nothing_is_held_back_by_who_waits(argv[1]);
    knobs_under_way(argv[1]);
    growth(argv[1]);
    what_it_tells(argv[1]);
}
