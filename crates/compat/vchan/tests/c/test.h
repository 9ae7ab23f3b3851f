/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Shared by the test programs. Both ends of each vchan are in one process, which the map calls domain 1. */
#ifndef TEST_H
#define TEST_H

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *tombolo_vchan_last_error(void);

/* Ends the program unless the claim is true. */
#define CLAIM(claim) \
    do { \
        if (!(claim)) { \
            fprintf(stderr, "%s:%d: not true: %s (errno %d, last error: %s)\n", __FILE__, __LINE__, #claim, errno, \
                    tombolo_vchan_last_error()); \
            exit(1); \
        } \
    } while (0)

/* Checks that a call fails with this number, and that its message contains these words. */
#define REFUSES(number, words, call) \
    do { \
        errno = 0; \
        CLAIM((call) == -1); \
        CLAIM(errno == (number)); \
        CLAIM(strstr(tombolo_vchan_last_error(), words)); \
    } while (0)

/* Calls until the claim is true; no test here waits longer than the runner allows. */
#define UNTIL(claim) \
    do { \
        for (long tries = 0; !(claim); tries++) { \
            CLAIM(tries < 30000 || !#claim); \
            poll(NULL, 0, 1); \
        } \
    } while (0)

static inline int readable(int fd, int ms)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return poll(&one, 1, ms) == 1 && one.revents == POLLIN;
}

static inline void fill(unsigned char *bytes, size_t len, unsigned seed)
{
    for (size_t i = 0; i < len; i++)
        bytes[i] = (unsigned char)((i * 2654435761u + seed) >> 13);
}

#endif
