// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The halves of a handle. Two threads may use the two halves at once; each half serves one call at a time.
//!
//! A mutex and a flag would also work, but take three atomic exchanges for each call instead of one. With them a small
//! write cost seven times what it costs in Rust; with this it costs four times as much.
#![allow(unsafe_code)]

use std::{
    cell::UnsafeCell,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicU8, Ordering},
    thread,
};

use crate::border::{Fault, Outcome};

/// One half. Two calls at once on it are a mistake of the caller, which is reported instead of causing a data race. A
/// call on the other half may use this one for a moment to help.
#[derive(Debug)]
pub struct Half<T> {
    turn: AtomicU8,
    inside: UnsafeCell<Inside<T>>,
}

// Values of `turn`: who uses the half.
const NOBODYS: u8 = 0;
const A_CALLS: u8 = 1;
const A_HELPERS: u8 = 2;
/// A panic ended a turn early, so that the contents may be half done.
const BROKEN: u8 = 3;

// SAFETY: (shared access) `inside` is reached only through a `HalfGuard`, of which there is one at a time; (other
// threads) the contents may pass from one thread to the next.
unsafe impl<T: Send> Sync for Half<T> {}

/// A half, and the number of bytes of its ring that the caller holds: reserved or peeked at.
#[derive(Debug)]
pub struct Inside<T> {
    pub half: T,
    pub held: Option<usize>,
}

/// Exclusive access to a half.
#[derive(Debug)]
pub struct HalfGuard<'a, T> {
    of: &'a Half<T>,
    panicking: bool,
}

impl<T> Half<T> {
    pub fn new(half: T) -> Self {
        Self { turn: AtomicU8::new(NOBODYS), inside: UnsafeCell::new(Inside { half, held: None }) }
    }

    /// Returns the half for a call that moves data. This ends what the caller held.
    #[inline]
    pub fn begin(&self) -> Outcome<HalfGuard<'_, T>> {
        let mut turn = self.enter()?;
        turn.held = None;
        Ok(turn)
    }

    /// Returns the half for one call.
    #[inline]
    pub fn enter(&self) -> Outcome<HalfGuard<'_, T>> {
        loop {
            match self.lock_half(A_CALLS) {
                Ok(turn) => return Ok(turn),
                // A helper does not wait, so the half is free soon.
                Err(A_HELPERS) => thread::yield_now(),
                Err(A_CALLS) => return Err(Fault::new(libc::EBUSY, c"another thread is in a call on this half")),
                Err(_) => {
                    let text = c"a fault in Tombolo broke this half: close the handle";
                    return Err(Fault::new(libc::ENOTRECOVERABLE, text));
                }
            }
        }
    }

    /// Returns the half to help a call on the other one that is about to wait. Returns `None` while this half is in
    /// use.
    pub fn help(&self) -> Option<HalfGuard<'_, T>> {
        self.lock_half(A_HELPERS).ok()
    }

    #[inline]
    fn lock_half(&self, whose: u8) -> Result<HalfGuard<'_, T>, u8> {
        // ORDER: Acquire; pairs with the Release in `HalfGuard::drop`: this turn sees what the last turn did to the
        // contents.
        self.turn.compare_exchange(NOBODYS, whose, Ordering::Acquire, Ordering::Relaxed)?;
        Ok(HalfGuard { of: self, panicking: thread::panicking() })
    }
}

impl<T> Deref for HalfGuard<'_, T> {
    type Target = Inside<T>;

    #[inline]
    fn deref(&self) -> &Inside<T> {
        // SAFETY: (aliasing) it is this turn until it is dropped, and a `&mut` needs `&mut` of it.
        unsafe { &*self.of.inside.get() }
    }
}

impl<T> DerefMut for HalfGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Inside<T> {
        // SAFETY: (aliasing) it is this turn until it is dropped, and this borrows it uniquely.
        unsafe { &mut *self.of.inside.get() }
    }
}

impl<T> Drop for HalfGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let next = if thread::panicking() && !self.panicking { BROKEN } else { NOBODYS };
        // ORDER: Release; pairs with the Acquire in `Half::lock_half`.
        self.of.turn.store(next, Ordering::Release);
    }
}

impl<T> Inside<T> {
    /// Ends what the caller holds. Fails unless it holds at least `len` bytes.
    pub fn end_hold(&mut self, len: usize) -> Outcome<()> {
        match self.held.take() {
            Some(held) if len <= held => Ok(()),
            Some(held) => Err(Fault::with(libc::EINVAL, &format!("{len} bytes where {held} are held"))),
            None => Err(Fault::new(libc::EINVAL, c"nothing is held: reserve before a commit, peek before a consume")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_call_is_refused_and_a_helper_is_not_seen() {
        let half = Half::new(7);
        let call = half.enter().unwrap();
        assert_eq!(half.enter().unwrap_err().errno, libc::EBUSY);
        assert!(half.help().is_none());
        drop(call);
        // The call waits for a helper, so the helper must go before the call can come.
        thread::scope(|scope| {
            let helper = half.help().unwrap();
            let calling = scope.spawn(|| half.enter().unwrap().half);
            drop(helper);
            assert_eq!(calling.join().unwrap(), 7);
        });
    }

    #[test]
    fn turns_never_overlap() {
        let half = &Half::new(0u64);
        let add = move || {
            let mut done = 0;
            while done < 100_000 {
                // A call that is refused tries again; a helper gives up.
                let turn = if done % 2 == 0 { half.enter().ok() } else { half.help() };
                if let Some(mut turn) = turn {
                    turn.half += 1;
                    done += 1;
                }
            }
        };
        thread::scope(|scope| [scope.spawn(add), scope.spawn(add)].map(|adding| adding.join().unwrap()));
        assert_eq!(half.enter().unwrap().half, 200_000);
    }

    #[test]
    fn half_that_a_fault_broke_stays_broken() {
        let half = &Half::new(7);
        let broken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _call = half.enter().unwrap();
            panic!("a fault in the middle of a call");
        }));
        assert!(broken.is_err());
        for _ in 0..2 {
            assert_eq!(half.enter().unwrap_err().errno, libc::ENOTRECOVERABLE);
        }
    }

    #[test]
    fn hold_ends_with_the_next_call_that_moves_data() {
        let half = Half::new(());
        half.begin().unwrap().held = Some(5);
        assert_eq!(half.enter().unwrap().end_hold(6).unwrap_err().errno, libc::EINVAL);
        assert_eq!(half.enter().unwrap().end_hold(5).unwrap_err().errno, libc::EINVAL, "it ended with the first try");
        half.begin().unwrap().held = Some(5);
        half.enter().unwrap().end_hold(5).unwrap();
        half.begin().unwrap().held = Some(5);
        drop(half.begin());
        assert_eq!(half.enter().unwrap().end_hold(0).unwrap_err().errno, libc::EINVAL);
    }
}
