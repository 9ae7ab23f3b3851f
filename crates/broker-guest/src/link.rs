// SPDX-License-Identifier: Apache-2.0 OR MIT
//! B-14, B-18. A link: what the peer's broker and the programs of this machine do to its calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use tombolo_control::{Life, Message, Name, Way, code};

use crate::{
    calls::{Calls, Made, No, Resumed, Stage},
    devices::Region,
    host::Told,
    peer::{Heard, Peer},
    program::{self, Doing, Program},
};

/// The host is not told more often that a peer rings without end.
const STORM_AGAIN: Duration = Duration::from_secs(1);

/// A call that was accepted, for a program that listens.
#[derive(Debug)]
struct Accepted {
    made: Made,
    listener: u64,
    service: Name,
}

/// A link and the calls on it.
#[derive(Debug)]
pub(crate) struct Link<R> {
    pub told: Told,
    /// None until the devices are there.
    pub memory: Option<(R, Peer)>,
    pub calls: Calls,
    /// This side's end of each program's call socket.
    pub sockets: BTreeMap<u32, OwnedFd>,
    /// Calls whose program closed the socket, or had one of an earlier broker, and may have the slices still.
    pub departing: BTreeSet<u32>,
    /// Calls that were accepted and of which who listens is still to hear.
    accepted: Vec<Accepted>,
    /// Who waits for the answer to which call, and for what.
    pub waiting: BTreeMap<u32, (u64, Name)>,
    /// When the host was told last that the peer rings without end.
    stormed: Option<Instant>,
    /// The host took it back.
    pub leaving: bool,
    /// That its memory cannot be opened yet was said.
    complained: bool,
    /// That a call could not be given to who listens was said.
    failed: bool,
}

impl<R: Region> Link<R> {
    /// A link that the host told of; slices on it are of `slice` bytes.
    pub(crate) fn new(told: Told, slice: u64) -> Self {
        let calls = Calls::new(told.side, told.size, slice);
        Self {
            told,
            memory: None,
            calls,
            sockets: BTreeMap::new(),
            departing: BTreeSet::new(),
            accepted: Vec::new(),
            waiting: BTreeMap::new(),
            stormed: None,
            leaving: false,
            complained: false,
            failed: false,
        }
    }

    /// B-8. Whether the host is to be told that the peer rings without end.
    pub(crate) fn is_stormed(&mut self, now: Instant) -> bool {
        let stormed = self.memory.as_mut().is_some_and(|(region, _)| region.is_stormed());
        let due = stormed && self.stormed.is_none_or(|last| now.duration_since(last) >= STORM_AGAIN);
        if due {
            self.stormed = Some(now);
        }
        due
    }

    /// What the peer's broker wants.
    pub(crate) fn understand(&mut self, heard: Heard, programs: &mut BTreeMap<u64, Program>) -> Result<(), No> {
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
        let listens = |program: &Program| program.doing == listening && !program.has_left();
        let Some((listener, program)) = programs.iter().find(|(_, program)| listens(program)) else {
            return Err(No(code::NOT_FOUND, format!("nobody listens at {service}")));
        };
        let user = program.user;
        self.calls.room_for(user)?;
        let made = self.calls.asked(serial, theirs, channel)?;
        let cleared = match &mut self.memory {
            Some((region, _)) => region.clear(made.own.0, made.own.1),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        if let Err(error) = cleared {
            self.calls.forget(serial);
            return Err(No(code::FAILED, format!("the link's memory cannot be reached: {error}")));
        }
        self.calls.belongs(serial, user);
        self.accepted.push(Accepted { made, listener: *listener, service });
        Ok(made)
    }

    /// Tells those who listen of calls that were accepted, after the peer was told: it need not wait for what is made for
    /// them, and for what they do about it. A call that cannot be told is over. True if the peer is to hear of one.
    pub(crate) fn tell_listeners(&mut self, programs: &BTreeMap<u64, Program>) -> bool {
        let mut over = false;
        for Accepted { made, listener, service } in std::mem::take(&mut self.accepted) {
            let serial = made.serial;
            if let Err(error) = self.hand(&made, service, (listener, serial), false, programs) {
                let left = [io::ErrorKind::NotFound, io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
                // Once: the peer may call as often as it likes.
                if !left.contains(&error.kind()) && !std::mem::replace(&mut self.failed, true) {
                    crate::log(&format!("a call of {} cannot be given to who listens: {error}", self.told.peer));
                }
                self.finish(serial);
                over = true;
            }
        }
        over
    }

    /// Gives the program that called what it asked for.
    fn give(&mut self, made: &Made, programs: &mut BTreeMap<u64, Program>) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let (id, service) = self.waiting.get(&made.serial).cloned().ok_or_else(gone)?;
        let asked = programs.get(&id).ok_or_else(gone)?.asked;
        self.hand(made, service, (id, asked), true, programs)?;
        self.waiting.remove(&made.serial);
        programs.get_mut(&id).ok_or_else(gone)?.rest();
        Ok(())
    }

    /// V-2. States a call to a program under a serial, with all that it needs.
    fn hand(
        &mut self,
        made: &Made,
        service: Name,
        (id, serial): (u64, u32),
        caller: bool,
        programs: &BTreeMap<u64, Program>,
    ) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let program = programs.get(&id).ok_or_else(gone)?;
        let (region, _) = self.memory.as_mut().ok_or_else(gone)?;
        let (ours, socket) = program::call_socket()?;
        let slices = region.slices(made)?;
        region.keep(made, ours.as_fd())?;
        let descriptors: Vec<_> = [&socket].into_iter().chain(&slices).map(AsFd::as_fd).collect();
        program.state(serial, (self.told.peer.clone(), service), made, caller, &descriptors)?;
        self.tell_life_to(&ours);
        self.sockets.insert(made.serial, ours);
        Ok(())
    }

    /// Tells the program that waits for a call that it does not get it.
    fn refuse(&mut self, serial: u32, No(code, why): No, programs: &mut BTreeMap<u64, Program>) {
        let Some((id, _)) = self.waiting.remove(&serial) else { return };
        if let Some(program) = programs.get_mut(&id) {
            program.rest();
            let _ = program.answer(Message::Refuse { code, reason: why.into() });
        }
    }

    /// Tells all who wait for an answer of the peer that none will come.
    pub(crate) fn fail_waiting(&mut self, programs: &mut BTreeMap<u64, Program>, why: &str) {
        for serial in self.waiting.keys().copied().collect::<Vec<_>>() {
            self.calls.close(serial);
            self.refuse(serial, No(code::NOT_FOUND, why.into()), programs);
        }
    }

    /// Tells all programs with calls on this link how the peer's machine fares.
    pub(crate) fn tell_life(&self) {
        if self.told.life != Life::Unknown {
            self.sockets.values().for_each(|socket| self.say_life(socket));
        }
    }

    /// V-7. The same for a call that begins: that the machine runs goes without saying.
    fn tell_life_to(&self, socket: &OwnedFd) {
        if !matches!(self.told.life, Life::Unknown | Life::Running) {
            self.say_life(socket);
        }
    }

    fn say_life(&self, socket: &OwnedFd) {
        let (link, generation, life) = (self.told.link, self.told.generation, self.told.life);
        let _ = program::send(socket.as_fd(), 0, Message::Life { link, generation, life }, &[]);
    }

    /// A program closed its call's socket, or says something on it, which it has no reason to.
    pub(crate) fn hear_call(&mut self, serial: u32) {
        let Some(socket) = self.sockets.get(&serial) else { return };
        if !matches!(program::receive(socket.as_fd()), Ok(None)) {
            self.sockets.remove(&serial);
            self.departing.insert(serial);
        }
    }

    /// Ends the calls that no program has any more.
    pub(crate) fn depart(&mut self) {
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

    pub(crate) fn finish(&mut self, serial: u32) {
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
    pub(crate) fn complain(&mut self, error: &io::Error, wait: bool) {
        if !wait || (error.kind() != io::ErrorKind::NotFound && !self.complained) {
            crate::log(&format!("the link with {} cannot be opened: {error}", self.told.peer));
            self.complained = true;
        }
        self.leaving = !wait;
    }

    /// The host took the link back.
    pub(crate) fn leave(&mut self, programs: &mut BTreeMap<u64, Program>) {
        self.leaving = true;
        self.accepted.clear();
        self.fail_waiting(programs, "the link is taken away");
        // First, so that programs hear that it was taken away, and not that the peer closed.
        if let Some((region, _)) = &mut self.memory {
            region.hang_up();
        }
        self.sockets.keys().for_each(|serial| self.tell_close(*serial));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use tombolo_control::{Boxes, SLICES_AT};

    use super::*;
    use crate::devices::Pages;

    /// Memory of a link of which nothing is kept but whose end was told.
    #[derive(Debug, Default)]
    struct Nothing(Vec<u32>);

    impl Boxes for Nothing {
        fn load(&mut self, _offset: usize, bytes: &mut [u8]) -> io::Result<()> {
            bytes.fill(0);
            Ok(())
        }

        fn store(&mut self, _offset: usize, _bytes: &[u8]) -> io::Result<()> {
            Ok(())
        }
    }

    impl Pages for Nothing {
        fn ring(&self) {}
        fn drain(&self) {}
    }

    impl Region for Nothing {
        type Pages = Self;

        fn pages(&mut self) -> &mut Self {
            self
        }

        fn fd(&self) -> BorrowedFd<'_> {
            unreachable!("nobody waits")
        }

        fn set_bell(&mut self, _bell: u16) {}

        fn clear(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
            Ok(())
        }

        fn slices(&mut self, _made: &Made) -> io::Result<Vec<OwnedFd>> {
            Ok(Vec::new())
        }

        fn held(&mut self) -> io::Result<Vec<Made>> {
            Ok(Vec::new())
        }

        fn departures(&self) -> Option<BorrowedFd<'_>> {
            None
        }

        fn bequeath(&mut self, made: &Made) {
            self.0.push(made.serial);
        }

        fn hang_up(&mut self) {}
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn v2_call_of_a_listener_that_has_gone_is_over_once_it_was_accepted() {
        let place = || "04.0".parse().unwrap();
        let told = Told {
            link: 1,
            generation: 1,
            peer: name("b"),
            own: place(),
            theirs: place(),
            size: 1 << 20,
            side: 0,
            bell: 2,
            vectors: 1,
            rules: vec![(Way::In, "*".parse().unwrap())],
            life: Life::Running,
        };
        let mut link = Link::<Nothing>::new(told, 4096);
        let mut boxes = Nothing::default();
        let peer = Peer::begin(1, name("a"), name("b"), [0; 16], &mut boxes).unwrap();
        link.memory = Some((boxes, peer));
        let (_ours, theirs) = program::call_socket().unwrap();
        let mut listener = Program::new(theirs).unwrap();
        listener.doing = Doing::Listening(name("s"));

        let mut programs = BTreeMap::from([(7, listener)]);
        let call = Heard::Connect(2, name("s"), (SLICES_AT, 4096), 1);
        link.understand(call, &mut programs).unwrap();
        assert!(link.calls.get(2).is_some_and(|(_, stage)| stage == Stage::Up), "accepted");
        programs.clear();
        assert!(link.tell_listeners(&programs), "there is Close to be said");
        assert!(link.calls.get(2).is_some_and(|(_, stage)| stage == Stage::ClosedHere));
        assert_eq!(link.memory.as_ref().map(|(region, _)| &region.0), Some(&vec![2]), "its state is closed");
        assert!(link.sockets.is_empty() && !link.tell_listeners(&programs), "and that was all");
    }
}
