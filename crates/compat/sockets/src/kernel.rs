// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Questions that this library asks the kernel about a connection. A front makes the calls; a test simulates them.

use std::{
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
};

use rustix::io::Errno;
pub use tombolo_layout::sockets::Counts;

use crate::tuple::Tuple;

/// The kernel's counts for one endpoint, all from one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Bytes written, acknowledged and received.
    pub counts: Counts,
    /// Bytes received and not yet read.
    pub unread: u64,
}

impl Sample {
    /// Returns the bytes that were read, by any means.
    #[must_use]
    pub fn read(&self) -> u64 {
        self.counts.received.saturating_sub(self.unread)
    }
}

/// Calls about a TCP socket. None blocks: where one would, it returns [`Errno::AGAIN`].
pub trait Kernel: Send + Sync {
    /// Returns its two addresses, if it is a TCP connection.
    fn tuple(&self, fd: RawFd) -> Option<Tuple>;
    /// Returns the port that a connection was made to, which this endpoint `dialled` or accepted; `None` where it is no
    /// TCP connection.
    fn service_port(&self, fd: RawFd, dialled: bool) -> Option<u16> {
        self.tuple(fd).map(|tuple| tuple.service_port(dialled))
    }
    /// Returns the cookie of the socket's network namespace; 0 where it cannot be determined.
    fn cookie(&self, fd: RawFd) -> u64;
    /// Returns the counts of a connection that this endpoint `dialled` or accepted; `None` where they cannot be
    /// determined.
    fn counts(&self, fd: RawFd, dialled: bool) -> Option<Sample>;
    /// Returns the initial sequence numbers of a connection that this endpoint `dialled` or accepted: its own, then the
    /// peer's (S-6). Returns `None` where nobody has attached the program that provides them ([`crate::hook`]).
    fn sequences(&self, _fd: RawFd, _dialled: bool) -> Option<[u32; 2]> {
        None
    }
    /// Returns the size of the send buffer that the program has set; `None` where it has left that to the kernel.
    fn holds(&self, _fd: RawFd) -> Option<u64> {
        None
    }
    /// Sends at once what the kernel holds back to fill a packet.
    fn push(&self, fd: RawFd);
    /// Receives; `peek` leaves the bytes where they are.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn recv(&self, fd: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno>;
    /// Sends, without a signal for a broken pipe.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn send(&self, fd: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno>;
    /// Returns what `poll` reports of the socket now, for these events.
    fn poll(&self, fd: RawFd, events: i16) -> i16;
    /// Ends the connection at once, with a reset for the peer.
    fn reset(&self, fd: RawFd);
}
