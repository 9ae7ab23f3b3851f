/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Orders of calls that few programs make, on a connection that is joined if the library is loaded.
 *
 *   rare CASE */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

#include "answers.h"

enum { MUCH = 600 << 10, ROOM = 64 << 10, MESSAGES = 20000, PARTS = 6 };

static char room[MUCH];

static void hear(int signal) {
    (void)signal;
}

static void ticks(int flags, long us) {
    struct sigaction action = {.sa_handler = hear, .sa_flags = flags};
    struct itimerval again = {{0, us}, {0, us}};
    check(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &again, NULL) == 0, "ticks");
}

/* The remaining time is also returned after a signal. */
static void selects(void) {
    struct timeval left = {0, 200000};
    fd_set set;
    int signals = 0;
    pair();
    ticks(0, 20000);
    for (;;) {
        FD_ZERO(&set);
        FD_SET(ends[0], &set);
        int found = select(ends[0] + 1, &set, NULL, NULL, &left);
        if (found == 0) {
            break;
        }
        check(found == -1 && errno == EINTR, "select");
        if (++signals == 500) {
            puts("select goes on for ever");
            _exit(0);
        }
    }
    printf("select ends after some signals: %d\n", signals > 0);
}

/* A call that has moved bytes returns on a signal, even one after whose handler calls are restarted. */
static void restarts(void) {
    static char much[64 << 20];
    pair();
    check(send(ends[0], "abc", 3, 0) == 3, "send");
    ticks(SA_RESTART, 50000);
    say("all of 10", recv(ends[1], room, 10, MSG_WAITALL));
    long sent = send(ends[0], much, sizeof much, 0);
    printf("a part of much: %d\n", sent > 0 && sent < (long)sizeof much);
}

/* A socket that is disconnected and connected again. */
static void disconnects(void) {
    struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = 7};
    socklen_t len = sizeof address;
    pair();
    int set = epoll_create1(0), copy = dup(ends[0]), listener = socket(AF_INET, SOCK_STREAM, 0);
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll_ctl");
    talk(ends);
    say("disconnect", connect(ends[0], &nowhere, sizeof nowhere));
    say("the peer", recv(ends[1], room, 10, 0));
    check(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
    say("connect", connect(ends[0], (struct sockaddr *)&address, len));
    ends[1] = accept(listener, NULL, NULL);
    say("send", send(copy, "hello", 5, 0));
    say("recv", recv(ends[1], room, 5, MSG_WAITALL));
    talk(ends);
    check(send(ends[1], "back", 4, 0) == 4, "send");
    say("told", epoll_wait(set, &event, 1, 5000));
    say("of", event.data.u32);
    say("recv", recv(ends[0], room, 10, 0));
    say("no more", epoll_wait(set, &event, 1, 0));
}

/* One recvmsg with so much room for ancillary data, which holds the number of bytes left. */
static void hears(const char *what, size_t bytes, size_t beside, int flags) {
    char control[200];
    struct iovec part = {room, bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_controllen = beside};
    message.msg_control = beside > 0 ? memset(control, 0, sizeof control) : NULL;
    long got = recvmsg(ends[1], &message, flags);
    struct cmsghdr *said = got >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
    say(what, got);
    printf("%s: flags %x\n", what, message.msg_flags);
    if (said) {
        printf("%s: %d %d, %zu of %zu, %d\n", what, said->cmsg_level, said->cmsg_type, said->cmsg_len,
               message.msg_controllen, *(int *)CMSG_DATA(said));
    }
}

static void asks_beside(int level, int name, int early) {
    int one = 1;
    meet(ends);
    check(!early || setsockopt(ends[1], level, name, &one, sizeof one) == 0, "early");
    talk(ends);
    check(early || setsockopt(ends[1], level, name, &one, sizeof one) == 0, "late");
}

/* The number of bytes left: also truncated, where there is little room, and at the end; and a reader that relies on it
   alone. */
static void rest(int early) {
    static const size_t rooms[] = {0, 8, 16, 18, 20, 23, 24, 200};
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    int set = epoll_create1(0), zero = 0;
    asks_beside(IPPROTO_TCP, TCP_INQ, early);
    check(send(ends[0], room, 60, 0) == 60, "send");
    there(ends[1], 60);
    hears("peeks", 4, 200, MSG_PEEK);
    for (int at = 0; at < 8; at++) {
        hears("reads", 4, rooms[at], 0);
    }
    hears("the rest", 100, 200, 0);
    hears("none", 100, 200, MSG_DONTWAIT);
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &event) == 0, "epoll_ctl");
    for (int at = 0; at < 200; at++) {
        check(send(ends[0], room, 3000, 0) == 3000, "send");
        check(epoll_wait(set, &event, 1, 10000) == 1, "epoll_wait");
        for (long got = 0; got < 3000;) {
            char control[64];
            struct iovec part = {room, 1000};
            struct msghdr message = {&(struct sockaddr_in){0}, 0, &part, 1, control, sizeof control, 0};
            long n = recvmsg(ends[1], &message, 0);
            check(n > 0 && CMSG_FIRSTHDR(&message), "recvmsg");
            got += n;
            /* No byte is left for now: the reader is notified of further ones. */
            if (*(int *)CMSG_DATA(CMSG_FIRSTHDR(&message)) == 0 && got < 3000) {
                check(epoll_wait(set, &event, 1, 10000) == 1, "epoll_wait");
            }
        }
    }
    check(send(ends[0], "last", 4, 0) == 4 && shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    there(ends[1], 4);
    while (poll(&(struct pollfd){.fd = ends[1], .events = POLLRDHUP}, 1, 0) == 0) {
    }
    hears("before the end", 2, 200, 0);
    hears("at the end", 10, 200, 0);
    check(setsockopt(ends[1], IPPROTO_TCP, TCP_INQ, &zero, sizeof zero) == 0, "TCP_INQ");
    hears("no more", 10, 200, 0);
    close(set);
}

/* The time at which bytes came. The kernel begins to record it a moment after a program asks, and reports none for
   earlier bytes. */
static void arrivals(int early) {
    asks_beside(SOL_SOCKET, SO_TIMESTAMP, early);
    check(send(ends[0], "0123456789", 10, 0) == 10, "send");
    there(ends[1], 10);
    say("without room", recv(ends[1], room, 4, 0));
    char control[64];
    struct iovec part = {room, 3};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    say("with it", recvmsg(ends[1], &message, 0));
    say("rest", recv(ends[1], room, 10, 0));
    for (int at = 0; at < 10000; at++) {
        check(send(ends[0], "abc", 3, 0) == 3, "send");
        message.msg_controllen = sizeof control;
        check(recvmsg(ends[1], &message, 0) == 3, "recvmsg");
        if (CMSG_FIRSTHDR(&message)) {
            puts("says when it came");
            return;
        }
        turn(ends[1], ends[0]);
    }
    puts("never says when it came");
}

/* A program that asks only for the end is notified of it while bytes are left. */
static void hangups(void) {
    static const uint32_t ways[] = {EPOLLRDHUP, EPOLLRDHUP | EPOLLET, EPOLLRDHUP | EPOLLONESHOT};
    for (int at = 0; at < 3; at++) {
        struct epoll_event event = {.events = ways[at]};
        int set = epoll_create1(0);
        pair();
        check(epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &event) == 0, "epoll_ctl");
        say("not yet", epoll_wait(set, &event, 1, 0));
        check(send(ends[0], "abc", 3, 0) == 3, "send");
        there(ends[1], 3);
        say("bytes", epoll_wait(set, &event, 1, 0));
        check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
        event.events = 0;
        say("the end", epoll_wait(set, &event, 1, 5000));
        printf("%x\n", event.events);
        say("again", epoll_wait(set, &event, 1, 0));
        say("recv", recv(ends[1], room, 10, 0));
        close(set);
    }
}

/* Sends everything, then reads everything: a program that relies on the capacity of TCP's buffers. */
struct side {
    int fd;
    const char *how;
    long got;
};

static void *exchange(void *argument) {
    struct side *side = argument;
    int waits = strcmp(side->how, "blocks"), set = epoll_create1(0);
    int tries = strcmp(side->how, "tries") == 0, spins = strcmp(side->how, "spins") == 0;
    int polls = strcmp(side->how, "poll") == 0 || strcmp(side->how, "spins by poll") == 0;
    int timeout = spins || strcmp(side->how, "spins by poll") == 0 ? 0 : 20000;
    struct epoll_event event = {.events = EPOLLOUT};
    time_t begun = time(NULL);
    check(polls || tries || !waits || epoll_ctl(set, EPOLL_CTL_ADD, side->fd, &event) == 0, "epoll_ctl");
    char *bytes = calloc(1, MUCH);
    for (long sent = 0; sent < MUCH;) {
        long n = send(side->fd, bytes + sent, (size_t)(MUCH - sent), waits ? MSG_DONTWAIT : 0);
        struct pollfd one = {.fd = side->fd, .events = POLLOUT};
        sent += n > 0 ? n : 0;
        check(n > 0 || errno == EAGAIN, "send");
        if (n < 0 && tries) {
            usleep(100);
            n = time(NULL) < begun + 20;
        }
        while (n < 0) {
            n = polls ? poll(&one, 1, timeout) : epoll_wait(set, &event, 1, timeout);
            n = n == 0 && time(NULL) < begun + 20 ? -1 : n;
        }
        check(n > 0, "room");
    }
    side->got = recv(side->fd, bytes, MUCH, MSG_WAITALL);
    free(bytes);
    close(set);
    return NULL;
}

static void exchanges(const char *how) {
    pair();
    for (int at = 0; at < 4; at++) {
        struct side sides[2] = {{ends[0], how, 0}, {ends[1], how, 0}};
        pthread_t threads[2];
        for (int end = 0; end < 2; end++) {
            check(pthread_create(&threads[end], NULL, exchange, &sides[end]) == 0, "thread");
        }
        for (int end = 0; end < 2; end++) {
            pthread_join(threads[end], NULL);
        }
        printf("exchanged: %d\n", sides[0].got == MUCH && sides[1].got == MUCH);
        talk(ends);
    }
}

static void *watch_both(void *argument) {
    struct pollfd *both = argument;
    say("found", poll(both, 2, 10000));
    printf("%x %x\n", both[0].revents, both[1].revents);
    return NULL;
}

/* A thread waits for a connection that is joined and for one that others are about to join. */
static void watched(void) {
    int other[2], none = 0;
    pthread_t thread;
    pair();
    meet(other);
    turn(other[0], other[1]);
    struct pollfd both[2] = {{.fd = ends[1], .events = POLLIN}, {.fd = other[1], .events = POLLIN}};
    check(pthread_create(&thread, NULL, watch_both, both) == 0, "thread");
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    for (int at = 0; at < 200; at++) {
        struct pollfd one = {.fd = other[at % 2], .events = POLLIN};
        none += poll(&one, 1, 0) + (recv(other[at % 2], room, 1, MSG_DONTWAIT) < 0);
    }
    say("none", none);
    check(send(other[0], "abc", 3, 0) == 3, "send");
    pthread_join(thread, NULL);
    say("recv", recv(other[1], room, 10, MSG_DONTWAIT));
}

/* An endpoint that has shut down its sending, and was not joined at that time. */
static void shut(void) {
    meet(ends);
    turn(ends[0], ends[1]);
    check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    for (int at = 0; at < 4 * TURNS; at++) {
        turn(ends[1], ends[0]);
        recv(ends[1], room, 1, MSG_DONTWAIT);
    }
    say("send after the end", send(ends[0], "x", 1, MSG_NOSIGNAL));
    say("recv", recv(ends[1], room, 10, MSG_DONTWAIT));
}

/* A read that returns less than there was room for has returned everything: the next bytes come with an edge. */
static void *parts(void *argument) {
    unsigned seed = 1;
    char bytes[100] = "";
    for (int at = 0; at < MESSAGES; at++) {
        for (int part = 0; part < PARTS; part++) {
            check(send(ends[0], bytes, sizeof bytes, 0) == sizeof bytes, "part");
            for (volatile unsigned turn = rand_r(&seed) % 20000; turn > 0; turn--) {
            }
        }
        check(recv(ends[0], bytes, 1, 0) == 1, "answer");
    }
    return argument;
}

static void shorts(void) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    pthread_t thread;
    int set = epoll_create1(0), on = 1, ready = 0;
    pair();
    check(setsockopt(ends[0], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "TCP_NODELAY");
    check(ioctl(ends[1], FIONBIO, &on) == 0 && epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &event) == 0, "epoll_ctl");
    check(pthread_create(&thread, NULL, parts, NULL) == 0, "thread");
    for (int at = 0; at < MESSAGES; at++) {
        for (long got = 0; got < (long)(PARTS * sizeof(char[100]));) {
            if (!ready && epoll_wait(set, &event, 1, 10000) == 0) {
                printf("nothing comes of message %d after %ld bytes\n", at, got);
                _exit(0);
            }
            long n = recv(ends[1], room, ROOM, 0);
            check(n > 0 || errno == EAGAIN, "recv");
            got += n > 0 ? n : 0;
            ready = n == ROOM;
        }
        check(send(ends[1], "x", 1, 0) == 1, "answer");
    }
    pthread_join(thread, NULL);
    puts("all messages");
}

/* Everything in a pipe is sent in one call, also over a connection that is about to be joined, and much of it is
   received in one. */
static void splices(void) {
    int line[2], other[2];
    char byte = 0;
    check(pipe(line) == 0 && pipe(other) == 0, "pipe");
    meet(ends);
    for (int at = 0; at < ROOM; at++) {
        room[at] = (char)(at * 7 + at / 251);
    }
    check(write(line[1], room, ROOM) == ROOM, "write");
    say("all of it", splice(line[0], NULL, ends[0], NULL, MUCH, 0));
    there(ends[1], ROOM);
    long n = splice(ends[1], NULL, other[1], NULL, MUCH, 0), got = 0;
    printf("much of it: %d\n", n > ROOM / 8);
    for (; got < ROOM; got++) {
        check(got < n ? read(other[0], &byte, 1) == 1 : recv(ends[1], &byte, 1, 0) == 1, "read");
        check(byte == room[got], "byte");
    }
    talk(ends);
}

/* `sendfile` from a connection to a pipe gives what has come. Anything else that it cannot do fails as it does for the
   kernel. */
static void sends_from(void) {
    enum { PART = 600 };
    int line[2], sink = open("/dev/null", O_WRONLY);
    char bytes[PART];
    off_t offset = 0;
    check(pipe(line) == 0 && sink >= 0, "pipe");
    meet(ends);
    talk(ends);
    for (int at = 0; at < PART; at++) {
        room[at] = (char)(at * 7);
    }
    for (int times = 0; times < 100; times++) {
        check(send(ends[0], room, PART, 0) == PART, "send");
        there(ends[1], PART);
        check(sendfile(line[1], ends[1], NULL, PART / 2) == PART / 2, "half");
        check(sendfile(line[1], ends[1], NULL, MUCH) == PART / 2, "rest");
        check(read(line[0], bytes, PART) == PART && memcmp(bytes, room, PART) == 0, "bytes");
        turn(ends[1], ends[0]);
    }
    check(send(ends[0], room, PART, 0) == PART, "send");
    there(ends[1], PART);
    say("nothing", sendfile(line[1], ends[1], NULL, 0));
    say("from an offset", sendfile(line[1], ends[1], &offset, PART));
    say("to no pipe", sendfile(sink, ends[1], NULL, PART));
    say("to a connection", sendfile(ends[0], ends[1], NULL, PART));
    check(recv(ends[1], bytes, PART, MSG_WAITALL) == PART, "recv");
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    say("what is not there", sendfile(line[1], ends[1], NULL, PART));
    shutdown(ends[0], SHUT_WR);
    fcntl(ends[1], F_SETFL, 0);
    say("the end", sendfile(line[1], ends[1], NULL, PART));
}

/* Messages that are sent in parts, and peeked at until they are whole. */
enum { LOOKED_AT = 600, MANY_PARTS = 8 };

struct message {
    unsigned seed;
    size_t len, whole;
};

static struct message next(struct message last, size_t least, size_t most) {
    struct message next = {.seed = last.seed, .whole = least};
    next.whole += (size_t)rand_r(&next.seed) % (most - least + 1);
    return next;
}

static char expected(const struct message *message, size_t at) {
    return (char)((message->seed + at * 7 + (at >> 8) * 13) % 251);
}

static size_t looks[3];

static void *send_parts(void *argument) {
    static char bytes[MUCH];
    struct message message = {.seed = 1};
    unsigned seed = 2;
    for (size_t at = 0; at < looks[0]; at++) {
        message = next(message, looks[1], looks[2]);
        for (size_t byte = 0; byte < message.whole; byte++) {
            bytes[byte] = expected(&message, byte);
        }
        for (size_t sent = 0; sent < message.whole;) {
            size_t part = 1 + (size_t)rand_r(&seed) % (message.whole * 2 / MANY_PARTS + 1);
            part = part < message.whole - sent ? part : message.whole - sent;
            check(send(ends[0], bytes + sent, part, 0) == (long)part, "part");
            sent += part;
            for (volatile unsigned turn = rand_r(&seed) % 20000; turn > 0; turn--) {
            }
        }
        check(recv(ends[0], bytes, 1, 0) == 1, "answer");
    }
    return argument;
}

static void peeks(const char *how, size_t count, size_t least, size_t most) {
    int edges = strcmp(how, "edge") == 0, all = strcmp(how, "all") == 0, counts = strcmp(how, "count") == 0;
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    struct timeval limit = {.tv_sec = 10};
    struct message message = {.seed = 1};
    pthread_t thread;
    int set = epoll_create1(0), on = 1;
    pair();
    check(setsockopt(ends[0], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "TCP_NODELAY");
    check(setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0, "SO_RCVTIMEO");
    check(!edges || epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &event) == 0, "epoll_ctl");
    looks[0] = count, looks[1] = least, looks[2] = most;
    check(pthread_create(&thread, NULL, send_parts, NULL) == 0, "thread");
    for (size_t at = 0; at < count; at++) {
        struct pollfd one = {.fd = ends[1], .events = POLLIN};
        time_t begun = time(NULL);
        long shown = 0;
        int there = 0;
        message = next(message, least, most);
        while (shown < (long)message.whole) {
            if (time(NULL) > begun + 10 || (edges && epoll_wait(set, &event, 1, 10000) != 1) ||
                (!edges && !all && poll(&one, 1, 10000) != 1)) {
                printf("of message %zu of %zu bytes %ld are shown\n", at, message.whole, shown);
                _exit(0);
            }
            if (counts) {
                check(ioctl(ends[1], FIONREAD, &there) == 0, "FIONREAD");
                if (there < (int)message.whole) {
                    continue;
                }
            }
            shown = recv(ends[1], room, message.whole, MSG_PEEK | (all ? MSG_WAITALL : edges ? MSG_DONTWAIT : 0));
            check(shown > 0 || (edges && errno == EAGAIN), "peek");
            for (long byte = 0; byte < shown; byte++) {
                if (room[byte] != expected(&message, (size_t)byte)) {
                    printf("byte %ld of message %zu is another\n", byte, at);
                    _exit(0);
                }
            }
            if (all && shown < (long)message.whole) {
                printf("not all of message %zu\n", at);
                _exit(0);
            }
        }
        check(recv(ends[1], room, message.whole, MSG_WAITALL) == (long)message.whole, "recv");
        check(room[message.whole - 1] == expected(&message, message.whole - 1), "the last byte");
        check(send(ends[1], "x", 1, 0) == 1, "answer");
    }
    pthread_join(thread, NULL);
    puts("all are shown whole");
}

/* A socket that has shut down both directions receives no more, and a peer that still sends to it gets an error. */
static void both_ways(void) {
    struct timespec moment = {.tv_nsec = 1000000};
    pair();
    check(send(ends[1], "before", 6, 0) == 6, "send");
    there(ends[0], 6);
    say("shut down both ways", shutdown(ends[0], SHUT_RDWR));
    say("what was there", recv(ends[0], room, 10, 0));
    say("no more", recv(ends[0], room, 10, 0));
    say("the other end", recv(ends[1], room, 10, 0));
    for (int at = 0; at < 5000 && send(ends[1], "after", 5, MSG_NOSIGNAL) == 5; at++) {
        nanosleep(&moment, NULL);
    }
    say("it sends", send(ends[1], "after", 5, MSG_NOSIGNAL));
    say("none of it", recv(ends[0], room, 10, 0));
    /* The same where nothing was there, by two calls. */
    struct pollfd one;
    pair();
    check(shutdown(ends[0], SHUT_RD) == 0 && shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    one = (struct pollfd){.fd = ends[1], .events = POLLRDHUP};
    say("told", poll(&one, 1, 5000));
    for (int at = 0; at < 5000 && send(ends[1], "after", 5, MSG_NOSIGNAL) == 5; at++) {
        nanosleep(&moment, NULL);
    }
    one = (struct pollfd){.fd = ends[1]};
    say("hangs up", poll(&one, 1, 5000));
    printf("with %x\n", (unsigned)one.revents & (POLLHUP | POLLERR));
}

/* A process that ends in one of three ways, with nothing unread: a peer that only sends to it gets an error, also a
   peer that receives no more. */
static void gone(void) {
    static const char *ways[] = {"killed", "_exit", "exit", "killed, to one that is deaf"};
    struct timespec moment = {.tv_nsec = 1000000};
    for (int how = 0; how < 4; how++) {
        int fd;
        pid_t peer = meet_peer(&fd);
        if (peer == 0) {
            if (how % 3 == 0) {
                pause();
            } else if (how == 1) {
                _exit(0);
            }
            exit(0);
        }
        check(how != 3 || shutdown(fd, SHUT_RD) == 0, "shutdown");
        check(how % 3 != 0 || kill(peer, SIGKILL) == 0, "kill");
        check(waitpid(peer, NULL, 0) == peer, "waitpid");
        for (int at = 0; at < 5000 && send(fd, "after", 5, MSG_NOSIGNAL) == 5; at++) {
            nanosleep(&moment, NULL);
        }
        say(ways[how], send(fd, "after", 5, MSG_NOSIGNAL));
        close(fd);
    }
}

/* A socket that has shut down its own receiving is not one whose peer has ended: it returns to TCP with all unread
   bytes. */
static void deaf(void) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLEXCLUSIVE};
    int set = epoll_create1(0);
    pair();
    check(shutdown(ends[0], SHUT_RD) == 0 && send(ends[1], "unread", 6, 0) == 6, "unread");
    there(ends[0], 6);
    say("a way that needs the kernel", epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event));
    say("the other end goes on", send(ends[1], " and more", 9, MSG_NOSIGNAL));
    there(ends[0], 15);
    say("all of it", recv(ends[0], room, 100, 0));
    say("and no more", recv(ends[0], room, 100, 0));
    say("the other way", send(ends[0], "back", 4, MSG_NOSIGNAL));
    say("recv", recv(ends[1], room, 100, 0));
}

/* Arguments that the kernel refuses before it checks anything else. */
static void refuses(void) {
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *first = CMSG_FIRSTHDR(&message);
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(0), pipes[2], file = memfd_create("file", 0);
    /* Hides from the compiler that these are too many. */
    volatile nfds_t many = 2000000;
    volatile int most = 0x7fffffff;
    off_t at = 0;
    pair();
    struct pollfd one = {.fd = ends[0], .events = POLLIN};
    say("poll of too many", poll(&one, many, 0));
    say("ppoll of too many", ppoll(&one, many, NULL, NULL));
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll_ctl");
    say("epoll_wait for too many", epoll_wait(set, &event, most, 0));
    event.events = EPOLLIN | EPOLLEXCLUSIVE;
    say("what is in the set already", epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event));
    *first = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = 99, .cmsg_len = CMSG_LEN(sizeof(int))};
    say("a control message of no kind", sendmsg(ends[0], &message, 0));
    *first = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = 3};
    say("one that is too short", sendmsg(ends[0], &message, 0));
    *first = (struct cmsghdr){.cmsg_level = IPPROTO_TCP, .cmsg_type = 99, .cmsg_len = CMSG_LEN(sizeof(int))};
    say("one for somebody else", sendmsg(ends[0], &message, 0));
    say("recv", recv(ends[1], room, 10, 0));
    check(pipe(pipes) == 0 && write(file, "0123456789", 10) == 10, "files");
    say("sendfile of nothing from a pipe", sendfile(ends[0], pipes[0], NULL, 0));
    say("from a pipe", sendfile(ends[0], pipes[0], NULL, 10));
    say("from no file", sendfile(ends[0], 888, NULL, 10));
    say("from before its beginning", (at = -5, sendfile(ends[0], file, &at, 10)));
    say("of nothing", (at = 2, sendfile(ends[0], file, &at, 0)));
    say("of the rest", sendfile(ends[0], file, &at, 100));
    say("at its end", sendfile(ends[0], file, &at, 100));
    say("recv", recv(ends[1], room, 10, 0));
}

/* Makes two processes with one end each, which have talked enough to be joined, and a pipe from the parent to the
   child, in which the function returns 0. */
static pid_t meet_child(int *end, int go[2]) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &len) == 0 && pipe(go) == 0, "getsockname");
    pid_t child = fork();
    *end = child ? accept(listener, NULL, NULL) : socket(AF_INET, SOCK_STREAM, 0);
    check(child || connect(*end, (struct sockaddr *)&address, len) == 0, "connect");
    close(listener);
    close(go[!!child ^ 1]);
    for (int at = 0; at < TURNS; at++) {
        check(!child || send(*end, room, LEN, 0) == LEN, "send");
        check(recv(*end, room, LEN, MSG_WAITALL) == LEN, "recv");
        check(child || send(*end, room, LEN, 0) == LEN, "send");
    }
    return child;
}

static volatile sig_atomic_t signals;

static void count_signal(int signal) {
    signals += signal == SIGIO;
}

/* A signal for incoming bytes, requested while the peer sleeps: with its bytes unread, and without. */
static void signalled(void) {
    struct sigaction action = {.sa_handler = count_signal, .sa_flags = SA_RESTART};
    check(sigaction(SIGIO, &action, NULL) == 0, "sigaction");
    for (int unread = 0; unread < 2; unread++) {
        int go[2], end;
        pid_t child = meet_child(&end, go);
        if (!child) {
            check(!unread || send(end, "early", 5, 0) == 5, "send");
            check(read(go[0], room, 1) == 1, "go");
            check(send(end, "late", 4, 0) == 4, "send");
            _exit(recv(end, room, 6, MSG_WAITALL) != 6);
        }
        usleep(50000);
        check(fcntl(end, F_SETOWN, getpid()) == 0 && fcntl(end, F_SETFL, O_ASYNC) == 0, "O_ASYNC");
        signals = 0;
        check(write(go[1], "g", 1) == 1, "go");
        for (int at = 0; at < 500 && !signals; at++) {
            usleep(10000);
        }
        say("a signal", signals > 0);
        long n = recv(end, room, unread ? 9 : 4, MSG_WAITALL);
        say("bytes", n);
        say("the same", memcmp(room, unread ? "earlylate" : "late", n > 0 ? n : 0));
        say("send", send(end, "answer", 6, 0));
        int status = 1;
        check(waitpid(child, &status, 0) == child, "waitpid");
        say("the peer", status);
        close(end);
    }
}

static void *drain(void *fd) {
    static char taken[64 << 10];
    while (recv(*(int *)fd, taken, sizeof taken, 0) > 0) {
    }
    return NULL;
}

/* Room that appears at any moment, beside another connection that is always readable, is reported to a program that
   asks for levels. */
static void levels(void) {
    int other[2], set = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.u32 = 1}, events[2];
    struct timespec now;
    pthread_t thread;
    pair();
    meet(other);
    talk(other);
    check(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0, "F_SETFL");
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll_ctl");
    event = (struct epoll_event){.events = EPOLLIN, .data.u32 = 2};
    check(epoll_ctl(set, EPOLL_CTL_ADD, other[0], &event) == 0, "epoll_ctl");
    check(send(other[1], "unread", 6, 0) == 6, "send");
    check(pthread_create(&thread, NULL, drain, &ends[1]) == 0, "pthread_create");
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (long last = now.tv_sec, written = 0; written < 100 << 20;) {
        int n = epoll_wait(set, events, 2, 5000), told = 0;
        for (int at = 0; at < n; at++) {
            told |= events[at].data.u32 == 1 && events[at].events & EPOLLOUT;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (told) {
            long sent = send(ends[0], room, 4096, 0);
            written += sent > 0 ? sent : 0;
            last = now.tv_sec;
        }
        if (now.tv_sec > last + 10) {
            printf("there is room after %ld bytes, and nobody says so\n", written);
            break;
        }
    }
    shutdown(ends[0], SHUT_WR);
    pthread_join(thread, NULL);
}

/* Unread bytes go to a program without the library, while their sender polls a set and never sleeps. */
static void polled(const char *how) {
    int end, go[2], status, set = epoll_create1(0);
    pid_t child = meet_child(&end, go);
    if (!child) {
        check(read(go[0], room, 1) == 1 && dup2(end, 0) == 0, "go");
        execl("/bin/sh", "sh", "-c", "unset LD_PRELOAD; head -c 3000 | wc -c", NULL);
        _exit(9);
    }
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    check(epoll_ctl(set, EPOLL_CTL_ADD, end, &event) == 0, "epoll_ctl");
    check(send(end, room, 3000, 0) == 3000 && write(go[1], "g", 1) == 1, "send");
    while (waitpid(child, &status, WNOHANG) == 0) {
        struct pollfd one = {.fd = end, .events = POLLIN};
        int there;
        if (*how == 'p') {
            poll(&one, 1, 0);
        } else if (*how == 'c') {
            check(ioctl(end, FIONREAD, &there) == 0, "FIONREAD");
        } else {
            epoll_wait(set, &event, 1, 0);
        }
    }
    say("the peer", status);
}

/* A service that only the kernel offers, requested while the peer makes no call on its socket for longer than the
   library waits for one. */
static void silent(const char *how) {
    int end, go[2], status, one = 1, none = 0, set = epoll_create1(0), early = *how != 's';
    struct epoll_event event = {.events = EPOLLIN | EPOLLEXCLUSIVE};
    pid_t child = meet_child(&end, go);
    if (!child) {
        long all = *how == 'o' ? 6 : *how == 'l' ? 20003 : 3, urgent = 0;
        check(!early || send(end, "early", 5, 0) == 5, "send");
        check(read(go[0], room, 1) == 1 && send(end, "late", 4, 0) == 4, "go");
        if (*how == 'o') {
            struct pollfd told = {.fd = end, .events = POLLPRI};
            check(poll(&told, 1, 5000) == 1 && recv(end, room, 1, MSG_OOB) == 1, "MSG_OOB");
            urgent = room[0] != '!';
        }
        for (long at = 0, n; at < all; at += n) {
            check((n = recv(end, room + at, all - at, 0)) > 0, "recv");
        }
        _exit(urgent || memcmp(room, *how == 'o' ? "abcdef" : "abc", *how == 'o' ? 6 : 3) != 0);
    }
    usleep(50000);
    say("send", send(end, "abc", 3, 0));
    if (*how == 'o') {
        say("urgent", send(end, "!", 1, MSG_OOB));
        say("send", send(end, "def", 3, 0));
    } else if (*how == 'l') {
        check(setsockopt(end, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0, "SO_ZEROCOPY");
        say("lent", send(end, room, 20000, MSG_ZEROCOPY));
    } else if (*how == 'p') {
        say("from an offset", setsockopt(end, SOL_SOCKET, SO_PEEK_OFF, &none, sizeof none));
    } else {
        say("in a set", epoll_ctl(set, EPOLL_CTL_ADD, end, &event));
        say("of which nothing is said", epoll_wait(set, &event, 1, 0));
    }
    check(write(go[1], "g", 1) == 1, "go");
    if (*how == 's') {
        say("now something is", epoll_wait(set, &event, 1, 5000));
    }
    there(end, early ? 9 : 4);
    if (*how == 'p') {
        say("looked at", recv(end, room, 3, MSG_PEEK));
        say("and further on", recv(end, room + 3, 100, MSG_PEEK));
        say("the same", memcmp(room, "earlylate", 9));
    }
    say("bytes", recv(end, room, 100, 0));
    say("the same", memcmp(room, early ? "earlylate" : "late", early ? 9 : 4));
    check(waitpid(child, &status, 0) == child, "waitpid");
    say("the peer", status);
    check(status == 0, "the peer");
}

/* A read ends before urgent data, also where the bytes before it are in shared memory. */
static void urgent(void) {
    int one = 1, mark;
    pair();
    check(setsockopt(ends[1], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "TCP_NODELAY");
    say("send", send(ends[1], "abc", 3, 0));
    say("urgent", send(ends[1], "!", 1, MSG_OOB));
    say("send", send(ends[1], "def", 3, 0));
    usleep(20000);
    say("up to it", recv(ends[0], room, 100, 0));
    check(ioctl(ends[0], SIOCATMARK, &mark) == 0, "SIOCATMARK");
    say("at it", mark);
    say("it", recv(ends[0], room, 1, MSG_OOB));
    say("and on", recv(ends[0], room + 1, 100, 0));
    say("the same", memcmp(room, "!def", 4));
}

/* A service that only the kernel offers, requested once the peer sends no more and its bytes are unread. */
static void mute(int registers) {
    int set = epoll_create1(0), one = 1, told = 0, all = 0;
    struct epoll_event event = {.events = EPOLLIN | EPOLLEXCLUSIVE};
    pair();
    say("send", send(ends[0], room, 5000, 0));
    say("no more", shutdown(ends[0], SHUT_WR));
    there(ends[1], 5000);
    if (registers) {
        say("in a set", epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &event));
    } else {
        say("stamps", setsockopt(ends[1], SOL_SOCKET, SO_TIMESTAMPING, &one, sizeof one));
    }
    say("answer", send(ends[1], room, 1000, MSG_NOSIGNAL));
    for (long n = 1; n > 0; all += (int)n) {
        told += registers ? epoll_wait(set, &event, 1, 5000) : 1;
        check((n = recv(ends[1], room, 1000, 0)) >= 0, "recv");
    }
    say("told", told);
    say("received", all);
    say("the answer", recv(ends[0], room, 1000, MSG_WAITALL));
}

int main(int count, char **words) {
    const char *word = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(word, "select") == 0) {
        selects();
    } else if (strcmp(word, "restart") == 0) {
        restarts();
    } else if (strcmp(word, "disconnect") == 0) {
        disconnects();
    } else if (strcmp(word, "beside") == 0) {
        for (int early = 0; early < 2; early++) {
            rest(early);
            arrivals(early);
        }
    } else if (strcmp(word, "end") == 0) {
        hangups();
    } else if (strcmp(word, "shut") == 0) {
        shut();
    } else if (strcmp(word, "watched") == 0) {
        watched();
    } else if (strcmp(word, "both") == 0) {
        both_ways();
    } else if (strcmp(word, "gone") == 0) {
        gone();
    } else if (strcmp(word, "deaf") == 0) {
        deaf();
    } else if (strcmp(word, "refused") == 0) {
        refuses();
    } else if (strcmp(word, "short") == 0) {
        shorts();
    } else if (strcmp(word, "splice") == 0) {
        splices();
    } else if (strcmp(word, "sendfile") == 0) {
        sends_from();
    } else if (strcmp(word, "polled") == 0) {
        polled(words[2]);
    } else if (strcmp(word, "urgent") == 0) {
        urgent();
    } else if (strcmp(word, "mute") == 0) {
        mute(0);
        mute(1);
    } else if (strcmp(word, "silent") == 0) {
        silent(words[2]);
    } else if (strcmp(word, "levels") == 0) {
        levels();
    } else if (strcmp(word, "signalled") == 0) {
        signalled();
    } else if (strcmp(word, "peek") == 0) {
        peeks(words[2], LOOKED_AT, 2, 1200);
    } else if (strcmp(word, "peek much") == 0) {
        peeks(words[2], 40, 10000, 50000);
    } else {
        exchanges(word);
    }
    printf("done\n");
    return 0;
}
