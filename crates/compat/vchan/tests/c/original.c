/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Both ends by the layout of the original, over a Xen in this process. */
#include "test.h"

#include <libvchan.h>
#include <libxenvchan.h>

#define BULK 3000000

static void *pump(void *arg)
{
    static unsigned char out[BULK];
    fill(out, BULK, 3);
    CLAIM(libxenvchan_write(arg, out, BULK) == BULK);
    return NULL;
}

static void talk(size_t read_min, size_t write_min)
{
    static unsigned char in[BULK], want[BULK];
    char bytes[16];
    pthread_t thread;
    CLAIM(!libxenvchan_client_init(NULL, 1, "/local/domain/1/a/path") && errno == ENOENT);
    struct libxenvchan *server = libxenvchan_server_init(NULL, 1, "a/path", read_min, write_min), *client;
    CLAIM(server && libxenvchan_is_open(server) == 2);
    CLAIM(1u << server->read.order >= read_min && 1u << server->write.order >= write_min);
    int fd = libxenvchan_fd_for_select(server);
    CLAIM(!readable(fd, 0) && libxenvchan_read(server, in, 1) == 0);
    CLAIM(libxenvchan_write(server, "early", 5) == 5);
    CLAIM(client = libxenvchan_client_init(NULL, 1, "/local/domain/1/a/path"));
    CLAIM(readable(fd, 30000) && libxenvchan_wait(server) == 0);
    while (libxenvchan_is_open(server) != 1)
        CLAIM(libxenvchan_wait(server) == 0);
    CLAIM(libxenvchan_is_open(client) == 1 && libxenvchan_data_ready(client) == 5);
    CLAIM(libxenvchan_recv(client, bytes, 6) == 0 && libxenvchan_recv(client, bytes, 5) == 5);
    CLAIM(memcmp(bytes, "early", 5) == 0);

    /* The descriptor: quiet until something changes. */
    CLAIM(libxenvchan_data_ready(server) == 0);
    while (readable(fd, 0))
        CLAIM(libxenvchan_wait(server) == 0 && libxenvchan_data_ready(server) == 0);
    CLAIM(libxenvchan_send(client, "1234", 4) == 4 && readable(fd, 30000) && libxenvchan_wait(server) == 0);
    CLAIM(libxenvchan_data_ready(server) == 4 && !readable(fd, 20));
    CLAIM(libxenvchan_send(client, "5678", 4) == 4 && readable(fd, 30000) && libxenvchan_wait(server) == 0);
    CLAIM(libxenvchan_recv(server, bytes, 8) == 8 && memcmp(bytes, "12345678", 8) == 0);
    REFUSES(EMSGSIZE, "at once", libxenvchan_send(client, want, 2000000));

    /* Much more than the ring holds, in both directions in turn. */
    fill(want, BULK, 3);
    server->blocking = client->blocking = 1;
    for (int round = 0; round < 2; round++) {
        struct libxenvchan *from = round ? server : client, *to = round ? client : server;
        CLAIM(pthread_create(&thread, NULL, pump, from) == 0);
        for (size_t done = 0; done < BULK;) {
            int len = libxenvchan_read(to, in + done, BULK - done);
            CLAIM(len > 0);
            done += len;
        }
        CLAIM(pthread_join(thread, NULL) == 0 && memcmp(in, want, BULK) == 0);
    }

    /* The end, and the next client, which finds what was left. */
    CLAIM(libxenvchan_write(client, "last", 4) == 4);
    libxenvchan_close(client);
    CLAIM(libxenvchan_is_open(server) == 0 && libxenvchan_data_ready(server) == 4);
    CLAIM(libxenvchan_recv(server, bytes, 4) == 4 && memcmp(bytes, "last", 4) == 0);
    REFUSES(EPIPE, "has closed", libxenvchan_read(server, bytes, 1));
    REFUSES(EPIPE, "has closed", libxenvchan_write(server, bytes, 1));
    server->server_persist = 1, server->blocking = 0;
    CLAIM(libxenvchan_is_open(server) == 1 && libxenvchan_read(server, bytes, 1) == 0);
    CLAIM(libxenvchan_write(server, "hello", 5) == 5);
    CLAIM(client = libxenvchan_client_init(NULL, 1, "/local/domain/1/a/path"));
    server->server_persist = 0;
    CLAIM(libxenvchan_is_open(server) == 1);
    CLAIM(libxenvchan_read(client, bytes, 16) == 5 && memcmp(bytes, "hello", 5) == 0);
    libxenvchan_close(server);
    CLAIM(libxenvchan_is_open(client) == 0);
    REFUSES(EPIPE, "has closed", libxenvchan_wait(client));
    libxenvchan_close(client);
    CLAIM(!libxenvchan_server_init(NULL, 1, "a/path", 2000000, 0) && errno == EINVAL);
}

static void *serve_later(void *arg)
{
    poll(NULL, 0, 50);
    CLAIM(*(libvchan_t **)arg = libvchan_server_init(1, 7, 4096, 4096));
    return NULL;
}

static void qubes(void)
{
    char bytes[4];
    int fd;
    pthread_t thread;
    libvchan_t *server = NULL, *client;
    CLAIM(pthread_create(&thread, NULL, serve_later, &server) == 0);
    CLAIM(client = libvchan_client_init(1, 7));
    CLAIM(pthread_join(thread, NULL) == 0 && libvchan_is_open(server) == VCHAN_CONNECTED);
    CLAIM(libvchan_send(client, "ping", 4) == 4 && libvchan_recv(server, bytes, 4) == 4);
    libvchan_close(client);
    CLAIM(libvchan_is_open(server) == VCHAN_DISCONNECTED);
    libvchan_close(server);
    CLAIM(client = libvchan_client_init_async(1, 7, &fd));
    CLAIM(!readable(fd, 20) && libvchan_client_init_async_finish(client, true) == 1);
    CLAIM(server = libvchan_server_init(1, 7, 0, 0));
    CLAIM(readable(fd, 30000) && libvchan_client_init_async_finish(client, true) == 0);
    CLAIM(libvchan_write(server, "x", 1) == 1 && libvchan_read(client, bytes, 4) == 1);
    libvchan_close(server);
    libvchan_close(client);
}

int main(void)
{
    talk(0, 0);
    talk(4096, 1 << 20);
    qubes();
    return 0;
}
