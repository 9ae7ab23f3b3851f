/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * `splice` between a pipe and one end of a connection, where not all fits: each case prints what the call gave, and that no byte
 * was lost or came twice. A watch ends the program where a call does not return. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/time.h>

#include "ends.h"

enum { ALL = 1 << 16, FEW = 20000, LONG = 20 };

static int ends[2], line[2];
static unsigned char bytes[1 << 20];
static unsigned long sent, received;

/* Each byte says where in the stream it is. */
static unsigned char at(unsigned long place) { return (unsigned char)(place * 31 + place / 251); }

static void take(size_t most) {
    ssize_t n = recv(ends[1], bytes, most, MSG_DONTWAIT);
    for (ssize_t i = 0; i < n; i++, received++) {
        check(bytes[i] == at(received), "the stream");
    }
}

/* Fills what the connection can hold, and a pipe with what comes next. */
static void fill(void) {
    for (;;) {
        for (size_t i = 0; i < sizeof bytes; i++) {
            bytes[i] = at(sent + i);
        }
        ssize_t n = send(ends[0], bytes, sizeof bytes, MSG_DONTWAIT);
        if (n < 0) {
            break;
        }
        sent += (unsigned long)n;
    }
    for (size_t i = 0; i < ALL; i++) {
        bytes[i] = at(sent + i);
    }
    check(write(line[1], bytes, ALL) == ALL, "pipe");
}

/* All that was sent and is in the pipe arrives, once. */
static void rest(void) {
    fcntl(line[0], F_SETFL, O_NONBLOCK);
    for (;;) {
        ssize_t n = read(line[0], bytes, 4096);
        if (n <= 0) {
            break;
        }
        for (ssize_t i = 0, done; i < n; i += done) {
            while ((done = send(ends[0], bytes + i, (size_t)(n - i), MSG_DONTWAIT)) < 0) {
                unsigned char kept[4096];
                memcpy(kept, bytes, sizeof kept);
                take(4096);
                memcpy(bytes, kept, sizeof kept);
            }
        }
        sent += (unsigned long)n;
    }
    while (received < sent) {
        take(sizeof bytes);
    }
    printf("whole\n");
}

static void say(ssize_t n) {
    if (n > 0) {
        sent += (unsigned long)n;
    }
    printf("%s %s\n", n < 0 ? "failed:" : n == 0 ? "nothing" : "some", n < 0 ? strerror(errno) : "");
}

static void count(int signal) { (void)signal; }

static void handle(int flags, long millis) {
    struct sigaction action = {.sa_handler = count, .sa_flags = flags};
    struct itimerval timer = {.it_interval.tv_usec = millis * 1000, .it_value.tv_usec = millis * 1000};
    check(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0, "timer");
}

/* What the other end does once this one sleeps in its call. */
static void *later(void *what) {
    struct timespec pause = {.tv_nsec = 50000000};
    nanosleep(&pause, NULL);
    check(write(*(int *)what, "news", 4) == 4, "write");
    return NULL;
}

static void *watch(void *none) {
    struct timespec pause = {.tv_sec = LONG};
    (void)none;
    while (nanosleep(&pause, &pause) != 0) {
    }
    fprintf(stderr, "a call does not return\n");
    _exit(2);
}

int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    pthread_t thread;
    sigset_t all, none;
    meet(ends);
    talk(ends);
    check(pipe(line) == 0 && pthread_create(&thread, NULL, watch, NULL) == 0, "pipe");
    sigfillset(&all);
    /* Signals are for this thread. */
    check(pthread_sigmask(SIG_BLOCK, &all, &none) == 0, "mask");
    if (strcmp(word, "room") == 0) {
        /* Room for a part, and a socket that does not wait. */
        check(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0, "fcntl");
        fill();
        say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
        take(FEW);
        ssize_t n = splice(line[0], NULL, ends[0], NULL, ALL, SPLICE_F_NONBLOCK);
        int left = 0;
        check(ioctl(line[0], FIONREAD, &left) == 0, "FIONREAD");
        check(n == -1 || (n > 0 && left == ALL - n), "what is left");
        if (n > 0) {
            sent += (unsigned long)n;
        }
        rest();
    } else if (strcmp(word, "signal") == 0) {
        /* A signal ends a call that waits for room. */
        fill();
        pthread_sigmask(SIG_SETMASK, &none, NULL);
        handle(0, 100);
        say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
        handle(SA_RESTART, 0);
        rest();
    } else if (strcmp(word, "part") == 0) {
        /* The same after a part was sent: the call says how much. */
        fill();
        take(FEW);
        take(ALL);
        take(ALL);
        pthread_sigmask(SIG_SETMASK, &none, NULL);
        handle(0, 100);
        ssize_t n = splice(line[0], NULL, ends[0], NULL, ALL, 0);
        handle(SA_RESTART, 0);
        check(n != 0, "some or none");
        if (n > 0) {
            sent += (unsigned long)n;
        }
        rest();
    } else if (strcmp(word, "limit") == 0) {
        struct timeval limit = {.tv_usec = 100000};
        fill();
        check(setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0, "SO_SNDTIMEO");
        say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
        rest();
    } else if (strcmp(word, "flag") == 0) {
        /* The flag is about the pipe: for the socket the call waits. */
        check(pthread_create(&thread, NULL, later, &ends[1]) == 0, "thread");
        say(splice(ends[0], NULL, line[1], NULL, ALL, SPLICE_F_NONBLOCK));
    } else if (strcmp(word, "empty") == 0) {
        check(fcntl(line[0], F_SETFL, O_NONBLOCK) == 0, "fcntl");
        say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
        check(fcntl(line[0], F_SETFL, 0) == 0, "fcntl");
        say(splice(line[0], NULL, ends[0], NULL, ALL, SPLICE_F_NONBLOCK));
        check(pthread_create(&thread, NULL, later, &line[1]) == 0, "thread");
        say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
        close(line[1]);
        say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
    } else if (strcmp(word, "over") == 0) {
        /* The other end is closed: nothing is taken from the pipe. */
        struct sigaction ignore = {.sa_handler = SIG_IGN};
        sigaction(SIGPIPE, &ignore, NULL);
        int left = 0;
        check(write(line[1], bytes, ALL) == ALL, "pipe");
        check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
        say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
        check(ioctl(line[0], FIONREAD, &left) == 0, "FIONREAD");
        printf("%d are left\n", left);
    } else {
        return 1;
    }
    printf("done\n");
    return 0;
}
