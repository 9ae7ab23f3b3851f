// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the peer's liveness (D-10, D-11).

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tombolo_layout::{limits::CONTROL_LEN, words};
use tombolo_mem::{OwnData, OwnWord, PeerData, PeerWord};

use super::{
    Fixture, TESTAMENT,
    support::{Belled, QUIET, SLACK, ending, eventually, message, patience, receive, skip, wait_beyond_notifications},
};
use tombolo_domain::{Deadline, Endpoint, Error, Liveness, Received, Slot, Woken};

/// Plays a mortal peer, see [`mortal_peer`](super::mortal_peer).
pub(super) fn play(link: &mut dyn Endpoint) {
    let (own, offer) = link.allocate(2 * CONTROL_LEN as usize).expect("there is memory");
    let (control, mut data) = own.split(CONTROL_LEN as usize);
    data.copy_in(0, TESTAMENT);
    link.send(TESTAMENT, Some(&offer)).expect("the path has room");
    for echoes in 1.. {
        let Ok(Received { message, .. }) = receive(link, Deadline::NEVER) else { return };
        // The other side may go at any time; then the next receive reports that.
        let _ = link.send(&message, None);
        control.word(words::TAIL).store_release(echoes);
        let doorbell = link.doorbell().expect("a message came in");
        Slot::ALL.into_iter().for_each(|slot| doorbell.notify(slot));
    }
}

/// A peer that is there is reported as running, or as unknown (D-10).
pub fn d10_peer_that_is_there_is_not_gone(fixture: &impl Fixture) {
    let Belled { links, .. } = Belled::new(fixture);
    for link in &links {
        assert!(matches!(link.liveness(), Liveness::Running | Liveness::Unknown), "D-10: {:?}", link.liveness());
    }
}

/// A peer that closed its endpoint is gone (D-10).
pub fn d10_peer_that_closed_is_gone(fixture: &impl Fixture) {
    let Belled { links: [mut left, gone], doorbells } = Belled::new(fixture);
    drop(gone);
    assert!(matches!(ending(&mut *left), Error::PeerGone), "D-10: the end is told");
    assert!(eventually(|| left.liveness().is_gone()), "D-10: {:?}", left.liveness());
    assert_eq!(
        wait_beyond_notifications(&*doorbells[0], Slot::Data, patience()),
        Woken::PeerGone,
        "D-10: the end wakes"
    );
}

/// A waiter, `recv`, `send` and `life` notice that a peer was killed; what it sent comes first, and what it shared
/// stays readable (D-10).
pub fn d10_killed_peer_is_noticed_and_leaves_what_it_shared(fixture: &impl Fixture) {
    let Some(mut mortal) = fixture.mortal() else {
        return skip("d10_killed_peer_is_noticed_and_leaves_what_it_shared", "mortal");
    };
    let testament = receive(mortal.link(), patience()).expect("the peer sends its testament");
    assert_eq!(testament.message, TESTAMENT);
    let segment = testament.segment.expect("with a segment");
    let doorbell = mortal.link().doorbell().expect("a message came in");
    mortal.link().send(b"last", None).expect("the path has room");
    // The peer's memory proves it: a readable descriptor and a notification may mean nothing (D-8, D-14).
    let echoes = || {
        fixture.quiesce();
        segment.word(words::TAIL).load_acquire().hint()
    };
    assert!(eventually(|| echoes() == 1), "the peer echoes");

    let waiters = Slot::ALL.map(|slot| {
        let doorbell = Arc::clone(&doorbell);
        thread::spawn(move || wait_beyond_notifications(&*doorbell, slot, patience()))
    });
    mortal.kill();
    let killed = Instant::now();
    for waiter in waiters {
        let woken = waiter.join().expect("the waiter does not panic");
        assert_eq!(woken, Woken::PeerGone, "D-10: a waiter slept on");
    }
    let took = killed.elapsed();
    assert!(took < Duration::from_secs(1) + SLACK, "D-10: noticed after {took:?}");
    assert_eq!(message(mortal.link()), b"last", "D-8: what it sent before comes first");
    assert!(matches!(ending(mortal.link()), Error::PeerGone), "D-10: recv does not tell");
    assert!(eventually(|| mortal.link().liveness().is_gone()), "D-10: {:?}", mortal.link().liveness());
    assert!(eventually(|| matches!(mortal.link().send(b"x", None), Err(Error::PeerGone))), "D-10: send does not tell");
    doorbell.notify(Slot::Data);
    let mut read = [0; TESTAMENT.len()];
    segment.data(CONTROL_LEN as usize).copy_out(0, &mut read);
    assert_eq!(&read, TESTAMENT, "D-3: what it published went with it");
}

/// A paused peer makes a wait last until its deadline, is not reported as gone, and continues where it was (D-11).
pub fn d11_paused_peer_is_told_from_one_that_is_gone(fixture: &impl Fixture) {
    let Some(mut mortal) = fixture.mortal() else {
        return skip("d11_paused_peer_is_told_from_one_that_is_gone", "mortal");
    };
    receive(mortal.link(), patience()).expect("the peer sends its testament");
    let doorbell = mortal.link().doorbell().expect("a message came in");
    for _ in 0..3 {
        mortal.pause();
        let told = eventually(|| matches!(mortal.link().liveness(), Liveness::Paused | Liveness::Unknown));
        assert!(told, "D-11: {:?}", mortal.link().liveness());
        mortal.link().send(b"are you there", None).expect("the path has room");
        doorbell.notify(Slot::Data);
        let woken = wait_beyond_notifications(&*doorbell, Slot::Data, Deadline::after(QUIET));
        assert_eq!(woken, Woken::TimedOut, "D-11: one that is paused is not gone");
        assert!(matches!(mortal.link().recv(0), Ok(None)), "D-11: one that is paused says nothing");

        mortal.resume();
        assert_eq!(message(mortal.link()), b"are you there", "D-11: what was held is lost");
        assert_eq!(
            doorbell.wait(Slot::Data, patience()).expect("waiting works"),
            Woken::Notified,
            "D-11: a notification was lost"
        );
        let told = eventually(|| matches!(mortal.link().liveness(), Liveness::Running | Liveness::Unknown));
        assert!(told, "D-11: {:?}", mortal.link().liveness());
    }
    mortal.pause();
    mortal.kill();
    assert!(matches!(ending(mortal.link()), Error::PeerGone), "D-10: killed while paused");
    assert!(eventually(|| mortal.link().liveness().is_gone()), "D-11: {:?}", mortal.link().liveness());
}
