// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that writes arbitrary values into its window, memory that goes, and a broker that goes.

mod support;

use std::os::fd::OwnedFd;

use support::{WINDOW, World, accept};
use tombolo_control::{Life as Told, WINDOWS_AT};
use tombolo_domain::{Endpoint, Error, Liveness, Received, Rendezvous, Slot, Woken};
use tombolo_mem::{OwnWord, PeerWord};
use tombolo_testing::{
    conformance::{self, eventually},
    waits::check_that_giving_up_ends_waits,
};

/// An honest endpoint in `a`, and the window of its peer in `b`, to be written at will.
struct Victim {
    world: World,
    link: Box<dyn Endpoint>,
    /// Keeps the connection.
    peer: Box<dyn Endpoint>,
    memory: OwnedFd,
}

impl Victim {
    fn new() -> Self {
        let world = World::new();
        let service = world.service();
        let mut listener = world.a.listen(&service).unwrap();
        let peer = world.b.connect(&service, support::patience()).unwrap();
        let link = accept(&mut *listener);
        let [memory, _] = world.memories();
        Self { world, link, peer, memory }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.memory, bytes, WINDOWS_AT + at), Ok(bytes.len()));
    }

    fn word(&self, at: u64, word: u64) {
        self.write(at, &word.to_le_bytes());
    }

    fn entry(&self, len: u16, handle: u16, passed: [u64; 3]) {
        let mut entry = [len.to_le_bytes(), handle.to_le_bytes(), [0; 2], [0; 2]].concat();
        entry.extend(passed.iter().flat_map(|number| number.to_le_bytes()));
        self.write(0x400, &entry);
        self.word(0x100, 1);
    }

    fn clause(&mut self) -> Option<&'static str> {
        match self.link.recv(1 << 20) {
            Err(Error::Malformed { clause, .. }) => Some(clause),
            _ => None,
        }
    }
}

#[test]
fn child_process() {
    support::play();
}

#[test]
fn v4_page_without_magic_or_state_or_with_another_version_is_refused() {
    for (at, wrong) in [(0, 0), (0, 1), (8, 2), (0x80, 0)] {
        let mut victim = Victim::new();
        victim.word(at, wrong);
        assert!(matches!(victim.link.recv(0), Ok(None)), "nothing was said yet");
        victim.word(0x100, 1);
        assert_eq!(victim.clause(), Some("V-4"), "{at:#x}");
    }
}

#[test]
fn v4_any_state_beyond_open_is_the_end() {
    for state in [2, 3, 0xff, u64::MAX] {
        let mut victim = Victim::new();
        victim.peer.send(b"last words", None).unwrap();
        let last = conformance::receive(&mut *victim.link, support::patience()).unwrap();
        assert_eq!(last.message, b"last words");
        victim.word(0x80, state);
        victim.world.notify_a();
        let doorbell = victim.link.doorbell().unwrap();
        let woken = loop {
            match doorbell.wait(Slot::Data, support::patience()).unwrap() {
                Woken::Notified => doorbell.drain(Slot::Data),
                other => break other,
            }
        };
        assert_eq!(woken, Woken::PeerGone, "{state:#x}");
        assert!(matches!(victim.link.recv(0), Err(Error::PeerGone)));
        victim.word(0x80, 1);
        assert!(victim.link.liveness().is_gone(), "there is no way back");
    }
}

#[test]
fn v5_counts_and_messages_that_cannot_be_are_refused() {
    for sent in [9, u64::MAX, 1 << 63] {
        let mut victim = Victim::new();
        victim.word(0x100, sent);
        assert_eq!(victim.clause(), Some("V-5"), "{sent}");
    }
    for taken in [1, u64::MAX] {
        let mut victim = Victim::new();
        victim.word(0x180, taken);
        assert!(matches!(victim.link.recv(0), Ok(None)), "that the peer accepted is heard");
        assert!(matches!(victim.link.send(b"x", None), Err(Error::Malformed { clause: "V-5", .. })), "{taken}");
    }
    for (len, handle) in [(257, 0), (u16::MAX, 0), (0, 65), (0, u16::MAX)] {
        let mut victim = Victim::new();
        victim.entry(len, handle, [0; 3]);
        assert_eq!(victim.clause(), Some("V-5"), "{len} {handle}");
    }
    let mut victim = Victim::new();
    victim.write(0x404, &[1]);
    victim.word(0x100, 1);
    assert_eq!(victim.clause(), Some("V-5"), "reserved");
}

#[test]
fn v6_segment_that_may_not_be_passed_is_refused_and_given_back() {
    for (offset, len) in [
        (0, 4096),
        (4096, 0),
        (4096, 4095),
        (4097, 4096),
        (4096, WINDOW),
        (WINDOW, 4096),
        (u64::MAX - 4095, 8192),
        (4096, u64::MAX - 4095),
        (4096, (1 << 20) + 4096),
    ] {
        let mut victim = Victim::new();
        victim.entry(0, 1, [offset, len, 77]);
        assert_eq!(victim.clause(), Some("V-6"), "{offset:#x} {len:#x}");
        let [_, own] = victim.world.memories();
        let mut let_go = [0; 8];
        rustix::io::pread(&own, &mut let_go[..], WINDOWS_AT + 0x200).unwrap();
        assert_eq!(u64::from_le_bytes(let_go), 77, "{offset:#x} {len:#x}");
    }
}

#[test]
fn v6_segment_passed_twice_is_refused_until_it_was_let_go() {
    let mut victim = Victim::new();
    let pass = |victim: &mut Victim, number: u64, handle: u16, at| {
        let mut entry = [0u16.to_le_bytes(), handle.to_le_bytes(), [0; 2], [0; 2]].concat();
        entry.extend([at, 8192, number].iter().flat_map(|number: &u64| number.to_le_bytes()));
        victim.write(0x400 + 0x140 * ((number - 1) % 8), &entry);
        victim.word(0x100, number);
        victim.link.recv(1 << 20)
    };
    let first = pass(&mut victim, 1, 1, 4096);
    assert!(matches!(first, Ok(Some(Received { segment: Some(_), .. }))), "{first:?}");
    for (number, (handle, at)) in (2..).zip([(1, 4096), (1, 1 << 20), (2, 4096), (2, 8192)]) {
        let again = pass(&mut victim, number, handle, at);
        assert!(matches!(again, Err(Error::Malformed { clause: "V-6", .. })), "{again:?}");
    }
    drop(first);
    let again = pass(&mut victim, 6, 1, 4096);
    assert!(matches!(again, Ok(Some(Received { segment: Some(_), .. }))), "{again:?}");
}

#[test]
fn v6_peer_that_lets_nothing_go_costs_its_own_call_and_no_more() {
    let mut victim = Victim::new();
    let mut passed = 0u64;
    let error = loop {
        let (own, offer) = match victim.link.allocate(4096) {
            Ok(made) => made,
            Err(error) => break error,
        };
        victim.word(0x180, passed);
        victim.link.send(b"", Some(&offer)).unwrap();
        passed += 1;
        victim.link.retire(Some(own), offer);
        assert!(passed <= 64, "there is no bound");
    };
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    assert_eq!(victim.link.quarantined(), 64 * 4096);
    victim.word(0x200, 1);
    assert_eq!(victim.link.quarantined(), 63 * 4096);
    assert!(victim.link.allocate(4096).is_ok());
}

#[test]
fn v7_call_of_a_host_whose_broker_and_holder_are_gone_is_revoked_and_wakes_who_waits() {
    let Victim { world, mut link, mut peer, .. } = Victim::new();
    assert_eq!(link.liveness(), Liveness::Running);
    world.live("b", Told::Paused);
    eventually("the peer is said to be paused", || link.liveness() == Liveness::Paused);
    world.lose_broker();
    eventually("it is said to be revoked", || link.liveness() == Liveness::Revoked);
    assert!(matches!(conformance::receive(&mut *link, support::patience()), Err(Error::Revoked)));
    assert!(peer.send(b"anybody there", None).is_err());
}

#[test]
fn v7_end_of_the_domain_is_told() {
    let Victim { world, mut link, peer, .. } = Victim::new();
    world.live("b", Told::DomainGone);
    assert!(matches!(conformance::receive(&mut *link, support::patience()), Err(Error::PeerGone)));
    assert_eq!(link.liveness(), Liveness::DomainGone);
    drop(peer);
    assert_eq!(link.liveness(), Liveness::DomainGone, "what was told first stays");
}

#[test]
fn v7_memory_that_goes_is_revoked_and_kills_nobody() {
    let mut victim = Victim::new();
    let (own, _offer) = victim.link.allocate(8192).unwrap();
    let (control, _data) = own.split(4096);
    victim.peer.send(b"hello", None).unwrap();
    conformance::receive(&mut *victim.link, support::patience()).unwrap();
    for memory in victim.world.memories() {
        rustix::fs::ftruncate(&memory, 0).unwrap();
    }
    control.word(0x80).store_release(1);
    assert!(control.is_lost());
    assert!(matches!(victim.link.recv(0), Err(Error::Revoked)));
    eventually("it is said to be revoked", || victim.link.liveness() == Liveness::Revoked);
    assert!(matches!(victim.link.recv(0), Err(Error::Revoked)));
    assert!(matches!(victim.link.send(b"x", None), Err(Error::Revoked)));
    let doorbell = victim.link.doorbell().unwrap();
    doorbell.drain(Slot::Data);
    assert_eq!(doorbell.wait(Slot::Data, support::patience()).unwrap(), Woken::PeerGone);
    let _ = victim.peer.recv(0).map(|it| it.map(|it| it.segment.map(|it| it.word(0).load_acquire().hint())));
}

#[test]
fn d6_end_that_caught_its_peer_ends_its_own_waits() {
    let Victim { world: _world, mut link, mut peer, memory: _memory } = Victim::new();
    peer.send(b"hello", None).unwrap();
    conformance::receive(&mut *link, support::patience()).unwrap();
    check_that_giving_up_ends_waits(link, peer);
}
