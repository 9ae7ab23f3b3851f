// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 2. Uses: os, layout, mem, ring.
//!
//! What a backend is: three small traits. [`Rendezvous`] makes two endpoints meet; the [`Endpoint`] it gives them is
//! their [`Memory`], their control path and what is known of the peer's life; a [`Doorbell`] wakes a waiter.
//!
//! The rules were settled on the harsh double (crate `tombolo-testing`), which has the habits of all hypervisors at
//! once. Nothing here presumes descriptors that can be passed, memory that can be mapped twice, mappings that survive a fork,
//! a doorbell of one's own per channel, or a peer that behaves.
#![forbid(unsafe_code)]

mod doorbell;
mod error;
mod finding;
mod link;
mod poll;
mod rendezvous;
mod single;

pub use doorbell::{Doorbell, Slot, Woken};
pub use error::Error;
pub use finding::{PeerFinder, Sought};
pub use link::{Allocator, DriverParts, Endpoint, Liveness, Memory, Offer, Peer, Received};
pub use poll::wait_readable;
pub use rendezvous::{Connecting, Held, Listener, Rendezvous};
pub use single::{SingleDoorbell, SingleNotifier};
pub use tombolo_os::reserved as aside;
pub use tombolo_ring::{Deadline, Spin};

/// What the calls of this crate return.
pub type Result<T> = std::result::Result<T, Error>;
