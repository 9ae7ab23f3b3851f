// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The harsh double: a hypervisor in one process, with the habits of all hypervisors at once. Threads play the domains.
//!
//! What holds here holds under Xen and KVM, because nothing is easier here:
//!
//! * memory is passed by reference number, and each reference is mapped once only (Xen's grants);
//! * no mapping is inherited by a child made by fork, and a store to the peer's memory faults;
//! * two domains have one doorbell in each direction, so every ring wakes all waiters of all channels between them
//!   (an MSI-X vector);
//! * a peer's life is reported by the [`Hypervisor`] and by nobody else;
//! * memory that was retired or revoked stays in quarantine, counted against its owner, while the peer maps it;
//! * control messages have little room ([`MESSAGES_MAX`] wait at most), and so have listeners ([`BACKLOG_MAX`]).
//!
//! And the hypervisor does on command what a real one does on its own: [`pause`](Hypervisor::pause),
//! [`kill_process`](Hypervisor::kill_process), [`kill_domain`](Hypervisor::kill_domain), [`storm`](Hypervisor::storm),
//! [`revoke`](Hypervisor::revoke), and, as a peer that lies would, [`mutate`](Hypervisor::mutate).
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
//! let mut server = listener.accept()?.expect("one peer knocked");
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

/// Control messages that wait for a peer at most.
pub const MESSAGES_MAX: usize = 8;
/// Peers that wait for a listener to accept them at most.
pub const BACKLOG_MAX: usize = 16;
/// Bytes that a domain may share at most, quarantine included, unless [`Hypervisor::limit_memory`] says otherwise.
pub const MEMORY_MAX: u64 = 4 << 30;
