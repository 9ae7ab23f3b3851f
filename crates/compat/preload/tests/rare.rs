// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Orders of calls that few programs make (`programs/rare.c`): each gives the same result with the library as without.

mod place;

use std::process::Command;

use place::{Place, built_with, has, output};

/// Asserts that a case prints the same with the library, where its connections are joined, as without it.
fn same(case: &str, settings: &[(&str, &str)]) -> Option<Place> {
    same_with(case, &[], settings)
}

/// As [`same`], for a case with further arguments.
fn same_with(case: &str, words: &[&str], settings: &[(&str, &str)]) -> Option<Place> {
    if !has(case, &["cc"]) {
        return None;
    }
    let place = Place::new();
    let program = built_with(&place, "rare.c", &["-O1"]);
    let plain = output(Command::new(&program).arg(case).args(words), &place.path("plain"));
    assert!(plain.ends_with("done\n"), "{case}: {plain}");
    let mut command = Command::new(&program);
    place.dress(command.arg(case).args(words).env("TOMBOLO_SOCKETS_AFTER", "0").env("TOMBOLO_SOCKETS_RING", "65536"));
    command.envs(settings.iter().copied());
    assert_eq!(output(&mut command, &place.path("with")), plain, "{case}: {}", place.log());
    assert!(place.log().contains("joined:"), "{case}: {}", place.log());
    place.assert_none_reset();
    Some(place)
}

#[test]
fn s15_read_where_a_carrier_was_left_gives_what_is_on_the_other_one_too() {
    // Each direction moves between TCP and shared memory.
    same("short", &[("TOMBOLO_SOCKETS_FLIP_US", "300")]);
}

/// Ways in which the four cases look at received bytes: by `poll`, by edges, for all of them, by their number.
const LOOKS: [&str; 4] = ["poll", "edge", "all", "count"];

#[test]
fn s15_look_at_what_is_there_shows_it_across_moves_to_tcp_and_back() {
    for how in LOOKS {
        same_with("peek", &[how], &[("TOMBOLO_SOCKETS_FLIP_US", "300")]);
    }
}

#[test]
fn s20_look_at_what_is_there_shows_it_across_rings() {
    for how in LOOKS {
        same_with("peek much", &[how], &[("TOMBOLO_SOCKETS_FIRST_RING", "4096"), ("TOMBOLO_SOCKETS_RING", "1048576")]);
    }
}

#[test]
fn s6_splice_before_the_join_moves_all_that_is_there() {
    same("splice", &[]);
}

#[test]
fn s2_sendfile_to_a_pipe_takes_what_is_in_shared_memory() {
    same("sendfile", &[]);
}

#[test]
fn s16_ends_that_send_much_before_they_read_do_not_wait_for_each_other() {
    for how in ["blocks", "poll", "epoll", "tries", "spins", "spins by poll"] {
        same(how, &[]);
    }
}

#[test]
fn select_that_a_signal_ends_says_how_much_of_the_time_is_left() {
    same("select", &[]);
}

#[test]
fn call_that_has_moved_something_ends_with_a_signal() {
    same("restart", &[]);
}

#[test]
fn socket_that_is_disconnected_and_connected_anew_is_the_kernels() {
    same("disconnect", &[]);
}

#[test]
fn what_the_kernel_says_beside_bytes_it_says() {
    let Some(place) = same("beside", &[]) else { return };
    // Each case occurs twice: the option is set after the endpoints are joined, or before. A program that asks for the
    // number of bytes left stays joined. One that asks for their time of arrival returns to TCP with the first call
    // that has room for the answer.
    let log = place.log();
    assert_eq!(log.matches("goes back to TCP: the socket is used").count(), 2, "{log}");
    assert_eq!(log.matches("joined: shared memory").count(), 8, "{log}");
    assert!(!log.contains("stays on TCP"), "{log}");
}

#[test]
fn who_asks_for_the_end_alone_hears_of_it_while_bytes_are_left() {
    same("end", &[]);
}

#[test]
fn end_that_was_joined_after_it_had_ended_its_sending_sends_nothing() {
    same("shut", &[]);
}

#[test]
fn thread_that_polls_a_joined_connection_and_one_that_others_join_hears_of_both() {
    same("watched", &[]);
}

#[test]
fn s12_who_sends_to_an_end_that_has_shut_down_both_ways_is_told() {
    same("both", &[]);
}

#[test]
fn s12_who_only_sends_to_a_process_that_is_gone_is_told() {
    same("gone", &[]);
}

#[test]
fn arguments_that_the_kernel_refuses_are_refused_before_anything_is_touched() {
    let Some(place) = same("refused", &[]) else { return };
    assert!(!place.log().contains("goes back"), "{}", place.log());
}

#[test]
fn s2_end_that_has_shut_down_its_receiving_goes_back_to_tcp_with_what_is_unread() {
    same("deaf", &[]);
}

#[test]
fn signals_asked_for_while_the_peer_makes_no_call_come_with_what_it_sends_next() {
    same("signalled", &[]);
}

#[test]
fn s2_what_only_the_kernel_does_ends_no_connection_whose_peer_makes_no_call() {
    for how in ["oob", "lent", "peek", "set"] {
        same_with("silent", &[how], &[]);
    }
}

#[test]
fn s2_what_only_the_kernel_does_leaves_what_a_peer_that_sends_no_more_has_sent() {
    same("mute", &[]);
}

#[test]
fn s15_read_that_goes_on_with_the_other_carrier_ends_before_urgent_data() {
    same("urgent", &[]);
}

#[test]
fn s13_room_that_comes_while_a_set_looks_is_told_to_who_asks_for_levels() {
    same("levels", &[("TOMBOLO_SOCKETS_FIRST_RING", "4096"), ("TOMBOLO_SOCKETS_RING", "4096")]);
}

#[test]
fn s2_who_polls_a_set_and_never_sleeps_sends_over_tcp_what_its_peer_asks_for_there() {
    for how in ["poll", "epoll", "count"] {
        same_with("polled", &[how], &[]);
    }
}
