// SPDX-License-Identifier: Apache-2.0 OR MIT
//! All kinds of calls at once on several connections (`programs/stress.c`): each byte arrives exactly once and in
//! order.

mod place;

use std::{env, path::PathBuf, process::Command};

use place::{Place, built_with, has, output};

/// Largest number of bytes of a stream.
const LEN: &str = "8000000";

fn program(options: &[&str]) -> Option<(Place, PathBuf)> {
    if !has("stress", &["cc"]) {
        return None;
    }
    let place = Place::new();
    let program = built_with(&place, "stress.c", &[&["-O2"], options].concat());
    Some((place, program))
}

/// Runs some seeds, whose connections are joined; `ring` is the size of the first ring.
fn run(ring: &str) {
    let Some((place, program)) = program(&[]) else { return };
    let seeds = if env::var_os("TOMBOLO_LONG").is_some() { 1000 } else { 15 };
    for seed in 0..seeds {
        let mut command = Command::new(&program);
        command.arg(seed.to_string()).arg(LEN).env("TOMBOLO_SOCKETS_AFTER", "0");
        place.dress(command.env("TOMBOLO_SOCKETS_FIRST_RING", ring));
        assert_eq!(output(&mut command, &place.path("out")), "done\n", "seed {seed}: {}", place.log());
    }
    assert!(place.log().contains("joined:"), "{}", place.log());
    assert!(!place.log().contains("broken:"), "{}", place.log());
    place.assert_none_reset();
    place.assert_tidy();
}

#[test]
fn threads_processes_and_signals_at_once_lose_and_double_nothing() {
    run("65536");
}

#[test]
fn they_lose_and_double_nothing_in_large_rings() {
    run("4194304");
}

#[test]
fn canary_wrong_byte_is_seen() {
    let Some((place, program)) = program(&["-DWRONG_FROM=2000"]) else { return };
    let mut command = Command::new(&program);
    place.dress(command.args(["1", LEN]));
    let said = command.output().unwrap();
    assert!(!said.status.success() && String::from_utf8_lossy(&said.stderr).contains("a wrong byte"), "{said:?}");
}
