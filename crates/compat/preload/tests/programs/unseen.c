/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A program whose calls that move bytes are libc's, and which waits by system calls of its own. One thread sends
 * requests and waits for each answer as the first argument says; the other answers. Prints what was awaited in vain. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include "ends.h"

enum { REQUEST = 100, ANSWER = 1000, REQUESTS = 400, PATIENCE = 3000, MUCH = 8 << 20 };

static long past_libc(long number, long a, long b, long c, long d) {
    long answer;
    register long fourth __asm__("r10") = d;
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth)
                     : "rcx", "r11", "memory");
    return answer;
}

static int set = -1, seen;

/* Returns whether there is something. */
static int wait_for(int fd, int events) {
    struct pollfd entry = {.fd = fd, .events = events};
    struct epoll_event event;
    if (seen) {
        return poll(&entry, 1, PATIENCE) == 1;
    }
    return set < 0 ? past_libc(SYS_poll, (long)&entry, 1, PATIENCE, 0) == 1
                   : past_libc(SYS_epoll_wait, set, (long)&event, 1, PATIENCE) == 1;
}

static void make_set(int fd, unsigned events) {
    struct epoll_event event = {.events = events};
    set = past_libc(SYS_epoll_create1, EPOLL_CLOEXEC, 0, 0, 0);
    check(set >= 0 && past_libc(SYS_epoll_ctl, set, EPOLL_CTL_ADD, fd, (long)&event) == 0, "set");
}

/* Sends the answer in two parts, so that a read which waits does so for the second. */
static void *answers(void *end) {
    char bytes[ANSWER];
    memset(bytes, 'a', sizeof bytes);
    while (recv(*(int *)end, bytes, REQUEST, MSG_WAITALL) == REQUEST) {
        check(send(*(int *)end, bytes, ANSWER / 2, 0) == ANSWER / 2, "answer");
        usleep(50);
        check(send(*(int *)end, bytes, ANSWER / 2, 0) == ANSWER / 2, "answer");
    }
    return NULL;
}

/* The other end reads slowly, and begins late. */
static void *reads(void *end) {
    static char bytes[64 << 10];
    long all = 0, n;
    usleep(20000);
    while (all < MUCH && (n = read(*(int *)end, bytes, sizeof bytes)) > 0) {
        all += n;
        usleep(200);
    }
    puts(all < MUCH ? "the end came early" : "received");
    return NULL;
}

/* Sends requests, each of which is read, until one did not go over TCP; that one is not read. */
static void step(const int ends[2]) {
    char bytes[REQUEST] = "";
    for (int at = 0; at < REQUESTS; at++) {
        int there = 0;
        check(send(ends[0], bytes, REQUEST, 0) == REQUEST, "request");
        check(past_libc(SYS_ioctl, ends[1], FIONREAD, (long)&there, 0) == 0, "ioctl");
        if (there == 0) {
            return;
        }
        check(recv(ends[1], bytes, REQUEST, 0) == REQUEST, "recv");
    }
}

/* Reads as much as comes in one call, and then waits; without `waits`, one blocking call reads all. */
static void ask(int fd, int waits, int requests) {
    char bytes[ANSWER] = "";
    for (int at = 0; at < requests; at++) {
        check(send(fd, bytes, REQUEST, 0) == REQUEST, "request");
        for (long got = 0, n; got < ANSWER; got += n > 0 ? n : 0) {
            if (waits && !wait_for(fd, POLLIN)) {
                printf("request %d: no answer\n", at);
                exit(0);
            }
            n = recv(fd, bytes, ANSWER - got, 0);
            check(n > 0 || (n < 0 && errno == EAGAIN), "recv");
        }
    }
}

static void fill(int fd) {
    static char bytes[256 << 10];
    for (long sent = 0, n; sent < MUCH; sent += n > 0 ? n : 0) {
        long left = MUCH - sent;
        n = send(fd, bytes, left < (long)sizeof bytes ? left : (long)sizeof bytes, 0);
        check(n > 0 || errno == EAGAIN, "send");
        if (n < 0 && !wait_for(fd, POLLOUT)) {
            printf("no room after %ld\n", sent);
            exit(0);
        }
    }
}

int main(int count, char **arguments) {
    (void)count;
    const char *way = arguments[1];
    int ends[2], one = 1;
    pthread_t thread;
    meet(ends);
    setsockopt(ends[1], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    int moves = strcmp(way, "room at a move") == 0;
    int full = strcmp(way, "room") == 0 || strcmp(way, "room later") == 0 || moves;
    if (moves) {
        step(ends);
    }
    pthread_create(&thread, NULL, full ? reads : answers, &ends[1]);
    if (strcmp(way, "set") == 0) {
        make_set(ends[0], EPOLLIN);
        ask(ends[0], 1, REQUESTS);
    } else if (strcmp(way, "set without waiting") == 0 || strcmp(way, "set for edges") == 0) {
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        make_set(ends[0], EPOLLIN | (strcmp(way, "set for edges") == 0 ? EPOLLET : 0));
        ask(ends[0], 1, REQUESTS);
    } else if (strcmp(way, "poll") == 0) {
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        ask(ends[0], 1, REQUESTS);
    } else if (strcmp(way, "later") == 0) {
        ask(ends[0], 0, REQUESTS);
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        make_set(ends[0], EPOLLIN | EPOLLET);
        ask(ends[0], 1, REQUESTS);
    } else if (full) {
        if (strcmp(way, "room later") == 0) {
            char bytes[REQUEST] = "";
            for (int at = 0; at < REQUESTS; at++) {
                check(send(ends[0], bytes, REQUEST, 0) == REQUEST, "send");
            }
        }
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        make_set(ends[0], EPOLLOUT | EPOLLET);
        fill(ends[0]);
    } else if (strcmp(way, "seen") == 0) {
        seen = 1;
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        ask(ends[0], 1, REQUESTS);
    } else if (strcmp(way, "blocks") == 0) {
        ask(ends[0], 0, REQUESTS);
    } else {
        return 2;
    }
    shutdown(ends[0], SHUT_WR);
    pthread_join(thread, NULL);
    puts("ok");
    return 0;
}
