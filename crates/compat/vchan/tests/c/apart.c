/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Tries each function against its description in the headers, by two programs that are one end each: in two processes,
 * containers, machines or domains. By default this has Xen's spelling, with -DQUBES that of Qubes.
 *
 *   apart serve PEER OWN [MANY]     apart join PEER OWN [MANY]
 *
 * PEER and OWN are the domains' numbers, MANY is the number of vchans at once: 30 by default.
 */
#include "test.h"

#include <fcntl.h>
#ifdef QUBES
#include <libvchan.h>
#define V(function) libvchan_##function
typedef libvchan_t vchan;
#else
#include <libxenvchan.h>
#define V(function) libxenvchan_##function
typedef struct libxenvchan vchan;

struct xentoollog_logger {
    void (*vmessage)(struct xentoollog_logger *, int, int, const char *, const char *, va_list);
};

static int heard;

static void hear(struct xentoollog_logger *logger, int level, int number, const char *context, const char *format,
                 va_list al)
{
    (void)logger, (void)level, (void)context, (void)format, (void)al;
    heard = number;
}

static struct xentoollog_logger logger = {.vmessage = hear};
#endif

#define RING 4096
#define BULK 1000000
#define MOST 30

static int serves, peer, own, many = MOST;
static vchan *turns;
static char bytes[2 * RING];
static unsigned char bulk[BULK], want[BULK];

static void blocking(vchan *vchan, int on)
{
#ifdef QUBES
    libvchan_set_blocking(vchan, on);
#else
    vchan->blocking = on;
#endif
}

/* Makes a server whose calls do not wait. */
static vchan *serve(int port)
{
    vchan *made;
#ifdef QUBES
    made = libvchan_server_init(peer, port, RING, RING);
#else
    char path[64];
    snprintf(path, sizeof(path), "data/vchan/%d/%d", peer, port);
    made = libxenvchan_server_init(NULL, peer, path, RING, RING);
#endif
    CLAIM(made);
    blocking(made, 0);
    return made;
}

static vchan *look_for(int port)
{
#ifdef QUBES
    return libvchan_client_init(peer, port);
#else
    char path[64];
    snprintf(path, sizeof(path), "/local/domain/%d/data/vchan/%d/%d", peer, own, port);
    return libxenvchan_client_init(&logger, peer, path);
#endif
}

/* Makes a client, whose calls do not wait, of a server that is there. */
static vchan *join(int port)
{
    vchan *made = look_for(port);
    CLAIM(made && V(is_open)(made) == 1);
    blocking(made, 0);
    return made;
}

/* Both ends wait until the other has come as far. */
static void meet(void)
{
    char mark = 'm';
    CLAIM(V(write)(turns, &mark, 1) == 1 && V(read)(turns, &mark, 1) == 1 && mark == 'm');
}

static void await_client(vchan *v)
{
    while (V(is_open)(v) != 1)
        CLAIM(V(wait)(v) == 0);
}

static void drain_news(vchan *v, int fd)
{
    while (readable(fd, 0))
        CLAIM(V(wait)(v) == 0);
}

static vchan *server_writes_before_its_client_comes(void)
{
    vchan *v;
    if (serves) {
        v = serve(2);
        int fd = V(fd_for_select)(v);
        CLAIM(V(is_open)(v) == 2 && fd >= 0 && !readable(fd, 0) && V(data_ready)(v) == 0);
        CLAIM(V(read)(v, bytes, 5) == 0 && V(recv)(v, bytes, 5) == 0 && V(buffer_space)(v) == RING);
        CLAIM(V(write)(v, "early ", 6) == 6 && V(send)(v, "bird", 4) == 4 && V(buffer_space)(v) == RING - 10);
        meet();
        CLAIM(readable(fd, 30000) && V(wait)(v) == 0);
        await_client(v);
        UNTIL(V(buffer_space)(v) == RING);
    } else {
        meet();
        v = join(2);
        blocking(v, 1);
        CLAIM(V(recv)(v, bytes, 10) == 10 && memcmp(bytes, "early bird", 10) == 0);
        blocking(v, 0);
    }
    meet();
    return v;
}

static void calls_do_not_wait_unless_asked(vchan *v)
{
    fill(want, RING, 7);
    if (!serves)
        CLAIM(V(read)(v, bytes, 8) == 0 && V(recv)(v, bytes, 8) == 0 && V(write)(v, bytes, 0) == 0);
    meet();
    if (serves) {
        CLAIM(V(send)(v, want, 3000) == 3000 && V(send)(v, want, 3000) == 0 && V(buffer_space)(v) == RING - 3000);
        CLAIM(V(write)(v, want + 3000, 3000) == RING - 3000 && V(write)(v, want, 1) == 0);
        REFUSES(EMSGSIZE, "at once", V(send)(v, want, RING + 1));
        REFUSES(EINVAL, "2147483647", V(write)(v, want, (size_t)1 << 31));
        meet();
        meet();
        CLAIM(V(buffer_space)(v) == RING && V(write)(v, want, 10) == 10);
        meet();
    } else {
        meet();
        CLAIM(V(data_ready)(v) == RING && V(recv)(v, bytes, RING) == RING && memcmp(bytes, want, RING) == 0);
        meet();
        meet();
        CLAIM(V(recv)(v, bytes, 11) == 0 && V(data_ready)(v) == 10 && V(read)(v, bytes, sizeof(bytes)) == 10);
        REFUSES(EMSGSIZE, "at once", V(recv)(v, bytes, RING + 1));
    }
    meet();
}

static void calls_wait_where_they_are_to(vchan *v)
{
    fill(want, BULK, 3);
    blocking(v, 1);
    if (serves) {
        /* Much more than the ring holds: the call at the other end returns when everything is written. */
        for (int done = 0, len; done < BULK; done += len)
            CLAIM((len = V(read)(v, bulk + done, BULK - done)) > 0);
        CLAIM(memcmp(bulk, want, BULK) == 0);
    } else {
        CLAIM(V(write)(v, want, BULK) == BULK);
    }
    for (int i = 0; i < 300; i++) {
        if (serves)
            CLAIM(V(send)(v, want + i, 3000) == 3000);
        else
            CLAIM(V(recv)(v, bulk, 3000) == 3000 && memcmp(bulk, want + i, 3000) == 0);
    }
    blocking(v, 0);
    meet();
}

static void descriptor_is_quiet_until_something_changes(vchan *v)
{
    int fd = V(fd_for_select)(v);
    CLAIM(fd >= 0 && fd == V(fd_for_select)(v) && V(data_ready)(v) == 0);
    drain_news(v, fd);
    meet();
    if (serves) {
        CLAIM(V(write)(v, "1234", 4) == 4);
        meet();
        CLAIM(V(write)(v, "5678", 4) == 4);
        meet();
        /* Room, once the program has met a lack of it. */
        drain_news(v, fd);
        while (V(write)(v, bytes, sizeof(bytes)) > 0)
            ;
        CLAIM(!readable(fd, 20));
        meet();
        CLAIM(readable(fd, 30000) && V(wait)(v) == 0);
        UNTIL(V(buffer_space)(v) == RING);
    } else {
        CLAIM(readable(fd, 30000) && V(wait)(v) == 0 && V(data_ready)(v) == 4 && !readable(fd, 20));
        /* Unread bytes that are known cause no event; further bytes do. */
        meet();
        CLAIM(readable(fd, 30000) && V(wait)(v) == 0 && V(data_ready)(v) == 8);
        CLAIM(V(read)(v, bytes, 100) == 8 && memcmp(bytes, "12345678", 8) == 0);
        meet();
        meet();
        for (int done = 0, len; done < RING; done += len)
            CLAIM((len = V(read)(v, bytes, RING)) > 0);
    }
    meet();
}

static void wait_ends_when_data_or_room_comes(vchan *v)
{
    if (serves) {
        poll(NULL, 0, 50);
        CLAIM(V(write)(v, "late", 4) == 4);
        meet();
        CLAIM(V(write)(v, bytes, RING) == RING);
        meet();
        while (V(buffer_space)(v) == 0)
            CLAIM(V(wait)(v) == 0);
    } else {
        while (V(data_ready)(v) < 4)
            CLAIM(V(wait)(v) == 0);
        CLAIM(V(read)(v, bytes, 4) == 4 && memcmp(bytes, "late", 4) == 0);
        meet();
        meet();
        poll(NULL, 0, 50);
        CLAIM(V(recv)(v, bytes, RING) == RING);
    }
    meet();
}

/* Leaves the first client and takes the next, which sends "ow". */
static vchan *server_reads_what_was_left_and_takes_the_next_client(vchan *v)
{
    if (serves) {
        meet();
        while (V(is_open)(v) != 0)
            CLAIM(V(wait)(v) == 0);
        CLAIM(V(data_ready)(v) == 10 && V(recv)(v, bytes, 4) == 4 && memcmp(bytes, "last", 4) == 0);
        REFUSES(EPIPE, "closed", V(write)(v, "x", 1));
        CLAIM(V(read)(v, bytes, 16) == 6 && memcmp(bytes, " words", 6) == 0);
        REFUSES(EPIPE, "closed", V(recv)(v, bytes, 1));
        meet();
        await_client(v);
        meet();
        CLAIM(V(recv)(v, bytes, 4) == 4 && memcmp(bytes, "next", 4) == 0 && V(write)(v, "on", 2) == 2);
    } else {
        CLAIM(V(write)(v, "last words", 10) == 10);
        V(close)(v);
        meet();
        meet();
        v = join(2);
        CLAIM(V(send)(v, "next", 4) == 4);
        meet();
        blocking(v, 1);
        CLAIM(V(recv)(v, bytes, 2) == 2 && memcmp(bytes, "on", 2) == 0);
        blocking(v, 0);
    }
    meet();
    return v;
}

static void client_reads_what_was_left_of_a_server_that_closed(vchan *v)
{
    if (serves) {
        CLAIM(V(write)(v, "bye", 3) == 3);
        V(close)(v);
    } else {
        while (V(is_open)(v) != 0)
            CLAIM(V(wait)(v) == 0);
        CLAIM(V(read)(v, bytes, 16) == 3 && memcmp(bytes, "bye", 3) == 0);
        REFUSES(EPIPE, "closed", V(read)(v, bytes, 1));
        REFUSES(EPIPE, "closed", V(send)(v, bytes, 1));
        /* The original waits for ever. */
        REFUSES(EPIPE, "closed", V(wait)(v));
        V(close)(v);
    }
    meet();
}

static void many_at_once(void)
{
    vchan *all[MOST];
    for (int i = 0; serves && i < many; i++)
        all[i] = serve(10 + i);
    meet();
    for (int i = 0; !serves && i < many; i++) {
        all[i] = join(10 + i);
        CLAIM(V(send)(all[i], &i, sizeof(i)) == sizeof(i));
    }
    meet();
    for (int i = 0, number; i < many; i++) {
        if (serves) {
            await_client(all[i]);
            CLAIM(V(recv)(all[i], &number, sizeof(number)) == sizeof(number) && number == i);
        }
    }
    meet();
    for (int i = 0; i < many; i++)
        V(close)(all[i]);
    meet();
}

static void what_makes_no_sense_is_refused(void)
{
    REFUSES(EFAULT, "null", V(read)(NULL, bytes, 1));
    REFUSES(EFAULT, "null", V(write)(turns, NULL, 1));
    CLAIM(V(is_open)(NULL) == 0);
    V(close)(NULL);
    int theirs = peer;
    peer = -1;
    CLAIM(!look_for(3) && errno == EINVAL);
    peer = theirs;
}

#ifdef QUBES

/* Clients of the other spelling learn at once that there is no server; these wait, or look in the background. */
static void client_waits_for_its_server(void)
{
    vchan *v;
    meet();
    if (serves) {
        poll(NULL, 0, 50);
        v = libvchan_server_init(peer, 4, 0, 0);
        /* It waits unless it is set not to. */
        CLAIM(v && libvchan_recv(v, bytes, 4) == 4 && memcmp(bytes, "ping", 4) == 0);
        CLAIM(libvchan_send(v, "pong", 4) == 4);
    } else {
        CLAIM((v = look_for(4)) && libvchan_write(v, "ping", 4) == 4 && libvchan_recv(v, bytes, 4) == 4);
        CLAIM(memcmp(bytes, "pong", 4) == 0);
    }
    meet();
    libvchan_close(v);
}

static void client_finds_its_server_in_the_background(void)
{
    vchan *v;
    int fd = -1;
    if (serves) {
        meet();
        v = serve(5);
        blocking(v, 1);
        CLAIM(libvchan_recv(v, bytes, 4) == 4 && memcmp(bytes, "late", 4) == 0);
    } else {
        CLAIM((v = libvchan_client_init_async(peer, 5, &fd)) && fd >= 0 && !readable(fd, 20));
        CLAIM(libvchan_client_init_async_finish(v, true) == 1 && libvchan_is_open(v) == VCHAN_WAITING);
        CLAIM(libvchan_data_ready(v) == 0 && libvchan_buffer_space(v) == 0 && libvchan_wait(v) == 0);
        REFUSES(EAGAIN, "not connected yet", libvchan_read(v, bytes, 1));
        REFUSES(EAGAIN, "not connected yet", libvchan_fd_for_select(v));
        meet();
        CLAIM(readable(fd, 30000) && libvchan_client_init_async_finish(v, false) == 0);
        CLAIM(fcntl(fd, F_GETFD) == -1 && errno == EBADF);
        CLAIM(libvchan_is_open(v) == VCHAN_CONNECTED && libvchan_read(v, bytes, 1) == 0);
        CLAIM(libvchan_send(v, "late", 4) == 4);
    }
    meet();
    libvchan_close(v);
}

static void spelling(void)
{
    client_waits_for_its_server();
    client_finds_its_server_in_the_background();
}

#else

static void client_without_a_server_is_told(void)
{
    heard = 0;
    CLAIM(serves || (!look_for(4) && errno == ENOENT && heard == ENOENT));
}

static void server_that_persists_is_open_always(void)
{
    vchan *v = serves ? serve(5) : NULL;
    if (serves)
        v->server_persist = 1;
    for (int round = 0; round < 3; round++) {
        if (serves) {
            CLAIM(v->is_server && libxenvchan_is_open(v) == 1 && libxenvchan_write(v, "hello", 5) == 5);
            meet();
            v->blocking = 1;
            CLAIM(libxenvchan_recv(v, bytes, 3) == 3 && memcmp(bytes, "bye", 3) == 0);
            v->blocking = 0;
            meet();
            /* The client went, and the state is as if none had come. */
            UNTIL(libxenvchan_read(v, bytes, 1) == 0 && libxenvchan_buffer_space(v) == RING);
            CLAIM(libxenvchan_is_open(v) == 1);
        } else {
            meet();
            v = join(5);
            v->blocking = 1;
            CLAIM(!v->is_server && libxenvchan_recv(v, bytes, 5) == 5 && memcmp(bytes, "hello", 5) == 0);
            CLAIM(libxenvchan_write(v, "bye", 3) == 3);
            libxenvchan_close(v);
            meet();
        }
    }
    if (serves)
        libxenvchan_close(v);
    meet();
}

static void spelling(void)
{
    client_without_a_server_is_told();
    server_that_persists_is_open_always();
}

#endif

int main(int argc, char **argv)
{
    CLAIM(argc >= 4);
    serves = strcmp(argv[1], "serve") == 0, peer = atoi(argv[2]), own = atoi(argv[3]);
    if (argc > 4)
        many = atoi(argv[4]);
    CLAIM(many > 0 && many <= MOST);
    if (serves)
        turns = serve(1);
    else
        UNTIL(turns = look_for(1));
    blocking(turns, 1);
    meet();
    vchan *v = server_writes_before_its_client_comes();
    calls_do_not_wait_unless_asked(v);
    calls_wait_where_they_are_to(v);
    descriptor_is_quiet_until_something_changes(v);
    wait_ends_when_data_or_room_comes(v);
    v = server_reads_what_was_left_and_takes_the_next_client(v);
    client_reads_what_was_left_of_a_server_that_closed(v);
    spelling();
    many_at_once();
    what_makes_no_sense_is_refused();
    meet();
    V(close)(turns);
    printf("every function of this spelling did what its header says\n");
    return 0;
}
