// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layer 2. Uses: os, layout, mem, domain, control.
//!
//! The backend between virtual machines under QEMU, and between a virtual machine and its host. Memory is a window of an
//! ivshmem device, doorbells are its interrupts, and the rendezvous is the broker (`tombolod`) of one's own kernel,
//! which agrees with the peer's and hands out what they agreed. The normative text is `spec/4-domain-vm.md`.
//!
//! What a program gets for a call is its own window, the peer's (read-only), and a way to ring. In a guest these are
//! descriptors of the kernel module (`kernel/ivshmem`); on a host they are memfds and eventfds. After that no broker
//! takes part: segments are ranges of the window, control messages go through its first page.
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
/// Where the broker listens unless `TOMBOLO_BROKER` says otherwise.
const BROKER: &str = "/run/tombolo/broker.sock";

/// Virtual machines of one host, and the host, met through the broker of this kernel.
///
/// A service is `NAME/SERVICE`: the name that the host's broker gave the machine, and that of the service in it. Whoever
/// listens may leave its own `NAME/` out. The broker's socket is `$TOMBOLO_BROKER`, or `/run/tombolo/broker.sock`.
#[derive(Clone, Debug, Default)]
pub struct VmDomain {
    broker: Option<PathBuf>,
    idle: Arc<Idle>,
}

impl VmDomain {
    /// The broker whose socket the environment names, looked up at each call.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The broker at `socket`.
    #[must_use]
    pub fn through(socket: impl Into<PathBuf>) -> Self {
        Self { broker: Some(socket.into()), idle: Arc::default() }
    }

    /// The number and the name of the domain that has `number`, or of this one; none if the configuration says nothing
    /// of it, or this domain has no link with it (B-19).
    ///
    /// # Errors
    /// There is no broker, or it does not answer.
    pub fn who(&self, number: Option<u16>) -> Result<Option<(u16, Name)>> {
        Client::open(&self.broker())?.who(number.unwrap_or(NO_NUMBER))
    }

    /// Whether somebody said which broker is to be asked.
    #[must_use]
    pub fn is_named(&self) -> bool {
        self.named().is_some()
    }

    /// Whether there is a socket where the broker is to be asked.
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

/// The domain, if it is said, and the service (V-1).
fn parse(service: &str) -> Result<(Option<Name>, Name)> {
    let (domain, name) = service.split_once('/').map_or((None, service), |(domain, name)| (Some(domain), name));
    let why = "it looks like NAME/SERVICE, both of 1 to 64 letters, digits, `.`, `_` and `-`, and not beginning with `.` or `-`";
    let bad = |_| Error::BadService { service: service.into(), why };
    Ok((domain.map(str::parse).transpose().map_err(bad)?, name.parse().map_err(bad)?))
}

/// The domain that is to be reached, and the service there (V-1).
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

    /// What this endpoint says at once is there when the peer looks first (V-2).
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

/// Calls arrive on the socket on which the service was registered; it ends with the socket.
#[derive(Debug)]
struct VmListener {
    client: Client,
    /// The process that listens.
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
    /// Ends the service, as a listener on one kernel does: a child between fork and exec may hold a copy of the socket (D-12).
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
