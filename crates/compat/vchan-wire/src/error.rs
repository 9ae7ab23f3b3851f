// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of this crate.

use std::io;

/// Error on a vchan of the original's layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer wrote something impossible; the vchan is unusable from then on.
    #[error("the peer broke {clause}: {what} ({found:#x})")]
    Corrupt {
        /// Clause of `spec/`.
        clause: &'static str,
        /// Item that was impossible.
        what: &'static str,
        /// Value that was found.
        found: u32,
    },
    /// The peer closed, or its process or domain is gone.
    #[error("the other end has closed or is gone")]
    Closed,
    /// More bytes at once than the ring has.
    #[error("{len} bytes at once, where the ring has {ring}")]
    TooLarge {
        /// Number of bytes asked for.
        len: usize,
        /// Bytes of the ring.
        ring: usize,
    },
    /// Rings of these sizes are not possible.
    #[error("rings of {read} and {write} bytes: 1048576 are the most that this layout has")]
    Sizes {
        /// Bytes of the ring to read.
        read: usize,
        /// Bytes of the ring to write.
        write: usize,
    },
    /// Another client is there: a server has room for one.
    #[error("the server at {0} has a client")]
    Busy(String),
    /// There is no server.
    #[error("no server at {0}")]
    NotFound(String),
    /// Error of the system.
    #[error(transparent)]
    Ground(#[from] io::Error),
}

/// Result of the calls of this crate.
pub type Result<T> = std::result::Result<T, Error>;
