// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waits for notifications, for messages of the broker and for the end of the connection (V-7).
//!
//! Each doorbell has an epoll instance that watches four descriptors, all level-triggered. These are the doorbell's own
//! eventfd, the broker's socket for this connection, the device's hang-up (if there is a device), and an eventfd that
//! stays raised once the connection is over. All are made when a thread is about to wait, or after the first message
//! was sent. On an emulated machine, operations that were not done recently cost most, and the peer need not wait for
//! these (ADR 0033).

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

/// Subjects of an epoll event; the lowest is reported first, so a notification precedes an end.
const NOTIFIED: u64 = 0;
const OVER: u64 = 1;
const NEWS: u64 = 2;

#[derive(Debug)]
pub(crate) struct Hub {
    port: Arc<Port>,
    own: OwnPage,
    peer: PeerPage,
    waits: [OnceLock<ReservedFd>; DOORBELLS],
    /// Eventfd that stays readable once nothing more arrives, or once nobody may wait for more.
    over: OnceLock<ReservedFd>,
    is_over: AtomicBool,
    news: News,
    /// Address to which the connection was made, for error messages.
    address: String,
    known: Mutex<Known>,
}

/// News of a connection, shared by all processes that have it. A child made by fork has the same socket, and each
/// message on it reaches only one process.
#[derive(Debug)]
struct News(Common);

/// Index of the flag that the link will be taken away (V-9).
const LEAVING: usize = 0;
/// Index of the word that tells how the connection ended: a position in [`ENDS`], counted from 1.
const ENDED: usize = 1;
const ENDS: [Liveness; 3] = [Liveness::ProcessGone, Liveness::DomainGone, Liveness::Revoked];

impl News {
    fn is_leaving(&self) -> bool {
        // ORDER: Relaxed; the flag stands for itself.
        self.0.words()[LEAVING].load(Ordering::Relaxed) != 0
    }

    /// Sets the flag. Returns whether it was not set before.
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

/// State of the connection as this process knows it.
#[derive(Debug)]
struct Known {
    life: Liveness,
    /// Whether `life` is final: nothing that arrives later changes it.
    ended: bool,
    /// Socket of the broker for this connection; none once the broker is gone or sends nothing more.
    socket: Option<ReservedFd>,
    hangs_up: bool,
    /// Error that tells why there is no peer, until a caller takes it.
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

    /// Makes the epoll instance of a doorbell, unless it exists, and returns it.
    pub(crate) fn watch(&self, doorbell: usize) -> Result<BorrowedFd<'_>> {
        // The lock keeps other threads from changing what is watched and from ending the connection meanwhile.
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

    /// Makes the epoll instances of all doorbells.
    pub(crate) fn prepare(&self) -> Result<()> {
        (0..DOORBELLS).try_for_each(|doorbell| self.watch(doorbell).map(drop))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.known)
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// Returns the error that tells why nothing more arrives.
    pub(crate) fn ending(&self) -> Error {
        let refused = self.known().refused.take();
        match refused {
            Some(why) => why,
            None if self.liveness() == Liveness::Revoked => Error::Revoked,
            None => Error::PeerGone,
        }
    }

    /// Takes the peer's window, which came with the peer's acceptance (V-2).
    fn accepted(&self, descriptors: Vec<OwnedFd>, at: Range) -> Result<()> {
        self.port.accepted(descriptors, at)?;
        let page = usize::try_from(mailbox::LEN).expect("a page");
        self.peer.accepted(self.port.map_peer(0, page, ())?);
        Ok(())
    }

    /// Ends the connection because there will be no peer.
    fn refuse(&self, known: &mut Known, why: Error) {
        known.refused = Some(why);
        self.end(known, Liveness::ProcessGone);
    }

    /// Ends the connection on this side, so that no thread waits for it any more.
    pub(crate) fn give_up(&self) {
        let mut known = self.known();
        self.end(&mut known, Liveness::ProcessGone);
        // A holder of the doorbell may keep this hub alive (S-17). The socket is closed nevertheless, so that others
        // learn of the end.
        if let Some(socket) = known.socket.take() {
            self.unwatch(socket.as_fd());
        }
    }

    /// Closes this process's socket of the connection; other processes keep theirs. Does not wait for the lock: in a
    /// child made by fork, the thread that holds it may not exist.
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

    /// Ends all present and future waits of this endpoint. The caller holds the lock, so that no thread prepares to
    /// wait meanwhile.
    fn end_waits(&self, _known: &mut Known) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            // Memory is faster than a doorbell: the peer's last notification may still be under way (D-4). An endpoint
            // that ends notifies all doorbells of its peer, so all may be raised here before the end is reported.
            (0..DOORBELLS).for_each(|doorbell| self.port.notify_own(doorbell));
            if let Some(over) = self.over.get() {
                let _ = rustix::io::write(over, &1u64.to_ne_bytes());
            }
        }
    }

    /// Returns whether nothing more arrives. Costs a load unless the connection has just ended.
    pub(crate) fn is_over(&self) -> bool {
        if !self.is_over.load(Ordering::Acquire)
            && let Some(ended) = self.peer_ended()
        {
            self.end(&mut self.known(), ended);
        }
        self.is_over.load(Ordering::Acquire)
    }

    /// Returns how the peer ended, according to its page. That the peer left (V-9) ends nothing until the broker says
    /// that the link will be taken away: a peer can end its own side, but cannot take a link away.
    fn peer_ended(&self) -> Option<Liveness> {
        let closed = self.peer.is_closed();
        if !closed && !self.is_leaving() {
            return None;
        }
        // An endpoint leaves before it closes.
        match self.peer.has_left() {
            true => Some(Liveness::Revoked),
            false => closed.then_some(Liveness::ProcessGone),
        }
    }

    /// Returns whether the broker said that the link will be taken away (V-9).
    pub(crate) fn is_leaving(&self) -> bool {
        self.news.is_leaving()
    }

    /// Records that the link will be taken away, and wakes each waiter once to learn of it (V-9).
    fn begin_to_leave(&self) {
        if self.news.begin_to_leave() {
            (0..DOORBELLS).for_each(|doorbell| self.port.notify_own(doorbell));
        }
    }

    /// Tells the peer that this endpoint publishes nothing more (V-9).
    pub(crate) fn leave(&self) {
        self.own.leave();
        self.port.notify_all();
    }

    /// Processes what the broker and the device report, and returns the peer's liveness after that.
    pub(crate) fn liveness(&self) -> Liveness {
        let mut known = self.known();
        // The device comes before the broker, because the broker sends Close also for a link that was taken away.
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
                // The broker is gone. In a guest the connection goes on (V-7), and the peer's liveness is unknown. On a
                // host the descriptor store has this socket as well: a closed socket means that nobody carries
                // notifications, now or later.
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
        // The peer may have ended, and its notification may have been drained already. One check suffices, because a
        // later end comes with a notification.
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
            // Something other than the doorbell made the descriptor readable.
            self.liveness();
        }
        self.is_over();
    }

    pub(crate) fn fd(&self, doorbell: usize) -> BorrowedFd<'_> {
        self.waits[doorbell].get().expect("made before anybody waits").as_fd()
    }
}

/// Doorbell of a connection.
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
