// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an interface is to be, and where its peer is met.

use crate::{handle::NicConfig, mac::Mac};

/// Bytes of the ring where nobody says otherwise (N-1).
pub const RING_DEFAULT: u64 = 1 << 20;
/// Bytes of the smallest ring.
pub const RING_LEAST: u64 = 256 << 10;

/// Where the peer is met.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// Who listens at this address.
    Connect(String),
    /// Who connects to this address.
    Listen(String),
}

impl Place {
    /// The address.
    #[must_use]
    pub fn address(&self) -> &str {
        match self {
            Self::Connect(address) | Self::Listen(address) => address,
        }
    }

    /// `connect` or `listen`.
    #[must_use]
    pub fn role(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Listen(_) => "listen",
        }
    }
}

/// Who moves the frames of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EngineKind {
    /// This process, through a TAP device.
    #[default]
    Tap,
    /// The kernel's module, in a virtual machine.
    Kernel,
    /// The module where it can, else this process.
    Auto,
}

/// What an interface is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The interface.
    pub nic: NicConfig,
    /// Who moves its frames.
    pub engine: EngineKind,
    /// Its peer.
    pub place: Place,
    /// Whether frames may come from other addresses than the peer's own: it is a bridge's port (N-6).
    pub any_source: bool,
    /// Bytes of the own ring.
    pub ring: u64,
    /// Whether a rule of the host's wants it (B-28), and not somebody here.
    pub by_rule: bool,
    /// The network of many that it belongs to, if it does.
    pub member: Option<Member>,
}

/// What is known of a peer in a network of many, before it says it (N-14).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// The network's name.
    pub network: String,
    /// The peer's hardware address.
    pub mac: Mac,
    /// The network's MTU.
    pub mtu: u32,
}
