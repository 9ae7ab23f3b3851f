// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The meeting of two endpoints.

use std::{any::Any, fmt, os::fd::BorrowedFd, time::Duration};

use crate::{Deadline, Endpoint, PeerFinder, Result};

/// One way for domains to find each other: a folder of sockets, XenStore, a broker.
pub trait Rendezvous: Send + Sync + std::fmt::Debug {
    /// Returns the part of an address before the colon.
    fn scheme(&self) -> &'static str;

    /// Begins to listen for the peers of `service`. Dropping the listener leaves nothing behind.
    ///
    /// # Errors
    /// [`InUse`](crate::Error::InUse), [`Denied`](crate::Error::Denied), [`BadService`](crate::Error::BadService).
    fn listen(&self, service: &str) -> Result<Box<dyn Listener>>;

    /// Connects to the listener of `service`. Where nobody listens yet, fails at once with
    /// [`NotFound`](crate::Error::NotFound); the channel waits for listeners.
    ///
    /// # Blocking
    /// Blocks until the listener's backlog has room, at most until `deadline`.
    ///
    /// # Errors
    /// [`NotFound`](crate::Error::NotFound), [`Denied`](crate::Error::Denied), [`TimedOut`](crate::Error::TimedOut).
    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>>;

    /// Connects like [`connect`](Self::connect), but need not wait for the listener's side if data sent meanwhile
    /// reaches it anyway. If no listener is reached, the first call of [`Endpoint::recv`] fails with the reason.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    fn connect_early(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        self.connect(service, deadline)
    }

    /// Begins to connect to the listener of `service` without waiting at all, for example within a call of a program
    /// that is not aware of this. Data sent before the listener's side is there reaches it, or is reported as for
    /// [`connect_early`](Self::connect_early).
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect); [`TimedOut`](crate::Error::TimedOut) where a later attempt may succeed.
    fn begin_connect(&self, service: &str) -> Result<Box<dyn Connecting>> {
        Ok(Box::new(Connected(Some(self.connect(service, Deadline::after(Duration::ZERO))?))))
    }

    /// Returns the finder of endpoints in other kernels (S-18), for a process that can be reached at `service`. Returns
    /// `None` if this backend joins processes of one kernel.
    fn peer_finder(&self, _service: &str) -> Option<Box<dyn PeerFinder>> {
        None
    }

    /// Holds everything that this process's threads share in this backend, until the result is dropped. For a caller
    /// that copies the process: in the copy no other thread is left that could release a lock. The holder makes no
    /// other call here.
    fn hold_for_fork(&self) -> Held {
        Held::default()
    }
}

/// The locks that [`Rendezvous::hold_for_fork`] holds.
#[derive(Default)]
pub struct Held(Option<Box<dyn Any>>);

impl Held {
    /// Holds `locks` until this is dropped.
    pub fn new(locks: impl Any) -> Self {
        Self(Some(Box::new(locks)))
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.0.is_some()).finish()
    }
}

/// A connection to a listener that is being made. Dropping it gives up.
pub trait Connecting: Send + fmt::Debug {
    /// Returns the endpoint, or `None` while it is not there. Never blocks. After an endpoint or an error there is
    /// nothing more.
    ///
    /// # Errors
    /// Those of [`Rendezvous::begin_connect`].
    fn finish_connect(&mut self) -> Result<Option<Box<dyn Endpoint>>>;
}

/// A connection that was made already.
#[derive(Debug)]
struct Connected(Option<Box<dyn Endpoint>>);

impl Connecting for Connected {
    fn finish_connect(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        Ok(self.0.take())
    }
}

/// A listener that waits for peers.
pub trait Listener: Send + std::fmt::Debug {
    /// Returns the next peer that has connected, or `None` while there is none. Never blocks, whatever peers do or fail
    /// to do.
    ///
    /// # Errors
    /// [`Limit`](crate::Error::Limit) where a peer connected and there is no room for it: it keeps waiting, or was
    /// turned away. [`Crowded`](crate::Error::Crowded) where nobody is let in for now: all keep waiting, and dropping
    /// other peers makes no room.
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>>;

    /// Returns a descriptor that polls readable when [`accept`](Self::accept) has something to return.
    fn fd(&self) -> BorrowedFd<'_>;
}
