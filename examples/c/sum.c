/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Requests and answers, each a message: a request is a row of numbers, the answer is their sum.
 *
 *     sum serve local:/tmp/sum.sock
 *     sum ask   local:/tmp/sum.sock 1 2 3
 */
#include "example.h"

#include <errno.h>
#include <string.h>

struct answer {
    int64_t sum;
    int32_t error; /* 0 or a positive error number */
    uint32_t count;
};

/* One request, read where it lies. Its numbers are loaded once: the client could change them while we look. */
static struct answer work(const struct iovec request[2])
{
    struct answer answer = {0};
    unsigned char number[sizeof(int64_t)];
    size_t filled = 0;

    for (int part = 0; part < 2; part++) {
        const volatile unsigned char *bytes = request[part].iov_base;
        for (size_t at = 0; at < request[part].iov_len; at++) {
            int64_t value;
            number[filled++] = bytes[at];
            if (filled < sizeof number)
                continue;
            filled = 0;
            memcpy(&value, number, sizeof value);
            if (__builtin_add_overflow(answer.sum, value, &answer.sum))
                answer.error = EOVERFLOW;
            answer.count++;
        }
    }
    if (filled != 0)
        answer.error = EBADMSG;
    return answer;
}

static void serve(const char *address)
{
    tombolo_listener *listener;
    tombolo_channel *client;
    struct iovec request[2];
    ssize_t len;

    check(tombolo_messages_listen(address, NULL, &listener), address);
    check(tombolo_listener_accept(listener, TOMBOLO_FOREVER, &client), "accept");
    tombolo_listener_close(listener);

    while ((len = tombolo_messages_peek(client, TOMBOLO_FOREVER, request)) >= 0) {
        struct answer answer = work(request);
        check(tombolo_messages_consume(client), "consume");
        check(tombolo_messages_send(client, &answer, sizeof answer, 10 * SECONDS), "send");
    }
    if (len != -ENODATA) /* the end is no length: an empty message is one */
        check(len, "peek");
    tombolo_channel_close(client);
}

static void ask(const char *address, int count, char **words)
{
    tombolo_channel *server;
    struct answer answer;
    struct iovec room[2];
    int64_t *numbers = calloc((size_t)count, sizeof *numbers);

    if (!numbers)
        die(1, "no memory for %d numbers", count);
    for (int i = 0; i < count; i++) {
        char *end;
        errno = 0;
        numbers[i] = strtoll(words[i], &end, 10);
        if (errno != 0 || end == words[i] || *end != '\0')
            die(2, "%s: not a number of 64 bits", words[i]);
    }

    /* The message is made in the ring. Here a plain send would do as well; where data are made anew it saves a copy. */
    size_t len = (size_t)count * sizeof *numbers;
    check(tombolo_messages_connect(address, &patient, &server), address);
    check(tombolo_channel_reserve(server, len, 10 * SECONDS, room), "reserve");
    memcpy(room[0].iov_base, numbers, room[0].iov_len);
    if (room[1].iov_len > 0)
        memcpy(room[1].iov_base, (char *)numbers + room[0].iov_len, room[1].iov_len);
    check(tombolo_channel_commit(server, len), "commit");
    free(numbers);

    if (check(tombolo_messages_recv(server, &answer, sizeof answer, 10 * SECONDS), "recv") != sizeof answer)
        die(1, "an answer of another length than ours: another version of this program?");
    tombolo_channel_close(server);
    if (answer.error != 0)
        die(1, "the server says: %s", strerror(answer.error));
    printf("%lld\n", (long long)answer.sum);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        serve(argv[2]);
    else if (argc > 3 && strcmp(argv[1], "ask") == 0)
        ask(argv[2], argc - 3, argv + 3);
    else
        die(2, "usage: sum serve ADDRESS\n       sum ask ADDRESS NUMBER...");
}
