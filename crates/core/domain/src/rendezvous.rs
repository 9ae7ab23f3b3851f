// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How two endpoints meet.

use std::{any::Any, fmt, os::fd::BorrowedFd, time::Duration};

use crate::{Deadline, Endpoint, PeerFinder, Result};

/// One way for domains to find each other: a folder of sockets, XenStore, a broker.
pub trait Rendezvous: Send + Sync + std::fmt::Debug {
    /// The part of an address before the colon.
    fn scheme(&self) -> &'static str;

    /// Begins to listen for the peers of `service`. Nothing is left behind when the listener is dropped.
    ///
    /// # Errors
    /// [`InUse`](crate::Error::InUse), [`Denied`](crate::Error::Denied), [`BadService`](crate::Error::BadService).
    fn listen(&self, service: &str) -> Result<Box<dyn Listener>>;

    /// Reaches the listener of `service`. Where nobody listens yet, fails at once with
    /// [`NotFound`](crate::Error::NotFound); waiting for a listener is the channel's business.
    ///
    /// # Blocking
    /// Until the listener's backlog has room, at most until `deadline`.
    ///
    /// # Errors
    /// [`NotFound`](crate::Error::NotFound), [`Denied`](crate::Error::Denied), [`TimedOut`](crate::Error::TimedOut).
    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>>;

    /// As [`connect`](Self::connect), but need not wait for the listener's side where what is sent meanwhile reaches it all the
    /// same. Why nobody is reached is then what [`Endpoint::recv`] fails with first.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn connect_early(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        self.connect(service, deadline)
    }

    /// Begins to reach the listener of `service` for one who may not wait at all, as within a call of a program that knows
    /// nothing of this. What is sent before the listener's side is there reaches it, or is told of as for [`connect_early`](Self::connect_early).
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`TimedOut`](crate::Error::TimedOut) where a later try may do.
    fn begin_connect(&self, service: &str) -> Result<Box<dyn Connecting>> {
        Ok(Box::new(Connected(Some(self.connect(service, Deadline::after(Duration::ZERO))?))))
    }

    /// How ends in other kernels are found (S-18), for a process that can be reached at `service`. None where this backend joins
    /// processes of one kernel.
    fn peer_finder(&self, _service: &str) -> Option<Box<dyn PeerFinder>> {
        None
    }

    /// Holds all that this process's threads share in this backend, until the result is dropped: for who makes a copy of the
    /// process, in which no other thread is left that could let go of a lock. Whoever holds it makes no other call here.
    fn hold_for_fork(&self) -> Held {
        Held::default()
    }
}

/// What [`Rendezvous::hold_for_fork`] holds.
#[derive(Default)]
pub struct Held(Option<Box<dyn Any>>);

impl Held {
    /// Holds `locks`, until it is dropped.
    pub fn new(locks: impl Any) -> Self {
        Self(Some(Box::new(locks)))
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.0.is_some()).finish()
    }
}

/// One who is on the way to a listener. To drop it is to give up.
pub trait Connecting: Send + fmt::Debug {
    /// The endpoint, or `None` while it is not there. Never blocks. After an endpoint or an error there is nothing more.
    ///
    /// # Errors
    /// As [`Rendezvous::begin_connect`].
    fn finish_connect(&mut self) -> Result<Option<Box<dyn Endpoint>>>;
}

/// Who has arrived already.
#[derive(Debug)]
struct Connected(Option<Box<dyn Endpoint>>);

impl Connecting for Connected {
    fn finish_connect(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        Ok(self.0.take())
    }
}

/// One who waits for peers.
pub trait Listener: Send + std::fmt::Debug {
    /// The next peer that knocked, or `None` while there is none. Never blocks, whatever peers do or fail to do.
    ///
    /// # Errors
    /// [`Limit`](crate::Error::Limit) where a peer knocked and there is no room for it: it stays knocking, or was turned
    /// away. [`Crowded`](crate::Error::Crowded) where nobody is let in for now: all stay knocking, and to let go of
    /// others makes no room.
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>>;

    /// A descriptor that polls readable when [`accept`](Self::accept) has something to say.
    fn fd(&self) -> BorrowedFd<'_>;
}
