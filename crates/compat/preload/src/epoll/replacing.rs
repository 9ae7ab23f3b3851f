// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gives the registrations of a connection that has left its memory to the one that takes its place (ADR 0089).

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

/// Replaces `old` in these sets by the result of [`Connection::begin_anew`], if the sets and `others` are all that hold
/// `old`. Each set is in `sets` once. Returns `None` if somebody else holds `old`, or if a registration cannot be
/// changed. The caller ensures that nobody finds `old` elsewhere meanwhile.
pub(crate) fn replace(sets: &[(RawFd, Arc<Set>)], old: &Arc<Connection>, others: usize) -> Option<Arc<Connection>> {
    let is_its = |entry: &Entry| Arc::ptr_eq(&entry.connection, old);
    let mut locked: Vec<_> = sets.iter().map(|(epfd, set)| (*epfd, set, set.lock())).collect();
    let all = || locked.iter().flat_map(|(_, _, inner)| inner.all()).filter(|entry| is_its(entry));
    let is_fixed = all().any(|entry| entry.orphan || entry.is_exclusive());
    if is_fixed || Arc::strong_count(old) != all().count() + others {
        return None;
    }
    // ORDER Acquire: pairs with the Release of the thread that dropped the last other reference. What that thread
    // counted in its call is seen here.
    fence(Ordering::Acquire);
    let new = Arc::new(old.begin_anew());
    for (epfd, set, inner) in &mut locked {
        // The kernel gets them as the program has them, each with what is ready now. A thread that was told of one by
        // its token, and has not looked yet, finds that token nowhere.
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
            // The kernel has it as one that asks for errors, and for these once.
            entry.spent = spent;
        }
        set.count(inner);
    }
    Some(new)
}
