/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A byte that was written first is seen first, or together with the second, whatever transports carry them.
 *
 *   order serve ADDRESS PORT HOW [NEW] waits by HOW: epoll, poll or select; NEW: B is to be accepted
 *   order ask ADDRESS PORT TIMES PART
 *
 * PART, always A before B: joined (both are); plain (B is TCP); new (B is a connection to be accepted);
 * late (A is TCP, B is joined); other (A and B come from two processes); idle (as joined, A among many that are idle).
 * The server counts how often it saw B without A, and prints that. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { IDLE = 50, MOST = 64 };

static struct sockaddr_in address = {.sin_family = AF_INET};

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

/* A connection that is not `joined` may not be one of the library's. */
static int dial(char name, int joined) {
    char room[64];
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(fd, (void *)&address, sizeof address) == 0, "connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    check(joined || fdopen(fd, "r") != NULL, "fdopen");
    memset(room, name, sizeof room);
    for (int at = 0; at < (joined ? 400 : 1); at++) {
        check(send(fd, room, sizeof room, 0) == sizeof room, "send");
        check(recv(fd, room, sizeof room, MSG_WAITALL) == sizeof room, "recv");
        room[0] = name;
    }
    return fd;
}

/* One turn: a byte on A, then one on B. The server answers both when it has seen both. */
static void turn(int a, int b) {
    char byte = '!';
    check(send(a, &byte, 1, 0) == 1 && send(b, &byte, 1, 0) == 1, "send");
    check(recv(a, &byte, 1, MSG_WAITALL) == 1 && recv(b, &byte, 1, MSG_WAITALL) == 1, "recv");
}

static void ask(int times, const char *part) {
    char byte = '!';
    int to[2], back[2];
    if (strcmp(part, "idle") == 0) {
        for (int at = 0; at < IDLE; at++) {
            dial('i', 1);
        }
    }
    int a = dial('A', strcmp(part, "late") != 0), b = -1;
    if (strcmp(part, "other") == 0) {
        check(pipe(to) == 0 && pipe(back) == 0, "pipe");
        if (fork() == 0) {
            close(a);
            b = dial('B', 1);
            check(write(back[1], &byte, 1) == 1, "write");
            for (int at = 0; at < times; at++) {
                check(read(to[0], &byte, 1) == 1 && send(b, &byte, 1, 0) == 1, "other");
                check(recv(b, &byte, 1, MSG_WAITALL) == 1 && write(back[1], &byte, 1) == 1, "other");
            }
            close(b);
            exit(0);
        }
        check(read(back[0], &byte, 1) == 1, "read");
        for (int at = 0; at < times; at++) {
            check(send(a, &byte, 1, 0) == 1 && write(to[1], &byte, 1) == 1, "one");
            check(recv(a, &byte, 1, MSG_WAITALL) == 1 && read(back[0], &byte, 1) == 1, "one");
        }
        wait(NULL);
    } else if (strcmp(part, "new") == 0) {
        for (int at = 0; at < times; at++) {
            check(send(a, &byte, 1, 0) == 1, "send");
            b = socket(AF_INET, SOCK_STREAM, 0);
            check(connect(b, (void *)&address, sizeof address) == 0, "connect");
            check(recv(a, &byte, 1, MSG_WAITALL) == 1, "recv");
            /* The server's end is closed first, so that its port is free again. */
            check(recv(b, &byte, 1, MSG_WAITALL) == 0, "end");
            close(b);
        }
    } else {
        b = dial('B', strcmp(part, "plain") != 0);
        for (int at = 0; at < times; at++) {
            turn(a, b);
            if (at % 16 == 0) {
                usleep(200); /* Also a server that sleeps meanwhile. */
            }
        }
        close(b);
    }
    close(a);
}

static int listener, fds[MOST], ends, set;

/* Finds the ready ones, by place; the listener is the last place. */
static void ready(const char *how, int *found) {
    memset(found, 0, sizeof(int) * (MOST + 1));
    if (strcmp(how, "epoll") == 0) {
        struct epoll_event events[MOST + 1];
        int n = epoll_wait(set, events, MOST + 1, -1);
        check(n > 0, "epoll_wait");
        for (int at = 0; at < n; at++) {
            found[events[at].data.u32] = 1;
        }
        return;
    }
    struct pollfd all[MOST + 1];
    fd_set bits;
    int highest = listener;
    FD_ZERO(&bits);
    for (int at = 0; at <= ends; at++) {
        all[at] = (struct pollfd){.fd = at < ends ? fds[at] : listener, .events = POLLIN};
        if (all[at].fd >= 0) {
            FD_SET(all[at].fd, &bits);
            highest = all[at].fd > highest ? all[at].fd : highest;
        }
    }
    int by_poll = strcmp(how, "poll") == 0;
    check((by_poll ? poll(all, (nfds_t)ends + 1, -1) : select(highest + 1, &bits, NULL, NULL, NULL)) > 0, how);
    for (int at = 0; at <= ends; at++) {
        found[at < ends ? at : MOST] = all[at].fd >= 0 && (by_poll ? all[at].revents != 0 : FD_ISSET(all[at].fd, &bits));
    }
}

static void serve(const char *how, int accepts) {
    int found[MOST + 1], open = 0, wrong = 0, turns = 0, a = -1, pending_a = 0, b = -1, one = 1;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = MOST};
    set = epoll_create1(0);
    check(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event) == 0, "epoll_ctl");
    do {
        int got_a = 0, got_b = 0;
        ready(how, found);
        for (int at = 0; at < ends; at++) {
            char room[64];
            if (!found[at] || fds[at] < 0) {
                continue;
            }
            ssize_t n = recv(fds[at], room, sizeof room, 0);
            check(n >= 0, "recv");
            if (n == 0) {
                close(fds[at]);
                fds[at] = -1;
                open--;
            } else if (room[0] == '!') {
                got_a |= at == a;
                got_b |= at == b;
            } else {
                check(n == sizeof room && send(fds[at], room, sizeof room, 0) == n, "first turns");
                a = room[0] == 'A' ? at : a;
                b = room[0] == 'B' ? at : b;
            }
        }
        if (found[MOST]) {
            int fd = accept(listener, NULL, NULL);
            check(fd >= 0, "accept");
            if (accepts && a >= 0) {
                got_b = 1;
                close(fd);
            } else {
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                fds[ends] = fd;
                event.data.u32 = (unsigned)ends++;
                check(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
                open++;
            }
        }
        pending_a |= got_a;
        if (got_b) {
            wrong += !pending_a;
            turns++;
            /* B has been read; A is answered once it was read too. */
            if (!pending_a) {
                char byte;
                check(recv(fds[a], &byte, 1, 0) == 1, "A, which was written before");
            }
            pending_a = 0;
            check(send(fds[a], "!", 1, 0) == 1, "send");
            if (!accepts) {
                check(send(fds[b], "!", 1, 0) == 1, "send");
            }
        }
    } while (open > 0);
    printf("turns: %d wrong: %d\n", turns, wrong);
}

int main(int count, char **words) {
    int one = 1;
    check(count >= 5, "usage");
    inet_pton(AF_INET, words[2], &address.sin_addr);
    address.sin_port = htons((unsigned short)atoi(words[3]));
    if (strcmp(words[1], "ask") == 0) {
        check(count >= 6, "usage");
        ask(atoi(words[4]), words[5]);
        return 0;
    }
    listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    check(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 1024) == 0, "listen");
    serve(words[4], count > 5);
    return 0;
}
