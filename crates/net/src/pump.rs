// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves frames in both directions of a link, without copying them: the kernel writes into the own ring and reads from
//! the peer's. Only the first 26 bytes of a received message are copied, for checking.

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

/// Room in bytes that a frame may need in a message.
pub const RESERVED: usize = HEADER + FRAME_MOST as usize;
/// Number of frames that exceeds what a ring of the usual size holds.
const LEFT_MOST: u32 = 1 << 16;
/// Time that the receiving thread sleeps before it checks whether it is to end.
const LOOK: Duration = Duration::from_millis(250);

/// Reason for which a link ended.
#[derive(Debug)]
pub enum End {
    /// The engine was told to stop.
    Stopped,
    /// The peer's side ended.
    Peer(Ending),
    /// The channel failed.
    Channel(ChannelError),
    /// The interface failed, or is gone.
    Interface(io::Error),
    /// The interface was changed, so the peer must be told anew.
    Changed(&'static str),
    /// The kernel's driver cannot use the peer's ring.
    Unfit,
    /// The kernel's driver found the peer's ring corrupt, by this clause R-….
    Corrupt(u32),
}

impl End {
    /// Returns whether the peer's side ended. What it sent before can still be received.
    #[must_use]
    pub fn is_peers(&self) -> bool {
        matches!(self, Self::Peer(_) | Self::Channel(ChannelError::Closed | ChannelError::PeerGone))
    }

    /// Returns how the peer's side really ended. The sender, or the liveness check, may have been first to notice that
    /// it did.
    #[must_use]
    pub fn judged_by(self, receiver: &mut MessageReceiver) -> Self {
        if !self.is_peers() {
            return self;
        }
        // Frames still in the ring are discarded, but a peer that goes on writing is not waited for.
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

/// The interface and flag that both directions of a link use.
#[derive(Clone, Copy, Debug)]
pub struct Pump<'a> {
    /// The interface.
    pub tap: &'a Tap,
    /// Raised when the link is to end.
    pub over: &'a Flag,
}

impl Pump<'_> {
    /// Sends frames from the interface until the link is over (N-9). Waits while the ring is full; drops nothing for
    /// that.
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
            // A peer that takes frames without notifying only delays its own frames. It cannot delay the end of the
            // link.
            return Ok(wait_any(&[sender.poll_fd()?, self.over.as_fd()], None)?);
        };
        // The driver does not write the last field of the header.
        for byte in first.iter_mut().chain(&mut *second).take(HEADER) {
            *byte = 0;
        }
        let Some(len) = self.tap.read(first, second)? else {
            // The kernel notifies both descriptors, whatever the peer does.
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

    /// Passes the peer's frames to the interface until the link is over (N-8).
    pub fn receive(self, receiver: &mut MessageReceiver, limits: &Limits, counters: &Direction) -> End {
        loop {
            match self.receive_all(receiver, limits, counters) {
                Ok(()) if self.over.is_raised() => return End::Stopped,
                Ok(()) => {}
                Err(end) => return end,
            }
        }
    }

    /// Passes on what the peer sent before its side ended (N-10). A peer that goes on writing is not waited for.
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
        // From here on only the private copy counts, whatever the peer stores (N-8).
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
                // The memory was revoked: bytes written to it are gone, and `consume` reports that.
                Some(Errno::FAULT) => &counters.refused,
                _ => return Err(error.into()),
            },
        };
        dropped.add(1);
        Ok(())
    }
}
