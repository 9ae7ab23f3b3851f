// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Status of an interface, for tools.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::{config::Config, counters::Figures, mac::Mac};

/// State of the link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No peer is there, or none that fits.
    Waiting,
    /// There is a link: frames go both ways.
    Linked,
}

/// The peer's hello, and its domain as the backend reports it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PeerStatus {
    /// Domain of the peer.
    pub domain: String,
    /// Hardware address of the peer.
    pub mac: Mac,
    /// MTU of the peer.
    pub mtu: u32,
    /// Features that the peer takes.
    pub features: Vec<&'static str>,
}

/// Status of an interface.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Name of the interface.
    pub interface: String,
    /// Network namespace in which it was made, if one was named.
    pub netns: Option<String>,
    /// Process that owns it.
    pub pid: u32,
    /// Engine that moves its frames: `tap` or `kernel`.
    pub engine: &'static str,
    /// Address at which it meets its peer.
    pub address: String,
    /// `connect` or `listen`.
    pub role: &'static str,
    /// Whether a rule of the host requires it (B-28), and not a user of this machine.
    pub by_rule: bool,
    /// Network of many to which it belongs, if it does.
    pub network: Option<String>,
    /// Whether there is a link.
    pub state: State,
    /// Last line that was reported.
    pub reason: String,
    /// Duration of the link in seconds.
    pub seconds: u64,
    /// Number of links so far.
    pub links: u64,
    /// Hardware address of the interface.
    pub mac: Mac,
    /// MTU of the interface, which is that of the link while there is one.
    pub mtu: u32,
    /// The peer, while there is a link.
    pub peer: Option<PeerStatus>,
    /// Traffic to the peer.
    pub sent: Figures,
    /// Traffic from the peer.
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
