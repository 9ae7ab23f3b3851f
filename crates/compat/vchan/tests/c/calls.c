/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* One thread that writes SIZE bytes to itself and reads them, TIMES times, by each pair of calls. The cost of a call is
 * counted with this program: docs/guide/vchan.md. */
#include "test.h"

#include <libxenvchan.h>

int main(int argc, char **argv)
{
    static unsigned char out[1 << 16], in[1 << 16];
    CLAIM(argc == 3);
    const int size = atoi(argv[1]), times = atoi(argv[2]);
    CLAIM(size > 0 && size <= 1 << 16);
    struct libxenvchan *server = libxenvchan_server_init(NULL, 1, "a/path", 1 << 16, 1 << 16), *client;
    CLAIM(server && (client = libxenvchan_client_init(NULL, 1, "/local/domain/1/a/path")));
    server->blocking = client->blocking = 1;
    fill(out, sizeof(out), 7);
    for (int time = 0; time < times; time++) {
        memcpy(out, &time, (size_t)size < sizeof(time) ? (size_t)size : sizeof(time));
        CLAIM(libxenvchan_write(server, out, size) == size);
        CLAIM(libxenvchan_read(client, in, size) == size && memcmp(in, out, size) == 0);
        CLAIM(libxenvchan_send(client, out, size) == size);
        CLAIM(libxenvchan_recv(server, in, size) == size && memcmp(in, out, size) == 0);
    }
    /* Nothing is left, and a write without a peer gets an error. */
    server->blocking = client->blocking = 0;
    CLAIM(libxenvchan_read(client, in, size) == 0 && libxenvchan_recv(server, in, size) == 0);
    CLAIM(libxenvchan_write(server, out, size) == size);
    libxenvchan_close(server);
    CLAIM(libxenvchan_read(client, in, size) == size);
    REFUSES(EPIPE, "has closed", libxenvchan_read(client, in, size));
    REFUSES(EPIPE, "has closed", libxenvchan_write(client, out, size));
    libxenvchan_close(client);
    return 0;
}
