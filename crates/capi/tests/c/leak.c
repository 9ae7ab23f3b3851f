/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A canary: loses a handle, which every memory checker must report. */
#include "test.h"

__attribute__((noinline)) static void forget(const char *address)
{
    tombolo_listener *volatile listener = NULL;

    CLAIM(tombolo_stream_listen(address, NULL, (tombolo_listener **)&listener) == 0);
    listener = NULL;
}

int main(int argc, char **argv)
{
    CLAIM(argc == 2);
    forget(argv[1]);
}
