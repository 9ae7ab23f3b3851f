/* SPDX-License-Identifier: Apache-2.0 OR MIT */
#ifndef TOMBOLO_LIBXENVCHAN_H
#define TOMBOLO_LIBXENVCHAN_H

/**
 * A vchan, in the spelling of Xen's libxenvchan: bytes both ways between a server in this domain and a client in another,
 * or the other way round. Programs written for that library compile with this header, link with
 * `pkg-config --cflags --libs tombolo-vchan`, and then run wherever Tombolo runs. docs/guide/vchan.md is the walk-through;
 * it also says where a domain's number and a path lead.
 *
 * Results. Calls return -1 (or a null pointer) where they fail; errno then says why, and tombolo_vchan_last_error() says it
 * in words, with the numbers that matter: EPIPE (the other end closed), ECONNRESET (its process or domain is gone), EPROTO
 * (it broke the rules), EMSGSIZE (more at once than the ring has), ENOENT (no server), EADDRINUSE (another server is there),
 * ENOMEM (a limit, which the words name), ENXIO (nothing says how that domain is reached), ETIMEDOUT, EINVAL, EFAULT.
 *
 * Threads. One thread may read while another writes. Close a vchan once no other thread is in a call with it.
 *
 * Processes. A vchan is of no use after fork in the child: make it there.
 */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct vchan_interface;
struct ring_shared;
struct xentoollog_logger;
struct xengntdev_handle;
struct xenevtchn_handle;

/** One direction of a vchan. */
struct libxenvchan_ring {
    /** Not used: null. */
    struct ring_shared *shr;
    /** Not used: null. */
    void *buffer;
    /** The ring has 1 << order bytes, as far as that was known when the vchan was made. */
    int order;
};

/** A vchan. A program may read is_server, and set server_persist and blocking; the rest is not for it. */
struct libxenvchan {
    union {
        /** Not used: null. */
        void *gntshr;
        /** Not used: null. */
        struct xengntdev_handle *gnttab;
    };
    /** Not used: null. */
    struct vchan_interface *ring;
    /** Not used: null. */
    struct xenevtchn_handle *event;
    /** Not used: 0. */
    uint32_t event_port;
    /** Whether this end is the server. */
    unsigned int is_server : 1;
    /** Set by a server that goes on when its client closes: the vchan stays open for the next one. */
    unsigned int server_persist : 1;
    /** Set by a program whose calls are to wait rather than to return 0. */
    unsigned int blocking : 1;
    struct libxenvchan_ring read, write;
    /** The path that was given. */
    char *xs_path;
};

/**
 * Makes a vchan for a client in a domain, which may come when it likes. What is written before that waits for it.
 *
 * The rings have read_min and write_min bytes at least, 1 GiB at most. Returns null where that fails; the reason goes to the
 * logger or, if that is null, to standard error.
 */
struct libxenvchan *libxenvchan_server_init(struct xentoollog_logger *logger, int domain, const char *xs_path,
                                            size_t read_min, size_t write_min);

/** Connects to the vchan of a server, which must be there (else ENOENT). */
struct libxenvchan *libxenvchan_client_init(struct xentoollog_logger *logger, int domain, const char *xs_path);

/** Closes a vchan and frees it. The other end can still read what was written. Null is no error. */
void libxenvchan_close(struct libxenvchan *ctrl);

/** Reads size bytes, or none: returns size, 0 if they are not there and the vchan does not block, or -1. */
int libxenvchan_recv(struct libxenvchan *ctrl, void *data, size_t size);

/** Reads what is there, size bytes at most: returns how many, 0 if there are none and the vchan does not block, or -1. */
int libxenvchan_read(struct libxenvchan *ctrl, void *data, size_t size);

/** Writes size bytes, or none: returns size, 0 if there is no room for them and the vchan does not block, or -1. */
int libxenvchan_send(struct libxenvchan *ctrl, const void *data, size_t size);

/** Writes what there is room for, or all if the vchan blocks: returns how many bytes, or -1. */
int libxenvchan_write(struct libxenvchan *ctrl, const void *data, size_t size);

/**
 * Waits until there is more to read than this end knows of, or more room than it found when that was too little, or the
 * other end comes or goes. Returns 0, or -1 at a client whose server is gone.
 */
int libxenvchan_wait(struct libxenvchan *ctrl);

/**
 * A descriptor that polls readable when libxenvchan_wait would not block. Call that then, which makes it quiet; then do what
 * there is to do. It belongs to the vchan: do not read, write or close it.
 */
int libxenvchan_fd_for_select(struct libxenvchan *ctrl);

/** 1 while both ends are open, 0 once the other has closed or is gone, 2 at a server whose client has not come yet. */
int libxenvchan_is_open(struct libxenvchan *ctrl);

/** How many bytes can be read at once. */
int libxenvchan_data_ready(struct libxenvchan *ctrl);

/** How many bytes can be written at once. */
int libxenvchan_buffer_space(struct libxenvchan *ctrl);

/**
 * What went wrong in the last call of this thread that failed, as one line; an empty text if none did. Valid until the next
 * call that fails.
 */
const char *tombolo_vchan_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
