// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replaces a connection that has left its memory, because that was taken away, by a new one that can be joined (ADR
//! 0089).

use std::{os::fd::RawFd, sync::Arc};

use tombolo_sockets::{Process, connection::Connection};

use crate::{errno, inside, state};

/// Returns what a call on `fd` works with: the `connection` that was found for it, or what takes its place.
#[inline]
pub(crate) fn current(process: &Process, fd: RawFd, connection: Arc<Connection>) -> Arc<Connection> {
    if process.may_return(&connection) { renew(process, fd, connection) } else { connection }
}

#[cold]
fn renew(process: &Process, fd: RawFd, old: Arc<Connection>) -> Arc<Connection> {
    errno::kept(|| {
        let _inside = inside::enter();
        if !state::is_owner() || !process.may_return_now(&old) || !state::is_still(fd) {
            return old;
        }
        let Some(new) = state::replace(&old) else {
            process.return_later(&old);
            return old;
        };
        // This releases the old connection's memory, and then there is room for more.
        process.waiters.unwatch(&old);
        new
    })
}
