/* SPDX-License-Identifier: Apache-2.0 OR MIT
 * Sockets that are closed, read and written by other ways than the usual functions, and files that get their numbers.
 * Prints the results of calls. */
#define _GNU_SOURCE
#include <aio.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "ends.h"

static int ends[2];
static char room[64];
static FILE *stream;

/* Prints what is read, from its beginning, of a file that gets the number. */
static void read_file(const char *what, int number) {
    int fd;
    /* The lower numbers stay open. */
    do {
        check((fd = memfd_create("file", 0)) >= 0, "memfd_create");
    } while (fd < number);
    printf("%s: the number again: %d,", what, fd == number);
    check(pwrite(fd, "file", 4, 0) == 4, "pwrite");
    ssize_t n = read(fd, room, sizeof room);
    printf(" read %zd %.*s,", n, n > 0 ? (int)n : 0, room);
    printf(" close %d\n", close(fd));
}

/* The same for a file that is written first. */
static void file(const char *what, int number) {
    int fd = memfd_create("file", 0);
    check(fd >= 0, "memfd_create");
    printf("%s: the number again: %d,", what, fd == number);
    printf(" write %zd,", write(fd, "file", 4));
    printf(" seek %ld,", (long)lseek(fd, 0, SEEK_SET));
    ssize_t n = read(fd, room, sizeof room);
    printf(" read %zd %.*s,", n, n > 0 ? (int)n : 0, room);
    printf(" close %d\n", close(fd));
}

/* Prints what the other end receives. */
static void peer(const char *what) {
    ssize_t n = recv(ends[1], room, sizeof room, 0);
    printf("%s: %zd %.*s, then %zd\n", what, n, n > 0 ? (int)n : 0, room, recv(ends[1], room, sizeof room, 0));
    close(ends[1]);
}

static void pair(void) {
    meet(ends);
    talk(ends);
}

static void open_stream(int fd) {
    check((stream = fdopen(fd, "r+")) != NULL, "fdopen");
}

static long past(long number, long a, long b, long c) {
    long answer;
    __asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return answer;
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);

    /* Closed by standard I/O, and no call uses its number afterwards. */
    pair();
    check((stream = fdopen(ends[0], "r+")) != NULL && fclose(stream) == 0, "fclose");
    peer("nothing");
    pair();
    check((stream = fdopen(ends[0], "r+")) != NULL && freopen("/dev/null", "r", stream) == stream, "freopen");
    peer("nothing");
    fclose(stream);

    pair();
    check((stream = fdopen(ends[0], "r+")) != NULL, "fdopen");
    printf("fprintf: %d\n", fprintf(stream, "stream"));
    printf("fclose: %d\n", fclose(stream));
    file("fclose", ends[0]);
    peer("fclose");

    pair();
    check((stream = fdopen(ends[0], "w")) != NULL && fputs("again", stream) >= 0, "fdopen");
    check((stream = freopen("/dev/null", "r", stream)) != NULL, "freopen");
    printf("freopen: %d, read %zd\n", fileno(stream) == ends[0], read(fileno(stream), room, 1));
    fclose(stream);
    peer("freopen");

    /* A stream that is older than the connection. */
    meet_with(ends, open_stream);
    talk(ends);
    printf("fprintf: %d\n", fprintf(stream, "early"));
    printf("fclose: %d\n", fclose(stream));
    file("early", ends[0]);
    peer("early");

    /* The library does not see the close: a call for which the connection has nothing detects it. */
    pair();
    check(past(SYS_close, ends[0], 0, 0) == 0, "close");
    read_file("closed past all", ends[0]);
    close(ends[1]);

    /* The file that is opened next is not the program's. */
    pair();
    check(past(SYS_close, ends[0], 0, 0) == 0, "close");
    printf("and left: %d\n", close(ends[1]));

    pair();
    aio_context_t context = 0;
    check(syscall(SYS_io_setup, 4, &context) == 0, "io_setup");
    struct iocb request = {.aio_fildes = ends[0], .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_buf = (uintptr_t) "submit", .aio_nbytes = 6};
    struct iocb *requests[] = {&request};
    struct io_event event;
    printf("io_submit: %ld,", syscall(SYS_io_submit, context, 1, requests));
    printf(" %ld,", syscall(SYS_io_getevents, context, 1, 1, &event, NULL));
    printf(" %lld\n", (long long)event.res);
    printf("write after: %zd\n", write(ends[0], "more", 4));
    check(recv(ends[1], room, 10, MSG_WAITALL) == 10, "recv");
    check(write(ends[1], "back", 4) == 4, "write");
    request.aio_lio_opcode = IOCB_CMD_PREAD;
    request.aio_buf = (uintptr_t)room;
    printf("io_submit: %ld,", syscall(SYS_io_submit, context, 1, requests));
    printf(" %ld,", syscall(SYS_io_getevents, context, 1, 1, &event, NULL));
    printf(" %lld\n", (long long)event.res);
    close(ends[0]);
    peer("io_submit");

    pair();
    int (*submit)(aio_context_t, long, struct iocb **) = (int (*)(aio_context_t, long, struct iocb **))dlsym(RTLD_DEFAULT, "io_submit");
    request.aio_fildes = ends[0];
    request.aio_lio_opcode = IOCB_CMD_PWRITE;
    request.aio_buf = (uintptr_t) "libaio";
    request.aio_nbytes = 6;
    printf("libaio: %ld,", submit ? (long)submit(context, 1, requests) : syscall(SYS_io_submit, context, 1, requests));
    printf(" %ld,", syscall(SYS_io_getevents, context, 1, 1, &event, NULL));
    printf(" %lld\n", (long long)event.res);
    close(ends[0]);
    peer("libaio");

    pair();
    check(write(ends[1], "later", 5) == 5, "write");
    struct aiocb one = {.aio_fildes = ends[0], .aio_buf = room, .aio_nbytes = sizeof room};
    const struct aiocb *all[] = {&one};
    printf("aio_read: %d,", aio_read(&one));
    while (aio_error(&one) == EINPROGRESS) {
        aio_suspend(all, 1, NULL);
    }
    printf(" %zd\n", aio_return(&one));
    one.aio_nbytes = 5;
    printf("aio_write: %d,", aio_write(&one));
    while (aio_error(&one) == EINPROGRESS) {
        aio_suspend(all, 1, NULL);
    }
    printf(" %zd\n", aio_return(&one));
    close(ends[0]);
    peer("aio");

    pair();
    struct aiocb list = {.aio_fildes = ends[0], .aio_buf = "listed", .aio_nbytes = 6, .aio_lio_opcode = LIO_WRITE};
    struct aiocb *listed[] = {NULL, &list};
    printf("lio_listio: %d,", lio_listio(LIO_WAIT, listed, 2, NULL));
    printf(" %zd\n", aio_return(&list));
    close(ends[0]);
    peer("lio_listio");
    printf("done\n");
    return 0;
}
