/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A program whose handler ends it at the worst moment: the interrupted thread holds the lock of the allocator, for the
 * program itself or for a library's call. Whatever then asks for memory waits for ever, with all signals blocked, or
 * finds the allocator's state inconsistent. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "ends.h"

void *__libc_malloc(size_t len);
void *__libc_calloc(size_t count, size_t len);
void *__libc_realloc(void *old, size_t len);
void *__libc_memalign(size_t align, size_t len);

static atomic_int is_locked, is_due, has_ended;
static int disorder;

/* Nothing releases this lock once a handler has interrupted its holder. */
static void lock(void) {
    while (atomic_exchange(&is_locked, 1)) {
        if (disorder && atomic_load(&has_ended)) {
            raise(disorder);
        }
    }
    if (atomic_exchange(&is_due, 0)) {
        raise(SIGUSR1);
    }
}

static void *unlocked(void *memory) {
    atomic_store(&is_locked, 0);
    return memory;
}

void *malloc(size_t len) {
    lock();
    return unlocked(__libc_malloc(len));
}

void *calloc(size_t count, size_t len) {
    lock();
    return unlocked(__libc_calloc(count, len));
}

void *realloc(void *old, size_t len) {
    lock();
    return unlocked(__libc_realloc(old, len));
}

int posix_memalign(void **memory, size_t align, size_t len) {
    lock();
    *memory = unlocked(__libc_memalign(align, len));
    return *memory ? 0 : 12;
}

static void handle(int signal) {
    (void)signal;
    atomic_store(&has_ended, 1);
    _exit(7);
}

int main(int count, char **words) {
    int ends[2], more[2];
    struct sigaction action = {.sa_handler = handle};
    check(count == 3, "usage");
    disorder = strcmp(words[2], "segv") == 0 ? SIGSEGV : strcmp(words[2], "abort") == 0 ? SIGABRT : 0;
    if (!disorder) {
        sigfillset(&action.sa_mask);
    }
    check(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
    meet(ends);
    talk(ends);
    atomic_store(&is_due, 1);
    if (strcmp(words[1], "own") == 0) {
        free(malloc(100));
    }
    /* A new connection has to be recorded, which takes memory. */
    for (;;) {
        meet(more);
        talk(more);
    }
}
