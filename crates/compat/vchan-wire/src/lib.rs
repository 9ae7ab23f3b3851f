// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 3. Uses: nothing.
//!
//! The memory layout of Xen's libxenvchan, for peers that run the original. It is one page that both endpoints write.
//! The page holds the positions of two rings, their sizes, two bytes for whether each endpoint is there, and two for
//! the events that each asks for.
//!
//! That layout breaks invariants that hold everywhere else in Tombolo: both sides write one page, and all bookkeeping
//! is in it. So this crate alone has it, it is used only where an address asks for it, and it trusts no value of the
//! peer's. This endpoint's own positions and sizes are private and never read back. Each word of the peer's is loaded
//! once and checked. A protocol violation is [`Error::Corrupt`], where the original stops for ever without an error
//! (clauses W-3 to W-8 of `spec/8-vchan.md`).
//!
//! The crate does not depend on Xen either: memory and event channels are the traits of [`ground`].
#![forbid(unsafe_code)]

mod error;
pub mod ground;
mod layout;
mod pipe;
mod set_up;
mod sleep;

pub use error::{Error, Result};
pub use layout::{GRANTS_AT, NOTIFY_READ, NOTIFY_WRITE, ORDER_MAX, PAGE, Sizes, at};
pub use pipe::{Live, Reader, Watch, Writer};
pub use set_up::{Halves, Server, client, is_served};
