// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A simulated machine that talks to programs of its host. The host's broker is a process, as it ships; the guest's
//! broker is a thread of this process, on the devices that a QEMU would get. The host's own relay plays the kernel
//! module.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
};

use rustix::net::SocketType;
use tombolo_broker::{
    endpoint::broker::{Broker, Settings},
    fd_passing,
    host::{
        accounts::{
            devices::{HostDevices, RelayedLinks},
            relay::RelayedLink,
            stored::StoredConnections,
        },
        mapped::Mapped,
        notifier::Lane,
        paths::program_socket,
    },
};
use tombolo_control::{LinkState, Message, vector_of};
use tombolo_domain_ivshmem::VmDomain;
use tombolo_os::event::{eventfd, raise};
use tombolo_testing::conformance;
pub use tombolo_testing::conformance::{accept, patience};

use super::{Daemon, VECTORS, Vm, until};

/// One machine that may connect to any service of the host, and the host to any of its services.
pub const PAIR: &str = r#"
[host]
number = 0
region = "128MiB"
window = "1280KiB"
[domain.a]
number = 7
memory = "1GiB"
[[allow]]
from = "*"
to = "*"
service = "*"
[[link]]
between = ["a", "host"]
"#;

/// The broker of a guest.
pub struct Guest {
    pub domain: VmDomain,
    pub socket: PathBuf,
    pub lines: RelayedLinks,
    stop: OwnedFd,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Guest {
    /// Starts the broker on the device of `vm`.
    pub fn start(daemon: &Daemon, vm: &Vm, boot: u8) -> Self {
        Self::start_at(daemon, vm, boot, None)
    }

    /// As `start`, in a machine that can be reached at these addresses.
    pub fn start_at(daemon: &Daemon, vm: &Vm, boot: u8, addresses: Option<Vec<[u8; 16]>>) -> Self {
        let socket = daemon.file(&format!("{}.guest", vm.name));
        let listener = fd_passing::listen(&socket, SocketType::SEQPACKET, 0o600, None, None).unwrap();
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        let lines = RelayedLinks::default();
        let devices = HostDevices::new(
            copy(&vm.memory),
            copy(&vm.host),
            copy(&vm.own[0]),
            lines.clone(),
            StoredConnections::default(),
            Arc::new(|_| {}),
            Lane::default(),
        );
        let settings = Settings { boot: [boot; 16], window: 1280 << 10 };
        let broker = Broker::begin(settings, devices, listener).unwrap();
        let broker = if let Some(all) = addresses { broker.with_addresses_of(all) } else { broker };
        let stop = eventfd(0).unwrap();
        let ended = copy(&stop);
        let thread = thread::spawn(move || broker.run(ended.as_fd()));
        Self { domain: VmDomain::through(&socket), socket, lines, stop, thread: Some(thread) }
    }

    /// Finds the devices of the link that is up, and the doorbell that comes with it.
    pub fn plug(&self, daemon: &Daemon, vm: &Vm) -> (u32, u32) {
        let (link, generation) = until("the link is up", || {
            daemon.client().links().iter().find_map(|row| match row {
                Message::LinkRow { link, generation, state: LinkState::Up, .. } => Some((*link, *generation)),
                _ => None,
            })
        });
        let (number, doorbell) = vm.device.must();
        assert!(number >= 2, "the host's own doorbell is for the brokers");
        let state = vm.qmp.state();
        let memory = |side: &str| {
            let end = format!("{link}-{generation}-{side}");
            state.memories.iter().find(|(id, _)| id.ends_with(&end)).unwrap().1.fd.try_clone().unwrap()
        };
        let incoming = vm.own[usize::from(vector_of(link, VECTORS as u16))].try_clone().unwrap();
        let outgoing = Arc::new(doorbell.expect("an eventfd"));
        let own = memory("own");
        let own_memory = Mapped::new(&own).unwrap();
        let line = RelayedLink { own, own_memory, peer: memory("peer"), outgoing, lane: Lane::default(), incoming };
        self.lines.lock().unwrap().insert((link, generation), Arc::new(line));
        (link, generation)
    }
}

impl Guest {
    /// Ends the broker, whatever its result.
    pub fn forget(&mut self) {
        raise(&self.stop);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        raise(&self.stop);
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(ended) = ended.filter(|_| !thread::panicking()) {
            ended.expect("the broker does not panic").expect("the broker does not fail");
        }
    }
}

/// A host with one machine.
pub struct World {
    pub host: VmDomain,
    pub guest: Guest,
    pub vm: Vm,
    pub daemon: Daemon,
    made: AtomicU32,
}

impl World {
    pub fn new() -> Self {
        Self::start(PAIR, |_| {})
    }

    /// Makes a world with a configuration; `link` makes a link where the configuration has none.
    pub fn start(config: &str, link: impl FnOnce(&Daemon)) -> Self {
        Self::start_at(Daemon::start(config), None, link)
    }

    /// Makes a world with a running broker, and a machine that can be reached at these addresses.
    pub fn start_at(daemon: Daemon, addresses: Option<Vec<[u8; 16]>>, link: impl FnOnce(&Daemon)) -> Self {
        let vm = Vm::start(&daemon, "a");
        vm.qmp.state().unsealed = true;
        let guest = Guest::start_at(&daemon, &vm, 1, addresses);
        link(&daemon);
        guest.plug(&daemon, &vm);
        let host = VmDomain::through(program_socket(daemon.path()));
        let world = Self { host, guest, vm, daemon, made: 0.into() };
        world.meet();
        world
    }

    /// Waits until the brokers have met: only then a connection succeeds.
    pub fn meet(&self) {
        use tombolo_domain::Rendezvous;
        let service = format!("meet{}", self.made.fetch_add(1, Ordering::Relaxed));
        let mut listener = until("the host listens", || self.host.listen(&service).ok());
        let connected =
            until("the brokers meet", || self.guest.domain.connect(&format!("host/{service}"), patience()).ok());
        drop((accept(&mut *listener), connected));
    }

    pub fn service(&self, domain: &str) -> String {
        format!("{domain}/service{}", self.made.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the socket at which programs of the host find their broker.
    pub fn socket(&self) -> PathBuf {
        program_socket(self.daemon.path())
    }
}

/// Plays the part of a child process; does nothing in the parent. Must be called from the test `child_process`.
pub fn play() {
    let Some(part) = conformance::part() else { return };
    let domain = VmDomain::through(&part.place);
    match &*part.role {
        "stream" => stream(domain, &part.service),
        // A QEMU that only connects: the arguments are its broker's folder, and its name.
        "qemu" => {
            let device = super::Device::connect(&part.place, &part.service);
            while device.next(super::LIMIT).is_some_and(|(number, _)| number != i64::MIN) {}
        }
        _ => part.play(&domain),
    }
}

/// Writes without end.
fn stream(domain: VmDomain, service: &str) {
    let backends = tombolo_channel::Backends::new().with(domain);
    let address = format!("vm:{service}").parse().expect("an address");
    let mut stream: tombolo_channel::Stream = backends.connect(&address, &Default::default()).expect("it listens");
    while std::io::Write::write_all(&mut stream, &[7; 4096]).is_ok() {}
}
