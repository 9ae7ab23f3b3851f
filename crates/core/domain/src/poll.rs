// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sleeps on a descriptor. Nothing else does.

use std::os::fd::BorrowedFd;

use crate::{Deadline, Error, Result};

/// Returns whether `fd` polls readable (data, a hang-up or an error: whatever makes a read return) before `deadline`.
///
/// # Blocking
/// Blocks until `fd` polls readable or `deadline` passes.
///
/// # Errors
/// The kernel's error for `poll`.
///
/// # Example
/// ```
/// use std::{os::fd::AsFd, time::Duration};
/// use tombolo_domain::{Deadline, wait_readable};
///
/// let (reader, writer) = std::io::pipe()?;
/// assert!(!wait_readable(reader.as_fd(), Deadline::after(Duration::from_millis(1)))?);
/// drop(writer);
/// assert!(wait_readable(reader.as_fd(), Deadline::NEVER)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn wait_readable(fd: BorrowedFd<'_>, deadline: Deadline) -> Result<bool> {
    tombolo_os::poll::wait_readable(fd, || deadline.remaining()).map_err(|error| Error::os("poll", error))
}
