// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 2. Uses: os, layout, mem, domain.
//!
//! Implements the backend between two processes of one kernel, in one container or two. Memory is a sealed memfd, the
//! rendezvous an `AF_UNIX` socket, and a doorbell an eventfd that is notified by *reading* it (`doorbell` explains
//! why). The normative text is `spec/4-domain-local.md`.
//!
//! ```
//! use tombolo_domain::{Deadline, Rendezvous};
//! use tombolo_domain_local::LocalDomain;
//!
//! let folder = tempfile::tempdir()?;
//! let domain = LocalDomain::in_folder(folder.path());
//! let mut listener = domain.listen("example")?;
//! let mut client = domain.connect("example", Deadline::NEVER)?;
//! let mut server = listener.accept()?.expect("the client connected");
//!
//! let (segment, offer) = client.allocate(4096)?;
//! client.send(b"take this", Some(&offer))?;
//! let received = server.recv(1 << 20)?.expect("the message is there");
//! assert_eq!(received.message, b"take this");
//! assert_eq!(received.segment.expect("and its memory").len(), segment.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod discard;
mod doorbell;
mod frame;
mod life;
mod link;
mod listener;
mod place;

use std::path::PathBuf;

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt},
};
use tombolo_domain::{
    Deadline, Endpoint, Error, Held, Listener, Rendezvous, Result,
    aside::{self, ReservedFd},
};

use crate::{link::LocalEndpoint, listener::LocalListener, place::SocketPath};

/// The part of an address before the colon.
const SCHEME: &str = "local";

/// Connects domains that share this kernel, through sockets in the file system.
///
/// A service is a name (letters, digits, `.`, `_`, `-`, at most 64), which stands for `NAME.sock` in the folder of
/// services, or the absolute path of a socket. The folder is `$TOMBOLO_DIR`; else `$XDG_RUNTIME_DIR/tombolo`; else
/// `/run/tombolo` for root and `/tmp/tombolo-UID` for others. The last three are made when missing, with mode 0700.
/// They are refused if they belong to another user, if others may write them, or if they are symbolic links.
#[derive(Clone, Debug, Default)]
pub struct LocalDomain {
    folder: Option<PathBuf>,
    unique: bool,
}

impl LocalDomain {
    /// Uses the folder that the environment names. The environment is read at each call.
    #[must_use]
    pub const fn new() -> Self {
        Self { folder: None, unique: false }
    }

    /// Uses `folder`, which is made when missing. The caller decides who may write to it.
    #[must_use]
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), unique: false }
    }

    /// Declares that services have random names, which nobody else takes. Listening then needs no lock of the folder,
    /// which another member of it may hold.
    #[must_use]
    pub fn with_unique_names(self) -> Self {
        Self { unique: true, ..self }
    }
}

/// Returns the folder in which a service's name is looked up now (L-1). The folder need not exist.
#[must_use]
pub fn services_folder() -> PathBuf {
    place::default_folder(|name| std::env::var_os(name), rustix::process::geteuid().as_raw()).0
}

impl Rendezvous for LocalDomain {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        let place = SocketPath::find(service, self.folder.as_deref())?;
        Ok(Box::new(aside::lifted(|| LocalListener::new(place, self.unique))?))
    }

    fn hold_for_fork(&self) -> Held {
        Held::new(discard::hold())
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        let place = SocketPath::find(service, self.folder.as_deref())?;
        aside::lifted(|| connect(&place, deadline))
    }
}

fn connect(place: &SocketPath, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
    let folder = place.folder_to_connect()?;
    let address = place.address(&folder)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|error| Error::os("socket", error))?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::AGAIN) => connect_patiently(&socket, &address, place, deadline)?,
        Err(error) => return Err(place.refused(error)),
    }
    Ok(Box::new(LocalEndpoint::new(socket)?))
}

/// Connects while the listener's backlog is full (L-12). The kernel wakes a *blocking* connect when there is room, and
/// the send timeout bounds it, so nothing is polled.
fn connect_patiently(
    socket: &rustix::fd::OwnedFd,
    address: &SocketAddrUnix,
    place: &SocketPath,
    deadline: Deadline,
) -> Result<()> {
    let os = |error| Error::os("connect", error);
    rustix::io::ioctl_fionbio(socket, false).map_err(os)?;
    loop {
        let left = deadline.remaining();
        if left.is_some_and(|left| left.is_zero()) {
            return Err(Error::TimedOut);
        }
        sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, left).map_err(os)?;
        match rustix::net::connect(socket, address) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(place.refused(error)),
        }
    }
    rustix::io::ioctl_fionbio(socket, true).map_err(os)
}

/// Reserves a descriptor that is held for long.
fn reserve(fd: rustix::fd::OwnedFd) -> Result<ReservedFd> {
    ReservedFd::new(fd).map_err(|error| Error::os("fcntl(F_DUPFD)", error))
}
