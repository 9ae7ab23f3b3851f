// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 3. Uses: nothing.
//!
//! The memory layout of Xen's libxenvchan, for peers that run the original. It is one page that both ends write, with the
//! positions of two rings, their sizes, two bytes that say who is there and two that say who wants to be woken.
//!
//! That layout breaks invariants of Tombolo's that hold everywhere else: both sides write one page, and all bookkeeping is
//! in it. So it lives here and nowhere else, is used only where an address asks for it, and believes nothing. This end's
//! own positions and sizes are private and never read back, each word of the peer's is loaded once and checked, and a lie
//! is [`Error::Corrupt`], where the original stops for ever without a word. Clauses W-3 to W-8 of `spec/8-vchan.md`.
//!
//! It knows nothing of Xen either: memory and event channels are the traits of [`ground`].
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
