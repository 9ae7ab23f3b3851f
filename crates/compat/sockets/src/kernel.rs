// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the core asks of the kernel about a connection. A front does the calls; a test plays them.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
};

use rustix::io::Errno;
pub use tombolo_layout::sockets::Counts;

use crate::tuple::Tuple;

/// The kernel's counts of one end, all from one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Written, acknowledged, received.
    pub counts: Counts,
    /// Received and not yet read.
    pub unread: u64,
}

impl Sample {
    /// Bytes that were read, by whatever way.
    #[must_use]
    pub fn read(&self) -> u64 {
        self.counts.received.saturating_sub(self.unread)
    }
}

/// Calls about a TCP socket. None blocks: where one would, it says [`Errno::AGAIN`].
pub trait Kernel: Send + Sync {
    /// Its two addresses, if it is a TCP connection.
    fn tuple(&self, fd: RawFd) -> Option<Tuple>;
    /// The port that a connection was made to, which this end `dialled` or accepted; none where it is no TCP connection.
    fn service_port(&self, fd: RawFd, dialled: bool) -> Option<u16> {
        self.tuple(fd).map(|tuple| tuple.service_port(dialled))
    }
    /// The cookie of the socket's network namespace; 0 where it cannot be told.
    fn cookie(&self, fd: RawFd) -> u64;
    /// The counts of a connection that this end `dialled`, or accepted; none where they cannot be told.
    fn counts(&self, fd: RawFd, dialled: bool) -> Option<Sample>;
    /// The initial sequence numbers of a connection that this end `dialled`, or accepted: its own, then the peer's (S-6); none where
    /// nobody has attached the program that tells them ([`crate::hook`]).
    fn sequences(&self, _fd: RawFd, _dialled: bool) -> Option<[u32; 2]> {
        None
    }
    /// How much the program would have held of what it sends; none where it has left that to the kernel.
    fn holds(&self, _fd: RawFd) -> Option<u64> {
        None
    }
    /// Sends at once what the kernel holds back to fill a packet.
    fn push(&self, fd: RawFd);
    /// Receives; `peek` leaves the bytes where they are.
    ///
    /// # Errors
    /// What the kernel says.
    fn recv(&self, fd: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno>;
    /// Sends, without a signal for a broken pipe.
    ///
    /// # Errors
    /// What the kernel says.
    fn send(&self, fd: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno>;
    /// What `poll` says of the socket now, of these events.
    fn poll(&self, fd: RawFd, events: i16) -> i16;
    /// Ends the connection here and now, with a reset for the peer.
    fn reset(&self, fd: RawFd);
}
