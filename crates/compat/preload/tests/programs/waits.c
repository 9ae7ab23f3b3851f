/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Random waits: sockets, copies of them, sets and registrations in every order, and the result of each call. Without
 * and with the library it must print the same.
 *
 *   waits FIRST EPISODES [STEP...]
 *
 * Each episode has its own sockets and sets, and its number is its seed. The named steps are left out, to find out
 * which matter. One line for each call: episode, step, call, result.
 *
 * Repetitions of an edge are not compared: with EPOLLET only new bytes, an end or an error count, because the kernel
 * reports room again with each of them. With the library an end is reported once everything before it was read, so it
 * does not count while something is unread. When the peer's kernel learns that this side has ended, that is an edge
 * too, at any time. Of several threads that wait in one set each is told of one edge. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>

#include "ends.h"

/* A connection that is registered like this returns to TCP at once, and its peer must be able to follow. Where the
 * connection is on its way between the two transports, and no program makes a call for it, it is reset. */
#ifndef EXCLUSIVE
#define EXCLUSIVE EPOLLEXCLUSIVE
#endif

enum { SLOTS = 3, SETS = 3, STEPS = 40, MOST = 16, WAITERS = 3 };

/* One end that is waited for, by up to two numbers, and its peer. `ended`: the peer has ended its sending. `deaf`,
 * `mute`: the end has shut down its receiving, or its sending. */
struct slot {
    int fd, copy, peer;
    int connected, ended, deaf, mute, nonblocking;
};

static struct slot slots[SLOTS];
static int sets[SETS];
/* Events that were asked for by each number of each slot in each set, if any: only these may be awaited without a
   limit. */
static uint32_t asked[SETS][SLOTS][2];
static uint64_t seed;
static char line[1600], room[1 << 16];
static int left_out[STEPS];

static unsigned below(unsigned n) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (unsigned)((seed * 0x2545f4914f6cdd1dULL) >> 33) % n;
}

static const char *answer(long n) {
    static char text[32];
    snprintf(text, sizeof text, "%ld%s%s", n, n < 0 ? " " : "", n < 0 ? strerrorname_np(errno) : "");
    return text;
}

static void forget(int slot, int copy) {
    for (int set = 0; set < SETS; set++) {
        asked[set][slot][copy] = 0;
    }
}

static void fresh(struct slot *slot) {
    *slot = (struct slot){.fd = socket(AF_INET, SOCK_STREAM, 0), .copy = -1, .peer = -1};
    check(slot->fd >= 0, "socket");
}

static void closed(struct slot *slot) {
    int *all[] = {&slot->fd, &slot->copy, &slot->peer};
    for (int at = 0; at < 3; at++) {
        if (*all[at] >= 0) {
            close(*all[at]);
        }
        *all[at] = -1;
    }
}

static int unread(int fd) {
    int n = -1;
    return ioctl(fd, FIONREAD, &n) == 0 ? n : -1;
}

static int compare(const void *a, const void *b) {
    const struct epoll_event *x = a, *y = b;
    return x->data.u64 != y->data.u64 ? (x->data.u64 > y->data.u64) - (x->data.u64 < y->data.u64)
                                      : (x->events > y->events) - (x->events < y->events);
}

/* Prints the events that count. Returns their number. */
static int tell(char *to, size_t len, struct epoll_event *events, int n) {
    int kept = 0;
    for (int at = 0; at < n; at++) {
        struct slot *slot = &slots[events[at].data.u64 >> 4 & 0xf];
        if (events[at].data.u64 & EPOLLET) {
            events[at].events &= slot->mute ? 0 : EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR;
        }
        if (unread(slot->fd >= 0 ? slot->fd : slot->copy) > 0) {
            events[at].events &= ~(uint32_t)EPOLLHUP;
        }
        if (events[at].events) {
            events[kept++] = events[at];
        }
    }
    if (n < 0) {
        snprintf(to, len, "%s", answer(n));
        return n;
    }
    qsort(events, (size_t)kept, sizeof *events, compare);
    int used = snprintf(to, len, "%d", kept);
    for (int at = 0; at < kept; at++) {
        used += snprintf(to + used, len - (size_t)used, " %x:%x", (unsigned)(events[at].data.u64 & 0xff), events[at].events);
    }
    return kept;
}

struct waiter {
    int fd, set;
    char said[320];
};

/* Number of threads that have returned from a wait. */
static int back;
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t counted = PTHREAD_COND_INITIALIZER;

static void *wait_in_set(void *argument) {
    struct waiter *waiter = argument;
    struct epoll_event events[MOST];
    time_t begun = time(NULL);
    tell(waiter->said, sizeof waiter->said - 10, events, epoll_wait(waiter->set, events, MOST, 20000));
    /* A thread that is not woken finds out when its time is over. */
    strcat(waiter->said, time(NULL) - begun > 15 ? " late" : "");
    pthread_mutex_lock(&counting);
    back++;
    pthread_cond_signal(&counted);
    pthread_mutex_unlock(&counting);
    return NULL;
}

static void *wait_in_recv(void *argument) {
    struct waiter *waiter = argument;
    char bytes[200];
    snprintf(waiter->said, sizeof waiter->said, "%s", answer(recv(waiter->fd, bytes, sizeof bytes, 0)));
    return NULL;
}

static void *wait_in_select(void *argument) {
    struct waiter *waiter = argument;
    struct timeval limit = {.tv_sec = 20};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(waiter->fd, &set);
    int n = select(waiter->fd + 1, &set, NULL, NULL, &limit);
    snprintf(waiter->said, sizeof waiter->said, "%d %d", n, FD_ISSET(waiter->fd, &set));
    return NULL;
}

static void *wait_in_poll(void *argument) {
    struct waiter *waiter = argument;
    struct pollfd one = {.fd = waiter->fd, .events = POLLIN};
    int n = poll(&one, 1, 20000);
    snprintf(waiter->said, sizeof waiter->said, "%d %x", n, one.revents);
    return NULL;
}

/* A thread waits while bytes come. */
static void sleeping(void *(*how)(void *), struct waiter *waiter, int peer) {
    pthread_t thread;
    unsigned turns = below(4);
    check(pthread_create(&thread, NULL, how, waiter) == 0, "thread");
    for (unsigned at = 0; at < turns; at++) {
        sched_yield();
    }
    check(send(peer, "waited", 6, MSG_NOSIGNAL) == 6, "news");
    pthread_join(thread, NULL);
}

/* Several threads wait in one set while bytes come, and each is notified of them: once, with an edge or for one event.
   */
static void several(struct waiter *first, struct slot *slot, uint32_t how, uint64_t data, char *said, size_t len) {
    struct waiter all[WAITERS];
    pthread_t threads[WAITERS];
    struct epoll_event event = {.events = how, .data.u64 = data};
    int count = 2 + (int)below(WAITERS - 1), news = 0, used = 0;
    back = 0;
    for (int at = 0; at < count; at++) {
        all[at] = *first;
        check(pthread_create(&threads[at], NULL, wait_in_set, &all[at]) == 0, "thread");
    }
    for (unsigned turns = below(4); turns > 0; turns--) {
        sched_yield();
    }
    while (news < count) {
        check(send(slot->peer, "waited", 6, MSG_NOSIGNAL) == 6, "news");
        news = how & (EPOLLET | EPOLLONESHOT) ? news + 1 : count;
        struct timespec end = {.tv_sec = time(NULL) + 30};
        pthread_mutex_lock(&counting);
        while (back < news && pthread_cond_timedwait(&counted, &counting, &end) == 0) {
        }
        pthread_mutex_unlock(&counting);
        if (how & EPOLLONESHOT && news < count) {
            check(epoll_ctl(first->set, EPOLL_CTL_MOD, first->fd, &event) == 0, "asked for again");
        }
    }
    for (int at = 0; at < count; at++) {
        pthread_join(threads[at], NULL);
        used += snprintf(said + used, len - (size_t)used, " %s", all[at].said);
    }
}

static void join(struct slot *slot, int fd) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    struct epoll_event events[MOST];
    int listener = socket(AF_INET, SOCK_STREAM, 0), blocks = 0, one = 1;
    check(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
    ioctl(fd, FIONBIO, &blocks);
    slot->nonblocking = 0;
    check(connect(fd, (struct sockaddr *)&address, len) == 0, "connect");
    check((slot->peer = accept(listener, NULL, NULL)) >= 0, "accept");
    close(listener);
    /* The bytes that were sent are there. */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(slot->peer, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    talk((int[2]){fd, slot->peer});
    slot->connected = 1;
    /* Takes the edges of what was reported so far. */
    for (int at = 0; at < 2 * SETS; at++) {
        epoll_wait(sets[at % SETS], events, MOST, 0);
    }
}

static void step(void) {
    static const uint32_t kinds[] = {EPOLLIN, EPOLLIN | EPOLLOUT, EPOLLOUT, EPOLLIN | EPOLLRDHUP};
    static const uint32_t ways[] = {0, 0, EPOLLET, EPOLLONESHOT, EPOLLET | EPOLLONESHOT};
    unsigned what = below(24), which = below(SLOTS), set = below(SETS), copy = below(2), more = below(100);
    uint32_t kind = kinds[below(4)], way = ways[below(5)];
    struct slot *slot = &slots[which];
    struct epoll_event events[MOST];
    int fd = copy && slot->copy >= 0 ? slot->copy : slot->fd >= 0 ? slot->fd : slot->copy;
    copy = fd == slot->copy;
    struct waiter waiter = {.fd = fd, .set = sets[set]};
    char said[1000] = "";
    uint32_t once = 0;
    for (int at = 0; at < 2 * SETS; at++) {
        once |= asked[at / 2][which][at % 2];
    }
    line[0] = 0;
    if (fd < 0) {
        closed(slot);
        fresh(slot);
        return;
    }
    if (what < 2 && !slot->connected) {
        join(slot, fd);
        snprintf(line, sizeof line, "join %u", which);
    } else if (what < 6) {
        int operation = more < 55 ? EPOLL_CTL_ADD : more < 85 ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
        /* A service that only the kernel offers moves unread bytes to TCP, which is a new edge for a program that was
           told of them before. */
        int alone = more == 7 && !slot->ended && !(slot->deaf && slot->mute) && unread(fd) <= 0;
        way = operation == EPOLL_CTL_ADD && EXCLUSIVE && alone ? EXCLUSIVE : way;
        kind = way == EPOLLEXCLUSIVE ? EPOLLIN : kind;
        struct epoll_event event = {.events = kind | way, .data.u64 = (way & EPOLLET) | which << 4 | copy};
        int n = epoll_ctl(sets[set], operation, fd, &event);
        if (n == 0) {
            asked[set][which][copy] = operation == EPOLL_CTL_DEL ? 0 : kind | way;
        }
        snprintf(line, sizeof line, "ctl %d of %u.%u in %u, %x: %s", operation, which, copy, set, kind | way, answer(n));
    } else if (what < 9) {
        tell(said, sizeof said, events, epoll_wait(sets[set], events, MOST, 0));
        snprintf(line, sizeof line, "wait in %u: %s", set, said);
    } else if (what < 11 && slot->connected && !slot->ended && !(slot->deaf && slot->mute)) {
        int n = 1 + (int)below(100);
        snprintf(line, sizeof line, "send %d to %u: %s", n, which, answer(send(slot->peer, room, (size_t)n, MSG_NOSIGNAL)));
    } else if (what < 13) {
        int flags = more % 3 == 0 ? MSG_DONTWAIT | MSG_PEEK : MSG_DONTWAIT;
        long n = recv(fd, room, 1 + more, flags);
        /* A peek is compared only as something or nothing: the number of bytes differs from the kernel's where they
           came by two transports. */
        n = flags & MSG_PEEK && n > 0 ? 1 : n;
        snprintf(line, sizeof line, "recv of %u.%u, %x: %s", which, copy, flags, answer(n));
    } else if (what == 13) {
        struct pollfd all[SLOTS];
        for (int at = 0; at < SLOTS; at++) {
            int end = slots[at].fd >= 0 && slots[at].connected ? POLLRDHUP : 0;
            all[at] = (struct pollfd){.fd = slots[at].fd, .events = (short)(more & 1 ? POLLIN : POLLIN | POLLOUT | end)};
        }
        int n = poll(all, SLOTS, 0);
        for (int at = 0; at < SLOTS; at++) {
            all[at].revents &= slots[at].fd >= 0 && unread(slots[at].fd) > 0 ? ~POLLHUP : -1;
        }
        snprintf(line, sizeof line, "poll: %d %x %x %x", n, all[0].revents, all[1].revents, all[2].revents);
    } else if (what == 14 && more < 40) {
        if (slot->copy < 0) {
            slot->copy = dup(slot->fd);
            snprintf(line, sizeof line, "copy %u", which);
        } else {
            close(slot->copy);
            slot->copy = -1;
            forget((int)which, 1);
            snprintf(line, sizeof line, "close the copy of %u", which);
        }
    } else if (what == 14 && more < 70) {
        if (slot->copy >= 0 && slot->fd >= 0) {
            close(slot->fd);
            slot->fd = -1;
            forget((int)which, 0);
            snprintf(line, sizeof line, "close the first of %u", which);
        } else {
            closed(slot);
            forget((int)which, 0);
            forget((int)which, 1);
            fresh(slot);
            snprintf(line, sizeof line, "close %u", which);
        }
    } else if (what == 14 && slot->connected && !slot->ended && more < 80) {
        slot->ended = 1;
        snprintf(line, sizeof line, "end %u: %s", which, answer(shutdown(slot->peer, SHUT_WR)));
    } else if (what == 15) {
        snprintf(line, sizeof line, "unread of %u: %d", which, slot->connected ? unread(fd) : 0);
    } else if (what == 16) {
        slot->nonblocking = (int)(more & 1);
        int flags = fcntl(fd, F_GETFL), n = more & 2 ? ioctl(fd, FIONBIO, &slot->nonblocking)
                                                     : fcntl(fd, F_SETFL, (flags & ~O_NONBLOCK) | (more & 1 ? O_NONBLOCK : 0));
        snprintf(line, sizeof line, "nonblocking %u is %d: %s", which, slot->nonblocking, answer(n));
    } else if (what == 17 && slot->connected && (slot->nonblocking || slot->ended || unread(fd) > 0)) {
        snprintf(line, sizeof line, "plain recv of %u: %s", which, answer(recv(fd, room, 1 + more, 0)));
    } else if (what == 17 && slot->connected && more < 20) {
        struct timeval limit = {.tv_usec = 2000}, none = {0};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        snprintf(line, sizeof line, "recv with a limit of %u: %s", which, answer(recv(fd, room, 10, 0)));
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
    } else if (what == 18 && slot->connected && !slot->ended && !slot->deaf && unread(fd) == 0) {
        if (!slot->nonblocking && more % 3 == 0) {
            sleeping(wait_in_recv, &waiter, slot->peer);
        } else {
            sleeping(more % 3 == 1 ? wait_in_poll : wait_in_select, &waiter, slot->peer);
        }
        snprintf(line, sizeof line, "asleep at %u.%u: %s", which, copy, waiter.said);
    } else if (what == 20) {
        fd_set bits[3];
        struct timeval none = {0};
        int n, used = 0;
        for (int at = 0; at < 3; at++) {
            FD_ZERO(&bits[at]);
            for (int one = 0; one < SLOTS; one++) {
                if (slots[one].fd >= 0 && (at != 1 || more & 1)) {
                    FD_SET(slots[one].fd, &bits[at]);
                }
            }
        }
        n = select(FD_SETSIZE, &bits[0], &bits[1], &bits[2], &none);
        for (int at = 0; at < 3 * SLOTS; at++) {
            int one = slots[at % SLOTS].fd;
            used += snprintf(said + used, sizeof said - (size_t)used, " %d", one >= 0 && FD_ISSET(one, &bits[at / SLOTS]));
        }
        snprintf(line, sizeof line, "select: %d%s", n, said);
    } else if (what == 21 && slot->connected && more < 40 && !(once & EPOLLET && once & EPOLLONESHOT)) {
        /* A change of state is an edge that repeats what was reported before. */
        int how = more % 5 == 0 ? SHUT_RDWR : more & 1 ? SHUT_RD : SHUT_WR;
        snprintf(line, sizeof line, "shut %u.%u, %d: %s", which, copy, how, answer(shutdown(fd, how)));
        slot->deaf |= how != SHUT_WR;
        slot->mute |= how != SHUT_RD;
        for (int at = 0; at < 2 * SETS; at++) {
            epoll_wait(sets[at % SETS], events, MOST, 0);
        }
    } else if (what == 22 && slot->connected) {
        long n = slot->mute ? send(fd, "back", 4, MSG_NOSIGNAL) : recv(slot->peer, room, 10, MSG_DONTWAIT);
        snprintf(line, sizeof line, "the other way of %u: %s", which, answer(n));
    } else if (what == 23 && slot->connected && !slot->ended && !slot->deaf && unread(fd) == 0 && more & 1) {
        /* A set of its own, with nothing else in it. */
        struct epoll_event event = {.events = (kind & ~(uint32_t)EPOLLOUT) | EPOLLIN | way, .data.u64 = (way & EPOLLET) | which << 4 | copy};
        waiter.set = epoll_create1(0);
        check(epoll_ctl(waiter.set, EPOLL_CTL_ADD, fd, &event) == 0, "a set of its own");
        several(&waiter, slot, event.events, event.data.u64, said, sizeof said);
        close(waiter.set);
        snprintf(line, sizeof line, "several by %x:%s", event.events, said);
    } else if (what == 23 && slot->connected && !slot->ended && !slot->deaf && asked[set][which][copy] & EPOLLIN &&
               !asked[set][which][!copy]) {
        /* With both numbers in the set, the kernel may wake a thread between the two events. */
        int n, kept;
        uint64_t data = (asked[set][which][copy] & EPOLLET) | which << 4 | copy;
        do {
            n = epoll_wait(sets[set], events, MOST, 0);
            kept = tell(said, sizeof said, events, n);
        } while (n > 0 && kept == 0);
        struct epoll_event event = {.events = asked[set][which][copy], .data.u64 = data};
        if (n == 0 && unread(fd) == 0 && epoll_ctl(sets[set], EPOLL_CTL_MOD, fd, &event) == 0 &&
            epoll_wait(sets[set], events, MOST, 0) == 0) {
            several(&waiter, slot, asked[set][which][copy], data, said, sizeof said);
        }
        snprintf(line, sizeof line, "several in %u: %s", set, said);
    } else if (what == 19 && slot->connected && !slot->ended && !slot->deaf && asked[set][which][copy] & EPOLLIN &&
               !(asked[set][which][copy] & EPOLLONESHOT)) {
        int n, kept;
        do {
            n = epoll_wait(sets[set], events, MOST, 0);
            kept = tell(said, sizeof said, events, n);
        } while (n > 0 && kept == 0);
        if (n == 0) {
            sleeping(wait_in_set, &waiter, slot->peer);
        }
        snprintf(line, sizeof line, "asleep in %u: %s, %s", set, said, waiter.said);
    }
}

int main(int count, char **words) {
    check(count >= 3, "usage");
    long first = atol(words[1]), episodes = atol(words[2]), steps = 0;
    for (int at = 3; at < count; at++) {
        left_out[atoi(words[at]) % STEPS] = 1;
    }
    for (long episode = first; episode < first + episodes; episode++) {
        memset(asked, 0, sizeof asked);
        for (int at = 0; at < SETS; at++) {
            sets[at] = epoll_create1(0);
        }
        for (int at = 0; at < SLOTS; at++) {
            fresh(&slots[at]);
        }
        for (int at = 0; at < STEPS; at++) {
            seed = (uint64_t)(episode * STEPS + at + 1) * 0x9e3779b97f4a7c15ULL;
            below(2);
            if (!left_out[at]) {
                step();
                steps++;
                if (line[0]) {
                    printf("%ld.%d %s\n", episode, at, line);
                }
            }
        }
        for (int at = 0; at < SLOTS; at++) {
            closed(&slots[at]);
        }
        for (int at = 0; at < SETS; at++) {
            close(sets[at]);
        }
    }
    printf("steps %ld\n", steps);
    return 0;
}
