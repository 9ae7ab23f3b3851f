// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Registers descriptors with the runtime, and accepts connections.

use std::{io, os::fd::OwnedFd, time::Duration};

use tokio::io::{Interest, unix::AsyncFd};

use crate::discard;

/// Time between checks while nobody is accepted because too many sockets wait to be closed.
const CROWDED: Duration = Duration::from_millis(100);

/// Registers a descriptor with the runtime.
///
/// # Errors
/// The descriptor cannot be polled.
#[allow(deprecated, reason = "deprecated for types that lie about their descriptor; `OwnedFd` does not")]
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// Accepts the next connection of a listening socket. The new socket does not block.
///
/// # Errors
/// The error of the kernel.
pub async fn accept(listener: &AsyncFd<OwnedFd>) -> io::Result<OwnedFd> {
    use rustix::net::{SocketFlags, accept_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    while discard::is_crowded() {
        tokio::time::sleep(CROWDED).await;
    }
    listener.async_io(Interest::READABLE, |socket| Ok(accept_with(socket, flags)?)).await
}
