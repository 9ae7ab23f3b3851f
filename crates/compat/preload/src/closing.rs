// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles descriptors that are closed, or were closed past this library. With the last descriptor of a connection,
//! releases all that is kept for it.

use std::{os::fd::RawFd, sync::Arc};

use tombolo_sockets::connection::Connection;

use crate::{
    epoll::wiring,
    errno, handback, inside, kernel, life,
    state::{self, Watched},
};

/// Handles the program's close of `fd`, which may be watched.
pub(crate) fn close_watched(fd: RawFd) {
    if inside::has_interrupted() {
        // The kernel tells the peer, as it does when a program is killed.
        state::abandon(fd);
    } else {
        errno::kept(|| before_close(fd));
    }
}

/// Gives up what `fd` is, before the program closes or replaces it.
pub(crate) fn before_close(fd: RawFd) {
    if !state::is_known(fd) {
        return;
    }
    if !state::is_owner() {
        // A child of vfork closes a descriptor of its own, but the table is its parent's.
        life::closing_in_child(fd);
        return;
    }
    let is_still = state::is_still(fd);
    life::seen_at_last(fd);
    match state::forget(fd) {
        Some(Watched::Connection(connection)) if is_still => {
            let reset = given_up(fd, &connection, || handback::drain_before_close(fd, &connection));
            if reset && let Some(process) = state::busy() {
                handback::reset_at_close(process, fd, &connection);
            }
        }
        // The number is another file's by now, in which nothing may be changed.
        Some(Watched::Connection(connection)) => _ = given_up(fd, &connection, || {}),
        Some(Watched::Set(_)) | None => {}
    }
}

/// Handles the number `fd` of a connection that is closed or about to be. With the last number, calls `last` and then
/// releases all that is kept for the connection. Returns whether TCP would reset it then.
fn given_up(fd: RawFd, connection: &Arc<Connection>, last: impl FnOnce()) -> bool {
    let other = if connection.descriptors.is_single() { None } else { state::other(fd, connection) };
    if other.is_some() {
        wiring::note_number(fd, connection, false);
    }
    if !connection.descriptors.close_one(other) {
        return false;
    }
    last();
    wiring::forget(connection);
    let reset = connection.finish(&kernel::Linux, fd);
    // Another thread may wait for the connection in a call, and the kernel tells it nothing of this number any more.
    connection.pipes.doorbell().inspect(|doorbell| doorbell.notify());
    if let Some(process) = state::busy() {
        process.waiters.unwatch(connection);
        process.ended(connection);
        process.journal.write_report();
    }
    reset
}

/// Handles a program that ends the connection at `fd` and keeps the socket. What the socket becomes next is left to the
/// kernel.
pub(crate) fn disconnecting(fd: RawFd) {
    let Some(connection) = state::connection(fd).filter(|_| state::is_owner()) else { return };
    wiring::release(&connection);
    let mut number = Some(fd);
    while let Some(fd) = number {
        number = state::other(fd, &connection);
        if state::forget(fd).is_some() {
            given_up(fd, &connection, || {});
            state::leave_alone(fd);
        }
    }
}

/// Releases what `fd` was, because the number is another file's by now: the program closed it past this library.
pub(crate) fn forget_reused(fd: RawFd) {
    if state::is_owner()
        && let Some(Watched::Connection(connection)) = state::forget(fd)
    {
        errno::kept(|| given_up(fd, &connection, || {}));
    }
}

/// Returns whether `fd`, which was taken for a connection, is another file by now. A call on it has reported that it is
/// no socket. If so, forgets `fd`.
#[cold]
pub(crate) fn is_another(fd: RawFd) -> bool {
    let another = !state::is_still(fd);
    if another {
        forget_reused(fd);
    }
    another
}
