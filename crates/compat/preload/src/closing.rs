// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A descriptor is closed, or was closed past this library. With the last one of a connection goes all that is kept for it.

use std::{os::fd::RawFd, sync::Arc};

use tombolo_sockets::connection::Connection;

use crate::{
    epoll::wiring,
    errno, handback, inside, kernel, life,
    state::{self, Watched},
};

/// The program closes `fd`, which may be watched.
pub(crate) fn close_watched(fd: RawFd) {
    if inside::has_interrupted() {
        // The kernel tells the peer, as it does where a program is killed.
        state::abandon(fd);
    } else {
        errno::kept(|| before_close(fd));
    }
}

/// The program gives up what `fd` is.
pub(crate) fn before_close(fd: RawFd) {
    if !state::is_known(fd) {
        return;
    }
    if !state::is_owner() {
        // A child of vfork: what it closes is its own, the table is its parent's.
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
        // Of another file, which has the number by now, nothing is to be changed.
        Some(Watched::Connection(connection)) => _ = given_up(fd, &connection, || {}),
        Some(Watched::Set(_)) | None => {}
    }
}

/// The number `fd` of a connection is closed, or about to be. With the last one goes all that is kept for it, after `last`. Says
/// whether TCP would reset it then.
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
    // Another thread may wait for it in a call: the kernel tells it nothing of this number any more.
    connection.pipes.doorbell().inspect(|doorbell| doorbell.notify());
    if let Some(process) = state::busy() {
        process.waiters.unwatch(connection);
        process.ended(connection);
        process.journal.write_report();
    }
    reset
}

/// The program ends the connection that `fd` is, and keeps the socket: what that becomes next is the kernel's alone.
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

/// The number `fd` is another file's by now: somebody closed it past this library. What it was is let go.
pub(crate) fn forget_reused(fd: RawFd) {
    if state::is_owner()
        && let Some(Watched::Connection(connection)) = state::forget(fd)
    {
        errno::kept(|| given_up(fd, &connection, || {}));
    }
}

/// A call on the connection that `fd` is taken for says that it is no socket. Whether it is another file by now, of which
/// nothing is known from here on.
#[cold]
pub(crate) fn is_another(fd: RawFd) -> bool {
    let another = !state::is_still(fd);
    if another {
        forget_reused(fd);
    }
    another
}
