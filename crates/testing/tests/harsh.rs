// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules and commands of the harsh double, beyond the guarantees of every backend.

mod support;

use std::time::{Duration, Instant};

use support::Harsh;
use tombolo_domain::{Deadline, Doorbell, Endpoint, Error, Liveness, Rendezvous, Slot, Woken};
use tombolo_layout::words;
use tombolo_mem::{OwnData, OwnSegment, OwnWord, PeerData, PeerSegment, PeerWord};
use tombolo_testing::{
    conformance::{Fixture, receive},
    harsh::{BACKLOG_MAX, MESSAGES_MAX, Revocation},
};

const LEN: usize = 8192;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn now() -> Deadline {
    Deadline::at(Instant::now())
}

/// Returns a segment of `from` that `to` maps, and its offer.
fn shared(from: &mut dyn Endpoint, to: &mut dyn Endpoint) -> (OwnSegment, tombolo_domain::Offer, PeerSegment) {
    let (own, offer) = from.allocate(LEN).unwrap();
    from.send(b"segment", Some(&offer)).unwrap();
    (own, offer, receive(to, soon()).unwrap().segment.unwrap())
}

fn doorbell(from: &mut dyn Endpoint, to: &mut dyn Endpoint) -> std::sync::Arc<dyn Doorbell> {
    from.send(b"hello", None).unwrap();
    receive(to, soon()).unwrap();
    to.doorbell().unwrap()
}

#[test]
fn d9_reference_is_mapped_once_only() {
    let [mut a, mut b] = Harsh::new().pair();
    let (_own, offer, _peer) = shared(&mut *a, &mut *b);
    a.send(b"again", Some(&offer)).unwrap();
    let again = b.recv(LEN as u64);
    assert!(matches!(again, Err(Error::Malformed { clause: "D-9", .. })), "{again:?}");
}

#[test]
fn d9_offer_of_another_link_is_refused_by_the_sender() {
    let fixture = Harsh::new();
    let ([mut a, _b], [mut other, _d]) = (fixture.pair(), fixture.pair());
    let (_own, offer) = a.allocate(LEN).unwrap();
    assert!(matches!(other.send(b"not mine", Some(&offer)), Err(Error::Os { .. })));
    assert!(matches!(other.send(b"no such thing", Some(&tombolo_domain::Offer::new(7))), Err(Error::Os { .. })));
}

#[test]
fn d13_offer_retired_before_it_was_mapped_is_revoked() {
    let [mut a, mut b] = Harsh::new().pair();
    let (own, offer) = a.allocate(LEN).unwrap();
    a.send(b"segment", Some(&offer)).unwrap();
    a.retire(Some(own), offer);
    assert!(matches!(b.recv(LEN as u64), Err(Error::Revoked)));
    assert_eq!(a.quarantined(), 0, "nobody ever mapped it");
}

#[test]
fn d13_quarantine_holds_what_is_mapped_until_the_last_word_of_it_goes() {
    let fixture = Harsh::new();
    let [mut a, mut b] = fixture.pair();
    let (own, offer, peer) = shared(&mut *a, &mut *b);
    let word = peer.word(words::TAIL);
    drop(peer);
    a.retire(Some(own), offer);
    assert_eq!(a.quarantined(), LEN as u64);
    drop(a);
    assert_eq!(fixture.hypervisor.quarantined(&fixture.a), LEN as u64, "seen also when the link is gone");
    drop(word);
    assert_eq!(fixture.hypervisor.quarantined(&fixture.a), 0);
}

#[test]
fn d13_quarantine_counts_against_the_memory_of_its_domain() {
    let fixture = Harsh::new();
    let [mut a, mut b] = fixture.pair();
    fixture.hypervisor.limit_memory(&fixture.a, LEN as u64);
    let (own, offer, peer) = shared(&mut *a, &mut *b);
    a.retire(Some(own), offer);
    assert!(matches!(a.allocate(4096), Err(Error::Limit { .. })));
    drop(peer);
    assert!(a.allocate(LEN).is_ok());
}

#[test]
fn d3_no_mapping_is_inherited_by_a_child() {
    let [mut a, mut b] = Harsh::new().pair();
    let (_own, _offer, peer) = shared(&mut *a, &mut *b);
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", peer.address().0 as usize);
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
}

#[test]
fn d14_notification_wakes_all_channels_between_two_domains_and_no_others() {
    let fixture = Harsh::new();
    let ([mut a1, mut b1], [mut a2, mut b2]) = (fixture.pair(), fixture.pair());
    let c = fixture.hypervisor.domain("c");
    let service = fixture.service();
    let mut listener = fixture.a.listen(&service).unwrap();
    let mut stranger = c.connect(&service, soon()).unwrap();
    let mut a3 = listener.accept().unwrap().unwrap();

    let notifier = doorbell(&mut *b1, &mut *a1);
    let heard = [doorbell(&mut *a1, &mut *b1), doorbell(&mut *a2, &mut *b2)];
    let unheard = [doorbell(&mut *b2, &mut *a2), doorbell(&mut *a3, &mut *stranger)];
    notifier.notify(Slot::Data);
    for slot in Slot::ALL {
        assert!(heard.iter().all(|doorbell| doorbell.wait(slot, now()).unwrap() == Woken::Notified));
        assert!(unheard.iter().all(|doorbell| doorbell.wait(slot, now()).unwrap() == Woken::TimedOut));
    }
}

#[test]
fn d8_room_is_eight_messages() {
    let [mut a, mut b] = Harsh::new().pair();
    for _ in 0..MESSAGES_MAX {
        a.send(b"x", None).unwrap();
    }
    assert!(matches!(a.send(b"x", None), Err(Error::Limit { .. })));
    b.recv(0).unwrap().unwrap();
    a.send(b"x", None).unwrap();
}

#[test]
fn d12_connect_waits_for_room_until_its_deadline() {
    let fixture = Harsh::new();
    let service = fixture.service();
    let mut listener = fixture.a.listen(&service).unwrap();
    let _waiting: Vec<_> = (0..BACKLOG_MAX).map(|_| fixture.b.connect(&service, soon()).unwrap()).collect();
    let refused = fixture.b.connect(&service, Deadline::after(Duration::from_millis(20)));
    assert!(matches!(refused, Err(Error::TimedOut)), "{refused:?}");

    let (late, name) = (fixture.b.clone(), service.clone());
    let late = std::thread::spawn(move || late.connect(&name, soon()));
    listener.accept().unwrap().unwrap();
    assert!(late.join().unwrap().is_ok(), "there is room");

    let (late, name) = (fixture.b.clone(), service);
    let late = std::thread::spawn(move || late.connect(&name, soon()));
    drop(listener);
    assert!(matches!(late.join().unwrap(), Err(Error::NotFound(_))), "nobody listens any more");
}

#[test]
fn d12_services_are_named_by_domain() {
    let fixture = Harsh::new();
    for bad in ["", "a", "a/", "/x", "a/x/y"] {
        assert!(matches!(fixture.a.listen(bad), Err(Error::BadService { .. })), "{bad:?}");
    }
    assert!(matches!(fixture.a.listen("b/x"), Err(Error::Denied(_))), "another domain's name");
}

#[test]
fn d11_pause_holds_notifications_and_messages_until_resumed_in_order() {
    let fixture = Harsh::new();
    let [mut a, mut b] = fixture.pair();
    let (heard, notifier) = (doorbell(&mut *b, &mut *a), doorbell(&mut *a, &mut *b));
    b.send(b"before", None).unwrap();
    fixture.hypervisor.pause(&fixture.b);
    assert_eq!((a.liveness(), b.liveness()), (Liveness::Paused, Liveness::Running), "a third party tells");
    notifier.notify(Slot::Data);
    b.send(b"one", None).unwrap();
    b.send(b"two", None).unwrap();
    drop(b);
    assert_eq!(heard.wait(Slot::Data, now()).unwrap(), Woken::TimedOut);
    assert_eq!(a.recv(0).unwrap().unwrap().message, b"before", "it came before");
    assert!(a.recv(0).unwrap().is_none());

    fixture.hypervisor.resume(&fixture.b);
    assert_eq!(heard.wait(Slot::Data, now()).unwrap(), Woken::Notified);
    assert_eq!(a.recv(0).unwrap().unwrap().message, b"one");
    assert_eq!(a.recv(0).unwrap().unwrap().message, b"two");
    assert!(matches!(a.recv(0), Err(Error::PeerGone)));
    assert_eq!(a.liveness(), Liveness::ProcessGone);
}

#[test]
fn d10_process_and_domain_that_die_are_told_apart() {
    let fixture = Harsh::new();
    let victim = fixture.hypervisor.domain("b");
    let service = fixture.service();
    let mut listener = fixture.a.listen(&service).unwrap();
    let _theirs = [victim.connect(&service, soon()).unwrap(), fixture.b.connect(&service, soon()).unwrap()];
    let [process, domain] = [(); 2].map(|()| listener.accept().unwrap().unwrap());

    fixture.hypervisor.kill_process(&victim);
    assert_eq!((process.liveness(), domain.liveness()), (Liveness::ProcessGone, Liveness::Running));
    assert!(matches!(victim.connect(&service, soon()), Err(Error::Denied(_))), "the dead do nothing");

    fixture.hypervisor.pause(&fixture.b);
    fixture.hypervisor.kill_domain(&fixture.b);
    assert_eq!(domain.liveness(), Liveness::DomainGone);
    assert!(fixture.hypervisor.domain("b").connect(&service, soon()).is_ok(), "it may start again");
}

#[test]
fn d10_memory_of_a_dead_process_is_readable_where_it_is_mapped_and_nowhere_else() {
    let fixture = Harsh::new();
    let [mut a, mut b] = fixture.pair();
    let (own, _offer, peer) = shared(&mut *b, &mut *a);
    let (control, _data) = own.split(4096);
    control.word(words::TAIL).store_release(5);
    let (_unmapped, offer) = b.allocate(LEN).unwrap();
    b.send(b"too late", Some(&offer)).unwrap();

    fixture.hypervisor.kill_process(&fixture.b);
    assert_eq!(peer.word(words::TAIL).load_acquire().hint(), 5);
    assert!(matches!(a.recv(LEN as u64), Err(Error::Revoked)));
    assert!(matches!(a.recv(LEN as u64), Err(Error::PeerGone)));
    assert_eq!(fixture.hypervisor.quarantined(&fixture.b), LEN as u64);
}

#[test]
fn d3_revocation_is_an_error_and_says_what_it_could_not_take_back() {
    let fixture = Harsh::new();
    let [mut a, mut b] = fixture.pair();
    let (heard, _) = (doorbell(&mut *a, &mut *b), doorbell(&mut *b, &mut *a));
    let (_own, _offer, peer) = shared(&mut *a, &mut *b);
    let (_unmapped, offer) = a.allocate(4096).unwrap();
    a.send(b"never mapped", Some(&offer)).unwrap();

    let revoked = fixture.hypervisor.revoke(&fixture.a, &fixture.b);
    assert_eq!(revoked, Revocation { freed: 4096, still_mapped: LEN as u64 });
    assert_eq!(a.quarantined(), LEN as u64);
    assert_eq!((a.liveness(), b.liveness()), (Liveness::Running, Liveness::Revoked));
    assert!(matches!(b.recv(LEN as u64), Err(Error::Revoked)));
    assert_eq!(heard.wait(Slot::Data, soon()).unwrap(), Woken::PeerGone, "its waiters wake");
    assert_eq!(peer.data(0).len(), LEN, "no fault");
    drop(peer);
    assert_eq!(a.quarantined(), 0);
}

#[test]
fn d14_storm_is_spurious_notifications_and_loses_none_that_are_not() {
    let fixture = Harsh::new();
    let storm = fixture.hypervisor.storm(&fixture.a);
    tombolo_testing::conformance::d4_no_notification_is_lost_between_two_who_sleep(&fixture);
    tombolo_testing::conformance::d8_messages_arrive_whole_apart_and_in_order(&fixture);
    assert!(storm.notifications() > 0);
    drop(storm);
    let [mut a, mut b] = fixture.pair();
    let heard = doorbell(&mut *b, &mut *a);
    heard.drain(Slot::Data);
    assert_eq!(heard.wait(Slot::Data, now()).unwrap(), Woken::TimedOut, "it is over");
    fixture.hypervisor.notify(&fixture.a);
    assert_eq!(heard.wait(Slot::Data, now()).unwrap(), Woken::Notified);
}

#[test]
fn d2_liar_changes_its_own_memory_behind_its_threads_back() {
    let fixture = Harsh::new();
    let [mut a, mut b] = fixture.pair();
    let (own, _offer, peer) = shared(&mut *a, &mut *b);
    let (control, mut data) = own.split(4096);
    control.word(words::TAIL).store_release(5);
    data.copy_in(0, b"true");

    fixture
        .hypervisor
        .mutate(&fixture.a, |bytes| {
            assert_eq!(bytes[words::TAIL], 5);
            bytes[words::HEAD..words::HEAD + 8].fill(0xff);
            bytes[4096..4100].copy_from_slice(b"lies");
        })
        .unwrap();
    let mut read = [0; 4];
    peer.data(4096).copy_out(0, &mut read);
    assert_eq!(&read, b"lies");
    assert_eq!(peer.word(words::HEAD).load_acquire().hint(), u64::MAX);
    assert_eq!(peer.word(words::TAIL).load_acquire().hint(), 5, "what it left alone is as it was");

    let forgers = fixture.hypervisor.forgers(&fixture.a).unwrap();
    assert_eq!((forgers.len(), forgers[0].len()), (1, LEN));
    forgers[0].store(words::TAIL, 6);
    assert_eq!(peer.word(words::TAIL).load_acquire().hint(), 6);
    assert!(fixture.hypervisor.forgers(&fixture.b).unwrap().is_empty(), "the other shares nothing");
}
