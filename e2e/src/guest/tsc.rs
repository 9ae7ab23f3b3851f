// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures the rate of the processor's time stamp counter.
//!
//! An emulated guest reads the host's counter. On a loaded host the guest measures the rate badly wrong, so the host
//! passes the rate to it. The module is unsafe because reading the counter is.
#![allow(unsafe_code)]

use crate::error::Result;
use rustix::event::poll;
use rustix::time::Timespec;
use std::time::Instant;

/// Returns the rate in kilohertz, measured in a tenth of a second.
///
/// # Errors
/// No error is known.
pub fn khz() -> Result<u64> {
    let (start, from) = (Instant::now(), read());
    poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }))?;
    let (to, nanoseconds) = (read(), start.elapsed().as_nanos());
    let khz = u128::from(to.wrapping_sub(from)) * 1_000_000 / nanoseconds.max(1);
    Ok(u64::try_from(khz)?)
}

fn read() -> u64 {
    // SAFETY: (available) every x86-64 processor has the instruction, and Linux lets programs use it.
    unsafe { std::arch::x86_64::_rdtsc() }
}
