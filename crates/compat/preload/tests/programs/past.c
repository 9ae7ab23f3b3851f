/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Joined connections whose numbers are closed by a system call of the program, past libc. Prints how many more
 * descriptors and mappings the process has after many of them than after a few. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>

#include "ends.h"

static void close_past_libc(long fd) {
    long answer;
    __asm__ volatile("syscall" : "=a"(answer) : "a"(SYS_close), "D"(fd) : "rcx", "r11", "memory");
    check(answer == 0, "close");
}

static int descriptors(void) {
    int n = 0;
    DIR *all = opendir("/proc/self/fd");
    while (readdir(all)) {
        n++;
    }
    closedir(all);
    return n;
}

static int mappings(void) {
    int n = 0, c;
    FILE *maps = fopen("/proc/self/maps", "r");
    while ((c = getc(maps)) != EOF) {
        n += c == '\n';
    }
    fclose(maps);
    return n;
}

int main(void) {
    int set = epoll_create1(0), first[2] = {0};
    for (int at = 0; at < 60; at++) {
        int ends[2];
        struct epoll_event event = {.events = EPOLLIN};
        meet(ends);
        check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "add");
        talk(ends);
        close_past_libc(ends[0]);
        close_past_libc(ends[1]);
        if (at == 9) {
            first[0] = descriptors();
            first[1] = mappings();
        }
    }
    printf("descriptors %d mappings %d\n", descriptors() > first[0] + 8, mappings() > first[1] + 8);
    return 0;
}
