// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 2. Uses: os, layout, mem, domain, control.
//!
//! Implements the backend between virtual machines under QEMU, and between a virtual machine and its host. Memory is a
//! window of an ivshmem device, and doorbells are its interrupts. The rendezvous is the broker (`tombolod`) of the
//! program's own kernel, which agrees on a connection with the peer's broker and hands out its parts. The normative
//! text is `spec/4-domain-vm.md`.
//!
//! For each connection a program gets its own window, the peer's (read-only), and a way to notify the peer. In a guest
//! these are descriptors of the kernel module (`kernel/ivshmem`); on a host they are memfds and eventfds. After that no
//! broker takes part: segments are ranges of the window, and control messages go through its first page.
//!
//! ```no_run
//! use tombolo_domain::{Deadline, Rendezvous};
//! use tombolo_domain_ivshmem::VmDomain;
//!
//! // In the virtual machine `db`:
//! let mut listener = VmDomain::new().listen("db/query")?;
//! // In the virtual machine `web`:
//! let mut link = VmDomain::new().connect("db/query", Deadline::NEVER)?;
//! link.send(b"hello", None)?;
//! # Ok::<(), tombolo_domain::Error>(())
//! ```
#![deny(unsafe_code)]

mod boxes;
mod client;
mod finder;
mod forks;
mod hub;
pub mod interface;
mod link;
mod mailbox;
pub mod module;
mod pool;
mod port;
mod socket;
mod sys;
pub mod uapi;

use std::{env, os::fd::BorrowedFd, path::PathBuf, sync::Arc};

use tombolo_control::{NO_NUMBER, Name};
use tombolo_domain::{Connecting, Deadline, Endpoint, Error, Held, Listener, PeerFinder, Rendezvous, Result};

pub use tombolo_layout::outline;

pub use crate::{
    boxes::ModuleBoxes,
    mailbox::{CLOSED, STATE_AT},
    port::DOORBELLS,
};
use crate::{
    client::{Client, Idle, PendingCall},
    finder::VmFinder,
    link::VmEndpoint,
};

/// The part of an address before the colon.
const SCHEME: &str = "vm";
/// Path of the broker's socket unless `TOMBOLO_BROKER` names another.
const BROKER: &str = "/run/tombolo/broker.sock";

/// Connects virtual machines of one host, and the host, through the broker of this kernel.
///
/// A service is `NAME/SERVICE`: the name that the host's broker gave the machine, and the name of the service in it. A
/// listener may omit its own `NAME/`. The broker's socket is `$TOMBOLO_BROKER`, or `/run/tombolo/broker.sock`.
#[derive(Clone, Debug, Default)]
pub struct VmDomain {
    broker: Option<PathBuf>,
    idle: Arc<Idle>,
}

impl VmDomain {
    /// Uses the broker whose socket the environment names. The environment is read at each call.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Uses the broker at `socket`.
    #[must_use]
    pub fn through(socket: impl Into<PathBuf>) -> Self {
        Self { broker: Some(socket.into()), idle: Arc::default() }
    }

    /// Returns the number and the name of the domain that has `number`, or of this domain. Returns none if the
    /// configuration does not name it, or if this domain has no link with it (B-19).
    ///
    /// # Errors
    /// There is no broker, or it does not answer.
    pub fn who(&self, number: Option<u16>) -> Result<Option<(u16, Name)>> {
        Client::open(&self.broker())?.who(number.unwrap_or(NO_NUMBER))
    }

    /// Returns whether the caller or the environment named the broker to use.
    #[must_use]
    pub fn is_named(&self) -> bool {
        self.named().is_some()
    }

    /// Returns whether the broker's socket exists.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.broker().exists()
    }

    fn call(&self, service: &str, deadline: Deadline) -> Result<VmEndpoint> {
        let (domain, name) = parse_peer(service)?;
        Client::connect(&self.broker(), &self.idle, &domain, name, deadline)
    }

    fn named(&self) -> Option<PathBuf> {
        let named = || env::var_os("TOMBOLO_BROKER").filter(|path| !path.is_empty()).map(PathBuf::from);
        self.broker.clone().or_else(named)
    }

    fn broker(&self) -> PathBuf {
        self.named().unwrap_or_else(|| BROKER.into())
    }
}

/// Splits a service into its domain, if there is one, and its name (V-1).
fn parse(service: &str) -> Result<(Option<Name>, Name)> {
    let (domain, name) = service.split_once('/').map_or((None, service), |(domain, name)| (Some(domain), name));
    let why = "it looks like NAME/SERVICE, both of 1 to 64 letters, digits, `.`, `_` and `-`, and not beginning with `.` or `-`";
    let bad = |_| Error::BadService { service: service.into(), why };
    Ok((domain.map(str::parse).transpose().map_err(bad)?, name.parse().map_err(bad)?))
}

/// Splits a service into the domain to reach and its name (V-1).
fn parse_peer(service: &str) -> Result<(Name, Name)> {
    let (domain, name) = parse(service)?;
    let why = "whom to reach is missing: NAME/SERVICE, with the machine's name in front";
    Ok((domain.ok_or_else(|| Error::BadService { service: service.into(), why })?, name))
}

impl Rendezvous for VmDomain {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        let (domain, name) = parse(service)?;
        let mut client = Client::open(&self.broker())?;
        if domain.is_some_and(|domain| domain != *client.domain()) {
            let why = "the broker here calls this machine by another name: leave out what is before the `/`";
            return Err(Error::BadService { service: service.into(), why });
        }
        client.listen(name, &format!("vm:{service}"))?;
        Ok(Box::new(VmListener { client, process: std::process::id() }))
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        let link = self.call(service, deadline)?;
        link.wait_accepted(deadline)?;
        Ok(Box::new(link))
    }

    /// Messages that this endpoint sends before the peer accepts are there when the peer first looks (V-2).
    fn connect_early(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        Ok(Box::new(self.call(service, deadline)?))
    }

    fn peer_finder(&self, service: &str) -> Option<Box<dyn PeerFinder>> {
        Some(Box::new(VmFinder::new(self.broker(), service.parse().ok()?)))
    }

    fn hold_for_fork(&self) -> Held {
        forks::note_fork();
        Held::default()
    }

    fn begin_connect(&self, service: &str) -> Result<Box<dyn Connecting>> {
        let (domain, name) = parse_peer(service)?;
        Ok(Box::new(PendingCall::begin(self.broker(), &self.idle, &domain, name)?))
    }
}

/// Accepts connections on the socket on which the service was registered. The service ends with the socket.
#[derive(Debug)]
struct VmListener {
    client: Client,
    /// Process that listens.
    process: u32,
}

impl Listener for VmListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        Ok(self.client.accept()?.map(|link| Box::new(link) as Box<dyn Endpoint>))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.client.fd()
    }
}

impl Drop for VmListener {
    /// Ends the service as a listener on one kernel does, because a child between fork and exec may hold a copy of the
    /// socket (D-12).
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.client.hang_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v1_service_is_a_machine_and_a_name() {
        let told = |text: &str| parse(text).map(|(domain, name)| (domain.map(|it| it.to_string()), name.to_string()));
        assert_eq!(told("db/query").unwrap(), (Some("db".into()), "query".into()));
        assert_eq!(told("query").unwrap(), (None, "query".into()));
        for bad in ["", "/", "db/", "/query", "a/b/c", "-a/b", "a b", "a/b\0"] {
            assert!(matches!(told(bad), Err(Error::BadService { .. })), "{bad:?}");
        }
    }

    #[test]
    fn v1_broker_that_is_missing_is_said_with_its_socket_and_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let domain = VmDomain::through(folder.path().join("broker.sock"));
        let error = domain.connect("db/query", Deadline::NEVER).unwrap_err();
        let source = std::error::Error::source(&error).expect("the reason").to_string();
        assert!(error.to_string().contains("broker.sock") && source.contains("start tombolod"), "{error}: {source}");
    }
}
