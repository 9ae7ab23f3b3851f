// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listens at a path. A path has one listener at a time, which leaves nothing behind (L-2, L-3).

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::{AtFlags, FileType, Mode},
    io::Errno,
    net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType},
};
use tombolo_domain::{Deadline, Endpoint, Error, Listener, Result};
use tombolo_os::{
    lock::{try_lock_file, unlock_file},
    reserved::{self, ReservedFd},
};

use crate::{
    discard::{self, Kind, Source},
    frame,
    life::Identity,
    link::{LocalEndpoint, is_harmless},
    place::SocketPath,
};

/// Largest number of peers that wait to be accepted; the kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 1024;
/// Time for which others may hold the folder's lock. They hold it for microseconds, unless one is hostile.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Source that is charged for sockets whose peer is unknown.
const NOBODY: Source = Source { pid: None, uid: u32::MAX, kind: Kind::Socket };

/// A bound socket and its file.
#[derive(Debug)]
pub(crate) struct LocalListener {
    /// Present until the listener is dropped.
    socket: Option<ReservedFd>,
    place: SocketPath,
    folder: ReservedFd,
    /// Descriptor that is given up for a moment when this process may open no more files: see
    /// [`turn_away`](Self::turn_away).
    spare: Option<OwnedFd>,
    /// Device and inode of the file. The bound socket keeps the inode from being reused.
    file: (u64, u64),
    /// Process that listens: a child made by fork does not remove its parent's file.
    pid: u32,
    /// Whether nobody else takes the name, so that the folder need not be locked.
    unique: bool,
}

impl LocalListener {
    pub(crate) fn new(place: SocketPath, unique: bool) -> Result<Self> {
        let folder = crate::reserve(place.folder_to_listen()?)?;
        let address = place.address(&folder)?;
        let socket = crate::reserve(open(SocketType::SEQPACKET)?)?;
        // On Linux a socket's file gets the mode that the socket has when it is bound, so others can never connect.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|error| place.error("fchmod", error))?;

        let lock = if unique { None } else { Some(Lock::lock_folder(&folder)?) };
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) if !unique => {
                clear(&place, &folder, &address)?;
                rustix::net::bind(&socket, &address)
            }
            done => done,
        }
        .map_err(|error| {
            if error == Errno::ADDRINUSE { Error::InUse(place.shown()) } else { place.error("bind", error) }
        })?;
        let file = identity(&place, &folder).map_err(|error| place.error("stat", error))?;
        if let Err(error) = rustix::net::listen(&socket, BACKLOG) {
            let _ = rustix::fs::unlinkat(&folder, place.name(), AtFlags::empty());
            return Err(place.error("listen", error));
        }
        drop(lock);
        Ok(Self { socket: Some(socket), place, folder, spare: spare(), file, pid: std::process::id(), unique })
    }
}

impl Listener for LocalListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        if reserved::keeps() && !self.has_waiting_caller() {
            return Ok(None); // The limit is lifted only if something waits.
        }
        if discard::is_full() && self.has_waiting_caller() {
            let why = "too many sockets of earlier callers wait to be closed: they left files in them whose close does not return";
            return Err(Error::Crowded(why));
        }
        reserved::lifted(|| self.accept_next())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket()
    }
}

impl LocalListener {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("there until the listener is dropped").as_fd()
    }

    fn accept_one(&self) -> rustix::io::Result<OwnedFd> {
        rustix::net::accept_with(self.socket(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }

    fn has_waiting_caller(&self) -> bool {
        let socket = self.socket();
        let mut one = [PollFd::new(&socket, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut one, Some(&now)) != Ok(0)
    }

    fn accept_next(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        loop {
            match self.accept_one() {
                Ok(socket) => return Ok(Some(Box::new(LocalEndpoint::of_listener(socket, &self.place.shown())?))),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // The kernel reports this error before it checks whether a peer waits.
                Err(Errno::MFILE | Errno::NFILE) if !self.has_waiting_caller() => return Ok(None),
                Err(error) => {
                    if matches!(error, Errno::MFILE | Errno::NFILE) {
                        self.turn_away();
                    }
                    return Err(Error::os("accept", error));
                }
            }
        }
    }

    /// Closes the connection of a peer that connects while this process may open no more files, so that the peer learns
    /// at once that nobody serves it. Otherwise it would wait in vain, and the poller of this socket would be woken
    /// again and again.
    fn turn_away(&mut self) {
        drop(self.spare.take());
        if let Ok(socket) = self.accept_one() {
            let who = Identity::of_peer(socket.as_fd());
            let source = |kind| who.as_ref().map_or(Source { kind, ..NOBODY }, |who| who.source(kind));
            let has_room = || discard::has_room(source(Kind::Files));
            if let Err(files) = frame::empty_queue(socket.as_fd(), true, has_room, is_harmless) {
                // Closing the socket also closes what is in its queue.
                discard::discard(source(Kind::Socket), socket);
                if !files.is_empty() {
                    discard::discard(source(Kind::Files), files);
                }
            }
        }
        self.spare = spare();
    }

    /// Ends the listening, even if others hold the socket, and drops the waiting peers. If a child between fork and
    /// exec holds a copy of the socket, they would wait for as long as it does (D-12). Returns whether all of them were
    /// dropped.
    fn hang_up(&mut self) -> bool {
        let is_over = rustix::net::shutdown(self.socket(), Shutdown::Both).is_ok();
        // From now on no peer can connect.
        drop(self.spare.take());
        while is_over && !discard::is_full() {
            match reserved::lifted(|| self.accept_one()) {
                Ok(socket) => drop(LocalEndpoint::of_listener(socket, &self.place.shown())),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return matches!(error, Errno::AGAIN | Errno::INVAL),
            }
        }
        false
    }

    fn remove_file(&self) {
        // If the file cannot be removed now, the next listener takes it over.
        let lock = if self.unique { None } else { Some(Lock::lock_folder(&self.folder)) };
        if matches!(lock, Some(Err(_))) {
            return;
        }
        if identity(&self.place, &self.folder) == Ok(self.file) {
            let _ = rustix::fs::unlinkat(&self.folder, self.place.name(), AtFlags::empty());
        }
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        self.remove_file();
        if !self.hang_up() {
            // Closing the socket also drops the waiting peers and what they sent (L-5).
            discard::discard(NOBODY, self.socket.take());
        }
    }
}

/// Opens a descriptor of any kind, to be given up later. Returns none in a process with reserved descriptors, because
/// its limit does not apply here.
fn spare() -> Option<OwnedFd> {
    if reserved::keeps() { None } else { open(SocketType::DGRAM).ok() }
}

fn open(kind: SocketType) -> Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(|error| Error::os("socket", error))
}

/// Removes the file at the listener's path if its listener is dead (L-3). The caller holds the folder's lock, so that
/// the file cannot belong to a listener that has just begun.
///
/// Tests this by connecting a socket of *another* type. A live listener refuses it with `EPROTOTYPE`, a file without a
/// socket with `ECONNREFUSED`, and neither notices.
fn clear(place: &SocketPath, folder: &ReservedFd, address: &SocketAddrUnix) -> Result<()> {
    match rustix::net::connect(&open(SocketType::DGRAM)?, address) {
        Ok(()) | Err(Errno::PROTOTYPE) => Err(Error::InUse(place.shown())),
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => {
            let stat = rustix::fs::statat(folder, place.name(), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| place.error("stat", error))?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
                return Err(Error::BadService {
                    service: place.shown(),
                    why: "a file that is no socket is in its place",
                });
            }
            rustix::fs::unlinkat(folder, place.name(), AtFlags::empty()).map_err(|error| place.error("unlink", error))
        }
        Err(error) => Err(place.error("connect", error)),
    }
}

fn identity(place: &SocketPath, folder: &ReservedFd) -> rustix::io::Result<(u64, u64)> {
    let stat = rustix::fs::statat(folder, place.name(), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Lock on a folder, which leaves no file behind.
struct Lock<'a>(&'a ReservedFd);

impl<'a> Lock<'a> {
    #[expect(
        clippy::disallowed_methods,
        reason = "nothing tells when a lock is free except to wait for it without end"
    )]
    fn lock_folder(folder: &'a ReservedFd) -> Result<Self> {
        let deadline = Deadline::after(LOCK_PATIENCE);
        loop {
            if try_lock_file(folder).map_err(|error| Error::os("flock", error))? {
                return Ok(Self(folder));
            }
            if deadline.expired() {
                return Err(Error::TimedOut);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        unlock_file(self.0);
    }
}
