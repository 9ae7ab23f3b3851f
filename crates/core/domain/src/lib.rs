// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 2. Uses: os, layout, mem, ring.
//!
//! The interface of a backend: three small traits. [`Rendezvous`] makes two endpoints meet. The [`Endpoint`] that it
//! gives each of them is their [`Memory`], their control path and the liveness of the peer. A [`Doorbell`] wakes a
//! waiter.
//!
//! The rules were settled on the harsh double (crate `tombolo-testing`), a backend with the restrictions of all
//! hypervisors at once. Nothing here presumes descriptors that can be passed, memory that can be mapped twice, mappings
//! that survive a fork, one doorbell per channel, or a peer that behaves.
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

/// Result of the calls of this crate.
pub type Result<T> = std::result::Result<T, Error>;
