// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes a thread of the program wait for descriptors of which some have shared memory beside TCP: in `poll`, and in
//! every blocking call.
//!
//! A call that blocks for one connection sleeps at a [`Seat`] of it, by one system call (ADR
//! 0026).
//!
//! For several, the kernel is asked about all of them, and about one descriptor more: an epoll instance at which the
//! doorbell of each of those connections is an edge. Only this thread takes anything from it, so no notification is
//! lost to another thread, and no other is woken.

use std::{
    os::fd::RawFd,
    sync::Arc,
    time::{Duration, Instant},
};

use libc::{POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM, epoll_event, pollfd};
use rustix::io::Errno;
use tombolo_sockets::{Process, Seat, connection::Connection, spin};

use crate::{
    errno,
    inside::{self, Few},
    kernel::{self, Mask},
};

/// Interval between looks without a descriptor for the doorbells, or while something is to be sent beside what is
/// waited for.
pub(crate) const BLIND: Duration = Duration::from_millis(1);

const READ: i16 = POLLIN | POLLRDNORM;
const WRITE: i16 = POLLOUT | POLLWRNORM;

/// Time for which a waiter for room leaves a full pipe alone: longer each time (S-16).
#[derive(Debug)]
pub(crate) struct Looks(Duration);

impl Default for Looks {
    fn default() -> Self {
        Self(Duration::from_millis(4))
    }
}

impl Looks {
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(Duration::from_secs(1));
        pause
    }
}

/// Events that are waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wanted(i16);

impl Wanted {
    pub const READ: Self = Self(READ);
    pub const WRITE: Self = Self(WRITE);
}

/// A descriptor with shared memory beside TCP, among those that are waited for: its index and its connection.
pub(crate) type Joined = (usize, Arc<Connection>);

/// Waits for one connection. Returns whether to try again; if not, the deadline has passed. `deadline` is called only
/// when it must be known.
pub(crate) fn one(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    wanted: Wanted,
    deadline: impl FnOnce() -> Option<Instant>,
) -> Result<bool, Errno> {
    // The answer of a peer that answers at once is here before the kernel has been asked anything.
    if wanted == Wanted::READ && !connection.pipes.has_unread() && spin::until(|| connection.pipes.has_unread()) {
        return Ok(true);
    }
    let deadline = deadline();
    if let Some(again) = seated(process, connection, fd, wanted, deadline)? {
        return Ok(again);
    }
    let mut fds = [pollfd { fd, events: wanted.0, revents: 0 }];
    let ready = wait_for(process, &mut fds, &[(0, Arc::clone(connection))], deadline, None, true)?;
    Ok(ready > 0)
}

/// Does the same by one system call, if one place to wait at knows of all that may come; otherwise returns `None`.
/// Whatever wakes the thread, the caller tries again: that finds out what came, and waits again if it was nothing.
fn seated(
    process: &Process,
    connection: &Arc<Connection>,
    fd: RawFd,
    wanted: Wanted,
    deadline: Option<Instant>,
) -> Result<Option<bool>, Errno> {
    let _inside = inside::enter();
    let reads = wanted == Wanted::READ;
    let before = connection.pipes.arrived();
    // There may be something that this call cannot take yet, or only the kernel knows whether there is room.
    if reads && connection.pipes.has_unread() || !reads && connection.is_writable() != Some(false) {
        return Ok(None);
    }
    let Some(seat) = errno::kept(|| Seat::of(connection, kernel::borrow(fd))) else { return Ok(None) };
    errno::kept(|| process.before_sleep());
    // The check below sees whatever came before this, and whatever comes after it notifies.
    connection.for_call(process, fd).arm(reads, !reads);
    if reads && connection.pipes.arrived() != before || !reads && connection.is_writable() != Some(false) {
        return Ok(Some(true));
    }
    let owes = connection.for_call(process, fd).send_recalled();
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let rest = if owes { Some(left.map_or(BLIND, |left| left.min(BLIND))) } else { left };
    let slept = spin::asleep();
    let mut events = [epoll_event { events: 0, u64: 0 }; 4];
    let n = match inside::leave(|| kernel::epoll_until(seat.fd(), &mut events, rest)) {
        // A signal handler has forked before the call was made, and this is the child: the number is not open here, or
        // is another file's.
        Err(_) if !seat.is_own() => return Ok(Some(true)),
        slept => slept?,
    };
    spin::learn(slept);
    let mut said = false;
    for event in &events[..n] {
        said |= seat.came(&process.exchange, event.u64, event.events);
    }
    if n == 0 {
        return Ok(Some(rest != left));
    }
    // To a thread that sends, TCP has reported only that there is something to read, and would report that again.
    if said && !reads && !connection.ending.is_over() && connection.is_writable() == Some(false) {
        return Ok(None);
    }
    Ok(Some(true))
}

/// Waits a moment, or less if the connection ends. Returns whether no signal came.
pub(crate) fn a_moment(fd: RawFd) -> bool {
    kernel::poll(&mut [pollfd { fd, events: libc::POLLRDHUP, revents: 0 }], Some(BLIND), None).is_ok()
}

/// Waits as `poll` does until one of `fds` is ready, and returns how many are.
pub(crate) fn all(
    process: &Process,
    fds: &mut [pollfd],
    joined: &[Joined],
    deadline: Option<Instant>,
    mask: Mask,
) -> Result<usize, Errno> {
    wait_for(process, fds, joined, deadline, mask, false)
}

/// Does the same for a caller that may have `looked` at all of them, in vain.
fn wait_for(
    process: &Process,
    fds: &mut [pollfd],
    joined: &[Joined],
    deadline: Option<Instant>,
    mask: Mask,
    mut looked: bool,
) -> Result<usize, Errno> {
    let _inside = inside::enter();
    // A process that never sleeps does here what its peer asks for (S-2).
    joined.iter().for_each(|(at, connection)| _ = connection.for_call(process, fds[*at].fd).send_recalled());
    let (mut asked, mut seen) = (Few::new(), Few::new());
    let mut pauses = Looks::default();
    loop {
        seen.clear();
        seen.extend(joined.iter().map(|(_, connection)| connection.pipes.arrived()));
        // `has_unread` shows what came between the caller's look and `seen`.
        let looks = !std::mem::take(&mut looked) || joined.iter().any(|(_, connection)| connection.pipes.has_unread());
        if looks && check_joined(process, fds, joined) {
            // The other descriptors may be ready too, and TCP reports what else there is about a joined one. A signal
            // that the mask lets through waits if something is ready, as in the kernel.
            let asks = fds.len() > joined.len() || concerns_tcp(fds, joined);
            // Reports whatever was written before what is ready (S-14).
            while fds.len() > 1 {
                let before = count(fds);
                if asks {
                    ask(fds, joined, &mut asked, None, Some(Duration::ZERO), None)?;
                }
                check_joined(process, fds, joined);
                if count(fds) == before {
                    break;
                }
            }
            if asks && fds.len() == 1 {
                ask(fds, joined, &mut asked, None, Some(Duration::ZERO), None)?;
            }
            // Another thread may have taken what there was.
            if count(fds) > 0 {
                return Ok(count(fds));
            }
            continue;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            leave_full_pipes(process, fds, joined);
            ask(fds, joined, &mut asked, None, Some(Duration::ZERO), mask)?;
            return Ok(count(fds));
        }
        let stirred = || {
            let _inside = inside::enter();
            has_news(fds, joined, &seen)
        };
        if inside::leave(|| spin::until(stirred)) {
            continue;
        }
        let waiter = errno::kept(|| process.waiters.find_waiter(joined.iter().map(|(_, connection)| connection)));
        if let Some(waiter) = &waiter {
            waiter.forget(&process.exchange);
        }
        errno::kept(|| process.before_sleep());
        for (at, connection) in joined {
            connection.for_call(process, fds[*at].fd).arm(fds[*at].events & READ != 0, fds[*at].events & WRITE != 0);
        }
        if has_news(fds, joined, &seen) {
            continue;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let owes = joined.iter().any(|(at, connection)| connection.for_call(process, fds[*at].fd).send_recalled());
        let left = if waiter.is_some() && !owes { left } else { Some(left.map_or(BLIND, |left| left.min(BLIND))) };
        let is_full = joined.iter().any(|(at, connection)| is_stuck(connection, &fds[*at]));
        let rest = if is_full { left.into_iter().chain([pauses.next_pause()]).min() } else { left };
        let slept = spin::asleep();
        let doorbell = waiter.as_ref().map(|waiter| waiter.fd());
        ask(fds, joined, &mut asked, doorbell, rest, mask)?;
        spin::learn(slept);
        if is_full {
            leave_full_pipes(process, fds, joined);
        }
        // A joined connection is ready when a look at it says so; the kernel knows of errors and of the others.
        if count(fds) > 0 {
            check_joined(process, fds, joined);
            return Ok(count(fds));
        }
    }
}

/// Lets connections that wait for room in a full pipe go over TCP, after a while in which nobody read (S-16).
fn leave_full_pipes(process: &Process, fds: &[pollfd], joined: &[Joined]) {
    let full = joined.iter().filter(|(at, connection)| is_stuck(connection, &fds[*at]));
    full.for_each(|(at, connection)| _ = connection.for_call(process, fds[*at].fd).leave_full_pipe());
}

/// Returns whether there is no room for what is to be sent.
fn is_stuck(connection: &Connection, entry: &pollfd) -> bool {
    entry.events & WRITE != 0 && connection.is_writable() == Some(false)
}

/// Looks at the joined connections alone. Returns whether any is ready.
fn check_joined(process: &Process, fds: &mut [pollfd], joined: &[Joined]) -> bool {
    let mut any = false;
    for (at, connection) in joined {
        let entry = &mut fds[*at];
        let mut ready = 0;
        if entry.events & READ != 0 && connection.for_call(process, entry.fd).is_readable() {
            ready |= entry.events & READ;
        }
        if entry.events & WRITE != 0 {
            let room = connection.for_call(process, entry.fd).tell_room();
            let writable = room.unwrap_or_else(|| process.kernel().poll(entry.fd, POLLOUT) & WRITE != 0);
            ready |= if writable { entry.events & WRITE } else { 0 };
        }
        entry.revents = ready | entry.revents & !(READ | WRITE);
        any |= entry.revents != 0;
    }
    any
}

/// Returns whether something that is asked for, or was found, is about more than bytes in shared memory.
fn concerns_tcp(fds: &[pollfd], joined: &[Joined]) -> bool {
    joined.iter().any(|(at, connection)| {
        let entry = &fds[*at];
        entry.events & !(READ | WRITE) != 0
            || entry.revents & WRITE != 0
            || entry.revents & READ != 0 && !connection.pipes.has_unread()
            // Only in this case can both endpoints have ended their sending, which `POLLHUP` tells.
            || connection.ending.has_ended_sending()
    })
}

/// Returns whether shared memory has something that was not there at the last look, at no cost.
fn has_news(fds: &[pollfd], joined: &[Joined], seen: &[u64]) -> bool {
    joined.iter().zip(seen).any(|((at, connection), seen)| {
        let events = fds[*at].events;
        events & READ != 0 && connection.pipes.arrived() != *seen
            || events & WRITE != 0 && connection.is_writable() == Some(true)
    })
}

/// Asks the kernel, and adds its answer to `fds`.
fn ask(
    fds: &mut [pollfd],
    joined: &[Joined],
    asked: &mut Few<pollfd>,
    doorbell: Option<RawFd>,
    timeout: Option<Duration>,
    mask: Mask,
) -> Result<(), Errno> {
    asked.clear();
    asked.extend_from_slice(fds);
    let doorbell = doorbell.map(|fd| pollfd { fd, events: POLLIN, revents: 0 });
    // The doorbell takes an entry without a descriptor, if there is one, because the kernel accepts no more entries
    // than the process may have descriptors.
    let place = doorbell.and_then(|_| asked.iter().position(|entry| entry.fd < 0)).unwrap_or(fds.len());
    match (asked.get_mut(place), doorbell) {
        (Some(unused), Some(doorbell)) => *unused = doorbell,
        (_, doorbell) => asked.extend(doorbell),
    }
    for (at, connection) in joined {
        // The socket itself always has room while its bytes go another way.
        if connection.is_writable().is_some() {
            asked[*at].events &= !WRITE;
        }
    }
    match kernel::poll(asked, timeout, mask) {
        // The program's entries are as many as the kernel accepts, and the doorbell is one too many.
        Err(Errno::INVAL) if asked.len() > fds.len() => {
            asked.truncate(fds.len());
            kernel::poll(asked, Some(timeout.map_or(BLIND, |left| left.min(BLIND))), mask)?
        }
        answer => answer?,
    };
    for (at, (entry, asked)) in fds.iter_mut().zip(asked).enumerate() {
        let said = if at == place { 0 } else { asked.revents };
        if let Some((_, connection)) = joined.iter().find(|(place, _)| *place == at) {
            connection.ending.note_events(said);
            // The look at the connection judges what the kernel reports about bytes.
            entry.revents |= said & !(READ | WRITE);
        } else {
            entry.revents = said;
        }
    }
    Ok(())
}

fn count(fds: &[pollfd]) -> usize {
    fds.iter().filter(|entry| entry.revents != 0).count()
}
