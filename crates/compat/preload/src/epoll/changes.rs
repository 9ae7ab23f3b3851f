// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out `epoll_ctl`, by which the program changes a set.

use std::{
    os::fd::RawFd,
    sync::{Arc, atomic::Ordering},
};

use libc::epoll_event;
use rustix::io::Errno;
use tombolo_sockets::{
    Process, Reason,
    connection::{Connection, Stage},
};

use super::{
    Set,
    entry::EXCLUSIVE,
    registry::Registry,
    tokens,
    wiring::{add_doorbell, add_own_doorbell, add_path, token},
};
use crate::{errno, handback, kernel};

/// The arguments of `epoll_ctl`.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub epfd: RawFd,
    pub operation: i32,
    pub fd: RawFd,
    pub event: Option<epoll_event>,
}

/// Carries out `epoll_ctl` for a socket that is not connected, and keeps the request for the connection that it may
/// become. `real` is the program's call itself.
pub(crate) fn register(set: &Set, request: Request, real: impl FnOnce() -> i32) -> i32 {
    let mut inner = set.lock();
    let answer = real();
    if answer == 0 {
        inner.register(request.fd, request.event.filter(|_| request.operation != libc::EPOLL_CTL_DEL));
    }
    answer
}

/// Carries out `epoll_ctl` on a watched set, for a watched descriptor. `real` is the program's call itself.
pub(crate) fn change(
    process: &Process,
    set: &Set,
    connection: &Arc<Connection>,
    request: Request,
    real: impl FnOnce() -> i32,
) -> i32 {
    let Request { operation, fd, event, .. } = request;
    if connection.stage() == Stage::Plain {
        return real();
    }
    if connection.stage() == Stage::Joined
        && operation == libc::EPOLL_CTL_ADD
        && event.is_some_and(|event| event.events & EXCLUSIVE != 0)
    {
        // The kernel lets nobody change such a registration, so it is left to the program. One that was taken out is
        // still in the kernel.
        let mut inner = set.lock();
        let found = inner.find(fd, connection);
        if found.is_some_and(|at| !inner.all()[at].absent) {
            return real(); // It is there already, and stays as it is.
        }
        if let Some(at) = found {
            let none = epoll_event { events: 0, u64: 0 };
            let _ = errno::kept(|| kernel::epoll_ctl(request.epfd, libc::EPOLL_CTL_DEL, fd, none));
            inner.remove(at);
            set.count(&inner);
        }
        drop(inner);
        errno::kept(|| handback::use_kernel(process, fd, connection));
        return real();
    }
    let mut guard = set.lock();
    let inner = &mut *guard;
    let found = inner.find(fd, connection);
    // One registration may be in the kernel under its token while another of the same connection is not. Wiring that
    // one is tried again.
    let wired = connection.wiring.is_wired() || found.is_some_and(|at| inner.all()[at].wired);
    if connection.stage() == Stage::Joined && wired {
        if found.is_none() && operation != libc::EPOLL_CTL_ADD {
            return real(); // There is no registration, or it is the program's own.
        }
        let answer = change_joined(process, set, inner, connection, request, found);
        drop(guard);
        if answer.is_ok() && operation != libc::EPOLL_CTL_DEL {
            set.changed();
        }
        return errno::answer(answer.map(|()| 0)) as i32;
    }
    let answer = real();
    if answer == 0 {
        match (operation, found, event) {
            (libc::EPOLL_CTL_DEL, Some(at), _) => inner.remove(at),
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _, Some(event)) => {
                let at = found.unwrap_or_else(|| inner.push(fd, connection, tokens()));
                inner.wake(at).ask(event);
            }
            _ => {}
        }
        set.entries.store(inner.all().len(), Ordering::SeqCst);
    }
    answer
}

fn change_joined(
    process: &Process,
    set: &Set,
    inner: &mut Registry,
    connection: &Arc<Connection>,
    request: Request,
    found: Option<usize>,
) -> Result<(), Errno> {
    let Request { epfd, operation, fd, event } = request;
    let present = found.filter(|at| !inner.all()[*at].absent);
    match (operation, present, event) {
        (libc::EPOLL_CTL_DEL, Some(at), _) => {
            inner.wake(at).absent = true;
            Ok(())
        }
        (libc::EPOLL_CTL_ADD, Some(_), _) => Err(Errno::EXIST),
        (libc::EPOLL_CTL_ADD, None, Some(event)) => {
            if !add_own_doorbell(epfd, set) {
                process.leaves(connection, Reason::Usage);
                return Err(Errno::NOMEM);
            }
            if let Some(at) = found {
                inner.wake(at).ask(event);
                return Ok(());
            }
            let at = inner.push(fd, connection, tokens());
            let (entries, paths) = inner.all_mut();
            let entry = &entries[at];
            let added = kernel::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, token(entry));
            let added = added.and_then(|()| {
                add_doorbell(epfd, entry).and_then(|()| add_path(epfd, entry, paths)).inspect_err(|_| {
                    let _ = kernel::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, epoll_event { events: 0, u64: 0 });
                })
            });
            match added {
                Ok(()) => {
                    let entry = inner.wake(at);
                    entry.ask(event);
                    entry.wire(false);
                }
                Err(_) => inner.remove(at),
            }
            set.count(inner);
            added
        }
        (libc::EPOLL_CTL_MOD, Some(at), Some(event)) => {
            if event.events & EXCLUSIVE != 0 || inner.all()[at].is_exclusive() {
                return Err(Errno::INVAL);
            }
            inner.wake(at).ask(event);
            Ok(())
        }
        (libc::EPOLL_CTL_DEL | libc::EPOLL_CTL_MOD, None, _) => Err(Errno::NOENT),
        (_, _, None) => Err(Errno::FAULT),
        _ => Err(Errno::INVAL),
    }
}
