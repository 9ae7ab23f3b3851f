// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flags, lengths, errors and limits that few programs meet (`programs/odd.c`): each gives the same result with the
//! library as without.

mod place;

use std::process::Command;

use place::{Place, built_with, has, output};

/// Asserts that a case prints the same with the library, where its connections are joined, as without it: with small
/// rings, with smaller first rings, and with directions that move between TCP and shared memory.
fn same(case: &str) {
    same_of(case, |_| {});
}

/// As [`same`]; `look` also checks the library's log.
fn same_of(case: &str, look: impl Fn(&str)) {
    if !has(case, &["cc"]) {
        return;
    }
    for (name, value) in
        [("TOMBOLO_SOCKETS_RING", "65536"), ("TOMBOLO_SOCKETS_FIRST_RING", "4096"), ("TOMBOLO_SOCKETS_FLIP_US", "300")]
    {
        let place = Place::new();
        let program = built_with(&place, "odd.c", &["-O1"]);
        let plain = output(Command::new(&program).arg(case), &place.path("plain"));
        assert!(plain.ends_with("done\n"), "{case}: {plain}");
        let mut command = Command::new(&program);
        place.dress(command.arg(case).env("TOMBOLO_SOCKETS_AFTER", "0").env(name, value));
        assert_eq!(output(&mut command, &place.path("with")), plain, "{case}, {name}: {}", place.log());
        assert!(place.log().contains("joined:"), "{case}, {name}: {}", place.log());
        place.assert_none_reset();
        look(&place.log());
    }
}

#[test]
fn message_that_went_in_part_is_the_last_of_many() {
    same("parts");
}

#[test]
fn many_messages_within_a_time_say_how_much_of_it_is_left() {
    same("times");
}

#[test]
fn flags_and_lengths_that_mean_nothing_to_a_stream_are_taken_or_refused_alike() {
    same("flags");
}

#[test]
fn error_behind_bytes_is_left_for_who_asks_for_it() {
    same("pending");
}

#[test]
fn program_that_may_have_few_addresses_keeps_half_of_them() {
    same("space");
}

#[test]
fn streams_that_libc_has_from_the_beginning_read_and_write_a_socket_that_takes_their_number() {
    same("streams");
}

#[test]
fn process_that_ends_with_bytes_unread_resets_its_connections() {
    same("exits");
}

#[test]
fn bytes_that_the_kernel_would_map_are_read_where_they_are_in_shared_memory() {
    same("mapped");
}

#[test]
fn end_that_is_to_send_no_faster_than_so_is_on_tcp() {
    same("paced");
}

#[test]
fn connection_that_asks_for_a_protocol_which_the_kernel_has_not_stays_in_shared_memory() {
    same_of("protocol", |log| assert!(!log.contains("needs the kernel"), "{log}"));
}

#[test]
fn end_that_comes_behind_bytes_is_told_with_them() {
    same("ends");
}

#[test]
fn room_is_told_to_who_was_told_that_there_is_none() {
    same("room");
}
