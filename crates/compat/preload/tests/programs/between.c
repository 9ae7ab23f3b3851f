/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A handler that forks when a thread is about to sleep, in the moment before the system call. The process and its child
 * continue the call. With LIBRARY this file is a library that prolongs the moment: it is loaded after the tested
 * library, which calls it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/time.h>
#include <sys/wait.h>

#ifdef LIBRARY
void (*before_sleep)(void);

int epoll_wait(int set, struct epoll_event *events, int most, int millis) {
    int (*next)(int, struct epoll_event *, int, int) = dlsym(RTLD_NEXT, "epoll_wait");
    void (*before)(void) = before_sleep;
    before_sleep = NULL;
    if (before) {
        before();
    }
    return next(set, events, most, millis);
}
#else
#include "ends.h"

static pid_t made;

static void fork_now(int signal) {
    (void)signal;
    made = fork();
}

static void interrupt(void) { raise(SIGUSR1); }

int main(void) {
    int ends[2], status;
    struct sigaction action = {.sa_handler = fork_now, .sa_flags = SA_RESTART};
    struct timeval limit = {.tv_usec = 300000};
    meet(ends);
    talk(ends);
    check(setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0, "SO_RCVTIMEO");
    check(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
    void (**before)(void) = dlsym(RTLD_DEFAULT, "before_sleep");
    check(before != NULL, "the library");
    *before = interrupt;
    char one;
    ssize_t n = recv(ends[0], &one, 1, 0);
    int error = errno;
    if (made == 0) {
        _exit(n == -1 && error == EAGAIN ? 0 : n == -1 ? error : 255);
    }
    check(n == -1 && error == EAGAIN && made > 0, "recv");
    check(waitpid(made, &status, 0) == made, "waitpid");
    printf("child: %s\n", WIFEXITED(status) ? WEXITSTATUS(status) ? strerror(WEXITSTATUS(status)) : "waited" : "killed");
    return 0;
}
#endif
