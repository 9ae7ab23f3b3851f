// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of control messages (D-8).

use tombolo_layout::limits::CONTROL_MESSAGE_MAX;

use super::{
    Fixture,
    support::{ANY, Belled, ending, eventually, message, path_comes_to_rest, patience, receive, unblocked},
};
use tombolo_domain::Error;

/// Returns messages of all lengths, distinguishable by their bytes. There are few enough for any backend to hold.
fn samples() -> impl Iterator<Item = Vec<u8>> {
    [0, 1, 2, 64, 255, CONTROL_MESSAGE_MAX].into_iter().map(|len| (0..len).map(|at| (at ^ len) as u8).collect())
}

/// Messages of 0 to 256 bytes arrive whole, separate and in order, in both directions (D-8).
pub fn d8_messages_arrive_whole_apart_and_in_order(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    for _ in 0..2 {
        for sample in samples() {
            a.send(&sample, None).expect("the path has room");
        }
        for sample in samples() {
            assert_eq!(message(&mut *b), sample, "D-8: message of {} bytes", sample.len());
        }
        std::mem::swap(&mut a, &mut b);
    }
}

/// The sender refuses a message of 257 bytes, which disturbs nothing (D-8).
pub fn d8_message_too_long_is_refused_by_the_sender(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let refused = a.send(&[1; CONTROL_MESSAGE_MAX + 1], None);
    assert!(matches!(refused, Err(Error::Limit { .. })), "D-8: {refused:?}");
    a.send(b"next", None).expect("the path has room");
    assert_eq!(message(&mut *b), b"next", "D-8: a refused message arrived");
}

/// Where nothing was sent, nothing is received, at once (D-8).
pub fn d8_recv_of_nothing_is_none_at_once(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let nothing = unblocked("D-8: recv", move || (a.recv(ANY), b.recv(ANY)));
    assert!(matches!(nothing, (Ok(None), Ok(None))), "D-8: {nothing:?}");
}

/// A peer that does not read makes `send` fail, never block. What was sent is not lost, and once it was read there is
/// room again (D-8).
pub fn d8_full_path_is_a_limit_and_not_a_block(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let (mut a, sent) = unblocked("D-8: send", move || {
        let mut sent = 0u32;
        loop {
            match a.send(&sent.to_le_bytes(), None) {
                Ok(()) if sent == 1_000_000 => panic!("D-8: the path has no bound"),
                Ok(()) => sent += 1,
                Err(Error::Limit { .. }) => break (a, sent),
                Err(error) => panic!("D-8: {error}"),
            }
        }
    });
    assert!(sent >= 4, "D-8: room for {sent} messages is too little to set up a channel");
    for number in 0..sent {
        assert_eq!(message(&mut *b), number.to_le_bytes(), "D-8: lost or out of order");
    }
    assert!(matches!(b.recv(ANY), Ok(None)), "D-8: the message that was refused arrived");
    a.send(b"again", None).expect("there is room again");
    assert_eq!(message(&mut *b), b"again");
}

/// The descriptor polls readable while there is something to receive, and comes to rest once there is not (D-8).
pub fn d8_descriptor_tells_when_there_is_something(fixture: &impl Fixture) {
    let Belled { links: [mut a, mut b], .. } = Belled::new(fixture);
    assert!(path_comes_to_rest(&mut *b), "D-8: readable, and nothing was sent");
    a.send(b"one", None).expect("the path has room");
    a.send(b"two", None).expect("the path has room");
    for expected in [b"one", b"two"] {
        assert!(
            tombolo_domain::wait_readable(b.fd(), patience()).expect("polling works"),
            "D-8: sent, and not readable"
        );
        assert_eq!(message(&mut *b), expected);
    }
    assert!(matches!(b.recv(ANY), Ok(None)), "D-8: two messages were sent");
    assert!(path_comes_to_rest(&mut *b), "D-8: all is read, and still readable");
    drop(a);
    assert!(
        tombolo_domain::wait_readable(b.fd(), patience()).expect("polling works"),
        "D-8: the end is something to receive"
    );
}

/// The messages that a peer sent before it went are received before its end is reported, and the end is then reported
/// for ever (D-8, D-10).
pub fn d8_messages_come_before_the_end(fixture: &impl Fixture) {
    let [mut a, mut b] = fixture.pair();
    let (own, offer) = a.allocate(4096).expect("there is memory");
    a.send(b"one", None).expect("the path has room");
    a.send(b"two", Some(&offer)).expect("the path has room");
    a.send(b"three", None).expect("the path has room");
    drop(a);
    assert_eq!(message(&mut *b), b"one", "D-8: lost at the end");
    let second = receive(&mut *b, patience()).expect("D-8: lost at the end");
    assert_eq!((&second.message[..], second.segment.map(|it| it.len())), (&b"two"[..], Some(4096)));
    assert_eq!(message(&mut *b), b"three", "D-8: lost at the end");
    for _ in 0..3 {
        assert!(matches!(ending(&mut *b), Error::PeerGone), "D-10: the end is told");
    }
    assert!(eventually(|| matches!(b.send(b"x", None), Err(Error::PeerGone))), "D-10: sent to nobody");
    drop((own, offer));
}
