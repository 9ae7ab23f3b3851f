// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the shipping switch code (S-1 to S-3) through all interleavings of a short run, and through very many of long
//! runs. At each access of the receiver, the sender advances by any number of steps; each of its stores is a step.
//! Canaries weaken one rule each; the model must refute every one.
//!
//! The two directions of a connection share nothing, so the model has one.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use tombolo_layout::sockets::Followed;
use tombolo_sockets::switch::{Fault, Found, Incoming, LeftTcp, Outgoing, Receiver, Sender, Transport};

/// The rule that is weakened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutant {
    None,
    /// The sender does not wait until the receiver has followed its last move.
    ManyMoves,
    /// The sender does not wait until the receiver is ready.
    NeverReady,
    /// The number of moves is stored before the boundary.
    BoundaryLate,
    /// The receiver declares itself ready while another thread reads in the kernel.
    ReadyBesideReader,
    /// The receiver does not count a byte that another thread is sending.
    UncountedByte,
    /// The receiver does not look into the pipe again after it has seen the move.
    NoSecondLook,
    /// The receiver follows before it has read the bytes before the boundary.
    FollowsEarly,
    /// The next process trusts its own memory instead of the dead process's state in the segment.
    OwnMemory,
    /// The next process trusts the dead process's count instead of the kernel's.
    NoRecount,
    /// Recalled bytes are not sent over TCP (S-2).
    KeepsRecalled,
    /// Recalled bytes are sent after new bytes (S-2).
    RecalledLate,
    /// A receiver that recalls before it has read all earlier TCP bytes never reads these (S-3).
    ForgetsTcp,
    /// A receiver that recalls reads TCP up to its assumed boundary, without a check whether all of that was there
    /// before the sender moved again (S-3).
    ReadsUnseen,
}

/// Source of choices: all sequences one after the other, or random ones.
trait Chooser {
    fn choose(&mut self, of: usize) -> usize;
}

/// Walks depth-first through all sequences of choices, by running the model again for each.
#[derive(Default)]
struct Exhaustive {
    path: Vec<(usize, usize)>,
    at: usize,
}

impl Exhaustive {
    /// Moves to the next sequence. Returns whether there is one.
    fn next(&mut self) -> bool {
        self.at = 0;
        while let Some((taken, of)) = self.path.pop() {
            if taken + 1 < of {
                self.path.push((taken + 1, of));
                return true;
            }
        }
        false
    }
}

impl Chooser for Exhaustive {
    fn choose(&mut self, of: usize) -> usize {
        if self.at == self.path.len() {
            self.path.push((0, of));
        }
        self.at += 1;
        self.path[self.at - 1].0
    }
}

struct Random(u64);

impl Chooser for Random {
    fn choose(&mut self, of: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % of
    }
}

/// A step of the sender; the other actors may run between two steps.
#[derive(Clone, Copy)]
enum Step {
    Boundary(u64),
    Moves(u64),
    /// The bytes left in the pipe go over TCP.
    Recalled,
    Write(Transport),
}

struct World<'a, C> {
    choices: &'a mut C,
    mutant: Mutant,
    // Shared words.
    moves: u64,
    boundary: u64,
    followed: u64,
    // Transports.
    tcp: VecDeque<u32>,
    pipe: VecDeque<u32>,
    fin: bool,
    // The sender.
    sender: Sender,
    steps: VecDeque<Step>,
    next: u32,
    last: u32,
    tcp_sent: u64,
    pipe_sent: u64,
    // The receiver.
    received: u64,
    position: u64,
    output: Vec<u32>,
    /// Bytes that a reader that looks only once would have seen in the pipe.
    seen: usize,
    /// Whether another thread of the receiver sleeps in a kernel read.
    kernel_reader: bool,
    /// Whether processes of both endpoints may die at any step, while other processes of their endpoint continue
    ///
    mortal: bool,
    deaths: u64,
    /// Number of bytes that the kernel has handed out.
    handed_out: u64,
    /// `recalls`: the receiver may ask for an immediate return to TCP from some step on. `leaves`: it has asked.
    recalls: bool,
    leaves: bool,
    recalled: bool,
    /// Number of recalls that came before the receiver had read all of TCP.
    early: u64,
}

/// Panic payload of a process that dies within a call.
struct Died;

#[derive(Debug, PartialEq, Eq)]
enum Wrong {
    Fault(Fault),
    Order(Vec<u32>),
    Missing(usize),
    Hang,
}

impl From<Fault> for Wrong {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// The sender's side during a decision: its stores become steps.
struct Deciding<'a> {
    mutant: Mutant,
    followed: u64,
    own: u64,
    tcp_sent: u64,
    pipe_sent: u64,
    head: u64,
    recalled: &'a mut bool,
    steps: &'a mut VecDeque<Step>,
}

impl Outgoing for Deciding<'_> {
    fn followed(&mut self) -> u64 {
        let word = Followed::decode(self.followed);
        match self.mutant {
            Mutant::ManyMoves => Followed { moves: self.own, ..word }.encode(),
            Mutant::NeverReady => Followed { ready: true, ..word }.encode(),
            _ => self.followed,
        }
    }

    fn sent_over_tcp(&mut self) -> Option<u64> {
        let uncounted = u64::from(self.mutant == Mutant::UncountedByte && self.tcp_sent > 0);
        Some(self.tcp_sent - uncounted)
    }

    fn position(&mut self) -> u64 {
        self.pipe_sent
    }

    fn recalled(&mut self) -> Result<u64, Fault> {
        *self.recalled = true;
        Ok(self.head)
    }

    fn publish(&mut self, boundary: u64, moves: u64) {
        let mut order = [Step::Boundary(boundary), Step::Moves(moves)];
        if self.mutant == Mutant::BoundaryLate {
            order.reverse();
        }
        self.steps.extend(order);
    }
}

impl<C: Chooser> World<'_, C> {
    /// The receiving process may die at this point.
    fn live(&mut self) {
        if self.mortal && self.choices.choose(24) == 1 {
            self.deaths += 1;
            resume_unwind(Box::new(Died));
        }
    }

    /// The processes that read next know nothing of the pipe, so its contents must come over TCP.
    fn recall(&mut self, receiver: &mut Receiver) {
        // The sender seldom moves to the pipe while the receiver has unread bytes on TCP.
        let is_behind = !self.tcp.is_empty() && self.moves % 2 == 1;
        if self.recalls && !self.fin && self.choices.choose(if is_behind { 2 } else { 16 }) == 1 {
            self.recalls = false;
            self.leaves = true;
        }
        // Nothing can be recalled from a sender that has closed.
        if self.leaves && !self.fin {
            let (moves, boundary, received) = (self.moves, self.boundary, self.received);
            let left = LeftTcp { moves, boundary, received };
            let was_on_tcp = receiver.transport() == Transport::Tcp;
            let word = receiver.recall(left);
            self.early += u64::from(was_on_tcp && word.is_some() && received < self.boundary);
            match word {
                Some(word) => self.publish(word),
                None => _ = receiver.set_leave(self, true),
            }
        }
    }

    /// Runs one call of a receiving process. If the process dies in the call, the next process continues from what it
    /// left.
    fn call(&mut self, receiver: &mut Receiver) -> Result<Option<Found>, Wrong> {
        let call = || {
            self.recall(receiver);
            receiver.receive(self)
        };
        match catch_unwind(AssertUnwindSafe(call)) {
            Ok(found) => found.map(Some),
            Err(death) if death.is::<Died>() => {
                let words = Followed::decode(self.followed);
                *receiver = if self.mutant == Mutant::OwnMemory { Receiver::default() } else { Receiver::at(words) };
                if self.mutant != Mutant::NoRecount {
                    self.received = self.handed_out;
                }
                Ok(None)
            }
            Err(other) => resume_unwind(other),
        }
    }

    /// The sender decides which transport carries the next byte.
    fn decide(&mut self, wanted: Transport) -> Transport {
        let mut sender = self.sender.clone();
        let own = self.moves;
        let mut deciding = Deciding {
            mutant: self.mutant,
            followed: self.followed,
            own,
            tcp_sent: self.tcp_sent,
            pipe_sent: self.pipe_sent,
            head: self.position,
            recalled: &mut self.recalled,
            steps: &mut self.steps,
        };
        let transport = sender.steer(&mut deciding, wanted).expect("the receiver follows the rules");
        self.sender = sender;
        transport
    }

    /// The sender handles a recall before it ends.
    fn finish_sender(&mut self) {
        // A sender that has shut down its direction moves no more. The receiver then reads the pipe after TCP.
        if self.leaves && !self.recalled && self.choices.choose(4) == 1 {
            return;
        }
        // Repeated where a process of the sender died during it.
        for _ in 0..100 {
            if self.leaves && self.decide(Transport::Tcp) == Transport::Tcp && self.recalled {
                self.steps.push_back(Step::Recalled);
            }
            while self.step() {}
        }
    }

    /// Runs one step of the sender. Returns false if no step is left.
    fn step(&mut self) -> bool {
        if self.mortal && !self.steps.is_empty() && self.choices.choose(24) == 1 {
            // The process dies between two stores; the next process of its endpoint sends what is unsent.
            self.deaths += 1;
            self.steps.clear();
            self.sender = Sender::at(self.moves);
        }
        if self.steps.is_empty() {
            if self.next == self.last {
                return false;
            }
            let wanted = if self.choices.choose(2) == 0 { Transport::Pipe } else { Transport::Tcp };
            let transport = self.decide(wanted);
            let late = self.mutant == Mutant::RecalledLate;
            if self.recalled && transport == Transport::Tcp && !late {
                self.steps.push_back(Step::Recalled);
            }
            self.steps.push_back(Step::Write(transport));
            if self.recalled && transport == Transport::Tcp && late {
                self.steps.push_back(Step::Recalled);
            }
        }
        match self.steps.pop_front() {
            Some(Step::Boundary(boundary)) => self.boundary = boundary,
            Some(Step::Moves(moves)) => self.moves = moves,
            Some(Step::Recalled) if self.mutant == Mutant::KeepsRecalled => {}
            Some(Step::Recalled) => {
                self.tcp_sent += self.pipe.len() as u64;
                self.tcp.extend(self.pipe.drain(..));
            }
            Some(Step::Write(transport)) => {
                match transport {
                    Transport::Tcp => {
                        self.tcp.push_back(self.next);
                        self.tcp_sent += 1;
                    }
                    Transport::Pipe => {
                        self.pipe.push_back(self.next);
                        self.pipe_sent += 1;
                    }
                }
                self.next += 1;
            }
            None => {}
        }
        true
    }

    /// Lets the other actors run before the receiver's next access.
    fn others(&mut self) {
        loop {
            if self.kernel_reader && !self.tcp.is_empty() && self.choices.choose(2) == 1 {
                self.kernel_reads();
            }
            let done = self.next == self.last && self.steps.is_empty();
            if done || self.choices.choose(2) == 0 {
                return;
            }
            self.step();
        }
    }

    /// The other thread's read returns; that thread reads no more.
    fn kernel_reads(&mut self) {
        self.kernel_reader = false;
        self.received += self.tcp.len() as u64;
        self.handed_out = self.received;
        self.output.extend(self.tcp.drain(..));
    }
}

impl<C: Chooser> Incoming for World<'_, C> {
    type Error = Wrong;

    fn moves(&mut self) -> u64 {
        self.seen = self.pipe.len();
        self.others();
        self.moves
    }

    fn boundary(&mut self) -> u64 {
        self.others();
        let forgets = match self.mutant {
            Mutant::FollowsEarly => self.moves % 2 == 1,
            Mutant::ForgetsTcp => Followed::decode(self.followed).recalls(),
            _ => false,
        };
        if forgets { self.received } else { self.boundary }
    }

    fn publish(&mut self, word: u64) {
        self.others();
        self.live();
        self.followed = word;
        self.live();
    }

    fn may_be_ready(&mut self) -> bool {
        !self.kernel_reader || self.mutant == Mutant::ReadyBesideReader
    }

    /// Reads all bytes present at this moment: a long read that began at the last decision.
    fn read_tcp(&mut self) -> Result<Found, Wrong> {
        self.others();
        if self.tcp.is_empty() {
            return Ok(if self.fin { Found::End } else { Found::Nothing });
        }
        let n = self.tcp.len();
        self.handed_out += n as u64;
        // Bytes taken by a process that dies now are lost with it, as on plain TCP; no other bytes may be lost.
        self.output.extend(self.tcp.drain(..));
        self.live();
        self.received += n as u64;
        Ok(Found::Bytes(n))
    }

    fn look_at_tcp(&mut self) -> Result<Found, Wrong> {
        self.others();
        let recalls = Followed::decode(self.followed).recalls();
        Ok(match self.tcp.len() {
            0 if self.fin => Found::End,
            0 if recalls && self.mutant == Mutant::ReadsUnseen => Found::Bytes(1),
            0 => Found::Nothing,
            n => Found::Bytes(n),
        })
    }

    fn read_pipe(&mut self) -> Result<Option<usize>, Wrong> {
        let stale = self.seen;
        self.others();
        self.live();
        // The position of a receiver that assumes that it has read everything.
        if self.mutant == Mutant::NoSecondLook && self.moves % 2 == 0 && stale == 0 {
            self.position = self.pipe_sent;
            self.pipe.clear();
        }
        let n = self.pipe.len().min(2);
        self.output.extend(self.pipe.drain(..n));
        self.position += n as u64;
        Ok((n != 0).then_some(n))
    }

    fn received(&mut self) -> u64 {
        self.received
    }

    fn position(&mut self) -> u64 {
        self.position
    }
}

/// Runs once: the sender sends `bytes` bytes and ends; the receiver reads everything.
fn run(choices: &mut impl Chooser, bytes: u32, mutant: Mutant, kernel_reader: bool) -> Result<(usize, u64), Wrong> {
    let world = run_with(choices, bytes, mutant, kernel_reader, [false; 2])?;
    Ok((world.output.len(), world.moves))
}

fn run_with<C: Chooser>(
    choices: &mut C,
    bytes: u32,
    mutant: Mutant,
    kernel_reader: bool,
    [mortal, recalls]: [bool; 2],
) -> Result<World<'_, C>, Wrong> {
    let mut world = World {
        choices,
        mutant,
        moves: 0,
        boundary: 0,
        followed: 0,
        tcp: VecDeque::new(),
        pipe: VecDeque::new(),
        fin: false,
        sender: Sender::default(),
        steps: VecDeque::new(),
        next: 0,
        last: bytes,
        tcp_sent: 0,
        pipe_sent: 0,
        received: 0,
        position: 0,
        output: Vec::new(),
        seen: 0,
        kernel_reader,
        mortal,
        deaths: 0,
        handed_out: 0,
        recalls,
        leaves: false,
        recalled: false,
        early: 0,
    };
    let mut receiver = Receiver::default();
    // A call while the sender has steps or bytes left, and at least one more.
    loop {
        let before = world.output.len();
        world.call(&mut receiver)?;
        check(&world.output)?;
        if world.next == world.last && world.steps.is_empty() && world.output.len() == before {
            break;
        }
        // The call found nothing, and no choice let the sender run: the sender takes a step.
        if world.output.len() == before {
            world.step();
        }
        if world.kernel_reader {
            // From now on only the thread in the kernel reads, until its read returns.
            while world.step() {}
            if world.tcp.is_empty() && !world.pipe.is_empty() {
                return Err(Wrong::Hang);
            }
            world.kernel_reads();
            check(&world.output)?;
        }
    }
    world.finish_sender();
    world.fin = true;
    let mut calls = 0;
    while !matches!(world.call(&mut receiver)?, Some(Found::End)) {
        check(&world.output)?;
        calls += 1;
        if calls > 4 * bytes + 16 + world.deaths as u32 {
            return Err(Wrong::Hang);
        }
    }
    if world.output.len() != bytes as usize {
        return Err(Wrong::Missing(world.output.len()));
    }
    Ok(world)
}

fn check(output: &[u32]) -> Result<(), Wrong> {
    if output.iter().enumerate().all(|(index, byte)| index as u32 == *byte) {
        return Ok(());
    }
    Err(Wrong::Order(output.to_vec()))
}

/// Returns the first failure in random runs.
fn refuted(mutant: Mutant, kernel_reader: bool) -> Option<Wrong> {
    (0..20_000).find_map(|seed| run(&mut Random(seed), 12, mutant, kernel_reader).err())
}

/// Seeds of random runs of each kind: a million in the long form.
fn seeds() -> std::ops::Range<u64> {
    0..if std::env::var_os("TOMBOLO_LONG").is_some() { 1_000_000 } else { 20_000 }
}

#[test]
fn s1_s2_s3_short_runs_keep_every_byte_in_order_in_all_interleavings() {
    for (bytes, kernel_reader) in [(2, false), (3, false), (2, true)] {
        let mut choices = Exhaustive::default();
        let (mut runs, mut most_moves) = (0_u64, 0);
        loop {
            let path = choices.path.clone();
            match run(&mut choices, bytes, Mutant::None, kernel_reader) {
                Ok((_, moves)) => most_moves = most_moves.max(moves),
                Err(wrong) => panic!("{wrong:?} after the choices {path:?}"),
            }
            runs += 1;
            if !choices.next() {
                break;
            }
        }
        assert!(runs > 20 && most_moves >= 1, "{runs} runs of {bytes} bytes, {most_moves} moves");
    }
}

#[test]
fn s1_s2_s3_long_runs_keep_every_byte_in_order_over_many_moves() {
    let mut moves = 0;
    for seed in seeds() {
        match run(&mut Random(seed), 60, Mutant::None, seed % 4 == 0) {
            Ok((_, made)) => moves += made,
            Err(wrong) => panic!("{wrong:?} with seed {seed}"),
        }
    }
    assert!(moves > 100_000, "only {moves} moves");
}

#[test]
fn s3_canary_sender_with_many_moves_outstanding_is_refuted() {
    assert!(refuted(Mutant::ManyMoves, false).is_some());
}

#[test]
fn s2_canary_sender_that_does_not_wait_for_readiness_is_refuted() {
    assert!(refuted(Mutant::NeverReady, false).is_some());
}

#[test]
fn s1_canary_boundary_stored_late_is_refuted() {
    assert!(refuted(Mutant::BoundaryLate, false).is_some());
}

#[test]
fn s2_canary_receiver_ready_beside_a_reader_in_the_kernel_is_refuted() {
    assert!(refuted(Mutant::ReadyBesideReader, true).is_some());
}

#[test]
fn s3_canary_byte_in_flight_that_is_not_counted_is_refuted() {
    assert!(refuted(Mutant::UncountedByte, false).is_some());
}

#[test]
fn s3_canary_receiver_that_does_not_look_twice_is_refuted() {
    assert!(refuted(Mutant::NoSecondLook, false).is_some());
}

#[test]
fn s3_canary_receiver_that_follows_early_is_refuted() {
    assert!(refuted(Mutant::FollowsEarly, false).is_some());
}

#[test]
fn s9_s3_processes_that_die_at_any_step_leave_a_stream_that_others_of_their_end_continue() {
    let (mut moves, mut deaths, mut early) = (0, 0, 0);
    for seed in seeds() {
        let mut random = Random(seed);
        match run_with(&mut random, 60, Mutant::None, false, [true, seed % 3 == 0]) {
            Ok(world) => {
                (moves, deaths, early) = (moves + world.moves, deaths + world.deaths, early + world.early);
            }
            Err(wrong) => panic!("{wrong:?} with seed {seed}"),
        }
    }
    assert!(moves > 100_000 && deaths > 50_000, "only {moves} moves and {deaths} deaths");
    assert!(early > 100, "only {early} times what is in the pipe was recalled before all of TCP was read");
}

/// Returns whether any random run in which processes die fails.
fn refuted_by_death(mutant: Mutant) -> bool {
    (0..2_000).any(|seed| run_with(&mut Random(seed), 60, mutant, false, [true, false]).is_err())
}

#[test]
fn r26_canary_process_that_believes_its_own_memory_is_refuted() {
    assert!(refuted_by_death(Mutant::OwnMemory));
}

#[test]
fn r26_canary_process_that_believes_a_dead_ones_count_is_refuted() {
    assert!(refuted_by_death(Mutant::NoRecount));
}

/// Number of bytes of a run with recalls. In the short stream the sender has often ended before the recall.
fn recalled_bytes(seed: u64) -> u32 {
    if seed.is_multiple_of(2) { 60 } else { 5 }
}

#[test]
fn s2_s3_receiver_that_recalls_what_is_in_the_pipe_gets_it_over_tcp_in_order() {
    let (mut recalled, mut early) = (0, 0);
    for seed in seeds() {
        match run_with(&mut Random(seed), recalled_bytes(seed), Mutant::None, false, [false, true]) {
            Ok(world) => (recalled, early) = (recalled + u64::from(world.recalled), early + world.early),
            Err(wrong) => panic!("{wrong:?} with seed {seed}"),
        }
    }
    assert!(recalled > 1000, "only {recalled} runs recalled anything");
    assert!(early > 100, "only {early} times before all of TCP was read");
}

#[test]
fn s2_s3_canary_bytes_that_were_recalled_and_come_late_or_never_are_refuted() {
    for mutant in [Mutant::KeepsRecalled, Mutant::RecalledLate, Mutant::ForgetsTcp, Mutant::ReadsUnseen] {
        let fails = |seed| run_with(&mut Random(seed), recalled_bytes(seed), mutant, false, [false, true]).is_err();
        let refuted = (0..100_000).any(fails);
        assert!(refuted, "{mutant:?}");
    }
}
