// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The peer's pages belong to the test, which changes them at any time: bit flips, random and replayed words, invalid
//! lengths, a thread of its own. The victim always gets correct data or `Corrupt` with a clause. It never panics, never
//! hangs, notifies at most once a call, and never accesses memory outside its mappings (nothing is mapped beside them;
//! the AddressSanitizer job runs this file too).
//!
//! `TOMBOLO_LONG=1` runs the long form.
#![cfg(not(loom))]

#[path = "../common/mod.rs"]
mod common;
mod forged;
mod readers;
mod words;
mod writers;
