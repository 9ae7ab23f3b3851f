// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an interface tells of itself.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::{config::Config, counters::Figures, mac::Mac};

/// Whether there is a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No peer is there, or none that fits.
    Waiting,
    /// Frames go both ways.
    Linked,
}

/// What the peer said in its hello, and who the backend says it is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PeerStatus {
    /// Its domain.
    pub domain: String,
    /// Its address.
    pub mac: Mac,
    /// Its MTU.
    pub mtu: u32,
    /// What it takes.
    pub features: Vec<&'static str>,
}

/// What an interface is doing.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Its name.
    pub interface: String,
    /// The network namespace that it was made in, if it was named.
    pub netns: Option<String>,
    /// The process that has it.
    pub pid: u32,
    /// Who moves its frames: `tap` or `kernel`.
    pub engine: &'static str,
    /// Where it meets its peer.
    pub address: String,
    /// `connect` or `listen`.
    pub role: &'static str,
    /// Whether a rule of the host's wants it (B-28), and not somebody here.
    pub by_rule: bool,
    /// The network of many that it belongs to, if it does.
    pub network: Option<String>,
    /// Whether there is a link.
    pub state: State,
    /// The last that was said of it.
    pub reason: String,
    /// How long the link has lasted.
    pub seconds: u64,
    /// How many links there have been.
    pub links: u64,
    /// The interface's address.
    pub mac: Mac,
    /// Its MTU, which is that of the link while there is one.
    pub mtu: u32,
    /// The peer, while there is a link.
    pub peer: Option<PeerStatus>,
    /// What went to the peer.
    pub sent: Figures,
    /// What came from it.
    pub received: Figures,
    #[serde(skip)]
    pub(crate) since: Option<Instant>,
}

impl Status {
    pub(crate) fn new(config: &Config, engine: &'static str, mac: Mac, mtu: u32) -> Self {
        Self {
            interface: config.nic.name.clone(),
            netns: config.nic.netns.clone(),
            pid: std::process::id(),
            engine,
            address: config.place.address().into(),
            role: config.place.role(),
            by_rule: config.by_rule,
            network: config.member.as_ref().map(|member| member.network.clone()),
            state: State::Waiting,
            reason: String::new(),
            seconds: 0,
            links: 0,
            mac,
            mtu,
            peer: None,
            sent: Figures::default(),
            received: Figures::default(),
            since: None,
        }
    }
}
