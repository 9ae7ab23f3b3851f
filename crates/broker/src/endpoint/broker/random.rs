// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests the broker with programs and a host that act in random order, and a peer that may also be hostile. Uses
//! neither threads nor time: all events follow from the seed.

use std::{
    io::{IoSliceMut, Result},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard},
};

use rustix::{
    event::EventfdFlags,
    net::{AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType},
};
use tombolo_control::{
    BOX_LEN, Boxes, CONNECTION_CHANNELS, Envelope, Event, Path, Session, Side, WINDOWS_AT, channel_is_sound,
    window_is_sound,
};

use super::*;
use crate::endpoint::{
    connections::{Agreement, CONNECTIONS_MAX, Range, Stage},
    program,
};

/// Substitute for the kernel module: the existing windows, each with a descriptor that reports when it was closed.
#[derive(Debug, Default)]
struct Windows(Vec<(Agreement, OwnedFd)>);

impl Windows {
    /// Returns the windows that programs have.
    fn live(&mut self) -> Vec<Agreement> {
        self.0.retain(|(_, closed)| {
            let mut polled = [PollFd::new(closed, PollFlags::empty())];
            poll(&mut polled, Some(&Timespec::default())).unwrap();
            !polled[0].revents().contains(PollFlags::HUP)
        });
        self.0.iter().map(|(made, _)| *made).collect()
    }

    /// Checks that a range is in no window of another connection.
    fn is_free(&mut self, range: Range, but: u32) {
        let clash = |other: Range| range.1 != 0 && range.0 < other.0 + other.1 && other.0 < range.0 + range.1;
        for made in self.live() {
            assert!(made.serial == but || !clash(made.own), "{range:?} of {but} is that of {made:?}");
        }
    }
}

#[derive(Clone, Debug)]
struct Memory {
    boxes: Arc<Mutex<[Vec<u8>; 2]>>,
    side: usize,
    windows: Arc<Mutex<Windows>>,
    never: Arc<OwnedFd>,
}

const REGION: u64 = 1 << 20;

impl Memory {
    fn new() -> Self {
        let never = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let boxes = Arc::new(Mutex::new([vec![0; 2 * BOX_LEN], vec![0; 2 * BOX_LEN]]));
        Self { boxes, side: 0, windows: Arc::default(), never: Arc::new(never) }
    }

    fn other(&self) -> Self {
        Self { side: 1 - self.side, ..self.clone() }
    }

    fn windows(&self) -> MutexGuard<'_, Windows> {
        self.windows.lock().unwrap()
    }
}

impl Boxes for Memory {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        bytes.copy_from_slice(&self.boxes.lock().unwrap()[1 - self.side][offset..][..bytes.len()]);
        Ok(())
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.boxes.lock().unwrap()[self.side][offset..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

impl Pages for Memory {
    fn notify(&self) {}
    fn drain(&self) {}
}

impl Region for Memory {
    type Pages = Self;

    fn pages(&mut self) -> &mut Self {
        self
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }

    fn set_doorbell(&mut self, _doorbell: u16) {}

    fn clear(&mut self, offset: u64, len: u64) -> Result<()> {
        assert!(window_is_sound(REGION, offset, len), "{offset:#x} {len:#x}");
        self.windows().is_free((offset, len), 0);
        Ok(())
    }

    fn own(&mut self, made: &Agreement) -> Result<Vec<OwnedFd>> {
        assert!(window_is_sound(REGION, made.own.0, made.own.1) && channel_is_sound(made.channel), "{made:?}");
        let mut windows = self.windows();
        windows.is_free(made.own, 0);
        assert!(windows.live().iter().all(|it| it.channel != made.channel), "{made:?} has a channel of another");
        let (closed, window) = rustix::pipe::pipe().unwrap();
        windows.0.push((*made, closed));
        Ok(vec![window])
    }

    fn theirs(&mut self, made: &Agreement) -> Result<OwnedFd> {
        assert!(window_is_sound(REGION, made.theirs.0, made.theirs.1), "{made:?}");
        self.never.try_clone()
    }

    fn held(&mut self) -> Result<Vec<Agreement>> {
        Ok(self.windows().live())
    }

    fn departures(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn close_orphaned(&mut self, made: &Agreement) {
        assert!(made.own.1 == 0 || window_is_sound(REGION, made.own.0, made.own.1), "{made:?}");
        self.windows().is_free(made.own, made.serial);
    }

    fn hang_up(&mut self) {}
}

#[derive(Debug)]
struct Fake {
    host: Memory,
    /// Regions by link and generation.
    regions: Arc<Mutex<BTreeMap<(u32, u32), Memory>>>,
}

impl Devices for Fake {
    type Pages = Memory;
    type Region = Memory;

    fn host(&mut self) -> &mut Memory {
        &mut self.host
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.host.never.as_fd()
    }

    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn open(&mut self, news: &LinkNews) -> Result<Memory> {
        let mut regions = self.regions.lock().unwrap();
        Ok(regions.entry((news.link, news.generation)).or_insert_with(Memory::new).clone())
    }
}

/// Pseudo-random numbers that follow from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// State of a connection at the peer.
#[derive(Clone, Copy, PartialEq, Debug)]
enum At {
    /// The broker under test asked for it; below, the peer did.
    Asked,
    Connecting,
    Up,
    /// The broker under test sent Close; below, the peer did.
    Ended,
    Closed,
}

/// The peer's broker on a link.
struct Peer {
    memory: Memory,
    session: Session,
    epoch: u64,
    /// Its connections, as the peer sees them: `own` is in its own region.
    connections: BTreeMap<u32, (Agreement, At)>,
}

impl Peer {
    fn new(memory: &Memory) -> Self {
        let mut memory = memory.other();
        let session = Session::begin(Path::Link, 1, &mut memory).unwrap();
        Self { memory, session, epoch: 1, connections: BTreeMap::new() }
    }

    /// Starts a new broker, which keeps the connections from before or `forgets` them.
    fn begin_anew(&mut self, forgets: bool) {
        self.epoch += 1;
        self.session = Session::begin(Path::Link, self.epoch, &mut self.memory).unwrap();
        self.connections.retain(|_, (_, at)| !forgets && !matches!(at, At::Asked | At::Connecting));
    }

    fn send_message(&mut self, serial: u32, message: Message) {
        self.session.queue_message(&Envelope { serial, message });
    }

    fn hello(&mut self) {
        let (epoch, boot, own) = (self.epoch, [2; 16], name("b"));
        self.send_message(0, Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name: own });
        self.send_message(0, Message::Calls { connections: self.connections.len() as u16 });
        for (made, at) in self.connections.clone().into_values() {
            let side = if at == At::Closed { Side::Over } else { Side::Open };
            let ((offset, len), (peer_offset, peer_len)) = (made.own, made.theirs);
            let channel = made.channel;
            self.send_message(made.serial, Message::Call { offset, len, peer_offset, peer_len, channel, side });
        }
    }

    /// Receives and sends all messages that it can.
    fn turn(&mut self) {
        for _ in 0..8 {
            match self.session.turn(&mut self.memory).unwrap() {
                (Some(Event::Said(said)), _) => self.handle_message(said),
                (Some(Event::Began), _) => self.hello(),
                // After a protocol violation of the peer this is not expected either.
                (Some(Event::Broke(fault)), _) => panic!("the good broker is wrong: {fault}"),
                (None, changed) if !changed => break,
                (None, _) => {}
            }
        }
    }

    fn handle_message(&mut self, Envelope { serial, message }: Envelope) {
        let known = self.connections.get_mut(&serial);
        match (message, known) {
            (Message::Connect { offset, len, channel, .. }, _) => {
                let made = Agreement { serial, own: (0, 0), theirs: (offset, len), channel };
                self.connections.insert(serial, (made, At::Asked));
            }
            (Message::Accept { offset, len }, Some((made, at @ At::Connecting))) => {
                (made.theirs, *at) = ((offset, len), At::Up);
            }
            (Message::Refuse { .. }, Some((_, At::Connecting))) => drop(self.connections.remove(&serial)),
            (Message::Close {}, Some((_, At::Closed))) => drop(self.connections.remove(&serial)),
            (Message::Close {}, Some((_, at))) => *at = At::Ended,
            // A connection that the peer does not know.
            (Message::Call { .. }, None) => self.send_message(serial, Message::Close {}),
            (Message::Call { side: Side::Over, .. }, Some((_, at))) => match at {
                At::Closed => drop(self.connections.remove(&serial)),
                at => *at = At::Ended,
            },
            _ => {}
        }
    }

    /// Ends a connection as the protocol requires.
    fn close(&mut self, serial: u32) {
        match self.connections.get_mut(&serial) {
            Some((_, at @ At::Up)) => *at = At::Closed,
            Some((_, At::Ended)) => drop(self.connections.remove(&serial)),
            _ => return,
        }
        self.send_message(serial, Message::Close {});
    }

    fn window(&self, dice: &mut Dice) -> Range {
        let at = WINDOWS_AT + dice.below(100) * 8192;
        let used = self.connections.values().any(|(made, _)| made.own.0 == at);
        if used { self.window(dice) } else { (at, 8192) }
    }

    /// Sends a message that is permitted in this state or, seldom, any message.
    fn act(&mut self, dice: &mut Dice) {
        let nth = dice.below(self.connections.len().max(1) as u64) as usize;
        let (serial, at) = self.connections.iter().nth(nth).map_or((0, At::Closed), |(serial, (_, at))| (*serial, *at));
        match dice.below(40) {
            0 => self.forge_message(dice, serial),
            1 => {
                let forgets = dice.below(4) == 0;
                self.begin_anew(forgets);
            }
            2..14 if self.connections.len() < 90 => {
                let serial = 2 + 2 * dice.below(1000) as u32;
                let (own, channel) = (self.window(dice), 1 + CONNECTION_CHANNELS * dice.below(170) as u16);
                if self.connections.values().any(|(made, _)| made.serial == serial || made.channel == channel) {
                    return;
                }
                let made = Agreement { serial, own, theirs: (0, 0), channel };
                self.connections.insert(serial, (made, At::Connecting));
                let (peer, service) = (name("b"), name(["s", "t", "none"][dice.below(3) as usize]));
                self.send_message(serial, Message::Connect { peer, service, offset: own.0, len: own.1, channel });
            }
            14..30 if at == At::Asked => {
                if dice.below(4) == 0 {
                    self.connections.remove(&serial);
                    return self.send_message(serial, Message::Refuse { code: code::NOT_FOUND, reason: "no".into() });
                }
                let own = self.window(dice);
                if let Some((made, at)) = self.connections.get_mut(&serial) {
                    (made.own, *at) = (own, At::Up);
                }
                self.send_message(serial, Message::Accept { offset: own.0, len: own.1 });
            }
            30.. => self.close(serial),
            _ => {}
        }
    }

    fn forge_message(&mut self, dice: &mut Dice, known: u32) {
        let serial = if dice.below(2) == 0 { known } else { dice.below(40) as u32 };
        let mut range = || match dice.below(8) {
            0 => (dice.0, dice.below(1 << 40)),
            _ => (dice.below(256) * 4096, dice.below(4) * 4096),
        };
        let ((offset, len), (peer_offset, peer_len)) = (range(), range());
        let channel = dice.below(600) as u16;
        let side = if dice.below(2) == 0 { Side::Open } else { Side::Over };
        match dice.below(6) {
            0 => self.send_message(serial, Message::Calls { connections: channel }),
            1 => {
                // Connections that were never made, at a time when the peer may list its connections.
                self.begin_anew(true);
                self.turn();
                let made = Agreement { serial, own: (offset, len), theirs: (peer_offset, peer_len), channel };
                self.connections.insert(serial, (made, At::Up));
            }
            2 => self
                .send_message(serial, Message::Connect { peer: name("b"), service: name("s"), offset, len, channel }),
            3 => self.send_message(serial, Message::Accept { offset, len }),
            4 => self.send_message(serial, Message::Call { offset, len, peer_offset, peer_len, channel, side }),
            _ => self.send_message(serial, Message::Close {}),
        }
    }
}

/// A program: its conversation, and the descriptors that it was given.
struct Client {
    socket: OwnedFd,
    /// Sockets of connections, and windows.
    given: Vec<OwnedFd>,
}

impl Client {
    fn receive_all(&mut self) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        loop {
            let (mut control, mut bytes) = (RecvAncillaryBuffer::new(&mut space), [0; 1024]);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Ok(received) if received.bytes != 0 => {}
                _ => return,
            }
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    self.given.extend(rights);
                }
            }
        }
    }

    fn send_message(&self, message: Message) {
        let _ = program::send(self.socket.as_fd(), 1, message, &[]);
    }
}

struct World {
    broker: Broker<Fake>,
    host: Session,
    host_memory: Memory,
    regions: Arc<Mutex<BTreeMap<(u32, u32), Memory>>>,
    generation: u32,
    program_socket: OwnedFd,
    clients: Vec<Client>,
    peer: Peer,
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// Link whose peer forges messages.
const FORGED_LINK: u32 = 7;
const OTHER: u32 = 8;

impl World {
    fn new() -> Self {
        let (host_memory, regions) = (Memory::new(), Arc::default());
        let devices = Fake { host: host_memory.clone(), regions: Arc::clone(&regions) };
        let (program_socket, inside) = pair();
        let settings = Settings { boot: [1; 16], window: 64 << 10 };
        let broker = Broker::begin(settings, devices, ProgramSocket::Passed(inside)).unwrap();
        let mut host_memory = host_memory.other();
        let mut host = Session::begin(Path::Host, 1, &mut host_memory).unwrap();
        let _ = host.turn(&mut host_memory);
        let (boot, own) = ([3; 16], name("host"));
        host.queue_message(&Envelope::statement(Message::Hello {
            version_min: VERSION,
            version_max: VERSION,
            epoch: 1,
            boot,
            name: own,
        }));
        host.queue_message(&Envelope::statement(Message::You { name: name("a") }));
        let memory = Memory::new();
        regions.lock().unwrap().insert((FORGED_LINK, 1), memory.clone());
        let peer = Peer::new(&memory);
        let (generation, clients) = (1, Vec::new());
        let mut world = Self { broker, host, host_memory, regions, generation, program_socket, clients, peer };
        world.link(FORGED_LINK, 1, "b");
        world.link(OTHER, 1, "c");
        (0..20).for_each(|_| world.step());
        assert_eq!(world.broker.links.len(), 2);
        world
    }

    fn send_from_host(&mut self, message: Message) {
        self.host.queue_message(&Envelope::statement(message));
    }

    fn link(&mut self, link: u32, generation: u32, peer: &str) {
        let (own, theirs) = ("04.0".parse().unwrap(), "05.0".parse().unwrap());
        let (size, doorbell, vectors, side, allows) = (REGION, 2, 1, 0, 2);
        self.send_from_host(Message::Link {
            link,
            generation,
            peer: name(peer),
            own,
            theirs,
            size,
            doorbell,
            vectors,
            side,
            allows,
        });
        for way in [Way::In, Way::Out] {
            self.send_from_host(Message::Allow { link, way, service: "*".parse().unwrap() });
        }
    }

    /// Lets the broker handle all events.
    fn step(&mut self) {
        for _ in 0..4 {
            let _ = self.host.turn(&mut self.host_memory);
            self.broker.reconcile().unwrap();
            self.broker.receive_from(Source::NewProgram);
            let programs: Vec<u64> = self.broker.programs.keys().copied().collect();
            programs.into_iter().for_each(|id| self.broker.receive_from(Source::Program(id)));
            let links = self.broker.links.values().chain(&self.broker.old);
            let connections = links.flat_map(|link| {
                link.sockets.keys().map(|serial| Source::Connection(link.news.link, link.news.generation, *serial))
            });
            connections.collect::<Vec<_>>().into_iter().for_each(|connection| self.broker.receive_from(connection));
        }
    }

    fn act(&mut self, dice: &mut Dice) {
        let client = dice.below(self.clients.len().max(1) as u64) as usize;
        match dice.below(64) {
            0..24 => {
                self.peer.turn();
                self.peer.act(dice);
            }
            24..32 => self.peer.turn(),
            32..36 if self.clients.len() < 12 => {
                let (socket, theirs) = pair();
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
                let theirs = [theirs.as_fd()];
                control.push(rustix::net::SendAncillaryMessage::ScmRights(&theirs));
                let flags = rustix::net::SendFlags::DONTWAIT;
                rustix::net::sendmsg(&self.program_socket, &[std::io::IoSlice::new(b"p")], &mut control, flags)
                    .unwrap();
                let (epoch, boot) = (0, [0; 16]);
                let client = Client { socket, given: Vec::new() };
                let own = name("program");
                client.send_message(Message::Hello {
                    version_min: VERSION,
                    version_max: VERSION,
                    epoch,
                    boot,
                    name: own,
                });
                self.clients.push(client);
            }
            36 if dice.below(8) == 0 => {
                self.generation += 1;
                let memory = Memory::new();
                self.regions.lock().unwrap().insert((FORGED_LINK, self.generation), memory.clone());
                self.peer = Peer::new(&memory);
                self.link(FORGED_LINK, self.generation, "b");
            }
            37..39 => {
                let life = [Life::Running, Life::Running, Life::Paused, Life::DomainGone][dice.below(4) as usize];
                self.send_from_host(Message::Life { link: FORGED_LINK, generation: self.generation, life });
            }
            choice => {
                let Some(it) = self.clients.get_mut(client) else { return };
                match choice {
                    39..42 => it.send_message(Message::Listen { service: name(["s", "t"][dice.below(2) as usize]) }),
                    42..50 => {
                        let (peer, service) = (name("b"), name("x"));
                        it.send_message(Message::Connect { peer, service, offset: 0, len: 0, channel: 0 });
                    }
                    50..55 => it.receive_all(),
                    55..61 if !it.given.is_empty() => {
                        it.given.swap_remove(dice.below(it.given.len() as u64) as usize);
                    }
                    61 => it.send_message(Message::Close {}),
                    62.. => drop(self.clients.swap_remove(client)),
                    _ => {}
                }
            }
        }
    }

    /// Checks what must hold at any time.
    fn check(&self) {
        for link in self.broker.links.values().chain(&self.broker.old) {
            let connections: Vec<(Agreement, Stage)> = link.connections.iter().collect();
            assert!(
                connections.len() <= usize::from(CONNECTIONS_MAX) && link.sockets.len() <= connections.len(),
                "{connections:?}"
            );
            for (at, (made, _)) in connections.iter().enumerate() {
                assert!(made.own.1 == 0 || window_is_sound(REGION, made.own.0, made.own.1), "{made:?}");
                for (other, _) in &connections[at + 1..] {
                    let clash = made.own.0 < other.own.0 + other.own.1 && other.own.0 < made.own.0 + made.own.1;
                    assert!(!clash || made.own.1 == 0 || other.own.1 == 0, "{made:?} and {other:?}");
                    assert!(made.channel == 0 || made.channel != other.channel, "{made:?} and {other:?}");
                }
            }
            assert!(
                link.news.link == FORGED_LINK || connections.is_empty(),
                "a link without a peer has {connections:?}"
            );
        }
    }
}

/// Checks that a socket is ignored for a while if a program waits there and there is no descriptor for it: it stays
/// readable.
#[test]
fn b15_door_is_left_alone_while_there_is_no_descriptor_for_who_comes() {
    let mut broker = World::new().broker;
    let (stop, _rings) = pair();
    // No program waits.
    broker.receive_from(Source::NewProgram);
    assert!(broker.shut.is_none());
    let (reads, writes) = pair();
    broker.program_socket = ProgramSocket::Passed(reads);
    rustix::io::write(&writes, b"p").unwrap();
    let is_awaited = |ready: Option<Vec<Source>>| ready.unwrap().iter().any(|who| matches!(who, Source::NewProgram));
    assert!(is_awaited(broker.wait(stop.as_fd(), false).unwrap()), "somebody waits");
    for error in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
        broker.shut = None;
        broker.postpone_admission(&error.into());
        assert!(broker.shut.is_some(), "{error}");
    }
    broker.shut = Some(Instant::now() + Duration::from_secs(60));
    assert!(!is_awaited(broker.wait(stop.as_fd(), true).unwrap()), "it is looked for without end");
    broker.shut = Some(Instant::now());
    assert!(is_awaited(broker.wait(stop.as_fd(), true).unwrap()), "and then again");
    broker.shut = None;
    broker.postpone_admission(&Errno::CONNABORTED.into());
    assert!(broker.shut.is_none(), "a client that is gone is no reason");
}

/// Runs long enough to find faults, and briefly enough for each change; `TOMBOLO_LONG` runs a hundred times as many
/// seeds.
#[test]
fn b14_b17_b18_whatever_peer_and_programs_do_in_whatever_order_nothing_is_shared_or_lost() {
    let long = std::env::var_os("TOMBOLO_LONG").is_some();
    let (mut most, mut up, mut departing) = (0, 0, 0);
    for seed in 0..if long { 6_000 } else { 60 } {
        let (mut dice, mut world) = (Dice(seed), World::new());
        for _ in 0..400 {
            world.act(&mut dice);
            world.step();
            world.check();
            let link = &world.broker.links[&FORGED_LINK];
            most = most.max(link.connections.iter().count());
            up += link.connections.iter().filter(|(_, stage)| *stage == Stage::Up).count();
            departing += link.departing.len();
        }
        // All programs end, and the peer begins anew and keeps to the protocol: then nothing may remain.
        world.clients.clear();
        world.peer.begin_anew(true);
        let quiet = |world: &World| {
            let broker = &world.broker;
            let done = |link: &Link<Memory>| link.connections.iter().count() == 0 && link.sockets.is_empty();
            broker.programs.is_empty() && broker.old.is_empty() && broker.links.values().all(done)
        };
        for _ in 0..400 {
            world.peer.turn();
            let connections: Vec<u32> = world.peer.connections.keys().copied().collect();
            connections.into_iter().for_each(|serial| world.peer.close(serial));
            world.step();
        }
        assert!(quiet(&world), "seed {seed}: {:?}", world.broker);
        assert!(world.broker.links.values().all(|link| link.departing.is_empty()), "seed {seed}");
        let regions = world.regions.lock().unwrap();
        assert!(regions.values().all(|region| region.windows().live().is_empty()), "seed {seed}: windows are left");
    }
    // The test must really have tested connections: many of them, agreed ones, and ones that are about to end.
    assert!(
        most >= 8 && up > 10_000 && departing > 1000,
        "{most} connections at most, {up} agreed, {departing} departing"
    );
}
