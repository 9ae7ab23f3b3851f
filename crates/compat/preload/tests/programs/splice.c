/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A proxy for one client that moves bytes by splice alone: splice wait|poll PORT ADDRESS PORT. It listens at the first
   port and connects to the second. Prints how many bytes went in each direction. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void need(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static struct sockaddr_in at(const char *host, const char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(port))};
    need(inet_pton(AF_INET, host, &address.sin_addr) == 1, "address");
    return address;
}

struct way {
    int from, to, pipe[2];
    long in, out;
    int ended, closed;
};

/* Moves what can be moved. Returns whether anything was. */
static int move(struct way *way, unsigned flags)
{
    int moved = 0;
    if (!way->ended && (way->in == way->out || (flags & SPLICE_F_NONBLOCK))) {
        ssize_t n = splice(way->from, NULL, way->pipe[1], NULL, 1 << 20, flags);
        need(n >= 0 || errno == EAGAIN, "from a socket");
        if (n == 0)
            way->ended = 1;
        if (n > 0)
            way->in += n;
        moved |= n >= 0;
    }
    if (way->in > way->out) {
        ssize_t n = splice(way->pipe[0], NULL, way->to, NULL, (size_t)(way->in - way->out), flags);
        need(n > 0 || (n < 0 && errno == EAGAIN), "to a socket");
        if (n > 0)
            way->out += n;
        moved |= n > 0;
    }
    if (way->ended && way->in == way->out && !way->closed) {
        need(shutdown(way->to, SHUT_WR) == 0, "shutdown");
        way->closed = moved = 1;
    }
    return moved;
}

int main(int argc, char **argv)
{
    need(argc == 5, "splice wait|poll PORT ADDRESS PORT");
    int waits = strcmp(argv[1], "wait") == 0, yes = 1;
    int listener = socket(AF_INET, SOCK_STREAM, 0), there = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in own = at("0.0.0.0", argv[2]), other = at(argv[3], argv[4]);
    need(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0, "setsockopt");
    need(bind(listener, (struct sockaddr *)&own, sizeof own) == 0 && listen(listener, 8) == 0, "listen");
    int here = accept(listener, NULL, NULL);
    need(here >= 0, "accept");
    need(connect(there, (struct sockaddr *)&other, sizeof other) == 0, "connect");
    struct way ways[2] = {{.from = here, .to = there}, {.from = there, .to = here}};
    for (int i = 0; i < 2; i++)
        need(pipe(ways[i].pipe) == 0, "pipe");
    if (waits) {
        /* One direction, then the other: each call waits until something was moved. */
        for (int i = 0; i < 2; i++)
            while (!ways[i].closed)
                move(&ways[i], SPLICE_F_MOVE);
    } else {
        need(fcntl(here, F_SETFL, O_NONBLOCK) == 0 && fcntl(there, F_SETFL, O_NONBLOCK) == 0, "fcntl");
        while (!ways[0].closed || !ways[1].closed) {
            if (move(&ways[0], SPLICE_F_MOVE | SPLICE_F_NONBLOCK) | move(&ways[1], SPLICE_F_MOVE | SPLICE_F_NONBLOCK))
                continue;
            struct pollfd fds[2] = {{.fd = here}, {.fd = there}};
            for (int i = 0; i < 2; i++) {
                if (!ways[i].ended && ways[i].in == ways[i].out)
                    fds[i].events |= POLLIN;
                if (ways[i].in > ways[i].out)
                    fds[1 - i].events |= POLLOUT;
            }
            need(poll(fds, 2, -1) > 0, "poll");
        }
    }
    /* Moves that no splice makes. */
    need(splice(here, NULL, there, NULL, 1, 0) == -1 && errno == EINVAL, "two sockets");
    printf("there: %ld\nback: %ld\n", ways[0].out, ways[1].out);
    return 0;
}
