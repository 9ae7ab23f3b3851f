// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Starts threads of the library within a foreign program.

use std::thread;

use nix::sys::signal::SigSet;

use crate::border::Outcome;

/// Bytes of a thread's stack: these threads do little and need little.
const STACK: usize = 256 << 10;

/// Starts a thread that takes none of the program's signals.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Outcome<()> {
    let mut mask = SigSet::empty();
    let masked = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK).map(|old| mask = old);
    let spawned = thread::Builder::new().name(name.into()).stack_size(STACK).spawn(work);
    if masked.is_ok() {
        let _ = mask.thread_set_mask();
    }
    Ok(spawned.map(drop)?)
}
