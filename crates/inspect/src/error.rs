// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of this crate.

use std::{io, path::PathBuf, time::Duration};

use tombolo_control::{Fault, Message, VERSION};
pub(crate) use tombolo_os::failed_call::{FailedCall, Os};

/// Reason for which the search, or a question to a broker, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the kernel cannot be read.
    #[error("cannot read {file}")]
    Read {
        /// Path of the file.
        file: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A folder of listeners cannot be read.
    #[error("cannot look into {folder}")]
    Folder {
        /// Path of the folder, safe for a terminal.
        folder: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// No broker can be reached.
    #[error("cannot open {} (is tombolod running, and may you use it?)", .socket.display())]
    NoBroker {
        /// Path of the broker's socket.
        socket: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The broker refuses. The text is its reason.
    #[error("{why}")]
    Refused {
        /// Reason as a number (B-15).
        code: u16,
        /// Reason in the broker's words.
        why: String,
    },
    /// The broker sent a message that does not answer the question.
    #[error("the broker answers with {0:?}")]
    Unexpected(Box<Message>),
    /// The broker did not begin with Hello.
    #[error("it begins with {0:?}")]
    NoHello(Box<Message>),
    /// The broker speaks no version that this tool speaks.
    #[error("the broker speaks versions {oldest} to {newest} and this tool {VERSION}: upgrade the older one")]
    Version {
        /// Oldest version of the broker (B-6).
        oldest: u16,
        /// Newest version of the broker.
        newest: u16,
    },
    /// The broker sent bytes that are no message.
    #[error("the broker is not understood: {0}")]
    Malformed(Fault),
    /// The broker sent more than any broker has to send. Its answer is not used.
    #[error("the broker answers with more than {most} messages: it is broken, restart it")]
    TooMuch {
        /// Largest number of messages that is accepted.
        most: usize,
    },
    /// The broker closed the connection.
    #[error("the broker closed the connection")]
    Closed,
    /// The broker did not answer in time.
    #[error("the broker does not answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// A call failed that should not fail.
    #[error(transparent)]
    Os(#[from] FailedCall),
}

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
