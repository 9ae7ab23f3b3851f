// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements a program's side of its domain's grant reaper. For each segment the program hands over a descriptor, so
//! that the reaper holds the pages if the program dies before its peer reported that it unmapped them.
//! [`crate::grant_reaper`] is the other side.

use std::{
    fmt,
    io::{self, IoSlice},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    str::{FromStr, SplitN},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt},
};
use tombolo_domain::aside::ReservedFd;
use tombolo_layout::xen::PLACES;
use tombolo_os::passing;

use crate::{
    hypervisor::{DomId, Hypervisor},
    os::lock,
};

/// Path of the grant reaper's socket unless `TOMBOLO_KEEPER` names another.
const SOCKET: &str = "/run/tombolo/keeper.sock";
/// Largest length of a message of the grant reaper.
pub(crate) const ANSWER_MAX: usize = 32 << 10;
/// Time within which the grant reaper must answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns the path of the grant reaper's socket, as the environment names it.
pub(crate) fn socket() -> PathBuf {
    std::env::var_os("TOMBOLO_KEEPER").filter(|path| !path.is_empty()).map_or_else(|| SOCKET.into(), PathBuf::from)
}

/// Description of a segment, sent to the grant reaper along with its pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Note {
    /// The program's own number for the segment.
    pub id: u64,
    pub peer: DomId,
    /// Reference of the peer's mailbox, and the time at which it was made, which distinguishes it from others that had
    /// the reference.
    pub mailbox: u32,
    pub made: u64,
    /// Place and generation by which the peer reports that it let go of the segment.
    pub place: u8,
    pub generation: u32,
    pub pages: u32,
    /// Name by which the endpoints met.
    pub service: String,
}

/// Message of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    Keep(Note),
    Forget(u64),
    List,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keep(note) => {
                let Note { id, peer, mailbox, made, place, generation, pages, service } = note;
                write!(f, "keep {id} {peer} {mailbox} {made} {place} {generation} {pages} {service}")
            }
            Self::Forget(id) => write!(f, "forget {id}"),
            Self::List => f.write_str("list"),
        }
    }
}

impl Request {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (what, rest) = text.split_once(' ').unwrap_or((text, ""));
        match what {
            "keep" => {
                let mut words = rest.splitn(8, ' ');
                let note = Note {
                    id: number(&mut words)?,
                    peer: number(&mut words)?,
                    mailbox: number(&mut words)?,
                    made: number(&mut words)?,
                    place: number(&mut words)?,
                    generation: number(&mut words)?,
                    pages: number(&mut words)?,
                    service: words.next()?.to_owned(),
                };
                (usize::from(note.place) < PLACES && note.pages > 0).then_some(Self::Keep(note))
            }
            "forget" => rest.parse().ok().map(Self::Forget),
            "list" if rest.is_empty() => Some(Self::List),
            _ => None,
        }
    }
}

fn number<T: FromStr>(words: &mut SplitN<'_, char>) -> Option<T> {
    words.next()?.parse().ok()
}

/// Pages of a program that died, kept until its peer reports that it unmapped them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OrphanedGrants {
    /// Number of the domain that may map them.
    pub peer: u16,
    /// Number of pages, including those of the list of their references.
    pub pages: u64,
    /// Time since the program died.
    pub age: Duration,
    /// Process number of the program.
    pub pid: u32,
    /// User of the program.
    pub uid: u32,
    /// Name by which the endpoints met.
    pub service: String,
    /// Name of the program's process in the kernel.
    pub command: String,
}

impl fmt::Display for OrphanedGrants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peer, pages, age, pid, uid, service, command } = self;
        writeln!(f, "{peer} {pages} {} {pid} {uid} {service} {command}", age.as_millis())
    }
}

impl OrphanedGrants {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(7, ' ');
        Some(Self {
            peer: number(&mut words)?,
            pages: number(&mut words)?,
            age: Duration::from_millis(number(&mut words)?),
            pid: number(&mut words)?,
            uid: number(&mut words)?,
            service: words.next()?.to_owned(),
            command: words.next()?.to_owned(),
        })
    }
}

/// Content of a grant reaper.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ReaperListing {
    /// Pages that were granted by programs that died.
    pub kept: Vec<OrphanedGrants>,
    /// Pages that it released because it had no more room or could not read the peer's page. They are in the kernel's
    /// own list.
    pub let_go: u64,
}

impl ReaperListing {
    /// Asks this domain's grant reaper for its list.
    ///
    /// # Errors
    /// `NotFound` and `ConnectionRefused` if there is none; another error if its answer is invalid.
    pub fn ask() -> io::Result<Self> {
        Self::ask_at(&socket())
    }

    /// Asks the grant reaper at a socket.
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub fn ask_at(path: &Path) -> io::Result<Self> {
        let reaper = connect(path)?;
        rustix::io::ioctl_fionbio(&reaper, false)?;
        sockopt::set_socket_timeout(&reaper, sockopt::Timeout::Recv, Some(PATIENCE))?;
        send(reaper.as_fd(), &Request::List, None)?;
        let mut found = Self::default();
        let mut buffer = vec![0; ANSWER_MAX];
        loop {
            let (_, len) = rustix::net::recv(&reaper, &mut buffer[..], rustix::net::RecvFlags::empty())?;
            let text = std::str::from_utf8(&buffer[..len]).map_err(io::Error::other)?;
            let broken = || io::Error::other("the reaper speaks another version");
            if let Some(let_go) = text.strip_prefix("end ") {
                found.let_go = let_go.parse().map_err(|_| broken())?;
                return Ok(found);
            }
            if text.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            for line in text.lines() {
                found.kept.push(OrphanedGrants::parse(line).ok_or_else(broken)?);
            }
        }
    }
}

/// Makes a connection that does not block.
fn connect(path: &Path) -> io::Result<ReservedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
    ReservedFd::new(socket)
}

fn send(socket: BorrowedFd<'_>, request: &Request, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let text = request.to_string();
    let files: Vec<_> = file.into_iter().collect();
    passing::send(socket, &[IoSlice::new(text.as_bytes())], &files, SendFlags::DONTWAIT).map(drop)
}

/// This process's connection to the grant reaper, if there is one. The connection ends with the process.
#[derive(Debug, Default)]
pub(crate) struct ReaperClient {
    socket: Mutex<Option<Arc<ReservedFd>>>,
    last: AtomicU64,
}

impl ReaperClient {
    /// Hands a descriptor over to the grant reaper. Without a grant reaper, or if it does not read, only the kernel's
    /// own list has the pages.
    pub(crate) fn entrust(&self, xen: &dyn Hypervisor, file: BorrowedFd<'_>, note: Note) -> Option<Entrusted> {
        let path = xen.grant_reaper()?;
        let id = self.last.fetch_add(1, Ordering::Relaxed);
        let request = Request::Keep(Note { id, ..note });
        let mut socket = lock(&self.socket);
        // The second attempt is for a grant reaper that has replaced the previous one.
        for _ in 0..2 {
            let reaper = match &*socket {
                Some(reaper) => Arc::clone(reaper),
                None => Arc::clone(socket.insert(Arc::new(connect(&path).ok()?))),
            };
            match send(reaper.as_fd(), &request, Some(file)) {
                Ok(()) => return Some(Entrusted { reaper, id, pid: std::process::id() }),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => *socket = None,
                    _ => return None,
                },
            }
        }
        None
    }

    #[cfg(test)]
    pub(crate) fn socket(&self) -> Option<Arc<ReservedFd>> {
        lock(&self.socket).clone()
    }
}

/// Record that the grant reaper has a descriptor of this process. The reaper closes it once this is dropped.
#[derive(Debug)]
pub(crate) struct Entrusted {
    reaper: Arc<ReservedFd>,
    id: u64,
    pid: u32,
}

impl Drop for Entrusted {
    fn drop(&mut self) {
        // A child made by fork must send nothing here.
        if self.pid == std::process::id()
            && send(self.reaper.as_fd(), &Request::Forget(self.id), None)
                .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        {
            // The grant reaper does not read. After this it takes the process for dead, and reads the peers' pages
            // itself.
            let _ = rustix::net::shutdown(&*self.reaper, Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample_note() -> Note {
        let (id, peer, mailbox, made, place, generation) = (1, 7, 88, 1234, 63, 5);
        Note { id, peer, mailbox, made, place, generation, pages: 257, service: "a-b_1".into() }
    }

    #[test]
    fn x13_requests_are_understood_as_they_are_written() {
        for request in [Request::Keep(sample_note()), Request::Forget(9), Request::List] {
            assert_eq!(Request::parse(&request.to_string()), Some(request));
        }
        let text = Request::Keep(sample_note()).to_string();
        for bad in
            ["", "keep", "forget", "forget x", "list 1", &text.replace(" 63 ", " 64 "), &text.replace("257", "0")]
        {
            assert_eq!(Request::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn x13_what_is_kept_is_understood_as_it_is_written() {
        let age = Duration::from_millis(61_234);
        let (service, command) = ("a".to_owned(), "two words".to_owned());
        let kept = OrphanedGrants { peer: 7, pages: 257, age, pid: 12, uid: 1000, service, command };
        assert_eq!(OrphanedGrants::parse(kept.to_string().trim_end()), Some(kept));
    }

    proptest! {
        #[test]
        fn x13_no_request_does_harm(text in ".{0,80}") {
            let _ = (Request::parse(&text), Request::parse(&format!("keep {text}")), OrphanedGrants::parse(&text));
        }
    }
}
