// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One registration of a connection in a set, and what is to be told of it.

use std::{os::fd::RawFd, sync::Arc};

use libc::{POLLOUT, POLLPRI, POLLRDHUP, epoll_event};
use tombolo_sockets::{
    Process, ProgramCall,
    connection::{Connection, Stage},
};

pub(super) const IN: u32 = libc::EPOLLIN as u32;
pub(super) const OUT: u32 = libc::EPOLLOUT as u32;
pub(super) const PRI: u32 = libc::EPOLLPRI as u32;
pub(super) const RDHUP: u32 = libc::EPOLLRDHUP as u32;
pub(super) const ALWAYS: u32 = ERR | HUP;
pub(super) const EDGE: u32 = libc::EPOLLET as u32;
pub(super) const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub(super) const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// In the token of a doorbell.
pub(super) const DOORBELL: u64 = 1 << 31;
const ERR: u32 = libc::EPOLLERR as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const RDNORM: u32 = libc::EPOLLRDNORM as u32;
const WRNORM: u32 = libc::EPOLLWRNORM as u32;

/// One registration of a connection.
#[derive(Debug)]
pub(super) struct Entry {
    pub fd: RawFd,
    pub connection: Arc<Connection>,
    /// What the program asked for, and its word.
    pub events: u32,
    pub data: u64,
    /// The program took it out of the set. In the kernel it stays, where it does no harm: its events are filtered.
    pub absent: bool,
    /// The number by which it came into the set is closed, and may be another's.
    pub orphan: bool,
    /// It is in the kernel under the token.
    pub wired: bool,
    pub token: u64,
    /// Reported once (`EPOLLONESHOT`), and not again before the program says so.
    pub spent: bool,
    /// What the kernel said and does not take back: errors and hang-ups.
    sticky: u32,
    /// Of these, what the program was told: of errors and hang-ups after all bytes.
    told_sticky: u32,
    /// There were urgent bytes when the kernel was last asked.
    urgent: bool,
    /// What had arrived when it was last asked whether it rests.
    rested: Option<u64>,
    /// For `EPOLLET`: something new since it was last reported.
    edge: bool,
    arrived: u64,
    stalls: u64,
    /// It was told when there was no room: that there is some is news then, whether or not a send found none.
    without_room: bool,
    /// The look in which it was last told, and what.
    told: (u64, u32),
    /// Its doorbell's ring was taken, or an edge of its socket, and it was not armed since.
    pub notified: bool,
    /// How often it was not wired because a thread was waiting.
    postponed: u8,
}

/// What nobody may ring for while a thread sleeps.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Unheard {
    /// Something is owed to a peer.
    pub owes: bool,
    /// A pipe is full (S-16).
    pub full: bool,
}

/// Calls in which a registration may be wired later.
const POSTPONED: u8 = 64;

impl Entry {
    pub fn new(fd: RawFd, connection: &Arc<Connection>, token: u64) -> Self {
        Self {
            fd,
            connection: Arc::clone(connection),
            events: 0,
            data: 0,
            absent: false,
            orphan: false,
            wired: false,
            token,
            spent: false,
            sticky: 0,
            told_sticky: 0,
            urgent: false,
            rested: None,
            edge: true,
            arrived: 0,
            stalls: 0,
            without_room: false,
            told: (0, 0),
            notified: false,
            postponed: 0,
        }
    }

    /// The program asks for `event`: what is true now is news.
    pub fn ask(&mut self, event: epoll_event) {
        (self.events, self.data) = (event.events, event.u64);
        (self.absent, self.spent, self.edge) = (false, false, true);
    }

    /// What the program asks for, if it is in the set for it.
    pub fn asked(&self) -> Option<epoll_event> {
        let events = if self.spent { ONESHOT } else { self.events };
        (!self.absent).then_some(epoll_event { events, u64: self.data })
    }

    /// It came under the token: look at everything once. What it asks for may have been told already, if that is to be once.
    pub fn wire(&mut self, spent: bool) {
        (self.wired, self.edge, self.spent) = (true, true, spent);
    }

    /// Says whether it may be wired later.
    pub fn postpone(&mut self) -> bool {
        self.postponed = self.postponed.saturating_add(1);
        self.postponed < POSTPONED
    }

    /// Whether it is to be told once.
    pub fn is_once(&self) -> bool {
        !self.wired && self.events & ONESHOT != 0
    }

    pub fn is_exclusive(&self) -> bool {
        self.events & EXCLUSIVE != 0
    }

    /// What is done on the connection for the program, by one of its descriptors that is open.
    fn for_call<'a>(&'a self, process: &'a Process) -> ProgramCall<'a> {
        self.connection.for_call(process, self.connection.descriptors.fd())
    }

    fn is_watched(&self) -> bool {
        self.wired && !self.absent && !self.spent
    }

    fn reads(&self) -> bool {
        self.events & (IN | RDNORM | RDHUP) != 0
    }

    fn writes(&self) -> bool {
        self.events & (OUT | WRNORM) != 0
    }

    /// The kernel has something new to say of the socket, in the look with number `round`. Returns what was told in this look already
    /// and is to be told as more: that the peer sends no more is told with what it sent before, as one reads on to the end then.
    pub fn note_kernel_events(&mut self, events: u32, round: u64) -> Option<(epoll_event, u32)> {
        self.connection.wiring.set_quiet(false);
        self.connection.ending.note_events(events as i16);
        self.sticky |= events & (RDHUP | ALWAYS);
        self.urgent |= events & PRI != 0;
        let was_told = epoll_event { events: self.told.1, u64: self.data };
        let end = events & self.ends_with_bytes() & !self.told.1;
        let amended = (self.told.0 == round && end != 0).then(|| {
            self.told.1 |= end;
            self.told_sticky |= end;
            (was_told, self.told.1)
        });
        // What was told in this look is no news for the next one, nor is anything that came before the peer's end that was told.
        let told = if self.told.0 == round { self.told.1 } else { 0 };
        let ends = self.told_sticky & if self.connection.ending.is_deaf() { HUP } else { RDHUP | HUP };
        let told = if ends == 0 { told } else { told | IN | RDNORM | RDHUP | ends };
        self.edge |= events & (self.events | ALWAYS) & !told != 0;
        // As a ring, this has woken one thread; where the program asks for levels, others are to be told of it too.
        self.notified = true;
        amended
    }

    /// Of the ends that the program hears of, those that it is told with bytes that are left to read: that the peer sends no more, and
    /// that both send no more. Errors come after what is in the pipe, as programs close when they hear of them.
    fn ends_with_bytes(&self) -> u32 {
        self.events & RDHUP | if self.sticky & ERR == 0 { HUP } else { 0 }
    }

    /// Of one that was told of bytes in this look, and may not have been told of the end behind them: asks the kernel for that.
    /// Returns as [`note_kernel_events`](Self::note_kernel_events).
    pub fn hear_end(&mut self, process: &Process, round: u64) -> Option<(epoll_event, u32)> {
        let wanted = self.events & RDHUP | if self.connection.ending.has_ended_sending() { HUP } else { 0 };
        let is_open = self.told.0 == round && self.told.1 & IN != 0 && wanted & !self.told.1 != 0;
        let said = is_open.then(|| process.kernel().poll(self.connection.descriptors.fd(), POLLRDHUP) as u16);
        let end = u32::from(said?) & wanted;
        if end != 0 { self.note_kernel_events(end, round) } else { None }
    }

    /// Whether nothing has come since this was last asked, nothing is to be told, and a doorbell will tell when that changes.
    pub fn rests(&mut self, process: &Process) -> bool {
        let (arrived, stalls) = (self.connection.pipes.arrived(), self.connection.wiring.stalls());
        if self.rested.replace(arrived) != Some(arrived) || !self.wired || self.connection.stage() != Stage::Joined {
            return false;
        }
        if self.is_watched() {
            // Who asks for levels is told of room again and again. For an edge there must be some before the look: what comes after it
            // is news.
            if self.writes() && (self.events & EDGE == 0 || self.connection.is_writable() != Some(true)) {
                return false;
            }
            let ready = self.current_events(process);
            if ready != 0 && self.is_news(ready, arrived, stalls) || !self.connection.is_quiet() {
                return false;
            }
            self.for_call(process).arm(self.reads(), false);
            self.notified = false;
        }
        // What came before the peer could know is seen now.
        !self.connection.pipes.has_unread()
            && !self.may_be_notified()
            && !self.is_stalled()
            && !self.send_recalled(process)
    }

    /// Of one that rests: whether its peer may have notified. Something came, whoever read it; something is asked for; or the
    /// peer is gone.
    pub fn may_be_notified(&self) -> bool {
        let connection = &self.connection;
        self.rested != Some(connection.pipes.arrived()) || connection.pipes.is_asked() || connection.pipes.are_cut_off()
    }

    /// Whether its program found no room since it was last told that there is some, or was told of something else when there was
    /// none, and wants to be told.
    pub fn is_stalled(&self) -> bool {
        self.writes() && (self.without_room || self.connection.wiring.stalls() != self.stalls)
    }

    /// Before a sleep: asks the peer to ring for what is waited for.
    pub fn arm(&mut self, process: &Process) -> Unheard {
        self.notified = false;
        // Where there is room already, somebody who waits for an edge has had it.
        let full = self.is_full();
        if self.is_watched() {
            self.for_call(process).arm(self.reads(), full);
        }
        Unheard { owes: self.send_recalled(process), full }
    }

    /// Sends over TCP what the peer wants from there (S-2). Says whether something is left of it.
    pub fn send_recalled(&self, process: &Process) -> bool {
        self.wired && self.for_call(process).send_recalled()
    }

    /// Whether room is waited for, and there is none in the pipe.
    pub fn is_full(&self) -> bool {
        self.is_watched() && self.writes() && self.connection.is_writable() == Some(false)
    }

    /// Whether its ring was taken and its peer was not asked for another. Who asks for one that is spent wakes all who sleep.
    pub fn is_unarmed(&self) -> bool {
        self.notified && self.is_watched()
    }

    /// The event to be told now, which is told by that: once in a `round`.
    #[inline]
    pub fn take_event(&mut self, process: &Process, round: u64) -> Option<epoll_event> {
        if self.told.0 == round {
            return None;
        }
        // What comes after the look is news for the next one.
        let (arrived, stalls) = (self.connection.pipes.arrived(), self.connection.wiring.stalls());
        let ready = self.current_events(process);
        if ready == 0 || !self.is_news(ready, arrived, stalls) {
            return None;
        }
        self.edge = false;
        self.told = (round, ready);
        self.told_sticky |= ready & self.sticky;
        if ready & IN != 0 {
            self.arrived = arrived;
        }
        if ready & OUT != 0 {
            self.stalls = stalls;
        }
        self.without_room = ready & OUT == 0;
        self.spent = self.events & ONESHOT != 0;
        Some(epoll_event { events: ready, u64: self.data })
    }

    /// For `EPOLLET`: whether it is more than what was told last.
    fn is_news(&self, ready: u32, arrived: u64, stalls: u64) -> bool {
        self.events & EDGE == 0
            || self.edge
            || ready & self.sticky & !self.told_sticky != 0
            || ready & IN != 0 && arrived != self.arrived
            || ready & OUT != 0 && (self.without_room || stalls != self.stalls)
    }

    /// What is true now, of what was asked for. The kernel is asked only where it said that there is something new, and
    /// where TCP is what decides.
    #[inline]
    fn current_events(&mut self, process: &Process) -> u32 {
        if !self.is_watched() {
            return 0;
        }
        let connection = &self.connection;
        let mut arrived = connection.pipes.has_unread();
        let mut ready = 0;
        if arrived && self.for_call(process).is_readable() {
            ready |= IN | RDNORM;
            // Another process of this end may have read what is there, and this the end.
            arrived = connection.pipes.has_unread();
        }
        let has_unread = ready != 0 && arrived;
        if has_unread {
            ready |= self.sticky & self.ends_with_bytes();
        } else if !connection.is_quiet() {
            ready |= self.look_at_tcp(process);
        } else if !arrived {
            ready |= self.sticky;
        }
        if self.events & (IN | RDNORM) == 0 {
            // Who does not ask for bytes hears of the end at once, also while some are left.
            ready |= self.sticky;
        }
        if self.urgent && self.events & PRI != 0 {
            self.urgent = process.kernel().poll(self.connection.descriptors.fd(), POLLPRI) & POLLPRI != 0;
            ready |= if self.urgent { PRI } else { 0 };
        }
        if self.writes() {
            let room = self.connection.is_writable();
            if room.unwrap_or_else(|| process.kernel().poll(self.connection.descriptors.fd(), POLLOUT) & POLLOUT != 0) {
                ready |= OUT | WRNORM;
            }
        }
        ready & (self.events | ALWAYS)
    }

    fn look_at_tcp(&mut self, process: &Process) -> u32 {
        // Quiet before the look: an edge that comes during it undoes it.
        self.connection.wiring.set_quiet(true);
        if !self.for_call(process).is_readable() {
            return self.sticky;
        }
        self.connection.wiring.set_quiet(false);
        if !self.connection.pipes.has_unread() {
            // An error is gone once the program has asked for it.
            let said = process.kernel().poll(self.connection.descriptors.fd(), POLLRDHUP) as u16;
            self.sticky = u32::from(said) & (RDHUP | ALWAYS);
        }
        IN | RDNORM | self.sticky
    }
}
