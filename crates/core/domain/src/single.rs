// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell for one of many connections that share a link. Only its own waiter watches it, so no other is woken.
//!
//! It works as L-7 specifies, for the same reasons: the notifier reads an eventfd that is full, which never blocks. The
//! waiter watches it for edges of writability and never reads it.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use tombolo_os::{
    event::{full_eventfd, raise, raise_full},
    reserved::ReservedFd,
};

use crate::{Doorbell, Slot};

/// A doorbell on which this endpoint waits.
#[derive(Debug)]
pub struct SingleDoorbell {
    event: ReservedFd,
    is_shared: bool,
    /// Eventfd that is raised in place of `event`, if that is not an eventfd but watches one.
    own: Option<ReservedFd>,
}

/// A doorbell on which the peer waits.
#[derive(Debug)]
pub struct SingleNotifier(Way);

#[derive(Debug)]
enum Way {
    /// A full eventfd that the peer has sent.
    Event(ReservedFd),
    /// The doorbell of the session, for all connections that go over it (S-17).
    Session(Arc<dyn Doorbell>),
}

impl SingleDoorbell {
    /// Makes a doorbell without a notification.
    ///
    /// # Errors
    /// If there is no descriptor for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: ReservedFd::new(full_eventfd()?)?, is_shared: false, own: None })
    }

    /// Makes a doorbell that is notified with those of all connections of a session: a copy of the eventfd that the
    /// session's doorbell raises (S-17). No waiter ever reads it, so none takes a notification from another.
    ///
    /// # Errors
    /// If there is no descriptor number to spare.
    pub fn of_session(event: OwnedFd) -> io::Result<Self> {
        Ok(Self { event: ReservedFd::new(event)?, is_shared: true, own: None })
    }

    /// Makes the same where the session's doorbell raises something other than an eventfd. `watched` polls readable
    /// *anew* with every notification and when the eventfd `own` is raised, and nobody takes anything from it.
    ///
    /// # Errors
    /// If there is no descriptor number to spare.
    pub fn of_watched_session(watched: OwnedFd, own: OwnedFd) -> io::Result<Self> {
        Ok(Self { event: ReservedFd::new(watched)?, is_shared: true, own: Some(ReservedFd::new(own)?) })
    }

    /// Returns whether it is notified for other connections as well. If so, it is watched for edges of `EPOLLIN`,
    /// otherwise of `EPOLLOUT`.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Wakes all who wait on it, as the peer would.
    pub fn notify(&self) {
        if self.is_shared {
            raise(self.own.as_ref().unwrap_or(&self.event));
        } else {
            raise_full(&self.event);
        }
    }
}

/// The descriptor to watch with `EPOLLET`, as [`SingleDoorbell::is_shared`] describes, and never to read or write.
impl AsFd for SingleDoorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl SingleNotifier {
    /// Makes the notifier of an eventfd that the peer has sent.
    ///
    /// # Errors
    /// If there is no descriptor number to spare.
    pub fn new(event: OwnedFd) -> io::Result<Self> {
        Ok(Self(Way::Event(ReservedFd::new(event)?)))
    }

    /// Makes the notifier of a session whose path carries no descriptors (S-17).
    #[must_use]
    pub fn of_session(doorbell: Arc<dyn Doorbell>) -> Self {
        Self(Way::Session(doorbell))
    }

    /// Wakes all who wait on it. Never blocks.
    pub fn notify(&self) {
        match &self.0 {
            Way::Event(event) => raise_full(event),
            Way::Session(doorbell) => doorbell.notify(Slot::Data),
        }
    }
}
