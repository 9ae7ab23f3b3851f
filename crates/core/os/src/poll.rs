// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sleeps on descriptors, and looks at what they poll as.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll},
    io::Errno,
};

/// Returns whether `fd` polls readable (data, a hang-up or an error: whatever makes a read return) before `left`
/// returns zero. `left` is asked before each sleep how long that may be; `None` is without end.
///
/// # Blocking
/// Until one or the other.
///
/// # Errors
/// `poll` fails.
pub fn wait_readable(fd: BorrowedFd<'_>, left: impl Fn() -> Option<Duration>) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    loop {
        match rustix::event::poll(&mut fds, timeout(left()).as_ref()) {
            Ok(0) if left().is_some_and(|left| left.is_zero()) => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns whether `fd` polls now as any of `wanted`.
pub fn polls_as(fd: impl AsFd, wanted: PollFlags) -> bool {
    let mut polled = [PollFd::new(&fd, wanted)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1)) && polled[0].revents().intersects(wanted)
}

/// Returns whether all holders of a socket's other end have closed it, or shut down its sending.
pub fn is_hung_up(socket: impl AsFd) -> bool {
    polls_as(socket, PollFlags::HUP | PollFlags::RDHUP)
}

/// Returns the lowest number of what is ready in an epoll instance, and waits for it for at most `left`. Two events are
/// looked at.
///
/// # Blocking
/// For at most `left`, before Linux 5.11 rounded to milliseconds. A caller with a deadline checks it again.
///
/// # Errors
/// `epoll_wait` fails: interrupted, for example.
pub fn lowest_event(set: BorrowedFd<'_>, left: Option<Duration>) -> io::Result<Option<u64>> {
    let mut events = [MaybeUninit::uninit(); 2];
    let (events, _) = match epoll::wait(set, &mut events, timeout(left).as_ref()) {
        // Before Linux 5.11 epoll knows whole milliseconds only.
        Err(Errno::NOSYS) => {
            let whole = left.map(|left| Duration::from_millis((left.as_millis() + 1).min(1 << 30) as u64));
            epoll::wait(set, &mut events, timeout(whole).as_ref())?
        }
        done => done?,
    };
    Ok(events.iter().map(|event| event.data.u64()).min())
}

/// Converts a time for the kernel. A time beyond what the kernel can hold is as good as never.
fn timeout(left: Option<Duration>) -> Option<Timespec> {
    left.and_then(|left| Timespec::try_from(left).ok())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::event;

    #[test]
    fn pipe_is_readable_once_its_writer_is_gone() {
        let (reader, writer) = std::io::pipe().unwrap();
        let once = std::cell::Cell::new(1);
        let left = || Some(Duration::from_millis(once.replace(0)));
        assert!(!wait_readable(reader.as_fd(), left).unwrap());
        drop(writer);
        assert!(wait_readable(reader.as_fd(), || None).unwrap());
    }

    #[test]
    fn socket_is_hung_up_once_its_peer_is_closed_and_not_because_bytes_came() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        io::Write::write_all(&mut theirs, b"x").unwrap();
        assert!(!is_hung_up(&ours) && polls_as(&ours, PollFlags::IN));
        drop(theirs);
        assert!(is_hung_up(&ours));
    }

    #[test]
    fn lowest_number_of_what_is_ready_is_told_first() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (one, other) = (event::eventfd(1).unwrap(), event::eventfd(1).unwrap());
        let now = Some(Duration::ZERO);
        assert_eq!(lowest_event(set.as_fd(), now).unwrap(), None);
        for (number, event) in [(7, &one), (3, &other)] {
            epoll::add(&set, event, epoll::EventData::new_u64(number), epoll::EventFlags::IN).unwrap();
        }
        assert_eq!(lowest_event(set.as_fd(), None).unwrap(), Some(3));
    }
}
