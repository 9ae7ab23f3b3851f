// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements a connection to XenStore. It uses no transactions: each request is complete by itself, and only one
//! is under way at a time.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};
use tombolo_domain::{Deadline, Error, Result, aside::ReservedFd};

use crate::{
    hypervisor::DomId,
    wire::{Kind, Message, PAYLOAD_MAX, Parser},
};

/// Largest number of changes that are read at once.
const FIRED_MAX: usize = 256;
/// Time within which XenStore must answer: it is a daemon on the same machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reason for which XenStore refused a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// There is no such node, or none that this domain may see.
    Absent,
    /// This domain may not do that.
    Denied,
    /// The domain has reached its quota of nodes or watches, or of their size.
    Quota,
    /// Any other reason.
    Other,
}

/// A connection to XenStore.
#[derive(Debug)]
pub(crate) struct Store {
    fd: ReservedFd,
    parser: Parser,
    last: u32,
    /// Paths of watches that fired while an answer was awaited.
    fired: Vec<String>,
}

impl Store {
    pub(crate) fn new(fd: ReservedFd) -> Self {
        Self { fd, parser: Parser::default(), last: 0, fired: Vec::new() }
    }

    /// Returns a descriptor that polls readable when a watch fires.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the number of this domain.
    pub(crate) fn own_id(&mut self) -> Result<DomId> {
        let text = self.read("domid")?.ok_or_else(|| Error::NotFound("this domain's `domid` in XenStore".into()))?;
        text.parse().map_err(|_| broken("domid is no number"))
    }

    /// Returns the value of a node, or none if there is no node that this domain may see.
    pub(crate) fn read(&mut self, path: &str) -> Result<Option<String>> {
        match self.ask(Kind::Read, &[path], b"")? {
            Ok(payload) => Ok(String::from_utf8(payload).ok()),
            Err(Refusal::Absent | Refusal::Denied) => Ok(None),
            Err(refusal) => Err(refused("read", path, refusal)),
        }
    }

    /// Writes a node. A new node has its parent's permissions.
    pub(crate) fn write(&mut self, path: &str, value: &str) -> Result<()> {
        let done = self.ask(Kind::Write, &[path], value.as_bytes())?;
        done.map(drop).map_err(|refusal| refused("write", path, refusal))
    }

    /// Makes a folder that only `owner` may write and `reader` may read.
    pub(crate) fn make_folder(&mut self, path: &str, owner: DomId, reader: DomId) -> Result<()> {
        let made = self.ask(Kind::Mkdir, &[path], b"")?;
        made.map_err(|refusal| refused("mkdir", path, refusal))?;
        let set = self.ask(Kind::SetPerms, &[path, &format!("n{owner}"), &format!("r{reader}")], b"")?;
        set.map(drop).map_err(|refusal| refused("set permissions", path, refusal))
    }

    /// Removes a node if it exists.
    pub(crate) fn remove(&mut self, path: &str) -> Result<()> {
        match self.ask(Kind::Rm, &[path], b"")? {
            Ok(_) | Err(Refusal::Absent) => Ok(()),
            Err(refusal) => Err(refused("remove", path, refusal)),
        }
    }

    /// Returns the names in a folder, or no names if they do not fit into a message.
    pub(crate) fn list(&mut self, path: &str) -> Result<Vec<String>> {
        match self.folder(path) {
            Err(Error::Limit { .. }) => Ok(Vec::new()),
            found => Ok(found?.unwrap_or_default()),
        }
    }

    /// Returns the names in a folder, or none if there is no folder that this domain may see.
    ///
    /// # Errors
    /// The names do not fit into a message.
    pub(crate) fn folder(&mut self, path: &str) -> Result<Option<Vec<String>>> {
        let payload = match self.ask(Kind::Directory, &[path], b"")? {
            Ok(payload) => payload,
            Err(Refusal::Absent | Refusal::Denied) => return Ok(None),
            Err(refusal) => return Err(refused("directory", path, refusal)),
        };
        let names = payload.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
        Ok(Some(names.filter(|name| !name.is_empty()).map(str::to_owned).collect()))
    }

    /// Makes [`fired`](Self::fired) report changes of `path` and of everything below it, and report `path` once
    /// immediately.
    pub(crate) fn watch(&mut self, path: &str) -> Result<()> {
        let done = self.ask(Kind::Watch, &[path, path], b"")?;
        done.map(drop).map_err(|refusal| refused("watch", path, refusal))
    }

    /// Ends a watch.
    pub(crate) fn unwatch(&mut self, path: &str) -> Result<()> {
        match self.ask(Kind::Unwatch, &[path, path], b"")? {
            Ok(_) | Err(Refusal::Absent) => Ok(()),
            Err(refusal) => Err(refused("unwatch", path, refusal)),
        }
    }

    /// Returns the paths that changed. Never blocks.
    pub(crate) fn fired(&mut self) -> Result<Vec<String>> {
        // The number is bounded, so that a domain that writes without end does not hold up the caller.
        for _ in 0..FIRED_MAX {
            let Some(message) = self.next(None)? else { break };
            self.record_event(&message);
        }
        Ok(std::mem::take(&mut self.fired))
    }

    fn record_event(&mut self, message: &Message) {
        let path = message.parts().next().and_then(|path| std::str::from_utf8(path).ok());
        if let (Kind::WatchEvent, Some(path)) = (message.kind, path) {
            self.fired.push(path.into());
        }
    }

    /// Sends a request and waits for its answer.
    fn ask(&mut self, kind: Kind, parts: &[&str], rest: &[u8]) -> Result<std::result::Result<Vec<u8>, Refusal>> {
        self.last = self.last.wrapping_add(1);
        let request = Message::request(kind, self.last, parts, rest);
        assert!(request.payload.len() <= PAYLOAD_MAX, "a request longer than XenStore takes");
        let deadline = Deadline::after(PATIENCE);
        self.send(&request.encode(), deadline)?;
        loop {
            let message = self.next(Some(deadline))?.expect("an answer or an error, where there is a deadline");
            match message.kind {
                Kind::WatchEvent => self.record_event(&message),
                _ if message.request != self.last => {}
                Kind::Error => return Ok(Err(refusal(&message))),
                answer if answer == kind => return Ok(Ok(message.payload)),
                _ => return Err(broken("the answer is to another question")),
            }
        }
    }

    fn send(&self, mut bytes: &[u8], deadline: Deadline) -> Result<()> {
        while !bytes.is_empty() {
            match rustix::io::write(&self.fd, bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.sleep(PollFlags::OUT, deadline)?,
                Err(error) => return Err(failed("write", error)),
            }
        }
        Ok(())
    }

    /// Returns the next message. Waits for it until `deadline`; without one, returns none if no message is there.
    fn next(&mut self, deadline: Option<Deadline>) -> Result<Option<Message>> {
        let mut buffer = [0; PAYLOAD_MAX];
        loop {
            if let Some(message) = self.parser.message().map_err(|error| failed("read", error))? {
                return Ok(Some(message));
            }
            match (rustix::io::read(&self.fd, &mut buffer), deadline) {
                (Ok(0), _) => return Err(broken("the connection ended")),
                (Ok(len), _) => self.parser.push(&buffer[..len]),
                (Err(Errno::INTR), _) => {}
                (Err(Errno::AGAIN), None) => return Ok(None),
                (Err(Errno::AGAIN), Some(deadline)) => self.sleep(PollFlags::IN, deadline)?,
                (Err(error), _) => return Err(failed("read", error)),
            }
        }
    }

    fn sleep(&self, flags: PollFlags, deadline: Deadline) -> Result<()> {
        let left = deadline.remaining().unwrap_or(PATIENCE);
        if left.is_zero() {
            return Err(failed("request", Errno::TIMEDOUT));
        }
        let timeout = Timespec::try_from(left).ok();
        match rustix::event::poll(&mut [PollFd::new(&self.fd, flags)], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(failed("poll", error)),
        }
    }
}

fn refusal(message: &Message) -> Refusal {
    match message.parts().next().unwrap_or(b"") {
        b"ENOENT" => Refusal::Absent,
        b"EACCES" | b"EPERM" => Refusal::Denied,
        b"ENOSPC" | b"E2BIG" | b"EQUOTA" => Refusal::Quota,
        _ => Refusal::Other,
    }
}

fn refused(call: &'static str, path: &str, refusal: Refusal) -> Error {
    match refusal {
        Refusal::Absent => Error::NotFound(format!("{path} in XenStore")),
        Refusal::Denied => Error::Denied(format!("{path} in XenStore")),
        Refusal::Quota => Error::Limit {
            what: "the nodes or watches that this domain may have in XenStore",
            remedy: "close listeners and channels, or raise xenstored's quota in dom0",
        },
        Refusal::Other => {
            Error::Os { call, path: Some(format!("{path} in XenStore")), source: io::Error::other("refused") }
        }
    }
}

fn failed(call: &'static str, error: impl Into<io::Error>) -> Error {
    Error::Os { call, path: Some("XenStore".into()), source: error.into() }
}

fn broken(why: &'static str) -> Error {
    failed("request", io::Error::new(io::ErrorKind::InvalidData, why))
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn x5_changes_without_end_are_heard_a_bounded_number_at_once() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let event = Message::request(Kind::WatchEvent, 0, &["/a/node", "/a"], b"").encode();
        let all = FIRED_MAX + FIRED_MAX / 2;
        theirs.write_all(&event.repeat(all)).unwrap();
        let mut store = Store::new(ReservedFd::new(ours.into()).unwrap());
        assert_eq!(store.fired().unwrap().len(), FIRED_MAX, "no more at once");
        assert_eq!(store.fired().unwrap().len(), all - FIRED_MAX, "and none is lost");
        assert!(store.fired().unwrap().is_empty());
    }
}
