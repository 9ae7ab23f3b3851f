/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Calls that move all data at once, on a connection that moved nothing before.
 *
 *   long CASE */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/uio.h>

#include "ends.h"

enum { ALL = 64 << 20, SOME = 8 << 20, PART = 50000 };

static int ends[2], broken;
static char *bytes;
static const char *word;
/* The sender's output, printed once it has ended. */
static char said[1000];

static int is(const char *what) {
    return strcmp(word, what) == 0;
}

static void hear(int signal) {
    broken += signal == SIGPIPE;
}

static void handle(int signal) {
    struct sigaction action = {.sa_handler = hear, .sa_flags = SA_RESTART};
    check(sigaction(signal, &action, NULL) == 0, "sigaction");
}

static void pause_ms(long ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) != 0) {
    }
}

/* Sends everything after `from` in one call. */
static long send_all(long from) {
    size_t rest = (size_t)(ALL - from);
    if (is("writev") || is("sendmsg")) {
        struct iovec parts[3] = {{bytes + from, 100}, {bytes + from + 100, rest / 2}, {bytes + from + 100 + rest / 2, rest - rest / 2 - 100}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
        return is("writev") ? writev(ends[0], parts, 3) : sendmsg(ends[0], &message, 0);
    }
    if (is("sendfile") || is("sendfile at")) {
        int file = memfd_create("file", 0);
        off_t at = from;
        check(write(file, bytes, ALL) == ALL, "file");
        check(is("sendfile at") || lseek(file, from, SEEK_SET) == from, "lseek");
        /* More than there is, as servers request. */
        long sent = sendfile(ends[0], file, is("sendfile at") ? &at : NULL, rest + 5000);
        sprintf(said, "at: %d\n", (is("sendfile at") ? at : lseek(file, 0, SEEK_CUR)) == from + sent);
        close(file);
        return sent;
    }
    return send(ends[0], bytes + from, rest, is("quiet") ? MSG_NOSIGNAL : 0);
}

/* Talks in the other direction while a thread waits for all bytes. */
static void *answers(void *argument) {
    char bytes_back[500] = {0};
    struct pollfd look = {.fd = ends[1], .events = POLLIN};
    (void)argument;
    for (int at = 0; at < TURNS; at++) {
        check(send(ends[1], bytes_back, sizeof bytes_back, 0) == sizeof bytes_back, "send back");
        poll(&look, 1, 0);
        pause_ms(2);
    }
    return NULL;
}

static void *sends(void *argument) {
    (void)argument;
    if (is("beside")) {
        /* More than a piece, and then nothing until the answers have come. */
        char back[500];
        check(send(ends[0], bytes, SOME / 16, 0) == SOME / 16, "send");
        for (int at = 0; at < TURNS; at++) {
            check(recv(ends[0], back, sizeof back, MSG_WAITALL) == sizeof back, "answer");
        }
        for (long at = SOME / 16; at < ALL; at += PART) {
            long len = at + PART < ALL ? PART : ALL - at;
            check(send(ends[0], bytes + at, (size_t)len, 0) == len, "send");
        }
        return NULL;
    }
    if (is("all by parts") || is("end")) {
        for (long at = 0; at < (is("end") ? SOME : ALL); at += PART) {
            long len = at + PART < ALL ? PART : ALL - at;
            check(send(ends[0], bytes + at, (size_t)len, 0) == len, "send");
        }
        shutdown(ends[0], SHUT_WR);
        return NULL;
    }
    long sent = send_all(0), more = 0;
    sprintf(said + strlen(said), "all at once: %d, some: %d\n", sent == ALL, sent > 0);
    if (is("reset") || is("reset later") || is("shut")) {
        for (int at = 0; at < 3; at++) {
            sent = send(ends[0], bytes, 1, 0);
            sprintf(said + strlen(said), "then: %ld %s, signals: %d\n", sent, strerrorname_np(errno), broken);
        }
        return NULL;
    }
    while (sent < ALL) {
        more = send(ends[0], bytes + sent, (size_t)(ALL - sent), 0);
        check(more > 0 || errno == EAGAIN, "send on");
        sent += more > 0 ? more : 0;
    }
    return NULL;
}

static long receive(long from, long most, char *to) {
    long got = from, n = 1;
    while (got < most && n > 0) {
        n = recv(ends[1], to + got, (size_t)(most - got < PART ? most - got : PART), 0);
        check(n >= 0, "recv");
        got += n;
    }
    return got;
}

int main(int count, char **words) {
    struct timeval limit = {0, 200000};
    pthread_t sender, other;
    long got = 0;
    word = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    bytes = malloc(ALL);
    char *to = calloc(1, ALL);
    for (int at = 0; at < ALL; at += 4) {
        int number = at * 7;
        memcpy(bytes + at, &number, 4);
    }
    handle(SIGPIPE);
    handle(SIGUSR1);
    meet(ends);
    if (is("limit")) {
        check(setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0, "SO_SNDTIMEO");
    }
    if (is("reset later")) {
        talk(ends);
    }
    check(pthread_create(&sender, NULL, sends, NULL) == 0, "thread");
    if (is("beside")) {
        check(pthread_create(&other, NULL, answers, NULL) == 0, "thread");
        got = recv(ends[1], to, ALL, MSG_WAITALL);
        printf("got: %d\n", got == ALL && memcmp(to, bytes, ALL) == 0);
        pthread_join(other, NULL);
    } else if (is("reset later")) {
        pause_ms(100);
        close(ends[1]);
    } else if (is("reset")) {
        receive(0, SOME, to);
        pause_ms(300);
        close(ends[1]);
    } else if (is("both") || is("all by parts") || is("end")) {
        got = recv(ends[1], to, ALL, MSG_WAITALL);
        printf("got: %ld, then: %d\n", got, is("both") ? 0 : (int)recv(ends[1], to, 1, 0));
        check(is("end") || memcmp(to + 1, bytes + 1, ALL - 1) == 0, "bytes");
    } else if (is("shut")) {
        /* This end has sent everything while its peer still sends. */
        receive(0, SOME, to);
        pause_ms(300);
        check(shutdown(ends[0], SHUT_WR) == 0, "shutdown");
    } else if (is("cancel")) {
        receive(0, SOME, to);
        pause_ms(300);
        check(pthread_cancel(sender) == 0, "cancel");
    } else {
        got = receive(0, SOME, to);
        pause_ms(is("limit") || is("signal") ? 400 : 0);
        if (is("signal")) {
            pthread_kill(sender, SIGUSR1);
            pause_ms(100);
        }
        got = receive(got, ALL, to);
        printf("got: %d\n", got == ALL && memcmp(to, bytes, ALL) == 0);
    }
    void *ended = NULL;
    pthread_join(sender, &ended);
    printf("%scancelled: %d\n", said, ended == PTHREAD_CANCELED);
    printf("done\n");
    return 0;
}
