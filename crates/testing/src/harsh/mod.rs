// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The harsh double: a hypervisor in one process, with the difficult properties of all hypervisors at once. Threads
//! play the domains.
//!
//! Code that works here works under Xen and KVM, because nothing is easier here:
//!
//! * memory is passed by reference number, and each reference is mapped once only (Xen's grants);
//! * no child made by fork inherits a mapping, and a store to the peer's memory faults;
//! * two domains have one doorbell in each direction, so every notification wakes all waiters of all channels between
//!   them (an MSI-X vector);
//! * only the [`Hypervisor`] reports a peer's liveness;
//! * memory that was retired or revoked stays in quarantine, counted against its owner, while the peer maps it;
//! * there is little room for control messages (at most [`MESSAGES_MAX`] wait) and in listeners ([`BACKLOG_MAX`]).
//!
//! The hypervisor also does on command what a real one does by itself: [`pause`](Hypervisor::pause),
//! [`kill_process`](Hypervisor::kill_process), [`kill_domain`](Hypervisor::kill_domain), [`storm`](Hypervisor::storm),
//! [`revoke`](Hypervisor::revoke), and, as a hostile peer would, [`mutate`](Hypervisor::mutate).
//!
//! # Example
//! ```
//! use tombolo_domain::{Deadline, Listener, Liveness, Rendezvous};
//! use tombolo_testing::harsh::Hypervisor;
//!
//! let hypervisor = Hypervisor::new();
//! let (a, b) = (hypervisor.domain("a"), hypervisor.domain("b"));
//! let mut listener = a.listen("a/echo")?;
//! let mut client = b.connect("a/echo", Deadline::NEVER)?;
//! let mut server = listener.accept()?.expect("one peer connected");
//!
//! client.send(b"hello", None)?;
//! assert_eq!(server.recv(0)?.expect("one message came").message, b"hello");
//!
//! hypervisor.pause(&b);
//! client.send(b"held until resumed", None)?;
//! assert!(server.recv(0)?.is_none());
//! assert_eq!(server.liveness(), Liveness::Paused);
//! # Ok::<(), tombolo_domain::Error>(())
//! ```

mod commands;
mod domain;
mod doorbell;
mod end;
mod forger;
mod grants;
mod ids;
mod link;
mod world;

pub use commands::{Hypervisor, Revocation, Storm};
pub use domain::HarshDomain;
pub use forger::Forger;

/// Largest number of control messages that wait for a peer.
pub const MESSAGES_MAX: usize = 8;
/// Largest number of peers that wait for a listener to accept them.
pub const BACKLOG_MAX: usize = 16;
/// Most bytes that a domain may share, quarantine included, unless [`Hypervisor::limit_memory`] sets another limit.
pub const MEMORY_MAX: u64 = 4 << 30;
