// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that the runtime watches over.

use std::{io, os::fd::OwnedFd, time::Duration};

use tokio::io::{Interest, unix::AsyncFd};

use crate::discard;

/// How long nobody is let in where too many sockets wait to be closed.
const CROWDED: Duration = Duration::from_millis(100);

/// A descriptor that the runtime watches over.
///
/// # Errors
/// It cannot be polled.
#[allow(deprecated, reason = "deprecated for types that lie about their descriptor; `OwnedFd` does not")]
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// The next connection of a listening socket; it does not block.
///
/// # Errors
/// What the system says.
pub async fn accept(listener: &AsyncFd<OwnedFd>) -> io::Result<OwnedFd> {
    use rustix::net::{SocketFlags, accept_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    while discard::is_crowded() {
        tokio::time::sleep(CROWDED).await;
    }
    listener.async_io(Interest::READABLE, |socket| Ok(accept_with(socket, flags)?)).await
}
