// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flaws of doorbells.

use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tombolo_domain::{Deadline, Doorbell, Result, Slot, Woken};

use super::{Flaw, Shared, block};

#[derive(Debug)]
pub struct FlawedDoorbell {
    inner: Arc<dyn Doorbell>,
    shared: Shared,
    notifications: AtomicU32,
    drain_is_due: [AtomicBool; 2],
    one_waiter: Mutex<()>,
}

impl FlawedDoorbell {
    pub fn new(inner: Arc<dyn Doorbell>, shared: &Shared) -> Self {
        shared.doorbells.lock().unwrap().push(Arc::clone(&inner));
        let (notifications, drain_is_due) = Default::default();
        Self { inner, shared: shared.clone(), notifications, drain_is_due, one_waiter: Mutex::default() }
    }
}

impl Doorbell for FlawedDoorbell {
    fn notify(&self, slot: Slot) {
        let notifications = self.notifications.fetch_add(1, Ordering::Relaxed);
        match self.shared.flaw {
            Flaw::NotifyBlocks if notifications > 5000 => block(),
            Flaw::LosesSomeNotifications if notifications % 64 == 63 => {}
            _ => self.inner.notify(slot),
        }
    }

    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken> {
        let past = Deadline::at(Instant::now());
        match self.shared.flaw {
            Flaw::WaitsForEver => self.inner.wait(slot, Deadline::NEVER),
            Flaw::WaitsForNothing => self.inner.wait(slot, past),
            Flaw::NotSticky => {
                self.inner.drain(slot);
                self.inner.wait(slot, deadline)
            }
            Flaw::EndBeforeNotification => {
                if self.inner.wait(slot, past)? == Woken::Notified {
                    self.inner.drain(slot);
                    return Ok(if self.inner.wait(slot, past)? == Woken::PeerGone {
                        Woken::PeerGone
                    } else {
                        Woken::Notified
                    });
                }
                self.inner.wait(slot, deadline)
            }
            Flaw::WakesOneSlot => {
                let _alone = self.one_waiter.lock().unwrap();
                let woken = self.inner.wait(slot, deadline)?;
                Slot::ALL.into_iter().for_each(|slot| self.inner.drain(slot));
                Ok(woken)
            }
            Flaw::SleepsThroughTheEnd => {
                let woken = self.inner.wait(slot, deadline)?;
                while woken == Woken::PeerGone && !deadline.expired() {
                    thread::park_timeout(deadline.remaining().unwrap_or(Duration::MAX));
                }
                Ok(if woken == Woken::PeerGone { Woken::TimedOut } else { woken })
            }
            Flaw::DrainsLate if self.drain_is_due[slot.index()].swap(false, Ordering::SeqCst) => {
                self.inner.drain(slot);
                self.inner.wait(slot, deadline)
            }
            _ => self.inner.wait(slot, deadline),
        }
    }

    fn drain(&self, slot: Slot) {
        match self.shared.flaw {
            Flaw::DrainsNothing => {}
            Flaw::DrainsLate => self.drain_is_due[slot.index()].store(true, Ordering::SeqCst),
            Flaw::DrainsAll => self.shared.doorbells.lock().unwrap().iter().for_each(|doorbell| doorbell.drain(slot)),
            _ => self.inner.drain(slot),
        }
    }

    fn fd(&self, slot: Slot) -> BorrowedFd<'_> {
        self.shared.fd(self.inner.fd(slot))
    }
}
