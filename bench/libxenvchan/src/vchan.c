// SPDX-License-Identifier: Apache-2.0 OR MIT
// The original libxenvchan, which this is linked with, and libtombolo-vchan, which is loaded beside it because its functions
// have the same names: as plain functions of addresses and numbers.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libxenvchan.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define OURS "libtombolo-vchan.so.0.1"

struct library {
	struct libxenvchan *(*serve)(struct xentoollog_logger *, int, const char *, size_t, size_t);
	struct libxenvchan *(*call)(struct xentoollog_logger *, int, const char *);
	int (*write)(struct libxenvchan *, const void *, size_t);
	int (*read)(struct libxenvchan *, void *, size_t);
	int (*state)(struct libxenvchan *);
	void (*close)(struct libxenvchan *);
};

struct end {
	const struct library *library;
	struct libxenvchan *vchan;
};

static const struct library original = {
	libxenvchan_server_init, libxenvchan_client_init, libxenvchan_write,
	libxenvchan_read, libxenvchan_is_open, libxenvchan_close,
};
static struct library ours;
static pthread_once_t loaded = PTHREAD_ONCE_INIT;
// A map that has all domains reached by the layout of the original.
static char wire[32];

static void *symbol(void *library, const char *name)
{
	void *found = library ? dlsym(library, name) : NULL;

	if (!found)
		fprintf(stderr, "%s\n", dlerror());
	return found;
}

static void load(void)
{
	static const char map[] = "default xen:vchan:\n";
	void *library = dlopen(OURS, RTLD_NOW | RTLD_LOCAL);
	int fd = memfd_create("vchan.conf", MFD_CLOEXEC);

	if (fd >= 0 && write(fd, map, strlen(map)) == (ssize_t)strlen(map))
		snprintf(wire, sizeof(wire), "/proc/self/fd/%d", fd);
	ours.call = symbol(library, "libxenvchan_client_init");
	ours.write = symbol(library, "libxenvchan_write");
	ours.read = symbol(library, "libxenvchan_read");
	ours.state = symbol(library, "libxenvchan_is_open");
	ours.close = symbol(library, "libxenvchan_close");
	ours.serve = symbol(library, "libxenvchan_server_init");
}

// Which library: 0 the original, 1 ours, 2 ours by the layout of the original. NULL if there is none.
static const struct library *library(int which)
{
	if (!which)
		return &original;
	pthread_once(&loaded, load);
	if (which == 1)
		unsetenv("TOMBOLO_VCHAN_CONF");
	else
		setenv("TOMBOLO_VCHAN_CONF", wire, 1);
	return ours.serve ? &ours : NULL;
}

static struct end *end(const struct library *library, struct libxenvchan *vchan, int blocking)
{
	struct end *end = vchan ? malloc(sizeof(*end)) : NULL;

	if (end) {
		vchan->blocking = blocking;
		*end = (struct end){ library, vchan };
	}
	return end;
}

// The server's end at `path` in its own part of XenStore, for one client; rings of `ring` bytes. NULL if it cannot be.
void *bench_vchan_serve(int which, int client, const char *path, size_t ring, int blocking)
{
	const struct library *from = library(which);

	return from ? end(from, from->serve(NULL, client, path, ring, ring), blocking) : NULL;
}

// The client's end, once the server's is there. NULL if it is not.
void *bench_vchan_call(int which, int server, const char *path, int blocking)
{
	const struct library *from = library(which);

	return from ? end(from, from->call(NULL, server, path), blocking) : NULL;
}

// Bytes that were sent, 0 if none can be now, -1 if the other end is gone.
int bench_vchan_write(const struct end *end, const void *bytes, size_t len)
{
	return end->library->write(end->vchan, bytes, len);
}

// Bytes that were received, 0 if there are none now, -1 at the end.
int bench_vchan_read(const struct end *end, void *bytes, size_t len)
{
	return end->library->read(end->vchan, bytes, len);
}

// 0 when the other end closed, 1 when it is there, 2 when it was not there yet.
int bench_vchan_state(const struct end *end)
{
	return end->library->state(end->vchan);
}

void bench_vchan_close(struct end *end)
{
	end->library->close(end->vchan);
	free(end);
}
