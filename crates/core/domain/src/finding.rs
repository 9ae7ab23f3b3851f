// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the two endpoints of a TCP connection between two kernels find each other, through the brokers of their own
//! kernels (S-18).
//!
//! A result is a hint. It tells which domain to ask, and never proves an identity.

use crate::Endpoint;

/// Place where the other endpoint of a connection waits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sought {
    /// The place is not known yet: ask again in a later call.
    Later,
    /// No endpoint is known to wait.
    Nobody,
    /// At this service, which [`Rendezvous::begin_connect`](crate::Rendezvous::begin_connect) can reach.
    At(String),
}

/// One process's conversation with its broker about the places of endpoints. It serves a program that is not aware of
/// it, so no call here waits.
pub trait PeerFinder: Send + std::fmt::Debug {
    /// Returns whether a neighbouring domain may have this address (IPv6, or IPv4 mapped); `None` while that is not
    /// known.
    fn is_near(&mut self, address: [u8; 16]) -> Option<bool>;

    /// Claims `key`: from now on, a process that looks for `key` is told of this one.
    fn claim_key(&mut self, key: u32);

    /// Ends the claim of `key`.
    fn withdraw_key(&mut self, key: u32);

    /// Returns where the endpoint waits that claimed `key`, in a domain that may have this address.
    fn seek_key(&mut self, key: u32, address: [u8; 16]) -> Sought;

    /// Forgets the place found for `key`, because no endpoint answered there.
    fn forget_key(&mut self, key: u32);

    /// Returns the next process that was told of this one and has connected, if there is one.
    fn accept_peer(&mut self) -> Option<Box<dyn Endpoint>>;
}
