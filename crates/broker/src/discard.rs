// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Closes other users' sockets without waiting (B-15). If nobody took a message, the kernel closes the descriptors that
//! came with it when the socket is closed. The last close of a file may take as long as its sender likes: a connection
//! lingers, or the sender's own file system does not answer. So a separate thread closes each socket with descriptors
//! in its queue: one socket at a time for each user, and few for all users together. While too many wait, no new client
//! is admitted.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::IoSliceMut,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard},
};

use rustix::{
    io::Errno,
    net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, Shutdown, SocketType, sockopt},
};
use tombolo_control::NOBODY;
use tombolo_os::lock::lock;

use crate::fd_passing;

/// Largest number of threads that close sockets.
const THREADS: usize = 32;

/// Sockets that are to be closed, by the user to whom they belong.
struct Waiting {
    /// Sockets by user; no queue is empty.
    queues: BTreeMap<u32, VecDeque<OwnedFd>>,
    /// Users of whose sockets a thread is closing one.
    closing: BTreeSet<u32>,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { queues: BTreeMap::new(), closing: BTreeSet::new() });

fn waiting() -> MutexGuard<'static, Waiting> {
    lock(&WAITING)
}

impl Waiting {
    fn of(&self, user: u32) -> usize {
        self.queues.get(&user).map_or(0, VecDeque::len) + usize::from(self.closing.contains(&user))
    }

    fn all(&self) -> usize {
        self.queues.values().map(VecDeque::len).sum::<usize>() + self.closing.len()
    }

    /// Returns a user whose sockets wait and of whose sockets no thread is closing one.
    fn next_user(&self) -> Option<u32> {
        self.queues.keys().copied().find(|user| !self.closing.contains(user))
    }
}

/// Returns the number of a user's sockets that wait to be closed. They count as connections of that user.
#[must_use]
pub fn waiting_of(user: u32) -> usize {
    waiting().of(user)
}

/// Returns whether a quarter of the descriptors that this process may have waits to be closed. Then no client is
/// admitted: the kernel identifies a client only after its connection was accepted, and its socket may be the next that
/// cannot be closed.
#[must_use]
pub fn is_crowded() -> bool {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    waiting().all() >= most.map_or(usize::MAX, |most| usize::try_from(most / 4).unwrap_or(usize::MAX))
}

/// Ends another user's connection without waiting: nothing more is received, and the contents of its queue are
/// discarded. Copies of this socket may be closed at any time from then on.
pub fn end(socket: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
    if empty(socket, false) {
        return;
    }
    let user = fd_passing::user_of(socket).unwrap_or(NOBODY);
    // Without a copy the caller's close waits, which is better than filling up with sockets that cannot be closed.
    if let Ok(copy) = socket.try_clone_to_owned() {
        give(user, copy);
    }
}

/// Does the same for each of these descriptors that is a socket.
pub fn end_all(descriptors: &[OwnedFd]) {
    for descriptor in descriptors {
        let is_socket = |mode| rustix::fs::FileType::from_raw_mode(mode) == rustix::fs::FileType::Socket;
        if rustix::fs::fstat(descriptor).is_ok_and(|stat| is_socket(stat.st_mode)) {
            end(descriptor.as_fd());
        }
    }
}

/// Hands a socket to a thread that empties and closes it.
fn give(user: u32, socket: OwnedFd) {
    let mut waiting = waiting();
    waiting.queues.entry(user).or_default().push_back(socket);
    // Also serves users for whom no thread was available before.
    while let Some(user) = waiting.next_user().filter(|_| waiting.closing.len() < THREADS) {
        if let Err(error) = std::thread::Builder::new().name("tombolo-close".into()).spawn(move || close_all(user)) {
            tracing::warn!("what user {user} sent cannot be closed yet: {error}");
            return;
        }
        waiting.closing.insert(user);
    }
}

/// Closes the waiting sockets of `user`, then those of others.
fn close_all(mut user: u32) {
    loop {
        let mut waiting = waiting();
        let socket = waiting.queues.get_mut(&user).and_then(VecDeque::pop_front);
        if waiting.queues.get(&user).is_some_and(VecDeque::is_empty) {
            waiting.queues.remove(&user);
        }
        let Some(socket) = socket else {
            waiting.closing.remove(&user);
            let Some(next) = waiting.next_user() else { return };
            waiting.closing.insert(next);
            user = next;
            continue;
        };
        drop(waiting);
        empty(socket.as_fd(), true);
    }
}

/// Empties the queue of a socket. Takes messages with descriptors only if `if_it_takes`, because closing those may take
/// as long as their sender likes. Returns whether nothing is left.
fn empty(socket: BorrowedFd<'_>, if_it_takes: bool) -> bool {
    // With SO_PASSCRED each message has its sender's credentials. The end, which looks like an empty message, has none.
    let _ = sockopt::set_socket_passcred(socket, true);
    let is_stream = sockopt::socket_type(socket).is_ok_and(|kind| kind == SocketType::STREAM);
    let mut buffer = [0; 4096];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let peek = if if_it_takes { RecvFlags::empty() } else { RecvFlags::PEEK };
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags | peek) {
            Ok(seen) if !if_it_takes && seen.flags.contains(ReturnFlags::CTRUNC) => return false,
            Ok(seen) if seen.bytes == 0 && (is_stream || control.drain().next().is_none()) => return true,
            Ok(_) if if_it_takes => {}
            Ok(_) => _ = rustix::net::recv(socket, &mut buffer, RecvFlags::DONTWAIT),
            Err(Errno::INTR) => {}
            Err(_) => return true,
        }
    }
}

/// First entry in a socket's queue.
#[derive(PartialEq, Eq, Debug)]
pub enum Look {
    /// This many bytes without descriptors. More messages may follow, with descriptors.
    Bytes(usize),
    /// A message with descriptors: receiving it without room for these closes them.
    Descriptors,
}

/// Looks at the first entry in a socket's queue, and copies as much as fits into `buffer`. Takes and closes nothing.
///
/// # Errors
/// The queue is empty, or another error of the kernel.
pub fn peek_message(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Look, Errno> {
    loop {
        let mut control = RecvAncillaryBuffer::default();
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(seen) if seen.flags.contains(ReturnFlags::CTRUNC) => return Ok(Look::Descriptors),
            Ok(seen) => return Ok(Look::Bytes(seen.bytes)),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rustix::{
        event::{PollFd, PollFlags, Timespec, poll},
        net::{AddressFamily, SocketFlags},
    };

    use super::*;

    fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None).unwrap()
    }

    fn send(to: &OwnedFd, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights: Vec<_> = descriptor.into_iter().collect();
        assert!(rights.is_empty() || control.push(SendAncillaryMessage::ScmRights(&rights)));
        rustix::net::sendmsg(to, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    fn is_hung_up(reads: &OwnedFd) -> bool {
        let mut polled = [PollFd::new(reads, PollFlags::empty())];
        poll(&mut polled, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).unwrap();
        polled[0].revents().contains(PollFlags::HUP)
    }

    #[test]
    fn b15_socket_of_harmless_messages_is_empty_at_once_and_the_other_hears_of_its_end() {
        for kind in [SocketType::SEQPACKET, SocketType::STREAM] {
            let (ours, theirs) = pair(kind);
            for bytes in [&b"some"[..], b"", b"more", b""] {
                send(&theirs, bytes, None);
            }
            end(ours.as_fd());
            assert!(matches!(rustix::net::recv(&ours, &mut [0; 8], RecvFlags::DONTWAIT), Ok((0, _))), "{kind:?}");
            assert_eq!(rustix::net::send(&theirs, b"late", rustix::net::SendFlags::NOSIGNAL), Err(Errno::PIPE));
            assert!(matches!(rustix::net::recv(&theirs, &mut [0; 8], RecvFlags::DONTWAIT), Ok((0, _))));
        }
    }

    #[test]
    fn b15_what_came_along_is_closed_wherever_it_stands_in_the_queue() {
        for kind in [SocketType::SEQPACKET, SocketType::STREAM] {
            for before in [&[][..], &[&b"some"[..]], &[b""], &[b"", b"some", b""]] {
                let (ours, theirs) = pair(kind);
                let (reads, writes) = rustix::pipe::pipe().unwrap();
                before.iter().for_each(|bytes| send(&theirs, bytes, None));
                send(&theirs, b"x", Some(writes.as_fd()));
                drop(writes);
                end(ours.as_fd());
                // A copy that is closed late closes nothing of it.
                assert!(is_hung_up(&reads), "{kind:?} {before:?}");
                drop(ours);
            }
        }
    }

    #[test]
    fn b15_close_that_takes_long_keeps_nobody_but_its_sender() {
        use std::{io::Write, net};
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut lingers = net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        lingers.set_nonblocking(true).unwrap();
        while lingers.write(&[7; 64 << 10]).is_ok() {}
        sockopt::set_socket_linger(&lingers, Some(Duration::from_secs(600))).unwrap();
        let (ours, theirs) = pair(SocketType::SEQPACKET);
        send(&theirs, b"x", Some(lingers.as_fd()));
        drop(lingers);
        let began = Instant::now();
        // Once more, as with several copies.
        end(ours.as_fd());
        end_all(&[ours]);
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn b15_more_users_than_there_are_threads_are_served_once_one_is_free() {
        // Users without any process, so that no other test uses them.
        let users = u32::MAX - 200..u32::MAX - 200 + 2 * THREADS as u32;
        let mut ends = Vec::new();
        for user in users.clone() {
            let (ours, theirs) = pair(SocketType::SEQPACKET);
            let (reads, writes) = rustix::pipe::pipe().unwrap();
            send(&theirs, b"x", Some(writes.as_fd()));
            drop(writes);
            give(user, ours);
            assert!(waiting_of(user) <= 2 && waiting().closing.len() <= THREADS);
            ends.push((reads, theirs));
        }
        assert!(ends.iter().all(|(reads, _)| is_hung_up(reads)), "each socket was emptied");
        assert!(!is_crowded());
    }
}
