// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Holds the lock of the file at its standard input, as any process that has the file open can: it writes from memory
 * whose page never comes. Prints "held" once it holds the lock, and keeps it until its standard output is closed or it
 * is killed, for a minute at most. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static char *page;

static void *write_for_ever(void *nothing) {
    (void)!pwrite(0, page, 1, 60 << 10);
    return nothing;
}

int main(void) {
    int faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK); /* A blocking one polls as an error at once. */
    struct uffdio_api api = {.api = UFFD_API};
    page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register range = {.range = {(unsigned long)page, 4096}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (faults < 0 || ioctl(faults, UFFDIO_API, &api) || ioctl(faults, UFFDIO_REGISTER, &range)) {
        return 77;
    }
    pthread_t writer;
    struct pollfd came = {.fd = faults, .events = POLLIN}, gone = {.fd = 1};
    if (pthread_create(&writer, 0, write_for_ever, 0) || poll(&came, 1, 20000) != 1 || came.revents != POLLIN) {
        return 1;
    }
    (void)!write(1, "held\n", 5);
    poll(&gone, 1, 60000);
    _exit(0);
}
