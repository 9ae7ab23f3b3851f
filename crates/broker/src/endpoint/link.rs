// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tracks one link in an endpoint's broker: its connections, and what the peer's broker and this machine's programs do
//! to them (B-14, B-18).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use tombolo_control::{ConnectionEnd, Life, Message, NOBODY, Name, Way, code};
use tracing::Span;

use crate::{
    discard,
    endpoint::{
        connections::{Agreement, Connections, Refusal, ResumeAction, Stage},
        devices::Region,
        draining::Draining,
        host_session::LinkNews,
        owner::About,
        peer_session::{Peer, PeerRequest},
        program::{self, Program, ProgramState},
    },
};

/// Minimum time between two reports to the host that a peer notifies without end.
const STORM_AGAIN: Duration = Duration::from_secs(1);

/// A connection that still has to be handed to its program: the one that asked for it, or the one that listens.
#[derive(Debug)]
struct Fresh {
    serial: u32,
    program: u64,
    /// Serial of the request that this connection answers.
    request_serial: u32,
    service: Name,
}

/// A link and the connections on it.
#[derive(Debug)]
pub(crate) struct Link<R> {
    pub news: LinkNews,
    /// Span that names the link in the log.
    pub span: Span,
    /// The link's memory and the session with the peer's broker; `None` until the devices are there.
    pub memory: Option<(R, Peer)>,
    pub connections: Connections,
    /// The broker's side of each program's connection socket.
    pub sockets: BTreeMap<u32, OwnedFd>,
    /// Connections that may still have windows mapped: their program closed the socket, or had one from an earlier
    /// broker.
    pub departing: BTreeSet<u32>,
    /// Connections of which the peer was told and the program was not.
    fresh: Vec<Fresh>,
    /// Details of connections that tools are shown (B-20).
    pub about: BTreeMap<u32, About>,
    /// Time of the last report to the host that the peer notifies without end.
    stormed: Option<Instant>,
    /// Number of such reports.
    pub storms: u32,
    /// Whether the host took the link back.
    pub leaving: bool,
    /// Whether the link's host is gone, so that nobody is told when the link ends (B-27).
    pub is_orphan: bool,
    /// Progress of the link towards being taken back (B-21).
    pub draining: Draining,
    /// Both sides of the next connection's socket, made in advance (V-2).
    spare: Option<(OwnedFd, OwnedFd)>,
    /// Whether it was logged that the memory cannot be opened yet.
    complained: bool,
    /// Whether it was logged that a connection could not be given to its program.
    failed: bool,
}

impl<R: Region> Link<R> {
    /// Makes a link that the host announced; its windows have `window` bytes.
    pub(crate) fn new(news: LinkNews, window: u64) -> Self {
        let connections = Connections::new(news.side, news.size, window);
        // The error level makes sure that the span exists whatever level is logged.
        let (number, generation, peer) = (news.link, news.generation, news.peer.as_str());
        let span = tracing::error_span!("link", number, generation, peer);
        Self {
            news,
            span,
            memory: None,
            connections,
            sockets: BTreeMap::new(),
            departing: BTreeSet::new(),
            fresh: Vec::new(),
            about: BTreeMap::new(),
            stormed: None,
            storms: 0,
            leaving: false,
            is_orphan: false,
            draining: Draining::default(),
            spare: None,
            complained: false,
            failed: false,
        }
    }

    /// Returns the number of connections, and the bytes of this side's region that they use.
    pub(crate) fn usage(&self) -> (u16, u64) {
        let connections = self.connections.iter().filter(|(_, stage)| *stage != Stage::Refused);
        connections.fold((0, 0), |(connections, used), (made, _)| (connections + 1, used + made.own.1))
    }

    /// Makes the socket for the next connection in advance, while no program waits for it.
    pub(crate) fn make_ahead(&mut self) {
        if self.spare.is_none() && !self.leaving && !self.draining.is_on() {
            self.spare = program::connection_socket().ok();
        }
    }

    /// Returns whether the host is to be told that the peer notifies without end (B-8).
    pub(crate) fn is_stormed(&mut self, now: Instant) -> bool {
        let stormed = self.memory.as_mut().is_some_and(|(region, _)| region.is_stormed());
        let due = stormed && self.stormed.is_none_or(|last| now.duration_since(last) >= STORM_AGAIN);
        if due {
            self.stormed = Some(now);
            self.storms = self.storms.saturating_add(1);
        }
        due
    }

    /// Handles a request of the peer's broker.
    pub(crate) fn understand(
        &mut self,
        heard: PeerRequest,
        programs: &mut BTreeMap<u64, Program>,
    ) -> Result<(), Refusal> {
        match heard {
            // `Broker` answers these itself.
            PeerRequest::Hello | PeerRequest::Inquire(_) => {}
            PeerRequest::Began => {
                for serial in self.connections.forgotten() {
                    self.refuse(serial, Refusal(code::NOT_FOUND, "its broker began anew".into()), programs);
                }
                let known = self.connections.iter().filter(|(_, stage)| *stage != Stage::Refused);
                let connections: Vec<_> = known.map(|(made, stage)| (made, stage == Stage::ClosedHere)).collect();
                if let Some((_, peer)) = &mut self.memory {
                    peer.recount(&connections);
                }
            }
            PeerRequest::Recount(claim, is_over) => match self.connections.resumed(claim, is_over)? {
                ResumeAction::AsItWas | ResumeAction::Ended => {}
                ResumeAction::Agreed(made) => self.agree(&made),
                ResumeAction::ClosedThere => self.tell_close(claim.serial),
                ResumeAction::Lost(made) => {
                    if let Some((region, _)) = &mut self.memory {
                        region.close_orphaned(&made);
                    }
                    say_close(self, claim.serial);
                }
            },
            PeerRequest::Connect(serial, service, theirs, channel) => {
                let answer = self.accept_connection(serial, service, theirs, channel, programs);
                let Some((_, peer)) = &mut self.memory else { return Ok(()) };
                match answer {
                    Ok(made) => peer.accept(&made),
                    Err(no) => peer.refuse(serial, no),
                };
            }
            PeerRequest::Accept(serial, theirs) => match self.connections.accepted(serial, theirs)? {
                Some(made) => self.agree(&made),
                None => self.end_unless_out(serial),
            },
            PeerRequest::Refuse(0, ..) => {}
            PeerRequest::Refuse(serial, code, reason) => {
                if self.connections.refused(serial)? {
                    self.refuse(serial, Refusal(code, reason.as_str().into()), programs);
                } else {
                    self.end_unless_out(serial);
                }
            }
            PeerRequest::Close(serial) => {
                let before = self.connections.get(serial);
                if self.connections.closed(serial)?.is_some() {
                    self.tell_close(serial);
                } else if let Some((made, _)) = before {
                    self.clean(&made);
                }
            }
        }
        Ok(())
    }

    /// Answers a program of the peer that connects to a service of this machine (B-14).
    fn accept_connection(
        &mut self,
        serial: u32,
        service: Name,
        theirs: (u64, u64),
        channel: u16,
        programs: &BTreeMap<u64, Program>,
    ) -> Result<Agreement, Refusal> {
        if !self.news.allows(Way::In, &service) {
            return Err(Refusal(code::DENIED, format!("no rule lets {} connect to {service}", self.news.peer)));
        }
        if self.draining.is_on() {
            return Err(Refusal(code::NOT_FOUND, "the link is being taken away".into()));
        }
        let listening = ProgramState::Listening(service.clone());
        let listens = |program: &Program| program.doing == listening && !program.has_left();
        let Some((id, program)) = programs.iter().find(|(_, program)| listens(program)) else {
            return Err(Refusal(code::NOT_FOUND, format!("nobody listens at {service}")));
        };
        self.connections.room_for(program.user)?;
        let made = self.connections.asked(serial, theirs, channel)?;
        let about = About::new(&self.span, serial, service.clone(), ConnectionEnd::Listened, program);
        self.begin(made, Fresh { serial, program: *id, request_serial: serial, service }, program.user)?;
        self.about.insert(serial, about);
        Ok(made)
    }

    /// Begins a connection for a program of `user`, and queues the request to the peer (B-14).
    pub(crate) fn request_connection(&mut self, id: u64, program: &Program, service: Name) -> Result<(), Refusal> {
        self.connections.room_for(program.user)?;
        let made = self.connections.ask()?;
        let fresh = Fresh { serial: made.serial, program: id, request_serial: program.asked, service: service.clone() };
        self.begin(made, fresh, program.user)?;
        self.about.insert(
            made.serial,
            About::new(&self.span, made.serial, service.clone(), ConnectionEnd::Connected, program),
        );
        if let Some((_, peer)) = &mut self.memory {
            peer.connect(&made, service);
        }
        Ok(())
    }

    /// Clears the memory of a new connection and records its owner.
    fn begin(&mut self, made: Agreement, fresh: Fresh, user: u32) -> Result<Agreement, Refusal> {
        self.about.retain(|serial, _| self.connections.get(*serial).is_some());
        let cleared = match &mut self.memory {
            Some((region, _)) => region.clear(made.own.0, made.own.1),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        if let Err(error) = cleared {
            self.connections.forget(made.serial);
            return Err(Refusal(code::FAILED, format!("the link's memory cannot be reached: {error}")));
        }
        self.connections.belongs(made.serial, user);
        self.fresh.push(fresh);
        Ok(made)
    }

    /// Hands programs the connections that they asked for, and those that were accepted for them. The peer was told
    /// first, so it need not wait until descriptors are made or a program reacts. A connection that cannot be handed
    /// over ends. Returns whether a message about one is queued for the peer.
    pub(crate) fn tell_programs(&mut self, programs: &mut BTreeMap<u64, Program>) -> bool {
        let mut over = false;
        for fresh in std::mem::take(&mut self.fresh) {
            let _in = self.connection_span(fresh.serial).entered();
            let Err(error) = self.hand(&fresh, programs) else {
                tracing::debug!("a connection is given to its program");
                continue;
            };
            let left = [io::ErrorKind::NotFound, io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
            // Logged once only, because the peer may connect as often as it likes.
            if !left.contains(&error.kind()) && !std::mem::replace(&mut self.failed, true) {
                tracing::error!(
                    stranger = self.news.peer.as_str(),
                    "a connection between here and {} cannot be given to its program: {error}",
                    self.news.peer
                );
            }
            if let Some(caller) = programs.get_mut(&fresh.program).filter(|it| it.doing == ProgramState::Connecting) {
                caller.refuse(Refusal(code::FAILED, format!("windows cannot be made: {error}")));
            }
            self.finish(fresh.serial);
            over = true;
        }
        over
    }

    /// Sends a connection to its program, with the program's own descriptors and what the peer has sent about it since
    /// (V-2).
    fn hand(&mut self, fresh: &Fresh, programs: &mut BTreeMap<u64, Program>) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let program = programs.get_mut(&fresh.program).ok_or_else(gone)?;
        let (region, _) = self.memory.as_mut().ok_or_else(gone)?;
        let (made, stage) = self.connections.get(fresh.serial).ok_or_else(gone)?;
        let (ours, socket) = self.spare.take().map_or_else(program::connection_socket, Ok)?;
        let own = region.own(&made)?;
        region.store_connection(&made, ours.as_fd())?;
        if matches!(stage, Stage::Up | Stage::ClosedThere) {
            program::accept(&ours, made.theirs, &region.theirs(&made)?)?;
        }
        if stage == Stage::ClosedThere {
            program::send(ours.as_fd(), 0, Message::Close {}, &[])?;
        }
        let descriptors: Vec<_> = [&socket].into_iter().chain(&own).map(AsFd::as_fd).collect();
        program.state(fresh.request_serial, (self.news.peer.clone(), fresh.service.clone()), &made, &descriptors)?;
        if program.doing == ProgramState::Connecting {
            program.rest();
        }
        // A program assumes that its peer runs, so Running need not be told (V-7).
        if !matches!(self.news.life, Life::Unknown | Life::Running) {
            self.news.send_life(&ours);
        }
        if program.hears_leave {
            self.draining.admit(made.serial);
            self.draining.tell_leave(made.serial, &ours);
        }
        self.sockets.insert(made.serial, ours);
        Ok(())
    }

    /// Returns the span that names a connection in the log.
    fn connection_span(&self, serial: u32) -> Span {
        self.about.get(&serial).map_or_else(|| self.span.clone(), |about| about.span.clone())
    }

    /// Gives the peer's window to the program that asked for the connection, because the peer agreed. A program that
    /// has not been sent the connection yet gets both at once later (V-2).
    fn agree(&mut self, made: &Agreement) {
        self.connection_span(made.serial).in_scope(|| tracing::debug!("the peer agrees"));
        let (Some((region, _)), Some(socket)) = (&mut self.memory, self.sockets.get(&made.serial)) else { return };
        let given = region
            .store_connection(made, socket.as_fd())
            .and_then(|()| region.theirs(made))
            .and_then(|theirs| program::accept(socket, made.theirs, &theirs));
        if let Err(error) = given {
            let reason = format!("windows cannot be made: {error}").into();
            // If the program has left, its socket reports that later.
            let _ = program::send(socket.as_fd(), 0, Message::Refuse { code: code::FAILED, reason }, &[]);
        }
    }

    /// Tells the program that waits for a connection that it does not get it.
    fn refuse(&mut self, serial: u32, Refusal(code, why): Refusal, programs: &mut BTreeMap<u64, Program>) {
        if let Some(socket) = self.sockets.get(&serial) {
            let _ = program::send(socket.as_fd(), 0, Message::Refuse { code, reason: why.into() }, &[]);
            return;
        }
        if let Some(at) = self.fresh.iter().position(|fresh| fresh.serial == serial) {
            let caller = programs.get_mut(&self.fresh.remove(at).program);
            if let Some(caller) = caller.filter(|it| it.doing == ProgramState::Connecting) {
                caller.refuse(Refusal(code, why));
            }
        }
        self.end_unless_out(serial);
    }

    /// Ends a connection that is no longer wanted, unless a program may still have its windows: then it ends with them.
    fn end_unless_out(&mut self, serial: u32) {
        if !self.sockets.contains_key(&serial) && !self.departing.contains(&serial) {
            self.finish(serial);
        }
    }

    /// Tells all programs that wait for an answer of the peer that none will come.
    pub(crate) fn fail_waiting(&mut self, programs: &mut BTreeMap<u64, Program>, why: &str) {
        let asked = self.connections.iter().filter(|(_, stage)| *stage == Stage::Asked).map(|(made, _)| made.serial);
        for serial in asked.collect::<Vec<_>>() {
            self.connections.close(serial);
            self.refuse(serial, Refusal(code::NOT_FOUND, why.into()), programs);
        }
    }

    /// Tells all programs with connections on this link the liveness of the peer's machine.
    pub(crate) fn send_liveness(&self) {
        if self.news.life != Life::Unknown {
            self.sockets.values().for_each(|socket| self.news.send_life(socket));
        }
    }

    /// Handles an event on a connection's socket: its program closed it, or sent something, which it has no reason to
    /// do.
    pub(crate) fn read_connection_socket(&mut self, serial: u32) {
        let Some(socket) = self.sockets.get(&serial) else { return };
        if !matches!(program::receive(socket.as_fd()), Ok(None)) {
            if let Some(socket) = self.sockets.remove(&serial) {
                discard::end(socket.as_fd());
            }
            self.connection_span(serial).in_scope(|| tracing::debug!("its program has left"));
            self.draining.forget(serial);
            self.departing.insert(serial);
        }
    }

    /// Ends the connections whose windows no program has any more.
    pub(crate) fn depart(&mut self) {
        if self.departing.is_empty() {
            return;
        }
        let held = self.memory.as_mut().map_or(Ok(Vec::new()), |(region, _)| region.held());
        // An error counts as no windows: the module lists the windows even of a device that was unplugged.
        let held: BTreeSet<u32> = held.unwrap_or_default().iter().map(|made| made.serial).collect();
        let (stay, gone) = self.departing.iter().partition::<BTreeSet<u32>, _>(|serial| held.contains(serial));
        self.departing = stay;
        if !gone.is_empty() {
            self.make_ahead();
        }
        gone.into_iter().for_each(|serial| self.finish(serial));
    }

    pub(crate) fn finish(&mut self, serial: u32) {
        let Some((made, stage)) = self.connections.get(serial) else { return };
        let ended = matches!(stage, Stage::GivenUp | Stage::ClosedHere);
        if let Some((region, _)) = self.memory.as_mut().filter(|_| !ended) {
            region.close_orphaned(&made);
        }
        if self.connections.close(serial) {
            say_close(self, serial);
        }
        self.clean(&made);
    }

    /// Clears the memory of a connection that is over on both sides, so that the next one need not wait for that.
    fn clean(&mut self, made: &Agreement) {
        if self.connections.get(made.serial).is_none()
            && let Some((region, _)) = self.memory.as_mut().filter(|_| made.own.1 != 0)
        {
            region.clear_ahead(made.own.0, made.own.1);
        }
    }

    /// Tells the program that has a connection that the peer's side of it is over.
    fn tell_close(&self, serial: u32) {
        self.connection_span(serial).in_scope(|| tracing::debug!("the peer's side is over"));
        if let Some(socket) = self.sockets.get(&serial) {
            let _ = program::send(socket.as_fd(), 0, Message::Close {}, &[]);
        }
    }

    /// Handles an error on opening the link's memory. The link stays if `wait`, because a later attempt may succeed.
    pub(crate) fn complain(&mut self, error: &io::Error, wait: bool) {
        if !wait || (error.kind() != io::ErrorKind::NotFound && !self.complained) {
            let peer = &self.news.peer;
            tracing::error!(stranger = peer.as_str(), "the link with {peer} cannot be opened: {error}");
            self.complained = true;
        }
        self.leaving = !wait;
    }

    /// Handles that the host took the link back.
    pub(crate) fn leave(&mut self, programs: &mut BTreeMap<u64, Program>) {
        (self.leaving, self.spare) = (true, None);
        name_what_is_open(self);
        self.fail_waiting(programs, "the link is taken away");
        self.fresh.clear();
        // Before the Close messages, so that programs see that the link was taken away, and not that the peer closed.
        if let Some((region, _)) = &mut self.memory {
            region.hang_up();
        }
        self.sockets.keys().for_each(|serial| self.tell_close(*serial));
    }

    /// Takes the link from its programs altogether: ends all connections, of which nothing is kept.
    pub(crate) fn dismiss(&mut self, programs: &mut BTreeMap<u64, Program>) {
        self.leave(programs);
        let mut over = std::mem::take(&mut self.departing);
        for (serial, socket) in std::mem::take(&mut self.sockets) {
            discard::end(socket.as_fd());
            over.insert(serial);
        }
        over.into_iter().for_each(|serial| self.finish(serial));
    }
}

/// Tells the peer that this side of a connection is over.
fn say_close<R: Region>(link: &mut Link<R>, serial: u32) {
    if let Some((_, peer)) = &mut link.memory {
        peer.queue_message(serial, Message::Close {});
    }
}

/// Prepares for the host to take the link back within `wait` ms: tells programs, and refuses new connections (B-21).
pub(crate) fn drain<R: Region>(link: &mut Link<R>, wait: u32, programs: &mut BTreeMap<u64, Program>) {
    if link.leaving || link.draining.is_on() {
        return;
    }
    link.draining.begin((link.news.link, link.news.generation), wait);
    link.spare = None;
    link.fail_waiting(programs, "the link is being taken away");
    let open = link.sockets.len();
    link.span.in_scope(|| tracing::info!(open, "the link will be taken away within {wait} ms"));
    link.sockets.iter().for_each(|(serial, socket)| link.draining.tell_leave(*serial, socket));
}

/// Returns, once, that the host is to be told that no program has a connection on the link any more (B-21).
pub(crate) fn take_drained<R: Region>(link: &mut Link<R>) -> bool {
    let gone = link.departing.iter().all(|serial| link.draining.has_left(*serial));
    link.sockets.is_empty() && gone && link.fresh.is_empty() && link.draining.take_end()
}

/// Logs which connections are still open on a link that is taken away (B-21).
fn name_what_is_open<R: Region>(link: &Link<R>) {
    let departing = link.departing.iter().filter(|serial| !link.draining.has_left(**serial));
    for serial in link.sockets.keys().chain(departing) {
        let (service, process, user) = match link.about.get(serial) {
            Some(about) => (about.service.as_str(), about.process, about.user),
            None => ("unknown", 0, NOBODY),
        };
        let _in = link.connection_span(*serial).entered();
        tracing::warn!(process, user, "{service}: its connection is cut, the link is taken away");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, BorrowedFd};

    use tombolo_control::{Boxes, Envelope, MESSAGE_MAX, Path, WINDOWS_AT};

    use super::*;
    use crate::endpoint::devices::Pages;

    /// Memory of a link that keeps nothing but the ends that were reported.
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
        fn notify(&self) {}
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

        fn set_doorbell(&mut self, _doorbell: u16) {}

        fn clear(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
            Ok(())
        }

        fn own(&mut self, _made: &Agreement) -> io::Result<Vec<OwnedFd>> {
            Ok(Vec::new())
        }

        fn theirs(&mut self, _made: &Agreement) -> io::Result<OwnedFd> {
            Ok(std::fs::File::open("/dev/null")?.into())
        }

        fn held(&mut self) -> io::Result<Vec<Agreement>> {
            Ok(Vec::new())
        }

        fn departures(&self) -> Option<BorrowedFd<'_>> {
            None
        }

        fn close_orphaned(&mut self, made: &Agreement) {
            self.0.push(made.serial);
        }

        fn hang_up(&mut self) {}
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn link_news() -> LinkNews {
        let place = || "04.0".parse().unwrap();
        LinkNews {
            link: 1,
            generation: 1,
            peer: name("b"),
            own: place(),
            theirs: place(),
            size: 1 << 20,
            side: 0,
            doorbell: 2,
            vectors: 1,
            rules: vec![(Way::In, "*".parse().unwrap())],
            life: Life::Running,
        }
    }

    #[test]
    fn v2_socket_made_ahead_is_one_and_goes_with_the_link() {
        let mut link = Link::<Nothing>::new(link_news(), 4096);
        assert!(link.spare.is_none());
        link.make_ahead();
        let made = link.spare.as_ref().map(|(ours, _)| ours.as_raw_fd());
        link.make_ahead();
        assert!(made.is_some() && link.spare.as_ref().map(|(ours, _)| ours.as_raw_fd()) == made, "one is enough");
        link.leave(&mut BTreeMap::new());
        assert!(link.spare.is_none());
        link.make_ahead();
        assert!(link.spare.is_none(), "no connection will want it");
    }

    fn linked() -> Link<Nothing> {
        let mut link = Link::new(link_news(), 4096);
        let mut boxes = Nothing::default();
        let peer = Peer::begin(1, name("a"), name("b"), [0; 16], &mut boxes).unwrap();
        link.memory = Some((boxes, peer));
        link
    }

    #[test]
    fn b21_connection_is_left_once_its_program_was_told_and_has_ended_it_whoever_has_its_windows() {
        let mut link = linked();
        let mut ends = BTreeMap::new();
        for serial in [2, 4, 6, 8] {
            let (ours, theirs) = program::connection_socket().unwrap();
            link.sockets.insert(serial, ours);
            ends.insert(serial, theirs);
        }
        // The program of 8 does not understand it.
        [2, 4, 6].into_iter().for_each(|serial| link.draining.admit(serial));
        let mut end = |link: &mut Link<Nothing>, serial| {
            ends.remove(&serial);
            link.read_connection_socket(serial);
        };
        // The program of 2 was not told.
        end(&mut link, 2);
        drain(&mut link, 1000, &mut BTreeMap::new());
        [4, 8].into_iter().for_each(|serial| end(&mut link, serial));
        assert!(!take_drained(&mut link), "6 is still open");
        end(&mut link, 6);
        assert!(!take_drained(&mut link), "who was not told may look at its windows");
        assert_eq!(link.departing, [2, 4, 6, 8].into());
        link.departing.retain(|serial| [4, 6].contains(serial));
        assert!(take_drained(&mut link) && !take_drained(&mut link), "said once");
        link.draining.stop();
        drain(&mut link, 1000, &mut BTreeMap::new());
        assert!(!take_drained(&mut link), "they were not told of this one");
    }

    fn listener() -> (Program, OwnedFd) {
        let (ours, theirs) = program::connection_socket().unwrap();
        let mut listener = Program::new(ours).unwrap();
        listener.doing = ProgramState::Listening(name("s"));
        (listener, theirs)
    }

    fn connect_request() -> PeerRequest {
        PeerRequest::Connect(2, name("s"), (WINDOWS_AT, 4096), 1)
    }

    #[test]
    fn v7_program_hears_of_an_end_that_came_before_it_was_told_of_the_connection() {
        let mut link = linked();
        let (ours, theirs) = program::connection_socket().unwrap();
        let heard = theirs.try_clone().unwrap();
        link.spare = Some((ours, theirs));
        let (listener, _program) = listener();
        let mut programs = BTreeMap::from([(7, listener)]);
        link.understand(connect_request(), &mut programs).unwrap();
        link.understand(PeerRequest::Close(2), &mut programs).unwrap();
        assert!(!link.tell_programs(&mut programs), "the peer knows");
        // Its descriptors are not received here.
        let next = || {
            let mut bytes = [0; MESSAGE_MAX];
            let len = rustix::io::read(&heard, &mut bytes).unwrap();
            Envelope::decode(Path::Socket, &bytes[..len]).unwrap().message
        };
        assert_eq!(next(), Message::Accept { offset: WINDOWS_AT, len: 4096 });
        assert_eq!(next(), Message::Close {});
    }

    #[test]
    fn v2_connection_of_a_listener_that_has_gone_is_over_once_it_was_accepted() {
        let mut link = linked();
        let (listener, _program) = listener();
        let mut programs = BTreeMap::from([(7, listener)]);
        link.understand(connect_request(), &mut programs).unwrap();
        assert!(link.connections.get(2).is_some_and(|(_, stage)| stage == Stage::Up), "accepted");
        programs.clear();
        assert!(link.tell_programs(&mut programs), "there is Close to be said");
        assert!(link.connections.get(2).is_some_and(|(_, stage)| stage == Stage::ClosedHere));
        assert_eq!(link.memory.as_ref().map(|(region, _)| &region.0), Some(&vec![2]), "its state is closed");
        assert!(link.sockets.is_empty() && !link.tell_programs(&mut programs), "and that was all");
    }
}
