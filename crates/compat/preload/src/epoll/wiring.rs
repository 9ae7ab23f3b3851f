// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the kernel has of a set: the registrations of joined connections, each under its token, and beside them the doorbells and
//! the paths to peers.

use std::{
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::{Arc, atomic::Ordering},
};

use libc::epoll_event;
use rustix::io::Errno;
use tombolo_sockets::{Process, Reason, SingleDoorbell, connection::Connection};

use super::{
    Set,
    entry::{DOORBELL, EDGE, Entry, IN, OUT, PRI, RDHUP},
    kick, path,
    registry::{Known, Paths},
    unseen::has_unseen_sets,
};
use crate::{inside, kernel, state};

/// Prepares every set of the program's for a connection that was joined; only then may its bytes come another way.
pub(crate) fn wire(process: &Process, connection: &Arc<Connection>) {
    let mut woken = Vec::new();
    let first = wire_sets(connection, &mut woken);
    if first.is_ok() {
        if has_unseen_sets() {
            connection.wiring.waits().note_unseen();
        }
        connection.wiring.set_wired();
    }
    // One that came to a set after that was looked at, and before this was said, nobody else wires.
    let both = first.and_then(|()| wire_sets(connection, &mut woken));
    match both {
        // The next call tries again.
        Err(Unwired::Later) if !connection.wiring.is_wired() => {}
        Ok(()) => {}
        Err(_) => {
            process.leaves(connection, Reason::Usage);
            if connection.wiring.is_wired() {
                // What is on its way there would not show.
                let _ = connection.for_call(process, connection.descriptors.fd()).retreat(Reason::Usage);
            }
        }
    }
    // Whoever sleeps since before looks again.
    woken.iter().for_each(|set| set.kick());
    if !woken.is_empty() || connection.wiring.is_wired() {
        connection.pipes.doorbell().inspect(|doorbell| doorbell.notify());
    }
}

/// Wires what is not wired of a connection's registrations, as many as can be, each for itself; adds the sets that had some to
/// `woken`. Fails if one cannot be, or not now: the worst of what is said of them.
fn wire_sets(connection: &Arc<Connection>, woken: &mut Vec<Arc<Set>>) -> Result<(), Unwired> {
    let mut all = Ok(());
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        let inner = &mut *inner;
        let is_its = |entry: &Entry| !entry.wired && Arc::ptr_eq(&entry.connection, connection);
        if !inner.all().iter().any(is_its) {
            continue;
        }
        // Under the lock, so that nobody arms one again meanwhile, nor begins to sleep. A call made in here takes none. Before the
        // kernel is asked: who wakes after that has an event of which it did not say yet.
        let sleeps = set.asleep.load(Ordering::SeqCst) > 0;
        let once = inner.all().iter().any(|entry| is_its(entry) && entry.is_once());
        let known = if once { inner.registrations(epfd) } else { Known::Not };
        let (mut gone, mut touched) = (Vec::new(), false);
        let (entries, paths) = inner.all_mut();
        for entry in entries.iter_mut().filter(|entry| is_its(entry)) {
            match wire_entry(epfd, &set, entry, paths, (sleeps, &known)) {
                Ok(()) if entry.wired => touched = true,
                // The kernel has forgotten it.
                Ok(()) => gone.push(entry.token),
                Err(unwired) => all = all.and(Err(unwired)).map_err(|before: Unwired| before.max(unwired)),
            }
        }
        if gone.is_empty() && !touched {
            continue;
        }
        inner.retain(|entry| !gone.contains(&entry.token));
        if !inner.all().iter().any(|entry| Arc::ptr_eq(&entry.connection, connection)) {
            remove_doorbell(epfd, connection);
        }
        set.count(inner);
        woken.push(Arc::clone(&set));
    }
    all
}

/// Why an entry is not wired.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Unwired {
    /// A thread that waits may be told of it just now, as nobody else may be then; or the kernel was asked too much of late.
    Later,
    /// It cannot be: its connection has to stay on TCP.
    Stays,
}

/// One that is not in the set, as the kernel says, is not wired by that. What is `known` of the kernel is from after it was seen
/// whether anybody `sleeps`.
fn wire_entry(
    epfd: RawFd,
    set: &Set,
    entry: &mut Entry,
    paths: &mut Paths,
    (sleeps, known): (bool, &Known),
) -> Result<(), Unwired> {
    // The kernel does not let one that is exclusive be changed, nor one whose number is gone.
    let is_fixed = entry.is_exclusive() || entry.orphan || set.nested.load(Ordering::SeqCst);
    if is_fixed
        || !add_own_doorbell(epfd, set)
        || add_doorbell(epfd, entry).is_err()
        || add_path(epfd, entry, paths).is_err()
    {
        return Err(Unwired::Stays);
    }
    // The kernel alone knows whether one that is told once was told, but of one that was wired before for another connection.
    let spent = entry.is_once()
        && match known {
            _ if entry.spent => true,
            Known::These(lines) => !kernel::is_armed(lines, entry.fd, entry.data),
            Known::Later => return Err(Unwired::Later),
            Known::Not => return Err(Unwired::Stays),
        };
    if entry.is_once() && !spent && sleeps {
        return Err(if entry.postpone() { Unwired::Later } else { Unwired::Stays });
    }
    let before = kernel::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, entry.fd, token(entry));
    match before {
        Ok(()) => entry.wire(spent),
        // Its number was closed, and made again for this one, behind our back.
        Err(Errno::NOENT) => {}
        Err(_) => return Err(Unwired::Stays),
    }
    Ok(())
}

/// What the kernel is to say of a wired entry.
pub(super) fn token(entry: &Entry) -> epoll_event {
    epoll_event { events: IN | OUT | PRI | RDHUP | EDGE, u64: entry.token }
}

/// Adds the doorbell of a joined connection to a set.
pub(super) fn add_doorbell(epfd: RawFd, entry: &Entry) -> Result<(), Errno> {
    let doorbell = entry.connection.pipes.doorbell().ok_or(Errno::NOTCONN)?;
    let notified = if doorbell.is_shared() { IN } else { OUT };
    let event = epoll_event { events: notified | EDGE, u64: entry.token | DOORBELL };
    match kernel::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, doorbell.as_fd().as_raw_fd(), event) {
        // By another descriptor of the same connection.
        Err(Errno::EXIST) => Ok(()),
        answer => answer,
    }
}

/// One that another process has as well may sleep in the same set, which is one for all of them: there the doorbell stays, until
/// its last holder goes.
fn remove_doorbell(epfd: RawFd, connection: &Connection) {
    if let Some(doorbell) = connection.pipes.doorbell().filter(|_| connection.members.is_alone()) {
        let none = epoll_event { events: 0, u64: 0 };
        let _ = kernel::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, doorbell.as_fd().as_raw_fd(), none);
    }
}

pub(super) fn add_own_doorbell(epfd: RawFd, set: &Set) -> bool {
    if !set.doorbells.load(Ordering::SeqCst) {
        if set.doorbell.get().is_none()
            && let Ok(doorbell) = inside::lifted(SingleDoorbell::new)
        {
            let _ = set.doorbell.set(doorbell);
        }
        // Before the kernel can report it.
        set.doorbells.store(true, Ordering::SeqCst);
        let added =
            set.doorbell.get().is_some_and(|doorbell| add(epfd, doorbell.as_fd().as_raw_fd(), OUT, kick()).is_ok());
        set.doorbells.store(added, Ordering::SeqCst);
    }
    set.doorbells.load(Ordering::SeqCst)
}

/// Adds a descriptor of ours to a set, for edges.
fn add(epfd: RawFd, fd: RawFd, events: u32, token: u64) -> Result<(), Errno> {
    match kernel::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, epoll_event { events: events | EDGE, u64: token }) {
        Err(Errno::EXIST) => Ok(()),
        answer => answer,
    }
}

/// Adds the path to the peer of a joined connection to a set: its end wakes who sleeps there.
pub(super) fn add_path(epfd: RawFd, entry: &Entry, paths: &mut Paths) -> Result<(), Errno> {
    // One that has ended says so by the connection.
    let Some(path_to_peer) = entry.connection.pipes.path() else { return Ok(()) };
    if paths.has(&path_to_peer) {
        return Ok(());
    }
    let told = if path_to_peer.is_readable_at_end() { IN } else { RDHUP };
    add(epfd, path_to_peer.as_raw_fd(), told, path())?;
    paths.add(&path_to_peer);
    Ok(())
}

/// The number `fd` of `connection` is about to be closed, and there are others: registrations by it stay, and nobody can change
/// them any more. Or it is made anew (`open`).
pub(crate) fn note_number(fd: RawFd, connection: &Arc<Connection>, open: bool) {
    for (_, set) in state::sets() {
        if set.entries.load(Ordering::SeqCst) != 0 {
            set.lock().note_number(fd, connection, open);
        }
    }
}

/// The last descriptor of a connection is closed: the kernel forgets its registrations, and so do we.
pub(crate) fn forget(connection: &Arc<Connection>) {
    for (epfd, set) in state::sets() {
        if set.entries.load(Ordering::SeqCst) != 0 {
            let mut inner = set.lock();
            let mut of_it = inner.all().iter().filter(|entry| Arc::ptr_eq(&entry.connection, connection));
            if of_it.any(|entry| entry.wired) {
                remove_doorbell(epfd, connection);
            }
            inner.retain(|entry| !Arc::ptr_eq(&entry.connection, connection));
            set.count(&inner);
        }
    }
}

/// A registration is the kernel's again, as the program has it.
pub(super) fn unwire(epfd: RawFd, entry: &Entry) {
    if !entry.wired || entry.orphan {
        return;
    }
    let (operation, event) = match entry.asked() {
        Some(event) => (libc::EPOLL_CTL_MOD, event),
        None => (libc::EPOLL_CTL_DEL, token(entry)),
    };
    let _ = kernel::epoll_ctl(epfd, operation, entry.fd, event);
    remove_doorbell(epfd, &entry.connection);
}

/// The registrations of a connection are the kernel's alone.
pub(crate) fn release(connection: &Arc<Connection>) {
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        inner.all().iter().filter(|entry| Arc::ptr_eq(&entry.connection, connection)).for_each(|one| unwire(epfd, one));
        inner.retain(|entry| !Arc::ptr_eq(&entry.connection, connection));
        set.count(&inner);
    }
}

/// All sets are the kernel's again, as the program has them.
pub(crate) fn give_back() {
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        inner.all().iter().for_each(|entry| unwire(epfd, entry));
        inner.retain(|_| false);
        set.count(&inner);
        if set.doorbells.swap(false, Ordering::SeqCst) {
            let none = epoll_event { events: 0, u64: 0 };
            let paths = inner.all_mut().1.take_live();
            let paths = paths.iter().map(|path| path.as_raw_fd());
            for fd in paths.chain(set.doorbell.get().map(|doorbell| doorbell.as_fd().as_raw_fd())) {
                let _ = kernel::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, none);
            }
        }
    }
}
