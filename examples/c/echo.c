/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A stream: what one end writes, the other sends back. The answer to a half close is the end of file.
 *
 *     echo serve local:/tmp/echo.sock
 *     echo say   local:/tmp/echo.sock hello neighbour
 */
#include "example.h"

#include <string.h>

static void serve(const char *address)
{
    tombolo_listener *listener;
    tombolo_channel *stream;
    char buffer[16 * 1024];
    ssize_t len;

    check(tombolo_stream_listen(address, NULL, &listener), address);
    check(tombolo_listener_accept(listener, TOMBOLO_FOREVER, &stream), "accept");
    tombolo_listener_close(listener);

    while ((len = check(tombolo_stream_read(stream, buffer, sizeof buffer, TOMBOLO_FOREVER), "read")) > 0)
        check(tombolo_stream_write_all(stream, buffer, (size_t)len, 10 * SECONDS), "write");

    int ending = tombolo_channel_ending(stream);
    tombolo_channel_close(stream);
    if (ending != TOMBOLO_ENDING_CLOSED)
        die(1, "the client went in the middle");
}

static void say(const char *address, char **words)
{
    tombolo_channel *stream;
    char answer[1024];
    ssize_t len;

    check(tombolo_stream_connect(address, &patient, &stream), address);
    for (; *words; words++) {
        /* Two parts, one call: no need to join them first. */
        struct iovec parts[] = {
            {.iov_base = *words, .iov_len = strlen(*words)},
            {.iov_base = words[1] ? " " : "\n", .iov_len = 1},
        };
        size_t whole = parts[0].iov_len + 1;
        if ((size_t)check(tombolo_stream_writev(stream, parts, 2, 10 * SECONDS), "write") < whole)
            die(1, "a word longer than the ring");
    }
    check(tombolo_channel_shutdown(stream, TOMBOLO_WRITE), "shutdown");

    while ((len = check(tombolo_stream_read(stream, answer, sizeof answer, 10 * SECONDS), "read")) > 0)
        fwrite(answer, 1, (size_t)len, stdout);
    tombolo_channel_close(stream);
    if (fflush(stdout) != 0)
        die(1, "cannot write to standard output");
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        serve(argv[2]);
    else if (argc > 3 && strcmp(argv[1], "say") == 0)
        say(argv[2], argv + 3);
    else
        die(2, "usage: echo serve ADDRESS\n       echo say ADDRESS WORD...");
}
