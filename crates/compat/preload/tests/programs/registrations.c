/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Sockets that are watched from before they are connected, in every way. Each case prints the result of a wait after
 * both ends have talked enough to be joined. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "ends.h"

enum { LONG = 10000, DATA = 77 };

static int ends[2];
static int listener = -1;
static struct sockaddr_in address;
static char room[1 << 16];

/* Makes a socket that will be the first end. */
static int make(void) {
    socklen_t len = sizeof address;
    close(listener);
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
    return ends[0] = socket(AF_INET, SOCK_STREAM, 0);
}

static void join(void) {
    check(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
    talk(ends);
}

static int set_with(int fd, uint32_t events) {
    int set = epoll_create1(0);
    struct epoll_event event = {.events = events, .data.u64 = DATA};
    check(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0, "add");
    return set;
}

/* Takes all events, so that an edge is due. */
static void drain(int set) {
    struct epoll_event event;
    while (epoll_wait(set, &event, 1, 0) > 0 && event.events & EPOLLET) {
    }
}

static void say(const char *what, int set) {
    struct epoll_event events[4] = {0};
    int n = epoll_wait(set, events, 4, LONG);
    printf("%s: %d", what, n);
    for (int at = 0; at < n; at++) {
        printf(" %x of %llu", events[at].events & (EPOLLIN | EPOLLHUP | EPOLLERR), (unsigned long long)events[at].data.u64);
    }
    printf("\n");
}

static void *wait_for_one(void *set) {
    say("asleep", *(int *)set);
    return NULL;
}

/* Returns once another thread is in a call with one of these numbers. */
static void until_asleep(int call, int other) {
    for (;;) {
        DIR *tasks = opendir("/proc/self/task");
        struct dirent *task;
        int found = 0;
        while (tasks && (task = readdir(tasks))) {
            char path[300], line[64] = "";
            snprintf(path, sizeof path, "/proc/self/task/%s/syscall", task->d_name);
            FILE *file = atoi(task->d_name) == getpid() ? NULL : fopen(path, "r");
            if (file) {
                int number = fgets(line, sizeof line, file) && strncmp(line, "running", 7) ? atoi(line) : -1;
                found |= number == call || number == other;
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

static void early(uint32_t events) {
    int set = set_with(make(), events);
    join();
    drain(set);
    if (events & EPOLLONESHOT) {
        struct epoll_event event = {.events = events, .data.u64 = DATA};
        check(epoll_ctl(set, EPOLL_CTL_MOD, ends[0], &event) == 0, "mod");
    }
    check(write(ends[1], "news", 4) == 4, "write");
    say("early", set);
    check(read(ends[0], room, 8) == 4, "read");
    check(epoll_ctl(set, EPOLL_CTL_DEL, ends[0], NULL) == 0, "del");
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 1};
    check(epoll_ctl(set, EPOLL_CTL_MOD, ends[0], &event) == -1 && errno == ENOENT, "mod of none");
}

/* A set in which a thread has slept since before there was any connection. */
static void asleep(uint32_t events) {
    int set = events & EPOLLOUT ? set_with(make(), EPOLLIN | EPOLLET) : (make(), epoll_create1(0));
    pthread_t thread;
    drain(set);
    check(pthread_create(&thread, NULL, wait_for_one, &set) == 0, "thread");
    if (!(events & EPOLLOUT)) {
        until_asleep(SYS_epoll_wait, SYS_epoll_pwait);
        join();
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = DATA};
        check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "add");
    } else {
        join();
    }
    check(write(ends[1], "news", 4) == 4, "write");
    pthread_join(thread, NULL);
}

/* Another number of the socket, made before it is connected. */
static void copied(void) {
    int other = dup(make());
    join();
    check(write(ends[1], "news", 4) == 4, "write");
    struct pollfd one = {.fd = other, .events = POLLIN};
    printf("copied: %d", poll(&one, 1, LONG));
    printf(" %zd\n", recv(other, room, 8, MSG_DONTWAIT));
}

/* A registration whose number is closed, and then gets another socket. */
static void reused(int joined_before) {
    int first[2], second[2];
    make();
    if (joined_before) {
        join();
    } else {
        check(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
        check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
    }
    memcpy(first, ends, sizeof ends);
    int number = dup(first[0]);
    int set = set_with(number, EPOLLIN);
    close(number);
    talk(first);
    make();
    second[0] = dup2(ends[0], number);
    if (ends[0] != number) {
        close(ends[0]);
    }
    ends[0] = second[0] = number;
    check(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 2};
    check(epoll_ctl(set, EPOLL_CTL_ADD, number, &event) == 0, "add");
    second[1] = ends[1];
    talk(second);
    check(write(first[1], "news", 4) == 4, "write");
    say("closed number", set);
    check(read(first[0], room, 8) == 4, "read");
    event.events = EPOLLIN | EPOLLRDHUP;
    check(epoll_ctl(set, EPOLL_CTL_MOD, number, &event) == 0, "mod");
    check(write(second[1], "more", 4) == 4, "write");
    say("number again", set);
    check(read(second[0], room, 8) == 4, "read");
}

/* A number is closed and made again for the same socket, which has another number. `when` is the time of this; with
 * `alone` the other number is closed then. The registration under the number still exists. */
enum when { UNCONNECTED, CONNECTED, JOINED };

static void renewed(enum when when, int alone) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = 5}, none;
    int number = make(), copy = -1, set = -1;
    for (enum when now = UNCONNECTED; now <= JOINED; now++) {
        if (now == CONNECTED) {
            check(connect(number, (struct sockaddr *)&address, sizeof address) == 0, "connect");
            check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
        } else if (now == JOINED) {
            talk(ends);
        }
        if (now == when) {
            set = set_with(number, EPOLLIN);
            copy = dup(number);
            close(number);
            check(dup2(copy, number) == number, "dup2");
            check(!alone || close(copy) == 0, "close");
        }
    }
    talk(ends);
    check(write(ends[1], "news", 4) == 4, "write");
    say("as before", set);
    check(read(number, room, 8) == 4, "read");
    check(epoll_ctl(set, EPOLL_CTL_ADD, number, &event) == -1 && errno == EEXIST, "add what is there");
    check(epoll_ctl(set, EPOLL_CTL_MOD, number, &event) == 0, "mod");
    talk(ends);
    check(write(ends[1], "more", 4) == 4, "write");
    say("as changed", set);
    check(read(number, room, 8) == 4, "read");
    check(epoll_ctl(set, EPOLL_CTL_DEL, number, NULL) == 0, "del");
    check(write(ends[1], "last", 4) == 4, "write");
    printf("no more: %d\n", epoll_wait(set, &none, 1, 50));
    check(read(number, room, 8) == 4, "read");
}

/* A registration for one event, which has been reported. */
static void spent(void) {
    make();
    check(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
    int set = set_with(ends[0], EPOLLIN | EPOLLONESHOT);
    struct epoll_event event;
    check(write(ends[1], "one", 3) == 3, "write");
    say("one shot", set);
    check(read(ends[0], room, 8) == 3, "read");
    talk(ends);
    check(write(ends[1], "news", 4) == 4, "write");
    printf("spent: %d\n", epoll_wait(set, &event, 1, 50));
    event = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = 5};
    check(epoll_ctl(set, EPOLL_CTL_MOD, ends[0], &event) == 0, "mod");
    say("again", set);
}

static void *poll_one(void *events) {
    struct pollfd one = {.fd = ends[0], .events = *(short *)events};
    int n = poll(&one, 1, LONG);
    printf("polled: %d %x\n", n, one.revents & (POLLIN | POLLRDNORM));
    return NULL;
}

/* A thread polls, by the less usual name of the event it waits for, while another talks. */
static void polled(void) {
    short events = POLLRDNORM;
    pthread_t thread;
    make();
    check(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
    check(pthread_create(&thread, NULL, poll_one, &events) == 0, "thread");
    until_asleep(SYS_poll, SYS_ppoll);
    /* In one direction only, so that it stays asleep. */
    for (int at = 0; at < 100; at++) {
        check(send(ends[0], room, 1000, 0) == 1000 && recv(ends[1], room, 1000, MSG_WAITALL) == 1000, "turn");
    }
    check(write(ends[1], "news", 4) == 4, "write");
    pthread_join(thread, NULL);
}

/* Returns a pipe with a byte in it. */
static int ready_pipe(void) {
    int line[2];
    check(pipe(line) == 0 && write(line[1], "x", 1) == 1, "pipe");
    return line[0];
}

/* A call that does not wait and has room for one event reports the pipe, whatever else could be reported of a
   connection. */
static void crowded(void) {
    make();
    join();
    int set = set_with(ends[0], EPOLLIN);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = DATA + 1};
    check(epoll_ctl(set, EPOLL_CTL_ADD, ready_pipe(), &event) == 0, "add");
    printf("crowded: %d", epoll_wait(set, &event, 1, 0));
    printf(" %lu\n", event.data.u64);
}

/* Calls with room for few events report everything that is ready again and again, although one kind of it would fill
   them. */
static void turns(int places, int limit) {
    enum { KINDS = 3, CALLS = 60 };
    int told[2 * KINDS] = {0}, set = epoll_create1(0);
    struct epoll_event events[KINDS], event = {.events = EPOLLIN};
    for (int at = 0; at < KINDS; at++, event.data.u32++) {
        make();
        join();
        struct pollfd one = {.fd = ends[0], .events = POLLIN};
        check(send(ends[1], "x", 1, 0) == 1 && poll(&one, 1, LONG) == 1, "send");
        check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "add");
    }
    for (int at = 0; at < KINDS; at++, event.data.u32++) {
        check(epoll_ctl(set, EPOLL_CTL_ADD, ready_pipe(), &event) == 0, "add");
    }
    for (int call = 0; call < CALLS; call++) {
        int n = epoll_wait(set, events, places, limit);
        check(n > 0, "epoll_wait");
        for (int at = 0; at < n; at++) {
            told[events[at].data.u32]++;
        }
    }
    printf("turns of %d within %d:", places, limit);
    for (int at = 0; at < 2 * KINDS; at++) {
        printf(" %d", told[at] >= CALLS * places / (4 * KINDS));
    }
    printf("\n");
}

/* Leaves the CPU to every other thread of this program. */
static void *wait_behind(void *set) {
    struct sched_param none = {0};
    struct epoll_event event;
    check(sched_setscheduler(0, SCHED_IDLE, &none) == 0, "sched_setscheduler");
    check(epoll_wait(*(int *)set, &event, 1, -1) == 1 && event.data.u64 == DATA, "epoll_wait");
    return NULL;
}

/* A thread sleeps in a set. Another one on the same CPU takes the event that was to wake it, by a call that does not
 * wait: first the event that a registration for one event was armed again, or else an edge of bytes. Later bytes wake
 * the sleeping thread. */
static void taken(uint32_t events) {
    int set = set_with(make(), events);
    struct epoll_event event = {.events = events, .data.u64 = DATA}, few[4];
    pthread_t thread;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    join();
    check(write(ends[1], "first", 5) == 5, "write");
    say("first", set);
    check(read(ends[0], room, 8) == 5, "read");
    check(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
    check(pthread_create(&thread, NULL, wait_behind, &set) == 0, "thread");
    until_asleep(SYS_epoll_wait, SYS_epoll_pwait);
    if (events & EPOLLONESHOT) {
        check(epoll_ctl(set, EPOLL_CTL_MOD, ends[0], &event) == 0, "mod");
        check(epoll_wait(set, few, 4, 0) == 0, "nothing");
    } else {
        check(write(ends[1], "second", 6) == 6, "write");
        check(epoll_wait(set, few, 4, 0) >= 0 && read(ends[0], room, 8) == 6, "second");
    }
    check(write(ends[1], "third", 5) == 5, "write");
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += LONG / 1000;
    printf("woken: %d\n", pthread_timedjoin_np(thread, NULL, &limit) == 0);
}

static volatile sig_atomic_t signals;

static void count(int signal) {
    (void)signal;
    signals++;
}

/* A socket that raises signals, since before it was connected. */
static void signalled(void) {
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    check(sigaction(SIGIO, &action, NULL) == 0, "sigaction");
    make();
    check(fcntl(ends[0], F_SETOWN, getpid()) == 0 && fcntl(ends[0], F_SETFL, O_ASYNC) == 0, "async");
    join();
    signals = 0;
    check(write(ends[1], "news", 4) == 4, "write");
    for (int at = 0; at < LONG && !signals; at++) {
        poll(NULL, 0, 1);
    }
    printf("signalled: %d\n", signals > 0);
}

/* A socket that two processes have from before it is connected. */
static void inherited(void) {
    int go[2];
    check(pipe(go) == 0, "pipe");
    make();
    pid_t child = fork();
    if (child == 0) {
        join();
        check(write(ends[1], "news", 4) == 4 && write(go[1], "!", 1) == 1, "write");
        pause();
        _exit(0);
    }
    check(read(go[0], room, 1) == 1, "read");
    struct pollfd one = {.fd = ends[0], .events = POLLIN};
    printf("inherited: %d", poll(&one, 1, LONG));
    printf(" %zd\n", recv(ends[0], room, 8, MSG_DONTWAIT));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* A server with a set, whose child closes the joined socket that it inherited. */
static void child(void) {
    int set = set_with(make(), EPOLLIN | EPOLLRDHUP);
    join();
    for (int at = 0; at < 4; at++) {
        pid_t child = fork();
        if (child == 0) {
            close(ends[0]);
            close(ends[1]);
            close(set);
            _exit(0);
        }
        waitpid(child, NULL, 0);
        check(write(ends[1], "news", 4) == 4, "write");
        say("after a child", set);
        check(read(ends[0], room, 8) == 4, "read");
        turn(ends[0], ends[1]);
    }
    close(ends[1]);
    say("at the end", set);
}

/* A set that has a number beyond the usual ones as well. */
static void far(void) {
    struct rlimit limit;
    check(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
    limit.rlim_cur = limit.rlim_max < 70010 ? limit.rlim_max : 70010;
    check(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    int set = set_with(make(), EPOLLIN);
    int other = fcntl(set, F_DUPFD, limit.rlim_cur - 5);
    check(other >= 0, "dup");
    join();
    check(write(ends[1], "news", 4) == 4, "write");
    say("far", other);
}

/* Returns the number of lines of the library's log that report a join; a large number where there is no log. */
static int joined(void) {
    const char *name = getenv("TOMBOLO_SOCKETS_LOG");
    FILE *log = name ? fopen(name, "r") : NULL;
    char line[512];
    int found = name ? 0 : 2;
    while (log && fgets(line, sizeof line, log)) {
        found += strstr(line, " joined:") != NULL;
    }
    if (log) {
        fclose(log);
    }
    return found;
}

static void *sleep_in(void *set) {
    struct epoll_event event;
    return (void *)(intptr_t)epoll_wait(*(int *)set, &event, 1, -1);
}

/* A connection in two sets, or twice in one, of which one registration cannot be prepared so far: it asks for one
 * event, which does not come, and a thread sleeps in its set. The other registration is changed meanwhile, and both are
 * right at the end. */
static void half(int twice) {
    make();
    check(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
    int other = twice ? dup(ends[0]) : ends[0];
    int first = set_with(ends[0], EPOLLIN), second = twice ? first : epoll_create1(0), wake[2];
    struct epoll_event event = {.events = EPOLLPRI | EPOLLONESHOT, .data.u64 = 1};
    pthread_t thread;
    check(epoll_ctl(second, EPOLL_CTL_ADD, other, &event) == 0, "add");
    check(pipe(wake) == 0, "pipe");
    event = (struct epoll_event){.events = EPOLLIN | EPOLLET, .data.u64 = 2};
    if (!twice) {
        check(epoll_ctl(second, EPOLL_CTL_ADD, wake[0], &event) == 0, "add");
        check(pthread_create(&thread, NULL, sleep_in, &second) == 0, "thread");
        until_asleep(SYS_epoll_wait, SYS_epoll_pwait);
    }
    /* No more turns than it takes: each call tries again, but not for ever. */
    for (int at = 0; at < 40 && joined() < 2; at++) {
        turn(ends[0], ends[1]);
        turn(ends[1], ends[0]);
    }
    event = (struct epoll_event){.events = EPOLLIN | EPOLLOUT, .data.u64 = 5};
    check(epoll_ctl(first, EPOLL_CTL_MOD, ends[0], &event) == 0, "mod");
    check(epoll_ctl(second, EPOLL_CTL_DEL, other, NULL) == 0, "del");
    for (int at = 0; at < 4; at++) {
        turn(ends[0], ends[1]);
        turn(ends[1], ends[0]);
    }
    check(write(ends[1], "news", 4) == 4, "write");
    struct pollfd one = {.fd = ends[0], .events = POLLIN};
    check(poll(&one, 1, LONG) == 1, "poll");
    say("changed", first);
    check(read(ends[0], room, 8) == 4, "read");
    /* Nothing to read, and no room. */
    while (send(ends[0], room, sizeof room, MSG_DONTWAIT) > 0) {
    }
    printf("full: %d\n", epoll_wait(first, &event, 1, 0));
    if (!twice) {
        check(write(wake[1], "!", 1) == 1, "wake");
        pthread_join(thread, NULL);
    }
}

/* Threads of a pool. Each has a connection to itself from the time it gets its event until it arms it again. One
 * sleeps, the others look now and then. */
enum { POOL = 4, CALLERS = 4, ASKED = 25, LIVES = 150 };

static struct {
    int set;
    int pair[CALLERS][2];
    atomic_int busy[CALLERS];
    atomic_int overlaps;
} pool;

static void *serves(void *sleeps) {
    struct epoll_event event;
    for (;;) {
        int told = epoll_wait(pool.set, &event, 1, sleeps != NULL ? -1 : 0);
        check(told >= 0, "epoll_wait");
        if (told == 0) {
            sched_yield();
            continue;
        }
        if (event.data.u64 == CALLERS) {
            return NULL;
        }
        int at = event.data.u64, fd = pool.pair[at][1];
        char asked[64];
        atomic_fetch_add(&pool.overlaps, atomic_exchange(&pool.busy[at], 1));
        ssize_t n = recv(fd, asked, sizeof asked, MSG_DONTWAIT);
        check(n < 0 || send(fd, asked, n, 0) == n, "answer");
        for (int turn = 0; turn < at % 4; turn++) {
            sched_yield();
        }
        atomic_store(&pool.busy[at], 0);
        event.events = EPOLLIN | EPOLLET | EPOLLONESHOT;
        check(epoll_ctl(pool.set, EPOLL_CTL_MOD, fd, &event) == 0, "mod");
    }
}

static void told_once(void) {
    long answers = 0;
    for (int life = 0; life < LIVES; life++) {
        pthread_t threads[POOL];
        int over[2];
        pool.set = epoll_create1(0);
        for (int at = 0; at < CALLERS; at++) {
            meet(pool.pair[at]);
            struct epoll_event event = {.events = EPOLLIN | EPOLLET | EPOLLONESHOT, .data.u64 = at};
            check(epoll_ctl(pool.set, EPOLL_CTL_ADD, pool.pair[at][1], &event) == 0, "add");
        }
        for (int one = 0; one < POOL; one++) {
            check(pthread_create(&threads[one], NULL, serves, one == 0 ? &pool : NULL) == 0, "pthread_create");
        }
        for (int round = 0; round < ASKED; round++) {
            for (int at = 0; at < CALLERS; at++) {
                check(send(pool.pair[at][0], room, 40, 0) == 40, "ask");
            }
            for (int at = 0; at < CALLERS; at++) {
                answers += recv(pool.pair[at][0], room, 40, MSG_WAITALL) == 40;
            }
        }
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = CALLERS};
        check(pipe(over) == 0 && write(over[1], "", 1) == 1, "pipe");
        check(epoll_ctl(pool.set, EPOLL_CTL_ADD, over[0], &event) == 0, "add");
        for (int one = 0; one < POOL; one++) {
            pthread_join(threads[one], NULL);
        }
        for (int at = 0; at < CALLERS; at++) {
            close(pool.pair[at][0]);
            close(pool.pair[at][1]);
        }
        close(over[0]);
        close(over[1]);
        close(pool.set);
    }
    printf("%ld answers, %d times two threads\n", answers, atomic_load(&pool.overlaps));
}

int main(int count, char **words) {
    const char *word = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(word, "level") == 0) {
        early(EPOLLIN);
    } else if (strcmp(word, "edge") == 0) {
        early(EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    } else if (strcmp(word, "oneshot") == 0) {
        early(EPOLLIN | EPOLLONESHOT);
    } else if (strcmp(word, "exclusive") == 0) {
        int set = set_with(make(), EPOLLIN | EPOLLEXCLUSIVE);
        join();
        check(write(ends[1], "news", 4) == 4, "write");
        say("exclusive", set);
    } else if (strcmp(word, "asleep") == 0) {
        asleep(EPOLLIN);
    } else if (strcmp(word, "asleep early") == 0) {
        asleep(EPOLLIN | EPOLLOUT);
    } else if (strcmp(word, "copied") == 0) {
        copied();
    } else if (strcmp(word, "reused") == 0) {
        reused(0);
    } else if (strcmp(word, "reused joined") == 0) {
        reused(1);
    } else if (strncmp(word, "renewed", 7) == 0) {
        for (enum when when = UNCONNECTED; when <= JOINED; when++) {
            renewed(when, strcmp(word, "renewed alone") == 0);
        }
    } else if (strcmp(word, "told once") == 0) {
        told_once();
    } else if (strcmp(word, "spent") == 0) {
        spent();
    } else if (strcmp(word, "taken change") == 0) {
        taken(EPOLLIN | EPOLLET | EPOLLONESHOT);
    } else if (strcmp(word, "taken edge") == 0) {
        taken(EPOLLIN | EPOLLET);
    } else if (strcmp(word, "half") == 0) {
        half(0);
    } else if (strcmp(word, "half twice") == 0) {
        half(1);
    } else if (strcmp(word, "crowded") == 0) {
        crowded();
    } else if (strcmp(word, "turns") == 0) {
        for (int places = 1; places <= 3; places++) {
            turns(places, 0);
            turns(places, LONG);
        }
    } else if (strcmp(word, "polled") == 0) {
        polled();
    } else if (strcmp(word, "signalled") == 0) {
        signalled();
    } else if (strcmp(word, "inherited") == 0) {
        inherited();
    } else if (strcmp(word, "child") == 0) {
        child();
    } else if (strcmp(word, "far") == 0) {
        far();
    } else {
        return 1;
    }
    printf("done\n");
    return 0;
}
