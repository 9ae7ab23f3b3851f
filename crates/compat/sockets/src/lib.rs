// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 3. Uses: layout, mem, os, ring, growth, domain.
//!
//! TCP connections whose bytes go through shared memory where both endpoints can share it, and over TCP where they
//! cannot.
//!
//! This crate is everything except the interception of calls. Here two endpoints find each other ([`claim`]) and prove
//! that they are the endpoints of one connection ([`proof`]). Each direction moves between TCP and its pipe at an
//! offset ([`switch`]), and [`connection`] carries out the program's calls. `spec/6-sockets.md` is the normative text.
//!
//! A front (the preload library) owns the descriptors and the calls. It provides the kernel as a [`kernel::Kernel`] and
//! the domain's backend as a [`Rendezvous`].
//!
//! # Example
//! Determines which of two endpoints claims a connection, and the name under which both search for it:
//! ```
//! use tombolo_sockets::tuple::{Role, Tuple};
//!
//! let client = Tuple::new("10.0.0.2:51234".parse()?, "10.0.0.1:80".parse()?);
//! let server = client.mirrored();
//! assert_eq!(client.key(), server.key());
//! assert_eq!((server.role(), client.role()), (Some(Role::Waiting), Some(Role::Seeking)));
//! # Ok::<(), std::net::AddrParseError>(())
//! ```
#![deny(unsafe_code)]

pub mod claim;
pub mod connection;
mod connection_table;
mod credit;
mod direction;
mod exchange;
pub mod folder;
mod fork;
mod fork_group;
pub mod gather;
pub mod hook;
mod journal;
pub mod kernel;
mod negotiation;
mod offered_ring;
mod pace;
mod pipes;
pub mod ports;
mod process;
mod program_call;
pub mod proof;
mod quota;
mod random;
mod reason;
mod session;
mod spare;
pub mod spin;
mod stage;
pub mod switch;
pub mod switched;
pub mod tuple;
mod waiting;

pub use exchange::Exchange;
pub use fork::Forking;
pub use journal::Journal;
pub use pipes::{Broken, Read, Source};
pub use process::{Process, RESET_LINE, Settings};
pub use program_call::ProgramCall;
pub use reason::Reason;
pub use session::SessionPath;
pub use tombolo_domain::{Rendezvous, SingleDoorbell, aside};
pub use waiting::{Instances, Seat, Waiter, WaiterPool};
