// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can go wrong.

use std::io;

/// A situation on a vchan of the original's layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer wrote something impossible; the vchan is of no more use.
    #[error("the peer broke {clause}: {what} ({found:#x})")]
    Corrupt {
        /// The clause of `spec/`.
        clause: &'static str,
        /// What was impossible.
        what: &'static str,
        /// What was found.
        found: u32,
    },
    /// The peer closed, or its process or domain is gone.
    #[error("the other end has closed or is gone")]
    Closed,
    /// More at once than the ring has.
    #[error("{len} bytes at once, where the ring has {ring}")]
    TooLarge {
        /// Bytes asked for.
        len: usize,
        /// Bytes of the ring.
        ring: usize,
    },
    /// No such rings can be had.
    #[error("rings of {read} and {write} bytes: 1048576 are the most that this layout has")]
    Sizes {
        /// Of the ring to read.
        read: usize,
        /// Of the ring to write.
        write: usize,
    },
    /// Another client is there: there is room for one.
    #[error("the server at {0} has a client")]
    Busy(String),
    /// There is no server.
    #[error("no server at {0}")]
    NotFound(String),
    /// What the ground said.
    #[error(transparent)]
    Ground(#[from] io::Error),
}

/// What the calls of this crate return.
pub type Result<T> = std::result::Result<T, Error>;
