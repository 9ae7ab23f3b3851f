/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A fork while another thread accepts a connection. The kernel copies the descriptors first and the memory later, so
 * the child's memory may know of a number that is free among its descriptors. The child gives that number to a pipe,
 * and splices from there: the peer receives the bytes in order. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "ends.h"

enum { ROUNDS = 60, PIPES = 8, PART = 8, ALL = ROUNDS * (PIPES + 1) * PART };

/* Memory in pages, each of which the kernel copies by itself, so that it takes a while until it comes to the table of
   the numbers. */
static const size_t MUCH = 128 << 20;

static struct sockaddr_in address;

static void *accepts(void *listener) {
    for (;;) {
        int dialled = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(dialled, (struct sockaddr *)&address, sizeof address) == 0, "connect");
        int accepted = accept(*(int *)listener, NULL, NULL);
        usleep(300);
        close(accepted);
        close(dialled);
        usleep(300);
    }
    return NULL;
}

static void send_next(int end, int64_t *next) {
    check(send(end, next, PART, 0) == PART, "send");
    ++*next;
}

/* Each pipe gets the lowest free number. */
static void splice_from_each(int end, int64_t next) {
    int line[2];
    for (int at = 0; at < PIPES; at++) {
        check(pipe(line) == 0 && write(line[1], &next, PART) == PART, "pipe");
        check(splice(line[0], NULL, end, NULL, PART, 0) == PART, "splice");
        next++;
    }
    _exit(0);
}

static void receive_all(int end) {
    for (int64_t at = 0, got; at < ALL / PART; at++) {
        check(recv(end, &got, PART, MSG_WAITALL) == PART, "recv");
        if (got != at) {
            printf("%ld came at %ld\n", (long)got, (long)at);
            _exit(1);
        }
    }
    _exit(0);
}

int main(void) {
    int end, status, listener;
    pid_t peer = meet_peer(&end);
    if (peer == 0) {
        receive_all(end);
    }
    char *much = mmap(NULL, MUCH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(much != MAP_FAILED && madvise(much, MUCH, MADV_NOHUGEPAGE) == 0, "memory");
    memset(much, 1, MUCH);
    listener = listening(&address);
    pthread_t thread;
    check(pthread_create(&thread, NULL, accepts, &listener) == 0, "thread");
    int64_t next = 0;
    for (int round = 0; round < ROUNDS; round++) {
        send_next(end, &next);
        pid_t child = fork();
        check(child >= 0, "fork");
        if (child == 0) {
            splice_from_each(end, next);
        }
        check(waitpid(child, &status, 0) == child && status == 0, "child");
        next += PIPES;
    }
    check(waitpid(peer, &status, 0) == peer, "peer");
    puts(status == 0 ? "done" : "failed");
    return 0;
}
