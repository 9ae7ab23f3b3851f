// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can go wrong on a pipe.

/// What the peer did to break the specification. Nothing it says is believed any more.
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
    /// The clause that was broken, of `spec/2-ring.md` or `spec/1-memory.md`.
    pub clause: &'static str,
    /// What is wrong, in words.
    pub what: &'static str,
    /// The value found.
    pub found: u64,
    /// The bound or value that it should have kept.
    pub bound: u64,
}

/// Why an operation on a pipe failed. Would-block is not among them: it is `Ok(None)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer lied; the pipe is of no more use.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// The memory was taken away: what stands there now is not the peer's.
    #[error("the shared memory was taken away")]
    Revoked,
    /// The reader wants no more (the `EPIPE` of this world).
    #[error("the reader has closed the pipe")]
    Closed,
    /// A record cannot fit into this ring, now or later.
    #[error("a record of {len} bytes does not fit: this ring takes at most {max}; use a larger ring")]
    TooLarge {
        /// Bytes of the record.
        len: u64,
        /// Largest record of this ring.
        max: u64,
    },
    /// The caller's buffer is smaller than the next record, which stays where it is.
    #[error("the next record has {len} bytes, the buffer only {buffer}")]
    BufferTooSmall {
        /// Bytes of the record.
        len: u64,
        /// Bytes of the buffer.
        buffer: u64,
    },
    /// A record (R-26) of another pipe, or of the other half of this one.
    #[error("the record is of another half of a pipe: {what} (found {found:#x}, this half has {own:#x})")]
    ForeignRecord {
        /// What differs.
        what: &'static str,
        /// The value in the record.
        found: u64,
        /// The value of this half.
        own: u64,
    },
    /// Another process of this endpoint has moved the pipe to a ring that is not mapped here (R-26).
    #[error("the pipe is in ring {at}, only ring {mapped} is mapped here: go on in the process that moved it")]
    Elsewhere {
        /// The ring that the pipe is in.
        at: u16,
        /// The ring that is mapped here.
        mapped: u16,
    },
}
