// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: tombolo.
//!
//! The C interface. What a C programmer reads is `include/tombolo.h`, which is generated from this crate: the doc
//! comment of an exported item is its manual. `docs/guide/c.md` is the walk-through.
//!
//! How an exported function is built. Its arguments are types of `pointers`, which alone turns pointers into
//! references. Its body runs inside `border::guard`, which alone turns errors and panics into numbers. A handle's two
//! halves are `half::Half`s, each of which belongs to one call at a time. What is left is a few lines of safe code.
#![deny(unsafe_code)]

mod border;
mod channel;
mod half;
mod halves;
mod listener;
mod messages;
mod options;
mod pointers;
mod stream;
mod structs;
