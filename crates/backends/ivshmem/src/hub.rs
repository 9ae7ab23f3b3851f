// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting: for rings, for news from the broker, for the end (V-7).
//!
//! Each doorbell has an epoll instance on which four things arrive, all level-triggered: the doorbell's own eventfd;
//! the broker's socket for this call, the device's hang-up, if there is a device, and an eventfd. That one is raised,
//! for good, once the call is over. All of it is made when somebody is about to wait, or when the first message was
//! sent. What costs an emulated machine most is what it did not do just now, and the peer need not wait for that (ADR
//! 0033).

use std::{
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::{
    event::{PollFlags, Timespec, epoll},
    io::Errno,
};
use tombolo_control::Message;
use tombolo_domain::{Deadline, Doorbell, Error, Liveness, Result, Slot, Spin, Woken};
use tombolo_mem::Common;
use tombolo_os::{
    lock::lock,
    poll::polls_as,
    reserved::{ReservedFd, lifted},
};

use crate::{
    mailbox::{self, OwnPage, PeerPage},
    port::{self, DOORBELLS, Port, Range},
    socket,
};

/// What an event is about. A ring comes before an end.
const NOTIFIED: u64 = 0;
const OVER: u64 = 1;
const NEWS: u64 = 2;

#[derive(Debug)]
pub(crate) struct Hub {
    port: Arc<Port>,
    own: OwnPage,
    peer: PeerPage,
    waits: [OnceLock<ReservedFd>; DOORBELLS],
    /// Readable for good once nothing more comes, or nobody is to wait for more.
    over: OnceLock<ReservedFd>,
    is_over: AtomicBool,
    news: News,
    /// What was called, for people.
    address: String,
    known: Mutex<Known>,
}

/// What was said of a call, for all processes that have it: a child made by fork has the same socket, and each message there comes
/// to one of them.
#[derive(Debug)]
struct News(Common);

/// The link will be taken away (V-9).
const LEAVING: usize = 0;
/// How the call ended: which of [`ENDS`], counted from 1.
const ENDED: usize = 1;
const ENDS: [Liveness; 3] = [Liveness::ProcessGone, Liveness::DomainGone, Liveness::Revoked];

impl News {
    fn is_leaving(&self) -> bool {
        // ORDER: Relaxed; the flag stands for itself.
        self.0.words()[LEAVING].load(Ordering::Relaxed) != 0
    }

    /// Says whether this is news.
    fn begin_to_leave(&self) -> bool {
        self.0.words()[LEAVING].swap(1, Ordering::Relaxed) == 0
    }

    fn end(&self, life: Liveness) {
        let ended = ENDS.iter().position(|end| *end == life).map_or(1, |at| at as u64 + 1);
        self.0.words()[ENDED].store(ended, Ordering::Relaxed);
    }

    fn ended(&self) -> Option<Liveness> {
        let ended = self.0.words()[ENDED].load(Ordering::Relaxed) as usize;
        ENDS.get(ended.wrapping_sub(1)).copied()
    }
}

/// What this process knows of it.
#[derive(Debug)]
struct Known {
    life: Liveness,
    /// How it ended is known: nothing that comes later changes that.
    ended: bool,
    /// None once the broker is gone, or has nothing more to say.
    socket: Option<ReservedFd>,
    hangs_up: bool,
    /// Why there is no peer, until that was asked for.
    refused: Option<Error>,
}

impl Hub {
    pub(crate) fn new(
        port: Arc<Port>,
        own: OwnPage,
        peer: PeerPage,
        socket: ReservedFd,
        address: String,
    ) -> Result<Self> {
        let hangs_up = port.hang_up().is_some();
        let known =
            Mutex::new(Known { life: Liveness::Running, ended: false, socket: Some(socket), hangs_up, refused: None });
        let (waits, over, is_over) = Default::default();
        let news = News(Common::new().map_err(|error| Error::os("mmap", error))?);
        Ok(Self { port, own, peer, waits, over, is_over, news, address, known })
    }

    /// Makes what is waited at for a doorbell, unless that was made.
    pub(crate) fn watch(&self, doorbell: usize) -> Result<BorrowedFd<'_>> {
        // Nobody changes what is watched meanwhile, nor ends the call.
        let known = self.known();
        if let Some(made) = self.waits[doorbell].get() {
            return Ok(made.as_fd());
        }
        let is_over = self.is_over.load(Ordering::Acquire);
        if self.over.get().is_none() {
            let _ = self.over.set(port::event(is_over.into())?);
        }
        let over = self.over.get().expect("just made");
        self.port.listen(doorbell)?;
        if is_over {
            self.port.notify_own(doorbell);
        }
        let make = || -> std::io::Result<ReservedFd> {
            let epoll = ReservedFd::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
            let watch =
                |fd: BorrowedFd<'_>, about, flags| epoll::add(&epoll, fd, epoll::EventData::new_u64(about), flags);
            watch(self.port.doorbell(doorbell), NOTIFIED, epoll::EventFlags::IN)?;
            watch(over.as_fd(), OVER, epoll::EventFlags::IN)?;
            if let Some(socket) = &known.socket {
                watch(socket.as_fd(), NEWS, epoll::EventFlags::IN)?;
            }
            if let Some(device) = self.port.hang_up().filter(|_| known.hangs_up) {
                watch(device, NEWS, epoll::EventFlags::empty())?;
            }
            Ok(epoll)
        };
        let epoll = lifted(make).map_err(|error| Error::os("epoll_ctl", error))?;
        let _ = self.waits[doorbell].set(epoll);
        Ok(self.fd(doorbell))
    }

    /// Makes all that is waited at.
    pub(crate) fn prepare(&self) -> Result<()> {
        (0..DOORBELLS).try_for_each(|doorbell| self.watch(doorbell).map(drop))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.known)
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Why nothing more comes.
    pub(crate) fn ending(&self) -> Error {
        let refused = self.known().refused.take();
        match refused {
            Some(why) => why,
            None if self.liveness() == Liveness::Revoked => Error::Revoked,
            None => Error::PeerGone,
        }
    }

    /// The peer accepted (V-2).
    fn accepted(&self, descriptors: Vec<OwnedFd>, at: Range) -> Result<()> {
        self.port.accepted(descriptors, at)?;
        let page = usize::try_from(mailbox::LEN).expect("a page");
        self.peer.accepted(self.port.map_peer(0, page, ())?);
        Ok(())
    }

    /// There will be no peer.
    fn refuse(&self, known: &mut Known, why: Error) {
        known.refused = Some(why);
        self.end(known, Liveness::ProcessGone);
    }

    /// This endpoint gave the link up: nobody waits for it any more.
    pub(crate) fn give_up(&self) {
        let mut known = self.known();
        self.end(&mut known, Liveness::ProcessGone);
        // Who has the doorbell still (S-17) keeps nobody else from hearing of it.
        if let Some(socket) = known.socket.take() {
            self.unwatch(socket.as_fd());
        }
    }

    /// This process hears of the call no more; others that have it do. In a child made by fork nobody may be left to unlock what
    /// another thread had.
    pub(crate) fn hang_up(&self) {
        if let Ok(mut known) = self.known.try_lock() {
            known.socket = None;
        }
    }

    fn unwatch(&self, fd: BorrowedFd<'_>) {
        for epoll in self.waits.iter().filter_map(OnceLock::get) {
            let _ = epoll::delete(epoll, fd);
        }
    }

    fn end(&self, known: &mut Known, life: Liveness) {
        if !known.ended {
            (known.life, known.ended) = (life, true);
            self.news.end(life);
        }
        self.end_waits(known);
    }

    /// Ends all waits of this endpoint, now and from now on. Under the lock, so that nobody prepares to wait meanwhile.
    fn end_waits(&self, _known: &mut Known) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            // Memory is faster than a doorbell: the peer's last notification may be on its way still (D-4). An endpoint
            // that ends notifies all doorbells of its peer, so these may be raised here before the end is told.
            (0..DOORBELLS).for_each(|doorbell| self.port.notify_own(doorbell));
            if let Some(over) = self.over.get() {
                let _ = rustix::io::write(over, &1u64.to_ne_bytes());
            }
        }
    }

    /// Whether nothing more comes. Costs a load unless it has just ended.
    pub(crate) fn is_over(&self) -> bool {
        if !self.is_over.load(Ordering::Acquire)
            && let Some(ended) = self.peer_ended()
        {
            self.end(&mut self.known(), ended);
        }
        self.is_over.load(Ordering::Acquire)
    }

    /// How the peer ended, as its page says. That it left (V-9) ends nothing before the broker says that the link goes: a peer
    /// alone can end its side, and not take a link away.
    fn peer_ended(&self) -> Option<Liveness> {
        let closed = self.peer.is_closed();
        if !closed && !self.is_leaving() {
            return None;
        }
        // An end leaves before it closes.
        match self.peer.has_left() {
            true => Some(Liveness::Revoked),
            false => closed.then_some(Liveness::ProcessGone),
        }
    }

    /// Whether the broker said that the link will be taken away (V-9).
    pub(crate) fn is_leaving(&self) -> bool {
        self.news.is_leaving()
    }

    /// The link will be taken away: whoever waits is woken once, to learn of it (V-9).
    fn begin_to_leave(&self) {
        if self.news.begin_to_leave() {
            (0..DOORBELLS).for_each(|doorbell| self.port.notify_own(doorbell));
        }
    }

    /// This endpoint publishes nothing more (V-9).
    pub(crate) fn leave(&self) {
        self.own.leave();
        self.port.notify_all();
    }

    /// Hears what the broker and the device have to say, and how the peer fares after that.
    pub(crate) fn liveness(&self) -> Liveness {
        let mut known = self.known();
        // Before the broker, which says Close of a link that was taken away as well.
        if let Some(device) =
            self.port.hang_up().filter(|_| known.hangs_up && polls_as(self.port.own().fd(), PollFlags::HUP))
        {
            self.unwatch(device);
            known.hangs_up = false;
            self.end(&mut known, Liveness::Revoked);
        }
        self.receive_news(&mut known);
        if let Some(ended) = self.news.ended() {
            self.end(&mut known, ended);
        }
        if self.own.is_lost() || self.peer.is_lost() {
            self.end(&mut known, Liveness::Revoked);
        }
        if let Some(ended) = self.peer_ended() {
            self.end(&mut known, ended);
        }
        known.life
    }

    fn receive_news(&self, known: &mut Known) {
        while let Some(socket) = &known.socket {
            match socket::receive(socket.as_fd()) {
                Ok(None) => return,
                Ok(Some((said, descriptors))) => match said.message {
                    Message::Accept { offset, len } => {
                        if let Err(error) = self.accepted(descriptors, (offset, len)) {
                            self.refuse(known, error);
                        }
                    }
                    Message::Refuse { code, reason } if !self.peer.is_there() => {
                        self.refuse(known, socket::refused(code, reason.as_str(), &self.address));
                    }
                    Message::Life { life: tombolo_control::Life::DomainGone, .. } => {
                        self.end(known, Liveness::DomainGone)
                    }
                    Message::Life { .. } if known.ended => {}
                    Message::Life { life: tombolo_control::Life::Running, .. } => known.life = Liveness::Running,
                    Message::Life { life: tombolo_control::Life::Paused, .. } => known.life = Liveness::Paused,
                    Message::Life { .. } => known.life = Liveness::Unknown,
                    Message::Close {} => self.end(known, self.peer_ended().unwrap_or(Liveness::ProcessGone)),
                    Message::Leave { .. } => self.begin_to_leave(),
                    _ => {}
                },
                // The broker is gone. In a guest the call goes on (V-7), and nobody can tell how the peer fares. On a host the
                // holder has this socket as well: without both nobody carries rings, now or later.
                Err(error) => {
                    self.unwatch(socket.as_fd());
                    known.socket = None;
                    if !self.peer.is_there() {
                        self.refuse(known, error);
                    } else if self.port.is_carried() && matches!(error, Error::PeerGone) {
                        self.end(known, Liveness::Revoked);
                    }
                    if !known.ended {
                        known.life = Liveness::Unknown;
                    }
                }
            }
        }
    }

    pub(crate) fn wait(&self, doorbell: usize, deadline: Deadline) -> Result<Woken> {
        // The peer may have ended without a ring that is still there; once is enough, later ones come with a ring.
        self.is_over();
        loop {
            let left = deadline.remaining();
            let mut events = [MaybeUninit::uninit(); 4];
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            let woken = match epoll::wait(self.fd(doorbell), &mut events, timeout.as_ref()) {
                Ok((events, _)) => events.iter().map(|event| event.data.u64()).min(),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(Error::os("epoll_wait", error)),
            };
            match woken {
                Some(NOTIFIED) => return Ok(Woken::Notified),
                Some(OVER) => return Ok(Woken::PeerGone),
                Some(_) => drop(self.liveness()),
                None if left.is_some_and(|left| left.is_zero()) || deadline.expired() => return Ok(Woken::TimedOut),
                None => {}
            }
        }
    }

    pub(crate) fn drain(&self, doorbell: usize) {
        if !self.port.drain(doorbell) {
            // It was not the doorbell that made the descriptor readable.
            self.liveness();
        }
        self.is_over();
    }

    pub(crate) fn fd(&self, doorbell: usize) -> BorrowedFd<'_> {
        self.waits[doorbell].get().expect("made before anybody waits").as_fd()
    }
}

/// The doorbell of a link.
#[derive(Debug)]
pub(crate) struct VmDoorbell(pub Arc<Hub>);

impl Doorbell for VmDoorbell {
    fn notify(&self, slot: Slot) {
        self.0.port.notify(slot.index());
    }

    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken> {
        self.0.wait(slot.index(), deadline)
    }

    fn drain(&self, slot: Slot) {
        self.0.drain(slot.index());
    }

    fn end_waits(&self) {
        self.0.end_waits(&mut self.0.known());
    }

    fn is_leaving(&self) -> bool {
        self.0.is_leaving()
    }

    fn worth_spinning(&self) -> Duration {
        Spin::most_between_machines()
    }

    fn fd(&self, slot: Slot) -> BorrowedFd<'_> {
        self.0.fd(slot.index())
    }
}
