// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two endpoints that find each other while calls of their programs are in progress.

mod pair;

use std::io::IoSlice;

use pair::{join, met};
use tombolo_sockets::{
    connection::{Direction, Stage},
    proof::HISTORY,
};

/// Number of times that both endpoints look for each other.
const LOOKS: usize = 200;

#[test]
fn s6_end_in_whose_program_a_thread_sends_proves_nothing_until_that_is_counted() {
    // For the endpoint that waits, and for the one that seeks.
    for at in [0, 1] {
        let (ends, _folder) = met(|_| {});
        let end = &ends[at];
        let sent = end.connection.plain(Direction::Out).unwrap();
        let text = b"what the kernel has sent, and nobody has counted yet";
        assert_eq!(end.process.kernel().send(-1, &[IoSlice::new(text)]), Ok(text.len()));
        // Another thread of the program advances all connections.
        for _ in 0..LOOKS {
            ends.iter().for_each(|end| end.process.advance(&end.connection));
        }
        let seen = ends.each_ref().map(|end| (end.connection.stage(), end.connection.reason()));
        assert_eq!(seen.map(|(stage, _)| stage), [Stage::Candidate; 2], "{at}: {seen:?}");
        sent.moved(text.len(), [text.as_slice()].into_iter());
        drop(sent);
        join(&ends);
    }
}

#[test]
fn s6_end_that_has_kept_its_beginning_is_joined_while_a_thread_sends() {
    for at in [0, 1] {
        let (ends, _folder) = met(|_| {});
        let end = &ends[at];
        let much = [b's'; HISTORY];
        let send = || assert_eq!(end.process.kernel().send(-1, &[IoSlice::new(&much)]), Ok(HISTORY));
        send();
        end.connection.plain(Direction::Out).unwrap().moved(HISTORY, [much.as_slice()].into_iter());
        let sent = end.connection.plain(Direction::Out).unwrap();
        send();
        join(&ends);
        sent.moved(HISTORY, [much.as_slice()].into_iter());
    }
}
