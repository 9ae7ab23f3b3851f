// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out `epoll_wait`, and handles sets that are in another set or polled.
//!
//! What was written before something that a wait reports is reported too ([`gather`]). So the kernel is asked whenever
//! shared memory has something, which also keeps no listener or timer waiting.

use std::{
    os::fd::RawFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use libc::epoll_event;
use rustix::io::Errno;
use tombolo_sockets::{
    Process, Reason,
    connection::Stage,
    gather::{KernelReply, Sources, gather},
    spin,
};

use super::{
    ASLEEP, Set,
    entry::{DOORBELL, Unheard},
    kick, path,
    registry::Registry,
    tokens,
};
use crate::{
    errno,
    kernel::{self, Mask},
    plain,
    wait::{BLIND, Looks},
};

/// Advances the connections of a set that is waited for. Prepares those that were joined, and leaves those that stay on
/// TCP to the kernel alone.
pub(crate) fn begin(process: &Process, set: &Set) {
    let decided = process.journal.decided();
    if set.decided.swap(decided, Ordering::SeqCst) == decided {
        return;
    }
    let joined: Vec<_> = {
        let mut inner = set.lock();
        inner.retain(|entry| entry.connection.stage() != Stage::Plain);
        set.count(&inner);
        let unwired = inner.all().iter().filter(|entry| !entry.wired && entry.connection.stage() == Stage::Joined);
        unwired.map(|entry| Arc::clone(&entry.connection)).collect()
    };
    for connection in &joined {
        plain::begin(process, connection);
    }
}

/// Handles a set that is watched by another set, or polled. There a doorbell is only an edge, and a thread that waits
/// elsewhere does not see what a set has in shared memory, so its connections go back to TCP. Until the peer has
/// followed, the doorbells make the set readable.
pub(crate) fn nested(process: &Process, set: &Set) {
    set.nested.store(true, Ordering::SeqCst);
    if set.wired.load(Ordering::SeqCst) == 0 {
        return;
    }
    errno::kept(|| {
        let all: Vec<_> = set.lock().wake_all().iter().map(|entry| (entry.fd, Arc::clone(&entry.connection))).collect();
        for (fd, connection) in &all {
            process.leaves(connection, Reason::Usage);
            // Shows the request to the peer at once: what it sends from now on comes over TCP.
            let _ = connection.for_call(process, *fd).retreat(Reason::Usage);
        }
        process.before_sleep();
    });
    if arm(process, set).owes || set.has_unread() {
        set.kick();
    }
}

/// Sizes, in events, of the array in which a call collects events apart from the program's. It is no larger than it has
/// to be, because it is cleared for each call. A program with room for more uses none of that room for anything else.
const FEW: usize = 4;
const MANY: usize = 64;

/// Carries out `epoll_wait` on a watched set. `real` is the call itself, for a number of events and a time. Events
/// behind those returned stay as they were: programs register what they find there, and may have less room than they
/// say.
pub(crate) fn wait(
    process: &Process,
    set: (RawFd, &Set),
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: Mask,
    real: impl FnMut(&mut [epoll_event], Option<Duration>) -> isize,
) -> isize {
    let wait = |events: &mut [epoll_event]| wait_into(process, set, events, timeout, mask, real);
    if events.len() <= FEW {
        with_own_array::<FEW>(events, wait)
    } else if events.len() <= MANY {
        with_own_array::<MANY>(events, wait)
    } else {
        wait(events)
    }
}

/// Waits with an array of its own, for at most as many events, and copies those that there were.
fn with_own_array<const MOST: usize>(
    events: &mut [epoll_event],
    wait: impl FnOnce(&mut [epoll_event]) -> isize,
) -> isize {
    let mut own = [epoll_event { events: 0, u64: 0 }; MOST];
    let n = wait(&mut own[..events.len()]);
    let given = usize::try_from(n).unwrap_or_default();
    for (to, from) in events.iter_mut().zip(&own[..given]) {
        // Copied as they were written a moment ago: one load of two of these fields would wait for both stores.
        (to.events, to.u64) = (from.events, from.u64);
    }
    n
}

fn wait_into(
    process: &Process,
    (epfd, set): (RawFd, &Set),
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: Mask,
    mut real: impl FnMut(&mut [epoll_event], Option<Duration>) -> isize,
) -> isize {
    let before = errno::get();
    let polls = timeout == Some(Duration::ZERO);
    let deadline = timeout.filter(|_| !polls).and_then(|timeout| Instant::now().checked_add(timeout));
    let room = events.len();
    let mut looks = Looks::default();
    let done = |found| {
        errno::kept(|| process.after_wait());
        pass_on(set, found, found == room);
        errno::set(before);
        found as isize
    };
    loop {
        let joined = set.wired.load(Ordering::SeqCst) != 0;
        let mut found = 0;
        if joined {
            let mut said = None;
            let last = Crowding::of_last(set);
            if polls && last == Crowding::Kernel {
                found = find_ready(process, (epfd, set), events, None);
                if found > 0 {
                    return done(found);
                }
            }
            if polls || mask.is_some() || last == Crowding::Shared {
                // If the last call had no room for the kernel's events, this one has.
                let share = if last == Crowding::Shared { room.div_ceil(2) } else { room };
                let asking = SleepGuard::new(set);
                let n = real(&mut events[..share], Some(Duration::ZERO));
                drop(asking);
                if n < 0 {
                    pass_on(set, 0, false);
                    return n;
                }
                said = Some(Answer { n: n as usize, is_full: n as usize == share });
            }
            found = find_ready(process, (epfd, set), events, said);
            if found == 0 && !polls {
                spin::until(|| {
                    found = find_ready(process, (epfd, set), events, None);
                    found > 0
                });
            }
            if found > 0 {
                return done(found);
            }
        }
        let asleep = SleepGuard::new(set);
        let mut unheard = Unheard::default();
        if joined && (!polls || set.nested.load(Ordering::SeqCst)) {
            errno::kept(|| process.before_sleep());
            unheard = arm(process, set);
            found = find_ready(process, (epfd, set), events, None);
        }
        if found > 0 || joined && polls {
            drop(asleep);
            if found == 0 {
                errno::kept(|| set.lock().leave_full_pipes(process));
            }
            return done(found);
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = if polls { timeout } else { left };
        let rest = if unheard.owes { Some(left.map_or(BLIND, |left| left.min(BLIND))) } else { left };
        let rest = if unheard.full && !polls { rest.into_iter().chain([looks.next_pause()]).min() } else { rest };
        let slept = spin::asleep();
        let n = real(events, rest);
        drop(asleep);
        if n < 0 {
            pass_on(set, 0, false);
            return n;
        }
        if joined {
            spin::learn(slept);
        }
        if unheard.full && n == 0 {
            errno::kept(|| set.lock().leave_full_pipes(process));
        }
        found = find_ready(process, (epfd, set), events, Some(Answer { n: n as usize, is_full: n as usize == room }));
        if found > 0 || n == 0 && rest.is_some() && rest == left {
            return done(found);
        }
    }
}

/// The kernel's answer: the number of events, and whether they took all the room that there was.
struct Answer {
    n: usize,
    is_full: bool,
}

/// Side that had all the room of a call. Without turns, few places and much that is ready on one side would starve the
/// other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Crowding {
    Nobody,
    /// Shared memory, and the kernel was not asked.
    Shared,
    Kernel,
}

impl Crowding {
    fn of_last(set: &Set) -> Self {
        match set.crowd.load(Ordering::Relaxed) {
            1 => Self::Shared,
            2 => Self::Kernel,
            _ => Self::Nobody,
        }
    }

    fn store_last(self, set: &Set) {
        set.crowd.store(self as u8, Ordering::Relaxed);
    }
}

/// Number of times that one call asks the kernel again if its answer had room for nothing but this library's events.
const CROWDED: usize = 4096;

/// Finds what is ready by now, after the kernel has `said` something, and reports it. Returns the number of events.
fn find_ready(
    process: &Process,
    (epfd, set): (RawFd, &Set),
    events: &mut [epoll_event],
    said: Option<Answer>,
) -> usize {
    let mut inner = set.lock();
    inner.begin_round(process.stalls());
    let was_asked = said.is_some();
    let mut look = SetScan { process, epfd, inner: &mut inner, events, found: 0, plain: 0 };
    let said = said.map(|said| look.sort_all(said));
    // If the kernel refuses here, it refuses again when the thread waits in it.
    let _ = gather(&mut look, said, true);
    if look.found > 0 && !look.has_room() {
        // In that case the kernel was asked about nothing.
        for amended in look.inner.ask_for_ends(process) {
            look.amend(amended);
        }
    }
    let crowd = match (look.has_room(), look.plain) {
        (false, 0) if !was_asked => Crowding::Shared,
        (false, plain) if plain == look.found => Crowding::Kernel,
        _ => Crowding::Nobody,
    };
    crowd.store_last(set);
    look.found
}

/// One look at a set, which nobody changes meanwhile.
struct SetScan<'a> {
    process: &'a Process,
    epfd: RawFd,
    inner: &'a mut Registry,
    events: &'a mut [epoll_event],
    found: usize,
    /// Number of these events that are the kernel's.
    plain: usize,
}

impl Sources for SetScan<'_> {
    type Error = Errno;

    fn collect(&mut self) -> usize {
        let new = self.inner.collect(self.process, &mut self.events[self.found..]);
        self.found += new;
        new
    }

    fn ask(&mut self) -> Result<KernelReply, Errno> {
        let n = kernel::epoll_now(self.epfd, &mut self.events[self.found..])?;
        Ok(self.sort(n))
    }

    fn has_room(&self) -> bool {
        self.found < self.events.len()
    }
}

impl SetScan<'_> {
    /// Sorts the events that the kernel gave into those of the program and news of its connections. If all were this
    /// library's and took all the room, asks for those behind them too.
    fn sort_all(&mut self, said: Answer) -> KernelReply {
        let mut all = self.sort(said.n);
        let mut more = said.is_full;
        for _ in 0..CROWDED {
            if !more || all.plain > 0 {
                break;
            }
            let Ok(n) = kernel::epoll_now(self.epfd, self.events) else { break };
            more = n == self.events.len();
            all.plain = self.sort(n).plain;
        }
        all
    }

    /// Takes this library's own events out of the `n` that the kernel gave, and records what they mean.
    fn sort(&mut self, n: usize) -> KernelReply {
        let ours = tokens()..=tokens() | u64::from(u32::MAX);
        let mut asked = KernelReply::default();
        for at in self.found..self.found + n {
            let event = self.events[at];
            let token = event.u64;
            if !ours.contains(&token) {
                self.events[self.found + asked.plain] = event;
                asked.plain += 1;
                continue;
            }
            asked.hints = true;
            if token == path() {
                // The path has ended, and the connections that went over it have to be told.
                self.process.exchange.mark_notified();
                self.inner.miss();
                self.inner.wake_all();
            } else if token == kick() {
                self.inner.miss();
            } else if token & DOORBELL != 0 {
                let token = token & !DOORBELL;
                self.inner.wake_notified(token);
                // A thread that polls and never sleeps does here what its peer asks for.
                if let Some(at) = self.inner.find_token(token) {
                    let _ = self.inner.all()[at].send_recalled(self.process);
                }
            } else if let Some(at) = self.inner.find_token(token)
                && let Some(amended) = self.inner.note_kernel_events(at, event.events)
            {
                self.amend(amended);
            }
        }
        self.found += asked.plain;
        self.plain += asked.plain;
        asked
    }

    /// Extends an event that was reported in this look. Two that look the same are the same to the program.
    fn amend(&mut self, (told, more): (epoll_event, u32)) {
        let is_it = |event: &&mut epoll_event| (event.events, event.u64) == (told.events, told.u64);
        if let Some(event) = self.events[..self.found].iter_mut().find(is_it) {
            event.events = more;
        }
    }
}

/// Counts a thread that is about to sleep in a set, or does, while it lives.
struct SleepGuard<'a>(&'a Set);

impl<'a> SleepGuard<'a> {
    fn new(set: &'a Set) -> Self {
        // The lock keeps a thread from being counted while a registration is being wired.
        let _still = set.lock();
        for asleep in [&set.asleep, &ASLEEP] {
            asleep.fetch_add(1, Ordering::SeqCst);
        }
        Self(set)
    }
}

impl Drop for SleepGuard<'_> {
    fn drop(&mut self) {
        // In a child that was made in a signal handler amid the sleep, the thread was counted out at the beginning of
        // the child.
        for asleep in [&self.0.asleep, &ASLEEP] {
            let _ = asleep.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |all| all.checked_sub(1));
        }
    }
}

/// Makes other threads look, before a wait returns with `found` events, if there may be more for them. Also does so if
/// this thread took what was to wake them: they asked no peer to notify them again since.
fn pass_on(set: &Set, found: usize, is_full: bool) {
    // ORDER SeqCst: a thread counts itself asleep before it arms. It has seen what was taken before that; a thread that
    // took something after that sees it counted here.
    let others = set.asleep.load(Ordering::SeqCst) > 0 && (found > 0 && is_full || set.lock().is_unarmed());
    if others || found > 0 && set.nested.load(Ordering::SeqCst) && set.has_unread() {
        set.kick();
    }
}

fn arm(process: &Process, set: &Set) -> Unheard {
    set.lock().arm(process)
}
