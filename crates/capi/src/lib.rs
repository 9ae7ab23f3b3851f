// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 4. Uses: tombolo.
//!
//! The C interface. C programmers read `include/tombolo.h`, which is generated from this crate: the doc comment of an
//! exported item is its manual. `docs/guide/c.md` is the walk-through.
//!
//! Structure of an exported function: its arguments are types of `pointers`, the only module that turns pointers into
//! references. Its body runs inside `border::guard`, the only place that turns errors and panics into numbers. A
//! handle's two halves are `half::Half`s, each of which serves one call at a time. The rest is a few lines of safe
//! code.
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
