// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the shipping code that gathers the events that a wait reports (S-13, S-14), through all interleavings with a
//! peer that writes on A and then on B. Each of the two may be in shared memory, where it is looked at or rests until
//! its doorbell is notified, or with the kernel. Canaries weaken one rule each; the model must refute every one.

use tombolo_sockets::gather::{KernelReply, Sources, gather};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// In shared memory, and looked at.
    Awake,
    /// In shared memory; not looked at until its doorbell was notified.
    Resting,
    /// An event of the kernel.
    Plain,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutant {
    None,
    /// Reports what the first look found.
    OneLook,
    /// Looks at shared memory until it finds nothing more, and never asks the kernel.
    NoAsk,
    /// Asks the kernel first, and then looks once.
    KernelFirst,
}

/// Walks depth-first through all sequences of choices, by running the model again for each.
#[derive(Default)]
struct Choices {
    path: Vec<(usize, usize)>,
    at: usize,
}

impl Choices {
    fn choose(&mut self, of: usize) -> usize {
        if self.at == self.path.len() {
            self.path.push((0, of));
        }
        self.at += 1;
        self.path[self.at - 1].0
    }

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

/// Steps of the writer.
#[derive(Clone, Copy, Debug)]
enum Step {
    Publish(usize),
    Ring(usize),
}

struct World<'a> {
    choices: &'a mut Choices,
    kinds: Vec<Kind>,
    steps: Vec<Step>,
    written: Vec<bool>,
    notified: Vec<bool>,
    awake: Vec<bool>,
    reported: Vec<bool>,
    /// Index at which a look begins.
    turn: usize,
}

impl World<'_> {
    /// Lets the writer advance by any number of steps.
    fn others_run(&mut self) {
        for _ in 0..self.choices.choose(self.steps.len() + 1) {
            match self.steps.remove(0) {
                Step::Publish(at) => self.written[at] = true,
                Step::Ring(at) => self.notified[at] = true,
            }
        }
    }
}

impl Sources for World<'_> {
    type Error = ();

    fn collect(&mut self) -> usize {
        let mut new = 0;
        for n in 0..self.kinds.len() {
            let at = (self.turn + n) % self.kinds.len();
            self.others_run();
            if self.kinds[at] != Kind::Plain && self.awake[at] && self.written[at] && !self.reported[at] {
                self.reported[at] = true;
                new += 1;
            }
        }
        new
    }

    fn ask(&mut self) -> Result<KernelReply, ()> {
        self.others_run();
        let mut asked = KernelReply::default();
        for at in 0..self.kinds.len() {
            if std::mem::take(&mut self.notified[at]) {
                self.awake[at] = true;
                asked.hints = true;
            }
            if self.kinds[at] == Kind::Plain && self.written[at] {
                self.reported[at] = true;
                asked.plain += 1;
            }
        }
        Ok(asked)
    }

    fn has_room(&self) -> bool {
        true
    }
}

/// Runs one wait. Returns what was reported, in the order in which it was written.
fn run(choices: &mut Choices, kinds: &[Kind], mutant: Mutant, slept: bool) -> Vec<bool> {
    let mut steps = Vec::new();
    for (at, kind) in kinds.iter().enumerate() {
        steps.push(Step::Publish(at));
        if *kind == Kind::Resting {
            steps.push(Step::Ring(at));
        }
    }
    let turn = choices.choose(kinds.len());
    let none = vec![false; kinds.len()];
    let mut world = World {
        choices,
        kinds: kinds.to_vec(),
        steps,
        written: none.clone(),
        notified: none.clone(),
        awake: kinds.iter().map(|kind| *kind == Kind::Awake).collect(),
        reported: none,
        turn,
    };
    match mutant {
        Mutant::None => {
            let said = if slept { Some(world.ask().unwrap()) } else { None };
            gather(&mut world, said, !slept).unwrap();
        }
        Mutant::OneLook => _ = world.collect(),
        Mutant::NoAsk => while world.collect() > 0 {},
        Mutant::KernelFirst => {
            world.ask().unwrap();
            world.collect();
        }
    }
    world.reported
}

/// Returns whether some wait reports an event without one that was written before it.
fn is_refuted(kinds: &[Kind], mutant: Mutant) -> bool {
    [false, true].into_iter().any(|slept| {
        let mut choices = Choices::default();
        loop {
            let reported = run(&mut choices, kinds, mutant, slept);
            // The reported events must be a prefix of the written ones.
            if reported.windows(2).any(|pair| pair[1] && !pair[0]) {
                return true;
            }
            if !choices.next() {
                return false;
            }
        }
    })
}

const ALL: [Kind; 3] = [Kind::Awake, Kind::Resting, Kind::Plain];

#[test]
fn s14_what_was_written_before_is_reported_too() {
    for a in ALL {
        for b in ALL {
            assert!(!is_refuted(&[a, b], Mutant::None), "{a:?}, then {b:?}");
        }
    }
}

/// The limit that the specification names: the kernel is not asked again after it gave an event. A later event of the
/// same look may therefore be reported without an earlier one, where the earlier one is the kernel's as well.
#[test]
fn s14_third_one_may_be_reported_without_one_that_the_kernel_has_only_after_the_kernel_gave_another() {
    for first in ALL {
        for a in ALL {
            for b in ALL {
                let refuted = is_refuted(&[first, a, b], Mutant::None);
                let limit = first == Kind::Plain && a != Kind::Awake && b == Kind::Awake;
                assert!(!refuted || limit, "{first:?}, {a:?}, {b:?}");
            }
        }
    }
}

#[test]
fn s13_connection_whose_doorbell_was_notified_is_reported() {
    let mut choices = Choices::default();
    loop {
        // Everything is written before the kernel is asked: the choice to run all steps is among those that are tried.
        let reported = run(&mut choices, &[Kind::Resting], Mutant::None, true);
        if reported == [true] {
            return;
        }
        assert!(choices.next(), "it is never reported");
    }
}

#[test]
fn canary_each_shorter_way_is_refuted() {
    assert!(is_refuted(&[Kind::Awake, Kind::Awake], Mutant::OneLook));
    assert!(is_refuted(&[Kind::Resting, Kind::Awake], Mutant::NoAsk));
    assert!(is_refuted(&[Kind::Plain, Kind::Awake], Mutant::NoAsk));
    assert!(is_refuted(&[Kind::Plain, Kind::Awake], Mutant::KernelFirst));
    assert!(is_refuted(&[Kind::Awake, Kind::Awake], Mutant::KernelFirst));
}
