/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Processes that fork at the moment when another of their threads makes its first connection, or its first set. Their
 * children, which make connections too, must not wait for a thread that does not exist in them. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <time.h>

#include "ends.h"

enum { PATIENCE = 20, STEP = 2000, STEPS = 100 };

static pthread_barrier_t start;

static void *begins(void *with_set) {
    int ends[2];
    pthread_barrier_wait(&start);
    if (with_set != NULL) {
        struct epoll_event event = {.events = EPOLLIN};
        int set = epoll_create1(0);
        epoll_ctl(set, EPOLL_CTL_ADD, socket(AF_INET, SOCK_STREAM, 0), &event);
        epoll_wait(set, &event, 1, 0);
    }
    meet(ends);
    talk(ends);
    return NULL;
}

static void all_good(pid_t child) {
    int status;
    check(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a child ends");
}

/* A process that has no connection and no set yet. */
static void forks_after(long nanoseconds, int with_set) {
    struct timespec from, now;
    pthread_t thread;
    pthread_create(&thread, NULL, begins, with_set ? &start : NULL);
    pthread_barrier_wait(&start);
    clock_gettime(CLOCK_MONOTONIC, &from);
    do {
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - from.tv_sec) * 1000000000 + now.tv_nsec - from.tv_nsec < nanoseconds);
    pid_t child = fork();
    if (child == 0) {
        int ends[2];
        alarm(PATIENCE);
        meet(ends);
        talk(ends);
        _exit(0);
    }
    all_good(child);
    pthread_join(thread, NULL);
}

int main(int count, char **arguments) {
    long rounds = count > 1 ? atol(arguments[1]) : 1;
    check(pthread_barrier_init(&start, NULL, 2) == 0, "pthread_barrier_init");
    for (long at = 0; at < rounds * STEPS; at++) {
        pid_t child = fork();
        if (child == 0) {
            forks_after(at % STEPS * STEP, at & 1);
            _exit(0);
        }
        all_good(child);
    }
    puts("done");
    return 0;
}
