/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A thread starts programs, another one forks, and a signal comes all the time, whose handler looks at a connection. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

#include "ends.h"

enum { SECONDS = 2 };

static int end, is_over;

static void look(int signal) {
    int error = errno;
    struct pollfd one = {end, POLLIN, 0};
    (void)signal;
    poll(&one, 1, 0);
    errno = error;
}

static void wait_for(pid_t program) {
    while (waitpid(program, NULL, 0) != program) {
        check(errno == EINTR, "wait");
    }
}

static void *forks(void *unused) {
    while (!__atomic_load_n(&is_over, __ATOMIC_SEQ_CST)) {
        pid_t child = fork();
        if (child == 0) {
            _exit(0);
        }
        check(child > 0, "fork");
        wait_for(child);
    }
    return unused;
}

int main(void) {
    pid_t peer = meet_peer(&end), program;
    if (peer == 0) {
        char byte;
        recv(end, &byte, 1, 0);
        _exit(0);
    }
    struct timeval often = {.tv_usec = 100};
    struct sigaction action = {.sa_handler = look, .sa_flags = SA_RESTART};
    pthread_t thread;
    char *words[] = {"true", NULL};
    check(sigaction(SIGALRM, &action, NULL) == 0, "handler");
    check(pthread_create(&thread, NULL, forks, NULL) == 0, "thread");
    check(setitimer(ITIMER_REAL, &(struct itimerval){often, often}, NULL) == 0, "timer");
    for (time_t until = time(NULL) + SECONDS; time(NULL) < until;) {
        check(posix_spawnp(&program, words[0], NULL, NULL, words, NULL) == 0, "spawn");
        wait_for(program);
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_SEQ_CST);
    pthread_join(thread, NULL);
    close(end);
    wait_for(peer);
    puts("done");
    return 0;
}
