// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of measuring.

pub use tombolo_os::failed_call::{FailedCall, Os};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a measurement, or the whole run, was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] FailedCall),
    /// This machine, or this transport, cannot do what was asked; the measurement is skipped.
    #[error("{0}")]
    Unsupported(String),
    /// The sample contains nothing.
    #[error("nothing arrived within the sample's time; give it more with --seconds")]
    Empty,
    /// The bytes that arrived are not the bytes that were sent.
    #[error("the data arrived spoiled: {0}")]
    Spoiled(String),
    /// A file of a report cannot be written.
    #[error("cannot write {}", path.display())]
    File {
        /// Path of the file.
        path: std::path::PathBuf,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// The other endpoint left in the middle of a measurement.
    #[error("the other end closed in the middle of a message: {got} of {size} bytes arrived")]
    Closed {
        /// Bytes that arrived.
        got: usize,
        /// Bytes that were expected.
        size: usize,
    },
    /// An operation took longer than its limit.
    #[error("{what} did not end within {seconds} s")]
    Timeout {
        /// Operation that was waited for.
        what: String,
        /// Its limit.
        seconds: f64,
    },
    /// A worker process sent something that is not a reply, or nothing at all.
    #[error("worker process: {0}")]
    Worker(String),
    /// Tombolo refused or lost a channel.
    #[error(transparent)]
    Tombolo(tombolo::Error),
    /// The command line asks for something that does not exist.
    #[error("{0}")]
    Usage(String),
}
