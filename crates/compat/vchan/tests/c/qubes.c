/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Tries each function against its description in libvchan.h. */
#include "test.h"

#include <fcntl.h>
#include <libvchan.h>

static libvchan_t *server, *client;

static void *serve_later(void *port)
{
    poll(NULL, 0, 50);
    CLAIM(server = libvchan_server_init(1, *(int *)port, 4096, 8192));
    return NULL;
}

static void client_waits_for_its_server(void)
{
    char bytes[8];
    int port = 7;
    pthread_t thread;
    CLAIM(pthread_create(&thread, NULL, serve_later, &port) == 0);
    CLAIM(client = libvchan_client_init(1, port));
    CLAIM(pthread_join(thread, NULL) == 0);
    CLAIM(libvchan_is_open(client) == VCHAN_CONNECTED);
    UNTIL(libvchan_is_open(server) == VCHAN_CONNECTED);
    CLAIM(libvchan_buffer_space(server) == 8192);
    /* It blocks unless it is set not to. */
    CLAIM(libvchan_write(client, "ping", 4) == 4 && libvchan_recv(server, bytes, 4) == 4);
    CLAIM(libvchan_send(server, "pong", 4) == 4 && libvchan_read(client, bytes, 8) == 4 && memcmp(bytes, "pong", 4) == 0);
    libvchan_set_blocking(client, false);
    CLAIM(libvchan_read(client, bytes, 8) == 0 && libvchan_data_ready(client) == 0);
    int fd = libvchan_fd_for_select(client);
    CLAIM(libvchan_data_ready(client) == 0 && !readable(fd, 0));
    CLAIM(libvchan_write(server, "x", 1) == 1 && readable(fd, 30000) && libvchan_wait(client) == 0);
    libvchan_close(server);
    UNTIL(libvchan_is_open(client) == VCHAN_DISCONNECTED);
    CLAIM(libvchan_read(client, bytes, 8) == 1);
    REFUSES(EPIPE, "closed", libvchan_read(client, bytes, 8));
    libvchan_close(client);
}

static void client_finds_its_server_in_the_background(void)
{
    char bytes[8];
    int fd = -1;
    CLAIM(client = libvchan_client_init_async(1, 8, &fd));
    CLAIM(fd >= 0 && !readable(fd, 20) && libvchan_client_init_async_finish(client, true) == 1);
    CLAIM(libvchan_is_open(client) == VCHAN_WAITING && libvchan_data_ready(client) == 0);
    CLAIM(libvchan_buffer_space(client) == 0 && libvchan_wait(client) == 0);
    REFUSES(EAGAIN, "not connected yet", libvchan_read(client, bytes, 1));
    REFUSES(EAGAIN, "not connected yet", libvchan_send(client, bytes, 1));
    REFUSES(EAGAIN, "not connected yet", libvchan_fd_for_select(client));
    CLAIM(server = libvchan_server_init(1, 8, 0, 0));
    CLAIM(libvchan_is_open(server) == VCHAN_WAITING);
    CLAIM(readable(fd, 30000) && libvchan_client_init_async_finish(client, false) == 0);
    CLAIM(fcntl(fd, F_GETFD) == -1 && errno == EBADF);
    CLAIM(libvchan_is_open(client) == VCHAN_CONNECTED && libvchan_read(client, bytes, 1) == 0);
    CLAIM(libvchan_send(client, "late", 4) == 4 && libvchan_recv(server, bytes, 4) == 4);
    libvchan_close(client);
    /* A program that waits in the middle of a call learns of the end. */
    REFUSES(EPIPE, "closed", libvchan_read(server, bytes, 1));
    libvchan_close(server);
}

static void search_that_is_given_up_leaves_nothing(void)
{
    int fd = -1;
    CLAIM(client = libvchan_client_init_async(1, 9, &fd));
    libvchan_close(client);
    CLAIM(server = libvchan_server_init(1, 9, 0, 0));
    CLAIM(!readable(libvchan_fd_for_select(server), 300) && libvchan_is_open(server) == VCHAN_WAITING);
    libvchan_close(server);
}

static void what_makes_no_sense_is_refused(void)
{
    int fd;
    CLAIM(!libvchan_server_init(1, -1, 0, 0) && errno == EINVAL);
    CLAIM(!libvchan_server_init(70000, 1, 0, 0) && errno == EINVAL);
    CLAIM(!libvchan_client_init(99, 1) && errno == ENXIO);
    CLAIM(!libvchan_client_init_async(99, 1, &fd) && errno == ENXIO);
    CLAIM(!libvchan_client_init_async(1, 1, NULL) && errno == EFAULT);
}

int main(void)
{
    client_waits_for_its_server();
    client_finds_its_server_in_the_background();
    search_that_is_given_up_leaves_nothing();
    what_makes_no_sense_is_refused();
    return 0;
}
