/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * One handle, two threads: each end reads in one and writes in another, all four at once. The arguments are a free
 * address and the number of bytes in each direction.
 */
#include "test.h"

static size_t total;

/* The byte at a place of the stream, different for each direction. */
static unsigned char expected(size_t at, unsigned seed)
{
    return (unsigned char)((at * 2654435761u + seed) >> 7);
}

struct end {
    tombolo_channel *stream;
    unsigned writes, reads; /* seeds */
};

static void *write_all(void *arg)
{
    struct end *end = arg;
    unsigned char buffer[3000];

    for (size_t at = 0; at < total;) {
        size_t len = sizeof buffer < total - at ? sizeof buffer : total - at;
        for (size_t i = 0; i < len; i++)
            buffer[i] = expected(at + i, end->writes);
        CLAIM(tombolo_stream_write_all(end->stream, buffer, len, SOON) == 0);
        at += len;
    }
    CLAIM(tombolo_channel_shutdown(end->stream, TOMBOLO_WRITE) == 0);
    return NULL;
}

static void *read_all(void *arg)
{
    struct end *end = arg;
    unsigned char buffer[5000];
    size_t at = 0;
    ssize_t len;

    while ((len = tombolo_stream_read(end->stream, buffer, sizeof buffer, SOON)) > 0) {
        for (ssize_t i = 0; i < len; i++)
            CLAIM(buffer[i] == expected(at + (size_t)i, end->reads));
        at += (size_t)len;
        CLAIM(tombolo_channel_life(end->stream) == TOMBOLO_LIFE_RUNNING); /* from any thread */
    }
    CLAIM(len == 0 && at == total);
    return NULL;
}

/* Reads one byte, once no other thread is in the half. */
static void *wait_for_a_byte(void *arg)
{
    char byte = 0;
    ssize_t len;

    while ((len = tombolo_stream_read(arg, &byte, 1, SOON)) == -EBUSY)
        ;
    CLAIM(len == 1 && byte == 'y');
    return NULL;
}

/* A thread that waits in a half keeps others out of that half only. */
static void one_call_at_a_time(const char *address)
{
    tombolo_channel *ends[2];
    pthread_t waiting;
    char byte;
    ssize_t got;

    stream_pair(address, NULL, ends);
    CLAIM(pthread_create(&waiting, NULL, wait_for_a_byte, ends[0]) == 0);
    while ((got = tombolo_stream_read(ends[0], &byte, 1, 0)) != -EBUSY)
        CLAIM(got == -EAGAIN); /* until the other thread is in its call */
    CLAIM(strstr(tombolo_last_error(), "another thread") != NULL);
    CLAIM(tombolo_stream_write(ends[0], "x", 1, 0) == 1);
    CLAIM(tombolo_stream_write(ends[1], "y", 1, 0) == 1);
    CLAIM(pthread_join(waiting, NULL) == 0);
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);
}

int main(int argc, char **argv)
{
    struct tombolo_options options = {.size = sizeof options, .ring_size = 16 << 10};
    tombolo_channel *ends[2];
    pthread_t threads[4];

    CLAIM(argc == 3);
    one_call_at_a_time(argv[1]);

    total = strtoul(argv[2], NULL, 10);
    stream_pair(argv[1], &options, ends);
    struct end a = {.stream = ends[0], .writes = 1, .reads = 2}, b = {.stream = ends[1], .writes = 2, .reads = 1};
    CLAIM(pthread_create(&threads[0], NULL, write_all, &a) == 0);
    CLAIM(pthread_create(&threads[1], NULL, read_all, &a) == 0);
    CLAIM(pthread_create(&threads[2], NULL, write_all, &b) == 0);
    CLAIM(pthread_create(&threads[3], NULL, read_all, &b) == 0);
    for (int i = 0; i < 4; i++)
        CLAIM(pthread_join(threads[i], NULL) == 0);
    CLAIM(tombolo_channel_close(ends[0]) == 0 && tombolo_channel_close(ends[1]) == 0);
}
