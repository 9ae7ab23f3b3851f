// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection to another machine, as the broker of this kernel lists it.

use std::time::SystemTime;

use serde::Serialize;
use tombolo_control::Progress;

use crate::segment::Segment;

/// The machine at the other end of a channel, and the link to it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Machine {
    /// What the host calls it; `host`, or an account, for programs of the host.
    pub name: String,
    /// How it fares: `running`, `paused`, `gone`, `unknown`.
    pub life: &'static str,
    /// The number of the link.
    pub link: u32,
    /// Generation of the link's memory. It changes with each incarnation of a machine.
    pub generation: u32,
    /// Bytes of the windows that the two ends have for this channel, this one's first.
    pub slices: [u64; 2],
    /// How often interrupts of that machine on this link were held back here, where that is counted.
    pub storms: Option<u32>,
}

/// A connection as a broker lists it.
#[derive(Debug)]
pub struct RemoteConnection {
    pub address: Option<String>,
    pub machine: Machine,
    /// Where it stands among the connections of this broker.
    pub row: u64,
    pub listened: bool,
    pub progress: Progress,
    /// When it began, if that is known.
    pub made: Option<SystemTime>,
    /// The rings of this end and of the peer's, the first one first.
    pub rings: [Vec<Segment>; 2],
}
