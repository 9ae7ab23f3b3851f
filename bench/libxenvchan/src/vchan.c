// SPDX-License-Identifier: Apache-2.0 OR MIT
// libxenvchan as plain functions of addresses and numbers.
#include <libxenvchan.h>
#include <stddef.h>

// The server's end at `path` in its own part of XenStore, for one client; rings of `ring` bytes. NULL if it cannot be.
void *bench_vchan_serve(int client, const char *path, size_t ring, int blocking)
{
	struct libxenvchan *vchan = libxenvchan_server_init(NULL, client, path, ring, ring);

	if (vchan)
		vchan->blocking = blocking;
	return vchan;
}

// The client's end, once the server's is there. NULL if it is not.
void *bench_vchan_call(int server, const char *path, int blocking)
{
	struct libxenvchan *vchan = libxenvchan_client_init(NULL, server, path);

	if (vchan)
		vchan->blocking = blocking;
	return vchan;
}

// Bytes that were sent, 0 if none can be now, -1 if the other end is gone.
int bench_vchan_write(void *vchan, const void *bytes, size_t len)
{
	return libxenvchan_write(vchan, bytes, len);
}

// Bytes that were received, 0 if there are none now, -1 at the end.
int bench_vchan_read(void *vchan, void *bytes, size_t len)
{
	return libxenvchan_read(vchan, bytes, len);
}

// 0 when the other end closed, 1 when it is there, 2 when it was not there yet.
int bench_vchan_state(void *vchan)
{
	return libxenvchan_is_open(vchan);
}

void bench_vchan_close(void *vchan)
{
	libxenvchan_close(vchan);
}
