// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two domains and the broker of each, in this process. Memfds and eventfds replace the memory and events of the kernel
//! module and QEMU; a host's broker gives such files as well. The broker here has no policy and trusts its clients.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use rustix::{
    event::{EventfdFlags, PollFlags},
    fs::{MemfdFlags, Mode, OFlags},
    net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType},
};
use tombolo_control::{Envelope, Life, MESSAGE_MAX, Message, Name, Path, VERSION, VERSION_FIND, WINDOWS_AT, code};
use tombolo_domain::{Endpoint, Rendezvous};
use tombolo_domain_ivshmem::{CLOSED, DOORBELLS, STATE_AT, VmDomain};
use tombolo_os::{lock::lock, passing, poll};
use tombolo_testing::conformance::{self, Actor, eventually};
pub use tombolo_testing::conformance::{accept, patience};

/// Length of a window in bytes by default: sparse, so that unused bytes take no memory.
pub const WINDOW: u64 = 8 << 20;
/// Returns the length of the windows of the next connection; `None` if there is no more memory.
pub type Windows = Box<dyn FnMut() -> Option<u64> + Send>;
/// Number of descriptors besides the two windows and the socket.
const EVENTS: usize = DOORBELLS;

/// One endpoint of a connection, as its broker sees it.
struct End {
    domain: &'static str,
    /// The broker's side of the connection's socket.
    socket: OwnedFd,
    memory: OwnedFd,
    events: Vec<OwnedFd>,
}

impl End {
    fn new(domain: &'static str, window: u64) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let memory = rustix::fs::memfd_create("tombolo-test", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, WINDOWS_AT + window)?;
        let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let events = (0..EVENTS).map(|_| event()).collect::<Result<_, _>>()?;
        Ok((Self { domain, socket: ours, memory, events }, theirs))
    }

    fn notify_all(&self) {
        for event in &self.events {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    fn send_message(&self, message: Message) {
        let _ = send(&self.socket, 0, message, &[]);
    }
}

struct State {
    listeners: BTreeMap<String, Arc<OwnedFd>>,
    calls: Vec<Arc<[End; 2]>>,
    serial: u32,
    windows: Windows,
    lives: BTreeMap<&'static str, Life>,
    /// Services of `a` that wait for the other endpoint of a TCP connection, by its key.
    keys: BTreeMap<u32, Name>,
}

/// The two brokers, `a` and `b`, which share their state.
pub struct World {
    folder: tempfile::TempDir,
    state: Arc<Mutex<State>>,
    program_sockets: Vec<Arc<OwnedFd>>,
    made: AtomicU32,
    pub a: VmDomain,
    pub b: VmDomain,
}

impl World {
    pub fn new() -> Self {
        Self::with_windows(Box::new(|| Some(WINDOW)))
    }

    /// As `new`, with other windows.
    pub fn with_windows(windows: Windows) -> Self {
        let folder = tempfile::tempdir().expect("there is a place for temporary files");
        let state = State {
            listeners: BTreeMap::new(),
            calls: Vec::new(),
            serial: 0,
            windows,
            lives: BTreeMap::new(),
            keys: BTreeMap::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let mut program_sockets = Vec::new();
        let mut open = |name: &'static str| {
            let path = folder.path().join(name);
            let flags = SocketFlags::CLOEXEC;
            let program_socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            rustix::net::bind(&program_socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            rustix::net::listen(&program_socket, 128).unwrap();
            let (program_socket, state) = (Arc::new(program_socket), Arc::clone(&state));
            program_sockets.push(Arc::clone(&program_socket));
            thread::spawn(move || {
                while let Ok(client) = rustix::net::accept_with(&program_socket, SocketFlags::CLOEXEC) {
                    let state = Arc::clone(&state);
                    thread::spawn(move || converse(name, client, &state));
                }
            });
            VmDomain::through(path)
        };
        let (a, b) = (open("a"), open("b"));
        Self { folder, state, program_sockets, made: 0.into(), a, b }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub fn service(&self) -> String {
        format!("a/service{}", self.made.fetch_add(1, Ordering::Relaxed))
    }

    /// Reports the liveness of a domain to all its peers.
    pub fn live(&self, domain: &'static str, life: Life) {
        let mut state = self.state();
        state.lives.insert(domain, life);
        for call in &state.calls {
            for (end, other) in [(0, 1), (1, 0)] {
                if call[end].domain == domain {
                    call[other].send_message(Message::Life { link: 0, generation: 0, life });
                }
            }
        }
    }

    /// Tells all connections that their memory will be taken away (V-9).
    pub fn leave(&self) {
        for call in &self.state().calls {
            call.iter().for_each(|end| end.send_message(Message::Leave { link: 0, generation: 0, wait: 1000 }));
        }
    }

    /// Tells only the endpoints in `domain`.
    pub fn leave_in(&self, domain: &'static str) {
        for end in self.state().calls.iter().flat_map(|call| call.iter()).filter(|end| end.domain == domain) {
            end.send_message(Message::Leave { link: 0, generation: 0, wait: 1000 });
        }
    }

    /// Returns the number of connections so far.
    pub fn calls(&self) -> usize {
        self.state().calls.len()
    }

    /// Returns the memory that the two endpoints of the last connection write: the caller's in `b`, then the other's in
    /// `a`.
    pub fn memories(&self) -> [OwnedFd; 2] {
        let state = self.state();
        let call = state.calls.last().expect("there was a call");
        call.each_ref().map(|end| end.memory.try_clone().expect("a descriptor"))
    }

    /// Notifies all doorbells of the endpoint in `a` of the last connection.
    pub fn notify_a(&self) {
        self.state().calls.last().expect("there was a call")[1].notify_all();
    }

    /// The broker dies: it sends nothing more to anyone.
    pub fn lose_broker(&self) {
        for call in self.state().calls.drain(..) {
            for end in call.iter() {
                let _ = rustix::net::shutdown(&end.socket, Shutdown::Both);
            }
        }
    }

    /// Returns the socket of the broker of `a` or `b`.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn stale(&self) -> String {
        let service = self.service();
        let mut actor = Actor::start("listen", &self.socket("a"), &service);
        let there = |wanted| {
            eventually("the listener comes or goes", || self.state().listeners.contains_key(&service) == wanted)
        };
        there(true);
        actor.kill();
        there(false);
        service
    }

    /// Returns a peer in another process, and this side's connection to it.
    pub fn mortal(&self) -> (Actor, Box<dyn Endpoint>) {
        let service = self.service();
        let mut listener = self.a.listen(&service).expect("a fresh service is free");
        let actor = Actor::start("mortal", &self.socket("b"), &service);
        (actor, accept(&mut *listener))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for program_socket in &self.program_sockets {
            let _ = rustix::net::shutdown(program_socket, Shutdown::Both);
        }
    }
}

fn send(socket: impl AsFd, serial: u32, message: Message, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = Envelope { serial, message }.encode();
    passing::send(socket, &[IoSlice::new(&bytes)], descriptors, SendFlags::DONTWAIT).map(drop)
}

fn receive(socket: &OwnedFd) -> Option<Envelope> {
    let mut buffer = [0; MESSAGE_MAX];
    let (len, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()).ok()?;
    Envelope::decode(Path::Socket, &buffer[..len]).ok()
}

fn converse(domain: &'static str, client: OwnedFd, state: &Arc<Mutex<State>>) -> Option<()> {
    receive(&client)?;
    let name: Name = domain.parse().expect("a name");
    let hello = Message::Hello { version_min: VERSION, version_max: VERSION_FIND, epoch: 0, boot: [0; 16], name };
    send(&client, 0, hello, &[]).ok()?;
    let Envelope { serial, message } = receive(&client)?;
    let refuse = |code| send(&client, serial, Message::Refuse { code, reason: "test".into() }, &[]).ok();
    match message {
        Message::Listen { service } => {
            let key = format!("{domain}/{service}");
            let listener = Arc::new(client.try_clone().expect("a descriptor"));
            // A listener that has hung up is gone, though its own thread has not reported it yet.
            let listens = |other: &Arc<OwnedFd>| !poll::polls_as(other, PollFlags::HUP);
            match lock(state).listeners.entry(key.clone()) {
                Entry::Occupied(place) if listens(place.get()) => return refuse(code::EXISTS),
                Entry::Occupied(mut place) => drop(place.insert(Arc::clone(&listener))),
                Entry::Vacant(place) => drop(place.insert(Arc::clone(&listener))),
            }
            send(&client, serial, Message::Done {}, &[]).ok()?;
            while let Some(Envelope { serial, message }) = receive(&client) {
                if let Some(answer) = find(state, &service, message) {
                    send(&client, serial, answer, &[]).ok()?;
                }
            }
            let mut locked = lock(state);
            if locked.listeners.get(&key).is_some_and(|now| Arc::ptr_eq(now, &listener)) {
                locked.listeners.remove(&key);
            }
        }
        Message::Connect { peer, service, .. } => {
            let found = lock(state).listeners.get(&format!("{peer}/{service}")).cloned();
            let Some(listener) = found else { return refuse(code::NOT_FOUND) };
            // A listener that cannot be reached is gone, though its own thread has not reported it yet.
            let Some(window) = (lock(state).windows)() else { return refuse(code::QUOTA) };
            call(&client, domain, serial, &listener, (service, window), state)
                .or_else(|_| refuse(code::NOT_FOUND).ok_or(()))
                .ok()?;
        }
        _ => return refuse(code::UNSUPPORTED),
    }
    Some(())
}

/// Returns the answer to a program that listens at `service`, and finds or is found. Every address is a peer domain's.
fn find(state: &Arc<Mutex<State>>, service: &Name, message: Message) -> Option<Message> {
    let mut state = lock(state);
    match message {
        Message::Claim { key } => drop(state.keys.insert(key, service.clone())),
        Message::Unclaim { key } => drop(state.keys.remove(&key)),
        Message::Locate { .. } => return Some(Message::Near { domains: 1 }),
        Message::Find { key, .. } => {
            return Some(match state.keys.get(&key).cloned() {
                Some(service) => Message::Found { peer: "a".parse().expect("a name"), service },
                None => Message::Refuse { code: code::NOT_FOUND, reason: "test".into() },
            });
        }
        _ => {}
    }
    None
}

/// Announces a connection to both sides (V-2).
fn call(
    client: &OwnedFd,
    domain: &'static str,
    asked: u32,
    listener: &OwnedFd,
    (service, window): (Name, u64),
    state: &Arc<Mutex<State>>,
) -> Result<(), ()> {
    let (caller, caller_socket) = End::new(domain, window).map_err(drop)?;
    let (called, called_socket) = End::new("a", window).map_err(drop)?;
    let peer: Name = domain.parse().expect("a name");
    let (offset, len, channel) = (WINDOWS_AT, window, 4);
    let connect = Message::Connect { peer, service, offset, len, channel };
    let accept = Message::Accept { offset, len };
    let accept_it = |end: &End, other: &End| -> Result<(), ()> {
        let path = format!("/proc/self/fd/{}", other.memory.as_raw_fd());
        let theirs = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(drop)?;
        send(&end.socket, 0, accept.clone(), &[theirs.as_fd()]).map_err(drop)
    };
    let state_it = |to: &OwnedFd, serial, socket: &OwnedFd, own: &End, other: &End| -> Result<(), ()> {
        let mut all = vec![socket.as_fd(), own.memory.as_fd()];
        all.extend(other.events.iter().chain(&own.events).map(AsFd::as_fd));
        send(to, serial, connect.clone(), &all).map_err(drop)
    };
    let mut locked = lock(state);
    locked.serial += 1;
    accept_it(&called, &caller)?;
    state_it(listener, locked.serial, &called_socket, &called, &caller)?;
    state_it(client, asked, &caller_socket, &caller, &called)?;
    accept_it(&caller, &called)?;
    let ends = Arc::new([caller, called]);
    locked.calls.push(Arc::clone(&ends));
    drop(locked);
    for (end, other) in [(0, 1), (1, 0)] {
        let (ends, state) = (Arc::clone(&ends), Arc::clone(state));
        thread::spawn(move || {
            while receive(&ends[end].socket).is_some() {}
            if !lock(&state).calls.iter().any(|it| Arc::ptr_eq(it, &ends)) {
                return;
            }
            // Does what the kernel module does when no process has a window any more.
            let at = WINDOWS_AT + u64::from(STATE_AT);
            let _ = rustix::io::pwrite(&ends[end].memory, &[CLOSED], at);
            ends[other].notify_all();
            ends[other].send_message(Message::Close {});
        });
    }
    Ok(())
}

/// Plays the part of a child process; does nothing in the parent. Must be called from the test `child_process`.
pub fn play() {
    let Some(part) = conformance::part() else { return };
    part.play(&VmDomain::through(&part.place));
}
