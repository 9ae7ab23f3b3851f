// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One event channel, and a reader and a writer who may both sleep on it: whoever hears it tells the other (W-7).
//!
//! Before a sleep comes a spin, as long as that pays: it costs less than to be woken, and the peer sends no event.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::{Result, ground::Event};

/// Events in a row that brought nothing, after which naps take their place.
const STORM: u32 = 64;
const NAP: Duration = Duration::from_millis(2);
/// A peer's domain that is destroyed sends no event, so the waiter looks now and then.
const LOOK: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Sleep {
    pub event: Arc<dyn Event>,
    heard: Mutex<EventState>,
    told: Condvar,
}

#[derive(Debug, Default)]
struct EventState {
    /// How often somebody heard the event.
    times: u64,
    /// Somebody listens.
    listens: bool,
    /// How many wait for who listens.
    wait: u32,
}

/// How long one half spins before it sleeps: more after each time that it paid, less after each that it did not.
#[derive(Debug)]
pub(crate) struct Spin(u32);

/// Looks at the peer's position. The longest take some 50 µs, about what a wake-up costs.
const LOOKS: (u32, u32) = (16, 1024);

impl Spin {
    pub(crate) const fn new() -> Self {
        Self(LOOKS.1)
    }

    /// Looks until it finds; how that ended.
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
        Self { event, heard: Mutex::default(), told: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, EventState> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be asked before one looks for the last time before [`sleep`](Self::sleep).
    pub(crate) fn count(&self) -> u64 {
        self.lock().times
    }

    /// The program heard the event.
    pub(crate) fn rung(&self) {
        self.event.clear();
        self.wake_asleep(self.lock());
    }

    fn wake_asleep(&self, mut heard: MutexGuard<'_, EventState>) {
        heard.times += 1;
        // To tell nobody is a system call as well.
        if heard.wait > 0 {
            self.told.notify_all();
        }
    }

    /// Sleeps until the event is heard again; now and then for nothing. `fruitless` is how often it was in a row.
    pub(crate) fn sleep(&self, since: u64, fruitless: u32) -> Result<()> {
        let mut heard = self.lock();
        if heard.times != since {
            return Ok(());
        }
        if heard.listens {
            heard.wait += 1;
            let (mut woken, _) = self.told.wait_timeout(heard, LOOK).unwrap_or_else(PoisonError::into_inner);
            woken.wait -= 1;
            return Ok(());
        }
        heard.listens = true;
        drop(heard);
        if fruitless > STORM {
            nap();
        }
        let listened = self.event.wait(LOOK);
        let mut heard = self.lock();
        heard.listens = false;
        self.wake_asleep(heard);
        Ok(listened?)
    }
}

fn nap() {
    let until = Instant::now() + NAP;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        thread::park_timeout(left);
    }
}
