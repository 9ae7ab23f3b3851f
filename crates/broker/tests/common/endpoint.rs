// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two machines in this process, each with its broker in a thread, and the host between them. Devices are memfds, and
//! interrupts are eventfds.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path as File, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
};

use rustix::{
    event::EventfdFlags,
    fs::{MemfdFlags, Mode, OFlags},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use tombolo_broker::endpoint::{
    broker::{Broker, Settings},
    connections::Agreement,
    devices::{Devices, Pages, Part, Region},
    host_session::LinkNews,
};
use tombolo_control::{BOX_LEN, Boxes, Envelope, Event, Life, Message, Name, Path, Session, VERSION, WINDOWS_AT, Way};
use tombolo_domain::{Endpoint, Rendezvous, wait_readable};
use tombolo_domain_ivshmem::{CLOSED, DOORBELLS, STATE_AT, VmDomain};
use tombolo_testing::conformance::{self, Actor, eventually};
pub use tombolo_testing::conformance::{accept, patience};

/// Bytes of a region of the link: sparse, so that unused ones take no memory.
pub const REGION: u64 = 512 << 20;
pub const WINDOW: u64 = 2 << 20;
pub const LINK: u32 = 7;

pub fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

fn memory(len: u64) -> Arc<OwnedFd> {
    let memory = rustix::fs::memfd_create("tombolo-test", MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&memory, len).expect("room");
    Arc::new(memory)
}

fn event() -> Arc<OwnedFd> {
    Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor"))
}

pub fn notify_event(event: impl AsFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

fn readonly(memory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Boxes at the beginning of two memfds.
#[derive(Clone, Debug)]
pub struct FakePages {
    pub own: Arc<OwnedFd>,
    pub peer: Arc<OwnedFd>,
    outgoing: Arc<OwnedFd>,
    pub incoming: Arc<OwnedFd>,
    /// Whether the device was taken away.
    lost: Arc<AtomicBool>,
}

impl FakePages {
    fn pair(len: u64) -> [Self; 2] {
        let (a, b, to_a, to_b) = (memory(len), memory(len), event(), event());
        let lost = Arc::default();
        let first = Self { own: a.clone(), peer: b.clone(), outgoing: to_b.clone(), incoming: to_a.clone(), lost };
        [first, Self { own: b, peer: a, outgoing: to_a, incoming: to_b, lost: Arc::default() }]
    }
}

impl Boxes for FakePages {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        if self.lost.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        rustix::io::pread(&self.peer, bytes, offset as u64)?;
        Ok(())
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        rustix::io::pwrite(&self.own, bytes, offset as u64)?;
        Ok(())
    }
}

impl Pages for FakePages {
    fn notify(&self) {
        notify_event(&self.outgoing);
    }

    fn drain(&self) {
        let _ = rustix::io::read(&self.incoming, &mut [0; 8]);
    }
}

/// Eventfds of connections, by serial, that one side has fetched and the other has not fetched yet.
type Wires = Arc<Mutex<BTreeMap<u32, [Vec<Arc<OwnedFd>>; 2]>>>;

/// A link as one of its machines sees it.
#[derive(Clone, Debug)]
pub struct FakeRegion {
    pub pages: FakePages,
    side: usize,
    wires: Wires,
    /// Eventfds that notify the peer's program, by the serial of the connection.
    peer_doorbells: BTreeMap<u32, Vec<Arc<OwnedFd>>>,
    /// Connections that programs of an earlier broker hold.
    pub held: Arc<Mutex<Vec<Agreement>>>,
    /// Eventfd that is notified when the peer notifies without end.
    pub storm: Arc<OwnedFd>,
}

impl FakeRegion {
    pub fn pair() -> [Self; 2] {
        let wires = Wires::default();
        let mut side = 0..;
        FakePages::pair(REGION).map(|pages| Self {
            pages,
            side: side.next().expect("two sides"),
            wires: wires.clone(),
            peer_doorbells: BTreeMap::new(),
            held: Arc::default(),
            storm: event(),
        })
    }
}

impl Region for FakeRegion {
    type Pages = FakePages;

    fn pages(&mut self) -> &mut FakePages {
        &mut self.pages
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.pages.incoming.as_fd()
    }

    fn set_doorbell(&mut self, _doorbell: u16) {}

    fn clear(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let zeros = vec![0; len as usize];
        rustix::io::pwrite(&self.pages.own, &zeros, offset)?;
        Ok(())
    }

    /// As a host's descriptor store does: programs here have eventfds like those of a host.
    fn store_connection(&mut self, _made: &Agreement, socket: BorrowedFd<'_>) -> io::Result<()> {
        static STORE: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
        lock(&STORE).push(socket.try_clone_to_owned()?);
        Ok(())
    }

    fn own(&mut self, made: &Agreement) -> io::Result<Vec<OwnedFd>> {
        let mut wires = lock(&self.wires);
        // Either side may be first.
        let [own, other] = wires.remove(&made.serial).unwrap_or_else(|| {
            let fresh = || -> Vec<_> { (0..DOORBELLS).map(|_| event()).collect() };
            let (own, other) = (fresh(), fresh());
            wires.insert(made.serial, [other.clone(), own.clone()]);
            [own, other]
        });
        let mut all = vec![self.pages.own.try_clone()?];
        for event in other.iter().chain(&own) {
            all.push(event.try_clone()?);
        }
        self.peer_doorbells.insert(made.serial, other);
        Ok(all)
    }

    fn theirs(&mut self, _made: &Agreement) -> io::Result<OwnedFd> {
        readonly(&self.pages.peer)
    }

    fn held(&mut self) -> io::Result<Vec<Agreement>> {
        Ok(lock(&self.held).clone())
    }

    fn departures(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        Some(self.storm.as_fd())
    }

    fn is_stormed(&mut self) -> bool {
        rustix::io::read(&self.storm, &mut [0; 8]).is_ok()
    }

    fn peek(&mut self, part: Part, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let memory = if part == Part::Own { &self.pages.own } else { &self.pages.peer };
        rustix::io::pread(memory, bytes, offset)?;
        Ok(())
    }

    fn close_orphaned(&mut self, made: &Agreement) {
        let _ = rustix::io::pwrite(&self.pages.own, &[CLOSED], made.own.0 + u64::from(STATE_AT));
        self.peer_doorbells.remove(&made.serial).unwrap_or_default().iter().for_each(notify_event);
    }

    fn hang_up(&mut self) {}
}

/// Devices of a machine.
#[derive(Debug)]
pub struct FakeDevices {
    host: FakePages,
    link: FakeRegion,
    next: NextDevices,
}

/// Devices that are plugged into a machine whose devices were taken away.
type NextDevices = Arc<Mutex<Option<(FakePages, FakeRegion)>>>;

impl Devices for FakeDevices {
    type Pages = FakePages;
    type Region = FakeRegion;

    fn host(&mut self) -> &mut FakePages {
        &mut self.host
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.host.incoming.as_fd()
    }

    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn renew(&mut self) -> Option<io::Result<()>> {
        let next = lock(&self.next).take();
        Some(next.map_or(Err(io::ErrorKind::NotFound.into()), |(host, link)| {
            (self.host, self.link) = (host, link);
            Ok(())
        }))
    }

    fn open(&mut self, news: &LinkNews) -> io::Result<FakeRegion> {
        if news.link == LINK { Ok(self.link.clone()) } else { Err(io::ErrorKind::NotFound.into()) }
    }
}

/// The host's side of the conversation with one machine.
pub struct FakeHost {
    conversation: Arc<Mutex<(Session, FakePages, Vec<Message>)>>,
    thread: Option<JoinHandle<()>>,
    stop: Arc<OwnedFd>,
}

impl FakeHost {
    /// Makes a host that sends `links` to each broker that begins.
    fn new(pages: FakePages, links: Vec<Message>) -> Self {
        Self::of_boot(pages, links, 0)
    }

    /// As `new`, for a host in the boot `boot`.
    fn of_boot(mut pages: FakePages, links: Vec<Message>, boot: u8) -> Self {
        static EPOCHS: AtomicU32 = AtomicU32::new(1);
        let epoch = EPOCHS.fetch_add(1, Ordering::Relaxed).into();
        let session = Session::begin(Path::Host, epoch, &mut pages).expect("memory");
        pages.notify();
        let heard = pages.incoming.clone();
        let conversation = Arc::new(Mutex::new((session, pages, Vec::new())));
        let stop = event();
        let (shared, ended) = (conversation.clone(), stop.clone());
        let thread = thread::spawn(move || {
            loop {
                pump(&mut lock(&shared), &links, boot);
                let mut polled = [
                    rustix::event::PollFd::new(&*heard, rustix::event::PollFlags::IN),
                    rustix::event::PollFd::new(&*ended, rustix::event::PollFlags::IN),
                ];
                rustix::event::poll(&mut polled, None).expect("polling works");
                if !polled[1].revents().is_empty() {
                    return;
                }
                let _ = rustix::io::read(&heard, &mut [0; 8]);
            }
        });
        Self { conversation, thread: Some(thread), stop }
    }

    pub fn send_message(&self, message: Message) {
        let mut conversation = lock(&self.conversation);
        conversation.0.queue_message(&Envelope::statement(message));
        pump(&mut conversation, &[], 0);
    }

    /// Returns whether the machine sent this message.
    pub fn heard(&self, wanted: &Message) -> bool {
        self.heard_like(|said| said == wanted)
    }

    /// Returns whether the machine sent a message for which `like` holds.
    pub fn heard_like(&self, like: impl Fn(&Message) -> bool) -> bool {
        lock(&self.conversation).2.iter().any(like)
    }
}

fn pump((session, pages, heard): &mut (Session, FakePages, Vec<Message>), links: &[Message], boot: u8) {
    loop {
        let (event, changed) = session.turn(pages).expect("memory");
        if changed {
            pages.notify();
        }
        match event {
            Some(Event::Began) => {
                let (epoch, boot) = (session.epoch(), [boot; 16]);
                let hello =
                    Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name: name("host") };
                session.queue_message(&Envelope::statement(hello));
                for message in links {
                    session.queue_message(&Envelope::statement(message.clone()));
                }
            }
            Some(Event::Said(said)) => heard.push(said.message),
            Some(Event::Broke(fault)) => panic!("{fault}"),
            None if !changed => return,
            None => {}
        }
    }
}

impl Drop for FakeHost {
    fn drop(&mut self) {
        notify_event(&self.stop);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn lock<T>(it: &Mutex<T>) -> MutexGuard<'_, T> {
    it.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An address that each of these machines has.
pub const OWN: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 198, 51, 100, 9];

/// Returns the host's messages about the link to a machine whose peer is `peer`.
pub fn link_messages(peer: &str, side: u8, doorbell: u16, rules: &[(Way, &str)]) -> Vec<Message> {
    let (own, theirs) = ("04.0".parse().expect("a place"), "05.0".parse().expect("a place"));
    let allows = rules.len() as u16;
    let (link, generation, peer, size, vectors) = (LINK, 1, name(peer), REGION, 2);
    let mut messages =
        vec![Message::Link { link, generation, peer, own, theirs, size, doorbell, vectors, side, allows }];
    messages.extend(rules.iter().map(|(way, service)| Message::Allow {
        link,
        way: *way,
        service: service.parse().expect("a pattern"),
    }));
    messages.push(Message::Life { link, generation, life: Life::Running });
    messages
}

/// A machine with its broker.
pub struct Machine {
    pub host: FakeHost,
    pub domain: VmDomain,
    pub socket: PathBuf,
    says: Vec<Message>,
    doorbell: FakePages,
    /// The host's side of the machine's pages.
    hosts: FakePages,
    next: NextDevices,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Machine {
    /// Takes away all devices of the machine.
    pub fn lose_devices(&self) {
        self.doorbell.lost.store(true, Ordering::SeqCst);
        notify_event(&self.doorbell.incoming);
    }

    /// Plugs other devices, which another host serves.
    pub fn plug_devices(&mut self, link: FakeRegion) {
        let [hosts, host] = FakePages::pair(BOX_LEN as u64);
        self.host = FakeHost::new(hosts.clone(), self.says.clone());
        (self.hosts, self.doorbell) = (hosts, host.clone());
        *lock(&self.next) = Some((host, link));
    }

    /// Starts the host's broker anew, in this boot.
    pub fn renew_host(&mut self, boot: u8) {
        let unused = FakePages::pair(BOX_LEN as u64);
        // The previous one ends first: two would take each other's messages.
        self.host = FakeHost::new(unused[0].clone(), Vec::new());
        self.host = FakeHost::of_boot(self.hosts.clone(), self.says.clone(), boot);
    }

    pub fn new(folder: &File, own: &str, (peer, side): (&str, u8), link: FakeRegion, rules: &[(Way, &str)]) -> Self {
        let mut says = vec![Message::You { name: name(own) }];
        says.extend(link_messages(peer, side, 2, rules));
        Self::begin_with(folder, own, link, says)
    }

    /// Starts a machine to which the host sends nothing but Hello.
    pub fn unnamed(folder: &File, own: &str, link: FakeRegion) -> Self {
        Self::begin_with(folder, own, link, Vec::new())
    }

    fn begin_with(folder: &File, own: &str, link: FakeRegion, says: Vec<Message>) -> Self {
        let socket = folder.join(own);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 128).unwrap();
        let [hosts, host] = FakePages::pair(BOX_LEN as u64);
        let settings = Settings { boot: [1; 16], window: WINDOW };
        let (doorbell, next) = (host.clone(), NextDevices::default());
        let devices = FakeDevices { host, link, next: next.clone() };
        let broker = Broker::begin(settings, devices, listener).expect("memory").with_addresses_of(vec![OWN]);
        let stop = event();
        let ended = stop.clone();
        let thread = thread::spawn(move || broker.run(ended.as_fd()));
        let host = FakeHost::new(hosts.clone(), says.clone());
        let domain = VmDomain::through(&socket);
        Self { host, domain, socket, says, doorbell, hosts, next, stop, thread: Some(thread) }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        notify_event(&self.stop);
        let ended = self.thread.take().map(JoinHandle::join);
        if !thread::panicking() {
            ended.expect("it was started").expect("the broker does not panic").expect("the broker does not fail");
        }
    }
}

/// Rules that allow everything.
pub const ALL: [(Way, &str); 2] = [(Way::In, "*"), (Way::Out, "*")];

/// Two machines, `a` and `b`, that may connect to any service of each other.
pub struct World {
    pub a: Machine,
    pub b: Machine,
    /// The two regions of the link.
    memory: [Arc<OwnedFd>; 2],
    made: AtomicU32,
    _folder: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        Self::under(&ALL)
    }

    /// Makes a world in which `b` is limited to these rules.
    pub fn under(rules_of_b: &[(Way, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("there is a place for temporary files");
        let [to_b, to_a] = FakeRegion::pair();
        let memory = [to_b.pages.own.clone(), to_a.pages.own.clone()];
        let a = Machine::new(folder.path(), "a", ("b", 0), to_b, &ALL);
        let b = Machine::new(folder.path(), "b", ("a", 1), to_a, rules_of_b);
        let world = Self { a, b, memory, made: 0.into(), _folder: folder };
        world.meet();
        world
    }

    /// Waits until the brokers have met: only then a connection succeeds.
    fn meet(&self) {
        let mut listener = self.a.domain.listen("meet").expect("it is free");
        eventually("the brokers meet", || self.b.domain.connect("a/meet", patience()).is_ok());
        while !matches!(listener.accept(), Ok(Some(_))) {
            assert!(wait_readable(listener.fd(), patience()).expect("polling works"), "the connection arrives");
        }
    }

    pub fn service(&self) -> String {
        format!("a/service{}", self.made.fetch_add(1, Ordering::Relaxed))
    }

    /// Replaces the link's memory by zeros for the programs that have it, as after an unplugged device.
    pub fn take_memory(&self) {
        let zeros = vec![0; 16 << 20];
        for memory in &self.memory {
            rustix::io::pwrite(memory, &zeros, WINDOWS_AT).expect("memory");
        }
    }

    /// The host reports the liveness of one machine to the other.
    pub fn live(&self, life: Life) {
        self.a.host.send_message(Message::Life { link: LINK, generation: 1, life });
    }

    /// Returns a peer in another process, and this side's connection to it.
    pub fn mortal(&self) -> (Actor, Box<dyn Endpoint>) {
        let service = self.service();
        let mut listener = self.a.domain.listen(&service).expect("a fresh service is free");
        let actor = Actor::start("mortal", &self.b.socket, &service);
        (actor, accept(&mut *listener))
    }

    /// Starts a peer in another process that writes without end.
    pub fn streaming(&self, service: &str) -> Actor {
        Actor::start("stream", &self.b.socket, service)
    }

    pub fn stale(&self) -> String {
        let service = self.service();
        let mut actor = Actor::start("listen", &self.a.socket, &service);
        let found = || self.b.domain.connect(&service, patience()).is_ok();
        eventually("the listener is there", found);
        actor.kill();
        eventually("the listener is gone", || !found());
        service
    }
}

/// Plays the part of a child process; does nothing in the parent. Must be called from the test `child_process`.
pub fn play() {
    let Some(part) = conformance::part() else { return };
    let domain = VmDomain::through(&part.place);
    match &*part.role {
        "stream" => stream(domain, &part.service),
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
