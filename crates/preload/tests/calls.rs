// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls that programs seldom make: the same behaviour as without the library.

mod place;

use std::process::Command;

use place::{Place, built, has, output, python};

#[test]
fn seldom_calls_give_what_they_give_without_the_library() {
    if !has("seldom_calls_give_what_they_give_without_the_library", &["python3"]) {
        return;
    }
    let place = Place::new();
    let plain = output(&mut python("calls.py"), &place.path("plain"));
    let mut command = python("calls.py");
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{}", place.log());
    assert!(place.log().matches("joined").count() > 10, "{}", place.log());
    assert!(!place.log().contains("ended:"), "{}", place.log());
}

#[test]
fn thread_that_is_cancelled_in_a_call_leaves_the_connection_as_it_was() {
    if !has("thread_that_is_cancelled_in_a_call_leaves_the_connection_as_it_was", &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "cancel.c");
    let plain = output(&mut Command::new(&program), &place.path("plain"));
    let mut command = Command::new(&program);
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{}", place.log());
    assert!(place.log().contains("joined"), "{}", place.log());
}

#[test]
fn end_that_another_program_keeps_alone_gets_and_gives_what_was_under_way() {
    if !has("end_that_another_program_keeps_alone_gets_and_gives_what_was_under_way", &["python3"]) {
        return;
    }
    let place = Place::new();
    let plain = output(&mut python("kept.py"), &place.path("plain"));
    let mut command = python("kept.py");
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{}", place.log());
    assert!(place.log().matches("joined").count() >= 12, "{}", place.log());
    assert!(!place.log().contains("ended:"), "{}", place.log());
}

#[test]
fn s2_end_of_a_stream_that_tcp_cannot_carry_any_more_comes_whole_or_as_a_reset() {
    if !has("s2_end_of_a_stream_that_tcp_cannot_carry_any_more_comes_whole_or_as_a_reset", &["python3"]) {
        return;
    }
    let place = Place::new();
    let plain = output(&mut python("ended.py"), &place.path("plain"));
    assert_eq!(plain, "spawned whole thanks\npassed whole thanks\nnested whole thanks\nexecuted whole thanks\n");
    let mut command = python("ended.py");
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    let with = output(&mut command, &place.path("with"));
    let said: Vec<_> = with.lines().zip(plain.lines()).collect();
    assert_eq!(said.len(), 4, "{with}");
    for (with, plain) in said {
        let reset = plain.replace("whole thanks", "reset reset");
        let may_be_reset = !plain.starts_with("nested");
        assert!(with == plain || may_be_reset && with == reset, "{with}: {}", place.log());
    }
    assert!(place.log().matches("joined").count() >= 8, "{}", place.log());
}

#[test]
fn programs_that_get_a_socket_by_any_way_hear_and_say_what_they_would_on_tcp() {
    if !has("programs_that_get_a_socket_by_any_way_hear_and_say_what_they_would_on_tcp", &["python3", "sh"]) {
        return;
    }
    let place = Place::new();
    let plain = output(&mut python("inherits.py"), &place.path("plain"));
    let mut command = python("inherits.py");
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{}", place.log());
    assert!(place.log().matches("goes back to TCP").count() >= 10, "{}", place.log());
    assert!(!place.log().contains("ended:"), "{}", place.log());
}
