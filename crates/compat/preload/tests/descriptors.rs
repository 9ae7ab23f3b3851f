// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A program's descriptors are its own: the library takes none of them away, and does not lose its own to the program.

mod place;

use std::process::Command;

use place::{Place, built, has, output, python};

/// Returns the number of connections that fit into a limit of 58 descriptors, with `more` as the script's last
/// arguments.
fn limited(mut command: Command, dress: bool, more: &[&str], place: &Place) -> String {
    command.args(["limited", "58"]).args(more).env("TOMBOLO_SOCKETS_AFTER", "0");
    if dress {
        place.dress(&mut command);
    }
    output(&mut command, &place.path("out"))
}

#[test]
fn descriptors_of_the_library_do_not_count_against_the_programs_limit() {
    if !has("descriptors_of_the_library_do_not_count_against_the_programs_limit", &["python3"]) {
        return;
    }
    let place = Place::new();
    let plain = limited(python("descriptors.py"), false, &["lift"], &place);
    for _ in 0..3 {
        assert_eq!(limited(python("descriptors.py"), true, &["lift"], &place), plain, "{}", place.log());
    }
    let (tcp, shared) = place.received();
    assert!(shared > tcp, "{shared} bytes through shared memory, {tcp} over TCP; the log:\n{}", place.log());
}

#[test]
fn limit_that_cannot_be_lifted_leaves_the_program_all_of_it_and_plain_tcp() {
    if !has("limit_that_cannot_be_lifted_leaves_the_program_all_of_it_and_plain_tcp", &["python3", "setpriv"]) {
        return;
    }
    let place = Place::new();
    let bound = |dress| {
        let python = python("descriptors.py");
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"]);
        command.arg(python.get_program()).args(python.get_args());
        limited(command, dress, &[], &place)
    };
    let plain = bound(false);
    assert_eq!(bound(true), plain, "{}", place.log());
    assert!(place.log().contains("no memory or descriptors left"), "{}", place.log());
}

#[test]
fn program_that_closes_every_descriptor_it_does_not_know_closes_none_of_the_librarys() {
    if !has("program_that_closes_every_descriptor_it_does_not_know_closes_none_of_the_librarys", &["python3"]) {
        return;
    }
    for how in ["each", "range", "from", "listed", "onto"] {
        let place = Place::new();
        let mut command = python("descriptors.py");
        place.dress(command.args(["closed", how]).env("TOMBOLO_SOCKETS_AFTER", "0"));
        assert_eq!(output(&mut command, &place.path("out")), "whole\n", "{how}: {}", place.log());
        // Both connections: bytes sent after the close go through shared memory.
        assert!(!place.log().contains("goes back"), "{how}: {}", place.log());
        place.shared(2_000_000, 95).unwrap_or_else(|why| panic!("{how}: {why}"));
    }
}

#[test]
fn connection_whose_number_is_closed_past_the_library_leaves_nothing_behind() {
    if !has("connection_whose_number_is_closed_past_the_library_leaves_nothing_behind", &["cc"]) {
        return;
    }
    let place = Place::new();
    let mut command = Command::new(built(&place, "past.c"));
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("said")), "descriptors 0 mappings 0\n");
    assert_eq!(place.log().matches("joined:").count(), 120, "{}", place.log());
}
