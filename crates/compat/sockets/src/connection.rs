// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One endpoint of a TCP connection, from the moment the program has it.
//!
//! It begins as a *candidate*: the program's calls go to the kernel unchanged, and this endpoint counts the bytes that
//! they move. When both endpoints have found each other it gets its pipes, and from then on the calls come here.
//! Otherwise it stays *plain* permanently, for a [`Reason`].
//!
//! A [`Connection`] coordinates its parts. Each part holds one kind of state, which no other part changes:
//!
//! | part | holds |
//! |---|---|
//! | [`Identity`] | its addresses and its number |
//! | [`Descriptors`] | the descriptors by which this process has it |
//! | [`Membership`] | the processes that have it, and what they count together |
//! | `StageWord` | its stage, and why it is on TCP |
//! | `PlainCalls` | the calls that the kernel carries out, and the bytes of them that a proof may need |
//! | `Worth` | whether it has moved enough bytes to be joined |
//! | `Search` | how far the search for its peer is |
//! | [`JoinedPipes`] | its pipes, and what they show |
//! | [`Options`] | the options that its program has set |
//! | [`Wiring`] | what the front has prepared, and how the program waits |
//! | [`Ending`] | how it ends |
//! | `Returns` | how often it was joined before, and when it may be joined again |
//!
//! What a call of the program does with the pipes is in [`ProgramCall`](crate::ProgramCall).

mod descriptors;
mod ending;
mod identity;
mod joined_pipes;
mod membership;
mod options;
mod piped_bytes;
mod plain;
mod plain_calls;
mod returns;
mod search;
mod wiring;
mod worth;

use std::{
    os::fd::RawFd,
    sync::{OnceLock, Weak},
};

use tombolo_os::{clock::coarse_time, lock::lock};

use crate::{
    Reason, connection_table::ConnectionRow, fork_group::ForkGroup, kernel::Kernel, pipes::Pipes, spare::Spare,
    stage::StageWord, switch::Transport, tuple::Tuple, waiting::Seats,
};

pub use crate::{
    direction::Direction,
    stage::{ReturnStage, Stage},
};
pub use descriptors::Descriptors;
pub use ending::Ending;
pub use identity::Identity;
pub use joined_pipes::JoinedPipes;
pub use membership::Membership;
pub use options::{Options, Set, set_anew};
pub use plain::Plain;
pub use wiring::{SeenWaits, Wiring};

use piped_bytes::PipedBytes;
use plain_calls::PlainCalls;
use returns::Returns;
use search::Search;
use worth::Worth;

/// One endpoint of a connection. All descriptors of it in this process share this.
#[derive(Debug)]
pub struct Connection {
    /// Whether this endpoint connected and its peer accepted.
    pub dialled: bool,
    /// Its addresses and its number.
    pub identity: Identity,
    /// The descriptors by which this process has it.
    pub descriptors: Descriptors,
    /// The processes that share this endpoint.
    pub members: Membership,
    /// What the front has prepared for the connection's readiness, and has seen of it.
    pub wiring: Wiring,
    /// Options that the program has set on it.
    pub options: Options,
    pub(crate) search: Search,
    pub(crate) plain_calls: PlainCalls,
    pub(crate) worth: Worth,
    /// How it ends.
    pub ending: Ending,
    stage: StageWord,
    /// Counts of the bytes that went through the pipes.
    pub(crate) piped: PipedBytes,
    pub(crate) row: ConnectionRow,
    /// Pipes that carry it beside TCP, once it is joined.
    pub pipes: JoinedPipes,
    /// Reference to itself, once it has pipes.
    pub(crate) own: OnceLock<Weak<Connection>>,
    pub(crate) seats: Seats,
    pub(crate) returns: Returns,
}

impl Connection {
    pub(crate) fn new(dialled: bool, fd: RawFd) -> Self {
        Self {
            dialled,
            identity: Identity::default(),
            descriptors: Descriptors::new(fd),
            members: Membership::default(),
            wiring: Wiring::default(),
            options: Options::default(),
            search: Search::default(),
            plain_calls: PlainCalls::new(),
            worth: Worth::default(),
            ending: Ending::default(),
            stage: StageWord::default(),
            piped: PipedBytes::default(),
            row: ConnectionRow::default(),
            pipes: JoinedPipes::default(),
            own: OnceLock::new(),
            seats: Seats::default(),
            returns: Returns::default(),
        }
    }

    /// Returns a candidate that takes the place of this connection, which was joined and is back on TCP, at all of its
    /// descriptors (S-22). No thread may be in a call on this one any more, as the bytes that it counts from now on
    /// would be missing in the new one.
    #[must_use]
    pub fn begin_anew(&self) -> Self {
        Self {
            identity: self.identity.begin_anew(),
            descriptors: self.descriptors.begin_anew(),
            members: self.members.begin_anew(),
            plain_calls: self.plain_calls.begin_anew(),
            worth: self.worth.begin_anew(),
            piped: self.piped.begin_anew(),
            returns: self.returns.begin_anew(coarse_time()),
            wiring: self.wiring.begin_anew(),
            ..Self::new(self.dialled, self.descriptors.fd())
        }
    }

    /// Returns its addresses and its number; `None` where it is no TCP connection.
    pub(crate) fn find_identity(&self, kernel: &dyn Kernel) -> Option<(Tuple, u64)> {
        self.identity.find(kernel, self.descriptors.fd())
    }

    /// Returns its stage.
    #[inline]
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage.stage()
    }

    pub(crate) fn join(&self, pipes: Pipes) {
        if self.pipes.set(pipes) {
            self.stage.join();
            self.returns.note_join(coarse_time());
            if !self.pipes.are_revocable() {
                self.plain_calls.forget_history();
            }
            if self.ending.has_ended_sending() {
                self.end_sending();
            }
            self.publish_stage();
        }
    }

    /// Keeps the connection on TCP permanently; returns whether this is news. A connection that has pipes retreats from
    /// them instead.
    pub fn stay_plain(&self, reason: Reason) -> bool {
        let news = self.stage.stay_plain(reason);
        if news {
            // Other processes that have the socket do not see what this one does with it from now on.
            self.members.group().inspect(|group| group.set_crowded());
            self.plain_calls.forget_history();
            *lock(&self.search.spare) = Spare::None;
            self.publish_stage();
        }
        news
    }

    /// Moves both directions back to TCP as soon as the peer allows it, and keeps them there.
    pub fn leave(&self, reason: Reason) {
        if self.stage.begin_to_leave(reason) {
            self.publish_stage();
        }
        if let Some(group) = self.members.group() {
            group.leave();
        }
    }

    fn publish_stage(&self) {
        self.row.publish_stage(|| (self.stage(), self.reason()));
    }

    pub(crate) fn leaves(&self) -> bool {
        self.stage.is_leaving()
            || self.members.group().is_some_and(ForkGroup::leaves)
            || self.pipes.are_cut_off()
            || self.pipes.are_to_leave()
    }

    /// Returns why it is on TCP, or is to go there; `None` if neither was decided.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self.stage() {
            Stage::Joined if self.pipes.are_cut_off() && !self.stage.is_leaving() => Some(Reason::PeerGone),
            Stage::Joined if self.leaves() => Some(self.stage.reason()),
            Stage::Plain => Some(self.stage.reason()),
            Stage::Candidate | Stage::Joined => None,
        }
    }

    /// Returns why it is on TCP at this moment, also while its peer is still searched for; `None` where shared memory
    /// carries it.
    pub(crate) fn reason_so_far(&self) -> Option<Reason> {
        match self.stage() {
            Stage::Plain => Some(self.stage.reason()),
            Stage::Joined => self.stage.is_leaving().then(|| self.stage.reason()),
            Stage::Candidate if !self.worth.is_sought() => Some(Reason::Brief),
            Stage::Candidate if !self.members.is_alone() => Some(Reason::Shared),
            Stage::Candidate => Some(Reason::NoPeer),
        }
    }

    // ---- calls and bytes

    /// Begins a call that moves bytes by the kernel; returns `None` if this endpoint has pipes.
    #[must_use]
    pub fn plain(&self, direction: Direction) -> Option<Plain<'_>> {
        match self.stage() {
            Stage::Candidate => {}
            // Such a connection is never joined any more, so nobody needs to know of the call.
            Stage::Plain => return Some(Plain::new(self, direction, false)),
            Stage::Joined => return None,
        }
        self.plain_calls.enter_call(direction);
        let plain = Plain::new(self, direction, true);
        (self.stage() != Stage::Joined).then_some(plain)
    }

    /// Counts bytes of the program that went over TCP. Returns the number before these.
    pub fn count(&self, direction: Direction, bytes: usize) -> u64 {
        let before = self.members.count(direction, bytes);
        self.row.count(direction, Transport::Tcp, before + bytes as u64);
        before
    }

    /// Does the same for the first `n` bytes of the parts, and keeps these where a proof may need them (S-6).
    pub(crate) fn count_parts<'p>(&self, direction: Direction, n: usize, parts: impl Iterator<Item = &'p [u8]>) -> u64 {
        let before = self.count(direction, n);
        if self.plain_calls.wants(direction) {
            self.plain_calls.remember(direction, before, n, parts);
        }
        before
    }

    // ---- with pipes

    /// Returns whether the kernel has no news of it; `false` where several processes share it, as another may have seen
    /// the edge.
    #[inline]
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.wiring.is_quiet() && self.members.is_alone()
    }

    /// Returns whether a send would find room; `None` where the kernel must be asked.
    #[must_use]
    pub fn is_writable(&self) -> Option<bool> {
        self.pipes.get()?.has_room(self)
    }

    /// Returns the number of bytes in the pipe that were not read.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.pipes.get().map_or(0, |pipes| pipes.unread(self))
    }

    /// Returns the sizes in bytes of the rings for sending and for receiving, once it has any.
    #[must_use]
    pub fn ring_sizes(&self) -> Option<[u64; 2]> {
        self.pipes.get().map(|pipes| pipes.ring_sizes(self))
    }

    /// Returns the transports of the two directions: sending, receiving.
    #[must_use]
    pub fn transports(&self) -> [Transport; 2] {
        self.pipes.get().map_or([Transport::Tcp; 2], |pipes| pipes.transports(self))
    }

    /// Returns whether it was joined, is back on TCP permanently, and nobody looks at its memory any more. Then the
    /// program's calls can go to the kernel.
    #[must_use]
    pub fn is_back_on_tcp(&self) -> bool {
        if self.pipes.have_left_memory() {
            return self.pipes.get().is_some_and(|pipes| !pipes.hints().has_leftover());
        }
        self.leaves()
            && self.pipes.get().is_some_and(|pipes| !pipes.session.is_revocable())
            && self.transports() == [Transport::Tcp; 2]
    }

    // ---- closing

    /// Ends this endpoint's sending. What it tries to send afterwards, the kernel refuses.
    pub fn end_sending(&self) {
        self.ending.end_sending();
        if let Some(group) = self.members.group() {
            group.end_sending();
        }
        if let Some(pipes) = self.pipes.get() {
            pipes.end_sending();
        }
    }

    /// Notes that this process gives the socket up. Returns whether no other process of this endpoint has it.
    pub fn depart(&self) -> bool {
        // Without a group no other process could use the pipes by turns.
        let _still = self.members.group().and_then(|_| self.pipes.get()).map(|pipes| pipes.halves.freeze());
        self.members.depart()
    }

    /// Ends this process's part before its last descriptor is closed. Returns whether TCP would reset, because bytes
    /// were left unread.
    pub fn finish(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        self.depart() && self.pipes.get().is_some_and(|pipes| pipes.close(self, kernel, fd))
    }
}
