// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages between host and guest: one JSON value on each line. Both ends are this same binary, so there is no
//! version.

use serde::{Deserialize, Serialize};

/// Messages from the host.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToGuest {
    /// Starts a command.
    Run {
        /// Number of the command from now on.
        job: u32,
        /// Program and its arguments.
        argv: Vec<String>,
    },
    /// Sends SIGKILL.
    Kill {
        /// Number of the command.
        job: u32,
    },
}

/// Messages from the guest.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToHost {
    /// The guest is up.
    Ready,
    /// A command printed a line.
    Line {
        /// Number of the command.
        job: u32,
        /// Line without its end.
        text: String,
    },
    /// A command ended, and all its output was sent.
    Exit {
        /// Number of the command.
        job: u32,
        /// Exit status of the command.
        end: End,
    },
}

/// Exit status of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// The command exited with this code.
    Code(i32),
    /// A signal killed the command.
    Signal(i32),
    /// The command could not be started.
    NotStarted,
}
