/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * One thread, one poll loop, many peers: what one client says, all others hear.
 *
 *     chat host local:/tmp/chat.sock
 *     chat join local:/tmp/chat.sock ann
 *     chat join local:/tmp/chat.sock ben
 *
 * The rule of every loop like this: a descriptor that polled readable means "try again"; try, with a timeout of 0, until
 * that says -EAGAIN; only then poll again.
 */
#include "example.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#define GUESTS_MOST 32
#define LINE_MOST 1024

struct guest {
    tombolo_channel *channel;
    char name[32]; /* the first message of each guest; empty until it came */
};

static struct guest guests[GUESTS_MOST];
static nfds_t present;
static int anybody; /* The host goes when its last guest does, but not before the first came. */

static void wait_for(struct pollfd *fds, nfds_t count)
{
    while (poll(fds, count, -1) < 0)
        if (errno != EINTR)
            die(1, "poll: %s", strerror(errno));
}

/* To all but one. Who does not listen for so long that the ring is full misses a line; nobody waits for it. */
static void tell_others(nfds_t but, const char *line, size_t len)
{
    for (nfds_t i = 0; i < present; i++)
        if (i != but)
            tombolo_messages_send(guests[i].channel, line, len, 0);
}

static void admit(tombolo_listener *listener, struct pollfd *fds)
{
    tombolo_channel *channel;

    while (tombolo_listener_accept(listener, 0, &channel) == 0) {
        int fd = tombolo_channel_poll_fd(channel, TOMBOLO_READ);
        if (present == GUESTS_MOST || fd < 0) {
            tombolo_channel_close(channel);
            continue;
        }
        anybody = 1;
        guests[present] = (struct guest){.channel = channel};
        fds[++present] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
}

/* All that one guest has said by now; says whether it is still there. */
static int hear(nfds_t i)
{
    char said[LINE_MOST], line[sizeof guests[i].name + 2 + LINE_MOST];
    ssize_t len;

    while ((len = tombolo_messages_recv(guests[i].channel, said, sizeof said, 0)) >= 0) {
        if (guests[i].name[0] == '\0') {
            snprintf(guests[i].name, sizeof guests[i].name, "%.*s", (int)len, said);
            printf("%s is here\n", guests[i].name);
            continue;
        }
        int whole = snprintf(line, sizeof line, "%s: %.*s", guests[i].name, (int)len, said);
        tell_others(i, line, (size_t)whole);
    }
    return len == -EAGAIN;
}

static void host(const char *address)
{
    struct pollfd fds[1 + GUESTS_MOST];
    tombolo_listener *listener;

    setvbuf(stdout, NULL, _IOLBF, 0);
    check(tombolo_messages_listen(address, NULL, &listener), address);
    fds[0] = (struct pollfd){.fd = (int)check(tombolo_listener_poll_fd(listener), "poll_fd"), .events = POLLIN};
    do {
        wait_for(fds, 1 + present);
        for (nfds_t i = 0; i < present;) {
            if (fds[1 + i].revents == 0 || hear(i)) {
                i++;
                continue;
            }
            printf("%s left\n", guests[i].name);
            tombolo_channel_close(guests[i].channel);
            guests[i] = guests[--present];
            fds[1 + i] = fds[1 + present];
        }
        if (fds[0].revents != 0)
            admit(listener, fds);
    } while (present > 0 || !anybody);
    tombolo_listener_close(listener);
}

/* All that the host has said by now; says whether it is still there. */
static int print_all(tombolo_channel *channel)
{
    char line[2 * LINE_MOST];
    ssize_t len;

    while ((len = tombolo_messages_recv(channel, line, sizeof line, 0)) >= 0)
        printf("%.*s\n", (int)len, line);
    if (len != -EAGAIN && len != -ENODATA)
        check(len, "recv");
    return len == -EAGAIN;
}

static void join(const char *address, const char *name)
{
    tombolo_channel *channel;
    char line[LINE_MOST];
    ssize_t len;

    setvbuf(stdout, NULL, _IOLBF, 0);
    check(tombolo_messages_connect(address, &patient, &channel), address);
    check(tombolo_messages_send(channel, name, strlen(name), 10 * SECONDS), "send");

    struct pollfd fds[] = {
        {.fd = (int)check(tombolo_channel_poll_fd(channel, TOMBOLO_READ), "poll_fd"), .events = POLLIN},
        {.fd = STDIN_FILENO, .events = POLLIN},
    };
    for (;;) {
        wait_for(fds, 2);
        if (fds[0].revents != 0 && !print_all(channel))
            break;
        if (fds[1].revents == 0)
            continue;
        if ((len = read(STDIN_FILENO, line, sizeof line)) <= 0)
            break;
        if (line[len - 1] == '\n')
            len--;
        check(tombolo_messages_send(channel, line, (size_t)len, 10 * SECONDS), "send");
    }
    tombolo_channel_close(channel);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "host") == 0)
        host(argv[2]);
    else if (argc == 4 && strcmp(argv[1], "join") == 0 && argv[3][0] != '\0')
        join(argv[2], argv[3]);
    else
        die(2, "usage: chat host ADDRESS\n       chat join ADDRESS NAME < LINES");
}
