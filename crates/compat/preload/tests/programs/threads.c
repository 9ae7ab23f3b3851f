/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A server with a thread for each connection, and a client with as many: 64 bytes in turns.
 *
 *   threads serve ADDRESS PORT CONNECTIONS [sets]
 *   threads ask ADDRESS PORT CONNECTIONS MILLISECONDS [BUSY PAUSE [FIRST]]
 *
 * With `sets` each of the server's threads waits in an epoll set of its own. The server ends when all connections have
 * ended. It prints its CPU time in microseconds, and how often its threads have slept.
 * The client prints its round trips a second, and the number of all; the 50th and 99th percentile in nanoseconds; its
 * CPU time. BUSY of its connections are used (all), the others only exist. It waits PAUSE microseconds between two
 * turns (0). Each connection has FIRST turns (400) before, by which it is joined, if it is to be. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LEN = 64, ROUNDS = 1 << 17 };

static struct sockaddr_in address = {.sin_family = AF_INET};
static long until, busy, pause_us;
static int sets, first = 400;
static pthread_barrier_t begin;

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static long cpu(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000L + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
}

static void *serve(void *argument) {
    char room[LEN];
    int fd = (int)(long)argument, set = sets ? epoll_create1(0) : -1;
    struct epoll_event event = {.events = EPOLLIN};
    check(!sets || epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    for (;;) {
        while (sets && epoll_wait(set, &event, 1, -1) < 1) {
        }
        ssize_t n = recv(fd, room, LEN, MSG_WAITALL);
        if (n != LEN) {
            check(n == 0, "recv");
            close(fd);
            return NULL;
        }
        check(send(fd, room, LEN, 0) == LEN, "send");
    }
}

struct client {
    pthread_t thread;
    long rounds, number;
    unsigned took[ROUNDS];
};

static void *ask(void *argument) {
    struct client *client = argument;
    char out[LEN], in[LEN];
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(fd, (void *)&address, sizeof address) == 0, "connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (int at = 0; at < first; at++) {
        check(send(fd, out, LEN, 0) == LEN && recv(fd, in, LEN, MSG_WAITALL) == LEN, "first turns");
    }
    if (pthread_barrier_wait(&begin) == PTHREAD_BARRIER_SERIAL_THREAD) {
        until += now();
    }
    pthread_barrier_wait(&begin);
    for (long last = now(); client->number < busy && last < until; client->rounds++) {
        memset(out, (int)client->rounds, LEN);
        check(send(fd, out, LEN, 0) == LEN && recv(fd, in, LEN, MSG_WAITALL) == LEN, "a turn");
        if (memcmp(out, in, LEN) != 0) {
            fputs("other bytes\n", stderr);
            exit(1);
        }
        long then = now();
        client->took[client->rounds % ROUNDS] = (unsigned)(then - last);
        last = then;
        if (pause_us) {
            usleep((unsigned)pause_us);
            last = now();
        }
    }
    pthread_barrier_wait(&begin);
    close(fd);
    return NULL;
}

static int less(const void *a, const void *b) {
    unsigned x = *(const unsigned *)a, y = *(const unsigned *)b;
    return (x > y) - (x < y);
}

int main(int count, char **words) {
    check(count >= 5, "usage");
    int connections = atoi(words[4]);
    inet_pton(AF_INET, words[2], &address.sin_addr);
    address.sin_port = htons((unsigned short)atoi(words[3]));
    if (strcmp(words[1], "serve") == 0) {
        int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
        pthread_t threads[1024];
        sets = count > 5;
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        check(bind(listener, (void *)&address, sizeof address) == 0, "bind");
        check(listen(listener, 1024) == 0, "listen");
        for (int at = 0; at < connections; at++) {
            int fd = accept(listener, NULL, NULL);
            check(fd >= 0, "accept");
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            pthread_create(&threads[at], NULL, serve, (void *)(long)fd);
        }
        for (int at = 0; at < connections; at++) {
            pthread_join(threads[at], NULL);
        }
        struct rusage used;
        getrusage(RUSAGE_SELF, &used);
        printf("cpu %ld sleeps %ld\n", cpu(), used.ru_nvcsw);
        return 0;
    }
    check(count >= 6, "usage");
    struct client *clients = calloc((size_t)connections, sizeof *clients);
    until = atol(words[5]) * 1000000L;
    busy = count > 6 ? atol(words[6]) : connections;
    pause_us = count > 7 ? atol(words[7]) : 0;
    first = count > 8 ? atoi(words[8]) : first;
    pthread_barrier_init(&begin, NULL, (unsigned)connections);
    for (int at = 0; at < connections; at++) {
        clients[at].number = at;
        pthread_create(&clients[at].thread, NULL, ask, &clients[at]);
    }
    long rounds = 0, kept = 0;
    for (int at = 0; at < connections; at++) {
        pthread_join(clients[at].thread, NULL);
        rounds += clients[at].rounds;
        kept += clients[at].rounds < ROUNDS ? clients[at].rounds : ROUNDS;
    }
    unsigned *all = malloc((size_t)kept * sizeof *all + 1);
    for (int at = 0, to = 0; at < connections; at++) {
        long n = clients[at].rounds < ROUNDS ? clients[at].rounds : ROUNDS;
        memcpy(all + to, clients[at].took, (size_t)n * sizeof *all);
        to += (int)n;
    }
    qsort(all, (size_t)kept, sizeof *all, less);
    printf("rounds %ld all %ld p50 %u p99 %u cpu %ld\n", rounds * 1000 / atol(words[5]), rounds, all[kept / 2], all[kept * 99 / 100],
           cpu());
    return 0;
}
