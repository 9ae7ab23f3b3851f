// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An end of a channel to another machine, as the broker of this kernel tells of it.

use std::time::SystemTime;

use serde::Serialize;
use tombolo_control::Progress;

use super::segment::Segment;

/// The machine at the other end of a channel, and the link to it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Machine {
    /// What the host calls it; `host`, or an account, for programs of the host.
    pub name: String,
    /// How it fares: `running`, `paused`, `gone`, `unknown`.
    pub life: &'static str,
    pub link: u32,
    /// Of the link's memory: another one after each life of a machine.
    pub generation: u32,
    /// Bytes of the link that each end has for this channel, this one's first.
    pub slices: [u64; 2],
    /// How often interrupts of that machine on this link had to be held back here, where that is counted.
    pub storms: Option<u32>,
}

/// A channel as a broker tells of it.
#[derive(Debug)]
pub struct Call {
    pub address: Option<String>,
    pub machine: Machine,
    /// Where it stands among the calls of this broker.
    pub place: u64,
    pub listened: bool,
    pub progress: Progress,
    /// When it began, if that is known.
    pub made: Option<SystemTime>,
    /// The rings of this end and of the peer's, the first one first.
    pub rings: [Vec<Segment>; 2],
}
