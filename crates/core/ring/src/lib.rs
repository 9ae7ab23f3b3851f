// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 1. Uses: layout, mem.
//!
//! One pipe: a [`Writer`] publishes bytes into a ring that it owns, and a [`Reader`] consumes them. With [`wait`]
//! either sleeps until the other has made progress. Works over any [`Mem`](tombolo_mem::Mem): mapped memory, or the
//! cells of a model checker. `spec/2-ring.md` is the normative text.
#![forbid(unsafe_code)]

mod counters;
mod deadline;
mod error;
mod mapped;
mod notify;
mod pause;
mod private;
mod reader;
mod ring;
mod slip;
mod spin;
mod stats_page;
mod stores;
mod wait;
mod writer;
mod zero_copy;

pub use counters::Counters;
pub use deadline::Deadline;
pub use error::{Corrupt, Error};
pub use mapped::{Fresh, Halves, Mode, follow, halves};
pub use notify::FenceMode;
pub use reader::{Handover as ReaderHandover, Reader, ReaderParts};
pub use ring::{OwnRing, PeerRing};
pub use spin::Spin;
pub use stats_page::StatsPage;
pub use tombolo_layout::private::Record;
pub use wait::{Side, WaitContext, Waited, Waits, Woken, arm, wait};
pub use writer::{FlushPolicy, Handover as WriterHandover, ReaderView, Writer, WriterParts};
pub use zero_copy::{Peeked, ReadInPlace, Reserved, WriteInPlace};
