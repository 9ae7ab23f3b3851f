/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A thread splices bytes from a connection, while another starts a program, which takes the connection back to TCP with
 * the bytes that are in shared memory. Each byte comes out of the pipe exactly once. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "ends.h"

enum { ROUNDS = 200, ALL = 3 << 20, PART = 50000 };

static char byte(long at) {
    return (char)((at * 31 + at / 509 * 7) % 251);
}

static long came;

static void *splices(void *end) {
    static char bytes[1 << 16];
    int line[2];
    check(pipe(line) == 0, "pipe");
    for (long n = 1; n > 0;) {
        check((n = splice(*(int *)end, NULL, line[1], NULL, sizeof bytes, 0)) >= 0, "splice");
        check(n == 0 || read(line[0], bytes, (size_t)n) == n, "read");
        for (long at = 0; at < n; at++, came++) {
            if (bytes[at] != byte(came)) {
                printf("another byte at %ld\n", came);
                exit(1);
            }
        }
    }
    close(line[0]);
    close(line[1]);
    return NULL;
}

static void sends(int end) {
    static char bytes[PART];
    for (long sent = 0; sent < ALL;) {
        for (long at = 0; at < PART; at++) {
            bytes[at] = byte(sent + at);
        }
        check(send(end, bytes, PART, 0) == PART, "send");
        sent += PART;
    }
    _exit(0);
}

int main(void) {
    for (int round = 0; round < ROUNDS; round++) {
        int end;
        pid_t peer = meet_peer(&end);
        if (peer == 0) {
            sends(end);
        }
        pthread_t thread;
        came = 0;
        check(pthread_create(&thread, NULL, splices, &end) == 0, "thread");
        while (__atomic_load_n(&came, __ATOMIC_RELAXED) < ALL / 4) {
        }
        check(system("true") == 0, "system");
        check(pthread_join(thread, NULL) == 0 && waitpid(peer, NULL, 0) == peer, "join");
        check(came >= ALL, "all");
        close(end);
    }
    puts("done");
    return 0;
}
