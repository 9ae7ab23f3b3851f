/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Some connections on which everything happens at once: threads and processes that move bytes in every way, forks in
 * the middle of a stream, signals, edges, time limits, programs that are started. Each byte is derived from its place
 * in its stream. The receiver compares each byte, and the end of the stream with where it must be.
 *
 *   stress SEED LEN                 both ends, a process each
 *   stress SEED LEN PORT            the one that accepts
 *   stress SEED LEN PORT ADDRESS    the one that connects
 *
 * A stream has up to LEN bytes. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>

#include "ways.h"

enum { CONNECTIONS = 5, GREETINGS = 40, GREETING = 100, VISIT = 20000, PASSED = 50000 };

static int has_children, has_disturbances;
/* Whether this is a process with one connection. */
static int is_alone;
/* Microseconds between signals: longer between machines, which are emulated. */
static int signal_pause = 1500;

/* Request to a process that moves some bytes for another, and its answer. */
struct errand {
    struct {
        int fd, connection, sender, direction, steps, flags;
    } what;
    long at, len;
    unsigned seed;
};

/* Ways in which another process comes to move some bytes: a child, or this program started anew, by two calls, or as
   one that gets the socket in a message. */
enum other { CHILD, SPAWNED, VFORKED, MESSAGED };

/* Moves some bytes and reports how far it came. Waits unless `flags` forbid it. */
static void run_errand(struct stream *stream, struct errand *errand, int line) {
    for (int at = 0; at < errand->what.steps && stream->at < stream->len; at++) {
        if (move_some(stream, errand->what.flags) == MUST_WAIT) {
            if (errand->what.flags & MSG_DONTWAIT) {
                break;
            }
            wait_in_some_way(stream);
        }
    }
    errand->at = stream->at, errand->seed = stream->seed;
    CHECK(write(line, errand, sizeof *errand) == sizeof *errand);
}

/* Puts a descriptor into a message, and takes it out again under another number. */
union rights {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int))];
};

static void send_rights(int line, int fd) {
    union rights rights = {0};
    struct iovec part = {"", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    *CMSG_FIRSTHDR(&message) =
        (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &fd, sizeof fd);
    CHECK(UNINTERRUPTED(sendmsg(line, &message, 0)) == 1);
}

static int receive_rights(int line) {
    union rights rights;
    char byte;
    int fd;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    CHECK(UNINTERRUPTED(recvmsg(line, &message, MSG_CMSG_CLOEXEC)) == 1 && CMSG_FIRSTHDR(&message) != NULL);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* This program, started anew by another process of it: it moves some bytes on a socket that it got. */
static void run_started(const char *line) {
    static struct stream stream;
    struct errand errand;
    int fd = atoi(line);
    CHECK(read(fd, &errand, sizeof errand) == sizeof errand);
    stream = (struct stream){.fd = errand.what.fd, .connection = errand.what.connection, .sender = errand.what.sender,
                             .direction = (enum direction)errand.what.direction, .at = errand.at, .len = errand.len, .seed = errand.seed, .set = -1};
    if (stream.fd < 0) {
        stream.fd = receive_rights(fd);
    }
    run_errand(&stream, &errand, fd);
}

static pid_t start_errand(enum other other, int line, int fd) {
    char number[20], *words[] = {"stress", "errand", number, NULL};
    pid_t program;
    snprintf(number, sizeof number, "%d", line);
    if (other == VFORKED) {
        program = vfork();
        if (program == 0) {
            /* It closes every descriptor that it does not know. */
            for (int at = 3; at < 1024; at++) {
                if (at != line && at != fd) {
                    close(at);
                }
            }
            execv("/proc/self/exe", words);
            _exit(3);
        }
    } else {
        CHECK(posix_spawn(&program, "/proc/self/exe", NULL, NULL, words, environ) == 0);
    }
    return program;
}

/* Another process moves some bytes: this one continues where that one stopped. */
static void move_elsewhere(struct stream *stream, int flags, enum other other) {
    int own = stream->fd, by_message = other == MESSAGED, line[2], status;
    struct errand errand = {.what = {by_message ? -1 : own, stream->connection, stream->sender, stream->direction,
                                     1 + pick(&stream->seed, 20), flags},
                            .at = stream->at, .len = stream->len, .seed = stream->seed};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, line) == 0);
    if (other != CHILD) {
        CHECK(write(line[0], &errand, sizeof errand) == sizeof errand);
    }
    pid_t process = other == CHILD ? fork() : start_errand(other, line[1], own);
    CHECK(process >= 0);
    if (process == 0) {
        stream->set = -1;
        run_errand(stream, &errand, line[1]);
        _exit(0);
    }
    close(line[1]);
    if (by_message) {
        send_rights(line[0], own);
    }
    CHECK(UNINTERRUPTED(read(line[0], &errand, sizeof errand)) == sizeof errand);
    CHECK(UNINTERRUPTED(waitpid(process, &status, 0)) == process && status == 0);
    close(line[0]);
    stream->at = errand.at, stream->seed = errand.seed;
}

/* Moves some bytes by another number of the connection. */
static enum outcome move_by(struct stream *stream, int fd) {
    int own = stream->fd, set = stream->set;
    CHECK(fd >= 0);
    stream->fd = fd, stream->set = -1;
    enum outcome outcome = move_some(stream, MSG_DONTWAIT);
    stream->fd = own, stream->set = set;
    close(fd);
    return outcome;
}

static enum outcome move_by_message(struct stream *stream) {
    int line[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, line) == 0);
    send_rights(line[0], stream->fd);
    enum outcome outcome = move_by(stream, receive_rights(line[1]));
    close(line[0]);
    close(line[1]);
    return outcome;
}

/* Waits for a set that is polled, or that is in another set. */
static void wait_for_set(struct stream *stream, int is_polled) {
    struct epoll_event event = {.events = stream->direction == OUT ? EPOLLOUT : EPOLLIN};
    int set = epoll_create1(0), outer = epoll_create1(0), ready = 0;
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, stream->fd, &event) == 0);
    CHECK(is_polled || epoll_ctl(outer, EPOLL_CTL_ADD, set, &(struct epoll_event){.events = EPOLLIN}) == 0);
    while (ready == 0) {
        struct pollfd one = {set, POLLIN, 0};
        CHECK(UNINTERRUPTED(is_polled ? poll(&one, 1, -1) : epoll_wait(outer, &event, 1, -1)) == 1);
        ready = (int)UNINTERRUPTED(epoll_wait(set, &event, 1, 0));
    }
    CHECK(ready == 1);
    close(outer);
    close(set);
}

static void run_true(struct stream *stream) {
    char *words[] = {"true", NULL};
    int status;
    pid_t program;
    if (pick(&stream->seed, 2)) {
        FILE *output = popen("true", "r");
        CHECK(output != NULL && getc(output) == EOF && pclose(output) == 0);
    } else {
        CHECK(posix_spawnp(&program, "true", NULL, NULL, words, environ) == 0);
        CHECK(UNINTERRUPTED(waitpid(program, &status, 0)) == program && status == 0);
    }
}

static void set_option(struct stream *stream, int level, int option, int value) {
    CHECK(setsockopt(stream->fd, level, option, &value, sizeof value) == 0);
}

/* What programs do with a connection besides moving bytes, or what concerns it without their knowledge. */
static enum outcome disturb(struct stream *stream, int may_wait, int may_pass) {
    enum outcome outcome = MOVED;
    int flags, passes = may_pass && stream->passes;
    switch (pick(&stream->seed, 10)) {
    case 0:
        return move_by(stream, stream->passes ? fcntl(stream->fd, F_DUPFD_CLOEXEC, 500) : dup(stream->fd));
    case 1:
        run_true(stream);
        break;
    case 2:
        /* Another thread may do the same. */
        CHECK((flags = fcntl(stream->fd, F_GETFL)) >= 0 && fcntl(stream->fd, F_SETFL, flags | O_NONBLOCK) == 0);
        outcome = move_some(stream, 0);
        CHECK(fcntl(stream->fd, F_SETFL, flags & ~O_NONBLOCK) == 0);
        break;
    case 3:
    case 4:
        /* Bytes to be received may be in memory of this program alone. */
        if (passes) {
            move_elsewhere(stream, MSG_DONTWAIT, MESSAGED);
        } else if (stream->direction == OUT && !stream->passes) {
            move_elsewhere(stream, MSG_DONTWAIT, pick(&stream->seed, 2) ? SPAWNED : VFORKED);
        }
        break;
    case 5:
        return passes ? move_by_message(stream) : MOVED;
    case 6:
        if (may_wait && !stream->passes) {
            wait_for_set(stream, pick(&stream->seed, 2));
        }
        break;
    case 7:
        set_option(stream, IPPROTO_TCP, TCP_NODELAY, pick(&stream->seed, 2));
        break;
    case 8:
        if (!stream->passes) {
            set_option(stream, SOL_SOCKET, SO_RCVLOWAT, 1 + pick(&stream->seed, 4000));
        }
        break;
    default:
        set_option(stream, SOL_SOCKET, SO_SNDBUF, 5000 + pick(&stream->seed, 300000));
    }
    return outcome;
}

static void sleep_at_times(struct stream *stream) {
    if (pick(&stream->seed, 200) == 0) {
        usleep((useconds_t)pick(&stream->seed, 3000));
    }
}

static int is_over(const struct stream *stream, enum outcome last) {
    return stream->direction == OUT ? stream->at == stream->len : last == ENDED;
}

/* The streams of an end's two directions are adjacent in memory. */
static void end_stream(struct stream *stream) {
    __atomic_store_n(&stream->is_over, 1, __ATOMIC_SEQ_CST);
    CHECK(stream->direction == IN || shutdown(stream->fd, SHUT_WR) == 0);
}

static int may_end(const struct stream *stream) {
    return !stream->ends_last || stream->direction == IN || __atomic_load_n(&stream[IN - OUT].is_over, __ATOMIC_SEQ_CST);
}

/* A thread that has one direction. */
static void *one_way(void *given) {
    struct stream *stream = given;
    enum outcome last = MOVED;
    int flags = 0;
    while (!is_over(stream, last)) {
        sleep_at_times(stream);
        if (pick(&stream->seed, 50) == 0) {
            flags = pick(&stream->seed, 2) ? MSG_DONTWAIT : 0;
        }
        if (has_children && stream->at < stream->len && pick(&stream->seed, 300) == 0) {
            move_elsewhere(stream, 0, CHILD);
            continue;
        }
        if (has_disturbances && !stream->ends_last && stream->at < stream->len && pick(&stream->seed, 100) == 0) {
            last = disturb(stream, 1, stream->direction == OUT);
            continue;
        }
        if (pick(&stream->seed, 4) == 0) {
            wait_in_some_way(stream);
        }
        last = move_some(stream, flags);
        if (last == MUST_WAIT) {
            wait_in_some_way(stream);
        }
    }
    while (!may_end(stream)) {
        usleep(500);
    }
    end_stream(stream);
    return NULL;
}

/* Both directions of an end, handed to this program when it executes itself anew. */
struct image {
    struct stream both[2];
    int has_children, has_disturbances;
};

static void exec_anew(const struct stream *both) {
    static struct image image;
    char number[20], *words[] = {"stress", "stream", number, NULL};
    int file = memfd_create("stress", 0);
    memcpy(image.both, both, sizeof image.both);
    image.has_children = has_children, image.has_disturbances = has_disturbances;
    CHECK(write(file, &image, sizeof image) == sizeof image && lseek(file, 0, SEEK_SET) == 0);
    snprintf(number, sizeof number, "%d", file);
    CHECK(fcntl(both->fd, F_SETFD, 0) == 0);
    execv("/proc/self/exe", words);
    CHECK(!"exec");
}

/* A thread that has both directions. It waits by poll, by select, or for edges, and then takes all there is. */
static void *both_ways(void *given) {
    struct stream *both = given;
    unsigned *seed = &both[OUT].seed;
    int way = pick(seed, 3), set = epoll_create1(EPOLL_CLOEXEC), is_done[2] = {both[IN].is_over, both[OUT].is_over};
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET};
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, both->fd, &event) == 0);
    for (int round = 0; !is_done[IN] || !is_done[OUT]; round++) {
        struct pollfd one = {both->fd, (short)((is_done[OUT] ? 0 : POLLOUT) | (is_done[IN] ? 0 : POLLIN)), 0};
        fd_set in, out;
        struct stream *one_of = &both[pick(seed, 2)];
        if (!is_done[one_of->direction] && one_of->at < one_of->len && pick(seed, 200) == 0) {
            if (has_children) {
                move_elsewhere(one_of, MSG_DONTWAIT, CHILD); /* The peer may wait for a child as well. */
            } else if (has_disturbances && !one_of->ends_last) {
                disturb(one_of, 0, !is_done[OUT]);
            }
            round = 0; /* The edges may have been taken there. */
        }
        if (is_alone && both[OUT].passes && !is_done[OUT] && pick(seed, 500) == 0) {
            exec_anew(both);
        }
        int goes[2] = {1, 1}, steps = way == 2 ? 1 << 30 : 1 + pick(seed, 4), n;
        sleep_at_times(&both[OUT]);
        if (way == 0) {
            CHECK(UNINTERRUPTED(poll(&one, 1, -1)) == 1);
            goes[IN] = one.revents & ~POLLOUT, goes[OUT] = one.revents & ~POLLIN;
        } else if (way == 1) {
            do {
                FD_ZERO(&in);
                FD_ZERO(&out);
                if (!is_done[IN]) {
                    FD_SET(both->fd, &in);
                }
                if (!is_done[OUT]) {
                    FD_SET(both->fd, &out);
                }
                n = select(both->fd + 1, &in, &out, NULL, NULL);
            } while (n < 0 && errno == EINTR);
            CHECK(n > 0);
            goes[IN] = FD_ISSET(both->fd, &in), goes[OUT] = FD_ISSET(both->fd, &out);
        } else if (round > 0) {
            CHECK(UNINTERRUPTED(epoll_wait(set, &event, 1, -1)) == 1);
        }
        for (int step = 0; step < steps; step++) {
            int goes_on = 0;
            for (int at = IN; at <= OUT; at++) {
                if (is_done[at] || !goes[at]) {
                    continue;
                }
                enum outcome last = is_over(&both[at], MOVED) ? ENDED : move_some(&both[at], MSG_DONTWAIT);
                goes[at] = last == MOVED;
                if (is_over(&both[at], last) && !may_end(&both[at])) {
                    usleep(500);
                } else if (is_over(&both[at], last)) {
                    end_stream(&both[at]);
                    is_done[at] = goes[OUT] = 1; /* The sending direction may end now. */
                }
                goes_on |= goes[at] && !is_done[at];
            }
            if (!goes_on) {
                break;
            }
        }
    }
    close(set);
    return NULL;
}

struct threads {
    pthread_t all[2 * CONNECTIONS];
    int count;
};

static void start(struct threads *threads, void *(*body)(void *), void *streams) {
    CHECK(pthread_create(&threads->all[threads->count++], NULL, body, streams) == 0);
}

/* Values that the two ends must agree on come from `seed` alone. */
static void carry(struct threads *threads, int fd, int connection, int end, unsigned seed, int most) {
    unsigned common = seed * 1000003 + (unsigned)connection, own = seed * 7919 + (unsigned)(connection * 2 + end);
    long len[2];
    for (int sender = 0; sender < 2; sender++) {
        int below = pick(&common, 4) ? most : 3000;
        len[sender] = pick(&common, below);
    }
    int is_passed_on = pick(&common, 3) == 0;
    len[1] %= is_passed_on ? PASSED : most + 1;
    struct stream *both = calloc(2, sizeof *both);
    CHECK(both != NULL);
    for (int direction = IN; direction <= OUT; direction++) {
        struct stream *stream = &both[direction];
        stream->fd = fd, stream->connection = connection, stream->direction = (enum direction)direction;
        stream->sender = direction == OUT ? end : !end;
        stream->len = len[stream->sender], stream->seed = own * 31 + (unsigned)direction, stream->set = -1;
        stream->passes = is_passed_on && end == 0, stream->ends_last = is_passed_on && end == 1;
    }
    CHECK(fcntl(fd, F_SETFD, is_passed_on ? FD_CLOEXEC : 0) == 0);
    if (pick(&own, 2)) {
        start(threads, both_ways, both);
    } else {
        start(threads, one_way, &both[IN]);
        start(threads, one_way, &both[OUT]);
    }
}

static void join(const struct threads *threads) {
    for (int at = 0; at < threads->count; at++) {
        pthread_join(threads->all[at], NULL);
    }
}

static void send_all(int fd, const char *bytes, size_t len) {
    for (size_t sent = 0; sent < len;) {
        long n = send(fd, bytes + sent, len - sent, 0);
        CHECK(n > 0 || errno == EINTR);
        sent += n > 0 ? (size_t)n : 0;
    }
}

static void receive_all(int fd, char *bytes, size_t len) {
    for (size_t received = 0; received < len;) {
        long n = recv(fd, bytes + received, len - received, 0);
        CHECK(n > 0 || (n < 0 && errno == EINTR));
        received += n > 0 ? (size_t)n : 0;
    }
}

/* Exchanges the turns after which two ends are joined. */
static void greet(int fd, int end) {
    char bytes[GREETING] = {0};
    for (int at = 0; at < 2 * GREETINGS; at++) {
        at % 2 == end ? send_all(fd, bytes, sizeof bytes) : receive_all(fd, bytes, sizeof bytes);
    }
}

static void dial(int fd, const struct sockaddr_in *peer) {
    CHECK(fd >= 0);
    if (connect(fd, (const struct sockaddr *)peer, sizeof *peer) != 0) {
        struct pollfd one = {fd, POLLOUT, 0};
        CHECK(errno == EINTR && UNINTERRUPTED(poll(&one, 1, -1)) == 1);
    }
}

/* Makes the next connection; end 1 connects. Both ends greet, so each counts the same connections. */
static int connection_of(int end, int listener, const struct sockaddr_in *peer) {
    int fd = end == 0 ? (int)UNINTERRUPTED(accept(listener, NULL, NULL)) : socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    if (end == 1) {
        dial(fd, peer);
    }
    greet(fd, end);
    return fd;
}

/* Makes short connections beside the others, one after the other, and gets their bytes back. */
static int are_visits_over;

static void *visits(void *given) {
    const struct sockaddr_in *peer = given;
    static char bytes[VISIT], back[VISIT];
    unsigned seed = (unsigned)getpid();
    for (int is_last = 0; !is_last;) {
        is_last = __atomic_load_n(&are_visits_over, __ATOMIC_SEQ_CST);
        int fd = socket(AF_INET, SOCK_STREAM, 0), len = 1 + pick(&seed, VISIT);
        dial(fd, peer);
        for (int at = 0; at < len; at++) {
            bytes[at] = (char)pick(&seed, 256);
        }
        bytes[0] = (char)is_last;
        send_all(fd, bytes, (size_t)len);
        CHECK(pick(&seed, 2) || shutdown(fd, SHUT_WR) == 0);
        receive_all(fd, back, (size_t)len);
        CHECK(memcmp(bytes, back, (size_t)len) == 0);
        close(fd);
    }
    return NULL;
}

static void *visited(void *listener) {
    static char bytes[VISIT];
    for (int is_last = 0; !is_last;) {
        int fd = (int)UNINTERRUPTED(accept(*(int *)listener, NULL, NULL));
        CHECK(fd >= 0);
        for (long n = 1, all = 0; n != 0; all += n) {
            n = UNINTERRUPTED(recv(fd, bytes, sizeof bytes, 0));
            CHECK(n >= 0);
            is_last |= all == 0 && bytes[0];
            send_all(fd, bytes, (size_t)n);
        }
        close(fd);
    }
    return NULL;
}

static void interrupted(int signal) {
    (void)signal;
}

/* Runs one end. Where the seed says so, every second connection has a process of its own. */
static void run_end(int end, unsigned seed, int len, int listeners[2], const struct sockaddr_in peers[2]) {
    unsigned drawn = seed;
    int connections = 1 + pick(&drawn, CONNECTIONS), has_signals = pick(&drawn, 2);
    has_children = pick(&drawn, 2);
    int has_processes = pick(&drawn, 2), status;
    has_disturbances = pick(&drawn, 3) == 0;
    struct sigaction action = {.sa_handler = interrupted, .sa_flags = pick(&drawn, 2) ? SA_RESTART : 0};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    if (has_signals) {
        struct timeval often = {.tv_usec = signal_pause};
        CHECK(setitimer(ITIMER_REAL, &(struct itimerval){often, often}, NULL) == 0);
    }
    int has_visits = pick(&drawn, 3) == 0;
    struct threads threads = {.count = 0}, visitors = {.count = 0};
    pid_t processes[CONNECTIONS];
    int count = 0;
    for (int at = 0; at < connections; at++) {
        int fd = connection_of(end, listeners[0], &peers[0]);
        if (!has_processes || at % 2 == 0) {
            carry(&threads, fd, at, end, seed, len);
        } else if ((processes[count++] = fork()) == 0) {
            struct threads own = {.count = 0};
            is_alone = 1;
            carry(&own, fd, at, end, seed, len);
            join(&own);
            _exit(0);
        } else {
            close(fd);
        }
    }
    if (has_visits) {
        start(&visitors, end == 0 ? visited : visits, end == 0 ? (void *)&listeners[1] : (void *)&peers[1]);
    }
    join(&threads);
    __atomic_store_n(&are_visits_over, 1, __ATOMIC_SEQ_CST);
    join(&visitors);
    for (int at = 0; at < count; at++) {
        CHECK(UNINTERRUPTED(waitpid(processes[at], &status, 0)) > 0 && status == 0);
    }
}

static int listening(struct sockaddr_in *address) {
    socklen_t len = sizeof *address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) == 0);
    CHECK(bind(fd, (struct sockaddr *)address, len) == 0 && listen(fd, CONNECTIONS) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)address, &len) == 0);
    return fd;
}

int main(int count, char **words) {
    struct sockaddr_in addresses[2];
    CHECK(count >= 3 && count <= 5);
    unsigned seed = (unsigned)strtoul(words[1], NULL, 10);
    int len = atoi(words[2]), listeners[2] = {-1, -1}, status;
    signal(SIGPIPE, SIG_IGN);
    if (strcmp(words[1], "errand") == 0) {
        run_started(words[2]);
        return 0;
    }
    if (strcmp(words[1], "stream") == 0) {
        static struct image image;
        CHECK(read(atoi(words[2]), &image, sizeof image) == sizeof image && close(atoi(words[2])) == 0);
        is_alone = 1, has_children = image.has_children, has_disturbances = image.has_disturbances;
        image.both[IN].set = image.both[OUT].set = -1;
        both_ways(image.both);
        return 0;
    }
    signal_pause *= count == 3 ? 1 : 10;
    for (int at = 0; at < 2; at++) {
        int port = count > 3 ? atoi(words[3]) + at : 0;
        addresses[at] = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        if (count == 3) {
            addresses[at].sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        }
        if (count == 5) {
            CHECK(inet_pton(AF_INET, words[4], &addresses[at].sin_addr) == 1);
        } else {
            listeners[at] = listening(&addresses[at]);
        }
    }
    if (count == 3) {
        pid_t other = fork();
        CHECK(other >= 0);
        run_end(other != 0, seed, len, listeners, addresses);
        if (other == 0) {
            _exit(0);
        }
        CHECK(UNINTERRUPTED(waitpid(other, &status, 0)) == other && status == 0);
    } else {
        printf(count == 4 ? "listens\n" : "");
        fflush(stdout);
        run_end(count == 5, seed, len, listeners, addresses);
    }
    printf("done\n");
    return 0;
}
