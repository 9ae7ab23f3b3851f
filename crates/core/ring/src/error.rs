// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of a pipe.

/// A protocol violation of the peer. Nothing that the peer publishes is believed any more.
///
/// # Example
/// ```
/// # extern crate tombolo_ring as tombolo;
/// use tombolo::Corrupt;
///
/// let corrupt = Corrupt { clause: "R-7", what: "tail beyond capacity", found: 0x2000, bound: 0x1000 };
/// let text = "the peer broke R-7 of the specification: tail beyond capacity (found 0x2000, bound 0x1000)";
/// assert_eq!(corrupt.to_string(), text);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the peer broke {clause} of the specification: {what} (found {found:#x}, bound {bound:#x})")]
pub struct Corrupt {
    /// Clause of `spec/2-ring.md` or `spec/1-memory.md` that was broken.
    pub clause: &'static str,
    /// Description of the violation.
    pub what: &'static str,
    /// Value found.
    pub found: u64,
    /// Bound or value that it should have kept.
    pub bound: u64,
}

/// Reason why an operation on a pipe failed. Would-block is not an error: it is `Ok(None)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A protocol violation of the peer; the pipe is of no more use.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// The memory was taken away: what it holds now is not the peer's.
    #[error("the shared memory was taken away")]
    Revoked,
    /// The reader has closed the pipe (the equivalent of `EPIPE`).
    #[error("the reader has closed the pipe")]
    Closed,
    /// A record cannot fit into this ring, now or later.
    #[error("a record of {len} bytes does not fit: this ring takes at most {max}; use a larger ring")]
    TooLarge {
        /// Size of the record in bytes.
        len: u64,
        /// Size of the largest record of this ring.
        max: u64,
    },
    /// The caller's buffer is smaller than the next record, which stays in the ring.
    #[error("the next record has {len} bytes, the buffer only {buffer}")]
    BufferTooSmall {
        /// Size of the record in bytes.
        len: u64,
        /// Size of the buffer in bytes.
        buffer: u64,
    },
    /// The record (R-26) belongs to another pipe, or to the other half of this one.
    #[error("the record is of another half of a pipe: {what} (found {found:#x}, this half has {own:#x})")]
    ForeignRecord {
        /// Description of the difference.
        what: &'static str,
        /// Value in the record.
        found: u64,
        /// Value of this half.
        own: u64,
    },
    /// Another process of this endpoint has moved the pipe to a ring that is not mapped here (R-26).
    #[error("the pipe is in ring {at}, only ring {mapped} is mapped here: go on in the process that moved it")]
    Elsewhere {
        /// Ring that the pipe is in.
        at: u16,
        /// Ring that is mapped here.
        mapped: u16,
    },
}
