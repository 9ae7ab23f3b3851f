/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * `splice` between a pipe and one end of a connection, where there is no room for all bytes. Each case prints the
 * result of the call, and that no byte was lost or duplicated. A watchdog ends the program if a call does not return.
 * */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/time.h>

#include "ends.h"

enum { ALL = 1 << 16, FEW = 20000, LONG = 50 };

static int ends[2], line[2];
static unsigned char bytes[1 << 20];
static unsigned long sent, received;

/* Each byte is derived from its place in the stream. */
static unsigned char at(unsigned long place) { return (unsigned char)(place * 31 + place / 251); }

static void take(size_t most) {
    ssize_t n = recv(ends[1], bytes, most, MSG_DONTWAIT);
    for (ssize_t i = 0; i < n; i++, received++) {
        check(bytes[i] == at(received), "the stream");
    }
}

/* Fills the connection, and a pipe with the bytes that follow. The connection counts as full where there is no room
 * twice, some time apart: meanwhile the kernel moves bytes that were sent before. */
static void fill(void) {
    for (int full = 0; full < 2;) {
        for (size_t i = 0; i < sizeof bytes; i++) {
            bytes[i] = at(sent + i);
        }
        ssize_t n = send(ends[0], bytes, sizeof bytes, MSG_DONTWAIT);
        if (n < 0) {
            struct timespec pause = {.tv_nsec = 100000000};
            full++;
            nanosleep(&pause, NULL);
            continue;
        }
        full = 0;
        sent += (unsigned long)n;
    }
    for (size_t i = 0; i < ALL; i++) {
        bytes[i] = at(sent + i);
    }
    check(write(line[1], bytes, ALL) == ALL, "pipe");
}

/* All bytes that were sent or are in the pipe arrive, once. */
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

static void ignore_pipes(void) {
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    check(sigaction(SIGPIPE, &ignore, NULL) == 0, "sigaction");
}

static int left_in_pipe(void) {
    int left = 0;
    check(ioctl(line[0], FIONREAD, &left) == 0, "FIONREAD");
    return left;
}

/* The other end is closed while there is room, and the pipe is full: bytes that leave the pipe were sent, and then have
   no reader. */
static void closed(void) {
    ignore_pipes();
    check(write(line[1], bytes, ALL) == ALL, "pipe");
    close(ends[1]);
    ssize_t n = splice(line[0], NULL, ends[0], NULL, ALL, 0);
    check(n > 0 && left_in_pipe() == ALL - n, "what is left");
    /* The reset comes without a further call. */
    struct pollfd over = {.fd = ends[0]};
    check(poll(&over, 1, 1000 * LONG) == 1 && (over.revents & POLLHUP), "the end");
    check(write(line[1], bytes, 1) == 1, "pipe");
    int left = left_in_pipe();
    say(splice(line[0], NULL, ends[0], NULL, ALL, 0));
    printf("%s\n", left_in_pipe() == left ? "nothing was taken" : "some was taken");
}

static void send_one(int signal) {
    int before = errno;
    (void)signal;
    (void)!write(ends[0], "h", 1);
    errno = before;
}

/* A handler sends between calls that the kernel carries out. */
static void amid(void) {
    ignore_pipes();
    struct sigaction action = {.sa_handler = send_one, .sa_flags = SA_RESTART};
    struct itimerval timer = {.it_interval.tv_usec = 50, .it_value.tv_usec = 50};
    check(write(line[1], bytes, FEW) == FEW, "pipe");
    check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    check(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0, "timer");
    for (int turn = 0; turn < 100000; turn++) {
        check(splice(line[0], NULL, ends[0], NULL, ALL, 0) == -1, "splice");
    }
    handle(SA_RESTART, 0);
    printf("%d are left\n", left_in_pipe());
}

enum { ROUNDS = 8000 };
static atomic_int round_begun, rounds_done[2], got;
static int others;

/* The next signal comes only once this one was handled: beside programs that compute, a yield takes longer than a
   timer. */
static void dawdle(int signal) {
    struct itimerval next = {.it_value.tv_usec = 40};
    int before = errno;
    (void)signal;
    for (int turn = 0; turn < 4; turn++) {
        sched_yield();
    }
    setitimer(ITIMER_REAL, &next, NULL);
    errno = before;
}

static void *take_from_fifo(void *whose) {
    int splices = whose != NULL;
    if (splices) {
        /* It is often interrupted, wherever it is. */
        struct itimerval timer = {.it_value.tv_usec = 40};
        struct sigaction action = {.sa_handler = dawdle, .sa_flags = SA_RESTART};
        sigset_t none;
        sigemptyset(&none);
        check(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0, "timer");
        check(pthread_sigmask(SIG_SETMASK, &none, NULL) == 0, "mask");
    }
    for (int turn = 1; turn <= ROUNDS; turn++) {
        char one;
        while (atomic_load(&round_begun) < turn) {
            sched_yield();
        }
        ssize_t n = splices ? splice(line[0], NULL, ends[0], NULL, ALL, SPLICE_F_NONBLOCK) : read(others, &one, 1);
        atomic_fetch_add(&got, n > 0 ? (int)n : 0);
        atomic_store(&rounds_done[splices], turn);
    }
    if (splices) {
        handle(SA_RESTART, 0);
    }
    return NULL;
}

/* Two threads take from one FIFO at once bytes that are enough for only one of them, and neither waits. */
static void fifo(const char *path) {
    pthread_t threads[2];
    check(mkfifo(path, 0600) == 0, "mkfifo");
    check((line[1] = open(path, O_RDWR)) >= 0 && (line[0] = open(path, O_RDONLY)) >= 0, "open");
    check((others = open(path, O_RDONLY | O_NONBLOCK)) >= 0, "open");
    check(write(line[1], bytes, FEW) == FEW, "FIFO");
    check(splice(line[0], NULL, ends[0], NULL, ALL, 0) == FEW, "splice");
    check(recv(ends[1], bytes, FEW, MSG_WAITALL) == FEW, "recv");
    for (long which = 0; which < 2; which++) {
        check(pthread_create(&threads[which], NULL, take_from_fifo, (void *)which) == 0, "thread");
    }
    for (int turn = 1; turn <= ROUNDS; turn++) {
        check(write(line[1], "1", 1) == 1, "FIFO");
        atomic_store(&round_begun, turn);
        while (atomic_load(&rounds_done[0]) < turn || atomic_load(&rounds_done[1]) < turn) {
            sched_yield();
        }
        while (recv(ends[1], bytes, 1, MSG_DONTWAIT) > 0) {
        }
    }
    int left = 0;
    check(ioctl(others, FIONREAD, &left) == 0, "FIONREAD");
    printf("%s\n", atomic_load(&got) + left == ROUNDS ? "each once" : "not each once");
}

/* Bytes go to a FIFO, which has room for a part of them. */
static void to_fifo(const char *path) {
    check(mkfifo(path, 0600) == 0, "mkfifo");
    check((line[0] = open(path, O_RDWR)) >= 0 && (line[1] = open(path, O_WRONLY)) >= 0, "open");
    check(fcntl(line[1], F_SETPIPE_SZ, 8192) == 8192, "F_SETPIPE_SZ");
    ssize_t all = send(ends[1], bytes, 1 << 18, MSG_DONTWAIT);
    check(all > FEW, "send");
    ssize_t n = 0, part;
    while ((part = splice(ends[0], NULL, line[1], NULL, ALL, SPLICE_F_NONBLOCK)) > 0) {
        n += part;
    }
    say(part);
    check(n > 0 && left_in_pipe() == n, "what came");
    check(recv(ends[0], bytes, (size_t)(all - n), MSG_WAITALL) == all - n, "what stays");
}

/* A call that takes a part of a packet leaves the rest. */
static void packets(void) {
    check(pipe2(line, O_DIRECT) == 0, "pipe2");
    for (unsigned i = 0; i < 3000; i++) {
        bytes[i] = (unsigned char)(i / 7);
    }
    check(write(line[1], bytes, 3000) == 3000 && write(line[1], bytes, 500) == 500, "packets");
    for (int part = 0; part < 3; part++) {
        printf("%zd, ", splice(line[0], NULL, ends[0], NULL, 1000, 0));
        check(recv(ends[1], bytes, 1000, MSG_WAITALL) == 1000, "recv");
        for (unsigned i = 0; i < 1000; i++) {
            check(bytes[i] == (unsigned char)((1000 * (unsigned)part + i) / 7), "the packet");
        }
    }
    printf("%d are left\n", left_in_pipe());
}

/* The order in which the kernel checks its arguments and state. */
static void order(void) {
    static char page[4096];
    ignore_pipes();
    say(splice(ends[0], NULL, line[0], NULL, ALL, SPLICE_F_NONBLOCK));
    say(splice(line[1], NULL, ends[0], NULL, ALL, SPLICE_F_NONBLOCK));
    say(splice(ends[0], NULL, line[1], NULL, ALL, 1 << 20));
    check(fcntl(line[1], F_SETFL, O_NONBLOCK) == 0, "fcntl");
    while (write(line[1], page, sizeof page) > 0) {
    }
    /* Nothing has come, and there is no room. */
    say(splice(ends[0], NULL, line[1], NULL, ALL, 0));
    check(shutdown(ends[1], SHUT_WR) == 0, "shutdown");
    say(splice(ends[0], NULL, line[1], NULL, ALL, 0));
    check(read(line[0], page, sizeof page) == sizeof page, "read");
    say(splice(ends[0], NULL, line[1], NULL, ALL, 0));
    /* The pipe has no reader. */
    close(line[0]);
    say(splice(ends[0], NULL, line[1], NULL, ALL, 0));
    check(fcntl(line[1], F_SETFL, 0) == 0, "fcntl");
    say(splice(ends[1], NULL, line[1], NULL, ALL, 0));
}

int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    pthread_t thread;
    sigset_t all, none;
    meet(ends);
    talk(ends);
    sigfillset(&all);
    /* Signals are delivered to this thread. */
    check(pthread_sigmask(SIG_BLOCK, &all, &none) == 0, "mask");
    check(pipe(line) == 0 && pthread_create(&thread, NULL, watch, NULL) == 0, "pipe");
    if (strcmp(word, "room") == 0) {
        /* There is room for a part, and the socket is non-blocking. */
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
        /* The same after a part was sent: the call returns its length. */
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
        /* The flag applies to the pipe: for the socket the call waits. */
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
    } else if (strcmp(word, "closed") == 0) {
        closed();
    } else if (strcmp(word, "amid") == 0) {
        pthread_sigmask(SIG_SETMASK, &none, NULL);
        amid();
    } else if (strcmp(word, "fifo") == 0 || strcmp(word, "to-fifo") == 0) {
        char path[64];
        snprintf(path, sizeof path, "/tmp/moves-%d.fifo", getpid());
        if (word[0] == 'f') {
            fifo(path);
        } else {
            to_fifo(path);
        }
        unlink(path);
    } else if (strcmp(word, "packets") == 0) {
        packets();
    } else if (strcmp(word, "order") == 0) {
        order();
    } else {
        return 1;
    }
    printf("done\n");
    return 0;
}
