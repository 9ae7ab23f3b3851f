/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Random calls on the two ends of a connection, which two processes hold, in lock step. The result of each is printed,
 * and every byte is compared. A seed gives the same output with the library as without.
 *
 *   random SEED STEPS [past]
 *
 * With `past` some calls are made past libc. Of a registration for edges the program prints only whether any event was
 * reported: the kernel reports more events than there are. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#include "ends.h"

enum { NUMBERS = 4, FIRST = 40, ROOM = 1 << 16, AHEAD = 20000, EPISODE = 60, PATIENCE = 10000 };

enum op {
    SEND, RECV, COUNT, POLL, SELECT, CONTROL, WAIT, NUMBER, OPTION, SHUT,
    FORK, THREAD, HANDLER, BLOCK, CLOSE, EXIT, OPS
};
/* Ways to send, to receive, and to end: closed, reset, and by a process that ends in either way. */
enum { SENDS = 9, RECEIVES = 12, ENDS = 4 };

struct command {
    enum op op;
    int number, other, how, len, events;
    /* Number of bytes that are on their way to this end, whether the peer ends the stream, and the number of all bytes
       so far. */
    int there, ended;
    long arrived;
};

struct result {
    long answer;
    int moved;
    char text[400];
};

static unsigned seed;
static int past, end;
/* Of this end. */
static int is_open[NUMBERS], set;
static long sent, received;
static struct {
    uint32_t events;
    long told;
} registered[NUMBERS];
static char room[ROOM];

static int pick(int most) {
    return rand_r(&seed) % most;
}

static char byte(int from, long at) {
    return (char)((at * 31 + at / 509 * 7 + from * 101) % 251);
}

static void fail(struct result *result, const char *what) {
    snprintf(result->text + strlen(result->text), sizeof result->text - strlen(result->text), " %s!", what);
}

static void add(struct result *result, const char *what, long answer) {
    snprintf(result->text + strlen(result->text), sizeof result->text - strlen(result->text), " %s %ld%s%s", what, answer,
             answer < 0 ? " " : "", answer < 0 ? strerrorname_np(errno) : "");
}

static int fd_of(int number) {
    return FIRST + number;
}

/* Waits until the bytes that were sent have arrived, and the end: a call then depends only on their number. */
static void settle(const struct command *command, struct result *result) {
    struct pollfd one = {.fd = fd_of(command->number), .events = POLLRDHUP};
    int there = -1;
    time_t begun = time(NULL);
    while (there != command->there) {
        check(ioctl(one.fd, FIONREAD, &there) == 0, "FIONREAD");
        if (time(NULL) > begun + 3) {
            add(result, "of what is there FIONREAD says", there);
            return;
        }
    }
    if (command->ended && poll(&one, 1, PATIENCE) != 1) {
        fail(result, "the end is not told");
    }
}

static void seen(struct result *result, const char *bytes, long n) {
    for (long at = 0; at < n; at++) {
        if (bytes[at] != byte(!end, received + at)) {
            fail(result, "another byte");
            return;
        }
    }
}

/* Sends each part as a message of its own, in one call. */
static long two_messages(int fd, struct iovec *parts, int sends, struct result *result) {
    struct mmsghdr both[2] = {{.msg_hdr = {.msg_iov = parts, .msg_iovlen = 1}},
                              {.msg_hdr = {.msg_iov = parts + 1, .msg_iovlen = 1}}};
    long n = sends ? sendmmsg(fd, both, 2, 0) : recvmmsg(fd, both, 2, MSG_DONTWAIT, NULL);
    add(result, "messages", n);
    return n <= 0 ? n : both[0].msg_len + (n > 1 ? both[1].msg_len : 0);
}

static void sends(const struct command *command, struct result *result) {
    static const char *names[] = {"send",   "write",    "writev",   "sendmsg", "sendfile",
                                  "splice", "sendmmsg", "pwritev2", "sendto"};
    int fd = fd_of(command->number), len = command->len, half = len / 3, line[2];
    struct iovec parts[2] = {{room, (size_t)half}, {room + half, (size_t)(len - half)}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    long n = 0;
    for (int at = 0; at < len; at++) {
        room[at] = byte(end, sent + at);
    }
    switch (command->how) {
    case 0:
        n = send(fd, room, (size_t)len, 0);
        break;
    case 1:
        n = write(fd, room, (size_t)len);
        break;
    case 2:
        n = writev(fd, parts, 2);
        break;
    case 3:
        n = sendmsg(fd, &message, 0);
        break;
    case 4: {
        int file = memfd_create("file", 0);
        off_t from = 0;
        check(write(file, room, (size_t)len) == len, "file");
        n = sendfile(fd, file, &from, (size_t)len);
        close(file);
        break;
    }
    case 6:
        n = two_messages(fd, parts, 1, result);
        break;
    case 7:
        n = pwritev2(fd, parts, 2, -1, 0);
        break;
    case 8:
        n = sendto(fd, room, (size_t)len, MSG_DONTWAIT, (struct sockaddr *)&(struct sockaddr_in){.sin_family = AF_INET},
                   sizeof(struct sockaddr_in));
        break;
    default:
        check(pipe(line) == 0 && write(line[1], room, (size_t)len) == len, "pipe");
        n = splice(line[0], NULL, fd, NULL, (size_t)len, 0);
        close(line[0]);
        close(line[1]);
    }
    add(result, names[command->how], n);
    result->moved = n > 0 ? (int)n : 0;
    sent += result->moved;
}

/* Splices all that is asked for, as far as it is there. */
static long splice_out(int fd, int len, int there) {
    len = there > 0 && len > there ? there : len;
    int line[2], done = 0;
    long n = 0;
    check(pipe(line) == 0 && fcntl(line[1], F_SETPIPE_SZ, 1 << 18) > 0, "pipe");
    while (done < len && (n = splice(fd, NULL, line[1], NULL, (size_t)(len - done), SPLICE_F_NONBLOCK)) > 0) {
        check(read(line[0], room + done, (size_t)n) == n, "read");
        done += (int)n;
    }
    int error = errno;
    close(line[0]);
    close(line[1]);
    errno = error;
    return done > 0 ? done : n;
}

static long receive_past_libc(long fd, long len) {
    register long flags __asm__("r10") = MSG_DONTWAIT, address __asm__("r8") = 0, address_len __asm__("r9") = 0;
    long answer;
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "a"(SYS_recvfrom), "D"(fd), "S"(room), "d"(len), "r"(flags), "r"(address), "r"(address_len)
                     : "rcx", "r11", "memory");
    errno = answer < 0 ? (int)-answer : errno;
    return answer < 0 ? -1 : answer;
}

static void receives(const struct command *command, struct result *result) {
    static const char *names[] = {"recv",     "read", "readv",  "recvmsg",  "peek",    "peek all",
                                  "truncate", "all",  "splice", "recvmmsg", "preadv2", "recvfrom"};
    int fd = fd_of(command->number), len = command->len, half = len / 3, nonblocking = fcntl(fd, F_GETFL) & O_NONBLOCK;
    struct iovec parts[2] = {{room, (size_t)half}, {room + half, (size_t)(len - half)}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    char control[100];
    int how = command->how;
    /* A call that would wait. */
    how = (how == 1 || how == 2 || how == 8 || how == 10) && command->there == 0 && !command->ended && !nonblocking ? 0 : how;
    long n = 0;
    memset(room, 0, (size_t)len);
    switch (how) {
    case 1:
        n = read(fd, room, (size_t)len);
        break;
    case 2:
        n = readv(fd, parts, 2);
        break;
    case 3:
        message.msg_control = control, message.msg_controllen = sizeof control;
        n = recvmsg(fd, &message, MSG_DONTWAIT);
        if (n >= 0) {
            add(result, "flags", message.msg_flags);
            add(result, "beside", (long)message.msg_controllen);
        }
        break;
    case 4:
        n = recv(fd, room, (size_t)len, MSG_PEEK | MSG_DONTWAIT);
        break;
    case 5:
        n = recv(fd, room, (size_t)len, MSG_PEEK | MSG_DONTWAIT | MSG_WAITALL);
        break;
    case 6:
        n = recv(fd, NULL, (size_t)len, MSG_TRUNC | MSG_DONTWAIT);
        break;
    case 7:
        n = recv(fd, room, (size_t)len, MSG_WAITALL | MSG_DONTWAIT);
        break;
    case 8:
        n = splice_out(fd, len, command->there);
        break;
    case 9:
        n = two_messages(fd, parts, 0, result);
        break;
    case 10:
        n = preadv2(fd, parts, 2, -1, 0);
        break;
    case 11: {
        struct sockaddr_in from;
        socklen_t from_len = sizeof from;
        n = recvfrom(fd, room, (size_t)len, MSG_DONTWAIT, (struct sockaddr *)&from, &from_len);
        if (n >= 0) {
            add(result, "address of", from_len);
        }
        break;
    }
    default:
        n = past && command->events ? receive_past_libc(fd, len) : recv(fd, room, (size_t)len, MSG_DONTWAIT);
    }
    add(result, names[how], n);
    if (how != 6) {
        seen(result, room, n);
    }
    result->moved = n > 0 && how != 4 && how != 5 ? (int)n : 0;
    received += result->moved;
}

static void polls(const struct command *command, struct result *result, int patience) {
    struct pollfd two[2] = {{.fd = fd_of(command->number), .events = (short)command->events},
                            {.fd = fd_of(command->other), .events = POLLIN}};
    long n = poll(two, 1 + (nfds_t)(command->how & 1), patience);
    add(result, "poll", n);
    add(result, "says", two[0].revents);
    add(result, "and", two[1].revents);
}

static void selects(const struct command *command, struct result *result, int patience) {
    struct timeval limit = {patience / 1000, 0};
    fd_set sets[2];
    int first = fd_of(command->number), second = command->how & 1 ? fd_of(command->other) : first;
    for (int at = 0; at < 2; at++) {
        FD_ZERO(&sets[at]);
    }
    FD_SET(first, &sets[0]);
    FD_SET(second, &sets[command->how >> 1 & 1]);
    long n = select(FIRST + NUMBERS, &sets[0], command->how & 2 ? &sets[1] : NULL, NULL, patience < 0 ? NULL : &limit);
    add(result, "select", n);
    if (n >= 0) {
        add(result, "reads", FD_ISSET(first, &sets[0]) + 2 * FD_ISSET(second, &sets[0]));
        add(result, "writes", FD_ISSET(second, &sets[1]));
    }
}

static void waits(const struct command *command, struct result *result, int patience) {
    struct epoll_event events[8];
    uint32_t told[NUMBERS] = {0};
    int n = epoll_wait(set, events, 8, patience);
    check(n >= 0, "epoll_wait");
    for (int at = 0; at < n; at++) {
        told[events[at].data.u32] = events[at].events;
    }
    for (int at = 0; at < NUMBERS; at++) {
        uint32_t asked = registered[at].events;
        if (asked & EPOLLET) {
            if (asked & EPOLLIN && command->there > 0 && command->arrived > registered[at].told && !(told[at] & EPOLLIN)) {
                fail(result, "news are not told");
            }
        } else if (told[at]) {
            add(result, "event of", at);
            add(result, "is", told[at]);
        }
        if (told[at]) {
            registered[at].told = command->arrived;
            registered[at].events = asked & EPOLLONESHOT ? 0 : asked;
        }
    }
}

static void controls(const struct command *command, struct result *result) {
    static const int operations[] = {EPOLL_CTL_ADD, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_DEL};
    struct epoll_event event = {.events = (uint32_t)command->events, .data.u32 = (uint32_t)command->number};
    int operation = operations[command->how];
    long n = epoll_ctl(set, operation, fd_of(command->number), &event);
    add(result, "epoll_ctl", n);
    if (n == 0) {
        registered[command->number].events = operation == EPOLL_CTL_DEL ? 0 : event.events;
        registered[command->number].told = -1;
    }
}

/* One number becomes a copy of another, or is closed if it is not the last. */
static void numbers(const struct command *command, struct result *result) {
    int others = 0;
    for (int at = 0; at < NUMBERS; at++) {
        others += is_open[at] && at != command->number;
    }
    int fd = fd_of(command->number), to = fd_of(command->other);
    if (command->how && others > 0) {
        if (command->len & 1) {
            add(result, "close", close(fd));
        } else {
            add(result, "close_range", close_range((unsigned)fd, (unsigned)fd, 0));
        }
        is_open[command->number] = 0;
        return;
    }
    switch (command->len % 4) {
    case 0:
        add(result, "dup3", dup3(fd, to, O_CLOEXEC));
        break;
    case 1:
        close(to);
        add(result, "F_DUPFD", fcntl(fd, F_DUPFD, to));
        break;
    default:
        add(result, "dup2", dup2(fd, to));
    }
    is_open[command->other] = 1;
}

static void options(const struct command *command, struct result *result) {
    struct timeval limit = {0, 1000};
    int fd = fd_of(command->number), on = command->len & 1, size = 4096;
    switch (command->how) {
    case 0:
        add(result, "TCP_NODELAY", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
        break;
    case 1:
        add(result, "FIONBIO", ioctl(fd, FIONBIO, &on));
        break;
    case 2:
        add(result, "O_NONBLOCK", fcntl(fd, F_SETFL, on ? O_NONBLOCK : 0));
        break;
    case 3:
        add(result, "SO_RCVTIMEO", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
        if (command->there == 0 && !command->ended) {
            add(result, "none in time", recv(fd, room, 1, 0));
        }
        limit.tv_usec = 0;
        check(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0, "SO_RCVTIMEO");
        break;
    case 4:
        add(result, "recv of none", recv(fd, room, 0, MSG_DONTWAIT));
        break;
    default:
        /* Some options send the connection back to TCP. */
        size = command->len % 8 == 0 ? 2 : 1;
        add(result, "SO_RCVLOWAT", setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &size, sizeof size));
    }
}

static void does(const struct command *command, struct result *result);

/* Returns the operation that another thread, process or handler does. */
static enum op inner(const struct command *command) {
    static const enum op others[] = {RECV, RECV, COUNT, POLL, SELECT};
    return command->events & 1 ? SEND : others[command->len % 5];
}

/* A child does it, which has no connection of its own. */
static void forks(const struct command *command, struct result *result) {
    struct command its = *command;
    struct result said = {0};
    int answer[2], status;
    its.op = inner(command);
    check(pipe(answer) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        does(&its, &said);
        check(write(answer[1], &said, sizeof said) == sizeof said, "answer");
        _exit(0);
    }
    check(read(answer[0], &said, sizeof said) == sizeof said && waitpid(child, &status, 0) == child, "child");
    close(answer[0]);
    close(answer[1]);
    *result = said;
    *(its.op == SEND ? &sent : &received) += said.moved;
}

static const struct command *given;
static struct result *gives;

static void *in_thread(void *unused) {
    does(given, gives);
    return unused;
}

static void in_handler(int signal) {
    (void)signal;
    does(given, gives);
}

/* Another thread does it, or a handler. */
static void elsewhere(const struct command *command, struct result *result) {
    struct command its = *command;
    pthread_t thread;
    its.op = inner(command);
    given = &its, gives = result;
    if (command->op == THREAD) {
        check(pthread_create(&thread, NULL, in_thread, NULL) == 0 && pthread_join(thread, NULL) == 0, "thread");
    } else {
        signal(SIGUSR1, in_handler);
        raise(SIGUSR1);
    }
}

static void closes(int with_reset) {
    struct linger linger = {1, 0};
    for (int at = 0; at < NUMBERS; at++) {
        if (is_open[at] && with_reset) {
            check(setsockopt(fd_of(at), SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0, "SO_LINGER");
        }
        close(fd_of(at));
    }
}

/* Prints what an endpoint whose peer is gone reports. */
static void survives(int fd, struct result *result) {
    struct pollfd one = {.fd = fd, .events = POLLIN | POLLRDHUP};
    int error = 0;
    socklen_t len = sizeof error;
    long n = 0, rest = 0;
    do {
        check(poll(&one, 1, PATIENCE) == 1, "the end is told");
        n = recv(fd, room, 3000, MSG_DONTWAIT);
        seen(result, room, n);
        received += n > 0 ? n : 0;
        rest += n > 0 ? n : 0;
    } while (n > 0 || (n < 0 && errno == EAGAIN));
    add(result, "the rest", rest);
    add(result, "then", n);
    check(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) == 0, "SO_ERROR");
    add(result, "error", error);
    one.events = POLLIN | POLLOUT | POLLRDHUP;
    poll(&one, 1, 0);
    add(result, "poll says", one.revents);
    add(result, "recv", recv(fd, room, 3000, MSG_DONTWAIT));
    add(result, "send", send(fd, room, 10, MSG_DONTWAIT));
    one.events = 0;
    add(result, "poll", poll(&one, 1, PATIENCE));
    add(result, "says", one.revents);
    add(result, "send", send(fd, room, 10, MSG_DONTWAIT));
    add(result, "recv", recv(fd, room, 3000, MSG_DONTWAIT));
}

static void does(const struct command *command, struct result *result) {
    int there = -1;
    switch (command->op) {
    case SEND:
        sends(command, result);
        break;
    case RECV:
        receives(command, result);
        break;
    case COUNT:
        check(ioctl(fd_of(command->number), FIONREAD, &there) == 0, "FIONREAD");
        add(result, "FIONREAD", there);
        break;
    case POLL:
        polls(command, result, 0);
        break;
    case SELECT:
        selects(command, result, 0);
        break;
    case CONTROL:
        controls(command, result);
        break;
    case WAIT:
        waits(command, result, 0);
        break;
    case NUMBER:
        numbers(command, result);
        break;
    case OPTION:
        options(command, result);
        break;
    case SHUT:
        if (command->how) {
            add(result, "shut down receiving", shutdown(fd_of(command->number), SHUT_RD));
        } else {
            add(result, "shut down sending", shutdown(fd_of(command->number), SHUT_WR));
        }
        break;
    case FORK:
        forks(command, result);
        break;
    case THREAD:
    case HANDLER:
        elsewhere(command, result);
        break;
    case BLOCK: {
        /* Until the bytes that are being sent have come. */
        struct command one = *command;
        one.events = POLLIN, one.how = 0;
        if (command->how == 0) {
            polls(&one, result, PATIENCE);
        } else if (command->how == 1) {
            selects(&one, result, PATIENCE);
        } else {
            check(fcntl(fd_of(command->number), F_SETFL, 0) == 0, "F_SETFL");
            long n = recv(fd_of(command->number), room, (size_t)command->len, MSG_WAITALL);
            add(result, "recv", n);
            seen(result, room, n);
            result->moved = n > 0 ? (int)n : 0;
            received += result->moved;
        }
        break;
    }
    case CLOSE:
        closes(command->how);
        break;
    case EXIT:
        exit(0);
    case OPS:
        _exit(0);
    }
}

/* ---- both ends */

static pid_t child;
static int commands[2], results[2];
static int ahead[2], mutes[2], deaf[2], opens[2][NUMBERS];
static long all[2];

static void ask(int whose, struct command *command) {
    command->there = ahead[!whose];
    command->ended = mutes[!whose];
    command->arrived = all[!whose];
    if (whose == 1) {
        check(write(commands[1], command, sizeof *command) == sizeof *command, "command");
    }
}

static void carry_out(const struct command *command, struct result *result) {
    *result = (struct result){0};
    if (command->op < BLOCK) {
        settle(command, result);
    }
    does(command, result);
}

static void hear(int whose, const struct command *command, struct result *result) {
    if (whose == 0) {
        carry_out(command, result);
    } else {
        check(read(results[0], result, sizeof *result) == sizeof *result, "result");
    }
    printf("%d:%s\n", whose, result->text);
    if (strstr(result->text, "FIONREAD says") || strchr(result->text, '!')) {
        /* Any byte that comes is wrong. */
        kill(child, SIGKILL);
        _exit(1);
    }
}

static int is_send(const struct command *command) {
    return command->op == SEND || (command->op >= FORK && command->op <= HANDLER && command->events & 1);
}

static void note(int whose, const struct command *command, const struct result *result) {
    int sends = is_send(command);
    int at = sends ? whose : !whose;
    ahead[at] += sends ? result->moved : -result->moved;
    all[at] += sends ? result->moved : 0;
    mutes[whose] |= command->op == SHUT && command->how == 0;
    deaf[whose] |= command->op == SHUT && command->how == 1;
    if (command->op == NUMBER) {
        int others = 0;
        for (int number = 0; number < NUMBERS; number++) {
            others += opens[whose][number] && number != command->number;
        }
        opens[whose][command->how && others ? command->number : command->other] = !(command->how && others);
    }
}

static void run(int whose, struct command *command) {
    struct result result;
    ask(whose, command);
    hear(whose, command, &result);
    note(whose, command, &result);
}

static int open_number(int whose) {
    int number;
    do {
        number = pick(NUMBERS);
    } while (!opens[whose][number]);
    return number;
}

static int events_at_random(void) {
    static const int all[] = {EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLPRI};
    int events = pick(3) ? EPOLLIN : 0;
    for (int at = 0; at < 4; at++) {
        events |= pick(3) ? 0 : all[at];
    }
    return events;
}

static void step(void) {
    static const enum op often[] = {SEND, SEND, SEND, RECV, RECV, RECV, RECV, RECV, COUNT, POLL, SELECT, CONTROL,
                                    CONTROL, WAIT, WAIT, NUMBER, NUMBER, OPTION, FORK, THREAD, HANDLER, BLOCK, BLOCK};
    int whose = pick(2), len = pick(8) ? 1 + pick(3000) : 1 + pick(9000);
    struct command command = {.op = pick(100) < 3 ? SHUT : often[pick(sizeof often / sizeof *often)], .len = len};
    command.number = open_number(whose);
    command.other = pick(NUMBERS);
    command.events = events_at_random();
    switch (command.op) {
    case SEND:
        command.how = pick(SENDS);
        break;
    case RECV:
        command.how = pick(RECEIVES);
        break;
    case SELECT:
    case CONTROL:
        command.how = pick(4);
        command.events |= command.op == CONTROL && pick(3) == 0 ? EPOLLET : 0;
        command.events |= command.op == CONTROL && pick(4) == 0 ? EPOLLONESHOT : 0;
        break;
    case OPTION:
        command.how = pick(6);
        break;
    case FORK:
    case THREAD:
    case HANDLER:
        command.how = pick(command.events & 1 ? SENDS : RECEIVES);
        command.how = command.events & 1 || inner(&command) == RECV ? command.how : command.how % 4;
        break;
    case NUMBER:
        command.other = command.other == command.number ? (command.number + 1) % NUMBERS : command.other;
        command.how = pick(2);
        break;
    case BLOCK:
        command.how = pick(3);
        break;
    default:
        command.how = pick(2);
    }
    int sends = is_send(&command);
    if (sends && ahead[whose] + len > AHEAD) {
        return;
    }
    /* A socket that has shut down both directions resets the connection when bytes come. */
    if (command.op == SHUT && (command.how ? mutes : deaf)[whose]) {
        return;
    }
    if (command.op != BLOCK) {
        run(whose, &command);
        return;
    }
    /* Only where nothing is there, and something can come. */
    if (ahead[!whose] || mutes[!whose] || deaf[whose] || whose == 0) {
        return;
    }
    struct command sending = {.op = SEND, .len = len, .how = pick(SENDS), .number = open_number(0)};
    struct result result;
    ask(1, &command);
    for (volatile int turn = pick(2) ? pick(200000) : 0; turn > 0; turn--) {
    }
    run(0, &sending);
    hear(1, &command, &result);
    note(1, &command, &result);
}

static void open_end(int fd) {
    set = epoll_create1(0);
    sent = received = 0;
    memset(registered, 0, sizeof registered);
    for (int at = 0; at < NUMBERS; at++) {
        is_open[at] = at == 0;
        close(fd_of(at));
    }
    check(dup2(fd, FIRST) == FIRST && close(fd) == 0, "dup2");
    /* A socket that was polled stays in shared memory although it does not wait. */
    poll(&(struct pollfd){.fd = FIRST, .events = POLLIN}, 1, 0);
}

/* The child's end is closed, after everything sent there has arrived. */
static void ends(void) {
    struct result result = {0};
    int how = pick(ENDS), with_reset = how == 1;
    for (int whose = 0; whose < 2; whose++) {
        struct command count = {.op = COUNT, .number = open_number(whose)};
        run(whose, &count);
    }
    struct command last = {.op = how == 3 ? EXIT : OPS}, first = {.op = CLOSE, .how = with_reset};
    if (how < 2) {
        run(1, &first);
        survives(fd_of(open_number(0)), &result);
    }
    ask(1, &last);
    check(waitpid(child, NULL, 0) == child, "waitpid");
    if (how >= 2) {
        survives(fd_of(open_number(0)), &result);
    }
    printf("%s:%s\n", (const char *[]){"closed", "reset", "_exit", "exit"}[how], result.text);
}

static void episode(int steps) {
    struct sockaddr_in address;
    int listener = listening(&address);
    check(pipe(commands) == 0 && pipe(results) == 0, "pipe");
    fflush(stdout);
    child = fork();
    end = child == 0;
    int fd = end ? socket(AF_INET, SOCK_STREAM, 0) : accept(listener, NULL, NULL);
    check(!end || connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    close(listener);
    open_end(fd);
    for (int at = 0; end;) {
        struct command command;
        struct result result;
        check(read(commands[0], &command, sizeof command) == sizeof command && at++ >= 0, "command");
        carry_out(&command, &result);
        check(write(results[1], &result, sizeof result) == sizeof result, "result");
    }
    for (int at = 0; at < 2; at++) {
        ahead[at] = mutes[at] = deaf[at] = 0;
        all[at] = 0;
        memset(opens[at], 0, sizeof opens[at]);
        opens[at][0] = 1;
    }
    /* Enough to be joined. */
    for (int at = 0; at < TURNS; at++) {
        for (int whose = 0; whose < 2; whose++) {
            struct command give = {.op = SEND, .len = 100}, take = {.op = RECV, .len = 100};
            run(whose, &give);
            run(!whose, &take);
        }
    }
    for (int at = 0; at < steps; at++) {
        step();
    }
    ends();
    close(set);
    for (int at = 0; at < 2; at++) {
        close(commands[at]);
        close(results[at]);
    }
}

int main(int count, char **words) {
    check(count >= 3, "random SEED STEPS");
    seed = (unsigned)atoi(words[1]);
    past = count > 3;
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int steps = atoi(words[2]); steps > 0; steps -= EPISODE) {
        episode(EPISODE);
        printf("----\n");
    }
    puts("done");
    return 0;
}
