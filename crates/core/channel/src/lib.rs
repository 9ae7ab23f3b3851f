// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 3. Uses: layout, mem, os, ring, growth, domain.
//!
//! A channel: two pipes between two endpoints that met through some backend, behind one interface. This crate knows
//! only the traits of `domain`; the facade passes it the backends.
#![forbid(unsafe_code)]

mod address;
mod backends;
mod connect;
mod control;
#[doc(hidden)]
pub mod driver;
mod end;
mod error;
#[doc(hidden)]
pub mod fast;
mod half;
mod handover;
mod listen;
mod messages;
mod mode;
mod moves;
mod options;
mod os;
mod pollable;
mod receiving;
mod sending;
mod signalled;
mod stats;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod waiter;
mod watch;

pub use address::{Address, AddressError};
pub use backends::Backends;
pub use connect::Channel;
pub use end::Ending;
pub use error::Error;
pub use half::{MessageReceiver, MessageSender, ReadHalf, Rx, Tx, WriteHalf};
pub use listen::Listener;
pub use messages::Messages;
pub use mode::{MessageMode, Mode, StreamMode};
pub use options::Options;
pub use stats::{PipeStatistics, Statistics};
pub use stream::Stream;
pub use tombolo_domain::{Deadline, Error as BackendError, Liveness, Peer};
pub use tombolo_growth::{RingBudget, RingChoice, RingGrowth, RingReason};
pub use tombolo_layout::handshake::Refusal;
pub use tombolo_mem::SharedSlice;
pub use tombolo_ring::{Corrupt, Counters, FlushPolicy, Peeked, Reserved};
pub use watch::Watch;

/// Result of the calls of this crate.
pub type Result<T> = std::result::Result<T, Error>;
