// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of memory (D-1 to D-3, D-13).

use tombolo_layout::words;
use tombolo_mem::{OwnData, OwnSegment, OwnWord, PeerData, PeerSegment, PeerWord};

use super::{
    Fixture,
    support::{eventually, patience, receive},
};
use tombolo_domain::{Endpoint, Offer};

const CONTROL: usize = tombolo_layout::limits::CONTROL_LEN as usize;
/// A page of words and 16 pages of data.
const LEN: usize = CONTROL + 65536;

/// Passes an offer from one endpoint to the other.
fn pass(from: &mut dyn Endpoint, to: &mut dyn Endpoint, offer: &Offer) -> PeerSegment {
    from.send(b"segment", Some(offer)).expect("the path has room");
    receive(to, patience()).expect("a segment was sent").segment.expect("it came with the message")
}

fn contents(fixture: &impl Fixture, segment: &PeerSegment) -> Vec<u8> {
    fixture.quiesce();
    let data = segment.data(0);
    let mut bytes = vec![0; data.len()];
    data.copy_out(0, &mut bytes);
    bytes
}

fn own_contents(segment: OwnSegment) -> Vec<u8> {
    let (_, data) = segment.split(0);
    let mut bytes = vec![0xee; data.len()];
    data.copy_back(0, &mut bytes);
    bytes
}

/// Memory has the length that was requested and is all zeros, at its owner and at the peer (D-1).
pub fn d1_fresh_memory_is_zeroed_and_exact(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    for len in [4096, 8192, LEN, CONTROL + (1 << 20)] {
        let (own, offer) = a.allocate(len).expect("there is memory");
        let peer = pass(&mut *a, &mut *b, &offer);
        assert_eq!((own.len(), peer.len()), (len, len), "D-1: length");
        assert!(contents(fixture, &peer).iter().all(|byte| *byte == 0), "D-1: the peer finds other than zeros");
        assert!(own_contents(own).iter().all(|byte| *byte == 0), "D-1: the owner finds other than zeros");
    }
}

/// Memory that was used before is zeroed again (D-1).
pub fn d1_memory_after_use_is_zeroed_again(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    for _ in 0..8 {
        let (own, offer) = a.allocate(LEN).expect("there is memory");
        let (_, mut data) = own.split(0);
        let mut found = vec![0xee; LEN];
        data.copy_back(0, &mut found);
        assert!(found.iter().all(|byte| *byte == 0), "D-1: memory shows what stood there before");
        data.copy_in(0, &[0xa5; LEN]);
        drop(pass(&mut *a, &mut *b, &offer));
        drop(data);
        a.retire(None, offer);
    }
}

/// The peer sees each word and byte that the owner writes, also those written after it mapped the memory, in both
/// directions (D-1).
pub fn d1_peer_sees_what_the_owner_writes(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    for _ in 0..2 {
        let (own, offer) = a.allocate(LEN).expect("there is memory");
        let (control, mut data) = own.split(CONTROL);
        control.word(words::TAIL).store_release(0x0123_4567_89ab_cdef);
        let peer = pass(&mut *a, &mut *b, &offer);
        let word = |offset| {
            fixture.quiesce();
            peer.word(offset).load_acquire().hint()
        };
        assert_eq!(word(words::TAIL), 0x0123_4567_89ab_cdef, "D-1: written before it was passed");

        control.word(words::HEAD).store_release(42);
        let bytes: Vec<u8> = (0..65536u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        data.copy_in(0, &bytes);
        control.word(words::TAIL).store_release(65536);
        assert!(eventually(|| word(words::TAIL) == 65536), "D-1: written after it was mapped");
        assert_eq!(word(words::HEAD), 42, "D-1: stores are seen in order");
        assert_eq!(contents(fixture, &peer)[CONTROL..], bytes, "D-1: data");
        std::mem::swap(&mut a, &mut b);
    }
}

/// An offer is valid until it is retired: it need not be sent at once, nor in the order in which it was made (D-1).
pub fn d1_offers_may_be_sent_late_and_in_any_order(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let made: Vec<_> = (0..4).map(|_| a.allocate(4096).expect("there is memory")).collect();
    for (number, (own, offer)) in made.into_iter().enumerate().rev() {
        let (control, _data) = own.split(CONTROL);
        control.word(words::TAIL).store_release(number as u64);
        let peer = pass(&mut *a, &mut *b, &offer);
        fixture.quiesce();
        assert_eq!(peer.word(words::TAIL).load_acquire().hint(), number as u64, "D-1: another offer's memory came");
    }
}

/// The kernel maps the peer's memory read-only, shared, and would refuse to make it writable (D-2).
pub fn d2_peers_mapping_is_read_only_for_ever(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let (_own, offer) = a.allocate(LEN).expect("there is memory");
    let peer = pass(&mut *a, &mut *b, &offer);
    let mapping = Mapping::at(peer.address().0);
    assert!(mapping.permissions.starts_with("r--s"), "D-2: mapped {}", mapping.permissions);
    assert!(!mapping.has("mw"), "D-2: mprotect could make it writable");
}

/// Returns whether a mapping of this process is as required (D-2).
pub(super) fn is_read_only(peer: &PeerSegment) -> bool {
    let mapping = Mapping::at(peer.address().0);
    mapping.permissions.starts_with("r--s") && !mapping.has("mw")
}

/// A mapping stays whole whatever its owner does: retire the memory, or go (D-3).
pub fn d3_mapped_memory_outlives_its_owner(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let (own, offer) = a.allocate(LEN).expect("there is memory");
    let (control, mut data) = own.split(CONTROL);
    data.copy_in(0, &[7; 65536]);
    let peer = pass(&mut *a, &mut *b, &offer);
    drop((control, data));
    a.retire(None, offer);
    assert!(
        contents(fixture, &peer)[CONTROL..].iter().all(|byte| *byte == 7),
        "D-3: retired memory changed under its reader"
    );
    drop(a);
    assert!(
        contents(fixture, &peer)[CONTROL..].iter().all(|byte| *byte == 7),
        "D-3: the owner went and took memory with it"
    );
}

/// Retired memory is not used for anything else while the peer maps it, and leaves quarantine when the peer no longer
/// does (D-13).
pub fn d13_retired_memory_is_not_reused_while_mapped(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    assert_eq!(a.quarantined(), 0, "D-13: nothing was retired yet");
    let (own, offer) = a.allocate(LEN).expect("there is memory");
    let (_, mut data) = own.split(0);
    data.copy_in(0, &[7; LEN]);
    let old = pass(&mut *a, &mut *b, &offer);
    drop(data);
    a.retire(None, offer);
    assert!(a.quarantined() <= LEN as u64, "D-13: more is in quarantine than was retired");
    for _ in 0..8 {
        let (own, _offer) = a.allocate(LEN).expect("there is memory");
        own.split(0).1.copy_in(0, &[9; LEN]);
        assert!(contents(fixture, &old).iter().all(|byte| *byte == 7), "D-13: retired memory was used again");
    }
    drop(old);
    assert!(eventually(|| a.quarantined() == 0), "D-13: nobody maps it, and it is still in quarantine");
}

/// Memory on its way to the peer outlives its owner where the backend claims that; otherwise the peer gets an error
/// (D-13).
pub fn d13_memory_on_its_way_outlives_its_owner_as_said(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let (own, offer) = a.allocate(LEN).expect("there is memory");
    own.split(0).1.copy_in(0, &[7; LEN]);
    a.send(b"segment", Some(&offer)).expect("the path has room");
    let outlives = a.outlives_owner();
    a.retire(None, offer);
    drop(a);
    match receive(&mut *b, patience()) {
        Ok(received) if outlives => {
            let segment = received.segment.expect("it came with the message");
            assert!(contents(fixture, &segment).iter().all(|byte| *byte == 7), "D-13: it changed on its way");
        }
        received => assert!(!outlives, "D-13: outlives its owner, and then does not: {received:?}"),
    }
}

/// A segment larger than agreed is refused, and not kept mapped either (D-9).
pub fn d9_segment_larger_than_agreed_is_refused(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let (own, offer) = a.allocate(8192).expect("there is memory");
    a.send(b"large", Some(&offer)).expect("the path has room");
    let refused = super::wait_for(&mut *b, patience(), |b| b.fd(), |b| b.recv(4096));
    assert!(matches!(refused, Err(tombolo_domain::Error::Malformed { .. })), "D-9: {refused:?}");
    a.retire(Some(own), offer);
    assert!(eventually(|| a.quarantined() == 0), "D-9: what was refused is still mapped");

    // A segment of exactly the agreed size is accepted.
    let [mut a, mut b] = fixture.pair();
    let (_own, offer) = a.allocate(8192).expect("there is memory");
    a.send(b"fits", Some(&offer)).expect("the path has room");
    let taken = super::wait_for(&mut *b, patience(), |b| b.fd(), |b| b.recv(8192)).expect("it fits");
    assert_eq!(taken.segment.expect("it came with the message").len(), 8192);
}

/// A message without memory delivers none, whatever size was agreed (D-9).
pub fn d9_message_without_memory_brings_none(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    a.send(b"bare", None).expect("the path has room");
    let received = receive(&mut *b, patience()).expect("a message was sent");
    assert!(received.segment.is_none(), "D-9: memory out of nowhere");
}

/// Properties of one of this process's mappings, as the kernel reports them.
struct Mapping {
    permissions: String,
    flags: String,
}

impl Mapping {
    fn at(address: *const u8) -> Self {
        let address = format!("{:x}-", address as usize);
        let all = std::fs::read_to_string("/proc/self/smaps").expect("/proc is mounted");
        let mut lines = all.lines().skip_while(|line| !line.starts_with(&address));
        let first = lines.next().expect("the segment is mapped where it says");
        let permissions = first.split(' ').nth(1).expect("permissions follow the range").into();
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).expect("smaps tells flags").into();
        Self { permissions, flags }
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.split_whitespace().any(|it| it == flag)
    }
}
