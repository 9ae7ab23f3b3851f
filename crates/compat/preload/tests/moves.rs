// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waits and moves of one connection by several threads, processes and handlers (`programs/moves.c`, `leaves.c`,
//! `absent.c`, `lent.c`, `frugal.c`, `spawns.c`, `awake.c`): the calls return the same as without the library.

mod place;

use std::{fs, process::Command};

use place::{Place, built, built_with, has, output, python};

/// Asserts that a case of a program prints the same with the library, and that its connection is joined there.
fn same(source: &str, case: &str) -> Option<Place> {
    if !has(case, &["cc"]) {
        return None;
    }
    let place = Place::new();
    let program = built(&place, source);
    let plain = output(Command::new(&program).arg(case), &place.path("plain"));
    let mut command = Command::new(&program);
    place.dress(command.arg(case).env("TOMBOLO_SOCKETS_AFTER", "0").env("TOMBOLO_SOCKETS_RING", "65536"));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{case}: {}", place.log());
    assert!(place.log().contains("joined"), "{case}: {}", place.log());
    Some(place)
}

#[test]
fn splice_to_a_joined_connection_takes_no_more_than_there_is_room_for() {
    for case in ["room", "part"] {
        same("moves.c", case);
    }
}

#[test]
fn splice_that_waits_is_ended_by_a_signal_and_a_time_limit_and_loses_nothing() {
    for case in ["signal", "limit"] {
        same("moves.c", case);
    }
}

#[test]
fn splice_waits_for_the_pipe_and_the_socket_as_each_says() {
    for case in ["flag", "empty", "over"] {
        same("moves.c", case);
    }
}

#[test]
fn splice_to_a_connection_whose_peer_has_closed_loses_nothing_and_returns() {
    same("moves.c", "closed");
}

#[test]
fn handler_that_sends_amid_a_splice_of_the_kernels_does_not_wait_for_itself() {
    same("moves.c", "amid");
}

#[test]
fn splice_from_and_to_a_fifo_that_has_a_name_waits_only_as_it_was_told() {
    for case in ["fifo", "to-fifo"] {
        same("moves.c", case);
    }
}

#[test]
fn splice_of_a_part_of_a_packet_leaves_the_rest() {
    same("moves.c", "packets");
}

#[test]
fn splice_gives_each_byte_once_where_the_connection_goes_back_to_tcp_meanwhile() {
    same("leaves.c", "all");
}

#[test]
fn child_takes_no_file_of_its_own_for_a_socket_that_was_accepted_amid_the_fork() {
    same("absent.c", "all");
}

#[test]
fn handler_of_a_signal_that_interrupted_malloc_waits_and_moves_bytes() {
    same("frugal.c", "all");
}

#[test]
fn handler_that_comes_amid_a_spawn_waits_for_nobody_who_forks() {
    same("spawns.c", "all");
}

#[test]
fn program_that_starts_another_one_reads_what_its_peer_sent_before_it_ended() {
    for how in ["spawn", "system", "exec", "vfork", "closes"] {
        if let Some(place) = same("lent.c", how) {
            place.assert_none_reset();
        }
    }
}

/// Runs `lent HOW WHAT` for each way to start a program; the started program must print `says`.
fn lends(what: &str, says: &str) {
    if !has(what, &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "lent.c");
    for how in ["spawn", "system", "exec", "vfork", "closes"] {
        let mut command = Command::new(&program);
        place.dress(command.args([how, what]).env("TOMBOLO_SOCKETS_AFTER", "0"));
        assert_eq!(output(&mut command, &place.path("out")), says, "{how}: {}", place.log());
    }
    assert!(place.log().matches("goes back to TCP").count() >= 5, "{}", place.log());
    place.assert_none_reset();
}

#[test]
fn program_that_starts_another_one_reads_what_a_peer_sent_that_makes_no_call_any_more() {
    lends("silent", "30000 bytes, the same\n");
}

#[test]
fn program_that_was_started_reads_what_the_other_one_has_left_unread() {
    lends("given", "29993\n");
}

/// The started program cannot read the bytes that its parent left unread, and gets an error: an end of the stream here
/// would be a false one.
#[test]
fn program_that_was_started_hears_that_bytes_were_left_unread() {
    if !has("bytes left unread", &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "lent.c");
    for how in ["spawn", "exec"] {
        let mut command = Command::new(&program);
        place.dress(command.args([how, "close"]).env("TOMBOLO_SOCKETS_AFTER", "0"));
        let said = command.output().unwrap();
        let heard = String::from_utf8_lossy(&said.stderr);
        assert!(place.log().contains("joined") && heard.contains("wc:"), "{how}: {heard}{}", place.log());
    }
}

#[test]
fn splice_looks_at_the_pipe_before_the_socket() {
    same("moves.c", "order");
}

#[test]
fn shutdown_wakes_a_thread_that_waits_for_room() {
    same("awake.c", "shutdown");
}

#[test]
fn thread_asleep_in_a_set_hears_of_room_that_another_did_not_find() {
    for how in ["room", "room in parts"] {
        same("awake.c", how);
    }
}

#[test]
fn thread_asleep_in_a_set_hears_of_bytes_after_another_has_read_a_full_ring() {
    for how in ["full", "full in parts"] {
        same("awake.c", how);
    }
}

#[test]
fn thread_asleep_in_a_set_hears_of_the_end_once_another_has_read_what_was_before_it() {
    for _ in 0..5 {
        same("awake.c", "end");
    }
}

#[test]
fn socket_that_a_child_made_nonblocking_is_so_for_its_parent() {
    same("awake.c", "fcntl");
    same("awake.c", "ioctl");
}

#[test]
fn child_has_no_descriptor_at_which_a_thread_of_its_parent_waits() {
    same("awake.c", "seat");
}

#[test]
fn process_that_forks_in_a_handler_amid_a_wait_and_its_child_are_both_woken() {
    for _ in 0..5 {
        same("awake.c", "handler");
    }
}

#[test]
fn child_that_a_handler_made_just_before_a_sleep_waits_at_a_place_of_its_own() {
    if !has("child_that_a_handler_made_just_before_a_sleep_waits_at_a_place_of_its_own", &["cc"]) {
        return;
    }
    let place = Place::new();
    let library = built_with(&place, "between.c", &["-shared", "-fPIC", "-DLIBRARY"]);
    fs::rename(library, place.path("between.so")).unwrap();
    let mut command = Command::new(built(&place, "between.c"));
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    let libraries = [place.path("preload.so"), place.path("between.so")].map(|file| file.display().to_string());
    command.env("LD_PRELOAD", libraries.join(" "));
    assert_eq!(output(&mut command, &place.path("with")), "child: waited\n", "{}", place.log());
    assert!(place.log().contains("joined"), "{}", place.log());
}

#[test]
fn child_of_a_process_that_sleeps_in_a_set_joins_connections_of_its_own() {
    if let Some(place) = same("awake.c", "alone") {
        assert!(place.log().matches(" joined:").count() >= 4, "{}", place.log());
        assert!(!place.log().contains("goes back to TCP"), "{}", place.log());
    }
}

#[test]
fn what_the_kernel_says_of_a_large_set_is_read_seldom() {
    same("awake.c", "many");
}

#[test]
fn urgent_byte_comes_after_what_is_in_shared_memory() {
    same("awake.c", "mark");
}

/// This differs from a run without the library, where the call continues until bytes come: the number may be another
/// file's by then.
#[test]
fn call_that_waits_for_a_socket_that_another_thread_closes_fails() {
    if !has("call_that_waits_for_a_socket_that_another_thread_closes_fails", &["cc"]) {
        return;
    }
    let place = Place::new();
    let mut command = Command::new(built(&place, "awake.c"));
    place.dress(command.arg("closed").env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("with")), "recv: -1\ndone\n", "{}", place.log());
    assert!(place.log().contains("joined"), "{}", place.log());
}

#[test]
fn connection_whose_peer_makes_no_call_is_reset_where_it_must_be_on_tcp() {
    if !has("connection_whose_peer_makes_no_call_is_reset_where_it_must_be_on_tcp", &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "awake.c");
    let mut command = Command::new(&program);
    place.dress(command.arg("reset").env("TOMBOLO_SOCKETS_AFTER", "0"));
    let said = output(&mut command, &place.path("with"));
    assert_eq!(said, "both ends: Connection reset by peer\ndone\n", "{}", place.log());
    assert!(place.log().contains(tombolo_sockets::RESET_LINE), "{}", place.log());
}

#[test]
fn log_that_is_a_pipe_nobody_reads_makes_nobody_wait() {
    if !has("log_that_is_a_pipe_nobody_reads_makes_nobody_wait", &["python3"]) {
        return;
    }
    let place = Place::new();
    let fifo = place.path("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let mut command = python("echo.py");
    place.dress(command.arg("level").arg("8000000"));
    command.env("TOMBOLO_SOCKETS_LOG", &fifo);
    assert_eq!(output(&mut command, &place.path("out")), "4 of 4\n");
    assert!(place.received().1 > 0, "nothing was joined");
    assert_eq!(fs::metadata(&fifo).unwrap().len(), 0);
}
