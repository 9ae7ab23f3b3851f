// SPDX-License-Identifier: Apache-2.0 OR MIT
// A client that never sleeps: one of its two connections has room, and its epoll set reports that each time. The set
// must report what comes over the other connection all the same.
//
// sleepless ADDRESS COUNT     asks the Redis server at ADDRESS COUNT times, and prints how often its set reported room

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

// Seconds within which an answer must come, however little time the machine has.
enum { PATIENCE = 30, PORT = 6379 };

static const char request[] = "PING\r\n", answer[] = "+PONG\r\n";

static void need(int ok, const char *what)
{
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static int dial(const char *address)
{
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT) };
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    need(inet_pton(AF_INET, address, &to.sin_addr) == 1, address);
    need(connect(fd, (struct sockaddr *)&to, sizeof to) == 0, "connect");
    return fd;
}

static void ask(int fd)
{
    need(send(fd, request, sizeof request - 1, 0) == sizeof request - 1, "send");
}

static void hear(int fd)
{
    char said[sizeof answer - 1];
    need(recv(fd, said, sizeof said, MSG_WAITALL) == sizeof said && !memcmp(said, answer, sizeof said), "answer");
}

static void watch(int set, int fd, unsigned events)
{
    struct epoll_event event = { .events = events, .data.fd = fd };
    need(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
}

int main(int argc, char **argv)
{
    need(argc == 3, "sleepless ADDRESS COUNT");
    int with_room = dial(argv[1]), asking = dial(argv[1]), set = epoll_create1(EPOLL_CLOEXEC);
    watch(set, with_room, EPOLLOUT);
    watch(set, asking, EPOLLIN);
    // Sends enough requests on both connections to join them.
    for (int asked = 0; asked < 200; asked++) {
        ask(with_room), hear(with_room);
        ask(asking), hear(asking);
    }
    long told = 0, count = atol(argv[2]);
    for (long asked = 0; asked < count; asked++) {
        ask(asking);
        for (time_t begun = time(NULL);;) {
            struct epoll_event events[2];
            int ready = epoll_wait(set, events, 2, 1000), heard = 0;
            need(ready > 0, "epoll_wait");
            for (int at = 0; at < ready; at++) {
                heard |= events[at].data.fd == asking;
                told += events[at].data.fd == with_room;
            }
            if (heard)
                break;
            need(time(NULL) - begun < PATIENCE, "an answer was not told of");
        }
        hear(asking);
    }
    // Otherwise the client may have slept, and the test shows nothing.
    need(told >= count, "a wait did not tell of room");
    printf("answered; told of room %ld times\n", told);
    return 0;
}
