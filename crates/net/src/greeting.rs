// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who may become the peer. Hellos go to several callers at once and are heard as they come, so that one who says nothing
//! keeps nobody else waiting (N-1).

use std::{
    io,
    os::fd::BorrowedFd,
    task::Poll,
    time::{Duration, Instant},
};

use tombolo::{BackendError, Deadline, Error as ChannelError, Messages};

use crate::{
    config::{Member, Place},
    hello::{self, Hello, HelloError},
};

/// How long a peer may take to say hello (N-1).
pub const PATIENCE: Duration = Duration::from_secs(5);
/// So many may be about to say hello. Each has memory of this end's, of which there may be little.
const CALLERS_MOST: usize = 8;
/// Where there is no room left, who has been silent for longest goes, but not before it had so much time.
const GRACE: Duration = Duration::from_millis(250);

/// Why there is no link yet.
#[derive(Debug)]
pub enum Failed {
    /// The peer cannot be met.
    Meeting(ChannelError),
    /// There is no thread to meet it in.
    Thread(io::Error),
    /// The channel failed before both had said hello.
    Greeting(ChannelError),
    /// The peer closed before it said hello.
    Closed,
    /// The two do not fit each other.
    Hello(HelloError),
}

impl Failed {
    /// One line that says what to do.
    pub fn line(&self, place: &Place) -> String {
        let address = place.address();
        match self {
            Self::Meeting(_) if self.is_absence() => format!("waits for {address}: nobody listens there yet"),
            Self::Meeting(error) => format!("cannot {} at {address}, tries again: {error}", place.role()),
            Self::Thread(error) => format!("cannot {} at {address}, tries again: no thread: {error}", place.role()),
            Self::Greeting(ChannelError::TimedOut) => {
                format!("the peer at {address} says no hello within {} s, tries again", PATIENCE.as_secs())
            }
            Self::Greeting(error) => format!("no link with {address}, tries again: {error}"),
            Self::Closed => format!(
                "the peer at {address} closed before it said hello, tries again: it has another peer, or refused this end"
            ),
            Self::Hello(error) => format!("no link with {address}, tries again: {error}"),
        }
    }

    /// Whether there is only nobody there yet.
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::Meeting(ChannelError::Domain(BackendError::NotFound(_)) | ChannelError::TimedOut))
    }

    /// Whether it is one caller's, and says nothing of the next one.
    pub fn is_callers(&self) -> bool {
        matches!(self, Self::Greeting(_) | Self::Closed | Self::Hello(_))
    }
}

impl Member {
    /// Whether a hello is that of the peer: nobody may be in its place, or take the frames of a third (N-14).
    fn check_peer(&self, peer: &Hello) -> Result<(), HelloError> {
        if peer.mac != self.mac {
            return Err(HelloError::OtherMac { said: peer.mac, expected: self.mac });
        }
        if peer.mtu < self.mtu {
            return Err(HelloError::SmallerMtu { mtu: peer.mtu, network: self.mtu });
        }
        Ok(())
    }
}

/// A channel on which this end has said hello, and waits for the peer's.
#[derive(Debug)]
struct Greeting {
    channel: Messages,
    own: Hello,
    /// Why this end's could not be said.
    unsaid: Option<ChannelError>,
    since: Instant,
}

impl Greeting {
    fn begin(mut channel: Messages, own: &Hello) -> Self {
        // The ring is new: there is room, so nobody is waited for.
        let unsaid = channel.split().0.send_until(&own.encode(), Deadline::NOW).err();
        Self { channel, own: *own, unsaid, since: Instant::now() }
    }

    /// The peer's hello, or why there is none; `None` while it may still come. Never blocks.
    fn hear_hello(&mut self) -> Option<Result<Hello, Failed>> {
        let mut bytes = [0; hello::LEN];
        let len = match self.channel.split().1.try_recv(&mut bytes) {
            Ok(Poll::Ready(Some(len))) => len,
            Ok(Poll::Ready(None)) => return Some(Err(Failed::Closed)),
            Ok(Poll::Pending) if self.since.elapsed() < PATIENCE => return None,
            Ok(Poll::Pending) => return Some(Err(Failed::Greeting(ChannelError::TimedOut))),
            Err(ChannelError::BufferTooSmall { len, .. }) => {
                return Some(Err(Failed::Hello(HelloError::Length { len })));
            }
            Err(error) => return Some(Err(Failed::Greeting(error))),
        };
        Some(self.judge(&bytes[..len]))
    }

    fn judge(&mut self, bytes: &[u8]) -> Result<Hello, Failed> {
        let peer = Hello::decode(bytes).map_err(Failed::Hello)?;
        self.own.check_peer(&peer).map_err(Failed::Hello)?;
        self.unsaid.take().map_or(Ok(peer), |error| Err(Failed::Greeting(error)))
    }
}

/// Those whose hello is waited for, in the order in which they came.
#[derive(Debug, Default)]
pub struct Callers {
    waiting: Vec<Greeting>,
    /// What the peer is to say of itself, in a network of many.
    member: Option<Member>,
}

impl Callers {
    /// None so far.
    pub fn new(member: Option<Member>) -> Self {
        Self { waiting: Vec::new(), member }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Says hello to one more.
    pub fn add(&mut self, channel: Messages, own: &Hello) {
        self.waiting.push(Greeting::begin(channel, own));
    }

    /// Whether one more may come. Who has been silent for longest makes way, if it had its time (C-7).
    pub fn make_room(&mut self) -> bool {
        if self.waiting.len() >= CALLERS_MOST && self.waiting[0].since.elapsed() >= GRACE {
            self.waiting.remove(0);
        }
        self.waiting.len() < CALLERS_MOST
    }

    /// Closes the channels of those to whom this end said something else of itself (N-6).
    pub fn keep_only_told(&mut self, own: &Hello) {
        self.waiting.retain(|caller| caller.own == *own);
    }

    /// The first who said a hello that fits, all others being sent away, or why one is not to be heard any more. `None` where
    /// nobody has said anything.
    pub fn hear_caller(&mut self) -> Option<Result<(Messages, Hello), Failed>> {
        let (at, heard) =
            self.waiting.iter_mut().enumerate().find_map(|(at, caller)| Some((at, caller.hear_hello()?)))?;
        let caller = self.waiting.remove(at);
        let fitting = heard.and_then(|peer| match &self.member {
            Some(member) => member.check_peer(&peer).map(|()| peer).map_err(Failed::Hello),
            None => Ok(peer),
        });
        Some(fitting.map(|peer| {
            self.waiting.clear();
            (caller.channel, peer)
        }))
    }

    /// What polls readable once one may have said something.
    pub fn fds(&mut self) -> Vec<BorrowedFd<'_>> {
        // Who cannot be waited for, for want of descriptors, is looked at when time has passed.
        self.waiting.iter_mut().filter_map(|caller| caller.channel.split().1.poll_fd().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{features::Features, hello::FRAME_MOST, mac::Mac};

    #[test]
    fn n14_member_says_the_address_that_its_rule_gives_and_no_smaller_mtu() {
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        let member = Member { network: "lan".into(), mac, mtu: 1500 };
        let hello = |mac, mtu| Hello { features: Features::all(), mtu, frame_most: FRAME_MOST, mac };
        for mtu in [1500, 9000] {
            assert_eq!(member.check_peer(&hello(mac, mtu)), Ok(()));
        }
        let smaller = HelloError::SmallerMtu { mtu: 1499, network: 1500 };
        assert_eq!(member.check_peer(&hello(mac, 1499)), Err(smaller));
        let said = Mac([2, 0, 0, 0, 0, 2]);
        let other = HelloError::OtherMac { said, expected: mac };
        assert_eq!(member.check_peer(&hello(said, 1500)), Err(other));
    }
}
