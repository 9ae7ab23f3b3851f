// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets a reader and a writer sleep on one event channel: the one that notices the event wakes the other (W-7).
//!
//! A waiter spins before it sleeps, as long as that pays: it costs less than to be woken, and the peer sends no event.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::{Result, ground::Event};

/// Number of fruitless events in a row after which naps take their place.
const STORM: u32 = 64;
const NAP: Duration = Duration::from_millis(2);
/// Longest sleep between two checks: a peer's domain that is destroyed sends no event.
const LOOK: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Sleep {
    pub event: Arc<dyn Event>,
    state: Mutex<EventState>,
    /// Wakes the threads that wait for the one that listens.
    noticed: Condvar,
}

#[derive(Debug, Default)]
struct EventState {
    /// Number of times that a thread noticed the event.
    times: u64,
    /// Whether a thread listens for the event.
    listens: bool,
    /// Number of threads that wait for the one that listens.
    wait: u32,
}

/// Number of checks that one half makes before it sleeps: more after each spin that paid, fewer after each that did
/// not.
#[derive(Debug)]
pub(crate) struct Spin(u32);

/// Fewest and most checks of the peer's position in one spin. The longest take some 50 µs, about what a wake-up costs.
const LOOKS: (u32, u32) = (16, 1024);

impl Spin {
    pub(crate) const fn new() -> Self {
        Self(LOOKS.1)
    }

    /// Runs `look` until it returns `true`. Returns whether it did.
    pub(crate) fn run<E>(
        &mut self,
        mut look: impl FnMut() -> std::result::Result<bool, E>,
    ) -> std::result::Result<bool, E> {
        for _ in 0..self.0 {
            if look()? {
                self.0 = (self.0 * 2).min(LOOKS.1);
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        self.0 = (self.0 / 2).max(LOOKS.0);
        Ok(false)
    }
}

impl Sleep {
    pub(crate) fn new(event: Arc<dyn Event>) -> Self {
        Self { event, state: Mutex::default(), noticed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, EventState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of events so far. A caller takes it before its last check before [`sleep`](Self::sleep).
    pub(crate) fn count(&self) -> u64 {
        self.lock().times
    }

    /// Clears the event, which the program noticed, and wakes the threads that wait for it.
    pub(crate) fn clear_event(&self) {
        self.event.clear();
        self.wake_asleep(self.lock());
    }

    fn wake_asleep(&self, mut state: MutexGuard<'_, EventState>) {
        state.times += 1;
        // To notify nobody is a system call as well.
        if state.wait > 0 {
            self.noticed.notify_all();
        }
    }

    /// Sleeps until the next event is noticed, and sometimes wakes for nothing. `fruitless` counts the fruitless
    /// wake-ups in a row.
    pub(crate) fn sleep(&self, since: u64, fruitless: u32) -> Result<()> {
        let mut state = self.lock();
        if state.times != since {
            return Ok(());
        }
        if state.listens {
            state.wait += 1;
            let (mut woken, _) = self.noticed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            woken.wait -= 1;
            return Ok(());
        }
        state.listens = true;
        drop(state);
        if fruitless > STORM {
            nap();
        }
        let listened = self.event.wait(LOOK);
        let mut state = self.lock();
        state.listens = false;
        self.wake_asleep(state);
        Ok(listened?)
    }
}

fn nap() {
    let until = Instant::now() + NAP;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        thread::park_timeout(left);
    }
}
