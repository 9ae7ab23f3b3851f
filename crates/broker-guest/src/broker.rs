// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop that hears of everything.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::SocketFlags,
};
use tombolo_control::{Life, Message, Name, VERSION, Way, code};

use crate::{
    calls::{Calls, Made, No, Resumed, Stage},
    devices::{Devices, Pages, Region},
    host::{Host, News, Told},
    peer::{Heard, Peer},
    program::{self, Doing, Program},
};

/// Most programs at a time, and most of one user.
const PROGRAMS_MAX: usize = 256;
const PROGRAMS_OF_ONE: usize = 128;
/// Most messages that are heard of one side before the others' turn.
const TURN: usize = 32;
/// How often devices are looked for that are not there yet, where nothing tells of them, and late programs.
const AGAIN: Duration = Duration::from_millis(50);

/// How often all the same where something tells of them.
const PATIENCE: Duration = Duration::from_secs(1);

/// How much earlier programs are sent away that the host keeps waiting: before they lose patience themselves.
const EARLY: Duration = Duration::from_secs(2);

/// A peer that says more than [`TURN`] messages at once is heard on after this long, so that it does not get a processor
/// of its own.
const BREATH: Duration = Duration::from_millis(1);

/// What the broker of a machine is told when it begins.
#[derive(Clone, Debug)]
pub struct Settings {
    /// B-6. The same for as long as this kernel runs.
    pub boot: [u8; 16],
    /// Bytes of a slice, a multiple of 4096.
    pub slice: u64,
}

/// A link and the calls on it.
#[derive(Debug)]
struct Link<R> {
    told: Told,
    /// None until the devices are there.
    memory: Option<(R, Peer)>,
    calls: Calls,
    /// This side's end of each program's call socket.
    sockets: BTreeMap<u32, OwnedFd>,
    /// Calls whose program closed the socket, or had one of an earlier broker, and may have the slices still.
    departing: BTreeSet<u32>,
    /// Who waits for the answer to which call, and for what.
    waiting: BTreeMap<u32, (u64, Name)>,
    /// The host took it back.
    leaving: bool,
    /// That its memory cannot be opened yet was said.
    complained: bool,
}

/// Who has something to say.
#[derive(Clone, Copy, Debug)]
enum Who {
    Stop,
    Door,
    /// A broker rang, or slices went; [`Broker::settle`] looks.
    Boxes,
    Program(u64),
    /// Of which link, in which generation, which call.
    Call(u32, u32, u32),
}

/// The broker of a machine.
#[derive(Debug)]
pub struct Broker<D: Devices> {
    settings: Settings,
    /// B-6. What the host calls this machine. Programs wait until it has said so.
    name: Option<Name>,
    devices: D,
    door: OwnedFd,
    host: Host,
    links: BTreeMap<u32, Link<D::Region>>,
    /// Links that were replaced and are not let go yet.
    old: Vec<Link<D::Region>>,
    programs: BTreeMap<u64, Program>,
    number: u64,
}

impl<D: Devices> Broker<D> {
    /// Begins, to serve programs at `door`, a listening `SOCK_SEQPACKET` that does not block.
    ///
    /// # Errors
    /// The devices cannot be reached.
    pub fn begin(settings: Settings, mut devices: D, door: OwnedFd) -> io::Result<Self> {
        let host = Host::begin(random()?, settings.boot, devices.host())?;
        devices.host().ring();
        let (links, old, programs) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        Ok(Self { settings, name: None, devices, door, host, links, old, programs, number: 0 })
    }

    /// Serves until `stop` is readable.
    ///
    /// # Errors
    /// The device that is shared with the host cannot be reached any more.
    pub fn run(mut self, stop: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            let busy = self.settle()?;
            let Some(ready) = self.wait(stop, busy)? else { return Ok(()) };
            for who in ready {
                self.hear(who);
            }
            self.send_away();
        }
    }

    /// Programs that took too long to say what they want, and those that the host keeps waiting.
    fn send_away(&mut self) {
        let early = if self.name.is_some() { Duration::ZERO } else { EARLY };
        let now = Instant::now() + early;
        let unnamed = self.name.is_none();
        self.programs.retain(|_, program| {
            let late = program.is_late(now);
            if late && unnamed {
                let reason =
                    "the host's broker says nothing: is tombolod running there, and has it this machine?".into();
                // What it said is taken: what is left unread when a socket closes hides the answer.
                let _ = program.receive();
                let _ = program.answer(Message::Refuse { code: code::FAILED, reason });
            }
            !late
        });
    }

    /// Who has something to say; none if it is over.
    fn wait(&self, stop: BorrowedFd<'_>, busy: bool) -> io::Result<Option<Vec<Who>>> {
        let mut fds = vec![(Who::Stop, stop)];
        if self.programs.len() < PROGRAMS_MAX {
            fds.push((Who::Door, self.door.as_fd()));
        }
        for link in self.links.values().chain(&self.old) {
            let Told { link: number, generation, .. } = link.told;
            let who = |serial: &u32| Who::Call(number, generation, *serial);
            fds.extend(link.sockets.iter().map(|(serial, socket)| (who(serial), socket.as_fd())));
            if let Some((region, _)) = link.memory.as_ref().filter(|_| !link.departing.is_empty()) {
                fds.extend(region.departures().map(|fd| (Who::Boxes, fd)));
            }
        }
        if self.name.is_some() {
            fds.extend(self.programs.iter().map(|(id, program)| (Who::Program(*id), program.fd())));
        }
        fds.push((Who::Boxes, self.devices.fd()));
        if self.links.values().any(|link| link.memory.is_none()) {
            fds.extend(self.devices.arrivals().map(|fd| (Who::Boxes, fd)));
        }
        let regions = self.links.values().filter(|link| !link.leaving).filter_map(|link| link.memory.as_ref());
        fds.extend(regions.map(|(region, _)| (Who::Boxes, region.fd())));

        let waits = |program: &Program| matches!(program.doing, Doing::New | Doing::Greeted);
        let absent = self.links.values().any(|link| link.memory.is_none());
        let soon = self.programs.values().any(waits) || absent && self.devices.arrivals().is_none();
        let timeout = if busy {
            Some(BREATH)
        } else if soon {
            Some(AGAIN)
        } else {
            absent.then_some(PATIENCE)
        };
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let mut polled: Vec<_> = fds.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready =
            polled.iter().zip(&fds).filter(|(polled, _)| !polled.revents().is_empty()).map(|(_, (who, _))| *who);
        let ready: Vec<_> = ready.collect();
        Ok((!ready.iter().any(|who| matches!(who, Who::Stop))).then_some(ready))
    }

    fn hear(&mut self, who: Who) {
        match who {
            Who::Stop | Who::Boxes => {}
            Who::Door => self.let_in(),
            Who::Program(id) => {
                if self.hear_program(id).is_err() {
                    self.dismiss(id);
                }
            }
            Who::Call(link, generation, serial) => {
                let links = self.links.values_mut().chain(&mut self.old);
                links
                    .filter(|it| it.told.link == link && it.told.generation == generation)
                    .for_each(|link| link.hear_call(serial));
            }
        }
    }

    /// Hears host and peers, opens what is there to open, and forgets what is over. True if there may be more.
    fn settle(&mut self) -> io::Result<bool> {
        let mut news = Vec::new();
        self.devices.host().drain();
        let (ring, mut busy) = self.host.turn(self.devices.host(), TURN, &mut news)?;
        if ring {
            self.devices.host().ring();
        }
        news.into_iter().for_each(|news| self.learn(news));

        for link in self.links.values_mut().chain(&mut self.old) {
            link.depart();
        }
        let numbers: Vec<u32> = self.links.keys().copied().collect();
        for number in numbers {
            self.open(number);
            busy |= self.hear_peer(number);
        }
        let (host, mut released) = (&mut self.host, false);
        let mut keep = |link: &Link<D::Region>| {
            let gone = link.leaving && link.sockets.is_empty() && link.departing.is_empty();
            if gone {
                host.released(link.told.link, link.told.generation);
                released = true;
            }
            !gone
        };
        self.old.retain(&mut keep);
        self.links.retain(|_, link| keep(link));
        Ok(busy | released)
    }

    fn learn(&mut self, news: News) {
        match news {
            News::You(name) => self.name = Some(name),
            News::Link(told) => {
                let same = |it: &&mut Link<_>| it.told.generation == told.generation && !it.leaving;
                if let Some(link) = self.links.get_mut(&told.link).filter(same) {
                    if let Some((region, _)) = &mut link.memory {
                        region.set_bell(told.bell);
                    }
                    link.told = told;
                    return;
                }
                let calls = Calls::new(told.side, told.size, self.settings.slice);
                let (sockets, departing, waiting) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
                let number = told.link;
                let (leaving, complained) = (false, false);
                let new = Link { told, memory: None, calls, sockets, departing, waiting, leaving, complained };
                if let Some(mut old) = self.links.insert(number, new) {
                    old.leave(&self.programs);
                    self.old.push(old);
                }
            }
            News::Unlink(number, generation) => {
                if let Some(link) = self.links.get_mut(&number).filter(|link| link.told.generation == generation) {
                    link.leave(&self.programs);
                }
            }
            News::Life(number, life) => {
                if let Some(link) = self.links.get_mut(&number) {
                    link.told.life = life;
                    link.tell_life();
                    if life == Life::DomainGone {
                        link.fail_waiting(&self.programs, "its machine is gone");
                    }
                }
            }
            News::Bell(number, bell) => {
                if let Some(link) = self.links.get_mut(&number) {
                    link.told.bell = bell;
                    if let Some((region, _)) = &mut link.memory {
                        region.set_bell(bell);
                    }
                }
            }
        }
    }

    /// Opens the memory of a link as soon as it is there, with the calls that an earlier broker left (B-16).
    fn open(&mut self, number: u32) {
        let Some(link) = self.links.get_mut(&number).filter(|link| link.memory.is_none() && !link.leaving) else {
            return;
        };
        // The host says who is who before it tells of links (B-6).
        let Some(own) = self.name.clone() else { return };
        let begun = self.devices.open(&link.told).and_then(|mut region| {
            let held = region.held()?;
            let peer = link.told.peer.clone();
            let peer = Peer::begin(random()?, own, peer, self.settings.boot, region.pages())?;
            region.pages().ring();
            Ok((region, peer, held))
        });
        let wait = [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied, io::ErrorKind::ResourceBusy];
        match begun {
            Ok((region, peer, held)) => {
                link.departing.extend(held.iter().map(|made| made.serial));
                held.into_iter().for_each(|made| link.calls.restore(made));
                link.memory = Some((region, peer));
            }
            Err(error) => link.complain(&error, wait.contains(&error.kind())),
        }
    }

    /// Hears the broker at the other end of a link. True if there may be more.
    fn hear_peer(&mut self, number: u32) -> bool {
        let Self { links, programs, .. } = self;
        let Some(link) = links.get_mut(&number).filter(|link| !link.leaving) else { return false };
        let Some((region, _)) = &mut link.memory else { return false };
        region.pages().drain();
        for _ in 0..TURN {
            let Some((region, peer)) = &mut link.memory else { return false };
            let (heard, ring, more) = match peer.turn(region.pages()) {
                Ok(turned) => turned,
                Err(error) => {
                    crate::log(&format!("the link with {} cannot be reached: {error}", link.told.peer));
                    link.leave(programs);
                    return true;
                }
            };
            if ring {
                region.pages().ring();
            }
            if let Some(Err(No(_, why))) = heard.map(|heard| link.understand(heard, programs))
                && let Some((_, peer)) = &mut link.memory
            {
                peer.spoil(&format!("says what cannot be: {why}"));
            }
            if !more {
                return false;
            }
        }
        true
    }

    fn let_in(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(program) = rustix::net::accept_with(&self.door, flags).map_err(Into::into).and_then(Program::new) else {
            return;
        };
        let of_user = self.programs.values().filter(|it| it.user == program.user).count();
        if of_user < PROGRAMS_OF_ONE {
            self.number += 1;
            self.programs.insert(self.number, program);
        }
    }

    /// A program that is gone, or whose conversation is over.
    fn dismiss(&mut self, id: u64) {
        let Some(Program { doing: Doing::Calling(link, serial), .. }) = self.programs.remove(&id) else { return };
        if let Some(link) = self.links.get_mut(&link) {
            link.waiting.remove(&serial);
            link.calls.close(serial);
        }
    }

    /// V-1. What a program wants. An error ends the conversation.
    fn hear_program(&mut self, id: u64) -> io::Result<()> {
        let Some(program) = self.programs.get_mut(&id) else { return Ok(()) };
        let Some(said) = program.receive()? else { return Ok(()) };
        let refuse = |No(code, why): No| Message::Refuse { code, reason: why.into() };
        let said = match said {
            Ok(said) => said,
            Err(fault) => {
                program.answer(refuse(No(code::MALFORMED, fault.to_string())))?;
                return Err(io::ErrorKind::InvalidData.into());
            }
        };
        program.asked = said.serial;
        match (&program.doing, said.message) {
            (Doing::New, Message::Hello { version_min, version_max, .. }) => {
                let Some(name) = self.name.clone() else { return Ok(()) };
                if version_min > VERSION || version_max < VERSION {
                    return program.answer(refuse(No(code::VERSION, format!("this broker speaks version {VERSION}"))));
                }
                program.doing = Doing::Greeted;
                let (epoch, boot) = (0, [0; 16]);
                program.answer(Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name })
            }
            (Doing::Greeted, Message::Listen { service }) => {
                let taken = self.programs.values().any(|it| it.doing == Doing::Listening(service.clone()));
                let Some(program) = self.programs.get_mut(&id) else { return Ok(()) };
                if taken {
                    return program.answer(refuse(No(code::EXISTS, format!("{service} has a listener"))));
                }
                program.doing = Doing::Listening(service);
                program.answer(Message::Done {})
            }
            (Doing::Greeted, Message::Connect { peer, service, .. }) => {
                let called = self.call(id, &peer, service);
                let Some(program) = self.programs.get_mut(&id) else { return Ok(()) };
                match called {
                    Ok((link, serial)) => program.doing = Doing::Calling(link, serial),
                    Err(no) => program.answer(refuse(no))?,
                }
                Ok(())
            }
            (Doing::Greeted, _) => program.answer(refuse(No(code::UNSUPPORTED, "this is a guest's broker".into()))),
            _ => {
                program.answer(refuse(No(code::MALFORMED, "Hello comes first, and one question at a time".into())))?;
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }

    /// B-14. Asks the peer for a call.
    fn call(&mut self, id: u64, peer: &Name, service: Name) -> Result<(u32, u32), No> {
        let no = |code, why: String| Err(No(code, why));
        let Some((number, link)) = self.links.iter_mut().find(|(_, link)| link.told.peer == *peer && !link.leaving)
        else {
            return no(code::NOT_FOUND, format!("there is no link with {peer}"));
        };
        if !link.told.allows(Way::Out, &service) {
            return no(code::DENIED, format!("no rule of the host lets this machine connect to {peer}/{service}"));
        }
        if link.told.life == Life::DomainGone {
            return no(code::NOT_FOUND, format!("the machine {peer} is gone"));
        }
        let Some((region, broker)) = link.memory.as_mut().filter(|(_, broker)| broker.is_there()) else {
            return no(code::NOT_FOUND, format!("the broker of {peer} is not there yet"));
        };
        let made = link.calls.ask()?;
        if let Err(error) = region.clear(made.own.0, made.own.1) {
            link.calls.forget(made.serial);
            return no(code::FAILED, format!("the link's memory cannot be reached: {error}"));
        }
        broker.connect(&made, service.clone());
        link.waiting.insert(made.serial, (id, service));
        Ok((*number, made.serial))
    }
}

impl<R: Region> Link<R> {
    /// What the peer's broker wants.
    fn understand(&mut self, heard: Heard, programs: &mut BTreeMap<u64, Program>) -> Result<(), No> {
        match heard {
            Heard::Hello => {}
            Heard::Began => {
                for serial in self.calls.forgotten() {
                    self.refuse(serial, No(code::NOT_FOUND, "its broker began anew".into()), programs);
                }
                let calls: Vec<_> = self.calls.iter().map(|(made, stage)| (made, stage == Stage::ClosedHere)).collect();
                if let Some((_, peer)) = &mut self.memory {
                    peer.recount(&calls);
                }
            }
            Heard::Call(told, is_over) => match self.calls.resumed(told, is_over)? {
                Resumed::AsItWas | Resumed::Ended => {}
                Resumed::ClosedThere => self.tell_close(told.serial),
                Resumed::Lost(made) => {
                    if let Some((region, _)) = &mut self.memory {
                        region.bequeath(&made);
                    }
                    self.say_close(told.serial);
                }
            },
            Heard::Connect(serial, service, theirs, channel) => {
                let answer = self.called(serial, service, theirs, channel, programs);
                let Some((_, peer)) = &mut self.memory else { return Ok(()) };
                match answer {
                    Ok(made) => peer.accept(&made),
                    Err(no) => peer.refuse(serial, no),
                };
            }
            Heard::Accept(serial, theirs) => match self.calls.accepted(serial, theirs)? {
                Some(made) => {
                    if let Err(error) = self.give(&made, programs) {
                        self.refuse(serial, No(code::FAILED, format!("slices cannot be made: {error}")), programs);
                        self.finish(serial);
                    }
                }
                None => self.say_close(serial),
            },
            Heard::Refuse(0, ..) => {}
            Heard::Refuse(serial, code, reason) => {
                if self.calls.refused(serial)? {
                    self.refuse(serial, No(code, reason.as_str().into()), programs);
                }
            }
            Heard::Close(serial) => {
                if self.calls.closed(serial)?.is_some() {
                    self.tell_close(serial);
                }
            }
        }
        Ok(())
    }

    /// B-14. The peer's program calls a service of this machine.
    fn called(
        &mut self,
        serial: u32,
        service: Name,
        theirs: (u64, u64),
        channel: u16,
        programs: &BTreeMap<u64, Program>,
    ) -> Result<Made, No> {
        if !self.told.allows(Way::In, &service) {
            return Err(No(code::DENIED, format!("no rule lets {} connect to {service}", self.told.peer)));
        }
        let listening = Doing::Listening(service.clone());
        let Some(listener) = programs.values().find(|program| program.doing == listening) else {
            return Err(No(code::NOT_FOUND, format!("nobody listens at {service}")));
        };
        let made = self.calls.asked(serial, theirs, channel)?;
        let given = (|| -> io::Result<OwnedFd> {
            let Some((region, _)) = &mut self.memory else { return Err(io::ErrorKind::NotFound.into()) };
            region.clear(made.own.0, made.own.1)?;
            let (ours, socket) = program::call_socket()?;
            let slices = region.slices(&made)?;
            let descriptors: Vec<_> = [&socket].into_iter().chain(&slices).map(AsFd::as_fd).collect();
            listener.state(serial, (self.told.peer.clone(), service), &made, false, &descriptors)?;
            Ok(ours)
        })();
        match given {
            Ok(ours) => {
                self.sockets.insert(serial, ours);
                self.tell_life();
                Ok(made)
            }
            Err(error) => {
                self.calls.forget(serial);
                let gone = matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
                let code = if gone { code::NOT_FOUND } else { code::QUOTA };
                Err(No(code, format!("the listener cannot take the call: {error}")))
            }
        }
    }

    /// Gives the program that called what it asked for.
    fn give(&mut self, made: &Made, programs: &mut BTreeMap<u64, Program>) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let (id, service) = self.waiting.get(&made.serial).ok_or_else(gone)?;
        let program = programs.get_mut(id).ok_or_else(gone)?;
        let (region, _) = self.memory.as_mut().ok_or_else(gone)?;
        let (ours, socket) = program::call_socket()?;
        let slices = region.slices(made)?;
        let descriptors: Vec<_> = [&socket].into_iter().chain(&slices).map(AsFd::as_fd).collect();
        program.state(program.asked, (self.told.peer.clone(), service.clone()), made, true, &descriptors)?;
        program.doing = Doing::Greeted;
        self.waiting.remove(&made.serial);
        self.sockets.insert(made.serial, ours);
        self.tell_life();
        Ok(())
    }

    /// Tells the program that waits for a call that it does not get it.
    fn refuse(&mut self, serial: u32, No(code, why): No, programs: &mut BTreeMap<u64, Program>) {
        let Some((id, _)) = self.waiting.remove(&serial) else { return };
        if let Some(program) = programs.get_mut(&id) {
            program.doing = Doing::Greeted;
            let _ = program.answer(Message::Refuse { code, reason: why.into() });
        }
    }

    fn fail_waiting(&mut self, programs: &BTreeMap<u64, Program>, why: &str) {
        for (serial, (id, _)) in std::mem::take(&mut self.waiting) {
            self.calls.close(serial);
            if let Some(program) = programs.get(&id) {
                let _ = program.answer(Message::Refuse { code: code::NOT_FOUND, reason: why.into() });
            }
        }
    }

    /// Tells all programs with calls on this link how the peer's machine fares.
    fn tell_life(&self) {
        if self.told.life == Life::Unknown {
            return;
        }
        for socket in self.sockets.values() {
            let (link, generation, life) = (self.told.link, self.told.generation, self.told.life);
            let _ = program::send(socket.as_fd(), 0, Message::Life { link, generation, life }, &[]);
        }
    }

    /// A program closed its call's socket, or says something on it, which it has no reason to.
    fn hear_call(&mut self, serial: u32) {
        let Some(socket) = self.sockets.get(&serial) else { return };
        if !matches!(program::receive(socket.as_fd()), Ok(None)) {
            self.sockets.remove(&serial);
            self.departing.insert(serial);
        }
    }

    /// Ends the calls that no program has any more.
    fn depart(&mut self) {
        if self.departing.is_empty() {
            return;
        }
        let held = self.memory.as_mut().map_or(Ok(Vec::new()), |(region, _)| region.held());
        // What cannot be asked for is gone: the module lists the slices of a device that was unplugged as well.
        let held: BTreeSet<u32> = held.unwrap_or_default().iter().map(|made| made.serial).collect();
        let (stay, gone) = self.departing.iter().partition::<BTreeSet<u32>, _>(|serial| held.contains(serial));
        self.departing = stay;
        gone.into_iter().for_each(|serial| self.finish(serial));
    }

    fn finish(&mut self, serial: u32) {
        let Some((made, stage)) = self.calls.get(serial) else { return };
        if let Some((region, _)) = self.memory.as_mut().filter(|_| matches!(stage, Stage::Up | Stage::ClosedThere)) {
            region.bequeath(&made);
        }
        if self.calls.close(serial) {
            self.say_close(serial);
        }
    }

    /// Tells the program that has a call that the peer's side of it is over.
    fn tell_close(&self, serial: u32) {
        if let Some(socket) = self.sockets.get(&serial) {
            let _ = program::send(socket.as_fd(), 0, Message::Close {}, &[]);
        }
    }

    fn say_close(&mut self, serial: u32) {
        if let Some((_, peer)) = &mut self.memory {
            peer.say(serial, Message::Close {});
        }
    }

    /// Its memory cannot be opened; later perhaps, if that is worth to `wait` for.
    fn complain(&mut self, error: &io::Error, wait: bool) {
        if !wait || (error.kind() != io::ErrorKind::NotFound && !self.complained) {
            crate::log(&format!("the link with {} cannot be opened: {error}", self.told.peer));
            self.complained = true;
        }
        self.leaving = !wait;
    }

    /// The host took the link back.
    fn leave(&mut self, programs: &BTreeMap<u64, Program>) {
        self.leaving = true;
        self.fail_waiting(programs, "the link is taken away");
        self.sockets.keys().for_each(|serial| self.tell_close(*serial));
        if let Some((region, _)) = &mut self.memory {
            region.hang_up();
        }
    }
}

/// A number that is not 0.
fn random() -> io::Result<u64> {
    loop {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        match u64::from_ne_bytes(bytes) {
            0 => {}
            number => return Ok(number),
        }
    }
}
