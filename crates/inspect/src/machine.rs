// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Describes a connection to another machine, as the broker of this kernel lists it.

use std::time::SystemTime;

use serde::Serialize;
use tombolo_control::Progress;

use crate::segment::Segment;

/// The machine at the other end of a channel, and the link to it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Machine {
    /// Name that the host gives it; `host`, or an account, for programs of the host.
    pub name: String,
    /// Its liveness: `running`, `paused`, `gone`, `unknown`.
    pub life: &'static str,
    /// Number of the link.
    pub link: u32,
    /// Generation of the link's memory. It changes with each incarnation of a machine.
    pub generation: u32,
    /// Size in bytes of this endpoint's window for the channel, and of the peer's.
    pub windows: [u64; 2],
    /// Number of times that interrupts of that machine on this link were held back here, if that is counted.
    pub storms: Option<u32>,
}

/// A connection as a broker lists it.
#[derive(Debug)]
pub struct RemoteConnection {
    pub address: Option<String>,
    pub machine: Machine,
    /// Number of the row in the broker's listing.
    pub row: u64,
    pub listened: bool,
    pub progress: Progress,
    /// Time at which it began, if known.
    pub made: Option<SystemTime>,
    /// Rings of this endpoint and of the peer, the first ring first.
    pub rings: [Vec<Segment>; 2],
}
