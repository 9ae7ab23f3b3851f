// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What Linux is asked for, with the errors of this crate.

use std::os::fd::OwnedFd;

use tombolo_domain::{Error, Result};
pub(crate) use tombolo_os::{event::raise, lock::lock};

/// An eventfd that no call blocks on.
pub(crate) fn eventfd() -> Result<OwnedFd> {
    tombolo_os::event::eventfd(0).map_err(|error| Error::os("eventfd", error))
}

/// Random bytes for a name or an id that nobody is to guess.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    tombolo_os::random::bytes().map_err(|error| Error::os("getrandom", error))
}
