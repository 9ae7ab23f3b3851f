// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waits in threads on behalf of a test.

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use tombolo_domain::{Deadline, Doorbell, Endpoint, Slot, Woken, wait_readable};

use crate::conformance::eventually;

/// Waits for the end of both slots of `doorbell`, without a deadline, in threads of their own. Returns a receiver of
/// how each wait ended.
fn wait_at_both_slots(doorbell: &Arc<dyn Doorbell>) -> Receiver<Woken> {
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

/// Checks that an endpoint which gives its peer up ends its own waits, now and from then on, and that the peer's
/// liveness is reported as before (D-6). `link` has received a message.
///
/// # Panics
/// If it is not so.
pub fn check_that_giving_up_ends_waits(link: Box<dyn Endpoint>, peer: Box<dyn Endpoint>) {
    let doorbell = link.doorbell().expect("a message came in");
    let life = link.liveness();
    let ended = wait_at_both_slots(&doorbell);
    assert!(ended.recv_timeout(Duration::from_millis(50)).is_err(), "canary: nobody has given anybody up yet");
    doorbell.end_waits();
    for waits in [ended, wait_at_both_slots(&doorbell)] {
        for _ in Slot::ALL {
            assert_eq!(waits.recv_timeout(Duration::from_secs(20)), Ok(Woken::PeerGone));
        }
    }
    for slot in Slot::ALL {
        assert!(wait_readable(doorbell.fd(slot), Deadline::NOW).expect("polling works"), "who polls is told too");
    }
    assert_eq!(link.liveness(), life, "how the peer fares is another question");
    drop(peer);
    eventually("the end is told all the same", || link.liveness().is_gone());
}
