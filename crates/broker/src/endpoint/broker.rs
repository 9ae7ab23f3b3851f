// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the event loop of an endpoint's broker, which serves the host's broker, the peers' brokers and the programs.

mod listing;
mod migration;

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use tombolo_control::{Life, Message, NO_NUMBER, Name, Seen, VERSION, VERSION_LEAVE, VERSION_NET, Way, code};

use crate::{
    discard,
    endpoint::{
        connections::Refusal,
        devices::{Devices, Pages, Region},
        finding::Finding,
        host_session::{Host, LinkNews, News},
        link::{self, Link},
        peer_session::{Inquiry, Peer, PeerRequest},
        program::{Program, ProgramSocket, ProgramState, may_be_admitted},
        whereabouts::Whereabouts,
    },
};

/// Largest number of programs connected at a time, besides those of root.
const PROGRAMS_MAX: usize = 256;
/// Time for which no new program is admitted after the process had no descriptor for one.
const SHUT: Duration = Duration::from_millis(20);
/// Largest number of domain numbers kept: that of this machine and those of the domains with which it has links (B-19).
const NUMBERS_MAX: usize = 65;
/// Largest number of messages received from one source before the others have their turn.
const TURN: usize = 32;
/// Interval between looks for devices that are not there yet, where nothing reports their arrival.
const AGAIN: Duration = Duration::from_millis(50);

/// The same interval where something reports the arrival of devices.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time after which the loop checks again whether to tell the host how much of a link is in use.
const USAGE_LATER: Duration = Duration::from_millis(100);

/// Time by which programs that wait for the host's broker are refused earlier: before they time out themselves.
const EARLY: Duration = Duration::from_secs(2);

/// Reason given to programs that are refused because the host's broker has not named this machine.
const SILENT: &str = "the host's broker says nothing: is tombolod running there, and has it this machine?";

/// Pause before a peer that sent more than [`TURN`] messages at once is read again, so that it cannot occupy a whole
/// processor.
const BREATH: Duration = Duration::from_millis(1);

/// Prefix of the services at which interfaces meet (B-28).
const NET_SERVICES: &str = "net.";

/// Prefix of the services at which programs listen for the other ends of their TCP connections (S-18).
const FINDING_SERVICES: &str = "sockets-";

/// Settings with which the broker of a machine starts.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Identifies this boot: the same for as long as this kernel runs (B-6).
    pub boot: [u8; 16],
    /// Bytes of a window, a multiple of 4096.
    pub window: u64,
}

/// Source of an event.
#[derive(Clone, Copy, Debug)]
enum Source {
    Stop,
    NewProgram,
    /// The addresses of this kernel may have changed.
    Addresses,
    /// The host's broker notified this one.
    Host,
    /// The peer's broker on this link notified this one.
    Peer(u32),
    /// The kernel held back interrupts of this link.
    Alarm(u32),
    /// Windows were closed, or a device arrived; [`Broker::reconcile`] finds out which.
    Devices,
    Program(u64),
    /// Socket of a connection: the link, its generation, and the connection's serial.
    Connection(u32, u32, u32),
}

/// The broker of a machine.
#[derive(Debug)]
pub struct Broker<D: Devices> {
    settings: Settings,
    /// Name that the host gives this machine. Programs wait until the host has sent it (B-6).
    name: Option<Name>,
    /// Domains by their numbers, including this one (B-19).
    numbers: BTreeMap<u16, Name>,
    devices: D,
    program_socket: ProgramSocket,
    host: Host,
    links: BTreeMap<u32, Link<D::Region>>,
    /// Links that were replaced and are not released yet.
    old: Vec<Link<D::Region>>,
    programs: BTreeMap<u64, Program>,
    /// Listings that programs asked for, in order of arrival: program, listing, and the row after which to continue
    /// (B-20).
    looks: VecDeque<(u64, Seen, u64)>,
    number: u64,
    /// Interfaces that this machine is to have, once the host has sent them (B-28).
    nets: Option<Vec<Message>>,
    /// Time until which no program is admitted.
    shut: Option<Instant>,
    /// Whether the use of a link, or this kernel's addresses, are still to be sent to the host.
    usage_later: bool,
    /// Addresses that each peer may have, and programs that wait for TCP connections (B-22, B-23).
    finding: Finding,
    /// Addresses at which this kernel's programs may be reached (B-22).
    whereabouts: Whereabouts,
    /// Whether the device shared with the host was taken away and no other one has arrived yet (B-27).
    is_hostless: bool,
}

impl<D: Devices> Broker<D> {
    /// Starts a broker that serves programs at `program_socket`.
    ///
    /// # Errors
    /// The devices cannot be reached.
    pub fn begin(settings: Settings, mut devices: D, program_socket: impl Into<ProgramSocket>) -> io::Result<Self> {
        let host = Host::begin(random()?, settings.boot, devices.host())?;
        devices.host().notify();
        let (links, old, programs) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        let numbers = BTreeMap::new();
        let (name, program_socket, looks, number, shut) = (None, program_socket.into(), VecDeque::new(), 0, None);
        let (usage_later, is_hostless) = (false, false);
        Ok(Self {
            settings,
            name,
            numbers,
            devices,
            program_socket,
            host,
            links,
            old,
            programs,
            looks,
            number,
            nets: None,
            shut,
            usage_later,
            finding: Finding::default(),
            whereabouts: Whereabouts::default(),
            is_hostless,
        })
    }

    /// Tells the host the addresses at which this kernel may be reached, now and whenever they change (B-22).
    #[must_use]
    pub fn with_addresses(mut self) -> Self {
        self.whereabouts.begin();
        self
    }

    /// As [`with_addresses`](Self::with_addresses), but with these fixed addresses, whatever the kernel reports.
    #[must_use]
    pub fn with_addresses_of(mut self, addresses: Vec<[u8; 16]>) -> Self {
        self.whereabouts = Whereabouts::fixed(addresses);
        self
    }

    /// Serves until `stop` is readable.
    ///
    /// # Errors
    /// The device shared with the host can no longer be reached.
    pub fn run(mut self, stop: BorrowedFd<'_>) -> io::Result<()> {
        self.serve(stop)
    }

    /// As [`run`](Self::run), for a broker that may have to continue after an error, or to be
    /// [dismissed](Self::dismiss).
    ///
    /// # Errors
    /// As [`run`](Self::run); the broker keeps what it holds for its programs.
    pub fn serve(&mut self, stop: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            let busy = self.reconcile()? | !self.looks.is_empty();
            let Some(ready) = self.wait(stop, busy)? else { return Ok(()) };
            for who in ready {
                self.receive_from(who);
            }
            self.show_in_turn();
            let now = Instant::now();
            self.finding.give_up(now, &self.programs);
            self.whereabouts.forget_unused(now, &self.programs);
            self.send_away();
        }
    }

    /// Ends every connection permanently. The programs are told, and no later broker resumes any of them.
    pub fn dismiss(mut self) {
        for link in self.links.values_mut().chain(&mut self.old) {
            link.dismiss(&mut self.programs);
        }
    }

    /// Drops programs that took too long to send a request, and refuses those that waited too long for the host's
    /// broker.
    fn send_away(&mut self) {
        let (now, unnamed) = (self.now(), self.name.is_none());
        self.programs.retain(|_, program| {
            let late = program.late_at().is_some_and(|at| now >= at);
            if late && unnamed && program.doing != ProgramState::Idle {
                let reason = if self.is_hostless { migration::HOSTLESS } else { SILENT }.into();
                // Its unread message is received first: bytes left unread when a socket closes hide the answer.
                let _ = program.receive();
                let _ = program.answer(Message::Refuse { code: code::FAILED, reason });
            }
            !late
        });
    }

    /// Returns the time against which programs' deadlines are checked.
    fn now(&self) -> Instant {
        Instant::now() + if self.name.is_some() { Duration::ZERO } else { EARLY }
    }

    /// Waits for events and returns their sources, or `None` if the broker is to stop.
    fn wait(&self, stop: BorrowedFd<'_>, busy: bool) -> io::Result<Option<Vec<Source>>> {
        let mut fds = vec![(Source::Stop, stop)];
        let shut =
            self.shut.map(|until| until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
        if shut.is_none() {
            fds.push((Source::NewProgram, self.program_socket.fd()));
        }
        for link in self.links.values().chain(&self.old) {
            let LinkNews { link: number, generation, .. } = link.news;
            let who = |serial: &u32| Source::Connection(number, generation, *serial);
            fds.extend(link.sockets.iter().map(|(serial, socket)| (who(serial), socket.as_fd())));
            if let Some((region, _)) = link.memory.as_ref().filter(|_| !link.departing.is_empty()) {
                fds.extend(region.departures().map(|fd| (Source::Devices, fd)));
            }
        }
        if self.name.is_some() {
            // A program that waits for an answer is not read before it has the answer.
            let heard = self.programs.iter().filter(|(_, program)| program.doing != ProgramState::Looking);
            fds.extend(heard.map(|(id, program)| (Source::Program(*id), program.fd())));
        }
        if !self.is_hostless {
            fds.push((Source::Host, self.devices.fd()));
        }
        fds.extend(self.whereabouts.fd().map(|watch| (Source::Addresses, watch)));
        let absent = self.is_hostless || self.links.values().any(|link| link.memory.is_none());
        if absent {
            fds.extend(self.devices.arrivals().map(|fd| (Source::Devices, fd)));
        }
        for (number, link) in self.links.iter().filter(|(_, link)| !link.leaving) {
            let Some((region, _)) = &link.memory else { continue };
            fds.push((Source::Peer(*number), region.fd()));
            fds.extend(region.alarm().map(|fd| (Source::Alarm(*number), fd)));
        }

        let again = absent.then(|| if self.devices.arrivals().is_none() { AGAIN } else { PATIENCE });
        let (late, now) = (self.programs.values().filter_map(Program::late_at).min(), self.now());
        let late = late.map(|at| at.saturating_duration_since(now));
        let usage = self.usage_later.then_some(USAGE_LATER);
        let left = |at: Instant| at.saturating_duration_since(Instant::now());
        let (sought, unused) = (self.finding.late_at().map(left), self.whereabouts.late_at().map(left));
        let timeout = [busy.then_some(BREATH), again, late, shut, usage, sought, unused].into_iter().flatten().min();
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let mut polled: Vec<_> = fds.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready =
            polled.iter().zip(&fds).filter(|(polled, _)| !polled.revents().is_empty()).map(|(_, (who, _))| *who);
        let ready: Vec<_> = ready.collect();
        Ok((!ready.iter().any(|who| matches!(who, Source::Stop))).then_some(ready))
    }

    fn receive_from(&mut self, who: Source) {
        match who {
            Source::Stop | Source::Devices => {}
            Source::Addresses => self.whereabouts.look_again(),
            // `reconcile` looks for what the notification was about in any case.
            Source::Host => self.devices.host().drain(),
            Source::Peer(number) => {
                if let Some((region, _)) = self.links.get_mut(&number).and_then(|link| link.memory.as_mut()) {
                    region.pages().drain();
                }
            }
            Source::Alarm(number) => {
                if self.links.get_mut(&number).is_some_and(|link| link.is_stormed(Instant::now())) {
                    self.host.storm(number);
                }
            }
            Source::NewProgram => self.admit_program(),
            Source::Program(id) => {
                for _ in 0..TURN {
                    match self.serve_program(id) {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(_) => {
                            self.programs.remove(&id);
                            return;
                        }
                    }
                }
            }
            Source::Connection(link, generation, serial) => {
                let links = self.links.values_mut().chain(&mut self.old);
                links
                    .filter(|it| it.news.link == link && it.news.generation == generation)
                    .for_each(|link| link.read_connection_socket(serial));
            }
        }
    }

    /// Receives from the host and the peers, opens what can be opened, and drops what is over. Returns whether there
    /// may be more.
    fn reconcile(&mut self) -> io::Result<bool> {
        let mut busy = self.serve_host()?;
        for link in self.links.values_mut().chain(&mut self.old) {
            link.depart();
        }
        let numbers: Vec<u32> = self.links.keys().copied().collect();
        for number in numbers {
            self.open(number);
            busy |= self.serve_peer(number);
        }
        let (now, mut later, mut said_left) = (Instant::now(), false, false);
        for link in self.links.values().filter(|link| link.memory.is_some() && !link.leaving) {
            let (connections, used) = link.usage();
            later |= self.host.usage(link.news.link, link.news.generation, connections, used, now);
        }
        if let Some(addresses) = self.whereabouts.published() {
            later |= self.host.send_addresses(addresses);
        }
        self.usage_later = later;
        for link in self.links.values_mut() {
            if link::take_drained(link) {
                self.host.left(link.news.link, link.news.generation);
                said_left = true;
            }
        }
        let (host, mut said) = (&mut self.host, false);
        let mut keep = |link: &Link<D::Region>| {
            let gone = link.leaving && link.sockets.is_empty() && link.departing.is_empty();
            if gone && !link.is_orphan {
                host.released(link.news.link, link.news.generation);
                said = true;
            }
            !gone
        };
        self.old.retain(&mut keep);
        self.links.retain(|_, link| keep(link));
        Ok(busy | said | said_left)
    }

    fn learn(&mut self, news: News) {
        match news {
            News::OtherHost => self.forget_links(),
            // The host sends all numbers again.
            News::You(name) => (self.name, self.numbers) = (Some(name), BTreeMap::new()),
            News::Number(name, number) => {
                self.numbers.retain(|_, known| *known != name);
                if let Some(number) = number.filter(|_| self.numbers.len() < NUMBERS_MAX) {
                    self.numbers.insert(number, name);
                }
            }
            News::Link(news) => {
                let same = |it: &&mut Link<_>| it.news.generation == news.generation && !it.leaving;
                if let Some(link) = self.links.get_mut(&news.link).filter(same) {
                    if let Some((region, _)) = &mut link.memory {
                        region.set_doorbell(news.doorbell);
                    }
                    link.news = news;
                    link.draining.stop();
                    return;
                }
                if let Some(mut old) = self.links.insert(news.link, Link::new(news, self.settings.window)) {
                    old.leave(&mut self.programs);
                    self.old.push(old);
                }
            }
            News::Nets(nets) => self.nets = Some(nets),
            News::Addresses(number, addresses) => self.finding.learn(number, addresses),
            News::Unlink(number, generation) => {
                self.finding.forget_link(number);
                if let Some(link) = self.links.get_mut(&number).filter(|link| link.news.generation == generation) {
                    link.leave(&mut self.programs);
                }
            }
            News::Leave(number, generation, wait) => {
                if let Some(link) = self.links.get_mut(&number).filter(|link| link.news.generation == generation) {
                    link::drain(link, wait, &mut self.programs);
                }
            }
            News::Life(number, life) => {
                if let Some(link) = self.links.get_mut(&number) {
                    link.news.life = life;
                    link.send_liveness();
                    if life == Life::DomainGone {
                        link.fail_waiting(&mut self.programs, "its machine is gone");
                    }
                }
            }
            News::Doorbell(number, doorbell) => {
                if let Some(link) = self.links.get_mut(&number) {
                    link.news.doorbell = doorbell;
                    if let Some((region, _)) = &mut link.memory {
                        region.set_doorbell(doorbell);
                    }
                }
            }
        }
    }

    /// Opens a link's memory as soon as it is there, with the connections that an earlier broker left (B-16).
    fn open(&mut self, number: u32) {
        let Some(link) = self.links.get_mut(&number).filter(|link| link.memory.is_none() && !link.leaving) else {
            return;
        };
        // The host sends this machine's name before it sends links (B-6).
        let Some(own) = self.name.clone() else { return };
        let begun = self.devices.open(&link.news).and_then(|mut region| {
            let (held, sockets) = (region.held()?, region.sockets());
            let peer = link.news.peer.clone();
            let peer = Peer::begin(random()?, own, peer, self.settings.boot, region.pages())?;
            region.pages().notify();
            Ok((region, peer, held, sockets))
        });
        let wait = [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied, io::ErrorKind::ResourceBusy];
        match begun {
            Ok((region, peer, held, sockets)) => {
                link.sockets = sockets;
                link.send_liveness();
                let alone = held.iter().map(|made| made.serial).filter(|serial| !link.sockets.contains_key(serial));
                link.departing.extend(alone);
                held.into_iter().for_each(|made| link.connections.restore(made));
                link.memory = Some((region, peer));
                link.make_ahead();
            }
            Err(error) => link.complain(&error, wait.contains(&error.kind())),
        }
    }

    /// Receives from the broker at the other end of a link. Returns whether there may be more.
    fn serve_peer(&mut self, number: u32) -> bool {
        let Self { links, programs, finding, name, .. } = self;
        let Some(link) = links.get_mut(&number).filter(|link| !link.leaving) else { return false };
        let mut inquiries = Vec::new();
        let mut more = exchange_messages::<D>(link, programs, &mut inquiries);
        for inquiry in inquiries {
            more |= name.as_ref().is_some_and(|own| finding.handle_inquiry(inquiry, own, link, programs));
        }
        link.tell_programs(programs) | more
    }

    fn admit_program(&mut self) {
        self.shut = None;
        if discard::is_crowded() {
            self.shut = Some(Instant::now() + SHUT);
            return;
        }
        let program = match self.program_socket.next().and_then(Program::new) {
            Ok(program) => program,
            Err(error) => return self.postpone_admission(&error),
        };
        let mine = |it: &Program| it.user == program.user;
        let own = self.programs.values().filter(|it| mine(it)).count() + discard::waiting_of(program.user);
        let theirs = self.programs.values().filter(|it| !mine(it) && it.user != 0).count();
        if !may_be_admitted(own, if program.user == 0 { 0 } else { theirs }, PROGRAMS_MAX) {
            let idle = idle_longest(&self.programs, mine)
                .or_else(|| idle_longest(&self.programs, |it| own == 0 && it.user != 0));
            let Some(idle) = idle else { return };
            self.programs.remove(&idle);
        }
        self.number += 1;
        self.programs.insert(self.number, program);
    }

    /// Admits nobody for a while if descriptors or memory ran out: the waiting program would wake the loop without end.
    fn postpone_admission(&mut self, error: &io::Error) {
        let short = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
        if short.iter().any(|it| error.raw_os_error() == Some(it.raw_os_error())) {
            self.shut = Some(Instant::now() + SHUT);
        }
    }

    /// Receives a program's next request. Returns false if there was none. An error ends the conversation (V-1).
    fn serve_program(&mut self, id: u64) -> io::Result<bool> {
        let hears = |program: &&mut Program| program.doing != ProgramState::Looking;
        let Some(program) = self.programs.get_mut(&id).filter(hears) else { return Ok(false) };
        let Some(said) = program.receive()? else { return Ok(false) };
        let said = match said {
            Ok(said) => said,
            Err(fault) => {
                program.answer(refuse(Refusal(code::MALFORMED, fault.to_string())))?;
                return Err(io::ErrorKind::InvalidData.into());
            }
        };
        program.asked = said.serial;
        self.answer(id, said.message).map(|()| true)
    }

    fn answer(&mut self, id: u64, message: Message) -> io::Result<()> {
        let Some(program) = self.programs.get_mut(&id) else { return Ok(()) };
        match (&program.doing, message) {
            (ProgramState::New, Message::Hello { version_min, version_max, .. }) => {
                let Some(name) = self.name.clone() else { return Ok(()) };
                if version_min > VERSION || version_max < VERSION {
                    return program
                        .answer(refuse(Refusal(code::VERSION, format!("this broker speaks version {VERSION}"))));
                }
                program.doing = ProgramState::Greeted;
                program.hears_leave = version_max >= VERSION_LEAVE;
                let (epoch, boot) = (0, [0; 16]);
                program.answer(Message::Hello { version_min: VERSION, version_max: VERSION_NET, epoch, boot, name })
            }
            (
                ProgramState::Greeted | ProgramState::Idle,
                Message::Listen { service } | Message::Connect { service, .. },
            ) if !may_meet(program.user, &service) => {
                program.answer(refuse(Refusal(code::DENIED, format!("{service} is an interface's: for root alone"))))
            }
            (ProgramState::Greeted | ProgramState::Idle, Message::Listen { service }) => {
                let taken = self.programs.values().any(|it| it.doing == ProgramState::Listening(service.clone()));
                let Some(program) = self.programs.get_mut(&id) else { return Ok(()) };
                if taken {
                    return program.answer(refuse(Refusal(code::EXISTS, format!("{service} has a listener"))));
                }
                let finds = service.as_str().starts_with(FINDING_SERVICES);
                program.doing = ProgramState::Listening(service);
                program.answer(Message::Done {})?;
                if finds {
                    self.whereabouts.look_at_program(program, Instant::now());
                }
                Ok(())
            }
            (ProgramState::Listening(_), Message::Locate { address }) => {
                self.whereabouts.look_at_program(program, Instant::now());
                let is_own = self.whereabouts.is_own(address, program);
                program.answer(Message::Near { domains: if is_own { 0 } else { self.finding.locate(address) } })
            }
            (ProgramState::Listening(_), Message::Claim { key }) => {
                self.finding.claim(id, key, &self.programs);
                Ok(())
            }
            (ProgramState::Listening(_), Message::Unclaim { key }) => {
                self.finding.unclaim(id, key);
                Ok(())
            }
            (ProgramState::Listening(_), Message::Find { key, address }) => {
                let asked = program.asked;
                if self.whereabouts.is_own(address, program) {
                    return program.answer(refuse(Refusal(code::NOT_FOUND, "it is an address of this kernel".into())));
                }
                match self.finding.find((id, asked), (key, address), &mut self.links) {
                    Ok(()) => Ok(()),
                    Err(no) => program.answer(refuse(no)),
                }
            }
            (ProgramState::Greeted | ProgramState::Idle, Message::Connect { peer, service, .. }) => {
                let connected = self.connect_program(id, &peer, service);
                let Some(program) = self.programs.get_mut(&id) else { return Ok(()) };
                match connected {
                    Ok(()) => program.doing = ProgramState::Connecting,
                    Err(no) => program.refuse(no),
                }
                Ok(())
            }
            (ProgramState::Greeted | ProgramState::Idle, Message::Who { number }) => {
                let own = number == NO_NUMBER;
                let found = self
                    .numbers
                    .iter()
                    .find(|(it, name)| if own { Some(*name) == self.name.as_ref() } else { **it == number });
                let missing = || match number {
                    NO_NUMBER => "the host's configuration gives this domain no `number`".to_owned(),
                    number => format!("no domain with which this one has a link has the `number` {number}"),
                };
                let answer = match found {
                    Some((number, name)) => Message::Number { name: name.clone(), number: *number },
                    None => refuse(Refusal(code::NOT_FOUND, missing())),
                };
                program.rest();
                program.answer(answer)
            }
            (ProgramState::Greeted | ProgramState::Idle, Message::Look { at, after }) => {
                program.doing = ProgramState::Looking;
                self.looks.push_back((id, at, after));
                Ok(())
            }
            (ProgramState::Greeted | ProgramState::Idle, _) => {
                program.answer(refuse(Refusal(code::UNSUPPORTED, "this is a guest's broker".into())))
            }
            _ => {
                program
                    .answer(refuse(Refusal(code::MALFORMED, "Hello comes first, and one question at a time".into())))?;
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }

    /// Asks the peer for a connection (B-14).
    fn connect_program(&mut self, id: u64, peer: &Name, service: Name) -> Result<(), Refusal> {
        let no = |code, why: String| Err(Refusal(code, why));
        let Some(program) = self.programs.get(&id) else { return Ok(()) };
        let Some(link) = self.links.values_mut().find(|link| link.news.peer == *peer && !link.leaving) else {
            return no(code::NOT_FOUND, format!("there is no link with {peer}"));
        };
        if link.draining.is_on() {
            return no(code::NOT_FOUND, format!("the link with {peer} is being taken away"));
        }
        if !link.news.allows(Way::Out, &service) {
            return no(code::DENIED, format!("no rule of the host lets this machine connect to {peer}/{service}"));
        }
        if link.news.life == Life::DomainGone {
            return no(code::NOT_FOUND, format!("the machine {peer} is gone"));
        }
        if !link.memory.as_ref().is_some_and(|(_, broker)| broker.is_there()) {
            let paused = if link.news.life == Life::Paused { " (its machine is paused)" } else { "" };
            return no(
                code::NOT_FOUND,
                format!(
                    "the broker of {peer} has not opened the link{paused}: are driver and tombolod --guest there? \
                     `tombolo link ls` on the host says more"
                ),
            );
        }
        link.request_connection(id, program, service)
    }
}

/// Returns whether a user may listen at a service or connect to it. Services of interfaces are for root and the
/// broker's own user only (B-28).
fn may_meet(user: u32, service: &Name) -> bool {
    !service.as_str().starts_with(NET_SERVICES) || user == 0 || user == rustix::process::geteuid().as_raw()
}

/// Receives from the peer's broker over a link, and answers. Returns whether there may be more.
fn exchange_messages<D: Devices>(
    link: &mut Link<D::Region>,
    programs: &mut BTreeMap<u64, Program>,
    inquiries: &mut Vec<Inquiry>,
) -> bool {
    let _in = link.span.clone().entered();
    let (mut changed, mut busy) = (false, true);
    for _ in 0..TURN {
        let Some((region, peer)) = &mut link.memory else { return false };
        let (request, is_due, more) = match peer.turn(region.pages()) {
            Ok(turned) => turned,
            Err(error) => {
                let peer = &link.news.peer;
                tracing::error!(stranger = peer.as_str(), "the link with {peer} cannot be reached: {error}");
                link.leave(programs);
                return true;
            }
        };
        changed |= is_due;
        if let Some(PeerRequest::Inquire(inquiry)) = &request {
            inquiries.push(inquiry.clone());
        }
        if let Some(Err(Refusal(_, why))) = request.map(|request| link.understand(request, programs))
            && let Some((_, peer)) = &mut link.memory
        {
            peer.spoil(&format!("says what cannot be: {why}"));
        }
        if link.memory.as_ref().is_some_and(|(_, peer)| peer.is_broken()) {
            link.fail_waiting(programs, "its broker is not heard until it begins anew");
        }
        if !more {
            busy = false;
            break;
        }
    }
    // One notification for all messages: each notification interrupts the other machine.
    if let Some((region, _)) = link.memory.as_mut().filter(|_| changed) {
        region.pages().notify();
    }
    busy
}

/// Returns the program among `those` that has been idle longest. It loses nothing when it is dropped.
fn idle_longest(programs: &BTreeMap<u64, Program>, those: impl Fn(&Program) -> bool) -> Option<u64> {
    let idle = programs.iter().filter(|(_, program)| program.doing == ProgramState::Idle && those(program));
    idle.min_by_key(|(_, program)| program.late_at()).map(|(id, _)| *id)
}

fn refuse(Refusal(code, why): Refusal) -> Message {
    Message::Refuse { code, reason: why.into() }
}

/// Draws a random number other than 0.
fn random() -> io::Result<u64> {
    loop {
        match u64::from_ne_bytes(tombolo_os::random::bytes()?) {
            0 => {}
            number => return Ok(number),
        }
    }
}

#[cfg(test)]
mod random;
