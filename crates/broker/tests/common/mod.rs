// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker as a process, and simulated QEMUs: one socket to the broker's server, and one that speaks QMP.
#![allow(dead_code, unused_imports, reason = "each test program uses its part of this")]

pub mod by_hand;
pub mod endpoint;
pub mod hold;
pub mod host;
pub mod qmp;
pub mod tcp;

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{SocketType, sockopt},
    process::{Pid, Signal, kill_process},
};
use tombolo_broker::{
    fd_passing,
    host::{descriptor_store::DescriptorStore, paths::control_socket},
};
use tombolo_channel::{Backends, Messages, Options};
use tombolo_control::{Boxes, Envelope, Event, MESSAGE_MAX, Message, Path as Way, Session};

/// Longer than anything here takes.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Waits until `done` returns a value.
#[track_caller]
pub fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(began.elapsed() < LIMIT, "never: {what}");
        let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 2_000_000 }));
    }
}

/// A broker in a folder of its own.
pub struct Daemon {
    folder: tempfile::TempDir,
    child: Option<Child>,
    /// Further options of the broker.
    pub options: Vec<&'static str>,
    /// A command that executes the broker.
    pub under: Vec<&'static str>,
}

impl Daemon {
    pub fn start(config: &str) -> Self {
        let mut daemon = Self::new(config);
        daemon.restart();
        daemon
    }

    /// Makes a broker that is still to be started.
    pub fn new(config: &str) -> Self {
        let daemon = Self { folder: tempfile::tempdir().unwrap(), child: None, options: Vec::new(), under: Vec::new() };
        daemon.configure(config);
        daemon
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn configure(&self, config: &str) {
        fs::write(self.file("tombolod.toml"), config).unwrap();
    }

    /// Starts the broker, which must not be running.
    pub fn restart(&mut self) {
        let errors = fs::OpenOptions::new().create(true).append(true).open(self.file("log")).unwrap();
        let whole = [&self.under[..], &[env!("CARGO_BIN_EXE_tombolod")]].concat();
        let child = Command::new(whole[0])
            .args(&whole[1..])
            .arg("--config")
            .arg(self.file("tombolod.toml"))
            .arg("--state")
            .arg(self.path())
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .unwrap();
        self.child = Some(child);
        until("the broker answers", || {
            if let Some(status) = self.child.as_mut().unwrap().try_wait().unwrap() {
                panic!("the broker ended with {status}: {}", self.log());
            }
            Client::try_connect(self.path())
        });
    }

    pub fn pid(&self) -> i32 {
        Pid::from_child(self.child.as_ref().unwrap()).as_raw_nonzero().get()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(self.child.as_ref().unwrap());
        kill_process(pid, signal).unwrap();
    }

    /// Kills the broker with SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.take().unwrap().wait().unwrap();
    }

    /// Ends the broker with SIGTERM, and waits for its end.
    pub fn stop(&mut self) {
        self.signal(Signal::TERM);
        let status = self.child.take().unwrap().wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.file("log")).unwrap_or_default()
    }

    pub fn client(&self) -> Client {
        until("the broker answers", || Client::try_connect(self.path()))
    }

    /// Returns the number of bytes of memory that the broker uses.
    pub fn resident(&self) -> u64 {
        let pid = self.child.as_ref().unwrap().id();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Returns the number of descriptors that the broker has open.
    pub fn open_files(&self) -> usize {
        let pid = self.child.as_ref().unwrap().id();
        fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
    }

    /// Limits the number of files that the broker may have open.
    pub fn allow_files(&self, most: u64) {
        allow_files(Pid::from_child(self.child.as_ref().unwrap()).as_raw_nonzero().get(), most);
    }

    /// Returns the process that is the descriptor store: the one that holds the lock.
    pub fn store(&self) -> i32 {
        let holds = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("\0hold\0") && line.contains(self.path().to_str().unwrap())
        };
        let pids = fs::read_dir("/proc").unwrap().flatten();
        pids.filter_map(|it| it.file_name().to_str()?.parse().ok()).find(holds).expect("the descriptor store runs")
    }

    /// Returns the keys of what the descriptor store keeps.
    pub fn kept(&self) -> Vec<String> {
        DescriptorStore::find(self.path(), false).and_then(|store| store.all()).unwrap().into_keys().collect()
    }
}

/// Limits the number of files that a process may have open.
pub fn allow_files(pid: i32, most: u64) {
    use rustix::process::{Resource, Rlimit, prlimit};
    let limit = Rlimit { current: Some(most), maximum: Some(4096) };
    prlimit(Pid::from_raw(pid), Resource::Nofile, limit).unwrap();
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The broker logs the reason of its end after its sockets closed.
            let _ = poll(&mut [], Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
            eprintln!("--- the broker's log:\n{}", self.log());
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Ok(store) = DescriptorStore::find(self.path(), false) {
            for key in store.all().unwrap_or_default().into_keys() {
                let _ = store.forget(&key);
            }
            let _ = store.leave();
        }
    }
}

/// A tool that sends requests to the broker.
pub struct Client {
    pub socket: OwnedFd,
}

impl Client {
    pub fn connect_raw(folder: &Path) -> Option<Self> {
        Self::connect_to(&control_socket(folder))
    }

    pub fn try_connect(folder: &Path) -> Option<Self> {
        Self::connect_raw(folder)?.greet()
    }

    /// Connects to the broker with this program socket, and greets it.
    #[track_caller]
    pub fn of_socket(socket: &Path) -> Self {
        Self::connect_to(socket).and_then(Self::greet).expect("the broker lets it in")
    }

    fn connect_to(socket: &Path) -> Option<Self> {
        let socket = fd_passing::connect(socket, SocketType::SEQPACKET).ok()?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(LIMIT)).unwrap();
        Some(Self { socket })
    }

    fn greet(self) -> Option<Self> {
        self.send_message(0, hello());
        matches!(self.receive_message()?.message, Message::Hello { .. }).then_some(self)
    }

    pub fn send_message(&self, serial: u32, message: Message) {
        let _ = fd_passing::send(&self.socket, &Envelope { serial, message }.encode(), &[]);
    }

    /// Returns the next message; `None` at the end.
    pub fn receive_message(&self) -> Option<Envelope> {
        let mut buffer = [0; MESSAGE_MAX];
        match fd_passing::receive(&self.socket, &mut buffer) {
            Ok((0, _)) => None,
            Ok((len, _)) => Some(Envelope::decode(Way::Socket, &buffer[..len]).unwrap()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("the broker says nothing"),
            Err(_) => None,
        }
    }

    /// Returns all answers of the broker.
    pub fn ask(&self, message: Message) -> Vec<Message> {
        self.send_message(7, message);
        let mut answers = Vec::new();
        loop {
            let said = self.receive_message().expect("an answer");
            assert_eq!(said.serial, 7);
            match said.message {
                Message::Done {} => return answers,
                refuse @ Message::Refuse { .. } => return vec![refuse],
                message => answers.push(message),
            }
        }
    }

    #[track_caller]
    pub fn link(&self, a: &str, b: &str) {
        let answers = self.ask(add(a, b, 0));
        assert_eq!(answers, [], "{a} and {b}");
    }

    /// Returns the code and the reason with which the broker refuses a link.
    #[track_caller]
    pub fn refusal(&self, message: Message) -> (u16, String) {
        match &self.ask(message)[..] {
            [Message::Refuse { code, reason }] => (*code, reason.to_string()),
            other => panic!("{other:?}"),
        }
    }

    pub fn links(&self) -> Vec<Message> {
        let mut rows = self.ask(Message::List { what: tombolo_control::What::Links });
        rows.retain(|row| !matches!(row, Message::EndRow { .. }));
        rows
    }

    /// Returns the endpoints of all links.
    pub fn ends(&self) -> Vec<Message> {
        let mut rows = self.ask(Message::List { what: tombolo_control::What::Links });
        rows.retain(|row| matches!(row, Message::EndRow { .. }));
        rows
    }

    pub fn domains(&self) -> Vec<Message> {
        self.ask(Message::List { what: tombolo_control::What::Domains })
    }
}

pub fn add(a: &str, b: &str, size: u64) -> Message {
    Message::AddLink { a: a.parse().unwrap(), b: b.parse().unwrap(), size }
}

pub fn remove(a: &str, b: &str) -> Message {
    Message::RemoveLink { a: a.parse().unwrap(), b: b.parse().unwrap() }
}

pub fn hello() -> Message {
    Message::Hello { version_min: 1, version_max: 1, epoch: 0, boot: [0; 16], name: "test".parse().unwrap() }
}

/// The connection of a QEMU to the ivshmem server.
pub struct Device {
    pub socket: OwnedFd,
}

impl Device {
    pub fn connect(folder: &Path, name: &str) -> Self {
        let path = folder.join(format!("{name}.ivshmem"));
        let socket = until("the server lets QEMU in", || fd_passing::connect(&path, SocketType::STREAM).ok());
        Self { socket }
    }

    /// Returns the next message within `wait`; `None` if the server sends nothing.
    pub fn next(&self, wait: Duration) -> Option<(i64, Option<OwnedFd>)> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(wait)).unwrap();
        let mut bytes = [0; 8];
        match fd_passing::receive(&self.socket, &mut bytes) {
            Ok((8, descriptors)) => {
                assert!(descriptors.len() <= 1);
                Some((i64::from_le_bytes(bytes), descriptors.into_iter().next()))
            }
            Ok((0, _)) => Some((i64::MIN, None)),
            Ok((len, _)) => panic!("{len} bytes of a message"),
            Err(_) => None,
        }
    }

    #[track_caller]
    pub fn must(&self) -> (i64, Option<OwnedFd>) {
        self.next(LIMIT).expect("a message")
    }

    /// Returns whether the server closed the connection.
    pub fn is_closed(&self) -> bool {
        matches!(self.next(LIMIT), Some((i64::MIN, None)) | None)
    }
}

fn hello_of_guest(name: &str, version: u16, epoch: u64, boot: u8) -> Message {
    Message::Hello { version_min: 1, version_max: version, epoch, boot: [boot; 16], name: name.parse().unwrap() }
}

/// Begins a session with the host in the memory of a machine's device, with `hello` as its first message.
fn say_hello(memory: &OwnedFd, epoch: u64, hello: Message, notify: impl Fn()) -> Session {
    let mut session = Session::begin(Way::Host, epoch, &mut GuestBoxes(memory)).unwrap();
    until("the host's box", || {
        let (event, changed) = session.turn(&mut GuestBoxes(memory)).unwrap();
        if changed {
            notify();
        }
        matches!(event, Some(Event::Began)).then_some(())
    });
    session.queue_message(&Envelope::statement(hello));
    session
}

/// Sends the Hello of a guest's first broker in its device's memory, and nothing more once it was taken.
pub fn greet(memory: &OwnedFd, name: &str, notify: impl Fn()) {
    let epoch = u64::MAX;
    let mut session = say_hello(memory, epoch, hello_of_guest(name, 1, epoch, 1), &notify);
    until("the machine's name", || {
        let (event, changed) = session.turn(&mut GuestBoxes(memory)).unwrap();
        if changed {
            notify();
        }
        matches!(event, Some(Event::Said(said)) if matches!(said.message, Message::You { .. })).then_some(())
    });
}

/// A simulated virtual machine: its device, its control socket, and a broker in its guest.
pub struct Vm {
    pub name: String,
    pub device: Device,
    pub memory: OwnedFd,
    /// Eventfd that notifies the host.
    pub host: OwnedFd,
    pub own: Vec<OwnedFd>,
    pub qmp: qmp::Fake,
    pub guest: Option<Session>,
    /// Messages from the host.
    pub heard: Vec<Message>,
    /// Newest version that its broker speaks.
    pub version: u16,
}

pub const VECTORS: usize = 8;

impl Vm {
    /// Starts a machine whose guest's broker has sent Hello, and sends nothing more.
    pub fn start(daemon: &Daemon, name: &str) -> Self {
        let vm = Self::without_broker(daemon, name);
        vm.greet();
        vm
    }

    /// Starts a machine whose guest is not there yet.
    pub fn without_broker(daemon: &Daemon, name: &str) -> Self {
        let qmp = qmp::Fake::start(&daemon.file(&format!("{name}.qmp")));
        let device = Device::connect(daemon.path(), name);
        Self::with(name, qmp, device)
    }

    /// Takes the machine whose doorbell was plugged at run time.
    pub fn arrived(name: &str, qmp: qmp::Fake) -> Self {
        let socket = until("a doorbell is plugged", || {
            let mut state = qmp.state();
            if state.doorbell.is_some() { state.connected.take() } else { None }
        });
        Self::with(name, qmp, Device { socket })
    }

    fn with(name: &str, qmp: qmp::Fake, device: Device) -> Self {
        assert_eq!(device.must().0, 0, "the version");
        assert_eq!(device.must().0, 1, "the number");
        let (number, memory) = device.must();
        assert_eq!(number, -1);
        let (number, host) = device.must();
        assert_eq!(number, 0, "the host's doorbell");
        let own = (0..VECTORS).map(|_| match device.must() {
            (1, Some(doorbell)) => doorbell,
            other => panic!("{other:?}"),
        });
        let own = own.collect();
        let (memory, host) = (memory.unwrap(), host.unwrap());
        Self { name: name.into(), device, memory, host, own, qmp, guest: None, heard: Vec::new(), version: 1 }
    }

    /// Does what `boot` does for the guest's first broker, until the host has taken its Hello; after that it sends
    /// nothing more.
    pub fn greet(&self) {
        greet(&self.memory, &self.name, || self.ring_host());
    }

    /// Starts a broker in the guest, which sends Hello.
    pub fn boot(&mut self, epoch: u64, boot: u8) {
        self.heard.clear();
        let hello = hello_of_guest(&self.name, self.version, epoch, boot);
        self.guest = Some(say_hello(&self.memory, epoch, hello, || self.ring_host()));
        self.listen_until("the host's Hello", |said| matches!(said, Message::Hello { .. }));
    }

    pub fn send_message(&mut self, message: Message) {
        assert!(self.guest.as_mut().unwrap().queue_message(&Envelope::statement(message)));
        self.turn();
    }

    pub fn ring_host(&self) {
        let _ = rustix::io::write(&self.host, &1u64.to_ne_bytes());
    }

    fn turn(&mut self) {
        let Some(session) = &mut self.guest else { return };
        let (event, changed) = session.turn(&mut GuestBoxes(&self.memory)).unwrap();
        if changed {
            let _ = rustix::io::write(&self.host, &1u64.to_ne_bytes());
        }
        match event {
            Some(Event::Said(said)) => self.heard.push(said.message),
            Some(Event::Broke(fault)) => panic!("the host broke {fault}"),
            Some(Event::Began) => {
                // The host's broker began anew, and so does the conversation.
                let hello = hello_of_guest(&self.name, 1, session.epoch(), 1);
                session.queue_message(&Envelope::statement(hello));
            }
            None => {}
        }
    }

    /// Lets the guest's broker send and receive once.
    pub fn listen_once(&mut self) {
        self.turn();
    }

    /// Lets the guest's broker listen until the host sent a message for which `like` holds.
    #[track_caller]
    pub fn listen_until(&mut self, what: &str, like: impl Fn(&Message) -> bool) -> Message {
        until(what, || {
            self.turn();
            self.heard.iter().position(&like).map(|at| self.heard.remove(at))
        })
    }

    /// Returns the next doorbell of the server: its number and eventfd.
    #[track_caller]
    pub fn doorbell(&self) -> (i64, OwnedFd) {
        let (number, doorbell) = self.device.must();
        (number, doorbell.expect("an eventfd"))
    }
}

/// Returns how often an eventfd was notified since the last call.
pub fn take_notifications(doorbell: &OwnedFd) -> u64 {
    let mut polled = [PollFd::new(doorbell, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    if polled[0].revents().is_empty() {
        return 0;
    }
    let mut count = [0; 8];
    rustix::io::read(doorbell, &mut count).unwrap();
    u64::from_ne_bytes(count)
}

/// The boxes from the guest's side.
pub struct GuestBoxes<'a>(pub &'a OwnedFd);

impl Boxes for GuestBoxes<'_> {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> std::io::Result<()> {
        rustix::io::pread(self.0, &mut bytes[..], offset as u64)?;
        Ok(())
    }
    fn store(&mut self, offset: usize, bytes: &[u8]) -> std::io::Result<()> {
        rustix::io::pwrite(self.0.as_fd(), bytes, (4096 + offset) as u64)?;
        Ok(())
    }
}

/// Two machines that may each have a link with the other and with the host.
pub const TWO: &str = r#"
[host]
region = "1MiB"
[domain.a]
[domain.b]
[[allow]]
from = "*"
to = "*"
service = "*"
"#;

/// Domains `a`, `b`, `c`; `a` may connect to `b` and to the host.
pub const TRIO: &str = r#"
[host]
region = "1MiB"
[domain.a]
[domain.b]
[domain.c]
[[allow]]
from = "a"
to = "b"
service = "*"
[[allow]]
from = "a"
to = "host"
service = "time"
"#;

/// Exchanges questions and answers between two endpoints that sleep whenever they wait.
pub fn wake_each_other(listens: &Backends, connects: &Backends, service: &str) {
    let address = format!("vm:{service}").parse().unwrap();
    let options = Options::new().spin(Duration::ZERO);
    let mut listener = listens.listen::<Messages>(&address, &options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut replies, mut questions) = listener.accept().unwrap().into_split();
            let mut message = [0; 64];
            while let Some(len) = questions.recv(&mut message).unwrap() {
                replies.send(&message[..len]).unwrap();
            }
        });
        let (mut questions, mut replies) = connects.connect::<Messages>(&address, &options).unwrap().into_split();
        for round in 0..1000u32 {
            questions.send(&round.to_le_bytes()).unwrap();
            let mut answer = [0; 64];
            assert_eq!(replies.recv(&mut answer).unwrap(), Some(4));
            assert_eq!(answer[..4], round.to_le_bytes());
        }
    });
}
