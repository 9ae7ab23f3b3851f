// SPDX-License-Identifier: Apache-2.0 OR MIT
// A program that knows nothing of Tombolo and forks while it has a connection: the bytes of that connection stay
// complete and in order.
//
// forks send HOW ADDRESS LOG FILE     connects, and sends the stream of `stream.rs` to a `stream-receive`
// forks receive HOW LOG FILE          listens, and receives that stream from a `stream-send`
//
// HOW names the process that continues after the fork: `child` (the parent waits), `daemon` (the parent does not wait),
// `parent` (the child ends), or `both` (by turns). The program forks once LOG reports that the connection is joined,
// and sends little before. After the fork it sends for a second, or for as long as the variable SECONDS says. It writes
// the result to FILE.
//
// With `late` or `gone` the program does not fork. From some moment on the receiver reads nothing until FILE.go exists,
// and then prints how many bytes it can read. By then the sender has shut down its sending, or has ended. With `ended`
// the receiver reads nothing until the sender, which runs with `late`, has shut down; then it forks, and the child
// continues.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 32 << 10, PORT = 9, TURNS = 200 };

static uint64_t state = 88172645463325252ULL;
static uint64_t moved;
static const char *result;

static void end(const char *what, int ok)
{
    FILE *file = fopen(result, "a");
    if (file) {
        fprintf(file, "%s %s at %llu: %s\n", ok ? "ok" : "failed", what, (unsigned long long)moved, ok ? "" : strerror(errno));
        fclose(file);
    }
    _exit(!ok);
}

static void need(int ok, const char *what)
{
    if (!ok)
        end(what, 0);
}

static void fill(unsigned char *room)
{
    for (int at = 0; at < CHUNK; at += 8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(room + at, &state, 8);
    }
}

// Moves one chunk. Returns 0 once the peer has sent everything.
static int step(int fd, int sends)
{
    static unsigned char room[CHUNK], wanted[CHUNK];
    size_t done = 0;
    if (sends)
        fill(room);
    while (done < CHUNK) {
        ssize_t n = sends ? write(fd, room + done, CHUNK - done) : read(fd, room + done, CHUNK - done);
        if (n < 0 && errno == EINTR)
            continue;
        need(n >= 0, sends ? "write" : "read");
        if (n == 0)
            break;
        done += (size_t)n;
    }
    moved += done;
    if (!sends && done) {
        need(done == CHUNK, "half a chunk");
        fill(wanted);
        need(!memcmp(room, wanted, CHUNK), "other bytes came");
    }
    return done > 0;
}

static void work(int fd, int sends, double seconds)
{
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    do {
        if (!step(fd, sends))
            return;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begun.tv_sec) + 1e-9 * (double)(now.tv_nsec - begun.tv_nsec) < seconds);
}

// Moves the rest of the stream. Then the receiver sends its count of bytes, and the sender checks it, unless the other
// end has `gone`.
static void finish(int fd, int sends, int gone)
{
    uint64_t came = 0;
    size_t done = 0;
    if (sends) {
        const char *seconds = getenv("SECONDS");
        work(fd, 1, seconds ? atof(seconds) : 1);
        need(!shutdown(fd, SHUT_WR), "shutdown");
        for (ssize_t n; !gone && done < 8 && (n = read(fd, (char *)&came + done, 8 - done)) != 0; done += (size_t)n)
            need(n > 0, "read of what came");
        need(gone || (done == 8 && came == moved), "what came");
    } else {
        while (step(fd, 0))
            ;
        need(gone || write(fd, &moved, 8) == 8, "write of what came");
    }
    need(!close(fd), "close");
    end("", 1);
}

static void await(pid_t child)
{
    int status;
    need(waitpid(child, &status, 0) == child, "waitpid");
    if (status) {
        char what[64];
        snprintf(what, sizeof what, "the child ended with status %#x", (unsigned)status);
        end(what, 0);
    }
}

// Parent and child move chunks by turns: each chunk continues the stream, whichever process moves it.
static void take_turns(int fd, int sends)
{
    int to_child[2], to_parent[2];
    need(!pipe(to_child) && !pipe(to_parent), "pipe");
    pid_t child = fork();
    need(child >= 0, "fork");
    int get = child ? to_parent[0] : to_child[0], put = child ? to_child[1] : to_parent[1];
    struct { uint64_t state, moved; } turn = {state, moved};
    for (int at = 0; at < TURNS; at++) {
        if (at % 2 == (child != 0)) {
            need(read(get, &turn, sizeof turn) == sizeof turn, "the other's turn");
            state = turn.state, moved = turn.moved;
            continue;
        }
        step(fd, sends);
        turn.state = state, turn.moved = moved;
        need(write(put, &turn, sizeof turn) == sizeof turn, "this one's turn");
    }
    if (!child)
        _exit(0);
    await(child);
}

static int is_joined(const char *log)
{
    static char text[4096];
    int fd = open(log, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = 0;
    return strstr(text, "joined") != NULL;
}

// Waits for FILE.go with calls that read nothing, and prints the number of unread bytes.
static void pause_reading(int fd)
{
    struct pollfd one = {.fd = fd};
    char go[256];
    snprintf(go, sizeof go, "%s.go", result);
    while (access(go, F_OK))
        need(poll(&one, 1, 20) >= 0, "poll");
    int unread = 0;
    need(!ioctl(fd, FIONREAD, &unread), "FIONREAD");
    printf("%d unread\n", unread);
    fflush(stdout);
}

static void fork_while_joined(int fd, int sends, const char *how, const char *log)
{
    // Little is sent until the connection is joined, and for a while after that: the other end must read what came over
    // TCP before.
    int has_ended = !strcmp(how, "ended"), is_late = has_ended || !strcmp(how, "late") || !strcmp(how, "gone");
    for (int at = 0, more = is_late && !sends ? 10 : 20; more > 0; at++) {
        need(at < 100000 && step(fd, sends), "it was not joined");
        if (!sends)
            more -= is_joined(log) ? (is_late ? 1 : more) : 0;
        else if (!usleep(50000) && is_joined(log))
            more--;
    }
    need(!is_late || !setenv("SECONDS", "0", 1), "setenv"); // Only one more chunk is sent.
    if (has_ended) {
        struct pollfd end = {.fd = fd, .events = POLLRDHUP};
        need(poll(&end, 1, 60000) == 1, "the end");
    } else if (is_late) {
        if (!sends)
            pause_reading(fd);
        finish(fd, sends, !strcmp(how, "gone"));
    } else {
        work(fd, sends, 0.5);
    }
    if (!strcmp(how, "both")) {
        take_turns(fd, sends);
    } else if (!strcmp(how, "daemon")) {
        need(!daemon(1, 1), "daemon");
    } else {
        int goes_on = has_ended || !strcmp(how, "child");
        pid_t child = fork();
        need(child >= 0, "fork");
        if (!child && !goes_on)
            _exit(0);
        if (child) {
            await(child);
            if (goes_on)
                _exit(0);
        }
    }
    finish(fd, sends, 0);
}

int main(int count, char **words)
{
    int sends = count == 6 && !strcmp(words[1], "send");
    if (!sends && !(count == 5 && !strcmp(words[1], "receive")))
        return 2;
    result = words[count - 1];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (sends) {
        need(inet_pton(AF_INET, words[3], &at.sin_addr) == 1, words[3]);
        need(!connect(fd, (struct sockaddr *)&at, sizeof at), "connect");
    } else {
        int listener = fd;
        need(!setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one), "setsockopt");
        need(!bind(listener, (struct sockaddr *)&at, sizeof at) && !listen(listener, 1), "listen");
        printf("listens\n");
        fflush(stdout);
        fd = accept(listener, NULL, NULL);
        need(fd >= 0 && !close(listener), "accept");
    }
    fork_while_joined(fd, sends, words[2], words[count - 2]);
}
