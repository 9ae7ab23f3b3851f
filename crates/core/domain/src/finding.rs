// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How the two ends of a TCP connection between two kernels find each other: by the broker of each one's own kernel. S-18
//!
//! What is found is a hint. It says whom to ask, and never who somebody is.

use crate::Endpoint;

/// Where the other end of a connection waits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sought {
    /// Not known yet: ask again in a later call.
    Later,
    /// Nobody is known to wait.
    Nobody,
    /// At this service, to be reached by [`Rendezvous::begin_connect`](crate::Rendezvous::begin_connect).
    At(String),
}

/// One process's conversation with its broker about who is where. It serves a program that knows nothing of it, so no call here
/// waits for anybody.
pub trait PeerFinder: Send + std::fmt::Debug {
    /// Whether a neighbouring domain may have this address (IPv6, or IPv4 mapped); `None` while that is not known.
    fn is_near(&mut self, address: [u8; 16]) -> Option<bool>;

    /// From now on who looks for `key` is told of this process.
    fn claim_key(&mut self, key: u32);

    /// No longer.
    fn withdraw_key(&mut self, key: u32);

    /// Where the end waits that claimed `key`, in a domain that may have this address.
    fn seek_key(&mut self, key: u32, address: [u8; 16]) -> Sought;

    /// Nobody answered there: what was found is forgotten.
    fn forget_key(&mut self, key: u32);

    /// The next process that was told of this one and came, if there is one.
    fn accept_peer(&mut self) -> Option<Box<dyn Endpoint>>;
}
