/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Flags, lengths, errors and limits that few programs meet, on a connection that is joined if the library is loaded.
 *
 *   odd CASE */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#include "answers.h"

enum { MESSAGES = 8, MESSAGE = 9000, BURSTS = 3000, MAPPED = 4 << 20 };

static char room[256 << 10];

static void come(const char *bytes) {
    check(send(ends[0], bytes, strlen(bytes), 0) == (ssize_t)strlen(bytes), "send");
    there(ends[1], strlen(bytes));
}

/* Returns the byte at a place of a long stream. */
static unsigned char at(unsigned long place) {
    return place * 31 + place / 251;
}

static void *takes(void *wrong) {
    static unsigned char taken[32 << 10];
    unsigned long place = 0;
    unsigned seed = 1;
    long n;
    while ((n = recv(ends[1], taken, 1 + rand_r(&seed) % sizeof taken, 0)) > 0) {
        for (long byte = 0; byte < n; byte++) {
            *(int *)wrong |= taken[byte] != at(place + byte);
        }
        place += n;
        if (rand_r(&seed) % 3 == 0) {
            usleep(rand_r(&seed) % 100);
        }
    }
    return (void *)place;
}

/* Sends many messages in one call, without room for all of them, while another thread makes room: no message follows
   one that was sent in part. */
static void parts(void) {
    static unsigned char bytes[MESSAGES][MESSAGE];
    unsigned long place = 0;
    int wrong = 0, amid = 0;
    pthread_t taker;
    void *taken;
    pair();
    check(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    check(pthread_create(&taker, NULL, takes, &wrong) == 0, "pthread_create");
    for (int burst = 0; burst < BURSTS && !amid; burst++) {
        struct iovec part[MESSAGES];
        struct mmsghdr messages[MESSAGES] = {0};
        for (int one = 0; one < MESSAGES; one++) {
            for (int byte = 0; byte < MESSAGE; byte++) {
                bytes[one][byte] = at(place + one * MESSAGE + byte);
            }
            part[one] = (struct iovec){bytes[one], MESSAGE};
            messages[one].msg_hdr = (struct msghdr){.msg_iov = &part[one], .msg_iovlen = 1};
        }
        int sent = sendmmsg(ends[0], messages, MESSAGES, 0);
        struct pollfd more = {.fd = ends[0], .events = POLLOUT};
        check(sent > 0 || (errno == EAGAIN && poll(&more, 1, 5000) == 1), "sendmmsg");
        for (int one = 0; one < sent; one++) {
            amid |= messages[one].msg_len < MESSAGE && one < sent - 1;
            place += messages[one].msg_len;
        }
    }
    check(shutdown(ends[0], SHUT_WR) == 0 && pthread_join(taker, &taken) == 0, "the end");
    printf("a message after a part of one: %d, all came: %d, in disorder: %d\n", amid, (unsigned long)taken == place, wrong);
}

static void times(void) {
    struct iovec part[3] = {{room, 2}, {room, 2}, {room, 2}};
    struct mmsghdr messages[3] = {0};
    struct timespec left = {10, 0}, none = {0, 0};
    for (int one = 0; one < 3; one++) {
        messages[one].msg_hdr = (struct msghdr){.msg_iov = &part[one], .msg_iovlen = 1};
    }
    pair();
    come("abcdef");
    say("recvmmsg within a time", recvmmsg(ends[1], messages, 3, 0, &left));
    printf("some is left: %d, and some is not: %d\n", left.tv_sec >= 5, left.tv_sec < 10);
    come("abcdef");
    say("within none", recvmmsg(ends[1], messages, 3, 0, &none));
    say("the rest", recv(ends[1], room, 10, MSG_DONTWAIT));
    left = (struct timespec){5, 1};
    say("nothing", recvmmsg(ends[1], messages, 3, MSG_DONTWAIT, &left));
    printf("the time: %ld %ld\n", (long)left.tv_sec, left.tv_nsec);
    /* A failure after the first message is reported by the next call. */
    come("ab");
    struct linger at_once = {1, 0};
    check(setsockopt(ends[0], SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0 && close(ends[0]) == 0, "close");
    struct pollfd over = {.fd = ends[1]};
    check(poll(&over, 1, 5000) == 1, "poll");
    say("before a reset", recvmmsg(ends[1], messages, 3, 0, NULL));
    say("the reset", recv(ends[1], room, 10, 0));
    say("the end", recv(ends[1], room, 10, 0));
}

static void flags(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(1)};
    struct sockaddr *name = (struct sockaddr *)&address;
    struct iovec part = {room, 2};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_name = name, .msg_namelen = -1};
    socklen_t len = -5;
    pair();
    come("abcdef");
    say("urgent data, thrown away", recv(ends[1], room, 1, MSG_TRUNC | MSG_OOB));
    say("what is beside, thrown away", recv(ends[1], room, 1, MSG_TRUNC | MSG_ERRQUEUE));
    say("a look", recv(ends[1], NULL, 3, MSG_TRUNC | MSG_PEEK));
    say("three", recv(ends[1], NULL, 3, MSG_TRUNC));
    struct iovec nowhere[2] = {{NULL, 1}, {NULL, 1}};
    struct msghdr thrown_away = {.msg_iov = nowhere, .msg_iovlen = 2};
    say("two, in a message", recvmsg(ends[1], &thrown_away, MSG_TRUNC));
    thrown_away.msg_iovlen = 2000;
    say("one of too many parts", recvmsg(ends[1], &thrown_away, MSG_TRUNC));
    say("one more", recv(ends[1], room, 10, MSG_DONTWAIT));
    say("to begin a connection", sendto(ends[0], "x", 1, MSG_FASTOPEN, name, sizeof address));
    say("the same to nobody", send(ends[0], "x", 1, MSG_FASTOPEN));
    say("to an address of less than no length", sendto(ends[0], "x", 1, 0, name, -1));
    say("to a long one", sendto(ends[0], "x", 1, 0, name, 1000));
    say("by a message", sendmsg(ends[0], &message, 0));
    say("recvmsg", recvmsg(ends[1], &message, MSG_DONTWAIT));
    say("nothing came", recv(ends[1], room, 10, MSG_DONTWAIT));
    come("ab");
    say("from an address of less than no length", recvfrom(ends[1], room, 1, 0, name, &len));
    printf("it is %d\n", (int)len);
    say("that took one", recv(ends[1], room, 10, MSG_DONTWAIT));
    static const int all[] = {RWF_HIPRI, RWF_DSYNC, RWF_SYNC, RWF_NOWAIT, RWF_APPEND, RWF_SYNC | RWF_APPEND, 1 << 12, 1 << 30};
    for (size_t one = 0; one < sizeof all / sizeof *all; one++) {
        memcpy(room, "ab", 2);
        say("pwritev2", pwritev2(ends[0], &part, 1, -1, all[one]));
        say("preadv2", preadv2(ends[1], &part, 1, -1, all[one] & ~RWF_NOWAIT));
        say("what is left", recv(ends[1], room, 10, MSG_DONTWAIT));
    }
    /* A flag that only some kernels know, and that has no effect here. */
    long sent = pwritev2(ends[0], &part, 1, -1, 0x20);
    usleep(20000);
    say("as many as were sent", recv(ends[1], room, 10, MSG_DONTWAIT) == sent);
    talk(ends);
}

/* An error that comes behind bytes is kept for the call that asks for it. */
static void pending(void) {
    struct pollfd said;
    int error = 0;
    socklen_t len = sizeof error;
    pair();
    come("abc");
    check(send(ends[1], "unread", 6, 0) == 6, "send");
    there(ends[0], 6);
    close(ends[0]);
    said = (struct pollfd){.fd = ends[1], .events = POLLIN | POLLOUT | POLLRDHUP};
    while (!(said.revents & POLLERR)) {
        check(poll(&said, 1, 5000) == 1, "poll");
    }
    say("all of ten", recv(ends[1], room, 10, MSG_WAITALL));
    check(poll(&said, 1, 0) == 1, "poll");
    printf("poll: %x\n", said.revents);
    check(getsockopt(ends[1], SOL_SOCKET, SO_ERROR, &error, &len) == 0, "SO_ERROR");
    printf("the error: %s\n", strerrorname_np(error));
    say("recv", recv(ends[1], room, 10, 0));
    say("send", send(ends[1], "x", 1, MSG_NOSIGNAL));
}

/* As TLS libraries do, which continue without it. */
static void protocol(void) {
    pair();
    say("a protocol that there is not", setsockopt(ends[0], IPPROTO_TCP, TCP_ULP, "tombolo", 7));
    say("an empty name", setsockopt(ends[0], IPPROTO_TCP, TCP_ULP, "", 0));
    talk(ends);
}

static void *gives(void *nothing) {
    for (unsigned long place = 0; place < MAPPED; place += sizeof room) {
        for (unsigned long byte = 0; byte < sizeof room; byte++) {
            room[byte] = (char)at(place + byte);
        }
        for (unsigned long done = 0; done < sizeof room;) {
            long n = send(ends[0], room + done, sizeof room - done, 0);
            check(n > 0, "send");
            done += (unsigned long)n;
        }
    }
    check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    return nothing;
}

/* A stream of which the kernel maps the bytes that fill pages, and reports how many of the rest are to be read. */
static void mapped(void) {
    static unsigned char rest[64 << 10];
    unsigned long place = 0, wrong = 0, in_vain = 0;
    pthread_t giver;
    pair();
    unsigned char *pages = mmap(NULL, sizeof room, PROT_READ, MAP_SHARED, ends[1], 0);
    if (pages == MAP_FAILED) {
        perror("mmap"); /* A kernel without this function. */
        return;
    }
    check(pthread_create(&giver, NULL, gives, NULL) == 0, "pthread_create");
    while (in_vain < 10000) {
        struct pollfd one = {.fd = ends[1], .events = POLLIN};
        struct tcp_zerocopy_receive asks = {.address = (uintptr_t)pages, .length = sizeof room};
        socklen_t len = sizeof asks;
        check(poll(&one, 1, 5000) == 1, "poll");
        if (getsockopt(ends[1], IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, &asks, &len) != 0) {
            break;
        }
        long n = asks.recv_skip_hint < sizeof rest ? asks.recv_skip_hint : sizeof rest;
        in_vain = asks.length || n ? 0 : in_vain + 1;
        for (unsigned long byte = 0; byte < asks.length; byte++) {
            wrong += pages[byte] != at(place++);
        }
        n = n > 0 ? recv(ends[1], rest, (size_t)n, 0) : 0;
        for (long byte = 0; byte < n; byte++) {
            wrong += rest[byte] != at(place++);
        }
    }
    say("the end", in_vain < 10000 ? -1 : 0);
    printf("%lu bytes, %lu of them wrong\n", place, wrong);
    check(pthread_join(giver, NULL) == 0 && munmap(pages, sizeof room) == 0, "munmap");
}

/* A program that limits its pace sends no faster, whether it sets the limit before there is a connection or later. */
static void paced(void) {
    for (int early = 0; early < 2; early++) {
        unsigned rate = 4 << 20;
        unsigned long place = 0;
        struct timespec begun, over;
        pthread_t giver;
        pair();
        if (early) {
            close(ends[0]);
            close(ends[1]);
            meet(ends);
        }
        say("a limit", setsockopt(ends[0], SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate));
        talk(ends);
        clock_gettime(CLOCK_MONOTONIC, &begun);
        check(pthread_create(&giver, NULL, gives, NULL) == 0, "pthread_create");
        for (long n; place < 2 << 20; place += (unsigned long)n) {
            static char taken[64 << 10];
            check((n = recv(ends[1], taken, sizeof taken, 0)) > 0, "recv");
        }
        clock_gettime(CLOCK_MONOTONIC, &over);
        long millis = (over.tv_sec - begun.tv_sec) * 1000 + (over.tv_nsec - begun.tv_nsec) / 1000000;
        say("is kept to", millis >= 250);
        while (recv(ends[1], (char[64 << 10]){0}, 64 << 10, 0) > 0) {
        }
        check(pthread_join(giver, NULL) == 0, "pthread_join");
    }
}

/* A program with a limited address space has enough of it for its allocations. */
static void space(void) {
    enum { CONNECTIONS = 64, MUCH = 100000 };
    struct rlimit few = {24 << 20, 24 << 20};
    check(setrlimit(RLIMIT_AS, &few) == 0, "RLIMIT_AS");
    for (int one = 0; one < CONNECTIONS; one++) {
        pair();
        check(send(ends[0], room, MUCH, 0) == MUCH, "send");
        check(recv(ends[1], room + MUCH, MUCH, MSG_WAITALL) == MUCH, "recv");
    }
    void *own = malloc(4 << 20);
    printf("some is left: %d\n", own != NULL);
}

/* Sends "early", waits `us` microseconds, takes what has come, and sends "late". */
static void answer(int end, long us) {
    check(send(end, "early\n", 6, 0) == 6, "send");
    usleep(us);
    int wrong = recv(end, room, 5, MSG_WAITALL) != 5 || memcmp(room, "back\n", 5) != 0;
    check(send(end, "late\n", 5, 0) == 5, "send");
    _exit(recv(end, room, 1, 0) != 0 || wrong);
}

/* A process that ends with bytes unread resets its connections, however it ends. */
static void exits(void) {
    static const char *const ways[] = {"close", "exit", "_exit", "_Exit"};
    for (int way = 0; way < 4; way++) {
        int end;
        pid_t peer = meet_peer(&end);
        if (!peer) {
            check(send(end, "last", 4, 0) == 4, "send");
            there(end, 6);
            if (way == 0) {
                close(end);
            } else if (way == 1) {
                exit(0);
            } else if (way == 3) {
                _Exit(0);
            }
            _exit(0);
        }
        check(send(end, "unread", 6, 0) == 6 && waitpid(peer, NULL, 0) == peer, "the end");
        struct pollfd said = {.fd = end, .events = POLLRDHUP};
        check(poll(&said, 1, 5000) == 1, "poll");
        printf("%s: %x\n", ways[way], said.revents);
        say("what was said last", recv(end, room, 100, 0));
        say("then", recv(end, room, 100, 0));
        say("and then", recv(end, room, 100, 0));
        say("send", send(end, "x", 1, MSG_NOSIGNAL));
        close(end);
    }
}

/* Standard streams of libc whose numbers become the socket: with a peer that makes calls, and with one that makes none
 * for longer than any call waits. */
static void streams(void) {
    for (int silent = 0; silent < 2; silent++) {
        int end, status, was[2] = {dup(0), dup(1)};
        pid_t peer = meet_peer(&end);
        if (!peer) {
            answer(end, silent ? 1500000 : 100000);
        }
        usleep(50000);
        check(fflush(stdout) == 0 && dup2(end, 0) == 0 && dup2(end, 1) == 1, "dup2");
        close(end);
        int first = fgets(room, 100, stdin) != NULL && strcmp(room, "early\n") == 0;
        int told = printf("back\n") == 5 && fflush(stdout) == 0;
        int next = fgets(room, 100, stdin) != NULL && strcmp(room, "late\n") == 0;
        check(shutdown(0, SHUT_WR) == 0 && waitpid(peer, &status, 0) == peer, "the end");
        check(dup2(was[0], 0) == 0 && dup2(was[1], 1) == 1, "dup2");
        printf("first %d, told %d, next %d, the peer %d\n", first, told, next, status);
    }
}

/* The peer sends no more, and bytes are left to read; with `both` this end has shut down its sending as well. A wait in
 * a set reports both at once. A poll reports the end although no event was asked for. */
static void end_behind_bytes(uint32_t mode, int most, int both) {
    pair();
    int set = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | (both ? 0 : EPOLLRDHUP) | mode, .data.u64 = 7}, told[4];
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "add");
    check(!both || shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    check(write(ends[1], "bytes", 5) == 5, "write");
    check(shutdown(ends[1], SHUT_WR) == 0, "shutdown");
    usleep(50000);
    struct pollfd asks[] = {{ends[0], 0, 0}, {ends[0], POLLIN, 0}};
    say("poll for nothing", poll(asks, 1, 0));
    say("says", asks[0].revents);
    say("poll for bytes too", poll(asks, 2, 0));
    say("says of nothing", asks[0].revents);
    say("says of bytes", asks[1].revents);
    int many = epoll_wait(set, told, most, 5000);
    say("told", many);
    say("of bytes and of the end", many == 1 ? told[0].events : 0);
    say("once more", epoll_wait(set, told, most, 0));
    say("bytes", read(ends[0], room, 8));
    say("end", read(ends[0], room, 8));
    close(set);
    close(ends[0]);
    close(ends[1]);
}

static void ends_behind_bytes(void) {
    static const uint32_t modes[] = {0, EPOLLET, EPOLLONESHOT};
    // With room for more events, and with room for this one.
    for (int most = 1; most <= 4; most += 3) {
        for (int at = 0; at < 6; at++) {
            end_behind_bytes(modes[at % 3], most, at >= 3);
        }
    }
}

/* Returns whether there is room to send within so many milliseconds: by `poll`, by `select`, or by the set `levels`. */
static int has_room(int how, int levels, int limit) {
    struct pollfd asks = {ends[0], POLLOUT, 0};
    struct timeval time = {0, limit * 1000};
    struct epoll_event event;
    fd_set writes;
    FD_ZERO(&writes);
    FD_SET(ends[0], &writes);
    return how == 0   ? poll(&asks, 1, limit)
           : how == 1 ? select(ends[0] + 1, NULL, &writes, NULL, &time)
                      : epoll_wait(levels, &event, 1, limit);
}

/* A set with `EPOLLET` reports room although no send found none, once another call, or the set itself, has reported
   that there is none. */
static void room_after_none(int how) {
    pair();
    int set = epoll_create1(0), levels = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET}, level = {.events = EPOLLOUT}, told[4];
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0 && epoll_wait(set, told, 4, 5000) == 1, "add");
    check(epoll_ctl(levels, EPOLL_CTL_ADD, ends[0], &level) == 0, "add");
    while (has_room(how, levels, 100)) {
        check(send(ends[0], room, 1000, MSG_DONTWAIT) == 1000, "send");
    }
    say("nothing yet", epoll_wait(set, told, 4, 0));
    if (how == 2) {
        check(write(ends[1], "bytes", 5) == 5, "write");
        say("told", epoll_wait(set, told, 4, 5000));
        say("of bytes", told[0].events);
        say("bytes", read(ends[0], room, 8));
    }
    while (recv(ends[1], room, sizeof room, MSG_DONTWAIT) > 0 || !has_room(how, levels, 10)) {
    }
    say("told", epoll_wait(set, told, 4, 5000));
    say("of room", told[0].events);
    close(set);
    close(levels);
    close(ends[0]);
    close(ends[1]);
}

int main(int count, char **words) {
    const char *word = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(word, "parts") == 0) {
        parts();
    } else if (strcmp(word, "times") == 0) {
        times();
    } else if (strcmp(word, "flags") == 0) {
        flags();
    } else if (strcmp(word, "pending") == 0) {
        pending();
    } else if (strcmp(word, "protocol") == 0) {
        protocol();
    } else if (strcmp(word, "mapped") == 0) {
        mapped();
    } else if (strcmp(word, "paced") == 0) {
        paced();
    } else if (strcmp(word, "space") == 0) {
        space();
    } else if (strcmp(word, "exits") == 0) {
        exits();
    } else if (strcmp(word, "streams") == 0) {
        streams();
    } else if (strcmp(word, "ends") == 0) {
        ends_behind_bytes();
    } else if (strcmp(word, "room") == 0) {
        for (int how = 0; how < 3; how++) {
            room_after_none(how);
        }
    }
    printf("done\n");
    return 0;
}
