// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What takes the place of a connection that has left its memory gets its registrations too (ADR 0089).

use std::{
    os::fd::RawFd,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

use libc::epoll_event;
use tombolo_sockets::connection::Connection;

use super::{Set, entry::Entry, tokens, wiring::unwire};

/// What [`Connection::begin_anew`] gives takes the place of `old` in these sets, each of which is there once, where nobody has `old`
/// but they and `others`. None where somebody has, or where a registration cannot be changed. Whoever calls sees to it that nobody
/// finds `old` elsewhere meanwhile.
pub(crate) fn replace(sets: &[(RawFd, Arc<Set>)], old: &Arc<Connection>, others: usize) -> Option<Arc<Connection>> {
    let is_its = |entry: &Entry| Arc::ptr_eq(&entry.connection, old);
    let mut locked: Vec<_> = sets.iter().map(|(epfd, set)| (*epfd, set, set.lock())).collect();
    let all = || locked.iter().flat_map(|(_, _, inner)| inner.all()).filter(|entry| is_its(entry));
    let is_fixed = all().any(|entry| entry.orphan || entry.is_exclusive());
    if is_fixed || Arc::strong_count(old) != all().count() + others {
        return None;
    }
    // ORDER Acquire: with the Release of whoever gave up the last other one. What was counted in its call is seen here.
    fence(Ordering::Acquire);
    let new = Arc::new(old.begin_anew());
    for (epfd, set, inner) in &mut locked {
        // As the program has them, each with what is ready now. A thread that was told of one by its token, and has not looked yet,
        // finds that token nowhere.
        let its: Vec<_> = inner.all().iter().filter(|entry| is_its(entry)).collect();
        if its.is_empty() {
            continue;
        }
        its.iter().for_each(|entry| unwire(*epfd, entry));
        let kept: Vec<_> = its
            .into_iter()
            .filter(|entry| !entry.absent)
            .map(|entry| (entry.fd, entry.spent, epoll_event { events: entry.events, u64: entry.data }))
            .collect();
        inner.retain(|entry| !is_its(entry));
        for (fd, spent, event) in kept {
            let at = inner.push(fd, &new, tokens());
            let entry = inner.wake(at);
            entry.ask(event);
            // To the kernel it is one that asks for errors, and for these once.
            entry.spent = spent;
        }
        set.count(inner);
    }
    Some(new)
}
