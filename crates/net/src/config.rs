// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Configuration of an interface, and the place where its peer is met.

use crate::{handle::NicConfig, mac::Mac};

/// Default size of the ring in bytes (N-1).
pub const RING_DEFAULT: u64 = 1 << 20;
/// Size of the smallest ring in bytes.
pub const RING_LEAST: u64 = 256 << 10;

/// Place where the peer is met.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// The peer listens at this address.
    Connect(String),
    /// The peer connects to this address.
    Listen(String),
}

impl Place {
    /// Returns the address.
    #[must_use]
    pub fn address(&self) -> &str {
        match self {
            Self::Connect(address) | Self::Listen(address) => address,
        }
    }

    /// Returns `connect` or `listen`.
    #[must_use]
    pub fn role(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Listen(_) => "listen",
        }
    }
}

/// The engine that moves the frames of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EngineKind {
    /// This process, through a TAP device.
    #[default]
    Tap,
    /// The kernel's module, in a virtual machine.
    Kernel,
    /// The module where that is possible, else this process.
    Auto,
}

/// Configuration of an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The interface itself.
    pub nic: NicConfig,
    /// Engine that moves its frames.
    pub engine: EngineKind,
    /// Place where it meets its peer.
    pub place: Place,
    /// Whether frames may come from other addresses than the peer's own, because the interface is a bridge's port
    /// (N-6).
    pub any_source: bool,
    /// Size of the own ring in bytes.
    pub ring: u64,
    /// Whether a rule of the host requires it (B-28), and not a user of this machine.
    pub by_rule: bool,
    /// Network of many to which it belongs, if it does.
    pub member: Option<Member>,
}

/// Properties of a peer in a network of many that are known before its hello (N-14).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Name of the network.
    pub network: String,
    /// Hardware address of the peer.
    pub mac: Mac,
    /// MTU of the network.
    pub mtu: u32,
}
