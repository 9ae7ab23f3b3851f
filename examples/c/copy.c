/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A file, without a buffer in between: it is read straight into the ring, and written straight out of it.
 *
 *     copy receive local:/tmp/copy.sock copy.tar
 *     copy send    local:/tmp/copy.sock backup.tar
 */
#include "example.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* How much is read from the file at once: a part of the ring, so that the other end is never out of work. */
#define CHUNK (256 * 1024)

static int open_or_die(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC, 0666);

    if (fd < 0)
        die(2, "%s: %s", path, strerror(errno));
    return fd;
}

static void send_file(const char *address, const char *path)
{
    int file = open_or_die(path, O_RDONLY);
    tombolo_channel *stream;
    struct iovec room[2];
    ssize_t len;

    check(tombolo_stream_connect(address, &patient, &stream), address);
    do {
        check(tombolo_channel_reserve(stream, CHUNK, TOMBOLO_FOREVER, room), "reserve");
        len = readv(file, room, 2);
        if (len < 0) {
            int why = errno;
            tombolo_channel_abort(stream); /* so that nobody takes what there is for all of it */
            die(1, "%s: %s", path, strerror(why));
        }
        check(tombolo_channel_commit(stream, (size_t)len), "commit");
    } while (len > 0);
    tombolo_channel_close(stream);
    close(file);
}

static void receive_file(const char *address, const char *path)
{
    int file = open_or_die(path, O_WRONLY | O_CREAT | O_TRUNC);
    tombolo_listener *listener;
    tombolo_channel *stream;
    struct iovec there[2];
    unsigned long long total = 0;

    check(tombolo_stream_listen(address, NULL, &listener), address);
    check(tombolo_listener_accept(listener, TOMBOLO_FOREVER, &stream), "accept");
    tombolo_listener_close(listener);

    while (check(tombolo_stream_peek(stream, TOMBOLO_FOREVER, there), "peek") > 0) {
        ssize_t len = writev(file, there, 2);
        if (len < 0)
            die(1, "%s: %s", path, strerror(errno));
        check(tombolo_stream_consume(stream, (size_t)len), "consume");
        total += (unsigned long long)len;
    }

    int ending = tombolo_channel_ending(stream);
    tombolo_channel_close(stream);
    if (close(file) != 0)
        die(1, "%s: %s", path, strerror(errno));
    if (ending != TOMBOLO_ENDING_CLOSED)
        die(1, "%s: only %llu bytes came before the sender went", path, total);
    fprintf(stderr, "%llu bytes\n", total);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "send") == 0)
        send_file(argv[2], argv[3]);
    else if (argc == 4 && strcmp(argv[1], "receive") == 0)
        receive_file(argv[2], argv[3]);
    else
        die(2, "usage: copy send ADDRESS FILE\n       copy receive ADDRESS FILE");
}
