/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Threads that wait on one connection while something is done to it elsewhere: by another thread, by a child, by a
 * signal handler that forks. Each case prints the results of the waits. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "ends.h"

enum { LONG = 20 };

static int ends[2];
static char bytes[1 << 20];

static void *watch(void *none) {
    struct timespec pause = {.tv_sec = LONG};
    (void)none;
    while (nanosleep(&pause, &pause) != 0) {
    }
    fprintf(stderr, "a call does not return\n");
    _exit(2);
}

/* Returns once a task of `process` is in one of the calls that wait for a socket. If `of_others` is set, the first task
   does not count. */
static void until_asleep(pid_t process, int of_others) {
    for (;;) {
        char folder[64];
        snprintf(folder, sizeof folder, "/proc/%d/task", process);
        DIR *tasks = opendir(folder);
        struct dirent *task;
        int found = 0;
        while (tasks && (task = readdir(tasks))) {
            char path[400], text[64] = "";
            snprintf(path, sizeof path, "%s/%s/syscall", folder, task->d_name);
            FILE *file = of_others && atoi(task->d_name) == process ? NULL : fopen(path, "r");
            if (file) {
                int number = fgets(text, sizeof text, file) && strncmp(text, "running", 7) ? atoi(text) : -1;
                found |= number == SYS_epoll_wait || number == SYS_epoll_pwait || number == SYS_sendto || number == SYS_recvfrom;
                fclose(file);
            }
        }
        closedir(tasks);
        if (found) {
            return;
        }
        sched_yield();
    }
}

static void *send_all(void *none) {
    (void)none;
    ssize_t n;
    while ((n = send(ends[0], bytes, sizeof bytes, MSG_NOSIGNAL)) == sizeof bytes) {
    }
    if (n >= 0) {
        n = send(ends[0], bytes, 1, MSG_NOSIGNAL);
    }
    printf("send: %s\n", n < 0 ? strerror(errno) : "some");
    return NULL;
}

/* A thread waits for edges, and others read and write. The thread passes on the events that it gets. */
static int told[2];
static uint32_t awaited;

static void *wait_for_edges(void *set) {
    struct epoll_event event;
    while (epoll_wait(*(int *)set, &event, 1, -1) == 1) {
        if (event.events & awaited) {
            check(write(told[1], "!", 1) == 1, "write");
        }
    }
    return NULL;
}

static void begin_waiting(int end, uint32_t event_awaited) {
    static struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET};
    static int set;
    pthread_t waiter;
    set = epoll_create1(0);
    awaited = event_awaited;
    check(pipe2(told, O_NONBLOCK) == 0, "told");
    check(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0 && fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0, "fcntl");
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[end], &event) == 0, "epoll_ctl");
    check(pthread_create(&waiter, NULL, wait_for_edges, &set) == 0, "thread");
}

/* Returns whether the thread has passed on an event. */
static int is_told(int limit) {
    struct pollfd one = {.fd = told[0], .events = POLLIN};
    char some[64];
    int found = poll(&one, 1, limit);
    while (read(told[0], some, sizeof some) > 0) {
    }
    return found == 1;
}

static long fill(size_t part) {
    long all = 0, n;
    while ((n = send(ends[0], bytes, part, MSG_NOSIGNAL)) > 0) {
        all += n;
    }
    check(errno == EAGAIN, "send");
    return all;
}

static void empty(long all) {
    while (all > 0) {
        long n = recv(ends[1], bytes, sizeof bytes, 0);
        check(n > 0 || errno == EAGAIN, "recv");
        all -= n > 0 ? n : 0;
    }
    check(recv(ends[1], bytes, 1, 0) < 0 && errno == EAGAIN, "recv");
}

/* Waits at the sending end, for room. */
static void room(size_t part) {
    int heard = 1;
    begin_waiting(0, EPOLLOUT);
    for (int round = 0; round < 20 && heard; round++) {
        until_asleep(getpid(), 1);
        is_told(0);
        long all = fill(part);
        usleep(1000);
        empty(all);
        heard = is_told(5000);
    }
    puts(heard ? "it hears of room" : "it does not hear of room");
}

/* Waits at the receiving end, for bytes that come after another thread has read all that there was room for. */
static void full(size_t part) {
    int heard = 1;
    begin_waiting(1, EPOLLIN);
    for (int round = 0; round < 20 && heard; round++) {
        until_asleep(getpid(), 1);
        is_told(0);
        long all = fill(part);
        is_told(5000);
        until_asleep(getpid(), 1);
        /* A program that waits for room checks whether the peer waits. */
        poll(&(struct pollfd){.fd = ends[0], .events = POLLOUT}, 1, 20);
        empty(all);
        until_asleep(getpid(), 1);
        is_told(0);
        check(send(ends[0], bytes, 1, 0) == 1, "send");
        heard = is_told(5000);
        empty(1);
    }
    puts(heard ? "it hears of bytes" : "it does not hear of bytes");
}

/* Waits at the receiving end for the peer's end, which came before another thread read the bytes there, with room for
   more. */
static void end(size_t part) {
    begin_waiting(1, EPOLLRDHUP);
    check(send(ends[0], bytes, part, 0) == (ssize_t)part, "send");
    until_asleep(getpid(), 1);
    check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    usleep(100000);
    until_asleep(getpid(), 1);
    long n, all = 0;
    while (all < (long)part && (n = recv(ends[1], bytes, sizeof bytes, 0)) > 0) {
        all += n;
    }
    puts(all == (long)part && is_told(5000) ? "it hears of the end" : "it does not hear of the end");
}

static void *receive_one(void *none) {
    (void)none;
    printf("recv: %zd\n", recv(ends[0], bytes, 1, 0));
    return NULL;
}

/* Returns how many descriptors of a child are epoll sets. */
static int sets(void) {
    DIR *all = opendir("/proc/self/fd");
    struct dirent *one;
    int found = 0;
    while (all && (one = readdir(all))) {
        char path[300], to[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%s", one->d_name);
        found += readlink(path, to, sizeof to - 1) > 0 && strstr(to, "eventpoll") != NULL;
    }
    closedir(all);
    return found;
}

static volatile pid_t made;
static pid_t first;

static void fork_now(int signal) {
    (void)signal;
    if (getpid() == first && !made) {
        made = fork();
    }
}

static void *send_one(void *none) {
    (void)none;
    until_asleep(getpid(), 0);
    check(send(ends[1], "a", 1, 0) == 1, "send");
    return NULL;
}

/* A child changes a flag of the socket, which applies to both processes. */
static void changed(int by_ioctl) {
    int status;
    printf("before: %zd\n", recv(ends[0], bytes, 1, MSG_DONTWAIT));
    /* A call that waits: after it the library knows that waiting is allowed. */
    pthread_t thread;
    check(pthread_create(&thread, NULL, send_one, NULL) == 0, "thread");
    check(recv(ends[0], bytes, 1, 0) == 1, "turn");
    pthread_join(thread, NULL);
    pid_t child = fork();
    if (child == 0) {
        int yes = 1;
        check(by_ioctl ? ioctl(ends[0], FIONBIO, &yes) == 0 : fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0, "set");
        _exit(0);
    }
    waitpid(child, &status, 0);
    ssize_t n = recv(ends[0], bytes, 1, 0);
    printf("after: %zd %s\n", n, n < 0 ? strerror(errno) : "");
}

/* A thread sleeps in a set; a child of its process has the set, in which no thread sleeps. */
static void *wait_in(void *set) {
    struct epoll_event event;
    int n = epoll_wait(*(int *)set, &event, 1, -1);
    (void)n;
    return NULL;
}

static void alone(void) {
    pthread_t thread;
    int set = epoll_create1(0), status;
    struct epoll_event event = {.events = EPOLLPRI | EPOLLONESHOT};
    /* A joined connection, so that this process has something to watch. */
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "add");
    check(pthread_create(&thread, NULL, wait_in, &set) == 0, "thread");
    until_asleep(getpid(), 1);
    pid_t child = fork();
    if (child == 0) {
        int others[2];
        meet(others);
        event.events = EPOLLPRI | EPOLLONESHOT;
        check(epoll_ctl(set, EPOLL_CTL_ADD, others[0], &event) == 0, "add");
        talk(others);
        talk(others);
        talk(others);
        _exit(0);
    }
    waitpid(child, &status, 0);
    printf("child: %d\n", status);
}

/* Returns the number of bytes that this process has read from files. */
static long read_so_far(void) {
    FILE *file = fopen("/proc/self/io", "r");
    long bytes_read = -1;
    check(file && fscanf(file, "rchar: %ld", &bytes_read) == 1, "/proc/self/io");
    fclose(file);
    return bytes_read;
}

/* A thread sleeps in a set of many connections. Another one is added that is to be reported once. */
static void many(void) {
    pthread_t thread;
    int set = epoll_create1(0), others[2];
    struct epoll_event event = {.events = EPOLLPRI};
    struct rlimit limit;
    check(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
    limit.rlim_cur = limit.rlim_max < 9000 ? limit.rlim_max : 9000;
    check(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    for (int at = 0; at < 5000; at++) {
        check(epoll_ctl(set, EPOLL_CTL_ADD, eventfd(0, 0), &event) == 0, "add");
    }
    check(pthread_create(&thread, NULL, wait_in, &set) == 0, "thread");
    until_asleep(getpid(), 1);
    meet(others);
    event.events = EPOLLPRI | EPOLLONESHOT;
    check(epoll_ctl(set, EPOLL_CTL_ADD, others[0], &event) == 0, "add");
    long before = read_so_far();
    for (int at = 0; at < 5; at++) {
        talk(others);
    }
    long after = read_so_far();
    printf("read: %s\n", after - before < 8 << 20 ? "little" : "much");
    fprintf(stderr, "read: %ld\n", after - before);
}

/* The peer is another process, which has sent something and makes no call. In this process standard I/O
   then takes over the socket. */
static void reset(void) {
    int go[2], listener = socket(AF_INET, SOCK_STREAM, 0), status;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    check(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &len) == 0 && pipe(go) == 0, "getsockname");
    pid_t child = fork();
    if (child == 0) {
        int end = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(end, (struct sockaddr *)&address, len) == 0, "connect");
        for (int at = 0; at < 4 * TURNS; at++) {
            check(send(end, bytes, LEN, 0) == LEN && recv(end, bytes, LEN, MSG_WAITALL) == LEN, "turn");
        }
        check(send(end, "unread", 6, 0) == 6, "send");
        /* These calls do not concern a socket. */
        check(write(go[1], "!", 1) == 1 && kill(getpid(), SIGSTOP) == 0, "stop");
        _exit(recv(end, bytes, 1, 0) < 0 && errno == ECONNRESET ? 0 : 1);
    }
    int end = accept(listener, NULL, NULL);
    for (int at = 0; at < 4 * TURNS; at++) {
        check(recv(end, bytes, LEN, MSG_WAITALL) == LEN && send(end, bytes, LEN, 0) == LEN, "turn");
    }
    check(read(go[0], bytes, 1) == 1 && waitpid(child, &status, WUNTRACED) == child, "stopped");
    check(fdopen(end, "r+") != NULL, "fdopen");
    kill(child, SIGCONT);
    waitpid(child, &status, 0);
    printf("both ends: %s\n", status == 0 ? strerror(ECONNRESET) : "another");
}

int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    pthread_t thread, other;
    sigset_t all, before;
    setvbuf(stdout, NULL, _IOLBF, 0);
    meet(ends);
    talk(ends);
    sigfillset(&all);
    check(pthread_sigmask(SIG_BLOCK, &all, &before) == 0 && pthread_create(&other, NULL, watch, NULL) == 0, "watch");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (strcmp(word, "shutdown") == 0) {
        check(pthread_create(&thread, NULL, send_all, NULL) == 0, "thread");
        until_asleep(getpid(), 1);
        check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
        pthread_join(thread, NULL);
    } else if (strcmp(word, "room in parts") == 0) {
        room(5000);
    } else if (strcmp(word, "room") == 0) {
        room(sizeof bytes);
    } else if (strcmp(word, "end") == 0) {
        end(5000);
    } else if (strcmp(word, "full in parts") == 0) {
        full(5000);
    } else if (strcmp(word, "full") == 0) {
        full(sizeof bytes);
    } else if (strcmp(word, "fcntl") == 0) {
        changed(0);
    } else if (strcmp(word, "ioctl") == 0) {
        changed(1);
    } else if (strcmp(word, "seat") == 0) {
        /* A child has the descriptors that it inherits while no thread waits, and no more than these while a thread
           does. */
        int status[2];
        for (int at = 0; at < 2; at++) {
            if (at == 1) {
                check(pthread_create(&thread, NULL, receive_one, NULL) == 0, "thread");
                until_asleep(getpid(), 1);
            }
            pid_t child = fork();
            if (child == 0) {
                _exit(sets());
            }
            waitpid(child, &status[at], 0);
        }
        printf("a child has %d sets more\n", WEXITSTATUS(status[1]) - WEXITSTATUS(status[0]));
        check(send(ends[1], "a", 1, 0) == 1, "send");
        pthread_join(thread, NULL);
    } else if (strcmp(word, "handler") == 0) {
        /* Both processes continue to wait. Then two bytes arrive at once: one for each. */
        struct sigaction action = {.sa_handler = fork_now, .sa_flags = SA_RESTART};
        int told[2], go[2], status;
        char one;
        check(pipe(told) == 0 && pipe(go) == 0 && sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
        first = getpid();
        pid_t sender = fork();
        if (sender == 0) {
            /* The other endpoint, which also makes the first process fork. */
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            close(ends[0]);
            until_asleep(first, 0);
            kill(first, SIGUSR1);
            pid_t child = 0;
            check(read(told[0], &child, sizeof child) == sizeof child, "told");
            until_asleep(first, 0);
            until_asleep(child, 0);
            check(send(ends[1], "ab", 2, 0) == 2, "send");
            /* Then the first process waits to receive, and after that its child waits for room: the byte wakes the
               right one. */
            check(read(told[0], &one, 1) == 1, "told");
            until_asleep(first, 0);
            check(write(go[1], "!", 1) == 1, "go");
            check(read(told[0], &one, 1) == 1, "told");
            until_asleep(child, 0);
            check(send(ends[1], "c", 1, 0) == 1, "send");
            pause();
        }
        close(ends[1]);
        /* A process of its own looks for the child, so that the first process does nothing but wait. */
        pid_t finder = fork();
        if (finder == 0) {
            /* Sends the child's process id to the sender, once there is a child. */
            for (;;) {
                char path[64], text[256] = "";
                snprintf(path, sizeof path, "/proc/%d/task/%d/children", first, first);
                FILE *file = fopen(path, "r");
                int many = file && fgets(text, sizeof text, file);
                if (file) {
                    fclose(file);
                }
                char *next = text;
                for (long pid; many && (pid = strtol(next, &next, 10)) > 0;) {
                    pid_t found = (pid_t)pid;
                    if (found != sender && found != getpid()) {
                        check(write(told[1], &found, sizeof found) == sizeof found, "tell");
                        _exit(0);
                    }
                }
                sched_yield();
            }
        }
        ssize_t n = recv(ends[0], &one, 1, 0);
        check(n == 1, "recv");
        if (getpid() != first) {
            check(read(go[0], &one, 1) == 1 && write(told[1], "c", 1) == 1, "go");
            send_all(NULL);
        }
        check(write(told[1], "p", 1) == 1, "tell");
        printf("woken: %zd\n", recv(ends[0], &one, 1, 0));
        kill(made, SIGKILL);
        kill(sender, SIGKILL);
        waitpid(made, &status, 0);
        waitpid(sender, &status, 0);
    } else if (strcmp(word, "many") == 0) {
        many();
    } else if (strcmp(word, "closed") == 0) {
        check(pthread_create(&thread, NULL, receive_one, NULL) == 0, "thread");
        until_asleep(getpid(), 1);
        check(close(ends[0]) == 0, "close");
        pthread_join(thread, NULL);
    } else if (strcmp(word, "mark") == 0) {
        int mark = -1;
        check(send(ends[1], "abc", 3, 0) == 3 && send(ends[1], "d", 1, MSG_OOB) == 1, "send");
        struct pollfd one = {.fd = ends[0], .events = POLLPRI};
        check(poll(&one, 1, 1000 * LONG) == 1 && ioctl(ends[0], SIOCATMARK, &mark) == 0, "SIOCATMARK");
        printf("mark: %d %d\n", mark, sockatmark(ends[0]));
        check(recv(ends[0], bytes, 3, MSG_WAITALL) == 3 && ioctl(ends[0], SIOCATMARK, &mark) == 0, "SIOCATMARK");
        printf("mark: %d %d\n", mark, sockatmark(ends[0]));
        printf("none: %d\n", sockatmark(-1));
    } else if (strcmp(word, "reset") == 0) {
        reset();
    } else if (strcmp(word, "alone") == 0) {
        alone();
    } else {
        return 1;
    }
    printf("done\n");
    return 0;
}
