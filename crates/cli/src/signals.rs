// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Catches Ctrl-C and similar signals where a verb waits, so that the verb can clean up and then die of the signal.

use std::{
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag, low_level,
};

use crate::failure::{Failure, Os, Result};

/// Ctrl-C.
pub const INTERRUPT: i32 = SIGINT;
/// Signals by which people and service managers end a program.
const ENDING: [i32; 3] = [SIGHUP, SIGINT, SIGTERM];

/// Holds the ending signals back from its creation on.
#[derive(Debug)]
pub struct Signals {
    caught: Arc<AtomicUsize>,
    let_through: Arc<AtomicBool>,
    wake: UnixStream,
}

impl Signals {
    pub fn hold() -> Result<Self> {
        let (wake, theirs) = UnixStream::pair().os("socketpair")?;
        let (caught, let_through) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        for signal in ENDING {
            flag::register_conditional_default(signal, Arc::clone(&let_through)).os("sigaction")?;
            flag::register_usize(signal, Arc::clone(&caught), signal as usize).os("sigaction")?;
            low_level::pipe::register(signal, theirs.try_clone().os("dup")?).os("sigaction")?;
        }
        Ok(Self { caught, let_through, wake })
    }

    /// Returns the signal that came, if one did.
    pub fn caught(&self) -> Option<i32> {
        match self.caught.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    /// Fails if a signal came.
    pub fn check(&self) -> Result<()> {
        self.caught().map_or(Ok(()), |signal| Err(Failure::Interrupted { signal, after: String::new() }))
    }

    /// Waits until a signal comes, at most `time`. Fails if one came.
    pub fn check_within(&self, time: Duration) -> Result<()> {
        await_any(&[self.fd()], Some(time))?;
        self.check()
    }

    /// Returns the descriptor, which polls readable once a signal came.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Lets signals end the program at once from now on: there is nothing left to clean up.
    pub fn let_through(&self) -> Result<()> {
        self.let_through.store(true, Ordering::SeqCst);
        self.check()
    }
}

/// Ends this process by `signal`, so that its parent can see why.
pub fn die_of(signal: i32) {
    let _ = low_level::emulate_default_handler(signal);
}

/// Waits until one of `fds` is readable or hung up, at most `time`. Returns which are. An interrupted wait continues.
pub fn await_any(fds: &[BorrowedFd<'_>], time: Option<Duration>) -> Result<Vec<bool>> {
    let deadline = time.map(|time| std::time::Instant::now() + time);
    let mut polled: Vec<_> = fds.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(std::time::Instant::now()));
        match poll(&mut polled, left.and_then(|left| left.try_into().ok()).as_ref()) {
            Ok(_) => return Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Ok(Err(error).os("poll")?),
        }
    }
}
