/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Shared by the test programs: a claim, and two ends in one process. */
#ifndef TEST_H
#define TEST_H

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tombolo.h>

#define SECONDS INT64_C(1000000000)
#define SOON (30 * SECONDS)

/* Ends the program unless the claim is true. */
#define CLAIM(claim) \
    do { \
        if (!(claim)) { \
            fprintf(stderr, "%s:%d: not true: %s (last error: %s)\n", __FILE__, __LINE__, #claim, tombolo_last_error()); \
            exit(1); \
        } \
    } while (0)

/* Checks that a call fails with this number, and that its message contains these words. */
#define REFUSES(number, words, call) \
    do { \
        intmax_t got = (call); \
        if (got != -(number) || !strstr(tombolo_last_error(), words)) { \
            fprintf(stderr, "%s:%d: %s gave %jd, not %d: %s\n", __FILE__, __LINE__, #call, got, -(number), \
                    tombolo_last_error()); \
            exit(1); \
        } \
    } while (0)

struct connecting {
    const char *address;
    const struct tombolo_options *options;
    tombolo_channel *stream;
    tombolo_channel *messages;
};

static inline void *connect_stream(void *arg)
{
    struct connecting *c = arg;
    CLAIM(tombolo_stream_connect(c->address, c->options, &c->stream) == 0);
    return NULL;
}

static inline void *connect_messages(void *arg)
{
    struct connecting *c = arg;
    CLAIM(tombolo_messages_connect(c->address, c->options, &c->messages) == 0);
    return NULL;
}

static inline void stream_pair(const char *address, const struct tombolo_options *options, tombolo_channel *ends[2])
{
    struct connecting c = {.address = address, .options = options};
    tombolo_listener *listener;
    pthread_t thread;

    CLAIM(tombolo_stream_listen(address, options, &listener) == 0);
    CLAIM(pthread_create(&thread, NULL, connect_stream, &c) == 0);
    CLAIM(tombolo_listener_accept(listener, SOON, &ends[0]) == 0);
    CLAIM(pthread_join(thread, NULL) == 0);
    CLAIM(tombolo_listener_close(listener) == 0);
    ends[1] = c.stream;
}

static inline void message_pair(const char *address, const struct tombolo_options *options, tombolo_channel *ends[2])
{
    struct connecting c = {.address = address, .options = options};
    tombolo_listener *listener;
    pthread_t thread;

    CLAIM(tombolo_messages_listen(address, options, &listener) == 0);
    CLAIM(pthread_create(&thread, NULL, connect_messages, &c) == 0);
    CLAIM(tombolo_listener_accept(listener, SOON, &ends[0]) == 0);
    CLAIM(pthread_join(thread, NULL) == 0);
    CLAIM(tombolo_listener_close(listener) == 0);
    ends[1] = c.messages;
}

#endif
