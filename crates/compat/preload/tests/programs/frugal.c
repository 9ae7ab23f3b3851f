/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A signal handler makes calls on a connection, and may have interrupted `malloc`: it may make those calls that get
 * no memory. Prints which calls allocated memory or freed some. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/uio.h>

#include "ends.h"

enum { LITTLE = 100, CALLS = 14 };

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t), __libc_free(void *);

static volatile int is_inside, got;

static void note(void) {
    got += is_inside;
}

void *malloc(size_t len) {
    note();
    return __libc_malloc(len);
}

void *calloc(size_t count, size_t len) {
    note();
    return __libc_calloc(count, len);
}

void *realloc(void *at, size_t len) {
    note();
    return __libc_realloc(at, len);
}

int posix_memalign(void **at, size_t align, size_t len) {
    note();
    *at = __libc_memalign(align, len);
    return *at != NULL ? 0 : ENOMEM;
}

void free(void *at) {
    if (at != NULL) {
        note();
    }
    __libc_free(at);
}

static int end, set, call;
static const char *names[CALLS] = {"poll", "poll with time", "select", "epoll_wait", "send",     "write", "writev",
                                   "sendmsg", "recv",        "read",   "readv",      "recvmsg", "peek",  "FIONREAD"};

static long make_call(void) {
    static char bytes[LITTLE];
    struct pollfd one = {end, POLLIN | POLLOUT, 0};
    struct iovec parts[] = {{bytes, 10}, {bytes + 10, 10}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    struct epoll_event event;
    fd_set reads;
    int there;
    FD_ZERO(&reads);
    FD_SET(end, &reads);
    switch (call) {
    case 0:
        return poll(&one, 1, 0);
    case 1:
        one.events = POLLIN;
        return poll(&one, 1, 20);
    case 2:
        return select(end + 1, &reads, NULL, NULL, NULL);
    case 3:
        return epoll_wait(set, &event, 1, 5);
    case 4:
        return send(end, bytes, LITTLE, 0);
    case 5:
        return write(end, bytes, LITTLE);
    case 6:
        return writev(end, parts, 2);
    case 7:
        return sendmsg(end, &message, 0);
    case 8:
        return recv(end, bytes, 10, 0);
    case 9:
        return read(end, bytes, 10);
    case 10:
        return readv(end, parts, 2);
    case 11:
        return recvmsg(end, &message, 0);
    case 12:
        return recv(end, bytes, 10, MSG_PEEK);
    default:
        return ioctl(end, FIONREAD, &there);
    }
}

static void handler(int signal) {
    (void)signal;
    is_inside = 1;
    long answer = make_call();
    is_inside = 0;
    check(answer >= 0, names[call]);
}

/* Sends so much that there are always bytes to receive. */
static void answer(void) {
    char bytes[50 * LITTLE] = {0};
    while (send(end, bytes, sizeof bytes, MSG_NOSIGNAL) > 0) {
        recv(end, bytes, sizeof bytes, MSG_DONTWAIT);
        usleep(1000);
    }
    _exit(0);
}

int main(void) {
    struct epoll_event event = {.events = EPOLLIN};
    if (meet_peer(&end) == 0) {
        answer();
    }
    set = epoll_create1(0);
    check(epoll_ctl(set, EPOLL_CTL_ADD, end, &event) == 0 && signal(SIGUSR1, handler) != SIG_ERR, "set");
    for (int round = 0; round < 2; round++) {
        for (call = 0; call < CALLS; call++) {
            got = 0;
            raise(SIGUSR1);
            if (got > 0 && round > 0) {
                printf("%s: %d\n", names[call], got);
            }
        }
    }
    puts("done");
    return 0;
}
