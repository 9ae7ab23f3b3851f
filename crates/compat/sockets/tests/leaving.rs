// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Calls at random on a connection between two machines whose link is taken away meanwhile: whatever the programs did before and do
//! then, it leaves its memory by calls that read nothing, and every byte arrives, once (S-19).

mod machine_pair;

use std::{
    io::IoSliceMut,
    sync::Arc,
    time::{Duration, Instant},
};

use machine_pair::{Ends, PAGE, Programs, WINDOW, done, of};
use tombolo_sockets::{Read, Reason, connection::ReturnStage};

/// Numbers that look like chance, the same ones for a seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }

    /// Some bytes mostly, and sometimes many.
    fn len(&mut self) -> usize {
        let most = [200, 9000, 70_000][self.below(3)];
        1 + self.below(most)
    }
}

impl Ends<'_> {
    /// What a program may do that reads nothing, with which it hears what there is to hear.
    fn call_and_read_nothing(&self, at: usize) {
        self.programs.processes[at].advance(&self.ends[at]);
        self.call(at).send_recalled();
        self.programs.processes[at].before_sleep();
        self.call(at).arm(true, true);
    }

    fn call_at_random(&mut self, chance: &mut Chance) {
        let (at, len) = (chance.below(2), chance.len());
        let is_over = self.ends[at].ending.has_ended_sending();
        match chance.below(8) {
            0 | 1 if is_over => {}
            0 | 1 => drop(self.send(at, len)),
            2 | 3 => drop(self.receive(at, len)),
            4 => {
                let mut to = vec![0; len];
                let seen = done(self.call(1 - at).recv(&mut [IoSliceMut::new(&mut to)], Read::Peek));
                let expected = (0..seen as u64).map(|ahead| machine_pair::byte(self.received[at] + ahead));
                assert!(to[..seen].iter().copied().eq(expected), "a peek shows other bytes");
            }
            5 if chance.below(20) == 0 => {
                self.programs.kernels[at].of(self.fd).out.lock().unwrap().is_over = true;
                self.ends[at].end_sending();
                self.call(at).finish_shutdown(false);
            }
            5 => {
                let wire = self.programs.kernels[at].of(self.fd);
                wire.out.lock().unwrap().is_full = chance.below(4) == 0;
            }
            _ => self.call_and_read_nothing(at),
        }
    }

    fn is_left(&self) -> bool {
        self.ends.iter().all(|end| end.pipes.have_left_memory())
    }
}

/// One life of a connection.
fn leave_at_random(seed: u64) {
    let mut chance = Chance(seed);
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.join(0).unwrap();
    ends.move_into_memory();
    let (first, steps) = (["a", "b"][chance.below(2)], [chance.below(400), chance.below(60), chance.below(60)]);
    (0..steps[0]).for_each(|_| ends.call_at_random(&mut chance));
    programs.world.leave_in(first);
    (0..steps[1]).for_each(|_| ends.call_at_random(&mut chance));
    programs.world.leave_in(if first == "a" { "b" } else { "a" });
    (0..steps[2]).for_each(|_| ends.call_at_random(&mut chance));
    for kernel in &programs.kernels {
        kernel.of(ends.fd).out.lock().unwrap().is_full = false;
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while !ends.is_left() {
        for at in 0..2 {
            ends.call_and_read_nothing(at);
        }
        let unread = [0, 1].map(|from| ends.sent[from] - ends.received[from]);
        let transports = ends.ends.each_ref().map(|end| end.transports());
        assert!(Instant::now() < deadline, "seed {seed}: it does not leave: {unread:?} bytes unread, {transports:?}");
    }
    // Nobody looks there any more.
    for memory in programs.world.memories() {
        rustix::fs::ftruncate(&memory, PAGE).unwrap();
    }
    for from in 0..2 {
        if !ends.ends[from].ending.has_ended_sending() {
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

/// Who is asked for TCP goes there from where it is; what it left in the pipe cannot be recalled after that, and is to be read there.
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

/// How a sender ends that has left bytes in memory.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Sender {
    ShutsDown,
    /// After it has gone on over TCP.
    ShutsDownOnTcp,
    Closes,
    Dies,
}

impl Ends<'_> {
    /// End 0 sends so much, and no more.
    fn send_last(&mut self, len: usize, sender: Sender) {
        for from in 0..2 {
            self.receive(from, 100_000);
        }
        assert_eq!(self.send(0, len - 1000), len - 1000);
        if sender == Sender::ShutsDownOnTcp {
            assert!(self.call(0).turn_back());
        }
        assert_eq!(self.send(0, 1000), 1000);
        self.programs.kernels[0].of(self.fd).out.lock().unwrap().is_over = true;
        let end = &self.ends[0];
        match sender {
            Sender::ShutsDown | Sender::ShutsDownOnTcp => {
                end.end_sending();
                self.call(0).finish_shutdown(false);
            }
            Sender::Closes => {
                assert!(!end.finish(&self.programs.kernels[0], self.fd), "bytes are unread");
                assert!(end.descriptors.close_one(None));
            }
            Sender::Dies => self.programs.processes[0].end(),
        }
    }

    fn peek(&self, from: usize) -> usize {
        let mut to = [vec![0; 10_000], vec![0; 10_000]];
        let [first, second] = &mut to;
        let parts = &mut [IoSliceMut::new(first), IoSliceMut::new(second)];
        let n = done(self.call(1 - from).recv(parts, Read::Peek));
        let expected = (0..n as u64).map(|at| machine_pair::byte(self.received[from] + at));
        assert!(to.concat()[..n].iter().copied().eq(expected), "a peek shows other bytes");
        n
    }
}

/// What lies in memory cannot go over TCP after its end, and is not lost with the memory. The reader's program hears of it as before.
#[test]
fn s19_what_a_sender_left_that_has_ended_is_read_after_its_memory_went() {
    for sender in [Sender::ShutsDown, Sender::ShutsDownOnTcp, Sender::Closes, Sender::Dies] {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(0).unwrap();
        ends.move_into_memory();
        ends.send_last(12_000, sender);
        programs.world.leave();
        let end = Arc::clone(&ends.ends[1]);
        let is_alive = matches!(sender, Sender::ShutsDown | Sender::ShutsDownOnTcp);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !end.pipes.have_left_memory() || is_alive && !ends.is_left() {
            (0..2).for_each(|at| ends.call_and_read_nothing(at));
            assert!(Instant::now() < deadline, "{sender:?}: {:?}", end.transports());
        }
        for memory in programs.world.memories() {
            rustix::fs::ftruncate(&memory, PAGE).unwrap();
        }
        let over_tcp = if sender == Sender::ShutsDownOnTcp { 1000 } else { 0 };
        assert!(!end.is_back_on_tcp() && end.pipes.has_unread() && ends.call(1).is_readable(), "{sender:?}");
        assert_eq!((ends.peek(0), end.unread()), (12_000, 12_000 - over_tcp), "{sender:?}");
        assert_eq!((ends.receive(0, 5000), end.unread(), end.pipes.has_unread()), (5000, 7000 - over_tcp, true));
        assert_eq!(
            (ends.receive(0, 100_000), end.unread(), end.pipes.has_unread()),
            (7000 - over_tcp as usize, 0, false)
        );
        assert!(end.pipes.is_crossing() && end.is_back_on_tcp());
        assert_eq!(ends.receive(0, 100_000), over_tcp as usize);
        assert_eq!(ends.call(1).recv(&mut [IoSliceMut::new(&mut [0; 10])], Read::Take), Ok(0));
        assert!(!is_alive || ends.send(1, 1000) == 1000 && ends.receive(1, 1000) == 1000);
    }
}
