// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random calls on a connection between two machines whose link is taken away meanwhile. Whatever the programs do
//! before and after that, the connection leaves its memory by calls that read nothing, and every byte arrives exactly
//! once (S-19).

mod machine_pair;

use std::{
    io::{IoSlice, IoSliceMut},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use machine_pair::{Ends, PAGE, Programs, WINDOW, done, of};
use rustix::io::Errno;
use tombolo_sockets::{Read, Reason, connection::ReturnStage, kernel::Kernel};

/// Pseudo-random numbers, the same for the same seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }

    /// Returns a small number of bytes mostly, and sometimes a large one.
    fn len(&mut self) -> usize {
        let most = [200, 9000, 70_000][self.below(3)];
        1 + self.below(most)
    }
}

/// Ways in which an endpoint ends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Ending {
    ShutsDown,
    Closes,
    Dies,
}

impl Ends<'_> {
    /// Makes the calls of a program that read nothing, and that notice everything there is to notice.
    fn call_and_read_nothing(&self, at: usize) {
        self.programs.processes[at].advance(&self.ends[at]);
        self.call(at).send_recalled();
        self.programs.processes[at].before_sleep();
        self.call(at).arm(true, true);
    }

    /// Makes a call of an endpoint that is not `gone`. Returns the endpoint that is gone afterwards.
    fn call_at_random(&mut self, chance: &mut Chance, gone: Option<usize>) -> Option<usize> {
        let (at, len) = (gone.map_or_else(|| chance.below(2), |gone| 1 - gone), chance.len());
        let is_over = self.ends[at].ending.has_ended_sending();
        match chance.below(8) {
            0 | 1 if is_over => {}
            0 | 1 => drop(self.send(at, len)),
            2 | 3 => drop(self.receive(1 - at, len)),
            4 => drop(self.peek(1 - at, len)),
            5 => match chance.below(400) {
                0..8 => self.end(at, Ending::ShutsDown),
                how @ (8 | 9) if gone.is_none() && self.may_close(at) => {
                    self.end(at, [Ending::Closes, Ending::Dies][how - 8]);
                    return Some(at);
                }
                _ => {
                    let wire = self.programs.kernels[at].of(self.fd);
                    wire.out.lock().unwrap().is_full = chance.below(4) == 0;
                }
            },
            // The bytes in the pipe stay there to be read.
            6 if chance.below(10) == 0 => _ = self.call(at).turn_back(),
            _ => self.call_and_read_nothing(at),
        }
        gone
    }

    /// Returns whether a close would not make TCP reset, and no recalled bytes are left to send.
    fn may_close(&mut self, at: usize) -> bool {
        self.programs.kernels[at].of(self.fd).out.lock().unwrap().is_full = false;
        while self.receive(1 - at, 70_000) > 0 {}
        !self.call(at).send_recalled()
    }

    fn end(&mut self, at: usize, how: Ending) {
        let end = &self.ends[at];
        self.programs.kernels[at].of(self.fd).out.lock().unwrap().is_over = true;
        match how {
            Ending::ShutsDown => {
                end.end_sending();
                self.call(at).finish_shutdown(false);
            }
            Ending::Closes => {
                assert!(!end.finish(&self.programs.kernels[at], self.fd), "bytes are unread");
                assert!(end.descriptors.close_one(None));
            }
            Ending::Dies => self.programs.processes[at].end(),
        }
    }

    /// The endpoints `these` make calls that read nothing, until `those` have left the memory.
    fn call_until_left(&self, these: Range<usize>, those: Range<usize>) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.ends[those.clone()].iter().all(|end| end.pipes.have_left_memory()) {
            these.clone().for_each(|at| self.call_and_read_nothing(at));
            assert!(Instant::now() < deadline, "{:?}", self.ends.each_ref().map(|end| end.transports()));
        }
    }

    /// Peeks at bytes from an endpoint, without taking them.
    fn peek(&self, from: usize, most: usize) -> usize {
        let mut to = [vec![0; most / 2], vec![0; most - most / 2]];
        let [first, second] = &mut to;
        let parts = &mut [IoSliceMut::new(first), IoSliceMut::new(second)];
        let n = done(self.call(1 - from).recv(parts, Read::Peek));
        let expected = (0..n as u64).map(|ahead| machine_pair::byte(self.received[from] + ahead));
        assert!(to.concat()[..n].iter().copied().eq(expected), "a peek shows other bytes");
        n
    }
}

/// Runs one connection from its beginning to its end.
fn leave_at_random(seed: u64) {
    let mut chance = Chance(seed);
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.join(0).unwrap();
    ends.move_into_memory();
    let first = ["a", "b"][chance.below(2)];
    let steps = [400, 60, 60].map(|most| {
        let most = [most, 6][chance.below(2)];
        chance.below(most)
    });
    let mut gone = None;
    (0..steps[0]).for_each(|_| gone = ends.call_at_random(&mut chance, gone));
    programs.world.leave_in(first);
    (0..steps[1]).for_each(|_| gone = ends.call_at_random(&mut chance, gone));
    programs.world.leave_in(if first == "a" { "b" } else { "a" });
    (0..steps[2]).for_each(|_| gone = ends.call_at_random(&mut chance, gone));
    // They learn of it some milliseconds later (S-19).
    let relief = Instant::now() + Duration::from_millis([0, 30][chance.below(2)]);
    let deadline = Instant::now() + Duration::from_secs(10);
    let there: Vec<_> = (0..2).filter(|at| Some(*at) != gone).collect();
    while !there.iter().all(|at| ends.ends[*at].pipes.have_left_memory()) {
        there.iter().for_each(|at| ends.call_and_read_nothing(*at));
        if Instant::now() > relief {
            programs.kernels.iter().for_each(|kernel| kernel.of(ends.fd).out.lock().unwrap().is_full = false);
        }
        let unread = [0, 1].map(|from| ends.sent[from] - ends.received[from]);
        let transports = ends.ends.each_ref().map(|end| end.transports());
        assert!(Instant::now() < deadline, "seed {seed}: it does not leave: {unread:?} bytes unread, {transports:?}");
    }
    // No endpoint looks into the memory any more.
    for memory in programs.world.memories() {
        rustix::fs::ftruncate(&memory, PAGE).unwrap();
    }
    for from in (0..2).filter(|from| there.contains(&(1 - from))) {
        if there.contains(&from) && !ends.ends[from].ending.has_ended_sending() {
            ends.send(from, 5000);
        }
        while ends.receive(from, 70_000) > 0 {}
        assert_eq!(ends.received[from], ends.sent[from], "seed {seed}");
    }
}

#[test]
fn s19_connection_leaves_at_any_moment_by_calls_that_read_nothing_and_every_byte_arrives() {
    (0..if std::env::var_os("TOMBOLO_LONG").is_some() { 3000 } else { 100 }).for_each(leave_at_random);
}

/// A sender that is asked for TCP moves there from where it is. The bytes that it left in the pipe cannot be recalled
/// after that, and must be read there.
#[test]
fn s2_what_a_sender_left_before_it_was_recalled_is_still_in_the_pipe() {
    for (is_over, stage) in [(false, ReturnStage::Long), (true, ReturnStage::Lost)] {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(0).unwrap();
        ends.move_into_memory();
        ends.receive(0, 100_000);
        ends.send(0, 1000);
        ends.receive(0, 400);
        programs.processes[1].leaves(&ends.ends[1], Reason::Usage);
        assert!(ends.call(1).is_readable());
        ends.send(0, 10);
        programs.kernels[0].of(ends.fd).out.lock().unwrap().is_over = is_over;
        assert_eq!((ends.call(1).retreat(Reason::Usage), ends.ends[1].unread()), (stage, 600));
        while ends.received[0] < ends.sent[0] {
            assert!(ends.receive(0, 1000) > 0, "{} of {}", ends.received[0], ends.sent[0]);
        }
        assert_eq!(ends.call(1).retreat(Reason::Usage), ReturnStage::Done);
    }
}

/// Bytes in memory cannot go over TCP after their sender has ended, and must not be lost with the memory. The reader's
/// program is notified of them as before. The last bytes may have gone over TCP.
#[test]
fn s19_what_a_sender_left_that_has_ended_is_read_after_its_memory_went() {
    let endings = [Ending::ShutsDown, Ending::Closes, Ending::Dies];
    for (ending, over_tcp) in endings.into_iter().flat_map(|ending| [(ending, 0), (ending, 1000)]) {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(0).unwrap();
        ends.move_into_memory();
        while ends.receive(0, 100_000) + ends.receive(1, 100_000) > 0 {}
        assert_eq!(ends.send(0, 12_000), 12_000);
        if over_tcp > 0 {
            assert!(ends.call(0).turn_back());
            assert_eq!(ends.send(0, over_tcp), over_tcp);
        }
        ends.end(0, ending);
        programs.world.leave();
        let there = if ending == Ending::ShutsDown { 0..2 } else { 1..2 };
        ends.call_until_left(there.clone(), there.clone());
        for memory in programs.world.memories() {
            rustix::fs::ftruncate(&memory, PAGE).unwrap();
        }
        let end = Arc::clone(&ends.ends[1]);
        let left = || (end.unread(), end.pipes.has_unread(), end.pipes.is_crossing(), end.is_back_on_tcp());
        assert!(ends.call(1).is_readable(), "{ending:?}");
        assert_eq!(left(), (12_000, true, false, false));
        assert_eq!(ends.peek(0, 20_000), 12_000 + over_tcp, "{ending:?}");
        assert_eq!((ends.receive(0, 5000), left()), (5000, (7000, true, false, false)));
        assert_eq!((ends.receive(0, 100_000), left()), (7000, (0, false, true, true)));
        assert_eq!(ends.receive(0, 100_000), over_tcp);
        assert_eq!(ends.call(1).recv(&mut [IoSliceMut::new(&mut [0; 10])], Read::Take), Ok(0));
        assert!(there.start == 1 || ends.send(1, 1000) == 1000 && ends.receive(1, 1000) == 1000);
    }
}

/// An endpoint that has recalled bytes to send, and no room in TCP, must send them also to a peer that has left and
/// sends no more.
#[test]
fn s19_end_that_owes_what_was_recalled_has_not_left_before_it_is_sent() {
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.join(0).unwrap();
    ends.move_into_memory();
    while ends.receive(0, 100_000) + ends.receive(1, 100_000) > 0 {}
    assert_eq!(ends.send(0, 12_000), 12_000);
    ends.end(1, Ending::ShutsDown);
    let is_full = |full| programs.kernels[0].of(ends.fd).out.lock().unwrap().is_full = full;
    is_full(true);
    programs.world.leave();
    ends.call_until_left(0..2, 1..2);
    (0..100).for_each(|_| ends.call_and_read_nothing(0));
    assert!(!ends.ends[0].pipes.have_left_memory(), "12000 bytes are owed");
    is_full(false);
    ends.call_until_left(0..2, 0..1);
    assert_eq!(ends.receive(0, 100_000), 12_000);
}

/// Bytes that a program sent past the library arrive before the recalled bytes: the peer must not take the former for
/// the latter.
#[test]
fn s5_what_is_recalled_does_not_come_behind_bytes_that_went_past_the_library() {
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.join(0).unwrap();
    ends.move_into_memory();
    while ends.receive(0, 100_000) + ends.receive(1, 100_000) > 0 {}
    assert_eq!(ends.send(0, 12_000), 12_000);
    assert_eq!(programs.kernels[0].send(ends.fd, &[IoSlice::new(b"past")]), Ok(4));
    ends.call(1).retreat(Reason::Usage);
    for _ in 0..100 {
        (0..2).for_each(|at| ends.call_and_read_nothing(at));
        assert_eq!(ends.receive(0, 1000), 0);
    }
    assert_eq!(ends.call(0).send(&[IoSlice::new(b"more")]), Err(Errno::CONNRESET), "{}", programs.log());
}

/// A sender that moved to TCP before it was asked has left bytes in memory that cannot be recalled. Their reader makes
/// no call that reads before the memory is taken away. They precede the bytes that come over TCP, also for another
/// program, which cannot have them.
#[test]
fn s19_what_a_sender_left_that_went_on_over_tcp_is_read_after_its_memory_went() {
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.join(0).unwrap();
    ends.move_into_memory();
    while ends.receive(0, 100_000) + ends.receive(1, 100_000) > 0 {}
    assert_eq!(ends.send(0, 12_000), 12_000);
    assert!(ends.call(0).turn_back());
    assert_eq!(ends.send(0, 500), 500);
    programs.world.leave();
    ends.call_until_left(0..2, 0..2);
    for memory in programs.world.memories() {
        rustix::fs::ftruncate(&memory, PAGE).unwrap();
    }
    assert_eq!(ends.send(0, 500), 500);
    assert_eq!(ends.call(1).retreat(Reason::Shared), ReturnStage::Lost);
    assert_eq!((ends.ends[1].unread(), ends.peek(0, 20_000)), (12_000, 13_000));
    assert_eq!((ends.receive(0, 100_000), ends.receive(0, 100_000)), (12_000, 1000));
    assert_eq!(ends.call(1).retreat(Reason::Shared), ReturnStage::Done);
    assert!(ends.send(1, 1000) == 1000 && ends.receive(1, 1000) == 1000);
}
