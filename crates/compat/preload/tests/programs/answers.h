/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Two endpoints, and the results of calls on them, one line each. */
#include <errno.h>
#include <sys/ioctl.h>

#include "ends.h"

static int ends[2];

static void pair(void) {
    meet(ends);
    talk(ends);
}

static void say(const char *what, long answer) {
    printf("%s: %ld%s%s\n", what, answer, answer < 0 ? " " : "", answer < 0 ? strerrorname_np(errno) : "");
}

/* Waits until `n` bytes are there. */
static void there(int fd, int n) {
    for (int count = 0; count < n;) {
        check(ioctl(fd, FIONREAD, &count) == 0, "FIONREAD");
    }
}
