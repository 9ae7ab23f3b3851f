// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Notifies through eventfds that untrusted processes also hold: a QEMU and the QEMUs of its peers, or a program of the
//! host (B-8).
//!
//! A write to an eventfd blocks if the eventfd is full and blocking. Untrusted processes control both: the flag belongs
//! to the open file, which all processes with the eventfd share. A write takes no flag of its own, while a read does
//! (`RWF_NOWAIT`). So only the threads of this module write to such eventfds, and nobody waits for them. A *lane* is
//! one such thread, for the eventfds that the same untrusted processes hold. It exists while there is something to
//! notify. A process that blocks a lane keeps those eventfds silent. The lane stays one thread, however long that lasts
//! and however often it is tried.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tombolo_os::lock::lock;

/// Time for which the thread of a lane waits for something to notify.
const IDLE: Duration = Duration::from_secs(1);

/// One thread that notifies. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Lane(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Eventfds to be notified, each once. The list does not keep an eventfd open that its owners have dropped.
    pending: Vec<Weak<OwnedFd>>,
    runs: bool,
}

impl Lane {
    /// Returns the lane of this name. All QEMU processes that a domain ever has share it, and so have one thread at
    /// most.
    #[must_use]
    pub fn named(name: &str) -> Self {
        static LANES: Mutex<BTreeMap<String, Lane>> = Mutex::new(BTreeMap::new());
        let mut lanes = lock(&LANES);
        lanes.entry(name.to_owned()).or_default().clone()
    }

    /// Notifies soon, and never waits. A full eventfd holds a notification that is not received yet, which is enough.
    pub fn notify_event(&self, event: &Arc<OwnedFd>) {
        let mut state = self.state();
        state.pending.retain(|it| it.strong_count() > 0);
        if state.pending.iter().any(|it| std::ptr::eq(it.as_ptr(), Arc::as_ptr(event))) {
            return;
        }
        state.pending.push(Arc::downgrade(event));
        if std::mem::replace(&mut state.runs, true) {
            self.0.changed.notify_one();
            return;
        }
        let lane = self.clone();
        if let Err(error) = std::thread::Builder::new().name("tombolo-lane".into()).spawn(move || lane.run()) {
            // The next notification tries again.
            state.runs = false;
            state.pending.clear();
            tracing::warn!("a doorbell is not notified yet: {error}");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    fn run(&self) {
        let mut state = self.state();
        loop {
            if state.pending.is_empty() {
                let waited = self.0.changed.wait_timeout(state, IDLE);
                let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state = guard;
                if timeout.timed_out() && state.pending.is_empty() {
                    state.runs = false;
                    return;
                }
                continue;
            }
            let events = std::mem::take(&mut state.pending);
            drop(state);
            for event in events.iter().filter_map(Weak::upgrade) {
                if has_room(&event) {
                    let _ = rustix::io::write(&*event, &1u64.to_ne_bytes());
                }
            }
            state = self.state();
        }
    }
}

/// Returns whether a notification fits. So a process that only fills an eventfd does not even block its lane.
fn has_room(event: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(event, PollFlags::OUT)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use tombolo_os::event::{drain, eventfd};

    /// Fills an eventfd and makes it blocking, as a hostile holder would.
    fn jam(event: &OwnedFd) {
        rustix::io::write(event, &(u64::MAX - 1 - drain(event)).to_ne_bytes()).unwrap();
        rustix::io::ioctl_fionbio(event, false).unwrap();
    }

    #[track_caller]
    fn until(what: &str, done: impl Fn() -> bool) {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < Duration::from_secs(20), "never: {what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn b8_eventfd_that_is_full_and_blocking_keeps_neither_the_notifier_nor_the_lane() {
        let lane = Lane::default();
        let (full, other) = (Arc::new(eventfd(0).unwrap()), Arc::new(eventfd(0).unwrap()));
        jam(&full);
        for _ in 0..1000 {
            lane.notify_event(&full);
            lane.notify_event(&other);
        }
        until("the other one is notified", || drain(&*other) != 0);
        assert_eq!(drain(&*full), u64::MAX - 1, "nothing was added");
    }

    #[test]
    fn b8_lane_that_somebody_blocks_stays_one_thread_and_goes_on_when_it_can() {
        let lane = Lane::named("test");
        let jammed = Arc::new(eventfd(0).unwrap());
        rustix::io::ioctl_fionbio(&jammed, false).unwrap();
        // The lane is caught in a write, as by a holder that filled the eventfd between the look and the write.
        lane.state().runs = true;
        let caught = Arc::clone(&jammed);
        rustix::io::write(&caught, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let blocked = lane.clone();
        let thread = std::thread::spawn(move || {
            let _ = rustix::io::write(&caught, &1u64.to_ne_bytes());
            blocked.run();
        });
        let others: Vec<_> = (0..100).map(|_| Arc::new(eventfd(0).unwrap())).collect();
        others.iter().for_each(|other| lane.notify_event(other));
        assert_eq!(Lane::named("test").state().pending.len(), 100, "one lane, and nobody waited");
        assert!(drain(&*jammed) != 0);
        others.iter().for_each(|other| until("it is notified", || drain(&**other) != 0));
        thread.join().unwrap();
        assert!(!lane.state().runs, "it ends when there is nothing to do");
    }
}
