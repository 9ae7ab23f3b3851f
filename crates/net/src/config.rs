// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an interface is to be, and where its peer is met.

use crate::tap::TapConfig;

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

/// What an interface is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The interface.
    pub tap: TapConfig,
    /// Its peer.
    pub place: Place,
    /// Whether frames may come from other addresses than the peer's own: it is a bridge's port (N-6).
    pub any_source: bool,
    /// Bytes of the own ring.
    pub ring: u64,
}
