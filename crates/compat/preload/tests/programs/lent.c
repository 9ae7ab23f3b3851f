/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * A program that has not read everything its peer sent before the peer ended. It starts another program, which inherits
 * the connection by its number: `lent spawn`, `system`, `exec`, or `vfork` and `closes`, whose child first closes
 * everything else, at once or number by number. The rest is still there afterwards.
 *
 * A second word changes that. `silent`: the peer has not ended, and makes no more calls. `close`: the program closes
 * the connection, and the other program finds that it cannot read the rest. `given`: the peer waits for an answer, and
 * the other program reads the rest. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "ends.h"

enum { ALL = 30000, BEFORE = 7, MANY = 200 };

extern char **environ;

/* Lists the numbers of the open descriptors besides `end` and the standard streams. */
static int list_others(int end, int numbers[MANY]) {
    DIR *open = opendir("/proc/self/fd");
    int count = 0, number;
    for (struct dirent *one; (one = readdir(open)) != NULL && count < MANY;) {
        number = atoi(one->d_name);
        if (number > 2 && number != end && number != dirfd(open)) {
            numbers[count++] = number;
        }
    }
    closedir(open);
    return count;
}

static void start(const char *how, int end, char *command, int waits) {
    char *words[] = {"sh", "-c", command, NULL};
    int status = 0;
    pid_t program = 0;
    if (strcmp(how, "system") == 0) {
        status = system(command);
    } else if (strcmp(how, "exec") == 0) {
        program = fork();
        if (program == 0) {
            execvp(words[0], words);
        }
        check(program > 0, "fork");
    } else if (strcmp(how, "vfork") == 0 || strcmp(how, "closes") == 0) {
        int others[MANY], count = list_others(end, others), at_once = strcmp(how, "vfork") == 0;
        program = vfork();
        if (program == 0) {
            for (int at = 0; at < count && !at_once; at++) {
                close(others[at]);
            }
            if (at_once) {
                close_range(3, (unsigned)end - 1, 0);
                close_range((unsigned)end + 1, ~0U, 0);
            }
            execvp(words[0], words);
            _exit(1);
        }
        check(program > 0, "vfork");
    } else {
        check(posix_spawnp(&program, words[0], NULL, NULL, words, environ) == 0, "spawn");
    }
    check(!waits || program == 0 || waitpid(program, &status, 0) == program, "wait");
    check(status == 0, "the program");
}

int main(int count, char **words) {
    static char bytes[ALL], found[ALL];
    char command[100];
    int end, all = BEFORE, status;
    const char *what = count == 3 ? words[2] : "";
    int closes = strcmp(what, "close") == 0, is_silent = strcmp(what, "silent") == 0, gives = strcmp(what, "given") == 0;
    check(count == 2 || closes || is_silent || gives, "how");
    for (int at = 0; at < ALL; at++) {
        bytes[at] = (char)(at * 31 % 251);
    }
    alarm(60); /* No process waits for ever. */
    pid_t peer = meet_peer(&end);
    if (peer == 0) {
        check(send(end, bytes, ALL, 0) == ALL && (is_silent || gives || shutdown(end, SHUT_WR) == 0), "send");
        is_silent ? pause() : 0;
        check(recv(end, bytes, 1, 0) == gives, "recv"); /* Until the other end is closed, or sends a byte. */
        _exit(0);
    }
    check(recv(end, found, BEFORE, MSG_WAITALL) == BEFORE, "some");
    struct pollfd ended = {.fd = end, .events = POLLRDHUP};
    check(is_silent || gives ? usleep(100000) == 0 : poll(&ended, 1, 10000) == 1, "the end");
    if (closes) {
        snprintf(command, sizeof command, "sleep 0.3; wc -c <&%d >&2", end);
        start(words[1], end, command, 0);
        close(end);
        check(wait(&status) > 0 && wait(&status) > 0, "wait");
        return 0;
    }
    if (gives) {
        snprintf(command, sizeof command, "head -c %d <&%d | wc -c; echo thanks >&%d", ALL - BEFORE, end, end);
        start(words[1], end, command, 1);
        close(end);
        check(waitpid(peer, &status, 0) == peer && status == 0, "peer");
        return 0;
    }
    for (int at = 0; at < 2; at++) {
        start(words[1], end, "true", 1);
    }
    for (long n = 1; n > 0 && all < ALL; all += (int)n) {
        check((n = recv(end, found + all, sizeof found - (size_t)all, 0)) >= 0, "recv");
    }
    printf("%d bytes, %s\n", all, memcmp(bytes, found, ALL) == 0 ? "the same" : "others");
    close(end);
    check(!is_silent || kill(peer, SIGKILL) == 0, "kill");
    check(waitpid(peer, &status, 0) == peer && (is_silent || status == 0), "peer");
    return 0;
}
