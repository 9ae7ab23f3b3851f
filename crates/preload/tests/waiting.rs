// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who is woken by what, and in which order it is seen.

#[macro_use]
mod place;

use std::sync::{Mutex, MutexGuard, PoisonError};

use place::{
    Place, built_with,
    world::{World, number_after},
};

/// What is counted here depends on what else runs: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn world(test: &str, source: &str) -> Option<(World, String, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(test, &["cc"], Place::new)?;
    let program = built_with(&world.place, source, &["-O2"]);
    Some((world, program.to_str().unwrap().to_owned(), alone))
}

/// Runs both ends of a program to their end; what the server and the client printed.
fn both(world: &World, server: &[&str], client: &[&str]) -> (String, String) {
    let mut serving = world.serve(7000, server);
    let said = world.ask(client);
    assert!(serving.finish().success());
    (std::fs::read_to_string(world.place.path("server")).unwrap(), said)
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

#[test]
fn s13_ring_wakes_one_thread_however_many_wait() {
    let test = "s13_ring_wakes_one_thread_however_many_wait";
    let Some((world, program, _alone)) = world(test, "threads.c") else { return };
    let server = [&program, "serve", place::SERVER, "7000", "64"];
    let client = [&program, "ask", place::SERVER, "7000", "64", "1000", "1", "300"];
    let (server, client) = both(&world, &server, &client);
    // Some of so many that begin at once have not found each other after their first turns.
    assert!(world.place.log().matches("joined:").count() >= 48, "{}", world.place.log());
    let (sleeps, turns) = (number_after(&server, "sleeps"), number_after(&client, "all"));
    // 400 turns of each come first, of which each side may sleep for each; and a few for what is set up.
    let first = 64 * 400;
    assert!(sleeps <= first + 3 * turns + 1000, "{sleeps} sleeps for {turns} turns of one connection");
}

#[test]
fn s13_threads_and_sets_beyond_a_hundred_sleep_while_nothing_comes() {
    let test = "s13_threads_and_sets_beyond_a_hundred_sleep_while_nothing_comes";
    let Some((world, program, _alone)) = world(test, "threads.c") else { return };
    for sets in [false, true] {
        let server = [&program, "serve", place::SERVER, "7000", "150", "sets"];
        let client = [&program, "ask", place::SERVER, "7000", "150", "4000", "1", "2000"];
        let (server, client) = both(&world, &server[..if sets { 6 } else { 5 }], &client);
        let (sleeps, turns) = (number_after(&server, "sleeps"), number_after(&client, "all"));
        // As above. Fifty that look each millisecond would sleep 200,000 times more.
        let most = 150 * 400 + 3 * turns + 2000;
        assert!(sleeps <= most, "{sleeps} sleeps for {turns} turns of one connection, sets: {sets}");
    }
    assert!(world.place.log().matches("joined:").count() >= 400, "{}", world.place.log());
}

#[test]
fn threads_that_each_serve_a_connection_lose_nothing() {
    let test = "threads_that_each_serve_a_connection_lose_nothing";
    let Some((world, program, _alone)) = world(test, "threads.c") else { return };
    let server = [&program, "serve", place::SERVER, "7000", "48"];
    let (_, client) = both(&world, &server, &[&program, "ask", place::SERVER, "7000", "48", "1500"]);
    assert!(number_after(&client, "all") > 0);
    assert!(world.place.log().matches("joined:").count() >= 36, "{}", world.place.log());
}
