/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* One end in a process of its own, for tests that kill it: `end serve|join`. It prints each event. */
#include "test.h"

#include <libxenvchan.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char bytes[64];
    int len, serve = argc == 2 && strcmp(argv[1], "serve") == 0;
    struct libxenvchan *ctrl = serve ? libxenvchan_server_init(NULL, 1, "end", 0, 0) : libxenvchan_client_init(NULL, 1, "end");
    CLAIM(ctrl);
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("there");
    while (libxenvchan_is_open(ctrl) != 1)
        CLAIM(libxenvchan_wait(ctrl) == 0);
    puts("open");
    ctrl->blocking = 1;
    CLAIM(libxenvchan_write(ctrl, "hello", 5) == 5);
    while ((len = libxenvchan_read(ctrl, bytes, sizeof(bytes))) > 0)
        printf("read %.*s\n", len, bytes);
    printf("errno %d, open %d\n", errno, libxenvchan_is_open(ctrl));
    libxenvchan_close(ctrl);
    return 0;
}
