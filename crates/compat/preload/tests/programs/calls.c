/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Calls in the forms that compilers make of them: checked for the size of their buffers, with 64-bit offsets, by
 * standard I/O, past every library; and the signals that come with them. Prints their results. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "ends.h"

/* Makes a system call past every library. */
static long by_hand(long number, long a, const void *b, long c) {
    long answer;
    __asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return answer;
}

/* Makes two endpoints that have talked enough to be joined; before that, `past` bytes of the first went past the
   library. */
static void pair(int ends[2], int past) {
    char room[LEN] = {0};
    meet(ends);
    check(by_hand(SYS_write, ends[0], room, past) == past, "write");
    check(past == 0 || by_hand(SYS_read, ends[1], room, LEN) == past, "read");
    talk(ends);
}

/* The lengths are known only at run time, so that they are checked if the compiler was asked to. */
static void checked(void) {
    int ends[2];
    char room[16];
    volatile size_t ten = 10;
    volatile nfds_t one = 1;
    pair(ends, 0);
    check(write(ends[0], "0123456789abcdefghijABCDEFGHIJ", 30) == 30, "write");
    struct pollfd ready[2] = {{.fd = ends[1], .events = POLLIN}};
    int found = poll(ready, one, 5000);
    printf("poll %d, %x;", found, ready[0].revents);
    struct timespec soon = {5, 0};
    found = ppoll(ready, one, &soon, NULL);
    printf(" ppoll %d, %x\n", found, ready[0].revents);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ready[0].fd, &set);
    found = select(ends[1] + 1, &set, NULL, NULL, NULL);
    printf("select %d, %d\n", found, FD_ISSET(ready[0].fd, &set) != 0);
    printf("read %.*s", (int)read(ends[1], room, ten), room);
    printf(" recv %.*s", (int)recv(ends[1], room, ten, 0), room);
    printf(" recvfrom %.*s\n", (int)recvfrom(ends[1], room, ten, 0, NULL, NULL), room);
    printf("dprintf %d", dprintf(ends[0], "%s %d\n", "number", (int)ten));
    printf(" read %.*s", (int)read(ends[1], room, ten), room);
    close(ends[0]);
    printf("end %zd\n", read(ends[1], room, ten));
    close(ends[1]);
}

static void wide(void) {
    int ends[2];
    char room[16];
    pair(ends, 0);
    FILE *file = tmpfile();
    check(file && fputs("0123456789", file) >= 0 && fflush(file) == 0, "tmpfile");
    off_t offset = 3;
    ssize_t sent = sendfile(ends[0], fileno(file), &offset, 5);
    printf("sendfile %zd, %d", sent, (int)offset);
    printf(" recv %.*s\n", (int)recv(ends[1], room, 5, MSG_WAITALL), room);
    int copy = fcntl(ends[0], F_DUPFD_CLOEXEC, 100);
    close(ends[0]);
    check(write(copy, "copy", 4) == 4, "write");
    printf("F_DUPFD %d, %d", copy, fcntl(copy, F_SETFL, fcntl(copy, F_GETFL) | O_NONBLOCK));
    printf(" read %.*s, %zd\n", (int)read(ends[1], room, 4), room, read(copy, room, 1));
    close(copy);
    printf("end %zd\n", read(ends[1], room, 1));
    close(ends[1]);
}

static void standard(void) {
    int ends[2];
    char line[64];
    pair(ends, 0);
    FILE *in = fdopen(ends[1], "r"), *out = fdopen(dup(ends[1]), "w");
    check(write(ends[0], "a line\nand another\n", 19) == 19, "write");
    printf("fgets %s", fgets(line, sizeof line, in));
    printf("fgets %s", fgets(line, sizeof line, in));
    check(fprintf(out, "number %d\n", 17) == 10 && fflush(out) == 0, "fprintf");
    ssize_t got = recv(ends[0], line, 10, MSG_WAITALL);
    printf("recv %.*s", (int)got, line);
    for (int at = 0; at < TURNS; at++) {
        turn(ends[0], ends[1]);
        turn(ends[1], ends[0]);
    }
    fclose(out);
    close(ends[0]);
    printf("end %d\n", fgetc(in));
    fclose(in);
}

static int heard;

static void hear(int signal) {
    heard += signal == SIGUSR1;
}

static void *pauses(void *unused) {
    pause();
    return unused;
}

/* The signal of a broken pipe is sent to the thread that sends. */
static void broken(void) {
    int ends[2];
    sigset_t set, pending;
    pthread_t other;
    check(pthread_create(&other, NULL, pauses, NULL) == 0, "pthread_create");
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    for (int flags = 0; flags <= MSG_NOSIGNAL; flags += MSG_NOSIGNAL) {
        pair(ends, 0);
        struct linger reset = {1, 0};
        check(setsockopt(ends[1], SOL_SOCKET, SO_LINGER, &reset, sizeof reset) == 0, "SO_LINGER");
        close(ends[1]);
        struct pollfd gone = {.fd = ends[0], .events = POLLIN};
        check(poll(&gone, 1, 5000) == 1, "poll");
        printf("reset %zd", send(ends[0], "x", 1, flags));
        printf(" %d;", errno == ECONNRESET);
        ssize_t sent = send(ends[0], "x", 1, flags);
        int error = errno;
        sigpending(&pending);
        printf(" broken %zd %d, signal %d", sent, error == EPIPE, sigismember(&pending, SIGPIPE));
        struct timespec now = {0, 0};
        printf(", taken %d\n", sigtimedwait(&set, NULL, &now) == SIGPIPE);
        close(ends[0]);
    }
}

/* Waits that let a signal through. */
static void masked(void) {
    int ends[2];
    sigset_t blocked, none;
    struct sigaction action = {.sa_handler = hear};
    pair(ends, 0);
    sigemptyset(&none);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigaction(SIGUSR1, &action, NULL);
    pthread_sigmask(SIG_BLOCK, &blocked, NULL);
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, ends[1], &event) == 0, "epoll_ctl");
    for (int there = 0; there < 2; there++) {
        for (int way = 0; way < 3; way++) {
            struct timespec soon = {5, 0};
            struct pollfd one = {.fd = ends[1], .events = POLLIN};
            fd_set set;
            FD_ZERO(&set);
            FD_SET(ends[1], &set);
            check(raise(SIGUSR1) == 0, "raise");
            int answer = way == 0   ? ppoll(&one, 1, &soon, &none)
                         : way == 1 ? pselect(ends[1] + 1, &set, NULL, NULL, &soon, &none)
                                    : epoll_pwait(epoll, &event, 1, 5000, &none);
            printf("masked %d: %d %d;", way, answer, answer < 0 && errno == EINTR);
            /* A signal that was not let through is still pending. */
            sigset_t before;
            pthread_sigmask(SIG_SETMASK, &none, &before);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            printf(" heard %d\n", heard);
        }
        check(write(ends[0], "x", 1) == 1, "write");
        struct pollfd one = {.fd = ends[1], .events = POLLIN};
        check(poll(&one, 1, 5000) == 1, "poll");
    }
    close(ends[0]);
    close(ends[1]);
}

/* Bytes go past the library before it could join. */
static void past(void) {
    int ends[2];
    pair(ends, 100);
    puts("whole");
}

/* Bytes go past the library after the join: the stream ends rather than deliver them in a wrong place. */
static void past_after(void) {
    int ends[2];
    char room[LEN];
    pair(ends, 0);
    check(by_hand(SYS_write, ends[0], "stray", 5) == 5, "write");
    struct pollfd one = {.fd = ends[1], .events = POLLIN};
    check(poll(&one, 1, 5000) == 1, "poll");
    ssize_t got = recv(ends[1], room, LEN, 0);
    if (got == 5 && memcmp(room, "stray", 5) == 0) {
        puts("given");
    } else if (got < 0 && errno == ECONNRESET) {
        puts("reset");
    }
}

int main(int count, char **words) {
    if (count > 1) {
        strcmp(words[1], "past") == 0 ? past() : past_after();
        return 0;
    }
    checked();
    wide();
    standard();
    masked();
    broken();
    return 0;
}
