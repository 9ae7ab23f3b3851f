// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One end of a TCP connection, from the moment the program has it.
//!
//! It begins as a *candidate*: the program's calls go to the kernel as ever, and this end counts what they move. When
//! both ends have found each other it gets its pipes, and from then on the calls come here. Or it is *plain* for good,
//! for a [`Reason`].
//!
//! A [`Connection`] puts in order what its parts do. Each part knows one thing, and lets nobody else change it:
//!
//! | part | knows |
//! |---|---|
//! | [`Identity`] | what names it |
//! | [`Descriptors`] | by which descriptors this process has it |
//! | [`Membership`] | which processes have it, and what they count together |
//! | `StageWord` | how far it is, and why it is on TCP |
//! | `PlainCalls` | which calls the kernel carries out, and what of them a proof may need |
//! | `Worth` | whether it has moved enough to be joined |
//! | `Search` | how far the way to its peer is |
//! | [`JoinedPipes`] | its pipes, and what they show |
//! | [`Options`] | what its program has set |
//! | [`Wiring`] | what the front has prepared, and how the program waits |
//! | [`Ending`] | how it ends |
//! | `Returns` | how often it was joined before, and when it may be joined again |
//!
//! What a call of the program does with the pipes is [`ProgramCall`](crate::ProgramCall).

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

/// One end of a connection. All descriptors of it in this process share this.
#[derive(Debug)]
pub struct Connection {
    /// This end connected, the other accepted.
    pub dialled: bool,
    /// Its addresses and its number.
    pub identity: Identity,
    /// The descriptors by which this process has it.
    pub descriptors: Descriptors,
    /// The processes that this end is.
    pub members: Membership,
    /// What the front has prepared and seen of its readiness.
    pub wiring: Wiring,
    /// What the program has set on it.
    pub options: Options,
    pub(crate) search: Search,
    pub(crate) plain_calls: PlainCalls,
    pub(crate) worth: Worth,
    /// How it comes to its end.
    pub ending: Ending,
    stage: StageWord,
    /// Bytes that went through the pipes.
    pub(crate) piped: PipedBytes,
    pub(crate) row: ConnectionRow,
    /// What carries it beside TCP, once it is joined.
    pub pipes: JoinedPipes,
    /// Itself, once it has pipes.
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

    /// What takes the place of this one, which was joined and is back on TCP, at all of its descriptors: a candidate that was joined
    /// before (S-22). Nobody may be in a call on this one any more, as what it counts from now on would be missing there.
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

    /// Its addresses and its number; none where it is no TCP connection.
    pub(crate) fn find_identity(&self, kernel: &dyn Kernel) -> Option<(Tuple, u64)> {
        self.identity.find(kernel, self.descriptors.fd())
    }

    /// How far it is.
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

    /// Leaves the connection on TCP for good; says whether this is news. One that has pipes retreats from them instead.
    pub fn stay_plain(&self, reason: Reason) -> bool {
        let news = self.stage.stay_plain(reason);
        if news {
            // What happens to it here is not seen by others who have it.
            self.members.group().inspect(|group| group.set_crowded());
            self.plain_calls.forget_history();
            *lock(&self.search.spare) = Spare::None;
            self.publish_stage();
        }
        news
    }

    /// Both directions go back to TCP as soon as the other end lets them, and stay there.
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

    /// Why it is on TCP, if it was said to stay there.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self.stage() {
            Stage::Joined if self.pipes.are_cut_off() && !self.stage.is_leaving() => Some(Reason::PeerGone),
            Stage::Joined if self.leaves() => Some(self.stage.reason()),
            Stage::Plain => Some(self.stage.reason()),
            Stage::Candidate | Stage::Joined => None,
        }
    }

    /// Why it is on TCP at this moment: also one for which the other end is still looked for. None where it is carried by shared
    /// memory.
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

    /// A call that moves bytes by the kernel begins, if this end has no pipes.
    #[must_use]
    pub fn plain(&self, direction: Direction) -> Option<Plain<'_>> {
        match self.stage() {
            Stage::Candidate => {}
            // Both for good: nobody joins it any more, who would have to know of the call.
            Stage::Plain => return Some(Plain::new(self, direction, false)),
            Stage::Joined => return None,
        }
        self.plain_calls.enter_call(direction);
        let plain = Plain::new(self, direction, true);
        (self.stage() != Stage::Joined).then_some(plain)
    }

    /// So many bytes of the program went over TCP. Says how many there were before.
    pub fn count(&self, direction: Direction, bytes: usize) -> u64 {
        let before = self.members.count(direction, bytes);
        self.row.count(direction, Transport::Tcp, before + bytes as u64);
        before
    }

    /// The same, of which the first `n` bytes of the parts went, and are kept where a proof may need them (S-6).
    pub(crate) fn count_parts<'p>(&self, direction: Direction, n: usize, parts: impl Iterator<Item = &'p [u8]>) -> u64 {
        let before = self.count(direction, n);
        if self.plain_calls.wants(direction) {
            self.plain_calls.remember(direction, before, n, parts);
        }
        before
    }

    // ---- with pipes

    /// Whether the kernel has nothing new to say of it. Where several processes are at it, another may have seen the edge.
    #[inline]
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.wiring.is_quiet() && self.members.is_alone()
    }

    /// Whether a send would find room; none where the kernel is to be asked.
    #[must_use]
    pub fn is_writable(&self) -> Option<bool> {
        self.pipes.get()?.has_room(self)
    }

    /// Bytes in the pipe that were not read.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.pipes.get().map_or(0, |pipes| pipes.unread(self))
    }

    /// Bytes of the rings of the two directions, sending and receiving, once it has any.
    #[must_use]
    pub fn ring_sizes(&self) -> Option<[u64; 2]> {
        self.pipes.get().map(|pipes| pipes.ring_sizes(self))
    }

    /// What carries the two directions: sending, receiving.
    #[must_use]
    pub fn transports(&self) -> [Transport; 2] {
        self.pipes.get().map_or([Transport::Tcp; 2], |pipes| pipes.transports(self))
    }

    /// Whether it was joined, and is back on TCP for good, and nobody looks at its memory any more: then the program's calls may as
    /// well be the kernel's.
    #[must_use]
    pub fn is_back_on_tcp(&self) -> bool {
        if self.pipes.have_left_memory() {
            return self.pipes.get().is_some_and(|pipes| !pipes.hints().has_leftover());
        }
        self.leaves()
            && self.pipes.get().is_some_and(|pipes| !pipes.session.is_revocable())
            && self.transports() == [Transport::Tcp; 2]
    }

    // ---- its end

    /// This end sends no more: what it tries to send is for the kernel to refuse.
    pub fn end_sending(&self) {
        self.ending.end_sending();
        if let Some(group) = self.members.group() {
            group.end_sending();
        }
        if let Some(pipes) = self.pipes.get() {
            pipes.end_sending();
        }
    }

    /// This process gives the socket up. Says whether there is no other of this end.
    pub fn depart(&self) -> bool {
        // Without a group there is nobody who could use the pipes by turns.
        let _still = self.members.group().and_then(|_| self.pipes.get()).map(|pipes| pipes.halves.freeze());
        self.members.depart()
    }

    /// This process's last descriptor is about to be closed. Says whether TCP would reset, because bytes were left unread.
    pub fn finish(&self, kernel: &dyn Kernel, fd: RawFd) -> bool {
        self.depart() && self.pipes.get().is_some_and(|pipes| pipes.close(self, kernel, fd))
    }
}
