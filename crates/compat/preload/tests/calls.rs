// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls that programs seldom make behave as without the library.

mod place;

use std::process::Command;

use place::{Place, built, built_with, has, output, python};

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
    place.assert_none_reset();
}

/// Returns what `calls.c`, built with `options`, prints without the library and with it.
fn in_c(options: &[&str], words: &[&str]) -> (String, String, Place) {
    let place = Place::new();
    let program = built_with(&place, "calls.c", options);
    let plain = output(Command::new(&program).args(words), &place.path("plain"));
    let mut command = Command::new(&program);
    place.dress(command.args(words).env("TOMBOLO_SOCKETS_AFTER", "0"));
    (plain, output(&mut command, &place.path("with")), place)
}

#[test]
fn checked_and_wide_forms_of_calls_standard_io_and_signals_are_those_without() {
    if !has("checked_and_wide_forms_of_calls_standard_io_and_signals_are_those_without", &["cc"]) {
        return;
    }
    for options in [&["-O0"][..], &["-O2", "-D_FORTIFY_SOURCE=2", "-D_FILE_OFFSET_BITS=64"]] {
        let (plain, with, place) = in_c(options, &[]);
        let program = std::fs::read(place.path("calls")).unwrap();
        let names =
            [&b"__recv_chk"[..], b"__recvfrom_chk", b"__read_chk", b"__poll_chk", b"__ppoll_chk", b"sendfile64"];
        for name in names {
            let there = program.windows(name.len()).any(|window| window == name);
            assert_eq!(there, options.len() > 1, "{}", String::from_utf8_lossy(name));
        }
        assert_eq!(with, plain, "{options:?}: {}", place.log());
        assert_eq!(place.log().matches("joined").count(), 2 * 6, "{}", place.log());
        place.assert_none_reset();
    }
}

/// Returns what `edges.c` prints with the library, and without it.
fn edges(words: &[&str]) -> (String, String, Place) {
    let place = Place::new();
    let program = built_with(&place, "edges.c", &["-Wno-nonnull", "-Wno-stringop-overflow", "-Wno-stringop-overread"]);
    let plain = output(Command::new(&program).args(words), &place.path("plain"));
    let mut command = Command::new(&program);
    place.dress(command.args(words).env("TOMBOLO_SOCKETS_AFTER", "0"));
    (output(&mut command, &place.path("with")), plain, place)
}

#[test]
fn program_that_may_make_few_calls_makes_no_others() {
    if !has("program_that_may_make_few_calls_makes_no_others", &["cc"]) {
        return;
    }
    for way in ["by name", "by number"] {
        let (with, plain, place) = edges(&[way]);
        assert_eq!(with, plain, "{}", place.log());
        assert_eq!(place.log().matches("joined").count(), 4, "{}", place.log());
        place.assert_none_reset();
    }
}

/// Returns what a line of the log reports of an endpoint: that it was joined, that it ended back on TCP, or that it
/// ended otherwise.
fn step(line: &str) -> Option<char> {
    let step = |text, step| line.contains(text).then_some(step);
    step(" joined", 'j').or_else(|| step(" ended, back on TCP", 'b')).or_else(|| step(" ended", 'e'))
}

#[test]
fn numbers_that_standard_io_or_the_kernel_close_and_calls_that_come_later_are_those_without() {
    if !has("numbers_that_standard_io_or_the_kernel_close_and_calls_that_come_later_are_those_without", &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "numbers.c");
    let plain = output(&mut Command::new(&program), &place.path("plain"));
    let mut command = Command::new(&program);
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{}", place.log());
    let log = place.log();
    // A socket that standard I/O held before it was connected does not belong to the library.
    assert_eq!(log.matches("joined").count(), 2 * 10, "{log}");
    assert!(!log.contains("broken"), "{log}");
    // A socket that standard I/O closes is released immediately, not only when its number turns out to be another file.
    let steps: String = log.lines().filter_map(step).collect();
    assert!(steps.starts_with("jjbejjbejjbejjbe"), "{steps}: {log}");
}

/// Calls of the program, and signal handlers, may still run in the library when the program that loaded it calls
/// `dlclose`.
#[test]
fn library_that_is_closed_stays_loaded() {
    if !has("library_that_is_closed_stays_loaded", &["readelf"]) {
        return;
    }
    let library = std::env::current_exe().unwrap().with_file_name("libtombolo_preload.so");
    let dynamic = Command::new("readelf").arg("-d").arg(library).output().unwrap();
    let dynamic = String::from_utf8(dynamic.stdout).unwrap();
    assert!(dynamic.contains("SYMTAB") && dynamic.contains("NODELETE"), "{dynamic}");
}

#[test]
fn program_whose_files_are_bounded_is_not_ended_for_shared_memory() {
    if !has("program_whose_files_are_bounded_is_not_ended_for_shared_memory", &["cc"]) {
        return;
    }
    let (with, plain, place) = edges(&["bounded"]);
    assert_eq!(with, plain, "{}", place.log());
    assert!(place.log().contains("no memory"), "{}", place.log());
}

#[test]
fn edges_of_what_calls_allow_are_those_without() {
    if !has("edges_of_what_calls_allow_are_those_without", &["cc"]) {
        return;
    }
    let (with, plain, place) = edges(&[]);
    let differ: Vec<_> = plain.lines().zip(with.lines()).filter(|(plain, with)| plain != with).collect();
    assert!(plain == with, "{differ:#?}: {}", place.log());
    assert_eq!(place.log().matches("joined").count(), 2 * 12, "{}", place.log());
    place.assert_none_reset();
}

#[test]
fn s5_bytes_past_the_library_leave_the_connection_on_tcp_or_end_it() {
    if !has("s5_bytes_past_the_library_leave_the_connection_on_tcp_or_end_it", &["cc"]) {
        return;
    }
    let (plain, with, place) = in_c(&[], &["past"]);
    assert_eq!((&plain[..], &with[..]), ("whole\n", "whole\n"));
    assert_eq!(place.received().1, 0, "{}", place.log());
    let (plain, with, place) = in_c(&[], &["past after"]);
    assert_eq!((&plain[..], &with[..]), ("given\n", "reset\n"), "{}", place.log());
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
    place.assert_none_reset();
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
    place.assert_none_reset();
}
