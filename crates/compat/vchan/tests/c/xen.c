/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Tries each function against its description in libxenvchan.h. */
#include "test.h"

#include <libxenvchan.h>

/* A logger as Xen's programs make one. */
struct xentoollog_logger {
    void (*vmessage)(struct xentoollog_logger *, int level, int errnoval, const char *context, const char *format, va_list);
    void (*progress)(struct xentoollog_logger *, const char *, const char *, int, unsigned long, unsigned long);
    void (*destroy)(struct xentoollog_logger *);
};

static char heard[1024];
static int heard_errno;

static void hear(struct xentoollog_logger *logger, int level, int errnoval, const char *context, const char *format,
                 va_list al)
{
    (void)logger, (void)level, (void)context;
    heard_errno = errnoval;
    vsnprintf(heard, sizeof(heard), format, al);
}

static struct xentoollog_logger logger = {.vmessage = hear};

struct pair {
    struct libxenvchan *server, *client;
};

static struct pair make(const char *path, size_t read_min, size_t write_min)
{
    struct pair pair;
    CLAIM(pair.server = libxenvchan_server_init(NULL, 1, path, read_min, write_min));
    CLAIM(pair.client = libxenvchan_client_init(NULL, 1, path));
    UNTIL(libxenvchan_is_open(pair.server) == 1);
    CLAIM(libxenvchan_is_open(pair.client) == 1);
    return pair;
}

static void end(struct pair pair)
{
    libxenvchan_close(pair.client);
    libxenvchan_close(pair.server);
}

static void set_up(void)
{
    CLAIM(!libxenvchan_client_init(&logger, 1, "set/up"));
    CLAIM(errno == ENOENT && heard_errno == ENOENT && strstr(heard, "no vchan to domain 1"));
    CLAIM(!libxenvchan_client_init(&logger, 99, "set%s/up"));
    CLAIM(errno == ENXIO && strstr(heard, "`domain 99 ROUTE`"));
    CLAIM(!libxenvchan_server_init(&logger, -1, "x", 0, 0) && errno == EINVAL);
    CLAIM(!libxenvchan_server_init(&logger, 1, "", 0, 0) && errno == EINVAL);
    CLAIM(!libxenvchan_server_init(&logger, 1, NULL, 0, 0) && errno == EFAULT);
    CLAIM(!libxenvchan_server_init(&logger, 1, "x", (size_t)1 << 31, 0) && strstr(heard, "2147483648 bytes"));
    struct libxenvchan *server = libxenvchan_server_init(&logger, 1, "set/up", 0, 0);
    CLAIM(server && server->is_server && !server->blocking && !server->server_persist);
    CLAIM(strcmp(server->xs_path, "set/up") == 0 && server->read.order == 12 && server->write.order == 12);
    CLAIM(!libxenvchan_server_init(&logger, 1, "set/up", 0, 0) && errno == EADDRINUSE);
    /* The same path, as the client knows it. */
    struct libxenvchan *client = libxenvchan_client_init(&logger, 1, "/local/domain/1/set/up");
    CLAIM(client && !client->is_server);
    libxenvchan_close(client);
    libxenvchan_close(server);
    libxenvchan_close(NULL);
    CLAIM(!libxenvchan_client_init(&logger, 1, "set/up") && errno == ENOENT);
    REFUSES(EFAULT, "null", libxenvchan_read(NULL, heard, 1));
    CLAIM(libxenvchan_is_open(NULL) == 0);
}

static void server_writes_before_its_client_comes(void)
{
    char text[16] = "";
    struct libxenvchan *server = libxenvchan_server_init(NULL, 1, "early", 0, 0);
    CLAIM(server);
    int fd = libxenvchan_fd_for_select(server);
    CLAIM(fd >= 0 && !readable(fd, 0));
    CLAIM(libxenvchan_is_open(server) == 2 && libxenvchan_data_ready(server) == 0);
    CLAIM(libxenvchan_read(server, text, 5) == 0 && libxenvchan_recv(server, text, 5) == 0);
    int room = libxenvchan_buffer_space(server);
    CLAIM(room == 4096);
    CLAIM(libxenvchan_write(server, "early ", 6) == 6 && libxenvchan_send(server, "bird", 5) == 5);
    CLAIM(libxenvchan_buffer_space(server) == room - 11);
    struct libxenvchan *client = libxenvchan_client_init(NULL, 1, "early");
    CLAIM(client);
    CLAIM(readable(fd, 30000) && libxenvchan_wait(server) == 0 && libxenvchan_is_open(server) == 1);
    client->blocking = 1;
    CLAIM(libxenvchan_recv(client, text, 11) == 11 && strcmp(text, "early bird") == 0);
    UNTIL(libxenvchan_buffer_space(server) == room);
    end((struct pair){server, client});
}

static void calls_do_not_wait_unless_asked(void)
{
    static unsigned char out[10000], in[10000];
    struct pair p = make("ways", 4096, 4096);
    CLAIM(libxenvchan_read(p.server, in, sizeof(in)) == 0 && libxenvchan_recv(p.server, in, 8) == 0);
    CLAIM(libxenvchan_write(p.server, out, 0) == 0);
    fill(out, sizeof(out), 7);
    CLAIM(libxenvchan_buffer_space(p.server) == 4096);
    /* As much as fits of a stream; all or nothing of a packet. */
    CLAIM(libxenvchan_send(p.server, out, 3000) == 3000);
    CLAIM(libxenvchan_send(p.server, out, 3000) == 0 && libxenvchan_buffer_space(p.server) == 1096);
    CLAIM(libxenvchan_write(p.server, out + 3000, 3000) == 1096 && libxenvchan_write(p.server, out, 1) == 0);
    REFUSES(EMSGSIZE, "4097 bytes at once", libxenvchan_send(p.server, out, 4097));
    REFUSES(EINVAL, "2147483647", libxenvchan_write(p.server, out, (size_t)1 << 31));
    CLAIM(libxenvchan_data_ready(p.client) == 4096);
    CLAIM(libxenvchan_recv(p.client, in, 4096) == 4096 && memcmp(in, out, 4096) == 0);
    CLAIM(libxenvchan_buffer_space(p.server) == 4096);
    CLAIM(libxenvchan_write(p.server, out, 10) == 10 && libxenvchan_recv(p.client, in, 11) == 0);
    CLAIM(libxenvchan_data_ready(p.client) == 10 && libxenvchan_read(p.client, in, sizeof(in)) == 10);
    REFUSES(EMSGSIZE, "where the ring has 4096", libxenvchan_recv(p.client, in, 4097));
    end(p);
}

static void rings_are_as_large_as_the_server_asked(void)
{
    struct pair p = make("large", 1 << 20, 300000);
    CLAIM(libxenvchan_buffer_space(p.client) == 1 << 20 && libxenvchan_buffer_space(p.server) == 1 << 19);
    CLAIM(p.server->read.order == 20 && p.server->write.order == 19);
    CLAIM(p.client->read.order == 19 && p.client->write.order == 20);
    end(p);
}

static void descriptor_is_quiet_until_something_changes(void)
{
    char bytes[4096] = {0};
    struct pair p = make("quiet", 4096, 4096);
    int fd = libxenvchan_fd_for_select(p.client), server_fd = libxenvchan_fd_for_select(p.server);
    CLAIM(fd == libxenvchan_fd_for_select(p.client));
    CLAIM(libxenvchan_data_ready(p.client) == 0 && !readable(fd, 0));
    CLAIM(libxenvchan_write(p.server, "1234", 4) == 4);
    CLAIM(readable(fd, 30000) && readable(fd, 0));
    CLAIM(libxenvchan_wait(p.client) == 0 && libxenvchan_data_ready(p.client) == 4);
    /* Unread bytes that are known wake nobody; further bytes do. */
    CLAIM(!readable(fd, 20));
    CLAIM(libxenvchan_write(p.server, "5678", 4) == 4);
    CLAIM(readable(fd, 30000) && libxenvchan_wait(p.client) == 0 && libxenvchan_data_ready(p.client) == 8);
    CLAIM(!readable(fd, 20));
    CLAIM(libxenvchan_read(p.client, bytes, 100) == 8 && !readable(fd, 20));
    /* The rest of a packet that was there in part. */
    CLAIM(libxenvchan_write(p.server, "12", 2) == 2 && readable(fd, 30000) && libxenvchan_wait(p.client) == 0);
    CLAIM(libxenvchan_recv(p.client, bytes, 4) == 0 && !readable(fd, 20));
    CLAIM(libxenvchan_write(p.server, "34", 2) == 2 && readable(fd, 30000) && libxenvchan_wait(p.client) == 0);
    CLAIM(libxenvchan_recv(p.client, bytes, 4) == 4 && memcmp(bytes, "1234", 4) == 0);
    /* Room, once the server has met a lack of it. */
    CLAIM(libxenvchan_data_ready(p.client) == 0);
    while (readable(server_fd, 0))
        CLAIM(libxenvchan_wait(p.server) == 0);
    CLAIM(libxenvchan_write(p.server, bytes, sizeof(bytes)) == 4096 && libxenvchan_write(p.server, bytes, 1) == 0);
    CLAIM(!readable(server_fd, 20));
    CLAIM(libxenvchan_read(p.client, bytes, sizeof(bytes)) == 4096);
    CLAIM(readable(server_fd, 30000) && libxenvchan_wait(p.server) == 0 && libxenvchan_buffer_space(p.server) == 4096);
    /* The end. */
    while (readable(server_fd, 0))
        CLAIM(libxenvchan_wait(p.server) == 0);
    libxenvchan_close(p.client);
    CLAIM(readable(server_fd, 30000) && libxenvchan_wait(p.server) == 0 && libxenvchan_is_open(p.server) == 0);
    libxenvchan_close(p.server);
}

static void *write_later(void *arg)
{
    poll(NULL, 0, 30);
    CLAIM(libxenvchan_write(arg, "late", 4) == 4);
    return NULL;
}

static void *read_later(void *arg)
{
    char bytes[4096];
    poll(NULL, 0, 30);
    CLAIM(libxenvchan_read(arg, bytes, sizeof(bytes)) == 4096);
    return NULL;
}

static void wait_ends_when_data_or_room_or_the_end_comes(void)
{
    char bytes[4096] = {0};
    pthread_t thread;
    struct pair p = make("wait", 4096, 4096);
    CLAIM(pthread_create(&thread, NULL, write_later, p.server) == 0);
    while (libxenvchan_data_ready(p.client) < 4)
        CLAIM(libxenvchan_wait(p.client) == 0);
    CLAIM(pthread_join(thread, NULL) == 0);
    CLAIM(libxenvchan_read(p.client, bytes, 4) == 4 && memcmp(bytes, "late", 4) == 0);
    CLAIM(libxenvchan_write(p.server, bytes, sizeof(bytes)) == 4096 && libxenvchan_buffer_space(p.server) == 0);
    CLAIM(pthread_create(&thread, NULL, read_later, p.client) == 0);
    while (libxenvchan_buffer_space(p.server) == 0)
        CLAIM(libxenvchan_wait(p.server) == 0);
    CLAIM(pthread_join(thread, NULL) == 0);
    libxenvchan_close(p.server);
    UNTIL(libxenvchan_is_open(p.client) == 0);
    /* The original would wait for ever. */
    REFUSES(EPIPE, "closed", libxenvchan_wait(p.client));
    libxenvchan_close(p.client);
}

static void what_was_written_can_be_read_after_the_end(void)
{
    char bytes[16];
    struct pair p = make("end", 0, 0);
    CLAIM(libxenvchan_write(p.client, "last words", 10) == 10);
    libxenvchan_close(p.client);
    UNTIL(libxenvchan_is_open(p.server) == 0);
    CLAIM(libxenvchan_data_ready(p.server) == 10);
    p.server->blocking = 1;
    CLAIM(libxenvchan_recv(p.server, bytes, 4) == 4 && memcmp(bytes, "last", 4) == 0);
    REFUSES(EPIPE, "closed", libxenvchan_write(p.server, "x", 1));
    CLAIM(libxenvchan_read(p.server, bytes, 16) == 6 && memcmp(bytes, " words", 6) == 0);
    REFUSES(EPIPE, "closed", libxenvchan_read(p.server, bytes, 16));
    REFUSES(EPIPE, "closed", libxenvchan_recv(p.server, bytes, 16));
    REFUSES(EPIPE, "closed", libxenvchan_send(p.server, bytes, 1));
    libxenvchan_close(p.server);
}

static void server_takes_the_next_client(void)
{
    char bytes[16];
    struct pair p = make("next", 0, 0);
    CLAIM(libxenvchan_write(p.client, "one", 3) == 3);
    libxenvchan_close(p.client);
    UNTIL(libxenvchan_is_open(p.server) == 0);
    CLAIM(p.client = libxenvchan_client_init(NULL, 1, "next"));
    while (libxenvchan_is_open(p.server) != 1)
        CLAIM(libxenvchan_wait(p.server) == 0);
    CLAIM(libxenvchan_write(p.client, "two", 3) == 3);
    UNTIL(libxenvchan_data_ready(p.server) == 6);
    CLAIM(libxenvchan_recv(p.server, bytes, 4) == 4 && memcmp(bytes, "onet", 4) == 0);
    CLAIM(libxenvchan_read(p.server, bytes, 16) == 2 && memcmp(bytes, "wo", 2) == 0);
    CLAIM(libxenvchan_write(p.server, "2", 1) == 1);
    UNTIL(libxenvchan_data_ready(p.client) == 1);
    end(p);
}

static void server_that_persists_is_open_always(void)
{
    char bytes[16];
    struct libxenvchan *server = libxenvchan_server_init(NULL, 1, "persist", 0, 0), *client;
    CLAIM(server);
    server->server_persist = 1;
    CLAIM(libxenvchan_is_open(server) == 1 && libxenvchan_read(server, bytes, 1) == 0);
    for (int round = 0; round < 3; round++) {
        CLAIM(libxenvchan_write(server, "hello", 5) == 5);
        CLAIM(client = libxenvchan_client_init(NULL, 1, "persist"));
        client->blocking = 1;
        CLAIM(libxenvchan_recv(client, bytes, 5) == 5 && memcmp(bytes, "hello", 5) == 0);
        CLAIM(libxenvchan_write(client, "bye", 3) == 3);
        libxenvchan_close(client);
        server->blocking = 1;
        CLAIM(libxenvchan_recv(server, bytes, 3) == 3 && memcmp(bytes, "bye", 3) == 0);
        server->blocking = 0;
        /* The client went, and the state is as if none had come. */
        UNTIL(libxenvchan_read(server, bytes, 1) == 0 && libxenvchan_buffer_space(server) == 4096);
        CLAIM(libxenvchan_is_open(server) == 1);
    }
    libxenvchan_close(server);
}

/* A server that polls, and a client whose first bytes come with the event of its arrival: both are reported. */
static void first_bytes_are_told_beside_the_news(void)
{
    char byte;
    struct libxenvchan *server = libxenvchan_server_init(NULL, 1, "first", 0, 0), *client;
    CLAIM(server);
    int fd = libxenvchan_fd_for_select(server);
    for (int round = 0; round < 50; round++) {
        CLAIM(client = libxenvchan_client_init(NULL, 1, "first"));
        CLAIM(libxenvchan_write(client, "x", 1) == 1);
        while (libxenvchan_is_open(server) != 1)
            CLAIM(libxenvchan_wait(server) == 0);
        CLAIM(readable(fd, 30000) && libxenvchan_wait(server) == 0);
        UNTIL(libxenvchan_read(server, &byte, 1) == 1);
        libxenvchan_close(client);
        UNTIL(libxenvchan_is_open(server) == 0);
    }
    libxenvchan_close(server);
}

#define MANY 64

static void many_at_once(void)
{
    static struct pair pairs[MANY];
    char path[32], bytes[4];
    for (int i = 0; i < MANY; i++) {
        snprintf(path, sizeof(path), "data/vchan/1/%d", i);
        pairs[i] = make(path, 0, 0);
    }
    for (int i = 0; i < MANY; i++)
        CLAIM(libxenvchan_send(pairs[i].client, &i, sizeof(i)) == sizeof(i));
    for (int i = 0; i < MANY; i++) {
        CLAIM(libxenvchan_recv(pairs[i].server, bytes, 4) == 4 && memcmp(bytes, &i, 4) == 0);
        end(pairs[i]);
    }
}

#define BULK 20000000

static void *pump(void *arg)
{
    static unsigned char out[BULK];
    fill(out, BULK, 3);
    /* Much more than the ring holds: the call returns when everything is written. */
    CLAIM(libxenvchan_write(arg, out, BULK) == BULK);
    for (int i = 0; i < 1000; i++)
        CLAIM(libxenvchan_send(arg, out + i, 3000) == 3000);
    return NULL;
}

static void *drain(void *arg)
{
    static unsigned char in[BULK], want[BULK];
    size_t done = 0;
    fill(want, BULK, 3);
    while (done < BULK) {
        int len = libxenvchan_read(arg, in + done, BULK - done);
        CLAIM(len > 0);
        done += len;
    }
    CLAIM(memcmp(in, want, BULK) == 0);
    for (int i = 0; i < 1000; i++)
        CLAIM(libxenvchan_recv(arg, in, 3000) == 3000 && memcmp(in, want + i, 3000) == 0);
    return NULL;
}

static void one_thread_reads_while_another_writes(void)
{
    pthread_t threads[4];
    struct pair p = make("threads", 4096, 65536);
    p.client->blocking = p.server->blocking = 1;
    CLAIM(pthread_create(&threads[0], NULL, pump, p.client) == 0);
    CLAIM(pthread_create(&threads[1], NULL, drain, p.server) == 0);
    for (int i = 0; i < 2; i++)
        CLAIM(pthread_join(threads[i], NULL) == 0);
    CLAIM(pthread_create(&threads[2], NULL, pump, p.server) == 0);
    CLAIM(pthread_create(&threads[3], NULL, drain, p.client) == 0);
    for (int i = 2; i < 4; i++)
        CLAIM(pthread_join(threads[i], NULL) == 0);
    end(p);
}

int main(void)
{
    set_up();
    server_writes_before_its_client_comes();
    calls_do_not_wait_unless_asked();
    rings_are_as_large_as_the_server_asked();
    descriptor_is_quiet_until_something_changes();
    wait_ends_when_data_or_room_or_the_end_comes();
    what_was_written_can_be_read_after_the_end();
    server_takes_the_next_client();
    server_that_persists_is_open_always();
    first_bytes_are_told_beside_the_news();
    many_at_once();
    one_thread_reads_while_another_writes();
    return 0;
}
