// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chooses the peer. Several callers are sent hellos at once and heard in the order of their answers, so that a silent
//! caller delays no other (N-1).

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

/// Time that a peer may take to send its hello (N-1).
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Largest number of callers whose hello is awaited. Each uses memory of this side, of which there may be little.
const CALLERS_MOST: usize = 8;
/// Time after which the caller that was silent longest may be dropped to make room.
const GRACE: Duration = Duration::from_millis(250);

/// Reason for which there is no link yet.
#[derive(Debug)]
pub enum Failed {
    /// The peer cannot be met.
    Meeting(ChannelError),
    /// There is no thread for meeting the peer.
    Thread(io::Error),
    /// The channel failed before both hellos were exchanged.
    Greeting(ChannelError),
    /// The peer closed before it sent its hello.
    Closed,
    /// The two hellos do not fit each other.
    Hello(HelloError),
}

impl Failed {
    /// Returns a line that tells people the reason and what to do.
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

    /// Returns whether the only reason is that no peer is there yet.
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::Meeting(ChannelError::Domain(BackendError::NotFound(_)) | ChannelError::TimedOut))
    }

    /// Returns whether the reason concerns this caller alone, and not the next one.
    pub fn is_callers(&self) -> bool {
        matches!(self, Self::Greeting(_) | Self::Closed | Self::Hello(_))
    }
}

impl Member {
    /// Checks that a hello is that of the expected peer: no other may take its place, or receive the frames of a third
    /// (N-14).
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

/// A channel on which this side has sent its hello, and waits for the peer's.
#[derive(Debug)]
struct Greeting {
    channel: Messages,
    own: Hello,
    /// Error with which sending the own hello failed.
    unsaid: Option<ChannelError>,
    since: Instant,
}

impl Greeting {
    fn begin(mut channel: Messages, own: &Hello) -> Self {
        // The ring is new and has room, so this does not wait.
        let unsaid = channel.split().0.send_until(&own.encode(), Deadline::NOW).err();
        Self { channel, own: *own, unsaid, since: Instant::now() }
    }

    /// Returns the peer's hello, or why there is none; `None` while it may still come. Never blocks.
    fn receive_hello(&mut self) -> Option<Result<Hello, Failed>> {
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

/// Callers whose hello is awaited, in the order in which they came.
#[derive(Debug, Default)]
pub struct Callers {
    waiting: Vec<Greeting>,
    /// Expected properties of the peer, in a network of many.
    member: Option<Member>,
}

impl Callers {
    /// Makes an empty list.
    pub fn new(member: Option<Member>) -> Self {
        Self { waiting: Vec::new(), member }
    }

    /// Returns whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a caller and sends it the own hello.
    pub fn add(&mut self, channel: Messages, own: &Hello) {
        self.waiting.push(Greeting::begin(channel, own));
    }

    /// Returns whether there is room for one more. Drops the caller that was silent longest, if it had its time (C-7).
    pub fn make_room(&mut self) -> bool {
        if self.waiting.len() >= CALLERS_MOST && self.waiting[0].since.elapsed() >= GRACE {
            self.waiting.remove(0);
        }
        self.waiting.len() < CALLERS_MOST
    }

    /// Closes the channels of callers that were sent a different hello (N-6).
    pub fn keep_only_greeted_with(&mut self, own: &Hello) {
        self.waiting.retain(|caller| caller.own == *own);
    }

    /// Returns the first caller whose hello fits, and drops all others; or why a caller was dropped. Returns `None` if
    /// no caller has sent anything.
    pub fn receive_caller(&mut self) -> Option<Result<(Messages, Hello), Failed>> {
        let (at, heard) =
            self.waiting.iter_mut().enumerate().find_map(|(at, caller)| Some((at, caller.receive_hello()?)))?;
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

    /// Returns descriptors that poll readable once a caller may have sent something.
    pub fn fds(&mut self) -> Vec<BorrowedFd<'_>> {
        // A caller without a descriptor, for want of these, is checked when time has passed.
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
