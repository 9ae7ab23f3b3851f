// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which threads are woken by what, and in which order events are seen.

#[macro_use]
mod place;

use std::sync::{Mutex, MutexGuard, PoisonError};

use place::{
    Place, Started, built_with,
    world::{CLIENTS, SERVERS, World, number_after},
};

/// The counts depend on what else runs, so the tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn world(test: &str, source: &str) -> Option<(World, String, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(test, &["cc"], Place::new)?;
    let program = built_with(&world.place, source, &["-O2"]);
    Some((world, program.to_str().unwrap().to_owned(), alone))
}

/// Runs both programs to their end. Returns what the server and the client printed.
fn both(world: &World, server: &[&str], client: &[&str]) -> (String, String) {
    let mut serving = world.serve(7000, server);
    let said = world.ask(client);
    assert!(serving.finish().success());
    (std::fs::read_to_string(world.place.path("server-7000")).unwrap(), said)
}

#[test]
fn s14_what_was_written_before_is_seen_before_or_together() {
    let test = "s14_what_was_written_before_is_seen_before_or_together";
    let Some((world, program, _alone)) = world(test, "order.c") else { return };
    for how in ["epoll", "poll", "select"] {
        for part in ["joined", "plain", "new", "late", "other", "idle"] {
            let server = [&program, "serve", place::SERVER, "7000", how, "new"];
            let server = &server[..if part == "new" { 6 } else { 5 }];
            let before = world.place.log().matches("joined:").count();
            let (said, _) = both(&world, server, &[&program, "ask", place::SERVER, "7000", "1000", part]);
            assert_eq!(number_after(&said, "turns:"), 1000, "{how}, {part}");
            assert_eq!(number_after(&said, "wrong:"), 0, "{how}, {part}");
            let joined = world.place.log().matches("joined:").count() - before;
            let expected = match part {
                "joined" | "other" => 4,
                "idle" => 104,
                _ => 2,
            };
            assert_eq!(joined, expected, "{how}, {part}: {}", world.place.log());
        }
    }
}

/// Returns what both print in a run in which at least `ends` endpoints joined. Of many that begin at once, some have
/// not found each other after their first turns; their number depends on what else runs.
fn both_joined(world: &World, ends: usize, server: &[&str], client: &[&str]) -> (String, String) {
    let joined = || world.place.log().matches("joined:").count();
    let mut most = 0;
    for _ in 0..5 {
        let before = joined();
        let printed = both(world, server, client);
        most = most.max(joined() - before);
        if most >= ends {
            return printed;
        }
    }
    panic!("{most} ends joined in the best of five runs, {ends} were wanted: {}", world.place.log());
}

#[test]
fn s13_notification_wakes_one_thread_however_many_wait() {
    let test = "s13_notification_wakes_one_thread_however_many_wait";
    let Some((world, program, _alone)) = world(test, "threads.c") else { return };
    let server = [&program, "serve", place::SERVER, "7000", "64"];
    let client = [&program, "ask", place::SERVER, "7000", "64", "1000", "1", "300"];
    let (server, client) = both_joined(&world, 48, &server, &client);
    let (sleeps, turns) = (number_after(&server, "sleeps"), number_after(&client, "all"));
    // 400 turns of each connection come first, and each side may sleep in each of them; a few more belong to the setup.
    let first = 64 * 400;
    assert!(sleeps <= first + 3 * turns + 1000, "{sleeps} sleeps for {turns} turns of one connection");
}

#[test]
fn s13_threads_and_sets_beyond_a_hundred_sleep_while_nothing_comes() {
    let test = "s13_threads_and_sets_beyond_a_hundred_sleep_while_nothing_comes";
    let Some((world, program, _alone)) = world(test, "threads.c") else { return };
    for sets in [false, true] {
        let server = [&program, "serve", place::SERVER, "7000", "150", "sets"];
        let client = [&program, "ask", place::SERVER, "7000", "150", "2000", "1", "2000", "3000"];
        // Enough of the 300 endpoints for the bound that the kernel meets.
        let (server, client) = both_joined(&world, 210, &server[..if sets { 6 } else { 5 }], &client);
        let (sleeps, turns) = (number_after(&server, "sleeps"), number_after(&client, "all"));
        // As above.
        let most = 150 * 3000 + 3 * turns + 2000;
        assert!(sleeps <= most, "{sleeps} sleeps for {turns} turns of one connection, sets: {sets}");
        let log = world.place.log();
        assert!(!log.contains("goes back"), "{log}");
    }
}

#[test]
fn threads_that_each_serve_a_connection_lose_nothing() {
    let test = "threads_that_each_serve_a_connection_lose_nothing";
    let Some((world, program, _alone)) = world(test, "threads.c") else { return };
    let server = [&program, "serve", place::SERVER, "7000", "48"];
    let client = [&program[..], "ask", place::SERVER, "7000", "48", "1500"];
    let (_, client) = both_joined(&world, 36, &server, &client);
    assert!(number_after(&client, "all") > 0);
}

/// Returns the round trips, and the CPU time of both programs, of a server and a client with so many threads each.
fn turns(world: &World, program: &str, with: bool, connections: u64) -> (u64, u64) {
    let number = connections.to_string();
    let log = world.place.path("turns");
    let start = |end, words: &[&str], to: &std::path::Path| {
        let mut command = world.namespaces.bare(end, program);
        command.args(words).stdout(std::fs::File::create(to).unwrap());
        if with {
            world.place.dress(&mut command);
        }
        Started::new(&mut command)
    };
    let mut server = start(SERVERS, &["serve", place::SERVER, "7000", &number], &log);
    world.namespaces.wait_for(7000);
    let said = world.place.path("said");
    assert!(start(CLIENTS, &["ask", place::SERVER, "7000", &number, "400"], &said).finish().success());
    assert!(server.finish().success());
    let [server, client] = [log, said].map(|path| std::fs::read_to_string(path).unwrap());
    // The first turns, before the endpoints have found each other, also take CPU time.
    (number_after(&client, "all"), number_after(&client, "cpu") + number_after(&server, "cpu"))
}

#[test]
fn threads_beside_burners_are_no_slower_than_over_tcp() {
    let test = "threads_beside_burners_are_no_slower_than_over_tcp";
    let Some((world, program, _alone)) = world(test, "threads.c") else { return };
    let long = std::env::var_os("TOMBOLO_LONG").is_some();
    let (burners, connections, rounds): (&[usize], &[u64], usize) =
        if long { (&[0, 1, 4, 16], &[1, 4, 32, 128], 7) } else { (&[1], &[32], 5) };
    // Allows for other work of the machine; without optimization the library is slow, and the kernel is not.
    let least = if cfg!(debug_assertions) { 30 } else { 75 };
    for (burners, connections) in burners.iter().flat_map(|burners| connections.iter().map(move |n| (*burners, *n))) {
        let burn = || Started::new(std::process::Command::new("sh").args(["-c", "while :; do :; done"]));
        let _burning: Vec<_> = (0..burners).map(|_| burn()).collect();
        // One after the other, so that both compete with the same processes.
        let mut shares: Vec<_> = (0..rounds)
            .map(|_| {
                let [plain, shared] = [false, true].map(|with| turns(&world, &program, with, connections));
                // Turns, and CPU time for each turn, in percent of TCP's.
                (shared.0 * 100 / plain.0, shared.1 * plain.0 * 100 / (plain.1 * shared.0))
            })
            .collect();
        shares.sort_unstable();
        let (turns, _) = shares[rounds / 2];
        shares.sort_unstable_by_key(|(_, cpu)| *cpu);
        let (_, cpu) = shares[rounds / 2];
        println!(
            "{connections} connections, {burners} burners: turns {turns}, CPU time for each {cpu} hundredths of TCP's"
        );
        assert!(turns >= least, "{connections} connections, {burners} burners: {turns} hundredths of TCP's turns");
        assert!(
            cpu <= 15_000 / least,
            "{connections} connections, {burners} burners: {cpu} hundredths of TCP's CPU time"
        );
    }
}
