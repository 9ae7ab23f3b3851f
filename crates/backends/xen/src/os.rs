// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Wraps system calls, with the errors of this crate.

use std::{os::fd::OwnedFd, thread};

use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
use rustix::event::epoll;
use tombolo_domain::{Error, Result, aside::ReservedFd};
pub(crate) use tombolo_os::{event::raise, lock::lock};

/// Makes an eventfd on which no call blocks.
pub(crate) fn eventfd() -> Result<ReservedFd> {
    reserve(tombolo_os::event::eventfd(0).map_err(|error| Error::os("eventfd", error))?)
}

/// Makes an epoll instance.
pub(crate) fn epoll_set() -> Result<ReservedFd> {
    reserve(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| Error::os("epoll_create", error))?)
}

/// Reserves a descriptor that is held for long in another program's process.
pub(crate) fn reserve(fd: OwnedFd) -> Result<ReservedFd> {
    ReservedFd::new(fd).map_err(|error| Error::os("fcntl", error))
}

/// Starts a thread that receives none of the program's signals: the program's handlers do not expect this thread.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let mut before = SigSet::empty();
    let failed = |error: nix::errno::Errno| Error::os("pthread_sigmask", std::io::Error::from(error));
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before)).map_err(failed)?;
    let begun = thread::Builder::new().name(name.into()).spawn(work);
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None).map_err(failed)?;
    begun.map(drop).map_err(|error| Error::os("clone", error))
}

/// Returns random bytes for a name or a number that nobody may guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    tombolo_os::random::bytes().map_err(|error| Error::os("getrandom", error))
}
