// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Endpoints that consist of several processes: servers that fork, programs that are executed, processes that are
//! killed.

mod place;

use std::{io::Write, process::Command, time::Duration};

use place::{PATIENCE, Place, built, has, output, output_within, python};

const SIZE: u64 = 3_000_000;

/// Runs one part of `forks.py` with the library. Returns the numbers of bytes received over TCP and through shared
/// memory.
fn forks(part: &str, seed: u64) -> (u64, u64) {
    let place = Place::new();
    let mut command = python("forks.py");
    command.arg(part).arg(SIZE.to_string()).env("TOMBOLO_SOCKETS_AFTER", "0").env("SEED", seed.to_string());
    place.dress(&mut command);
    let said = output(&mut command, &place.path("out"));
    assert_eq!(said, "done\n", "{part}, seed {seed}: {}", place.log());
    assert!(!place.log().contains("broken"), "{part}, seed {seed}: {}", place.log());
    place.received()
}

/// Asserts that at least 95 % of `payload` bytes went through shared memory, in all three runs.
fn shared(part: &str, payload: u64) {
    if !has(part, &["python3"]) {
        return;
    }
    for seed in 0..3 {
        let (tcp, shared) = forks(part, seed);
        assert!(shared * 100 >= payload * 95, "{part}: {shared} of {payload} bytes shared, {tcp} over TCP");
    }
}

#[test]
fn s9_two_processes_that_write_lose_and_double_nothing() {
    shared("writers", 2 * SIZE);
}

#[test]
fn s9_processes_of_two_pid_namespaces_lose_and_double_nothing() {
    let test = "s9_processes_of_two_pid_namespaces_lose_and_double_nothing";
    let may = Command::new("unshare").args(["--pid", "--fork", "true"]).status().is_ok_and(|status| status.success());
    if !may {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs pidns): `unshare --pid` fails");
        return;
    }
    shared("apart", 3 * SIZE);
}

#[test]
fn s9_two_processes_that_read_get_each_byte_once() {
    shared("readers", SIZE);
}

#[test]
fn s9_one_process_reads_while_another_writes() {
    shared("split", 2 * SIZE);
}

#[test]
fn s9_child_that_leaves_the_socket_alone_does_not_slow_its_parent() {
    shared("bystander", 4 * SIZE);
}

#[test]
fn server_that_forks_for_each_caller_is_joined() {
    shared("serves", 8 * SIZE);
}

#[test]
fn process_whose_threads_serve_and_call_while_it_forks_waits_for_nobody() {
    if !has("process_whose_threads_serve_and_call_while_it_forks_waits_for_nobody", &["cc"]) {
        return;
    }
    for _ in 0..runs(4, 100) {
        let place = Place::new();
        let mut command = Command::new(built(&place, "busy.c"));
        place.dress(command.arg("50").env("TOMBOLO_SOCKETS_AFTER", "0"));
        assert_eq!(output(&mut command, &place.path("out")), "done\n", "{}", place.log());
        assert!(place.log().contains("joined") && !place.log().contains("broken"), "{}", place.log());
    }
}

/// If a fork did not lock the table while it is empty, a child would wait for ever within five rounds.
#[test]
fn process_that_forks_while_its_thread_begins_has_children_that_wait_for_nobody() {
    if !has("process_that_forks_while_its_thread_begins_has_children_that_wait_for_nobody", &["cc"]) {
        return;
    }
    let place = Place::new();
    let mut command = Command::new(built(&place, "beginning.c"));
    place.dress(command.arg(runs(5, 100).to_string()).env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("out")), "done\n", "{}", place.log());
    assert!(place.log().contains("joined") && !place.log().contains("broken"), "{}", place.log());
}

#[test]
fn server_that_forks_and_keeps_the_callers_socket_loses_nothing() {
    if has("server_that_forks_and_keeps_the_callers_socket_loses_nothing", &["python3"]) {
        let (tcp, shared) = forks("keeps", 0);
        assert!(tcp + shared >= 8 * SIZE);
    }
}

#[test]
fn s9_process_that_is_killed_takes_nothing_of_the_others_with_it() {
    if !has("s9_process_that_is_killed_takes_nothing_of_the_others_with_it", &["python3"]) {
        return;
    }
    for seed in 0..8 {
        for part in ["writer_dies", "reader_dies"] {
            let (_, shared) = forks(part, seed);
            assert!(shared > 0, "{part}");
        }
    }
}

#[test]
fn program_without_the_library_gets_the_socket_on_tcp() {
    if !has("program_without_the_library_gets_the_socket_on_tcp", &["python3"]) {
        return;
    }
    for seed in 0..3 {
        forks("becomes", seed);
        forks("becomes_at_once", seed);
        shared_after("cannot_become");
    }
}

/// Checks that a process still has its connections after it failed to execute a program.
fn shared_after(part: &str) {
    let (_, shared) = forks(part, 0);
    assert!(shared >= 2 * SIZE * 95 / 100, "{shared} bytes shared");
}

fn runs(short: u64, long: u64) -> u64 {
    if std::env::var_os("TOMBOLO_LONG").is_some() { long } else { short }
}

#[test]
fn program_that_is_interrupted_all_the_time_goes_on_and_ends_from_its_handler() {
    if !has("program_that_is_interrupted_all_the_time_goes_on_and_ends_from_its_handler", &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "signals.c");
    for run in 0..runs(20, 400) {
        for what in ["exit", "all"] {
            let mut command = Command::new(&program);
            // At a different moment in each run.
            place.dress(command.args([what, &(40 + run * 37 % 400).to_string()]).env("TOMBOLO_SOCKETS_AFTER", "0"));
            let status = place::Started::new(&mut command).finish();
            assert_eq!(status.code(), Some(7), "{what}, run {run}: {status}");
        }
    }
    assert!(place.log().contains("joined") && !place.log().contains("broken"), "{}", place.log());
}

#[test]
fn program_that_ends_from_a_handler_that_interrupted_whoever_has_a_lock_ends() {
    let test = "program_that_ends_from_a_handler_that_interrupted_whoever_has_a_lock_ends";
    if !has(test, &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "interrupted.c");
    for words in [["own", "waits"], ["library", "waits"], ["own", "segv"], ["own", "abort"]] {
        let mut command = Command::new(&program);
        place.dress(command.args(words).env("TOMBOLO_SOCKETS_AFTER", "0"));
        let status = place::Started::new(&mut command).finish();
        assert_eq!(status.code(), Some(7), "{words:?}: {status}");
    }
    assert!(place.log().contains("joined"), "{}", place.log());
}

/// Runs one part of `crowd.py` with the library. Returns the numbers of bytes received over TCP and through shared
/// memory.
fn crowd(part: &str, count: u64, seed: u64) -> (u64, u64) {
    crowd_in(&Place::new(), part, count, seed)
}

fn crowd_in(place: &Place, part: &str, count: u64, seed: u64) -> (u64, u64) {
    let mut command = python("crowd.py");
    command.arg(part).arg(count.to_string()).env("TOMBOLO_SOCKETS_AFTER", "0").env("SEED", seed.to_string());
    place.dress(&mut command);
    let patience = PATIENCE.max(Duration::from_millis(10 * count));
    let said = output_within(patience, &mut command, &place.path("out"));
    assert!(said.contains("done"), "{part}, seed {seed}: {said}{}", place.log());
    assert!(!place.log().contains("broken"), "{part}, seed {seed}: {}", place.log());
    if !part.starts_with("killed") {
        place.assert_tidy();
    }
    place.received()
}

#[test]
fn thousand_connections_at_once_are_joined_and_leave_nothing_behind() {
    if has("thousand_connections_at_once_are_joined_and_leave_nothing_behind", &["python3"]) {
        let (tcp, shared) = crowd("many", 1000, 0);
        // Bytes go in both directions in each turn; in the first two or three turns of twenty, the endpoints find each
        // other.
        assert!(shared > 5 * tcp, "{shared} bytes shared, {tcp} over TCP");
    }
}

#[test]
fn short_connections_one_after_the_other_arrive_whole_and_leave_nothing_behind() {
    if has("short_connections_one_after_the_other_arrive_whole_and_leave_nothing_behind", &["python3"]) {
        // Descriptors, files and memory of both processes are counted after a tenth of the connections, and have not
        // grown at the end.
        let (tcp, shared) = crowd("short", runs(10_000, 100_000), 0);
        assert!(tcp > 0 && shared > 0, "{shared} bytes shared, {tcp} over TCP");
    }
}

#[test]
fn end_that_is_killed_at_any_time_leaves_a_beginning_and_an_end() {
    if has("end_that_is_killed_at_any_time_leaves_a_beginning_and_an_end", &["python3"]) {
        for part in ["killed", "killed_server"] {
            let shared: u64 = (0..runs(3, 100)).map(|seed| crowd(part, 10, seed).1).sum();
            assert!(shared > 0, "{part}: nothing was killed in shared memory");
        }
    }
}

#[test]
fn s10_streams_whose_link_is_cut_under_load_arrive_whole_over_tcp() {
    if has("s10_streams_whose_link_is_cut_under_load_arrive_whole_over_tcp", &["python3"]) {
        for seed in 0..runs(3, 100) {
            let place = Place::new();
            let (tcp, shared) = crowd_in(&place, "revoked", 4, seed);
            // A session that was cut does not keep other connections from using a new one.
            assert_eq!(place.log().matches(" joined: ").count(), 8, "seed {seed}: {}", place.log());
            assert!(shared > 1_000_000 && tcp > 1_000_000, "{shared} bytes shared, {tcp} over TCP");
        }
    }
}
