// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What host and guest say to each other: one JSON value on a line. Both ends are this very binary, so there is no
//! version.

use serde::{Deserialize, Serialize};

/// From the host.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToGuest {
    /// Start a command.
    Run {
        /// Names the command from now on.
        job: u32,
        /// The program and its arguments.
        argv: Vec<String>,
    },
    /// Send SIGKILL.
    Kill {
        /// Which command.
        job: u32,
    },
}

/// From the guest.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToHost {
    /// The guest is up.
    Ready,
    /// A command printed a line.
    Line {
        /// Which command.
        job: u32,
        /// The line, without its end.
        text: String,
    },
    /// A command ended, and all that it printed was said.
    Exit {
        /// Which command.
        job: u32,
        /// How.
        end: End,
    },
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// It could not be started.
    NotStarted,
}
