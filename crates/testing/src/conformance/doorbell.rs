// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the doorbell (D-4 to D-7, D-14).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use super::{
    Fixture,
    support::{Belled, QUIET, SLACK, comes_to_rest, message, patience, readable, unblocked, wait_beyond_notifications},
};
use tombolo_domain::{Deadline, Doorbell, Slot, Woken};

fn wait(doorbell: &dyn Doorbell, slot: Slot) -> Woken {
    doorbell.wait(slot, patience()).expect("waiting works")
}

/// However many notifications precede a wait, the waiter is woken, and every further wait returns until it drains
/// (D-4).
pub fn d4_any_number_of_notifications_is_kept(fixture: &impl Fixture) {
    let (Belled { links: _links, doorbells: [a, b] }, many) = (Belled::new(fixture), fixture.times(1000));
    for slot in Slot::ALL {
        for count in [1, 2, many] {
            assert!(comes_to_rest(&*b, slot), "D-7: a drained doorbell goes on ringing");
            (0..count).for_each(|_| a.notify(slot));
            assert_eq!(wait(&*b, slot), Woken::Notified, "D-4: {count} notifications in {slot:?} were lost");
            assert_eq!(wait(&*b, slot), Woken::Notified, "D-4: a notification went without being drained");
            let past = Deadline::at(Instant::now());
            assert_eq!(
                b.wait(slot, past).expect("waiting works"),
                Woken::Notified,
                "D-4: a notification that is there is reported"
            );
        }
    }
}

/// Between two endpoints that sleep, drain and notify as fast as they can, no notification is lost, in no slot and
/// neither direction (D-4).
pub fn d4_no_notification_is_lost_between_two_who_sleep(fixture: &impl Fixture) {
    let rounds = fixture.times(2000) as u64;
    let Belled { links: _links, doorbells: [a, b] } = Belled::new(fixture);
    for slot in Slot::ALL {
        // Each endpoint counts up in its own word and notifies; the other sleeps until it has seen the count.
        let words = [Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0))];
        let deadline = patience();
        let player = |doorbell: &Arc<dyn Doorbell>, own: usize| {
            let (doorbell, own, other) = (Arc::clone(doorbell), Arc::clone(&words[own]), Arc::clone(&words[1 - own]));
            move |ahead: u64| {
                for round in 1..=rounds {
                    while other.load(Ordering::SeqCst) + ahead < round {
                        if doorbell.wait(slot, deadline).expect("waiting works") != Woken::Notified {
                            return Err(round);
                        }
                        doorbell.drain(slot);
                    }
                    own.store(round, Ordering::SeqCst);
                    doorbell.notify(slot);
                }
                Ok(())
            }
        };
        let (first, second) = (player(&a, 0), player(&b, 1));
        let played = unblocked("D-6: waiting", move || {
            let second = thread::spawn(move || second(0));
            (first(1), second.join().expect("the second player does not panic"))
        });
        assert_eq!(played, (Ok(()), Ok(())), "D-4: a notification was lost in this round of {slot:?}");
    }
}

/// A notification that came before the peer went is reported first (D-4, D-10).
pub fn d4_last_notification_is_reported_before_the_end(fixture: &impl Fixture) {
    let Belled { links: [mut left, gone], doorbells: [a, b] } = Belled::new(fixture);
    assert!(comes_to_rest(&*a, Slot::Data), "D-7: a drained doorbell goes on ringing");
    b.notify(Slot::Data);
    drop((gone, b));
    assert!(matches!(super::support::ending(&mut *left), tombolo_domain::Error::PeerGone), "D-10: the peer is gone");
    assert_eq!(wait(&*a, Slot::Data), Woken::Notified, "D-4: the last notification was lost");
    assert_eq!(wait_beyond_notifications(&*a, Slot::Data, patience()), Woken::PeerGone, "D-10: the end was not told");
}

/// A peer that never drains does not block a notifier (D-5).
pub fn d5_notifying_never_blocks_though_nobody_drains(fixture: &impl Fixture) {
    let (Belled { links: _links, doorbells: [a, b] }, count) = (Belled::new(fixture), fixture.times(200_000));
    unblocked("D-5: notify", move || (0..count).for_each(|nth| a.notify(Slot::ALL[nth % 2])));
    for slot in Slot::ALL {
        assert_eq!(wait(&*b, slot), Woken::Notified, "D-4: a storm of notifications was lost");
        assert!(comes_to_rest(&*b, slot), "D-7: one drain forgets all notifications");
    }
}

/// To notify a peer that is gone does nothing (D-5).
pub fn d5_notifying_a_peer_that_is_gone_is_harmless(fixture: &impl Fixture) {
    let (Belled { links: [left, gone], doorbells: [a, b] }, count) = (Belled::new(fixture), fixture.times(10_000));
    drop((gone, b));
    let a = unblocked("D-5: notify", move || {
        (0..count).for_each(|nth| a.notify(Slot::ALL[nth % 2]));
        a
    });
    drop(left);
    unblocked("D-5: notify after one's own link", move || a.notify(Slot::Data));
}

/// A deadline in the past ends a wait at once (D-6).
pub fn d6_wait_with_a_past_deadline_returns_at_once(fixture: &impl Fixture) {
    let (Belled { links: _links, doorbells: [doorbell, _b] }, times) = (Belled::new(fixture), fixture.times(1000));
    unblocked("D-6: wait", move || {
        for slot in Slot::ALL {
            assert!(comes_to_rest(&*doorbell, slot), "D-7: a drained doorbell goes on ringing");
            for _ in 0..times {
                let woken = wait_beyond_notifications(&*doorbell, slot, Deadline::at(Instant::now()));
                assert_eq!(woken, Woken::TimedOut, "D-6: no deadline ended this wait");
            }
        }
    });
}

/// A wait without any notification ends at its deadline, not before and not long after (D-6).
pub fn d6_wait_without_a_notification_ends_at_its_deadline(fixture: &impl Fixture) {
    let Belled { links: _links, doorbells: [doorbell, _b] } = Belled::new(fixture);
    unblocked("D-6: wait", move || {
        for slot in Slot::ALL {
            let before = Instant::now();
            let woken = wait_beyond_notifications(&*doorbell, slot, Deadline::after(2 * QUIET));
            let took = before.elapsed();
            assert_eq!(woken, Woken::TimedOut, "D-6: nobody notified");
            assert!(took >= 2 * QUIET, "D-6: ended {took:?} after it began, before its deadline");
            assert!(took < 2 * QUIET + SLACK, "D-6: ended {took:?} after it began");
        }
    });
}

/// Two threads may wait for both slots at once, and each wakes by the notification of its own slot (D-6).
pub fn d6_both_slots_are_waited_on_at_once(fixture: &impl Fixture) {
    let Belled { links: _links, doorbells: [a, b] } = Belled::new(fixture);
    for _ in 0..50 {
        Slot::ALL.iter().for_each(|slot| b.drain(*slot));
        let asleep = Slot::ALL.map(|slot| {
            let doorbell = Arc::clone(&b);
            thread::spawn(move || doorbell.wait(slot, patience()))
        });
        a.notify(Slot::Space);
        a.notify(Slot::Data);
        for one in asleep {
            let woken = one.join().expect("the waiter does not panic").expect("waiting works");
            assert_eq!(woken, Woken::Notified, "D-6: one of two waiters was not woken");
        }
    }
}

/// A waiter without a deadline wakes when its peer goes, in both slots (D-6).
pub fn d6_wait_for_ever_ends_when_the_peer_goes(fixture: &impl Fixture) {
    let Belled { links: [_left, gone], doorbells: [a, b] } = Belled::new(fixture);
    let asleep = Slot::ALL.map(|slot| {
        let doorbell = Arc::clone(&a);
        thread::spawn(move || wait_beyond_notifications(&*doorbell, slot, Deadline::NEVER))
    });
    drop((gone, b));
    let woken = unblocked("D-6: wait for a peer that is gone", move || asleep.map(|one| one.join().ok()));
    assert_eq!(woken, [Some(Woken::PeerGone); 2], "D-10: the end was not told");
    for slot in Slot::ALL {
        a.drain(slot);
        assert!(readable(a.fd(slot)), "D-7: a peer that is gone is not drained away");
        assert_eq!(
            wait_beyond_notifications(&*a, slot, patience()),
            Woken::PeerGone,
            "D-10: the end is told once only"
        );
    }
}

/// A drained doorbell is silent, and the next notification raises it again (D-7).
pub fn d7_drain_forgets_what_came_before_and_nothing_after(fixture: &impl Fixture) {
    let Belled { links: _links, doorbells: [a, b] } = Belled::new(fixture);
    for slot in Slot::ALL {
        for _ in 0..20 {
            (0..3).for_each(|_| a.notify(slot));
            assert_eq!(wait(&*b, slot), Woken::Notified, "D-4: three notifications were lost");
            b.drain(slot);
            b.drain(slot);
            a.notify(slot);
            assert_eq!(wait(&*b, slot), Woken::Notified, "D-7: a drain swallowed the notification after it");
        }
        assert!(comes_to_rest(&*b, slot), "D-7: a drained doorbell goes on ringing");
    }
}

/// The descriptor polls readable while a notification is not drained, and only then (D-7).
pub fn d7_descriptor_is_readable_while_undrained(fixture: &impl Fixture) {
    let Belled { links: _links, doorbells: [a, b] } = Belled::new(fixture);
    for slot in Slot::ALL {
        assert!(comes_to_rest(&*b, slot), "D-7: readable, and nobody notified");
        a.notify(slot);
        assert!(
            tombolo_domain::wait_readable(b.fd(slot), patience()).expect("polling works"),
            "D-7: notified, and not readable"
        );
        assert_eq!(wait(&*b, slot), Woken::Notified, "D-4: the notification was lost");
        assert!(readable(b.fd(slot)), "D-7: waiting is not draining");
        assert!(comes_to_rest(&*b, slot), "D-7: drained, and still readable");
    }
}

/// Many channels between the same two domains do not disturb each other: despite spurious notifications, no
/// notification is lost, and no message reaches another channel (D-14).
pub fn d14_many_links_at_once_do_not_disturb_each_other(fixture: &impl Fixture) {
    const LINKS: u16 = 100;
    super::support::make_room_for_descriptors();
    let mut all: Vec<_> = (0..LINKS).map(|_| Belled::new(fixture)).collect();
    for (number, Belled { links: [a, _], .. }) in (0..LINKS).zip(&mut all) {
        a.send(&number.to_le_bytes(), None).expect("the path has room");
    }
    for (number, Belled { links: [_, b], .. }) in (0..LINKS).zip(&mut all).rev() {
        assert_eq!(message(&mut **b), number.to_le_bytes(), "D-8: another link's message");
    }
    all.iter().for_each(|Belled { doorbells: [_, b], .. }| b.drain(Slot::Data));
    all.iter().for_each(|Belled { doorbells: [a, _], .. }| a.notify(Slot::Data));
    for Belled { doorbells: [_, b], .. } in &all {
        assert_eq!(wait(&**b, Slot::Data), Woken::Notified, "D-14: a notification among many was lost");
        b.drain(Slot::Data);
    }
    // All sleep, and each is woken by its own peer; they must cope with spurious notifications.
    let asleep: Vec<_> = all
        .iter()
        .map(|Belled { doorbells: [_, b], .. }| {
            let doorbell = Arc::clone(b);
            thread::spawn(move || wait(&*doorbell, Slot::Space))
        })
        .collect();
    all.iter().for_each(|Belled { doorbells: [a, _], .. }| a.notify(Slot::Space));
    for one in asleep {
        let woken = one.join().expect("the waiter does not panic");
        assert_eq!(woken, Woken::Notified, "D-14: one of many waiters was not woken");
    }
}
