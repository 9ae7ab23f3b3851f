/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A program that is interrupted all the time, in whatever it does. Its handler makes the calls that a handler may make,
 * and at last ends the process. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "ends.h"

static int ends[2], calls, limit, at_all;

static void handle(int signal) {
    int before = errno, fd;
    (void)signal;
    calls++;
    if (calls >= limit) {
        _exit(7);
    }
    if (at_all) {
        char byte = 'h';
        struct pollfd one = {.fd = ends[1], .events = POLLIN};
        struct timeval now = {0};
        fd_set set;
        switch (calls % 8) {
        case 0:
            /* The call may report that it was interrupted, because it was. */
            check(write(ends[0], &byte, 1) == 1 || errno == EINTR || errno == EAGAIN, "write");
            break;
        case 1:
            check(recv(ends[0], &byte, 1, MSG_DONTWAIT) == -1, "recv");
            break;
        case 2:
            check(poll(&one, 1, 0) >= 0 || errno == EINTR, "poll");
            break;
        case 3:
            FD_ZERO(&set);
            FD_SET(ends[1], &set);
            check(select(ends[1] + 1, &set, NULL, NULL, &now) >= 0 || errno == EINTR, "select");
            break;
        case 4:
            fd = socket(AF_INET, SOCK_STREAM, 0);
            check(fd >= 0 && fcntl(fd, F_GETFL) >= 0 && close(fd) == 0, "socket");
            break;
        case 5:
            fd = open("/dev/null", O_RDONLY);
            check(fd >= 0 && read(fd, &byte, 1) == 0 && close(fd) == 0, "open");
            break;
        case 6:
            fd = dup(2);
            check(fd >= 0 && close(fd) == 0, "dup");
            break;
        case 7:
            if (calls % 64 == 7) {
                pid_t child = _Fork();
                if (child == 0) {
                    _exit(0);
                }
                check(child > 0 && (waitpid(child, NULL, 0) == child || errno == EINTR), "fork");
            }
            break;
        }
    }
    errno = before;
}

/* Makes calls that take a lock somewhere. */
static void work(int set) {
    static char room[1 << 16];
    struct epoll_event event = {.events = EPOLLIN}, events[4];
    struct pollfd one = {.fd = ends[1], .events = POLLIN};
    int more[2], n;
    for (;;) {
        while (send(ends[0], room, 300, 0) < 0) {
            check(errno == EINTR, "send");
        }
        check(poll(&one, 1, 5000) == 1 || errno == EINTR, "poll");
        check(epoll_wait(set, events, 4, 0) >= 0 || errno == EINTR, "wait");
        while ((n = recv(ends[1], room, sizeof room, MSG_DONTWAIT)) > 0 || (n < 0 && errno == EINTR)) {
        }
        check(n < 0 && errno == EAGAIN, "recv");
        free(malloc(100 + calls % 5000));
        if (calls % 5 == 0) {
            meet(more);
            int copy = dup(more[0]);
            check(copy >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, more[1], &event) == 0, "add");
            turn(more[0], more[1]);
            check(close(more[0]) == 0 && close(more[1]) == 0 && close(copy) == 0, "close");
        }
    }
}

int main(int count, char **words) {
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
    struct itimerval timer = {.it_interval.tv_usec = 97, .it_value.tv_usec = 97};
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(0);
    check(count == 3, "usage");
    at_all = strcmp(words[1], "all") == 0;
    limit = atoi(words[2]);
    meet(ends);
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &event) == 0, "add");
    talk(ends);
    check(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0, "timer");
    work(set);
}
