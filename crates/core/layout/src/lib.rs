// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 0. Uses: nothing.
//!
//! Defines every byte that two domains agree on: offsets, sizes, magics, limits, and the encoding of the segment
//! header, the record header, the state words and the control messages. `spec/` is the normative text; each item here
//! names its clause.
//!
//! Everything is little-endian, of fixed width, with explicit padding that is zero.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod connection_table;
pub mod features;
pub mod handshake;
pub mod header;
pub mod limits;
pub mod local;
pub mod outline;
pub mod private;
pub mod record;
pub mod sockets;
pub mod state;
pub mod words;
pub mod xen;

pub use features::Features;
pub use header::{Geometry, HeaderError, SegmentHeader};

/// First eight bytes of every segment and of every control message, for ever (M-1).
pub const MAGIC: [u8; 8] = *b"TOMBOLO\0";

/// Version of the layout that this code speaks. It changes when an old peer would misread a byte (M-1).
pub const VERSION: u16 = 1;
