// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the broker does for domains of Xen's.
//!
//! In dom0 it tells them each other's names ([`names`]). In each of them it ends what programs that died had granted
//! ([`grant_reaper`]); [`run`] is the daemon in a domain that has nothing else to do.

pub mod grant_reaper;
pub mod names;
pub mod run;
