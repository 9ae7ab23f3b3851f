// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two directions of a link. Neither copies a frame: the kernel writes into this end's ring and reads out of the
//! peer's. Only the first 26 bytes of what comes are copied, to be checked.

use std::{io, os::fd::AsFd, time::Duration};

use rustix::io::Errno;
use tombolo::{Deadline, Ending, Error as ChannelError, MessageReceiver, MessageSender, Peeked};

use crate::{
    counters::Direction,
    flag::{Flag, wait_any},
    frame::{HEAD, HEADER, Limits},
    hello::FRAME_MOST,
    tap::Tap,
};

/// Room that a frame may need in a message.
pub const RESERVED: usize = HEADER + FRAME_MOST as usize;
/// More frames than a ring of the usual size holds.
const LEFT_MOST: u32 = 1 << 16;
/// How long the receiving thread sleeps before it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(250);

/// Why a link ended.
#[derive(Debug)]
pub enum End {
    /// It was told to.
    Stopped,
    /// The peer's side ended.
    Peer(Ending),
    /// The channel failed.
    Channel(ChannelError),
    /// The interface failed, or is gone.
    Interface(io::Error),
    /// It was changed, so the peer must be told anew.
    Changed(&'static str),
    /// The kernel's driver cannot use the peer's ring.
    Unfit,
    /// The kernel's driver found the peer's ring corrupt, by this clause R-….
    Corrupt(u32),
}

impl End {
    /// Whether the peer's side ended: what it has sent before is still to be had.
    #[must_use]
    pub fn is_peers(&self) -> bool {
        matches!(self, Self::Peer(_) | Self::Channel(ChannelError::Closed | ChannelError::PeerGone))
    }

    /// How the peer's side really ended: who sends, or looks at the peer's life, may have been the first to find that it did.
    #[must_use]
    pub fn judged_by(self, receiver: &mut MessageReceiver) -> Self {
        if !self.is_peers() {
            return self;
        }
        // What is still in the ring has nowhere to go. A peer that goes on writing is not waited for.
        for _ in 0..LEFT_MOST {
            if !matches!(receiver.peek(), Ok(Some(_))) || receiver.consume().is_err() {
                break;
            }
        }
        match (receiver.wait_until(Deadline::NOW), receiver.ending()) {
            (Ok(false), Some(ending)) => Self::Peer(ending),
            _ => self,
        }
    }
}

impl From<ChannelError> for End {
    fn from(error: ChannelError) -> Self {
        Self::Channel(error)
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Interface(error)
    }
}

/// What both directions of a link work with.
#[derive(Clone, Copy, Debug)]
pub struct Pump<'a> {
    /// The interface.
    pub tap: &'a Tap,
    /// Raised when the link is to end.
    pub over: &'a Flag,
}

impl Pump<'_> {
    /// Sends what comes from the interface until the link is over (N-9). A full ring makes it wait: nothing is dropped.
    pub fn send(self, sender: &mut MessageSender, limits: &Limits, counters: &Direction) -> End {
        loop {
            match self.send_one(sender, limits, counters) {
                Ok(()) if self.over.is_raised() => return End::Stopped,
                Ok(()) => {}
                Err(end) => return end,
            }
        }
    }

    fn send_one(self, sender: &mut MessageSender, limits: &Limits, counters: &Direction) -> Result<(), End> {
        let Some((first, second)) = sender.try_reserve(RESERVED)? else {
            counters.full.add(1);
            // Who takes frames and rings for none of them stops what is for itself. It cannot delay this end's end.
            return Ok(wait_any(&[sender.poll_fd()?, self.over.as_fd()], None)?);
        };
        // The driver leaves the last field as it was.
        for byte in first.iter_mut().chain(&mut *second).take(HEADER) {
            *byte = 0;
        }
        let Some(len) = self.tap.read(first, second)? else {
            // Both are the kernel's to tell of, whoever the peer is.
            return Ok(wait_any(&[self.tap.as_fd(), self.over.as_fd()], None)?);
        };
        let mut head = [0; HEAD];
        for (to, from) in head.iter_mut().zip(first.iter().chain(&*second)) {
            *to = *from;
        }
        match limits.check(len, &mut head) {
            Ok(frame) => {
                sender.commit(len)?;
                counters.frames.add(1);
                counters.bytes.add(frame.len as u64);
                counters.segments.add(u64::from(frame.segments));
            }
            Err(why) => counters.count_drop(why),
        }
        Ok(())
    }

    /// Hands what comes from the peer to the interface until the link is over (N-8).
    pub fn receive(self, receiver: &mut MessageReceiver, limits: &Limits, counters: &Direction) -> End {
        loop {
            match self.receive_all(receiver, limits, counters) {
                Ok(()) if self.over.is_raised() => return End::Stopped,
                Ok(()) => {}
                Err(end) => return end,
            }
        }
    }

    /// Hands over what the peer has sent before its side ended (N-10). One that goes on writing is not waited for.
    pub fn receive_rest(self, receiver: &mut MessageReceiver, limits: &Limits, counters: &Direction) {
        for _ in 0..LEFT_MOST {
            let Ok(Some(message)) = receiver.peek() else { return };
            let passed = self.pass(message, limits, counters);
            if receiver.consume().is_err() || passed.is_err() {
                return;
            }
        }
    }

    fn receive_all(self, receiver: &mut MessageReceiver, limits: &Limits, counters: &Direction) -> Result<(), End> {
        while let Some(message) = receiver.peek()? {
            let passed = self.pass(message, limits, counters);
            receiver.consume()?;
            passed?;
            if self.over.is_raised() {
                return Ok(());
            }
        }
        match receiver.wait_until(Deadline::after(LOOK)) {
            Ok(true) | Err(ChannelError::TimedOut) => Ok(()),
            Ok(false) => Err(End::Peer(receiver.ending().unwrap_or(Ending::Closed))),
            Err(error) => Err(error.into()),
        }
    }

    fn pass(self, (first, second): Peeked<'_>, limits: &Limits, counters: &Direction) -> Result<(), End> {
        let len = first.len() + second.len();
        let mut head = [0; HEAD];
        let looked_at = len.min(HEAD);
        let (head_first, first) = first.split_at(looked_at.min(first.len()));
        let (head_second, second) = second.split_at(looked_at - head_first.len());
        // From here on the private copy is what counts, whatever the peer stores (N-8).
        let (one, other) = head[..looked_at].split_at_mut(head_first.len());
        head_first.copy_to(one);
        head_second.copy_to(other);
        let frame = match limits.check(len, &mut head) {
            Ok(frame) => frame,
            Err(why) => {
                counters.count_drop(why);
                return Ok(());
            }
        };
        let dropped = match self.tap.write(&head, [first, second]) {
            Ok(_) => {
                counters.frames.add(1);
                counters.bytes.add(frame.len as u64);
                counters.segments.add(u64::from(frame.segments));
                return Ok(());
            }
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::INVAL | Errno::MSGSIZE) => &counters.refused,
                Some(Errno::IO) => &counters.down,
                Some(Errno::NOMEM | Errno::NOBUFS | Errno::AGAIN) => &counters.memory,
                // The memory was taken away: what was written of it is not there any more, and `consume` says so.
                Some(Errno::FAULT) => &counters.refused,
                _ => return Err(error.into()),
            },
        };
        dropped.add(1);
        Ok(())
    }
}
