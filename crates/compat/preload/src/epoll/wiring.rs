// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Manages the kernel's side of a set: the registrations of joined connections, each under its token, and beside them
//! the doorbells and the paths to peers.

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

/// Prepares every set of the program's for a connection that was joined. Only then may its bytes come another way.
pub(crate) fn wire(process: &Process, connection: &Arc<Connection>) {
    let mut woken = Vec::new();
    let first = wire_sets(connection, &mut woken);
    if first.is_ok() {
        if has_unseen_sets() {
            connection.wiring.waits().note_unseen();
        }
        connection.wiring.set_wired();
    }
    // Nobody else wires a registration that came to a set after that set was looked at and before the connection was
    // marked as wired.
    let both = first.and_then(|()| wire_sets(connection, &mut woken));
    match both {
        // The next call tries again.
        Err(Unwired::Later) if !connection.wiring.is_wired() => {}
        Ok(()) => {}
        Err(_) => {
            process.leaves(connection, Reason::Usage);
            if connection.wiring.is_wired() {
                // Bytes on their way into shared memory would not show in the set.
                let _ = connection.for_call(process, connection.descriptors.fd()).retreat(Reason::Usage);
            }
        }
    }
    // Threads that have slept since before look again.
    woken.iter().for_each(|set| set.kick());
    if !woken.is_empty() || connection.wiring.is_wired() {
        connection.pipes.doorbell().inspect(|doorbell| doorbell.notify());
    }
}

/// Wires those registrations of a connection that are not wired, as many as possible, each for itself. Adds the sets
/// that had some to `woken`. If a registration cannot be wired, or not now, fails with the worst of the reasons.
fn wire_sets(connection: &Arc<Connection>, woken: &mut Vec<Arc<Set>>) -> Result<(), Unwired> {
    let mut all = Ok(());
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        let inner = &mut *inner;
        let is_its = |entry: &Entry| !entry.wired && Arc::ptr_eq(&entry.connection, connection);
        if !inner.all().iter().any(is_its) {
            continue;
        }
        // All this is done under the lock, so that nobody arms an entry again meanwhile, nor begins to sleep. A call
        // made in here takes no lock. `sleeps` is read before the kernel is asked: a thread that wakes after that has
        // an event which the kernel had not reported yet.
        let sleeps = set.asleep.load(Ordering::SeqCst) > 0;
        let once = inner.all().iter().any(|entry| is_its(entry) && entry.is_once());
        let known = if once { inner.registrations(epfd) } else { Known::Not };
        let (mut gone, mut touched) = (Vec::new(), false);
        let (entries, paths) = inner.all_mut();
        for entry in entries.iter_mut().filter(|entry| is_its(entry)) {
            match wire_entry(epfd, &set, entry, paths, (sleeps, &known)) {
                Ok(()) if entry.wired => touched = true,
                // The kernel has forgotten this registration.
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

/// Reason why an entry is not wired.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Unwired {
    /// A waiting thread may be about to be told of the entry, and nobody else may be told then; or the kernel was asked
    /// too much recently.
    Later,
    /// The entry cannot be wired: its connection has to stay on TCP.
    Stays,
}

/// Wires an entry. One that the kernel does not find in the set is left unwired. The answer of the kernel in `known` is
/// from after it was seen whether anybody `sleeps`.
fn wire_entry(
    epfd: RawFd,
    set: &Set,
    entry: &mut Entry,
    paths: &mut Paths,
    (sleeps, known): (bool, &Known),
) -> Result<(), Unwired> {
    // The kernel does not let an exclusive registration be changed, nor one whose number is gone.
    let is_fixed = entry.is_exclusive() || entry.orphan || set.nested.load(Ordering::SeqCst);
    if is_fixed
        || !add_own_doorbell(epfd, set)
        || add_doorbell(epfd, entry).is_err()
        || add_path(epfd, entry, paths).is_err()
    {
        return Err(Unwired::Stays);
    }
    // Only the kernel knows whether a registration that is reported once was reported, except for one that was wired
    // before for another connection.
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
        // The number was closed, and made again for this connection, past this library.
        Err(Errno::NOENT) => {}
        Err(_) => return Err(Unwired::Stays),
    }
    Ok(())
}

/// Returns the event that the kernel is to report for a wired entry.
pub(super) fn token(entry: &Entry) -> epoll_event {
    epoll_event { events: IN | OUT | PRI | RDHUP | EDGE, u64: entry.token }
}

/// Adds the doorbell of a joined connection to a set.
pub(super) fn add_doorbell(epfd: RawFd, entry: &Entry) -> Result<(), Errno> {
    let doorbell = entry.connection.pipes.doorbell().ok_or(Errno::NOTCONN)?;
    let notified = if doorbell.is_shared() { IN } else { OUT };
    let event = epoll_event { events: notified | EDGE, u64: entry.token | DOORBELL };
    match kernel::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, doorbell.as_fd().as_raw_fd(), event) {
        // The doorbell was added by another descriptor of the same connection.
        Err(Errno::EXIST) => Ok(()),
        answer => answer,
    }
}

/// Removes the doorbell of a connection from a set. If another process has the connection too, it may sleep in the same
/// set, which is one for all of them. There the doorbell stays until its last holder goes.
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
        // Set before the kernel can report it.
        set.doorbells.store(true, Ordering::SeqCst);
        let added =
            set.doorbell.get().is_some_and(|doorbell| add(epfd, doorbell.as_fd().as_raw_fd(), OUT, kick()).is_ok());
        set.doorbells.store(added, Ordering::SeqCst);
    }
    set.doorbells.load(Ordering::SeqCst)
}

/// Adds a descriptor of this library's to a set, for edges.
fn add(epfd: RawFd, fd: RawFd, events: u32, token: u64) -> Result<(), Errno> {
    match kernel::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, epoll_event { events: events | EDGE, u64: token }) {
        Err(Errno::EXIST) => Ok(()),
        answer => answer,
    }
}

/// Adds the path to the peer of a joined connection to a set. The end of the path wakes whoever sleeps there.
pub(super) fn add_path(epfd: RawFd, entry: &Entry, paths: &mut Paths) -> Result<(), Errno> {
    // The connection itself shows that its path has ended.
    let Some(path_to_peer) = entry.connection.pipes.path() else { return Ok(()) };
    if paths.has(&path_to_peer) {
        return Ok(());
    }
    let told = if path_to_peer.is_readable_at_end() { IN } else { RDHUP };
    add(epfd, path_to_peer.as_raw_fd(), told, path())?;
    paths.add(&path_to_peer);
    Ok(())
}

/// Records that the number `fd` of `connection` is about to be closed while there are others. Registrations by it stay,
/// and nobody can change them any more. With `open`, records that the number is made anew.
pub(crate) fn note_number(fd: RawFd, connection: &Arc<Connection>, open: bool) {
    for (_, set) in state::sets() {
        if set.entries.load(Ordering::SeqCst) != 0 {
            set.lock().note_number(fd, connection, open);
        }
    }
}

/// Forgets the registrations of a connection whose last descriptor is closed, as the kernel does.
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

/// Gives a registration back to the kernel, as the program has it.
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

/// Leaves the registrations of a connection to the kernel alone.
pub(crate) fn release(connection: &Arc<Connection>) {
    for (epfd, set) in state::sets() {
        let mut inner = set.lock();
        inner.all().iter().filter(|entry| Arc::ptr_eq(&entry.connection, connection)).for_each(|one| unwire(epfd, one));
        inner.retain(|entry| !Arc::ptr_eq(&entry.connection, connection));
        set.count(&inner);
    }
}

/// Gives all sets back to the kernel, as the program has them.
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
