// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accepts peers, so that none of them can keep another waiting (C-7).

use std::{
    marker::PhantomData,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, epoll},
    io::Errno,
};
use tombolo_domain::{Deadline, Endpoint, Error as DomainError, Listener as DomainListener, Received, wait_readable};

use crate::{
    Channel, Error, Options, Result,
    connect::{answer, poll_until},
};

/// Largest number of peers that have connected and have not sent their greeting yet.
const HALF_OPEN_MOST: usize = 64;
/// Largest numbers of descriptors that it takes to accept a peer, and to answer it.
const TO_ACCEPT: usize = 1;
const TO_ANSWER: usize = 12;
/// Time for which the listener is not polled while no peer can be let in.
const CROWDED: Duration = Duration::from_millis(20);

/// Accepts peers at an address and makes channels of kind `C` with them: [`Stream`](crate::Stream) or
/// [`Messages`](crate::Messages). Dropping it ends listening; accepted channels stay open.
///
/// # Example
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/web", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let client = std::thread::spawn(move || tombolo::connect(&address));
/// // let mut listener = tombolo::listen("local:web")?;
/// let stream = listener.accept()?;
/// println!("{} connected", stream.peer().domain);
/// assert!(listener.try_accept()?.is_none()); // nobody else for now
/// # drop(client.join());
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Debug)]
pub struct Listener<C> {
    listener: Box<dyn DomainListener>,
    /// Peers that have not greeted yet, in the order in which they connected.
    half_open: Vec<(Box<dyn Endpoint>, Deadline)>,
    /// An epoll set of the listener and of all half-open peers.
    set: OwnedFd,
    options: Options,
    kind: PhantomData<fn() -> C>,
}

impl<C: Channel> Listener<C> {
    pub(crate) fn new(listener: Box<dyn DomainListener>, options: Options) -> Result<Self> {
        let set =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| DomainError::os("epoll_create1", error))?;
        watch(&set, listener.fd())?;
        Ok(Self { listener, half_open: Vec::new(), set, options, kind: PhantomData })
    }

    /// Accepts the next peer and returns the channel with it.
    ///
    /// A peer that sends nothing, too little or nonsense is dropped, after the [handshake's
    /// timeout](Options::handshake_timeout) at the latest, and keeps no other peer waiting.
    ///
    /// # Blocking
    /// Blocks until a peer has connected and agreed.
    ///
    /// # Errors
    /// Only conditions that make listening impossible; never a peer's behaviour. Where this process has no descriptor
    /// to spare ([`BackendError::Limit`](DomainError::Limit)), a peer was turned away: call again.
    pub fn accept(&mut self) -> Result<C> {
        self.accept_until(Deadline::NEVER)
    }

    /// Accepts the next peer like [`accept`](Self::accept), waiting at most until `deadline`.
    ///
    /// # Blocking
    /// Blocks until a peer has connected and agreed, at most until `deadline`.
    ///
    /// # Errors
    /// [`Error::TimedOut`], and those of [`accept`](Self::accept).
    pub fn accept_until(&mut self, deadline: Deadline) -> Result<C> {
        loop {
            match self.try_accept() {
                Ok(Some(channel)) => return Ok(channel),
                Ok(None) => self.wait(deadline, Deadline::NEVER)?,
                Err(Error::Domain(DomainError::Crowded(_))) => {
                    // Peers that connect meanwhile would wake this wait again and again.
                    let _ = epoll::delete(&self.set, self.listener.fd());
                    let waited = self.wait(deadline, Deadline::after(CROWDED));
                    watch(&self.set, self.listener.fd())?;
                    waited?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Accepts a peer that has connected already; returns `None` if there is none. Never blocks.
    ///
    /// # Errors
    /// Those of [`accept`](Self::accept), and [`BackendError::Crowded`](DomainError::Crowded) where no peer can be let
    /// in for now. Peers that have connected already are still served.
    pub fn try_accept(&mut self) -> Result<Option<C>> {
        // Peers that have connected already come first, so that new ones cannot keep them waiting.
        let mut index = 0;
        while index < self.half_open.len() {
            let (link, deadline) = &mut self.half_open[index];
            match link.recv(self.options.first_map_limit()).transpose() {
                None if !deadline.expired() => index += 1,
                None => drop(self.dismiss(index)),
                Some(received) => {
                    let link = self.dismiss(index);
                    self.make_room(TO_ANSWER);
                    if let Some(channel) = self.answer(link, received) {
                        return Ok(Some(channel));
                    }
                }
            }
        }
        for _ in 0..HALF_OPEN_MOST {
            self.make_room(TO_ACCEPT);
            let mut link = match self.listener.accept() {
                Ok(Some(link)) => link,
                Ok(None) => return Ok(None),
                Err(DomainError::Limit { .. }) if !self.half_open.is_empty() => {
                    drop(self.dismiss(0));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            if !self.half_open.is_empty() && matches!(wait_readable(link.fd(), Deadline::NOW), Ok(true)) {
                self.make_room(TO_ANSWER);
            }
            match link.recv(self.options.first_map_limit()).transpose() {
                Some(received) => {
                    if let Some(channel) = self.answer(link, received) {
                        return Ok(Some(channel));
                    }
                }
                None => self.remember(link)?,
            }
        }
        // There may be more peers at the listener, and an edge-triggered poll of this set needs an edge. Only a
        // descriptor that is new to a set gives one.
        let _ = epoll::delete(&self.set, self.listener.fd());
        watch(&self.set, self.listener.fd())?;
        Ok(None)
    }

    /// Answers a peer's greeting. A peer that does not agree gets a refusal, and the next one has its turn.
    fn answer(&self, link: Box<dyn Endpoint>, received: std::result::Result<Received, DomainError>) -> Option<C> {
        answer(link, received, C::MESSAGES, &self.options).ok().map(C::from_halves)
    }

    /// Keeps a peer until it greets. If there are too many such peers, the one that has been silent for longest is
    /// dropped.
    fn remember(&mut self, link: Box<dyn Endpoint>) -> Result<()> {
        if self.half_open.len() == HALF_OPEN_MOST {
            drop(self.dismiss(0));
        }
        watch(&self.set, link.fd())?;
        self.half_open.push((link, Deadline::after(self.options.handshake_timeout)));
        Ok(())
    }

    /// Drops silent peers, the longest silent first, until `descriptors` are free, so that peers that greet do not lack
    /// those that silent peers hold.
    fn make_room(&mut self, descriptors: usize) {
        while !self.half_open.is_empty() && !self.has_descriptors(descriptors) {
            drop(self.dismiss(0));
        }
    }

    /// Returns whether this process may open `count` more files.
    fn has_descriptors(&self, count: usize) -> bool {
        let spare: Vec<_> = (0..count).map(|_| rustix::io::fcntl_dupfd_cloexec(&self.set, 0)).collect();
        !spare.iter().any(|one| matches!(one, Err(Errno::MFILE | Errno::NFILE)))
    }

    fn dismiss(&mut self, index: usize) -> Box<dyn Endpoint> {
        let (link, _) = self.half_open.remove(index);
        // Only this set watches the descriptor, so this cannot fail.
        let _ = epoll::delete(&self.set, link.fd());
        link
    }

    /// Waits until there is something to do, `deadline` passes (an error) or it is time to `look_again`.
    fn wait(&self, deadline: Deadline, look_again: Deadline) -> Result<()> {
        let first = self.half_open.iter().fold(deadline.min(look_again), |first, (_, theirs)| first.min(*theirs));
        match poll_until(&mut [PollFd::new(&self.set, PollFlags::IN)], first) {
            Err(Error::TimedOut) if !deadline.expired() => Ok(()),
            other => other,
        }
    }
}

fn watch(set: &OwnedFd, fd: BorrowedFd<'_>) -> Result<()> {
    epoll::add(set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
        .map_err(|error| DomainError::os("epoll_ctl", error).into())
}

/// Polls readable when [`try_accept`](Listener::try_accept) may do something; works with poll and epoll.
impl<C> AsFd for Listener<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
