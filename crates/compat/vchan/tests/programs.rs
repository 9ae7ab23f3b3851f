// SPDX-License-Identifier: Apache-2.0 OR MIT
//! C programs that try what the headers describe: between the ends of processes on one kernel, and on the harsh double.

mod common;

use common::{Kit, Map, PLAIN, Running, SANITIZED, has, has_sanitizers, must};

fn tries(kit: &Kit, source: &str, test: &str, map: &Map) {
    let program = kit.program(source, test);
    must(&mut kit.command(&program, map));
    assert_eq!(map.left(), [""; 0], "something stayed behind");
}

#[test]
fn w1_w2_functions_of_xens_spelling_do_what_their_header_says_on_one_kernel() {
    tries(&PLAIN, "xen.c", "xen-local", &Map::local());
}

#[test]
fn functions_of_xens_spelling_do_what_their_header_says_on_the_harsh_double() {
    tries(&PLAIN, "xen.c", "xen-harsh", &Map::harsh());
}

#[test]
fn functions_of_qubes_spelling_do_what_their_header_says_on_one_kernel() {
    tries(&PLAIN, "qubes.c", "qubes-local", &Map::local());
}

#[test]
fn functions_of_qubes_spelling_do_what_their_header_says_on_the_harsh_double() {
    tries(&PLAIN, "qubes.c", "qubes-harsh", &Map::harsh());
}

#[test]
fn w3_w8_both_spellings_work_by_the_layout_of_the_original() {
    tries(&PLAIN, "original.c", "original", &Map::original());
}

/// Runs the program that the tiers with virtual machines run between two of them.
fn tries_apart(flags: &'static str, test: &str) {
    let (map, kit) = (Map::local(), Kit { flags, ..PLAIN });
    let program = kit.program("apart.c", test);
    let mut server = Running::start(kit.command(&program, &map).args(["serve", "1", "1"]));
    let mut client = Running::start(kit.command(&program, &map).args(["join", "1", "1"]));
    for end in [&mut client, &mut server] {
        assert_eq!(end.line(), "every function of this spelling did what its header says");
        assert!(end.child.wait().unwrap().success());
    }
    assert_eq!(map.left(), [""; 0], "something stayed behind");
}

#[test]
fn functions_of_xens_spelling_do_what_their_header_says_between_two_processes() {
    tries_apart("-O2", "apart-xen");
}

#[test]
fn functions_of_qubes_spelling_do_what_their_header_says_between_two_processes() {
    tries_apart("-O2 -DQUBES", "apart-qubes");
}

/// Sizes around those at which a call changes its method: short work, and work in steps.
#[test]
fn calls_of_every_size_bring_what_was_sent_and_tell_of_the_end() {
    let program = PLAIN.program("calls.c", "calls");
    for map in [Map::local(), Map::harsh(), Map::original()] {
        for size in ["1", "64", "129", "4096", "8191", "8192", "16384", "16385", "65536"] {
            must(PLAIN.command(&program, &map).args([size, "200"]));
        }
        assert_eq!(map.left(), [""; 0], "something stayed behind");
    }
}

#[test]
fn both_spellings_are_clean_under_sanitizers() {
    if has_sanitizers("both_spellings_are_clean_under_sanitizers") {
        tries(&SANITIZED, "xen.c", "xen-sanitized", &Map::local());
        tries(&SANITIZED, "qubes.c", "qubes-sanitized", &Map::local());
        tries(&SANITIZED, "original.c", "original-sanitized", &Map::original());
    }
}

#[test]
fn headers_are_cxx_as_well() {
    if has("headers_are_cxx_as_well", "c++") {
        tries(&PLAIN, "plus.cc", "plus", &Map::local());
    }
}

/// One end is killed while the other waits for it.
fn killed(victim: &str, survivor: &str, test: &str) {
    let (map, program) = (Map::local(), PLAIN.program("end.c", test));
    let start = |role: &str| Running::start(PLAIN.command(&program, &map).arg(role));
    let mut server = start("serve");
    assert_eq!(server.line(), "there");
    let mut client = start("join");
    let (victim, survivor) = match (victim, survivor) {
        ("serve", "join") => (&mut server, &mut client),
        _ => (&mut client, &mut server),
    };
    while survivor.line() != "read hello" {}
    victim.kill();
    assert_eq!(survivor.line(), format!("errno {}, open 0", libc::ECONNRESET));
}

#[test]
fn client_hears_of_a_server_that_was_killed() {
    killed("serve", "join", "end-server-killed");
}

#[test]
fn server_hears_of_a_client_that_was_killed() {
    killed("join", "serve", "end-client-killed");
}
