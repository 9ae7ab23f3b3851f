// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One registration of a connection in a set, and the events to report for it.

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
/// Bit that marks the token of a doorbell.
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
    /// Events that the program asked for; below, the data that it gave.
    pub events: u32,
    pub data: u64,
    /// Whether the program took the registration out of the set. It stays in the kernel, where it does no harm because
    /// its events are filtered.
    pub absent: bool,
    /// Whether the number by which the connection came into the set is closed. That number may be another file's.
    pub orphan: bool,
    /// Whether the registration is in the kernel under the token.
    pub wired: bool,
    pub token: u64,
    /// Whether the registration was reported once (`EPOLLONESHOT`), and is not reported again before the program asks
    /// for that.
    pub spent: bool,
    /// Events that the kernel reported and does not take back: errors and hang-ups.
    sticky: u32,
    /// The sticky events that were reported to the program, after all bytes.
    told_sticky: u32,
    /// Whether there were urgent bytes when the kernel was last asked.
    urgent: bool,
    /// Position up to which bytes had arrived when `rests` was last called.
    rested: Option<u64>,
    /// For `EPOLLET`: whether there is something new since the last report.
    edge: bool,
    arrived: u64,
    stalls: u64,
    /// Whether there was no room at the last report. That there is room is news then, whether or not a send found none.
    without_room: bool,
    /// Number of the look in which the registration was last reported, and the events of that report.
    told: (u64, u32),
    /// Whether a notification of the doorbell, or an edge of the socket, was taken and the peer was not asked for
    /// another since.
    pub notified: bool,
    /// Number of times that the registration was not wired because a thread was waiting.
    postponed: u8,
}

/// Reasons to look again for which nobody may notify while a thread sleeps.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Unheard {
    /// Whether something is owed to a peer.
    pub owes: bool,
    /// Whether a pipe is full (S-16).
    pub full: bool,
}

/// Number of calls that may leave the wiring of a registration for later.
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

    /// Records that the program asks for `event`. What is true now is news.
    pub fn ask(&mut self, event: epoll_event) {
        (self.events, self.data) = (event.events, event.u64);
        (self.absent, self.spent, self.edge) = (false, false, true);
    }

    /// Returns what the program asks for, if it has the registration in the set.
    pub fn asked(&self) -> Option<epoll_event> {
        let events = if self.spent { ONESHOT } else { self.events };
        (!self.absent).then_some(epoll_event { events, u64: self.data })
    }

    /// Records that the kernel has the registration under its token, so that everything is looked at once. `spent`
    /// tells whether a report that is to come once may have come already.
    pub fn wire(&mut self, spent: bool) {
        (self.wired, self.edge, self.spent) = (true, true, spent);
    }

    /// Leaves the wiring for later. Returns whether it may be left again.
    pub fn postpone(&mut self) -> bool {
        self.postponed = self.postponed.saturating_add(1);
        self.postponed < POSTPONED
    }

    /// Returns whether the registration is to be reported once, and is not wired yet.
    pub fn is_once(&self) -> bool {
        !self.wired && self.events & ONESHOT != 0
    }

    pub fn is_exclusive(&self) -> bool {
        self.events & EXCLUSIVE != 0
    }

    /// Returns the connection as a call of the program acts on it, by one of its descriptors that is open.
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

    /// Records that the kernel has something new to report of the socket, in the look with number `round`. Returns the
    /// event that was already reported in this look and its extended event mask, if the report is to be extended. That
    /// the peer sends no more is reported with what it sent before, because programs read on to the end then.
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
        // What was reported in this look is no news for the next one. Neither is anything that came before an end of
        // the peer that was reported.
        let told = if self.told.0 == round { self.told.1 } else { 0 };
        let ends = self.told_sticky & if self.connection.ending.has_ended_receiving() { HUP } else { RDHUP | HUP };
        let told = if ends == 0 { told } else { told | IN | RDNORM | RDHUP | ends };
        self.edge |= events & (self.events | ALWAYS) & !told != 0;
        // Like a notification, this has woken one thread. If the program asks for levels, others are to be told of it
        // too.
        self.notified = true;
        amended
    }

    /// Returns those ends the program asks for that are reported with bytes that are left to read: that the peer sends
    /// no more, and that both send no more. Errors come after what is in the pipe, because programs close when they see
    /// one.
    fn ends_with_bytes(&self) -> u32 {
        self.events & RDHUP | if self.sticky & ERR == 0 { HUP } else { 0 }
    }

    /// Asks the kernel for an end behind bytes that were reported in this look, if it may not have been reported.
    /// Returns as [`note_kernel_events`](Self::note_kernel_events).
    pub fn ask_for_end(&mut self, process: &Process, round: u64) -> Option<(epoll_event, u32)> {
        let wanted = self.events & RDHUP | if self.connection.ending.has_ended_sending() { HUP } else { 0 };
        let is_open = self.told.0 == round && self.told.1 & IN != 0 && wanted & !self.told.1 != 0;
        let said = is_open.then(|| process.kernel().poll(self.connection.descriptors.fd(), POLLRDHUP) as u16);
        let end = u32::from(said?) & wanted;
        if end != 0 { self.note_kernel_events(end, round) } else { None }
    }

    /// Returns whether nothing has come since the last call, nothing is to be reported, and a doorbell will notify when
    /// that changes.
    pub fn rests(&mut self, process: &Process) -> bool {
        let (arrived, stalls) = (self.connection.pipes.arrived(), self.connection.wiring.stalls());
        if self.rested.replace(arrived) != Some(arrived) || !self.wired || self.connection.stage() != Stage::Joined {
            return false;
        }
        if self.is_watched() {
            // A program that asks for levels is told of room again and again. For an edge there must be room before the
            // look: room that comes after it is news.
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
        // The checks below see whatever came before the peer could see the request.
        !self.connection.pipes.has_unread()
            && !self.may_be_notified()
            && !self.is_stalled()
            && !self.send_recalled(process)
    }

    /// Returns, for a resting registration, whether its peer may have notified: something came, whoever read it;
    /// something is asked for; or the peer is gone.
    pub fn may_be_notified(&self) -> bool {
        let connection = &self.connection;
        self.rested != Some(connection.pipes.arrived()) || connection.pipes.is_asked() || connection.pipes.are_cut_off()
    }

    /// Returns whether the program wants to be told of room and has reason to. It found no room since it was last told
    /// that there is some, or was told of something else when there was none.
    pub fn is_stalled(&self) -> bool {
        self.writes() && (self.without_room || self.connection.wiring.stalls() != self.stalls)
    }

    /// Asks the peer, before a sleep, to notify for what is waited for.
    pub fn arm(&mut self, process: &Process) -> Unheard {
        self.notified = false;
        // If there is room already, a program that waits for an edge has had it.
        let full = self.is_full();
        if self.is_watched() {
            self.for_call(process).arm(self.reads(), full);
        }
        Unheard { owes: self.send_recalled(process), full }
    }

    /// Sends over TCP what the peer wants from there (S-2). Returns whether something is left of it.
    pub fn send_recalled(&self, process: &Process) -> bool {
        self.wired && self.for_call(process).send_recalled()
    }

    /// Returns whether the program waits for room, and there is none in the pipe.
    pub fn is_full(&self) -> bool {
        self.is_watched() && self.writes() && self.connection.is_writable() == Some(false)
    }

    /// Returns whether a notification was taken and the peer was not asked for another. A program that asks again for a
    /// spent registration wakes all sleeping threads.
    pub fn is_unarmed(&self) -> bool {
        self.notified && self.is_watched()
    }

    /// Returns the event to report now, and records it as reported: once in a `round`.
    #[inline]
    pub fn take_event(&mut self, process: &Process, round: u64) -> Option<epoll_event> {
        if self.told.0 == round {
            return None;
        }
        // Loaded before the look, so that whatever comes after it is news for the next one.
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

    /// Returns, for `EPOLLET`, whether `ready` is more than what was last reported.
    fn is_news(&self, ready: u32, arrived: u64, stalls: u64) -> bool {
        self.events & EDGE == 0
            || self.edge
            || ready & self.sticky & !self.told_sticky != 0
            || ready & IN != 0 && arrived != self.arrived
            || ready & OUT != 0 && (self.without_room || stalls != self.stalls)
    }

    /// Returns which of the requested events are true now. The kernel is asked only where it reported something new,
    /// and where TCP decides.
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
            // Another process of this endpoint may have read what was there, and this one the end.
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
            // A program that does not ask for bytes is told of the end at once, even while some are left.
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
        // Set before the look, so that an edge that comes during the look clears it.
        self.connection.wiring.set_quiet(true);
        if !self.for_call(process).is_readable() {
            return self.sticky;
        }
        self.connection.wiring.set_quiet(false);
        if !self.connection.pipes.has_unread() {
            // The kernel drops an error once the program has asked for it.
            let said = process.kernel().poll(self.connection.descriptors.fd(), POLLRDHUP) as u16;
            self.sticky = u32::from(said) & (RDHUP | ALWAYS);
        }
        IN | RDNORM | self.sticky
    }
}
