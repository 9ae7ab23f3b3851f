/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Two ends of a TCP connection in one program, which have talked enough to be joined. */
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TURNS = 40, LEN = 500 };

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        _exit(1);
    }
}

static inline void turn(int from, int to) {
    char bytes[LEN];
    memset(bytes, 'w', sizeof bytes);
    check(send(from, bytes, LEN, 0) == LEN && recv(to, bytes, LEN, MSG_WAITALL) == LEN, "turn");
}

static inline void take_turns(const int ends[2]) {
    for (int at = 0; at < TURNS; at++) {
        turn(ends[0], ends[1]);
        turn(ends[1], ends[0]);
    }
}

/* Polls both first: bytes to and from a socket that does not wait, and was never polled, stay on TCP. */
static inline void talk(const int ends[2]) {
    struct pollfd waits[] = {{.fd = ends[0], .events = POLLIN}, {.fd = ends[1], .events = POLLIN}};
    poll(waits, 2, 0);
    take_turns(ends);
}

/* Returns a socket that listens at `address`, which is local to this machine. */
static inline int listening(struct sockaddr_in *address) {
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof *address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)address, len) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)address, &len) == 0, "getsockname");
    return listener;
}

/* `before` gets the connecting socket before it connects. */
static inline void meet_with(int ends[2], void (*before)(int)) {
    struct sockaddr_in address;
    int listener = listening(&address);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (before != NULL) {
        before(ends[0]);
    }
    check(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    check((ends[1] = accept(listener, NULL, NULL)) >= 0, "accept");
    close(listener);
}

static inline void meet(int ends[2]) {
    meet_with(ends, NULL);
}

/* The other endpoint belongs to another process, in which the function returns 0. The two have talked enough as well.
   */
static inline pid_t meet_peer(int *end) {
    char bytes[LEN] = {0};
    struct sockaddr_in address;
    int listener = listening(&address);
    pid_t peer = fork();
    *end = peer ? accept(listener, NULL, NULL) : socket(AF_INET, SOCK_STREAM, 0);
    check(peer || connect(*end, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    close(listener);
    for (int at = 0; at < TURNS; at++) {
        check(!peer || send(*end, bytes, LEN, 0) == LEN, "send");
        check(recv(*end, bytes, LEN, MSG_WAITALL) == LEN, "recv");
        check(peer || send(*end, bytes, LEN, 0) == LEN, "send");
    }
    return peer;
}
