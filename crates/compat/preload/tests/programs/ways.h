/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A stream of bytes derived from their places in it, and the ways in which a program can wait, send and receive. The
 * receiver compares each byte. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 100000, LINE = 1 << 16, WAYS = 13, MANY = 8, WAITS = 7 };
/* Position in a stream from which some bytes are wrong; 0: none is. */
#ifndef WRONG_FROM
#define WRONG_FROM 0
#endif
enum direction { IN, OUT };
enum outcome { MOVED, MUST_WAIT, ENDED };

/* One direction of a connection, as seen by the end that sends or receives there. */
struct stream {
    int fd, connection, sender;
    enum direction direction;
    long at, len;
    unsigned seed;
    /* A lasting set for events, or -1. */
    int set;
    /* Whether one end passes the socket on. Unread bytes then come over TCP, so the other end sends less than a ring
     * holds and ends last. Neither does anything else for which the connection would return to TCP. */
    int passes, ends_last;
    int is_over;
    char room[ROOM];
};

#define CHECK(holds) \
    do { \
        if (!(holds)) { \
            fprintf(stderr, "%d: %s:%d: %s: %s\n", getpid(), __FILE__, __LINE__, #holds, strerror(errno)); \
            _exit(3); \
        } \
    } while (0)

/* Repeats a call that a signal may interrupt, until none does. */
#define UNINTERRUPTED(call) \
    ({ \
        long answer_; \
        while ((answer_ = (call)) < 0 && errno == EINTR) { \
        } \
        answer_; \
    })

static int pick(unsigned *seed, int below) {
    return rand_r(seed) % below;
}

static char byte_at(const struct stream *stream, long at) {
    uint64_t name = (uint64_t)(stream->connection * 2 + stream->sender + 1);
    uint64_t hash = (uint64_t)(at / 8) * 0x9E3779B97F4A7C15 + name * 0xC2B2AE3D27D4EB4F;
    hash = (hash ^ hash >> 29) * 0xBF58476D1CE4E5B9;
    hash ^= hash >> 32;
    return (char)(hash >> 8 * (at & 7));
}

/* One of the ways to wait until bytes can be moved. */
static void wait_in_some_way(struct stream *stream) {
    int is_out = stream->direction == OUT, way = pick(&stream->seed, WAITS), ready = 0;
    struct pollfd one = {stream->fd, is_out ? POLLOUT : POLLIN, 0};
    struct epoll_event event = {.events = is_out ? EPOLLOUT : EPOLLIN};
    fd_set set;
    sigset_t none;
    sigemptyset(&none);
    while (ready <= 0) {
        errno = 0;
        switch (way) {
        case 0:
            ready = poll(&one, 1, -1);
            break;
        case 1:
            ready = ppoll(&one, 1, &(struct timespec){.tv_nsec = 300000}, &none);
            break;
        case 2:
        case 3:
            FD_ZERO(&set);
            FD_SET(stream->fd, &set);
            ready = select(stream->fd + 1, is_out ? NULL : &set, is_out ? &set : NULL, NULL,
                           way == 2 ? NULL : &(struct timeval){.tv_usec = 500});
            break;
        case 4: {
            int once = epoll_create1(0);
            event.events |= pick(&stream->seed, 2) ? EPOLLET : 0;
            CHECK(epoll_ctl(once, EPOLL_CTL_ADD, stream->fd, &event) == 0);
            ready = (int)UNINTERRUPTED(epoll_wait(once, &event, 1, -1));
            close(once);
            break;
        }
        case 5: {
            /* For one event, and armed again. */
            int once = epoll_create1(EPOLL_CLOEXEC);
            event.events |= EPOLLONESHOT;
            CHECK(epoll_ctl(once, EPOLL_CTL_ADD, stream->fd, &event) == 0);
            CHECK(UNINTERRUPTED(epoll_wait(once, &event, 1, -1)) == 1 && epoll_wait(once, &event, 1, 0) <= 0);
            event.events = is_out ? EPOLLOUT : EPOLLIN;
            CHECK(epoll_ctl(once, EPOLL_CTL_MOD, stream->fd, &event) == 0);
            ready = (int)UNINTERRUPTED(epoll_wait(once, &event, 1, -1));
            close(once);
            break;
        }
        default:
            if (stream->set < 0) {
                stream->set = epoll_create1(0);
                CHECK(epoll_ctl(stream->set, EPOLL_CTL_ADD, stream->fd, &event) == 0);
            } else if (pick(&stream->seed, 3) == 0) {
                CHECK(epoll_ctl(stream->set, EPOLL_CTL_MOD, stream->fd, &event) == 0);
            }
            ready = epoll_wait(stream->set, &event, 1, -1);
        }
        CHECK(ready == 1 || errno == EINTR || (ready == 0 && (way == 1 || way == 3)));
    }
}

/* A call that waits no longer than two milliseconds. */
static long within_limit(struct stream *stream, int option, size_t len, int flags) {
    struct timeval limit = {.tv_usec = 2000}, none = {0};
    CHECK(setsockopt(stream->fd, SOL_SOCKET, option, &limit, sizeof limit) == 0);
    long n = option == SO_SNDTIMEO ? send(stream->fd, stream->room, len, flags)
                                   : recv(stream->fd, stream->room, len, flags);
    int error = errno;
    CHECK(setsockopt(stream->fd, SOL_SOCKET, option, &none, sizeof none) == 0);
    errno = error;
    return n;
}

/* Lets the kernel move the bytes: they are sent from a file or a pipe, and received into a pipe. */
static long send_file(struct stream *stream, size_t len) {
    int file = memfd_create("stress", 0);
    off_t from = 0;
    CHECK(write(file, stream->room, len) == (long)len);
    long n = sendfile(stream->fd, file, &from, len);
    int error = errno;
    close(file);
    errno = error;
    return n;
}

static long through_line(struct stream *stream, size_t len) {
    int line[2];
    len = len < LINE ? len : LINE;
    CHECK(pipe(line) == 0);
    CHECK(stream->direction == IN || write(line[1], stream->room, len) == (long)len);
    long n = stream->direction == IN ? splice(stream->fd, NULL, line[1], NULL, len, 0)
                                     : splice(line[0], NULL, stream->fd, NULL, len, 0);
    int error = errno;
    CHECK(stream->direction == OUT || n <= 0 || read(line[0], stream->room, (size_t)n) == n);
    close(line[0]);
    close(line[1]);
    errno = error;
    return n;
}

/* The same bytes as two parts, as a message of both, and as a message of each. */
struct pieces {
    struct iovec parts[2];
    struct msghdr one;
    struct mmsghdr many[2];
};

static void cut_in_two(struct stream *stream, size_t len, struct pieces *pieces) {
    size_t first = len / 3;
    *pieces = (struct pieces){.parts = {{stream->room, first}, {stream->room + first, len - first}}};
    pieces->one = (struct msghdr){.msg_iov = pieces->parts, .msg_iovlen = 2};
    for (int at = 0; at < 2; at++) {
        pieces->many[at].msg_hdr = (struct msghdr){.msg_iov = &pieces->parts[at], .msg_iovlen = 1};
    }
}

/* Returns how many bytes a call moved of two messages. After it had received the first in part, more may have come:
   these bytes are moved to where they belong. */
static long moved_of_many(int messages, const struct pieces *pieces) {
    if (messages < 2) {
        return messages < 1 ? messages : (long)pieces->many[0].msg_len;
    }
    size_t first = pieces->many[0].msg_len, second = pieces->many[1].msg_len;
    memmove((char *)pieces->parts[0].iov_base + first, pieces->parts[1].iov_base, second);
    return (long)(first + second);
}

static int pick_way(struct stream *stream, size_t len) {
    int way = pick(&stream->seed, WAYS);
    return way == MANY && len < 3 ? 0 : way; /* The first message would be empty. */
}

/* `flags` is 0 or MSG_DONTWAIT; with the latter, the ways that take no flags are not used. */
static long send_in_some_way(struct stream *stream, size_t len, int flags) {
    struct pieces pieces;
    cut_in_two(stream, len, &pieces);
    int way = pick_way(stream, len), is_last = stream->at + (long)len == stream->len;
    if (flags == 0) {
        switch (way) {
        case 1:
            return write(stream->fd, stream->room, len);
        case 2:
            return writev(stream->fd, pieces.parts, 2);
        case 3:
            return send_file(stream, len);
        case 4:
            return through_line(stream, len);
        case 10:
            return pwritev2(stream->fd, pieces.parts, 2, -1, 0);
        default:
            break;
        }
    }
    switch (way) {
    case 5:
        return sendmsg(stream->fd, &pieces.one, flags);
    case 6:
        return send(stream->fd, stream->room, len, flags | (is_last ? 0 : MSG_MORE));
    case 7:
        return within_limit(stream, SO_SNDTIMEO, len, flags);
    case MANY:
        return moved_of_many(sendmmsg(stream->fd, pieces.many, 2, flags), &pieces);
    case 9:
        return sendto(stream->fd, stream->room, len, flags, NULL, 0);
    default:
        return send(stream->fd, stream->room, len, flags);
    }
}

static long receive_in_some_way(struct stream *stream, size_t len, int flags) {
    struct pieces pieces;
    cut_in_two(stream, len, &pieces);
    int way = pick_way(stream, len);
    if (flags == 0) {
        switch (way) {
        case 1:
            return read(stream->fd, stream->room, len);
        case 2:
            return readv(stream->fd, pieces.parts, 2);
        case 3:
            return through_line(stream, len);
        case 10:
            return preadv2(stream->fd, pieces.parts, 2, -1, 0);
        default:
            break;
        }
    }
    switch (way) {
    case 4: {
        long n = recv(stream->fd, stream->room, len, flags | MSG_PEEK);
        return n <= 0 ? n : recv(stream->fd, stream->room, (size_t)(1 + pick(&stream->seed, (int)n)), flags | MSG_WAITALL);
    }
    case 5:
        return recvmsg(stream->fd, &pieces.one, flags);
    case 6:
        return recv(stream->fd, stream->room, len, flags | MSG_WAITALL);
    case 7:
        return within_limit(stream, SO_RCVTIMEO, len, flags);
    case MANY:
        return moved_of_many(recvmmsg(stream->fd, pieces.many, 2, flags | MSG_WAITFORONE, NULL), &pieces);
    case 9:
        return recvfrom(stream->fd, stream->room, len, flags, NULL, NULL);
    case 11: {
        /* Thrown away. */
        long n = recv(stream->fd, NULL, len, flags | MSG_TRUNC);
        for (long at = 0; at < n; at++) {
            stream->room[at] = byte_at(stream, stream->at + at);
        }
        return n;
    }
    default:
        return recv(stream->fd, stream->room, len, flags);
    }
}

/* The place in the stream of the bytes that came instead of the right ones shows what went wrong. */
static void wrong_byte(const struct stream *stream, long at, long n) {
    fprintf(stderr, "connection %d to end %d: a wrong byte at %ld, of %ld from %ld on\n", stream->connection, !stream->sender,
            stream->at + at, n, stream->at);
    for (long from = 0; from < stream->len; from++) {
        long same = 0;
        while (at + same < n && stream->room[at + same] == byte_at(stream, from + same)) {
            same++;
        }
        if (same >= 16) {
            fprintf(stderr, "there are %ld from %ld on\n", same, from);
        }
    }
    _exit(4);
}

static enum outcome move_some(struct stream *stream, int flags) {
    static const int most[] = {200, 200, 9000, 9000, ROOM};
    int is_out = stream->direction == OUT, there;
    long len = 1 + pick(&stream->seed, most[pick(&stream->seed, 5)]);
    if (is_out) {
        len = len < stream->len - stream->at ? len : stream->len - stream->at;
        for (long at = 0; at < len; at++) {
            stream->room[at] = byte_at(stream, stream->at + at);
        }
        stream->room[0] ^= (char)(WRONG_FROM != 0 && stream->at >= WRONG_FROM);
    } else if (pick(&stream->seed, 20) == 0) {
        CHECK(ioctl(stream->fd, FIONREAD, &there) == 0 && there >= 0 && there <= stream->len - stream->at);
    }
    long n = is_out ? send_in_some_way(stream, (size_t)len, flags) : receive_in_some_way(stream, (size_t)len, flags);
    if (n < 0) {
        CHECK(errno == EINTR || errno == EAGAIN);
        return errno == EINTR ? MOVED : MUST_WAIT;
    }
    if (n == 0) {
        CHECK(!is_out && stream->at == stream->len);
        return ENDED;
    }
    for (long at = 0; !is_out && at < n; at++) {
        if (stream->room[at] != byte_at(stream, stream->at + at)) {
            wrong_byte(stream, at, n);
        }
    }
    stream->at += n;
    return MOVED;
}
