// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waits in threads on behalf of a test.

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
};

use tombolo_domain::{Deadline, Doorbell, Slot, Woken};

/// Waits for the end of both slots of `doorbell`, without a deadline, in threads of their own. Returns a receiver of
/// how each wait ended.
///
/// # Panics
/// In those threads, where waiting fails.
#[must_use]
pub fn wait_at_both_slots(doorbell: &Arc<dyn Doorbell>) -> Receiver<Woken> {
    let (done, ended) = mpsc::channel();
    for slot in Slot::ALL {
        let (doorbell, done) = (Arc::clone(doorbell), done.clone());
        thread::spawn(move || {
            let woken = loop {
                match doorbell.wait(slot, Deadline::NEVER).expect("waiting works") {
                    Woken::Notified => doorbell.drain(slot),
                    other => break other,
                }
            };
            done.send(woken)
        });
    }
    ended
}
