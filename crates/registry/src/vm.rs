// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `vm:NAME/SERVICE`: virtual machines by name. Names come from the broker of this kernel if there is one, and in a Xen
//! domain from the broker of dom0.

use std::{io::ErrorKind, sync::OnceLock};

use tombolo_domain::{Connecting, Deadline, Endpoint, Error, Listener, Rendezvous, Result};
use tombolo_domain_ivshmem::VmDomain;
use tombolo_domain_xen::XenNames;

/// Virtual machines by their names, whatever connects them.
#[derive(Debug)]
pub(crate) struct Vm {
    broker: VmDomain,
    xen: XenNames,
    /// Set once this kernel was found not to be a Xen domain, which does not change.
    no_xen: OnceLock<()>,
}

impl Vm {
    pub(crate) fn new(broker: VmDomain, xen: XenNames) -> Self {
        Self { broker, xen, no_xen: OnceLock::new() }
    }

    /// Returns the source of names, in this order: a broker that the environment names; Xen's names if dom0 publishes
    /// any; a broker whose socket is there. If a Xen domain has neither, the error names the remedy in dom0, elsewhere
    /// the remedy here.
    fn rendezvous(&self) -> &dyn Rendezvous {
        if self.uses_xen_names() { &self.xen } else { &self.broker }
    }

    fn uses_xen_names(&self) -> bool {
        if self.broker.is_named() || self.no_xen.get().is_some() {
            return false;
        }
        match self.xen.are_published() {
            Ok(told) => told || !self.broker.is_there(),
            // There is no XenStore to open.
            Err(Error::Os { call, source, .. }) if call.starts_with("open") && source.kind() == ErrorKind::NotFound => {
                let _ = self.no_xen.set(());
                false
            }
            Err(_) => false,
        }
    }
}

impl Rendezvous for Vm {
    fn scheme(&self) -> &'static str {
        self.broker.scheme()
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        self.rendezvous().listen(service)
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        self.rendezvous().connect(service, deadline)
    }

    fn connect_early(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        self.rendezvous().connect_early(service, deadline)
    }

    fn begin_connect(&self, service: &str) -> Result<Box<dyn Connecting>> {
        self.rendezvous().begin_connect(service)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use std::{
        io::{IoSlice, IoSliceMut},
        mem::MaybeUninit,
        os::fd::{AsFd, OwnedFd},
        path::Path,
        time::Duration,
    };

    use rustix::{
        event::EventfdFlags,
        fs::MemfdFlags,
        net::{
            AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
            SocketFlags, SocketType,
        },
    };
    use tombolo_domain_xen::{FakeXen, State, View};

    use super::*;

    /// Returns the error for a listener that does not exist.
    fn said(vm: &Vm) -> String {
        let error = vm.connect("right/file", Deadline::NEVER).map(drop).expect_err("nobody listens");
        match &error {
            Error::Os { source, .. } => format!("{error}: {source}"),
            _ => error.to_string(),
        }
    }

    /// Plays a broker that states each call as it was asked for, with a slice of a page, and whose peers never accept
    /// one. It ends with its programs.
    fn state_all(path: &Path, programs: usize) -> impl FnOnce() + use<> {
        let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        rustix::net::bind(&listener, &SocketAddrUnix::new(path).expect("a path")).expect("a name");
        rustix::net::listen(&listener, 2).expect("a socket that listens");
        let serve = move |program: OwnedFd, calls: &mut Vec<OwnedFd>| {
            let hear = |bytes: &mut [u8]| {
                let heard = rustix::net::recvmsg(
                    &program,
                    &mut [IoSliceMut::new(bytes)],
                    &mut Default::default(),
                    RecvFlags::empty(),
                );
                heard.map_or(0, |heard| heard.bytes)
            };
            let mut bytes = [0; 1024];
            let hello = hear(&mut bytes);
            rustix::io::write(&program, &bytes[..hello]).expect("a greeting for a greeting");
            loop {
                let len = hear(&mut bytes);
                if len == 0 {
                    return;
                }
                // Behind the names: offset, length, the first event channel.
                let (at, lasts) = (len - 18, [0, 8192, 1].map(u64::to_le_bytes));
                bytes[at..len].copy_from_slice(&lasts.concat()[..18]);
                let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().expect("a socket for the call");
                let slice = rustix::fs::memfd_create("slice", MemfdFlags::empty()).expect("a slice");
                rustix::fs::ftruncate(&slice, 8192).expect("room");
                let event = || rustix::event::eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
                let given: Vec<OwnedFd> = [theirs.into(), slice].into_iter().chain((0..6).map(|_| event())).collect();
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let descriptors: Vec<_> = given.iter().map(AsFd::as_fd).collect();
                assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
                let statement = [IoSlice::new(&bytes[..len])];
                // The send fails where the program has run out of time and gone.
                let _ = rustix::net::sendmsg(&program, &statement, &mut control, SendFlags::NOSIGNAL);
                calls.push(ours.into());
            }
        };
        move || {
            let mut calls = Vec::new();
            for _ in 0..programs {
                let program = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).expect("a program");
                serve(program, &mut calls);
            }
        }
    }

    #[test]
    fn v2_who_knocks_may_greet_before_the_peer_has_accepted() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("broker.sock");
        std::thread::scope(|scope| {
            scope.spawn(state_all(&path, 1));
            let vm = Vm::new(VmDomain::through(&path), FakeXen::new().domain(5).names());
            let connected = vm.connect_early("right/file", Deadline::after(Duration::from_secs(10)));
            let mut link = connected.expect("a call that nobody accepted");
            link.send(b"hello", None).expect("room for what is said before that");
            // A plain connect waits until it is accepted.
            let connected = vm.connect("right/file", Deadline::after(Duration::from_millis(20)));
            assert!(matches!(connected, Err(Error::TimedOut)), "{connected:?}");
        });
    }

    #[test]
    fn x20_names_come_from_dom0_unless_a_broker_is_named_or_is_all_there_is() {
        let (xen, folder) = (FakeXen::new(), tempfile::tempdir().expect("a folder"));
        let domain = xen.domain(5).names();
        let named = Vm::new(VmDomain::through(folder.path().join("broker.sock")), domain);
        assert!(said(&named).contains("start tombolod, or say with TOMBOLO_BROKER"), "{}", said(&named));
        if named.broker.is_named() && VmDomain::new().is_named() {
            panic!("the test's own environment names a broker");
        }
        let vm = Vm::new(VmDomain::new(), xen.domain(5).names());
        assert_eq!(said(&vm).contains("dom0's tombolod has told"), !vm.broker.is_there(), "{}", said(&vm));
        let mut host = xen.host().expect("dom0");
        let name = |name: &str| name.parse().expect("a name");
        let view =
            |name| View { name, state: State::Running, ours: vec![], theirs: vec!["*".parse().expect("a pattern")] };
        let told = BTreeMap::from([(7, view(name("right")))]);
        host.publish_views(&[(5, (name("left"), told))].into()).expect("dom0 may");
        let vm = Vm::new(VmDomain::new(), xen.domain(5).names());
        assert!(said(&vm).starts_with("nobody listens at vm:right/file:"), "{}", said(&vm));
    }
}
