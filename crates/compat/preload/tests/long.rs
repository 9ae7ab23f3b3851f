// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that move all their data in one call (`programs/long.c`): the connection is joined during the call, which
//! returns the same as without the library.

mod place;

use std::process::Command;

use place::{Place, built_with, has, output};

/// Number of bytes that `long.c` moves.
const ALL: u64 = 64 << 20;

/// Runs a case without the library and with it, with large rings and with small ones. At least `percent` per cent of
/// the received bytes came through shared memory.
fn same(case: &str, percent: u64) {
    if !has(case, &["cc"]) {
        return;
    }
    for (ring, first) in [("1048576", "1048576"), ("65536", "16384")] {
        let place = Place::new();
        let program = built_with(&place, "long.c", &["-O1", "-pthread"]);
        let plain = output(Command::new(&program).arg(case), &place.path("plain"));
        assert!(plain.ends_with("done\n"), "{case}: {plain}");
        let mut command = Command::new(&program);
        place.dress(command.arg(case).env("TOMBOLO_SOCKETS_AFTER", "0"));
        command.env("TOMBOLO_SOCKETS_RING", ring).env("TOMBOLO_SOCKETS_FIRST_RING", first);
        assert_eq!(output(&mut command, &place.path("with")), plain, "{case}: {}", place.log());
        place.assert_none_reset();
        if percent > 0 {
            place.shared(ALL, percent).unwrap_or_else(|why| panic!("{case}, rings of {ring}: {why}\n{}", place.log()));
        }
    }
}

#[test]
fn s4_one_call_that_sends_all_is_joined_while_it_lasts() {
    ["write", "writev", "sendmsg", "quiet"].into_iter().for_each(|case| same(case, 50));
}

#[test]
fn s4_one_sendfile_of_all_is_joined_while_it_lasts() {
    ["sendfile", "sendfile at"].into_iter().for_each(|case| same(case, 50));
}

#[test]
fn s4_one_call_that_receives_all_is_joined_while_it_lasts() {
    ["all by parts", "both"].into_iter().for_each(|case| same(case, 50));
}

#[test]
fn s4_one_call_that_receives_all_goes_on_where_others_join_the_connection_meanwhile() {
    (0..4).for_each(|_| same("beside", 0));
}

#[test]
fn one_call_of_all_that_is_cut_short_answers_as_ever() {
    ["end", "reset", "reset later", "shut", "signal", "limit", "cancel"].into_iter().for_each(|case| same(case, 0));
}
