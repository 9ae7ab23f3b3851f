// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the examples, each end as a process, and checks their results.

use std::{fs, io::Write, thread};

use super::{Kit, Place, wait_until};

/// Bytes without a pattern.
fn noise(len: usize) -> Vec<u8> {
    let mut state = len as u64 | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(len).collect()
}

pub fn echo(kit: &Kit) {
    let (place, echo) = (Place::new(), kit.examples().join("echo"));
    let server = kit.start(&echo, &["serve", &place.address()]);
    let long = "x".repeat(10_000);
    let answer = kit.run(&echo, &["say", &place.address(), "hello", &long, "neighbour"]);
    assert_eq!(answer, format!("hello {long} neighbour\n"));
    server.succeeds();
}

pub fn copy(kit: &Kit) {
    let (place, copy) = (Place::new(), kit.examples().join("copy"));
    let (from, to, bytes) = (place.path("from"), place.path("to"), noise(kit.bytes + 12_345));
    fs::write(&from, &bytes).unwrap();
    let receiver = kit.start(&copy, &["receive", &place.address(), to.to_str().unwrap()]);
    kit.run(&copy, &["send", &place.address(), from.to_str().unwrap()]);
    let (code, _, said) = receiver.ends();
    assert_eq!((code, said), (Some(0), format!("{} bytes\n", bytes.len())));
    assert!(fs::read(to).unwrap() == bytes, "another file came out than went in");
}

pub fn sum(kit: &Kit) {
    let (place, sum) = (Place::new(), kit.examples().join("sum"));
    let server = kit.start(&sum, &["serve", &place.address()]);
    assert_eq!(kit.run(&sum, &["ask", &place.address(), "40", "-1", "3"]), "42\n");
    server.succeeds();
    let server = kit.start(&sum, &["serve", &place.address()]);
    let most = i64::MAX.to_string();
    let said = kit.start(&sum, &["ask", &place.address(), &most, "1"]).fails(1);
    assert!(said.contains("the server says"), "{said}");
    server.succeeds();
}

pub fn chat(kit: &Kit) {
    let (place, chat) = (Place::new(), kit.examples().join("chat"));
    let host = kit.start(&chat, &["host", &place.address()]);
    let mut ann = kit.start(&chat, &["join", &place.address(), "ann"]);
    host.tells("ann is here");
    let mut ben = kit.start(&chat, &["join", &place.address(), "ben"]);
    host.tells("ben is here");
    ann.feed(b"hello\n");
    ben.tells("ann: hello");
    ben.feed(b"good morning\n");
    ann.tells("ben: good morning");
    ann.hush();
    assert_eq!(ann.succeeds(), "ben: good morning\n");
    host.tells("ann left");
    ben.hush();
    assert_eq!(ben.succeeds(), "ann: hello\n");
    assert_eq!(host.succeeds(), "ann is here\nben is here\nann left\nben left\n");
}

/// The sender is killed in mid-transfer: the bytes that it wrote arrive, and the receiver does not take them for all.
pub fn killed_sender(kit: &Kit) {
    let (place, copy) = (Place::new(), kit.examples().join("copy"));
    let to = place.path("to");
    let receiver = kit.start(&copy, &["receive", &place.address(), to.to_str().unwrap()]);
    let mut sender = kit.start(&copy, &["send", &place.address(), "/dev/stdin"]);
    sender.feed(&noise(100_000));
    wait_until("the first part arrives", || fs::metadata(&to).is_ok_and(|meta| meta.len() == 100_000));
    sender.kill();
    let said = receiver.fails(1);
    assert!(said.ends_with("only 100000 bytes came before the sender went"), "{said}");
    assert!(fs::read(to).unwrap() == noise(100_000));
}

/// The receiver is killed in mid-transfer: the sender gets an error and ends.
pub fn killed_receiver(kit: &Kit) {
    let (place, copy) = (Place::new(), kit.examples().join("copy"));
    let to = place.path("to");
    let receiver = kit.start(&copy, &["receive", &place.address(), to.to_str().unwrap()]);
    let mut sender = kit.start(&copy, &["send", &place.address(), "/dev/stdin"]);
    sender.feed(&noise(100_000));
    wait_until("the first part arrives", || fs::metadata(&to).is_ok_and(|meta| meta.len() == 100_000));
    receiver.kill();
    receiver.ends();
    let input = sender.child.stdin.take();
    // More than the ring holds; the receiver then reads no more and closes.
    thread::spawn(move || input.map(|mut input| input.write_all(&noise(8 << 20))));
    let said = sender.fails(1);
    assert!(said.contains("peer is gone") || said.contains("does not read"), "{said}");
}

pub fn calls(kit: &Kit) {
    let place = Place::new();
    kit.run(&kit.program("calls.c"), &[&place.address()]);
}

pub fn fork(kit: &Kit) {
    let place = Place::new();
    kit.run(&kit.program("fork.c"), &[&place.address()]);
}

pub fn threads(kit: &Kit) {
    let place = Place::new();
    kit.run(&kit.program("threads.c"), &[&place.address(), &kit.bytes.to_string()]);
}
