// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that a child made by fork may have mapped as well is used for nothing else, on either side (V-6). The test
//! has a program of its own, because a fork concerns the whole process.

mod support;

use std::os::fd::OwnedFd;

use support::{World, accept, patience};
use tombolo_control::WINDOWS_AT;
use tombolo_domain::{Endpoint, Rendezvous};
use tombolo_testing::conformance;

const LEN: usize = 8192;

/// Returns the two endpoints of a connection, and the memory that the endpoint in `b` writes.
fn pair(world: &World) -> (Box<dyn Endpoint>, Box<dyn Endpoint>, OwnedFd) {
    let service = world.service();
    let mut listener = world.a.listen(&service).unwrap();
    let b = world.b.connect(&service, patience()).unwrap();
    let a = accept(&mut *listener);
    let [memory, _] = world.memories();
    (a, b, memory)
}

/// Returns the serial of the segment that the endpoint in `b` has released last under the first handle.
fn let_go(memory: &OwnedFd) -> u64 {
    let mut word = [0; 8];
    assert_eq!(rustix::io::pread(memory, &mut word[..], WINDOWS_AT + 0x200), Ok(8));
    u64::from_le_bytes(word)
}

#[test]
fn v6_what_a_child_may_look_at_is_neither_let_go_nor_used_again() {
    let world = World::new();
    let (mut a, mut b, memory) = pair(&world);
    let receive = |b: &mut dyn Endpoint| {
        let got = conformance::wait_for(b, patience(), |b| b.fd(), |b| b.recv(LEN as u64)).expect("a segment was sent");
        got.segment.expect("it came with the message")
    };

    // A reader that was copied while it had the segment does not know when its child has released it.
    let (own, offer) = a.allocate(LEN).unwrap();
    a.send(b"", Some(&offer)).unwrap();
    let segment = receive(&mut *b);
    drop(world.b.hold_for_fork());
    drop(segment);
    assert_eq!(let_go(&memory), 0, "the child may look at it still");
    a.retire(Some(own), offer);
    assert_eq!(a.quarantined(), LEN as u64);

    // A writer that was copied while it had the segment does not know when its child writes no more, whatever the
    // reader reports.
    let (mut a, mut b, memory) = pair(&world);
    let (own, offer) = a.allocate(LEN).unwrap();
    a.send(b"", Some(&offer)).unwrap();
    drop(world.a.hold_for_fork());
    drop(receive(&mut *b));
    assert_ne!(let_go(&memory), 0, "the reader was not copied since");
    a.retire(Some(own), offer);
    assert_eq!(a.quarantined(), LEN as u64, "the child may write to it still");

    // Memory allocated since then is used again.
    let (own, offer) = a.allocate(LEN).unwrap();
    a.retire(Some(own), offer);
    assert_eq!(a.quarantined(), LEN as u64);
}
