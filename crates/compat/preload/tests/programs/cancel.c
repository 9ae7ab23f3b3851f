// SPDX-License-Identifier: Apache-2.0 OR MIT
// Threads that are cancelled while they wait in a call that the library replaces.
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int ends[2];

static void *reads(void *fd) {
    char room[10];
    while (read(*(int *)fd, room, sizeof room) >= 0) {
    }
    return NULL;
}

static int cancel(int *fd, const char *what) {
    pthread_t thread;
    void *result;
    if (pthread_create(&thread, NULL, reads, fd) != 0 || usleep(100000) != 0 || pthread_cancel(thread) != 0 ||
        pthread_join(thread, &result) != 0) {
        return 1;
    }
    printf("%s: %s\n", what, result == PTHREAD_CANCELED ? "cancelled" : "ended");
    return 0;
}

static int turn(int from, int to) {
    char room[500];
    memset(room, 'w', sizeof room);
    return send(from, room, sizeof room, 0) != (ssize_t)sizeof room ||
           recv(to, room, sizeof room, MSG_WAITALL) != (ssize_t)sizeof room;
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, len) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &len) != 0 ||
        connect(ends[0], (struct sockaddr *)&address, len) != 0 || (ends[1] = accept(listener, NULL, NULL)) < 0) {
        return 1;
    }
    int pipes[2];
    if (pipe(pipes) != 0 || cancel(&pipes[0], "pipe") != 0 || cancel(&ends[1], "fresh connection") != 0) {
        return 2;
    }
    for (int i = 0; i < 40; i++) {
        if (turn(ends[0], ends[1]) != 0 || turn(ends[1], ends[0]) != 0) {
            return 3;
        }
    }
    if (cancel(&ends[1], "connection") != 0) {
        return 4;
    }
    if (turn(ends[0], ends[1]) != 0 || turn(ends[1], ends[0]) != 0) {
        return 5;
    }
    puts("and it goes on");
    return 0;
}
