// SPDX-License-Identifier: Apache-2.0 OR MIT
//! W-7. One event channel, and a reader and a writer who may both sleep on it: whoever hears it tells the other.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};

use crate::{Result, ground::Event};

/// Events in a row that brought nothing, after which naps take their place.
const STORM: u32 = 64;
const NAP: Duration = Duration::from_millis(2);
/// A peer's domain that is destroyed sends no event, so the sleeper looks now and then.
const LOOK: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Sleep {
    pub event: Arc<dyn Event>,
    /// How often somebody heard the event, and whether somebody listens.
    heard: Mutex<(u64, bool)>,
    told: Condvar,
}

impl Sleep {
    pub(crate) fn new(event: Arc<dyn Event>) -> Self {
        Self { event, heard: Mutex::default(), told: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, (u64, bool)> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be asked before one looks for the last time before [`sleep`](Self::sleep).
    pub(crate) fn count(&self) -> u64 {
        self.lock().0
    }

    /// The program heard the event.
    pub(crate) fn rung(&self) {
        self.event.clear();
        self.lock().0 += 1;
        self.told.notify_all();
    }

    /// Sleeps until the event is heard again; now and then for nothing. `fruitless` is how often it was in a row.
    pub(crate) fn sleep(&self, since: u64, fruitless: u32) -> Result<()> {
        let mut heard = self.lock();
        if heard.0 != since {
            return Ok(());
        }
        if heard.1 {
            let (woken, _) = self.told.wait_timeout(heard, LOOK).unwrap_or_else(PoisonError::into_inner);
            drop(woken);
            return Ok(());
        }
        heard.1 = true;
        drop(heard);
        if fruitless > STORM {
            nap();
        }
        let listened = self.listen();
        let mut heard = self.lock();
        *heard = (heard.0 + 1, false);
        drop(heard);
        self.told.notify_all();
        listened
    }

    fn listen(&self) -> Result<()> {
        let limit = Timespec::try_from(LOOK).ok();
        let fd = self.event.fd();
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], limit.as_ref()) {
            Ok(_) => self.event.clear(),
            Err(Errno::INTR) => {}
            Err(error) => return Err(std::io::Error::from(error).into()),
        }
        Ok(())
    }
}

fn nap() {
    let until = Instant::now() + NAP;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        thread::park_timeout(left);
    }
}
