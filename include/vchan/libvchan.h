/* SPDX-License-Identifier: Apache-2.0 OR MIT */
#ifndef TOMBOLO_LIBVCHAN_H
#define TOMBOLO_LIBVCHAN_H

/**
 * A vchan, in the spelling of Qubes OS: as in libxenvchan.h, where results, threads and processes are spoken of, but with
 * ports instead of paths. Link with `pkg-config --cflags --libs tombolo-vchan`. A vchan blocks unless it is told not to.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A descriptor. */
typedef int EVTCHN;

/** The other end has closed or is gone. */
#define VCHAN_DISCONNECTED 0
/** Both ends are open. */
#define VCHAN_CONNECTED 1
/** A server whose client has not come yet, or a client that still looks for its server. */
#define VCHAN_WAITING 2

struct libvchan;
typedef struct libvchan libvchan_t;

/** Makes a vchan for a client in a domain, with rings of so many bytes at least; null where that fails. */
libvchan_t *libvchan_server_init(int domain, int port, size_t read_min, size_t write_min);

/** Connects to the vchan of a server, and waits until there is one; null where that fails. */
libvchan_t *libvchan_client_init(int domain, int port);

/**
 * Begins to look for a server. Once *watch_fd polls readable, call libvchan_client_init_async_finish. Until that has returned
 * 0 the vchan is VCHAN_WAITING, and nothing can be read or written (EAGAIN).
 */
libvchan_t *libvchan_client_init_async(int domain, int port, EVTCHN *watch_fd);

/**
 * 0 once connected; the descriptor is closed then, and the vchan blocks if that is wanted. 1 while there is no server yet. -1
 * if it failed: close the vchan.
 */
int libvchan_client_init_async_finish(libvchan_t *ctrl, bool blocking);

/** As libxenvchan_write. */
int libvchan_write(libvchan_t *ctrl, const void *data, size_t size);
/** As libxenvchan_send. */
int libvchan_send(libvchan_t *ctrl, const void *data, size_t size);
/** As libxenvchan_read. */
int libvchan_read(libvchan_t *ctrl, void *data, size_t size);
/** As libxenvchan_recv. */
int libvchan_recv(libvchan_t *ctrl, void *data, size_t size);
/** As libxenvchan_wait. */
int libvchan_wait(libvchan_t *ctrl);
/** As libxenvchan_close. */
void libvchan_close(libvchan_t *ctrl);
/** As libxenvchan_fd_for_select. */
EVTCHN libvchan_fd_for_select(libvchan_t *ctrl);
/** VCHAN_DISCONNECTED, VCHAN_CONNECTED or VCHAN_WAITING. */
int libvchan_is_open(libvchan_t *ctrl);
/** As libxenvchan_data_ready. */
int libvchan_data_ready(libvchan_t *ctrl);
/** As libxenvchan_buffer_space. */
int libvchan_buffer_space(libvchan_t *ctrl);
/** Whether calls wait rather than return 0. */
void libvchan_set_blocking(libvchan_t *ctrl, bool blocking);

/** See libxenvchan.h. */
const char *tombolo_vchan_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
