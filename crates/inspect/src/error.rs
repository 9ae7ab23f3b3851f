// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Why it was not possible to look.

use std::{io, path::PathBuf, time::Duration};

use tombolo_control::{Fault, Message, VERSION};
pub(crate) use tombolo_os::failed_call::{FailedCall, Os};

/// Why it was not possible to look, or to ask a broker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the kernel's cannot be read.
    #[error("cannot read {file}")]
    Read {
        /// Which.
        file: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A folder of listeners cannot be read.
    #[error("cannot look into {folder}")]
    Folder {
        /// Which, as a terminal may show it.
        folder: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// No broker can be reached.
    #[error("cannot open {} (is tombolod running, and may you use it?)", .socket.display())]
    NoBroker {
        /// The socket at which it was to be.
        socket: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The broker refuses. The text is its reason.
    #[error("{why}")]
    Refused {
        /// Why, as a number (B-15).
        code: u16,
        /// Why, in its words.
        why: String,
    },
    /// The broker sent another message than the one that answers.
    #[error("the broker answers with {0:?}")]
    Unexpected(Box<Message>),
    /// The broker did not begin with Hello.
    #[error("it begins with {0:?}")]
    NoHello(Box<Message>),
    /// The broker speaks no version that this tool speaks.
    #[error("the broker speaks versions {oldest} to {newest} and this tool {VERSION}: upgrade the older one")]
    Version {
        /// Its oldest (B-6).
        oldest: u16,
        /// Its newest.
        newest: u16,
    },
    /// What the broker sent is no message.
    #[error("the broker is not understood: {0}")]
    Malformed(Fault),
    /// The broker says more than any broker has to say. What it said is not believed.
    #[error("the broker answers with more than {most} messages: it is broken, restart it")]
    TooMuch {
        /// What is listened to.
        most: usize,
    },
    /// The broker closed the connection.
    #[error("the broker closed the connection")]
    Closed,
    /// The broker did not answer in time.
    #[error("the broker does not answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// A call that should not fail.
    #[error(transparent)]
    Os(#[from] FailedCall),
}

/// What this crate's calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
