// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An end that several processes are: those made by fork that still have the socket.
//!
//! They have one page in common, which is made when the first of them forks. In it stand who they are, what they count
//! together, and the private state of both pipes, which each takes from there for one turn and puts back. While one
//! process is left it keeps the state to itself and takes no lock.

use std::{
    io,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use rustix::process::{Pid, PidfdFlags};
use tombolo_domain::aside;
use tombolo_layout::private;
use tombolo_mem::{Common, LockGuard};
use tombolo_ring::Record;

use crate::direction::Direction;

/// Processes that can be told apart. With more, nobody is ever alone again.
const MEMBERS: usize = 32;
/// Turns between two looks for the dead.
const SELDOM: u64 = 1024;
/// A place that is taken for a child that is about to be made; and, among those seen, that its parent has not named it yet.
const UNBORN: u64 = u64::MAX;
/// The child went before its parent had named it, which is then all that keeps the place from the next one.
const UNNAMED: u64 = UNBORN - 1;
/// Words of a record.
const RECORD: usize = private::LEN / 8;

// What the words are.
const COUNT: usize = 0;
const CROWD: usize = 1;
const LEAVES: usize = 2;
const ENDED: usize = 3;
/// One word for each direction: bytes over TCP; whether those are to be asked of the kernel, because one who counted died;
/// what the last waiter waits for.
const COUNTED: usize = 4;
const UNSURE: usize = 6;
const ARMED: usize = 8;
const TURNS: usize = 10;
const RECALLED: usize = 11;
const BASE: usize = 12;
const DETACHED: usize = 13;
const LENT: usize = 14;
const PIDS: usize = 16;
/// The same processes as those see them that made them; 0 is a free place.
const SEEN: usize = PIDS + MEMBERS;
const RECORDS: usize = SEEN + MEMBERS;
const _: () = assert!(RECORDS + 2 * RECORD <= 256);

/// The page of one end.
#[derive(Debug)]
pub(crate) struct ForkGroup {
    page: Common,
    /// This process's place; beyond the last one if it has none.
    own: AtomicUsize,
}

/// A turn at one direction: nobody else of this end uses it meanwhile.
#[derive(Debug)]
pub(crate) struct DirectionGuard<'a> {
    held: LockGuard<'a>,
    record: &'a [AtomicU64],
}

/// A place for a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChildSlot(Option<usize>);

/// What became of a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Birth {
    /// There is no child.
    Failed,
    /// In the parent: the child, by the number that it has here.
    Child(u32),
    /// This process is the child.
    Own,
}

impl ForkGroup {
    /// A group of one: this process, which has counted so much.
    pub fn new(counted: [u64; 2]) -> io::Result<Self> {
        let group = Self { page: Common::new()?, own: AtomicUsize::new(MEMBERS) };
        group.stay();
        for (at, counted) in counted.into_iter().enumerate() {
            group.word(COUNTED + at).store(counted, Ordering::SeqCst);
        }
        Ok(group)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.page.words()[at]
    }

    // ---- who it is

    /// Whether one process is left.
    pub fn is_alone(&self) -> bool {
        // ORDER Acquire: pairs with the fetch_sub in `remove`. What that process did is visible.
        self.word(COUNT).load(Ordering::Acquire) <= 1 && self.word(CROWD).load(Ordering::Relaxed) == 0
    }

    /// Before a fork: there will be one more.
    pub fn reserve_slot(&self) -> ChildSlot {
        self.word(COUNT).fetch_add(1, Ordering::SeqCst);
        let free =
            |at: &usize| self.word(SEEN + at).compare_exchange(0, UNBORN, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let place = (0..MEMBERS).find(free);
        match place {
            Some(at) => self.word(PIDS + at).store(UNBORN, Ordering::SeqCst),
            None => self.word(CROWD).store(1, Ordering::SeqCst),
        }
        ChildSlot(place)
    }

    /// After the fork, in both processes.
    pub fn record_birth(&self, place: ChildSlot, birth: Birth) {
        if birth == Birth::Own {
            self.own.store(place.0.unwrap_or(MEMBERS), Ordering::Relaxed);
        }
        let Some(at) = place.0 else { return };
        match birth {
            Birth::Failed => {
                self.remove(at, UNBORN);
                self.name(at, 0);
            }
            Birth::Child(pid) => {
                let seen = member(pid);
                // Unless the child has said so itself, by the number that it has for itself.
                let _ = self.word(PIDS + at).compare_exchange(UNBORN, seen, Ordering::SeqCst, Ordering::SeqCst);
                self.name(at, seen);
            }
            Birth::Own => self.word(PIDS + at).store(member(std::process::id()), Ordering::SeqCst),
        }
    }

    /// Who made the process at this place says what number it has there; the place is free if it has gone meanwhile.
    fn name(&self, at: usize, seen: u64) {
        let word = self.word(SEEN + at);
        if word.compare_exchange(UNBORN, seen, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            word.store(0, Ordering::SeqCst);
        }
    }

    /// One has it who is not seen: nobody is ever alone again.
    pub fn set_crowded(&self) {
        self.word(CROWD).store(1, Ordering::SeqCst);
    }

    /// This process comes back: it meant to go, and did not.
    pub fn stay(&self) {
        let place = self.reserve_slot();
        self.record_birth(place, Birth::Own);
        self.record_birth(place, Birth::Child(std::process::id()));
    }

    /// This process has no descriptor of the socket any more. Says whether it was the last one.
    pub fn depart(&self) -> bool {
        self.remove_dead();
        let own = self.own.swap(MEMBERS, Ordering::Relaxed);
        own < MEMBERS && self.remove(own, self.word(PIDS + own).load(Ordering::SeqCst))
    }

    /// Strikes out one process; says whether nobody is left.
    fn remove(&self, at: usize, pid: u64) -> bool {
        if self.word(PIDS + at).compare_exchange(pid, 0, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        // The next one there must not be taken for this one: its parent may still be about to name it.
        let seen = self.word(SEEN + at);
        if seen.compare_exchange(UNBORN, UNNAMED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            seen.store(0, Ordering::SeqCst);
        }
        self.word(COUNT).fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Strikes out those who died without saying so.
    pub fn remove_dead(&self) {
        let own = self.own.load(Ordering::Relaxed);
        for at in (0..MEMBERS).filter(|at| *at != own) {
            let known = self.word(PIDS + at).load(Ordering::SeqCst);
            if known == 0 || known == UNBORN {
                continue;
            }
            let seen = self.word(SEEN + at).load(Ordering::SeqCst);
            if is_dead(known) || seen != 0 && is_dead(seen) {
                self.remove(at, known);
            }
        }
    }

    // ---- what they know together

    pub fn counted(&self, direction: Direction) -> &AtomicU64 {
        self.word(COUNTED + direction as usize)
    }

    /// Whether one who counted died: what the kernel counts is what counts. Asking answers it.
    pub fn is_unsure(&self, direction: Direction) -> bool {
        let word = self.word(UNSURE + direction as usize);
        word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::SeqCst) != 0
    }

    pub fn leave(&self) {
        self.word(LEAVES).store(1, Ordering::SeqCst);
    }

    pub fn leaves(&self) -> bool {
        self.word(LEAVES).load(Ordering::Relaxed) != 0
    }

    /// What the end sends over TCP comes from the pipe first: the count of bytes over TCP, less the position (S-2).
    pub fn set_recalled(&self, base: u64) {
        self.word(BASE).store(base, Ordering::Relaxed);
        self.word(RECALLED).store(1, Ordering::Release);
    }

    pub fn recalled(&self) -> Option<u64> {
        (self.word(RECALLED).load(Ordering::Acquire) != 0).then(|| self.word(BASE).load(Ordering::Relaxed))
    }

    /// Nobody of this end looks at the memory any more (S-19).
    pub fn detach(&self) {
        self.word(DETACHED).store(1, Ordering::Release);
    }

    pub fn is_detached(&self) -> bool {
        self.word(DETACHED).load(Ordering::Acquire) != 0
    }

    pub fn lend(&self) {
        self.word(LENT).store(1, Ordering::SeqCst);
    }

    pub fn is_lent(&self) -> bool {
        self.word(LENT).load(Ordering::SeqCst) != 0
    }

    pub fn end_sending(&self) {
        self.word(ENDED).store(1, Ordering::SeqCst);
    }

    pub fn has_ended_sending(&self) -> bool {
        self.word(ENDED).load(Ordering::Relaxed) != 0
    }

    /// Somebody sleeps until the position reaches `target`. There is one wait word for all: says whether another slept on
    /// another target, and so must look again.
    pub fn arm(&self, direction: Direction, target: u64) -> bool {
        // 0 is nobody: a target is never missed for being taken for it, only looked at once more.
        self.word(ARMED + direction as usize).swap(target, Ordering::SeqCst) != target && !self.is_alone()
    }

    // ---- turns

    /// Begins a turn, waiting for whoever has it.
    pub fn turn(&self, direction: Direction) -> io::Result<DirectionGuard<'_>> {
        if self.word(TURNS).fetch_add(1, Ordering::Relaxed) % SELDOM == SELDOM - 1 {
            self.remove_dead();
        }
        let held = self.page.lock(direction as usize)?;
        if held.is_orphaned() {
            self.word(UNSURE + direction as usize).store(1, Ordering::SeqCst);
        }
        let begin = RECORDS + direction as usize * RECORD;
        Ok(DirectionGuard { held, record: &self.page.words()[begin..begin + RECORD] })
    }
}

impl DirectionGuard<'_> {
    /// The state that the one before left; none if it died within its turn.
    pub fn record(&self) -> Option<Record> {
        if self.held.is_orphaned() {
            return None;
        }
        let mut bytes = [0; private::LEN];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.record) {
            to.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        Record::decode(&bytes)
    }

    /// Leaves it to the next.
    pub fn leave(&self, record: &Record) {
        for (word, bytes) in self.record.iter().zip(record.encode().as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
    }
}

/// The PID namespace of this process, once it was asked for, plus one.
static NAMESPACE: AtomicU64 = AtomicU64::new(0);

/// In a child made by fork: it may be in another one than its parent.
pub(crate) fn forget_namespace() {
    NAMESPACE.store(0, Ordering::Relaxed);
}

/// The PID namespace of this process; 0 where it cannot be told.
fn namespace() -> u64 {
    let known = NAMESPACE.load(Ordering::Relaxed);
    if known != 0 {
        return known - 1;
    }
    // The kernel numbers them by 32 bits.
    let found = rustix::fs::stat("/proc/self/ns/pid").map_or(0, |found| found.st_ino & u64::from(u32::MAX));
    NAMESPACE.store(found + 1, Ordering::Relaxed);
    found
}

/// What stands for the process that has this number in this process's namespace.
fn member(pid: u32) -> u64 {
    namespace() << 32 | u64::from(pid)
}

/// Whether the process has ended, waited for or not. Where that cannot be told, it has not: a number means nothing in another
/// namespace than its own.
fn is_dead(member: u64) -> bool {
    let (namespace, pid) = (member >> 32, member as u32);
    if namespace == 0 || namespace != self::namespace() {
        return false;
    }
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    aside::lifted(|| match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => {
            let mut one = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            matches!(rustix::event::poll(&mut one, Some(&now)), Ok(1))
        }
        Err(error) => error == rustix::io::Errno::SRCH,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r26_family_is_alone_when_all_others_have_departed_or_died() {
        let group = ForkGroup::new([5, 7]).unwrap();
        assert!(group.is_alone());
        assert_eq!(group.counted(Direction::In).load(Ordering::SeqCst), 7);
        let place = group.reserve_slot();
        assert!(!group.is_alone());
        group.record_birth(place, Birth::Failed);
        assert!(group.is_alone(), "the fork failed");

        let mut child = std::process::Command::new("true").spawn().unwrap();
        let place = group.reserve_slot();
        group.record_birth(place, Birth::Child(child.id()));
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !group.is_alone() {
            assert!(std::time::Instant::now() < deadline, "a dead member stays");
            group.remove_dead();
        }
        child.wait().unwrap();
        assert!(group.depart(), "the last one");
    }

    #[test]
    fn r26_child_that_goes_before_it_is_named_leaves_no_name_to_the_next() {
        let group = ForkGroup::new([0, 0]).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let brief = group.reserve_slot();
        group.word(PIDS + brief.0.unwrap()).store(member(child.id()), Ordering::SeqCst);
        child.wait().unwrap();
        group.remove_dead();
        // Whose parent is another one: it is made before the first is named, or after it.
        let next = group.reserve_slot();
        group.record_birth(brief, Birth::Child(child.id()));
        let last = group.reserve_slot();
        for place in [next, last] {
            group.word(PIDS + place.0.unwrap()).store(member(std::process::id()), Ordering::SeqCst);
        }
        for place in [next, last] {
            group.remove_dead();
            assert!(!group.is_alone(), "one who lives is struck out");
            group.record_birth(place, Birth::Child(std::process::id()));
            group.remove(place.0.unwrap(), member(std::process::id()));
        }
        assert!(group.is_alone());
        let free = (0..MEMBERS).filter(|at| group.word(SEEN + at).load(Ordering::SeqCst) == 0).count();
        assert_eq!(free, MEMBERS - 1, "each place can be had again");
    }

    #[test]
    fn r26_record_of_a_holder_who_died_is_not_believed() {
        let group = ForkGroup::new([0, 0]).unwrap();
        // A writer's, at the beginning.
        let mut bytes = [0; private::LEN];
        bytes[..8].copy_from_slice(&0x1_0001_u64.to_le_bytes());
        let left = Record::decode(&bytes).unwrap();
        group.turn(Direction::Out).unwrap().leave(&left);
        assert!(group.turn(Direction::Out).unwrap().record().is_some());
        // A thread that ends within its turn leaves the lock as a process does that is killed.
        std::thread::scope(|scope| _ = scope.spawn(|| std::mem::forget(group.turn(Direction::Out))).join());
        assert!(group.turn(Direction::Out).unwrap().record().is_none());
        assert!(
            group.is_unsure(Direction::Out) && !group.is_unsure(Direction::In),
            "the kernel's count is what counts"
        );
        group.turn(Direction::Out).unwrap().leave(&left);
        assert!(group.turn(Direction::Out).unwrap().record().is_some());
    }

    #[test]
    fn r26_member_in_another_pid_namespace_is_not_taken_for_dead() {
        let group = ForkGroup::new([0, 0]).unwrap();
        let place = group.reserve_slot();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = child.id();
        child.wait().unwrap();
        // In another namespace there may be one with the number that nobody has here, or this process's own number.
        let elsewhere = (namespace() + 1) << 32;
        for number in [id, std::process::id()] {
            group.word(PIDS + place.0.unwrap()).store(elsewhere | u64::from(number), Ordering::SeqCst);
            group.remove_dead();
            assert!(!group.is_alone());
        }
        assert!(!group.depart(), "the other one is left");
        assert!(group.is_alone());
        // As its parent sees it, it can be told.
        let group = ForkGroup::new([0, 0]).unwrap();
        let place = group.reserve_slot();
        group.word(PIDS + place.0.unwrap()).store(elsewhere | 1, Ordering::SeqCst);
        group.record_birth(place, Birth::Child(id));
        group.remove_dead();
        assert!(group.is_alone());
    }

    #[test]
    fn r26_more_members_than_can_be_told_apart_are_never_alone_again() {
        let group = ForkGroup::new([0, 0]).unwrap();
        let places: Vec<_> = (0..MEMBERS).map(|_| group.reserve_slot()).collect();
        places.into_iter().for_each(|place| group.record_birth(place, Birth::Failed));
        assert!(!group.is_alone());
        assert!(!group.depart());
    }

    #[test]
    fn r26_sleeper_that_waits_for_something_else_wakes_the_others_of_its_end() {
        let group = ForkGroup::new([0, 0]).unwrap();
        assert!(!group.arm(Direction::In, 9), "nobody else is there");
        let _ = group.reserve_slot();
        assert!(!group.arm(Direction::In, 9), "the same target");
        assert!(group.arm(Direction::In, 12));
        assert!(!group.arm(Direction::In, 12));
    }
}
