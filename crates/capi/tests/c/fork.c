/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A stream whose ring grows. A child inherits one end by fork: while the parent continues, and after it has ended. The
 * child uses nothing of it, as the header requires. The argument is a free address.
 */
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

/* More than a first ring holds, and less than a grown one. */
enum { PART = 900000, SMALL_RING = 8 << 10 };

static unsigned char bytes[PART], in[PART];

/* Starts a process that has everything that this one has, and waits until the pipe is closed. */
static pid_t start_heir(int until[2])
{
    pid_t heir = fork();
    char nothing;

    CLAIM(heir >= 0);
    if (heir == 0) {
        close(until[1]);
        _exit(read(until[0], &nothing, 1) != 0);
    }
    return heir;
}

static void await_success(pid_t child)
{
    int status;

    CLAIM(waitpid(child, &status, 0) == child);
    CLAIM(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static uint64_t ring_size(tombolo_channel *channel)
{
    struct tombolo_statistics sent = {.size = sizeof sent};

    CLAIM(tombolo_channel_statistics(channel, TOMBOLO_WRITE, &sent) == 0);
    return sent.ring_size;
}

static tombolo_channel *connect_small(const char *address)
{
    struct tombolo_options options = {
        .size = sizeof options, .flags = TOMBOLO_RING_GROWTH, .wait_for_listener_ns = SOON};
    tombolo_channel *channel;

    CLAIM(tombolo_stream_connect(address, &options, &channel) == 0);
    CLAIM(ring_size(channel) == SMALL_RING);
    return channel;
}

static tombolo_channel *accept_one(const char *address)
{
    tombolo_listener *listener;
    tombolo_channel *channel;

    CLAIM(tombolo_stream_listen(address, NULL, &listener) == 0);
    CLAIM(tombolo_listener_accept(listener, SOON, &channel) == 0);
    CLAIM(tombolo_listener_close(listener) == 0);
    return channel;
}

static void read_part(tombolo_channel *channel)
{
    memset(in, 0, sizeof in);
    CLAIM(tombolo_stream_read_all(channel, in, PART, SOON) == PART);
    CLAIM(memcmp(in, bytes, PART) == 0);
}

/* The ring grows before, while and after there is a child that has the old one mapped, and maybe the new one. */
static void parent_goes_on(const char *address)
{
    pid_t writer = fork();
    tombolo_channel *channel;
    int before, after;

    CLAIM(writer >= 0);
    if (writer == 0) {
        channel = connect_small(address);
        for (before = 0; before < 2; before++) {
            int until[2];
            pid_t heir;

            CLAIM(pipe(until) == 0);
            heir = start_heir(until);
            close(until[0]);
            CLAIM(tombolo_stream_write_all(channel, bytes, PART, SOON) == 0);
            CLAIM(ring_size(channel) > PART);
            close(until[1]);
            await_success(heir);
            for (after = 0; after < 4; after++)
                CLAIM(tombolo_stream_write_all(channel, bytes, PART, SOON) == 0);
        }
        CLAIM(tombolo_channel_close(channel) == 0);
        _exit(0);
    }
    channel = accept_one(address);
    for (before = 0; before < 10; before++)
        read_part(channel);
    CLAIM(tombolo_stream_read(channel, in, 1, SOON) == 0);
    CLAIM(tombolo_channel_ending(channel) == TOMBOLO_ENDING_CLOSED);
    CLAIM(tombolo_channel_close(channel) == 0);
    await_success(writer);
}

/* The parent goes ahead to a ring that nobody has taken, and ends without a close. The bytes that it wrote are read,
 * and the end is reported once the child is gone as well. */
static void parent_ends(const char *address)
{
    tombolo_channel *channel;
    pid_t writer;
    int until[2];

    CLAIM(pipe(until) == 0);
    writer = fork();
    CLAIM(writer >= 0);
    if (writer == 0) {
        channel = connect_small(address);
        start_heir(until);
        CLAIM(tombolo_stream_write_all(channel, bytes, PART, SOON) == 0);
        CLAIM(ring_size(channel) > PART);
        _exit(0);
    }
    close(until[0]);
    channel = accept_one(address);
    await_success(writer);
    read_part(channel);
    REFUSES(ETIMEDOUT, "timed out", tombolo_stream_read(channel, in, 1, SECONDS / 10));
    close(until[1]);
    CLAIM(tombolo_stream_read(channel, in, 1, SOON) == 0);
    CLAIM(tombolo_channel_ending(channel) == TOMBOLO_ENDING_PROCESS_GONE);
    CLAIM(tombolo_channel_close(channel) == 0);
}

int main(int argc, char **argv)
{
    uint32_t state = 1;
    size_t at;

    CLAIM(argc == 2);
    for (at = 0; at < PART; at++) {
        state = state * 1664525 + 1013904223;
        bytes[at] = (unsigned char)(state >> 24);
    }
    parent_goes_on(argv[1]);
    parent_ends(argv[1]);
    return 0;
}
