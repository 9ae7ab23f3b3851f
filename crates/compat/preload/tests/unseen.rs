// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that wait by system calls of their own, past libc, while their other calls are libc's
//! (`programs/unseen.c`): they are notified of bytes as without the library (ADR 0096).

mod place;

use std::process::Command;

use place::{Place, built, has, output};

/// Returns how many bytes the two endpoints received over TCP, and through shared memory, while a program waited in
/// this `way`. The program prints the same as without the library, and its connection is joined.
fn received(way: &str) -> Option<(u64, u64)> {
    if !has(way, &["cc"]) {
        return None;
    }
    let place = Place::new();
    let program = built(&place, "unseen.c");
    let plain = output(Command::new(&program).arg(way), &place.path("plain"));
    assert!(plain.ends_with("ok\n"), "{way}: {plain}");
    let mut command = Command::new(&program);
    place.dress(command.arg(way));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{way}: {}", place.log());
    assert!(place.log().contains("joined:"), "{way}: {}", place.log());
    place.assert_none_reset();
    Some(place.received())
}

#[test]
fn answer_is_told_to_who_waits_for_it_past_libc() {
    for way in ["set", "set without waiting", "set for edges", "poll"] {
        let Some((tcp, shared)) = received(way) else { return };
        assert!(tcp >= 400_000, "{way}: {shared} bytes through shared memory, {tcp} over TCP");
    }
}

#[test]
fn answer_is_told_to_who_waits_past_libc_from_some_time_on() {
    let Some((tcp, shared)) = received("later") else { return };
    assert!(shared > tcp / 2, "{shared} bytes through shared memory, {tcp} over TCP");
}

#[test]
fn room_is_told_to_who_waits_for_it_past_libc() {
    for way in ["room", "room later"] {
        let _ = received(way);
    }
    // The sender moved into the pipe, which is full before the receiver has followed there.
    let Some((_, shared)) = received("room at a move") else { return };
    assert!(shared >= 100, "{shared} bytes through shared memory");
}

#[test]
fn waits_of_libc_and_calls_that_wait_are_seen() {
    for way in ["seen", "blocks"] {
        let Some((tcp, shared)) = received(way) else { return };
        assert!(shared > 9 * tcp, "{way}: {shared} bytes through shared memory, {tcp} over TCP");
    }
}
