/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Arguments, flags and circumstances at the limits of what calls allow. Prints the results. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ends.h"

enum { SMALL = 40 << 10 };

static int ends[2];
static char room[1 << 16];

/* Makes two new endpoints that have talked enough to be joined. */
static void pair(void) {
    close(ends[0]);
    close(ends[1]);
    meet(ends);
    talk(ends);
}

/* Sends `bytes`, and waits until they have arrived. */
static void come(const char *bytes) {
    int there = 0, before;
    check(ioctl(ends[1], FIONREAD, &before) == 0, "FIONREAD");
    check(write(ends[0], bytes, strlen(bytes)) == (ssize_t)strlen(bytes), "write");
    while (there < before + (int)strlen(bytes)) {
        check(ioctl(ends[1], FIONREAD, &there) == 0, "FIONREAD");
    }
}

static void say(const char *what, long answer) {
    if (answer < 0) {
        printf("%s: %s\n", what, strerror(errno));
    } else {
        printf("%s: %ld\n", what, answer);
    }
}

static void *sends(void *bytes) {
    usleep(50000);
    check(write(ends[0], bytes, strlen(bytes)) == (ssize_t)strlen(bytes), "write");
    return NULL;
}

static pthread_t later(char *bytes) {
    pthread_t thread;
    check(pthread_create(&thread, NULL, sends, bytes) == 0, "pthread_create");
    return thread;
}

static void hear(int signal) {
    (void)signal;
}

/* No bytes to move, more than there can be, and no buffer for them. */
static void lengths(void) {
    struct iovec many[1025], two[2] = {{room, 1}, {room, SIZE_MAX}}, mixed[3] = {{NULL, 0}, {"xy", 2}, {NULL, 0}};
    struct msghdr message = {.msg_iov = many, .msg_iovlen = 1025};
    void *volatile nowhere = NULL;
    for (int at = 0; at < 1025; at++) {
        many[at] = (struct iovec){room + at, 1};
    }
    pair();
    say("recv of nothing, nothing there", recv(ends[1], room, 0, MSG_DONTWAIT));
    say("read of nothing, nothing there", read(ends[1], room, 0));
    come("abc");
    say("recv of nothing", recv(ends[1], room, 0, MSG_DONTWAIT));
    say("readv of -1", readv(ends[1], many, -1));
    say("readv of none", readv(ends[1], many, 0));
    say("readv of too many", readv(ends[1], many, 1025));
    say("preadv2 of too many", preadv2(ends[1], many, 1025, -1, 0));
    say("recvmsg of too many", recvmsg(ends[1], &message, MSG_DONTWAIT));
    say("readv of too much", readv(ends[1], two, 2));
    say("recv to nowhere", recv(ends[1], nowhere, 2, MSG_DONTWAIT));
    say("recv of all there may be", recv(ends[1], room, SIZE_MAX, MSG_DONTWAIT));
    say("writev of -1", writev(ends[0], many, -1));
    say("writev of none", writev(ends[0], many, 0));
    say("writev of too many", writev(ends[0], many, 1025));
    say("sendmsg of too many", sendmsg(ends[0], &message, 0));
    say("writev of too much", writev(ends[0], two, 2));
    say("write from nowhere", write(ends[0], nowhere, 2));
    say("send of nothing from nowhere", send(ends[0], nowhere, 0, 0));
    say("writev with empty parts", writev(ends[0], mixed, 3));
    say("recv", recv(ends[1], room, LEN, 0));
    struct iovec one = {room, LEN};
    message = (struct msghdr){.msg_namelen = 55, .msg_iov = &one, .msg_iovlen = 1, .msg_flags = 77};
    come("abc");
    say("recvmsg", recvmsg(ends[1], &message, MSG_CMSG_CLOEXEC));
    printf("%d, %zu, %x\n", message.msg_namelen, message.msg_controllen, message.msg_flags);
    check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    say("send of nothing after the end", send(ends[0], "", 0, MSG_NOSIGNAL));
    struct pollfd ended = {.fd = ends[1], .events = POLLIN};
    check(poll(&ended, 1, 5000) == 1, "poll");
    say("recv of nothing at the end", recv(ends[1], room, 0, 0));
}

static void times(void) {
    struct timeval before = {-1, 0}, long_one = {0, 1500000};
    struct timespec none = {0, 2000000000};
    struct mmsghdr message = {0};
    fd_set set;
    pair();
    FD_ZERO(&set);
    FD_SET(ends[1], &set);
    say("select for less than no time", select(ends[1] + 1, &set, NULL, NULL, &before));
    say("pselect for no time", pselect(ends[1] + 1, &set, NULL, NULL, &none, NULL));
    say("recvmmsg for no time", recvmmsg(ends[1], &message, 1, MSG_DONTWAIT, &none));
    pthread_t thread = later("x");
    say("select for long", select(ends[1] + 1, &set, NULL, NULL, &long_one));
    pthread_join(thread, NULL);
    say("recv", recv(ends[1], room, LEN, 0));
    thread = later("x");
    say("pselect6 by number", syscall(SYS_pselect6, ends[1] + 1, &set, NULL, NULL, NULL, NULL));
    pthread_join(thread, NULL);
    say("recv", recv(ends[1], room, LEN, 0));
    say("a limit of less than none", setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &before, sizeof before));
    thread = later("x");
    say("recv at once", recv(ends[1], room, LEN, 0));
    pthread_join(thread, NULL);
}

/* Peeks at as many bytes as were asked for. */
static void looks(void) {
    pair();
    come("abc");
    pthread_t thread = later("defgh");
    say("a look waits for all", recv(ends[1], room, 8, MSG_PEEK | MSG_WAITALL));
    pthread_join(thread, NULL);
    say("and leaves it", recv(ends[1], room, 8, MSG_WAITALL));
    come("abc");
    say("but not one that does not wait", recv(ends[1], room, 8, MSG_PEEK | MSG_WAITALL | MSG_DONTWAIT));
    struct timeval soon = {0, 50000};
    check(setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) == 0, "SO_RCVTIMEO");
    say("nor longer than the socket's time", recv(ends[1], room, 8, MSG_PEEK | MSG_WAITALL));
    soon.tv_usec = 0;
    check(setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) == 0, "SO_RCVTIMEO");
    struct sigaction action = {.sa_handler = hear, .sa_flags = SA_RESTART};
    struct itimerval again = {{0, 50000}, {0, 50000}}, never = {{0, 0}, {0, 0}};
    check(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &again, NULL) == 0, "setitimer");
    say("nor past a signal", recv(ends[1], room, 8, MSG_PEEK | MSG_WAITALL));
    setitimer(ITIMER_REAL, &never, NULL);
    check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    say("nor past the end", recv(ends[1], room, 8, MSG_PEEK | MSG_WAITALL));
    say("recv", recv(ends[1], room, 8, MSG_WAITALL));
}

static volatile sig_atomic_t signals;

static void count(int signal) {
    signals += signal == SIGIO;
}

/* Services that only the kernel offers: signals, wake-ups at a minimum of bytes, lent pages. */
static void kernels(void) {
    int five = 5, one = 1;
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    struct pollfd ready = {.fd = 0, .events = POLLIN};
    check(sigaction(SIGIO, &action, NULL) == 0, "sigaction");
    for (int way = 0; way < 2; way++) {
        pair();
        check(fcntl(ends[1], F_SETOWN, getpid()) == 0, "F_SETOWN");
        check((way ? ioctl(ends[1], FIOASYNC, &one) : fcntl(ends[1], F_SETFL, O_ASYNC)) == 0, "O_ASYNC");
        signals = 0;
        come("abc");
        for (int at = 0; at < 500 && !signals; at++) {
            usleep(10000);
        }
        say("a signal", signals > 0);
    }
    action.sa_handler = SIG_IGN;
    check(sigaction(SIGIO, &action, NULL) == 0, "sigaction");
    pair();
    check(setsockopt(ends[1], SOL_SOCKET, SO_RCVLOWAT, &five, sizeof five) == 0, "SO_RCVLOWAT");
    come("abc");
    ready.fd = ends[1];
    say("less than what is worth it", poll(&ready, 1, 50));
    come("de");
    say("enough", poll(&ready, 1, 5000));
    pair();
    check(setsockopt(ends[0], SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0, "SO_ZEROCOPY");
    say("lent", send(ends[0], room, 20000, MSG_ZEROCOPY));
    say("recv", recv(ends[1], room, 20000, MSG_WAITALL));
    ready = (struct pollfd){.fd = ends[0]};
    say("given back", poll(&ready, 1, 5000));
    struct msghdr message = {.msg_control = room, .msg_controllen = LEN};
    say("and by which", recvmsg(ends[0], &message, MSG_ERRQUEUE));
}

static void *moves(void *unused) {
    int pipes[2], file = open("/bin/sh", O_RDONLY);
    off_t offset = 0;
    check(pipe(pipes) == 0 && write(pipes[1], "hello", 5) == 5, "pipe");
    ssize_t moved = sendfile(ends[0], file, &offset, 1000);
    moved += recv(ends[1], room, 1000, MSG_WAITALL);
    moved += splice(pipes[0], NULL, ends[0], NULL, 5, 0);
    moved += splice(ends[1], NULL, pipes[1], NULL, 5, 0);
    close(pipes[0]);
    close(pipes[1]);
    close(file);
    return unused ? NULL : (void *)moved;
}

/* Moves from and to files and pipes: on a small stack, without waiting, and without a reader. */
static void others(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    void *moved;
    int pipes[2], status;
    pair();
    pthread_attr_init(&attributes);
    check(pthread_attr_setstacksize(&attributes, SMALL) == 0, "pthread_attr_setstacksize");
    check(pthread_create(&thread, &attributes, moves, NULL) == 0, "pthread_create");
    pthread_join(thread, &moved);
    say("on a small stack", (long)moved);
    check(pipe(pipes) == 0, "pipe");
    alarm(30);
    say("splice from an empty pipe", splice(pipes[0], NULL, ends[0], NULL, 100, SPLICE_F_NONBLOCK));
    for (int at = 0; at < 15; at++) {
        check(write(pipes[1], room, 4096) == 4096, "write");
    }
    for (int at = 0; at < 10; at++) {
        check(send(ends[0], room, 4096, 0) == 4096, "send");
    }
    for (int there = 0; there < 40960;) {
        check(ioctl(ends[1], FIONREAD, &there) == 0, "FIONREAD");
    }
    ssize_t some = splice(ends[1], NULL, pipes[1], NULL, sizeof room, SPLICE_F_NONBLOCK);
    say("splice to a pipe that is nearly full", some > 0 && some < 40960);
    say("and then", splice(ends[1], NULL, pipes[1], NULL, sizeof room, SPLICE_F_NONBLOCK));
    alarm(0);
    pair();
    close(ends[1]);
    pid_t child = fork();
    if (child == 0) {
        int file = open("/bin/sh", O_RDONLY);
        off_t offset = 0;
        signal(SIGPIPE, SIG_DFL);
        while (sendfile(ends[0], file, &offset, 1000) >= 0) {
            usleep(10000);
        }
        _exit(1);
    }
    check(waitpid(child, &status, 0) == child, "waitpid");
    say("sendfile to nobody is ended by", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

/* Calls that are refused leave everything as it is. */
static void refused(void) {
    pair();
    int copy = dup(ends[1]);
    say("dup2 of nothing", dup2(999, ends[1]));
    say("dup3 of a strange kind", dup3(copy, ends[1], 77));
    say("close_range of a strange kind", close_range(ends[1], ends[1], 64));
    close(copy);
    come("abc");
    say("recv", recv(ends[1], room, LEN, 0));
    say("send", send(ends[1], "defg", 4, 0));
    say("recv", recv(ends[0], room, 4, MSG_WAITALL));
}

/* As many entries as there may be descriptors, and sets with room for fewer. */
static void tables(void) {
    struct rlimit before, limit;
    struct pollfd all[64];
    struct {
        fd_set set;
        unsigned char beyond[1024];
    } seen;
    pair();
    check(getrlimit(RLIMIT_NOFILE, &before) == 0, "getrlimit");
    limit = before;
    limit.rlim_cur = 64;
    check(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    for (int full = 0; full < 2; full++) {
        for (int at = 0; at < 64; at++) {
            all[at] = (struct pollfd){.fd = full ? ends[1] : -1, .events = POLLIN};
        }
        all[9].fd = ends[1];
        say("poll, all idle", poll(all, 64, 20));
        pthread_t thread = later("x");
        int found = poll(all, 64, 5000);
        /* A byte may come between the checks of two of the entries. */
        say("poll", full ? found > 0 : found);
        pthread_join(thread, NULL);
        say("recv", recv(ends[1], room, LEN, 0));
    }
    limit.rlim_cur = before.rlim_max < 5000 ? before.rlim_max : 5000;
    check(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    for (int joined = 0; joined < 2; joined++) {
        struct timeval soon = {0, 20000};
        int fd = joined ? ends[1] : dup(0);
        memset(&seen, 0x5a, sizeof seen);
        FD_ZERO(&seen.set);
        FD_SET(fd, &seen.set);
        int found = select(getdtablesize(), joined ? &seen.set : NULL, NULL, joined ? NULL : &seen.set, &soon);
        say("select of all there may be", found);
        int changed = 0;
        for (size_t at = 0; at < sizeof seen.beyond; at++) {
            changed += seen.beyond[at] != 0x5a;
        }
        say("beyond the set", changed);
    }
    setrlimit(RLIMIT_NOFILE, &before);
}

/* From now on a call that this program does not make itself terminates it. */
/* The memory behind the events that a wait returns stays the program's. */
static void events(int most) {
    struct epoll_event own = {.events = EPOLLIN, .data.u32 = 5}, found[40];
    int set = epoll_create1(0);
    memset(found, 7, sizeof found);
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &own) == 0, "epoll_ctl");
    for (int turn = 0; turn < 20; turn++) {
        int timeout = turn % 2 ? 1 : 0, given;
        say("nothing there", epoll_wait(set, found, most, timeout));
        come("abc");
        check(turn % 3 > 0 || recv(ends[1], room, 3, 0) == 3, "recv");
        say("maybe", given = epoll_wait(set, found, most, timeout));
        check(turn % 3 == 0 || recv(ends[1], room, 3, 0) == 3, "recv");
        say("nothing there", epoll_wait(set, found, most, timeout));
        for (size_t at = (size_t)given * sizeof *found; at < sizeof found; at++) {
            check(((char *)found)[at] == 7, "what was not given");
        }
        memset(found, 7, sizeof found);
    }
    close(set);
}

static void shut_in(int by_number) {
    static const int calls[] = {SYS_read, SYS_write, SYS_sendto, SYS_recvfrom, SYS_epoll_wait, SYS_exit_group};
    struct sock_filter filter[2 + 2 * sizeof calls / sizeof *calls];
    struct sock_fprog program = {.filter = filter};
    filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
    for (size_t at = 0; at < sizeof calls / sizeof *calls; at++) {
        filter[program.len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[at], 0, 1);
        filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
    check((by_number ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)
                     : prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) == 0, "seccomp");
}

static void confined(int by_number) {
    int set = epoll_create1(0), first[2];
    struct epoll_event level = {.events = EPOLLIN, .data.u32 = 5}, edge = {.events = EPOLLIN | EPOLLET, .data.u32 = 6};
    struct epoll_event gone = {.events = EPOLLIN}, found[4];
    pair();
    first[0] = dup(ends[0]);
    first[1] = dup(ends[1]);
    pair();
    check(epoll_ctl(set, EPOLL_CTL_ADD, first[1], &level) == 0, "epoll_ctl");
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[1], &edge) == 0, "epoll_ctl");
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &gone) == 0, "epoll_ctl");
    check(epoll_ctl(set, EPOLL_CTL_DEL, ends[0], NULL) == 0, "epoll_ctl");
    say("nothing there", epoll_wait(set, found, 4, 20));
    shut_in(by_number);
    say("nothing there", epoll_wait(set, found, 4, 20));
    check(send(ends[0], "abc", 3, 0) == 3 && send(ends[1], "abc", 3, 0) == 3, "send");
    say("one that tells of edges", epoll_wait(set, found, 4, 5000));
    say("it", found[0].data.u32);
    say("and no more", epoll_wait(set, found, 4, 20));
    check(send(first[0], "abc", 3, 0) == 3, "send");
    for (int at = 0; at < 2; at++) {
        say("one that tells of bytes", epoll_wait(set, found, 4, 5000));
        say("it", found[0].data.u32);
    }
    check(recv(ends[1], room, 3, MSG_WAITALL) == 3 && recv(ends[0], room, 3, MSG_WAITALL) == 3, "recv");
    take_turns(ends);
    puts("on");
}

/* The size of files is limited here, also of files in memory. */
static void bounded(void) {
    struct rlimit limit = {10000, 10000};
    check(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
    pair();
    puts("on");
}

int main(int count, char **words) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    ends[0] = ends[1] = -1;
    if (count > 1) {
        puts(words[1]);
        strcmp(words[1], "bounded") == 0 ? bounded() : confined(strcmp(words[1], "by number") == 0);
        _exit(0);
    }
    lengths();
    times();
    looks();
    kernels();
    others();
    refused();
    tables();
    pair();
    events(1);
    events(3);
    events(40);
    return 0;
}
