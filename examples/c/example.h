/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* What the examples share: how they fail, and how long they wait. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <tombolo.h>

#define SECONDS INT64_C(1000000000)

/* Ends the program with one line on standard error: exit code 1 for what went wrong, 2 for a wrong command line. */
__attribute__((noreturn, format(printf, 2, 3))) static inline void die(int code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(code);
}

/* Passes a good result on; ends the program with Tombolo's own words for a bad one. */
static inline ssize_t check(ssize_t result, const char *what)
{
    if (result < 0)
        die(1, "%s: %s", what, tombolo_last_error());
    return result;
}

/* Waits for the other side to be started: the order does not matter then. */
static const struct tombolo_options patient = {
    .size = sizeof patient,
    .wait_for_listener_ns = 10 * SECONDS,
};

#endif
