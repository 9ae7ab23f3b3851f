// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves Xen domains.
//!
//! In dom0 the broker tells domains each other's names ([`names`]). In each domain it ends grants of programs that died
//! ([`grant_reaper`]); [`run`] is the daemon in a domain that needs nothing else.

pub mod grant_reaper;
pub mod names;
pub mod run;
