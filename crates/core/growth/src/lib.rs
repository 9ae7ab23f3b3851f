// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 1. Uses: layout, os.
//!
//! When the ring of a direction grows and shrinks ([`Growth`]), and how much memory rings may take: a [`RingBudget`], which looks
//! at what the machine and the control groups have left. It decides only. Who has the ring moves it: streams of
//! `tombolo-channel`, and connections of `tombolo-sockets`.
#![forbid(unsafe_code)]

mod budget;
mod caches;
mod policy;
mod pressure;
mod trial;

pub use budget::RingBudget;
pub use caches::RingChoice;
pub use policy::{Growth, GrowthRule, RingGrowth, RingReason};
