// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queues messages for a session whose path has no room for now. A full path means *later*: the peer's program makes no
//! calls, or has more messages to read than it took yet (S-4).
//!
//! A message that carries no memory waits here. One that carries memory does not, since its descriptors would take up
//! numbers of the program's: whoever has one to send tries again in a later call.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use tombolo_domain::{Endpoint, Error};
use tombolo_layout::sockets::Message;

/// Largest number of messages that wait. A peer that has so many to read and reads none is not worth a session.
const WAITING: usize = 1024;
/// Time for which nothing is sent over a full path, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(64)];

/// Messages to one peer.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: VecDeque<Vec<u8>>,
    /// Time until which the path, which was full, is left alone, and how long that pause was.
    pause: Option<(Instant, Duration)>,
}

impl Outbox {
    /// Returns whether there is room for one more message.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.len() < WAITING
    }

    /// Returns whether all messages were sent.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns whether it makes sense to send now: the path was not found full a moment ago.
    pub(super) fn is_open(&self) -> bool {
        self.pause.is_none_or(|(until, _)| Instant::now() >= until)
    }

    /// Sends a message that carries no memory, now or later.
    ///
    /// # Errors
    /// Returns an error where there is no room here either, or the peer is gone.
    pub(super) fn send(&mut self, link: &mut dyn Endpoint, message: &Message) -> Result<(), Error> {
        if !self.has_room() {
            return Err(Error::Limit { what: "the room for messages that wait", remedy: "the peer reads none" });
        }
        self.waiting.push_back(message.encode());
        self.send_waiting(link)
    }

    /// Sends waiting messages, as far as there is room.
    ///
    /// # Errors
    /// Returns an error where the peer is gone.
    pub(super) fn send_waiting(&mut self, link: &mut dyn Endpoint) -> Result<(), Error> {
        while let Some(message) = self.waiting.pop_front() {
            match self.try_send(|| link.send(&message, None)) {
                Ok(true) => {}
                Ok(false) => {
                    self.waiting.push_front(message);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Calls `send` after all that waits, if there is room for it now. Returns whether the message was sent.
    ///
    /// # Errors
    /// As `send`.
    pub(super) fn try_send(&mut self, send: impl FnOnce() -> Result<(), Error>) -> Result<bool, Error> {
        if !self.is_open() {
            return Ok(false);
        }
        match send() {
            Ok(()) => self.pause = None,
            // No message of this part is too long for any path (D-8).
            Err(Error::Limit { .. }) => {
                let pause = self.pause.map_or(PAUSES[0], |(_, last)| PAUSES[1].min(2 * last));
                self.pause = Some((Instant::now() + pause, pause));
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }
}
