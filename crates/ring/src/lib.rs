// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 1. Uses: layout, mem.
#![forbid(unsafe_code)]

mod deadline;

pub use deadline::Deadline;
