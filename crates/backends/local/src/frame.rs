// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sends and receives datagrams, each with a head, a message and descriptors (L-4, L-5).
//!
//! A datagram is peeked at twice before it is taken off the queue. This process must close each descriptor that it
//! receives, and such a close may never return. Descriptors for which there is no room the kernel closes for this
//! process, before the call returns; a last close may block there as well. So the first peek has room for no
//! descriptor, and learns what the head says and whether descriptors came. The second has room for one more than is
//! allowed. If that was room for all, this process has each of them, and taking the datagram closes none. If not, the
//! datagram stays in the queue.

use std::{
    fmt::Display,
    io::IoSlice,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, Shutdown},
};
use tombolo_domain::{Error, Result};
use tombolo_layout::{
    limits::CONTROL_MESSAGE_MAX,
    local::{DATAGRAM_MAX, DESCRIPTORS_MAX, Head},
};
use tombolo_os::{
    passing::{self, Received},
    poll::is_hung_up,
};

/// A received datagram.
#[derive(Debug)]
pub(crate) struct Datagram {
    buffer: [u8; DATAGRAM_MAX],
    len: usize,
    /// All descriptors that came with the datagram.
    pub descriptors: Vec<OwnedFd>,
}

impl Datagram {
    /// Returns the head and the message.
    pub(crate) fn parts(&self) -> Result<(Head, &[u8])> {
        Head::decode(&self.buffer[..self.len]).map_err(|what| malformed("L-4", what))
    }
}

/// Returns the error for a violation of `clause`.
pub(crate) fn malformed(clause: &'static str, what: impl Into<String>) -> Error {
    Error::Malformed { clause, what: what.into() }
}

/// Sends `message` with `descriptors`. Never blocks.
pub(crate) fn send(socket: BorrowedFd<'_>, head: Head, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    debug_assert!(head.descriptors() == descriptors.len() && usize::from(head.len) == message.len());
    let head = head.encode();
    let parts = [IoSlice::new(&head), IoSlice::new(message)];
    let Err(error) = passing::send(socket, &parts, descriptors, SendFlags::DONTWAIT) else { return Ok(()) };
    Err(match Errno::from_io_error(&error) {
        Some(Errno::AGAIN) => Error::Limit {
            what: "the queue of control messages",
            remedy: "the peer does not read them: close the link or wait for it",
        },
        Some(Errno::TOOMANYREFS) => Error::Limit {
            what: "this user's number of descriptors in flight",
            remedy: "peers do not fetch what they were sent; raise the limit with `ulimit -n`",
        },
        Some(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Error::PeerGone,
        _ => Error::os("sendmsg", error),
    })
}

/// Returns whether no datagram waits.
pub(crate) fn is_empty(socket: BorrowedFd<'_>) -> bool {
    rustix::net::recv(socket, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK) == Err(Errno::AGAIN)
}

/// Result of one peek at the first datagram in the queue.
struct QueueHead {
    buffer: [u8; DATAGRAM_MAX],
    len: usize,
    /// Whether it is longer than allowed.
    is_longer: bool,
    /// Whether more descriptors came with it than there was room for.
    more_came: bool,
    descriptors: Vec<OwnedFd>,
}

/// Number of descriptors that a peek has room for: one more than is allowed.
const ROOM: usize = DESCRIPTORS_MAX + 1;
impl QueueHead {
    /// Peeks at the first datagram, or takes it as `flags` say, with or without `room` for descriptors. Returns `None`
    /// if there is none. Never blocks.
    fn new(socket: BorrowedFd<'_>, room: bool, flags: RecvFlags) -> Result<Option<Self>> {
        let mut buffer = [0; DATAGRAM_MAX];
        let (room, flags) = (if room { ROOM } else { 0 }, RecvFlags::DONTWAIT | flags);
        let mut resets = 0;
        loop {
            let error = match passing::receive(socket, &mut buffer, room, flags) {
                Ok(Received { len, is_longer, more_came, descriptors }) => {
                    return Ok(Some(Self { buffer, len, is_longer, more_came, descriptors }));
                }
                Err(error) => error,
            };
            match Errno::from_io_error(&error) {
                Some(Errno::AGAIN) => return Ok(None),
                // The peer closed with messages unread. The kernel reports that once; the peer's own last messages
                // follow.
                Some(Errno::CONNRESET) if resets == 0 => resets = 1,
                Some(Errno::CONNRESET | Errno::NOTCONN) => return Err(Error::PeerGone),
                _ => return Err(Error::os("recvmsg", error)),
            }
        }
    }
}

/// Result of [`receive`].
pub(crate) enum Taken {
    /// No datagram waits.
    Nothing,
    /// The first datagram, with as many descriptors as its head says.
    Datagram(Box<Datagram>),
    /// The datagram is refused, and the caller must close `files`. The datagram `stays` in the queue if it holds
    /// descriptors that this process would have to close.
    Refused { why: Error, files: Vec<OwnedFd>, stays: bool },
}

impl Taken {
    fn refused(why: Error, stays: bool) -> Self {
        Self::Refused { why, files: Vec::new(), stays }
    }
}

/// Takes the next datagram if `expects` accepts its head. Takes no descriptor from a peer that has no `room` left.
/// Never blocks.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    expects: impl FnOnce(Head) -> Result<()>,
    has_room: impl FnOnce() -> bool,
) -> Result<Taken> {
    let Some(first) = QueueHead::new(socket, false, RecvFlags::PEEK)? else { return Ok(Taken::Nothing) };
    let came = first.more_came;
    if first.len == 0 && !came && is_hung_up(socket) {
        return Err(Error::PeerGone); // An empty datagram looks the same, but without the hang-up (L-8).
    }
    let said = match first.check(expects) {
        Ok(said) => said,
        Err(why) => {
            if !came {
                take_off(socket)?;
            }
            return Ok(Taken::refused(why, came));
        }
    };
    if !came {
        take_off(socket)?;
        return Ok(Taken::Datagram(Box::new(first.into_datagram())));
    }
    if !has_room() {
        let what = "too many files of this peer wait to be closed: it sent some whose close does not return";
        return Ok(Taken::refused(Error::Quota(what.into()), true));
    }
    let Some(second) = QueueHead::new(socket, true, RecvFlags::PEEK)? else { return Ok(Taken::Nothing) };
    let carries = second.descriptors.len();
    if second.more_came {
        let why = if carries < ROOM { Error::os("recvmsg", Errno::MFILE) } else { miscounted(said, "more") };
        return Ok(Taken::Refused { why, files: second.descriptors, stays: true });
    }
    take_off(socket)?;
    if carries != said {
        return Ok(Taken::Refused { why: miscounted(said, carries), files: second.descriptors, stays: false });
    }
    Ok(Taken::Datagram(Box::new(second.into_datagram())))
}

impl QueueHead {
    /// Checks everything but the descriptors. Returns how many there should be.
    fn check(&self, expects: impl FnOnce(Head) -> Result<()>) -> Result<usize> {
        if self.is_longer {
            return Err(malformed("L-4", format!("datagram of more than {CONTROL_MESSAGE_MAX} bytes")));
        }
        let (head, _) = Head::decode(&self.buffer[..self.len]).map_err(|what| malformed("L-4", what))?;
        let said = head.descriptors();
        if self.more_came != (said > 0) {
            return Err(miscounted(said, if said > 0 { "none" } else { "some" }));
        }
        expects(head)?;
        Ok(said)
    }

    fn into_datagram(self) -> Datagram {
        Datagram { buffer: self.buffer, len: self.len, descriptors: self.descriptors }
    }
}

fn miscounted(said: usize, carries: impl Display) -> Error {
    malformed("L-5", format!("datagram says {said} descriptors and carries {carries}"))
}

/// Takes the first datagram off the queue. It must have no descriptors, or only descriptors that this process holds
/// already.
fn take_off(socket: BorrowedFd<'_>) -> Result<()> {
    QueueHead::new(socket, false, RecvFlags::empty()).map(drop)
}

/// Largest number of datagrams taken off a socket's queue before it is closed, and number of empty reads in a row that
/// count as its end.
const QUEUE_MOST: usize = 16;
const NOTHINGS: usize = 3;

/// Takes datagrams off the queue of a socket that is to be closed, as long as their descriptors are `harmless` to
/// close. Any others stay in the queue; then the socket must not be closed here, nor the descriptors in `Err`. Looks at
/// no descriptor if there is no `room` for files of this peer. Shuts a `stranger`'s socket down, which no other process
/// can have, so that nothing more arrives.
pub(crate) fn empty_queue(
    socket: BorrowedFd<'_>,
    stranger: bool,
    has_room: impl Fn() -> bool,
    harmless: impl Fn(BorrowedFd<'_>) -> bool,
) -> std::result::Result<(), Vec<OwnedFd>> {
    if stranger {
        let _ = rustix::net::shutdown(socket, Shutdown::Both);
    }
    let mut nothings = 0;
    for _ in 0..QUEUE_MOST {
        let Ok(Some(look)) = QueueHead::new(socket, false, RecvFlags::PEEK) else { return Ok(()) };
        if look.more_came {
            if !has_room() {
                return Err(Vec::new());
            }
            let Ok(Some(look)) = QueueHead::new(socket, true, RecvFlags::PEEK) else { return Ok(()) };
            if look.more_came || !look.descriptors.iter().all(|file| harmless(file.as_fd())) {
                return Err(look.descriptors);
            }
            let _ = take_off(socket);
            continue;
        }
        nothings = if look.len == 0 && is_hung_up(socket) { nothings + 1 } else { 0 };
        if nothings == NOTHINGS {
            return Ok(());
        }
        let _ = take_off(socket);
    }
    Err(Vec::new())
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd};

    use super::*;

    /// Returns a socket, and one by which each element of `came` was sent: so many descriptors.
    fn sent(came: &[usize]) -> (OwnedFd, OwnedFd) {
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let kind = rustix::net::SocketType::SEQPACKET;
        let (ours, theirs) = rustix::net::socketpair(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
        let file = File::open("/dev/null").unwrap();
        for came in came {
            let files = vec![file.as_fd(); *came];
            passing::send(&theirs, &[IoSlice::new(b"x")], &files, SendFlags::empty()).unwrap();
        }
        (ours, theirs)
    }

    #[test]
    fn l5_queue_of_a_peer_that_used_up_its_share_is_emptied_of_what_carries_nothing_alone() {
        for stranger in [false, true] {
            let (ours, _theirs) = sent(&[0, 0, 2]);
            let nothing_looked_at = |_: BorrowedFd<'_>| panic!("a descriptor was taken");
            let left = empty_queue(ours.as_fd(), stranger, || false, nothing_looked_at);
            assert!(left.is_err_and(|files| files.is_empty()), "the socket must not be closed here");
            let look = QueueHead::new(ours.as_fd(), true, RecvFlags::empty()).unwrap().unwrap();
            assert_eq!(look.descriptors.len(), 2, "they stayed where they were");
            let (ours, _theirs) = sent(&[0, 2, 5]);
            assert!(empty_queue(ours.as_fd(), stranger, || true, |_| true).is_ok(), "canary: with room for them");
        }
    }

    #[test]
    fn l5_descriptors_of_a_peer_that_used_up_its_share_are_not_taken() {
        let (ours, theirs) = sent(&[]);
        let file = File::open("/dev/null").unwrap();
        let head = Head { doorbells: true, single: false, segment: false, len: 0 };
        send(theirs.as_fd(), head, &[], &[file.as_fd(), file.as_fd()]).unwrap();
        let taken = receive(ours.as_fd(), |_| Ok(()), || false).unwrap();
        let Taken::Refused { why: Error::Quota(_), files, stays: true } = taken else { panic!("it was taken") };
        assert!(files.is_empty());
        let taken = receive(ours.as_fd(), |_| Ok(()), || true).unwrap();
        let Taken::Datagram(datagram) = taken else { panic!("canary: with room for them") };
        assert_eq!(datagram.descriptors.len(), 2, "they stayed where they were");
    }

    #[test]
    fn l5_look_takes_one_descriptor_more_than_a_datagram_may_carry_and_no_other() {
        for came in [1, DESCRIPTORS_MAX, DESCRIPTORS_MAX + 1, DESCRIPTORS_MAX + 2, 8, 253] {
            let (ours, _theirs) = sent(&[came]);
            let look = QueueHead::new(ours.as_fd(), true, RecvFlags::empty()).unwrap().unwrap();
            assert_eq!(look.descriptors.len(), came.min(DESCRIPTORS_MAX + 1), "of {came}");
            assert_eq!(look.more_came, came > DESCRIPTORS_MAX + 1, "of {came}");
        }
    }
}
