// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 1. Uses: layout, os.
//!
//! Decides when the ring of a direction grows and shrinks ([`Growth`]), and how much memory rings may take
//! ([`RingBudget`]). The budget takes into account what the machine and the control groups have left. This crate only
//! decides. The owners of rings move them: streams of `tombolo-channel`, and connections of `tombolo-sockets`.
#![forbid(unsafe_code)]

mod budget;
mod caches;
mod policy;
mod pressure;
mod trial;

pub use budget::RingBudget;
pub use caches::RingChoice;
pub use policy::{Growth, GrowthRule, RingGrowth, RingReason};
