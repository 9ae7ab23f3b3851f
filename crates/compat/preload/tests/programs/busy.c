/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A process that forks while its threads serve and call one another. The child's state is consistent, and no process
 * waits for a thread that does not exist in it. Each connection has both endpoints in this process, or one in a child.
 * */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CALLERS = 2, TURNS = 20, LEN = 1000, PATIENCE = 60 };

static struct sockaddr_in address = {.sin_family = AF_INET};
static int listener;
static atomic_int enough, over;

static void check(int good, const char *what) {
    if (!good) {
        dprintf(2, "%d: ", getpid());
        perror(what);
        _exit(1);
    }
}

/* Echoes the bytes that it receives. */
static void *serve(void *unused) {
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    check(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event) == 0, "epoll_ctl");
    while (!over) {
        struct epoll_event ready[8];
        int found = epoll_wait(set, ready, 8, 50);
        for (int at = 0; at < found; at++) {
            int fd = ready[at].data.fd;
            if (fd == listener) {
                event.data.fd = accept(listener, NULL, NULL);
                check(event.data.fd >= 0, "accept");
                check(epoll_ctl(set, EPOLL_CTL_ADD, event.data.fd, &event) == 0, "epoll_ctl");
                continue;
            }
            char bytes[LEN];
            ssize_t got = recv(fd, bytes, LEN, 0);
            check(got >= 0, "recv");
            if (got > 0) {
                check(send(fd, bytes, got, 0) == got, "send");
            } else {
                /* A child may have a copy, which would stay in the set. */
                epoll_ctl(set, EPOLL_CTL_DEL, fd, NULL);
                close(fd);
            }
        }
    }
    close(set);
    return unused;
}

static void call(void) {
    char sent[LEN], got[LEN];
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval patience = {.tv_sec = PATIENCE};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    check(connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    for (int turn = 0; turn < TURNS; turn++) {
        memset(sent, 'a' + turn, LEN);
        check(send(fd, sent, LEN, 0) == LEN, "send");
        check(recv(fd, got, LEN, MSG_WAITALL) == LEN, "recv");
        check(memcmp(sent, got, LEN) == 0, "other bytes");
    }
    /* Not by the close, because a child that was just made may have a copy. */
    shutdown(fd, SHUT_RDWR);
    close(fd);
}

static void *calls(void *unused) {
    while (!enough) {
        call();
    }
    return unused;
}

int main(int count, char **arguments) {
    socklen_t len = sizeof address;
    pthread_t server, callers[CALLERS];
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, len) == 0 && listen(listener, 64) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &len);
    pthread_create(&server, NULL, serve, NULL);
    for (int at = 0; at < CALLERS; at++) {
        pthread_create(&callers[at], NULL, calls, NULL);
    }
    for (int child = 0; child < (count > 1 ? atoi(arguments[1]) : 100); child++) {
        pid_t pid = fork();
        check(pid >= 0, "fork");
        if (pid == 0) {
            call();
            _exit(0);
        }
        int status;
        check(waitpid(pid, &status, 0) == pid && status == 0, "a child");
    }
    enough = 1;
    for (int at = 0; at < CALLERS; at++) {
        pthread_join(callers[at], NULL);
    }
    over = 1;
    pthread_join(server, NULL);
    puts("done");
    return 0;
}
