// SPDX-License-Identifier: Apache-2.0 OR MIT
//! C-7. Waiting for peers, none of whom can keep another waiting.

use std::{marker::PhantomData, os::fd::BorrowedFd, time::Duration};

use rustix::event::{PollFd, PollFlags};
use tombolo_domain::{Deadline, Link, Listener as DomainListener};

use crate::{
    Channel, Error, Options, Result,
    connect::{answer, poll_until},
};

/// Peers that knocked and have not introduced themselves: more are left waiting outside.
const HALF_OPEN_MOST: usize = 64;
/// How long to leave peers outside after a limit of this process was hit.
const BREATHER: Duration = Duration::from_millis(10);

/// One who waits for peers and makes channels of kind `C` with them.
#[derive(Debug)]
pub struct Listener<C> {
    door: Box<dyn DomainListener>,
    half_open: Vec<(Box<dyn Link>, Deadline)>,
    options: Options,
    kind: PhantomData<fn() -> C>,
}

impl<C: Channel> Listener<C> {
    pub(crate) fn new(door: Box<dyn DomainListener>, options: Options) -> Self {
        Self { door, half_open: Vec::new(), options, kind: PhantomData }
    }

    /// The next channel with a peer that knocked and agreed.
    ///
    /// A peer that says nothing, too little or nonsense is dropped, after the
    /// [handshake's timeout](Options::handshake_timeout) at the latest, and keeps nobody else waiting.
    ///
    /// # Blocking
    /// Until there is one.
    ///
    /// # Errors
    /// What makes listening impossible; never what a peer did.
    pub fn accept(&mut self) -> Result<C> {
        self.accept_until(Deadline::NEVER)
    }

    /// As [`accept`](Self::accept), at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`], and as [`accept`](Self::accept).
    pub fn accept_until(&mut self, deadline: Deadline) -> Result<C> {
        loop {
            if let Some(channel) = self.try_accept()? {
                return Ok(channel);
            }
            self.wait(deadline)?;
        }
    }

    /// The next channel if there is one now; never blocks.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn try_accept(&mut self) -> Result<Option<C>> {
        while self.half_open.len() < HALF_OPEN_MOST {
            match self.door.accept() {
                Ok(Some(link)) => self.half_open.push((link, Deadline::after(self.options.handshake_timeout))),
                Ok(None) => break,
                Err(tombolo_domain::Error::Limit { .. }) if !self.half_open.is_empty() => break,
                Err(error) => return Err(error.into()),
            }
        }
        let mut index = 0;
        while index < self.half_open.len() {
            let (link, deadline) = &mut self.half_open[index];
            match link.recv(self.options.map_limit) {
                Ok(Some(received)) => {
                    let (link, _) = self.half_open.swap_remove(index);
                    // A peer that does not agree has been told; the next one may.
                    if let Ok(parts) = answer(link, received, C::MESSAGES, &self.options) {
                        return Ok(Some(C::from_halves(parts)));
                    }
                }
                Ok(None) if !deadline.expired() => index += 1,
                Ok(None) | Err(_) => drop(self.half_open.swap_remove(index)),
            }
        }
        Ok(None)
    }

    fn wait(&self, deadline: Deadline) -> Result<()> {
        let full = self.half_open.len() >= HALF_OPEN_MOST;
        let door = self.door.fd();
        let links: Vec<BorrowedFd<'_>> = self.half_open.iter().map(|(link, _)| link.fd()).collect();
        let mut fds: Vec<PollFd<'_>> = links.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        if !full {
            fds.push(PollFd::new(&door, PollFlags::IN));
        }
        let first = self.half_open.iter().fold(deadline, |first, (_, theirs)| first.min(*theirs));
        match poll_until(&mut fds, first) {
            Err(Error::TimedOut) if !deadline.expired() => Ok(()),
            other => other,
        }
    }

    /// A descriptor that polls readable when a peer knocks, for poll and epoll. Peers in the middle of their handshake
    /// have descriptors of their own, so after it polled readable use [`accept_until`](Self::accept_until) with a short
    /// deadline rather than [`try_accept`](Self::try_accept).
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.door.fd()
    }
}
