// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shares one endpoint among several processes: those made by fork that still have the socket.
//!
//! The processes have one page in common, which is made when the first of them forks. It holds the list of members, the
//! counts that they share, and the private state of both pipes. A process takes that state from the page for one turn
//! and puts it back. As long as only one process is left, it keeps the state to itself and takes no lock.

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

/// Number of processes that can be told apart. If there were ever more, `ForkGroup::is_alone` returns `false` from then
/// on.
const MEMBERS: usize = 32;
/// Number of turns between two searches for members that have died.
const SELDOM: u64 = 1024;
/// In `PIDS`: slot reserved for a child that is about to be made. In `SEEN`: slot whose child its parent has not named
/// yet.
const UNBORN: u64 = u64::MAX;
/// In `SEEN`: the child has departed before its parent named it. Only this value still keeps the slot from being
/// reused.
const UNNAMED: u64 = UNBORN - 1;
/// Number of words of a record.
const RECORD: usize = private::LEN / 8;

// Indices of the words in the page.
const COUNT: usize = 0;
const CROWD: usize = 1;
const LEAVES: usize = 2;
const ENDED: usize = 3;
/// One word for each direction. `COUNTED`: bytes over TCP. `UNSURE`: whether to ask the kernel for that count, because
/// a process died while it counted. `ARMED`: what the last waiter waits for.
const COUNTED: usize = 4;
const UNSURE: usize = 6;
const ARMED: usize = 8;
const TURNS: usize = 10;
const RECALLED: usize = 11;
const BASE: usize = 12;
const DETACHED: usize = 13;
const LENT: usize = 14;
const PIDS: usize = 16;
/// The same processes, by the numbers that their parents see; 0 is a free slot.
const SEEN: usize = PIDS + MEMBERS;
const RECORDS: usize = SEEN + MEMBERS;
const _: () = assert!(RECORDS + 2 * RECORD <= 256);

/// The page of one endpoint.
#[derive(Debug)]
pub(crate) struct ForkGroup {
    page: Common,
    /// Index of this process's slot; `MEMBERS` if it has none.
    own: AtomicUsize,
}

/// One turn at one direction. No other thread or process of this endpoint uses the direction meanwhile.
#[derive(Debug)]
pub(crate) struct DirectionGuard<'a> {
    held: LockGuard<'a>,
    record: &'a [AtomicU64],
}

/// Slot reserved for a child; `None` if no slot was free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChildSlot(Option<usize>);

/// Outcome of a fork, for the process that records it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Birth {
    /// The fork failed: there is no child.
    Failed,
    /// This process is the parent: the number that the child has in this process's namespace.
    Child(u32),
    /// This process is the child.
    Own,
}

impl ForkGroup {
    /// Makes a group whose only member is this process, with the bytes that it has `counted` over TCP in each
    /// direction.
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

    // ---- membership

    /// Returns whether only one process is left.
    pub fn is_alone(&self) -> bool {
        // ORDER Acquire: pairs with the fetch_sub in `remove`. What that process did is visible.
        self.word(COUNT).load(Ordering::Acquire) <= 1 && self.word(CROWD).load(Ordering::Relaxed) == 0
    }

    /// Counts one more process before a fork, and reserves a slot for it.
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

    /// Records the outcome of the fork. Both processes call it after the fork.
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
                // Fails if the child has stored its own name already, with the number that it sees for itself.
                let _ = self.word(PIDS + at).compare_exchange(UNBORN, seen, Ordering::SeqCst, Ordering::SeqCst);
                self.name(at, seen);
            }
            Birth::Own => self.word(PIDS + at).store(member(std::process::id()), Ordering::SeqCst),
        }
    }

    /// Stores the number by which the parent sees the process in slot `at`. Frees the slot if the process has departed
    /// meanwhile.
    fn name(&self, at: usize, seen: u64) {
        let word = self.word(SEEN + at);
        if word.compare_exchange(UNBORN, seen, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            word.store(0, Ordering::SeqCst);
        }
    }

    /// Notes that a process that is not listed has the socket too, so that `is_alone` returns `false` from now on.
    pub fn set_crowded(&self) {
        self.word(CROWD).store(1, Ordering::SeqCst);
    }

    /// Makes this process a member again, after it meant to depart and did not.
    pub fn stay(&self) {
        let place = self.reserve_slot();
        self.record_birth(place, Birth::Own);
        self.record_birth(place, Birth::Child(std::process::id()));
    }

    /// Removes this process, which has no descriptor of the socket any more. Returns whether it was the last member.
    pub fn depart(&self) -> bool {
        self.remove_dead();
        let own = self.own.swap(MEMBERS, Ordering::Relaxed);
        own < MEMBERS && self.remove(own, self.word(PIDS + own).load(Ordering::SeqCst))
    }

    /// Removes one process from the list. Returns whether no member is left.
    fn remove(&self, at: usize, pid: u64) -> bool {
        if self.word(PIDS + at).compare_exchange(pid, 0, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        // The next process in this slot must not be taken for this one, whose parent may still be about to name it.
        let seen = self.word(SEEN + at);
        if seen.compare_exchange(UNBORN, UNNAMED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            seen.store(0, Ordering::SeqCst);
        }
        self.word(COUNT).fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Removes the members that died without departing.
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

    // ---- shared counts and flags

    pub fn counted(&self, direction: Direction) -> &AtomicU64 {
        self.word(COUNTED + direction as usize)
    }

    /// Returns whether a process died while it counted, so that the kernel's count is to be used instead. Clears the
    /// mark.
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

    /// Notes that what the endpoint sends over TCP comes from the pipe first. `base` is the count of bytes over TCP
    /// less the position (S-2).
    pub fn set_recalled(&self, base: u64) {
        self.word(BASE).store(base, Ordering::Relaxed);
        self.word(RECALLED).store(1, Ordering::Release);
    }

    pub fn recalled(&self) -> Option<u64> {
        (self.word(RECALLED).load(Ordering::Acquire) != 0).then(|| self.word(BASE).load(Ordering::Relaxed))
    }

    /// Notes that no process of this endpoint looks at the shared memory any more (S-19).
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

    /// Notes that a thread sleeps until the position reaches `target`. All sleepers share one wait word. Returns
    /// whether another one may have slept with another target, and so must look again.
    pub fn arm(&self, direction: Direction, target: u64) -> bool {
        // 0 means that nobody sleeps. If it is also a target, the only consequence is one needless look.
        self.word(ARMED + direction as usize).swap(target, Ordering::SeqCst) != target && !self.is_alone()
    }

    // ---- turns

    /// Begins a turn. Blocks until the present holder ends its own.
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
    /// Returns the state that the previous holder left; `None` if that process died within its turn.
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

    /// Stores the state for the next holder.
    pub fn leave(&self, record: &Record) {
        for (word, bytes) in self.record.iter().zip(record.encode().as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
    }
}

/// Number of this process's PID namespace plus one; 0 until it is asked for.
static NAMESPACE: AtomicU64 = AtomicU64::new(0);

/// Forgets the namespace, in a child made by fork, which may be in another one than its parent.
pub(crate) fn forget_namespace() {
    NAMESPACE.store(0, Ordering::Relaxed);
}

/// Returns the number of this process's PID namespace; 0 where it cannot be determined.
fn namespace() -> u64 {
    let known = NAMESPACE.load(Ordering::Relaxed);
    if known != 0 {
        return known - 1;
    }
    // The kernel numbers namespaces by 32 bits.
    let found = rustix::fs::stat("/proc/self/ns/pid").map_or(0, |found| found.st_ino & u64::from(u32::MAX));
    NAMESPACE.store(found + 1, Ordering::Relaxed);
    found
}

/// Returns the word that stands for the process with number `pid` in this process's namespace.
fn member(pid: u32) -> u64 {
    namespace() << 32 | u64::from(pid)
}

/// Returns whether the process has ended, waited for or not; `false` where that cannot be determined. A number means
/// nothing in another namespace than its own.
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
        // Children of another parent: one is made before the first is named, one after it.
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
        // The record of a writer at the beginning.
        let mut bytes = [0; private::LEN];
        bytes[..8].copy_from_slice(&0x1_0001_u64.to_le_bytes());
        let left = Record::decode(&bytes).unwrap();
        group.turn(Direction::Out).unwrap().leave(&left);
        assert!(group.turn(Direction::Out).unwrap().record().is_some());
        // A thread that ends within its turn leaves the lock as a killed process does.
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
        // In another namespace there may be a process with a number that no process has here, or with this process's
        // own number.
        let elsewhere = (namespace() + 1) << 32;
        for number in [id, std::process::id()] {
            group.word(PIDS + place.0.unwrap()).store(elsewhere | u64::from(number), Ordering::SeqCst);
            group.remove_dead();
            assert!(!group.is_alone());
        }
        assert!(!group.depart(), "the other one is left");
        assert!(group.is_alone());
        // With the number that its parent sees, its end can be determined.
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
