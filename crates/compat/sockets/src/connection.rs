// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One end of a TCP connection, from the moment the program has it.
//!
//! It begins as a *candidate*: the program's calls go to the kernel as ever, and this end counts what they move. When
//! both ends have found each other it gets its pipes, and from then on the calls come here. Or it is *plain* for good,
//! for a [`Reason`].

mod calls;
mod descriptors;
mod ending;
mod identity;
mod membership;
mod options;
mod plain;
mod search;
mod told;
mod trial;
mod wiring;

use std::{
    os::fd::RawFd,
    sync::{Arc, Mutex, OnceLock, Weak, atomic::AtomicU64},
};

use rustix::io::Errno;
use tombolo_domain::SingleDoorbell;
use tombolo_os::lock::lock;

use crate::{
    Reason, family::ForkGroup, kernel::Kernel, pipes::Pipes, proof::ENOUGH, roster::ConnectionRow, spare::Spare,
    stage::StageWord, switch::Transport, tuple::Tuple, waiting::Instance,
};

pub use crate::{
    direction::Direction,
    stage::{ReturnStage, Stage},
};
pub use descriptors::Descriptors;
pub use ending::Ending;
pub use identity::Identity;
pub use membership::Membership;
pub use options::{Options, Set, set_anew};
pub use plain::Plain;
pub use wiring::Wiring;

use search::Search;
use trial::Trial;

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
    pub(crate) trial: Trial,
    /// How it comes to its end.
    pub ending: Ending,
    stage: StageWord,
    /// Bytes that went through the pipes.
    piped: [AtomicU64; 2],
    pub(crate) row: ConnectionRow,
    pub(crate) pipes: OnceLock<Pipes>,
    /// Itself, once it has pipes.
    pub(crate) own: OnceLock<Weak<Connection>>,
    /// Where threads wait for it, while none does.
    pub(crate) seats: Mutex<Vec<Instance>>,
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
            trial: Trial::new(),
            ending: Ending::default(),
            stage: StageWord::default(),
            piped: [const { AtomicU64::new(0) }; 2],
            row: ConnectionRow::default(),
            pipes: OnceLock::new(),
            own: OnceLock::new(),
            seats: Mutex::default(),
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
        if self.pipes.set(pipes).is_ok() {
            self.stage.join();
            self.trial.forget_history();
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
            self.members.group().inspect(|group| group.crowd());
            self.trial.forget_history();
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
            || self.is_cut_off()
            || self.is_to_leave()
    }

    /// The way to the peer's process is gone, perhaps with it: there will be no more rings, and no end is told but by TCP.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.pipes.get().is_some_and(|pipes| pipes.line.is_gone())
    }

    /// V-9. Whether the memory that carries it may be taken away.
    #[inline]
    #[must_use]
    pub fn is_revocable(&self) -> bool {
        self.pipes.get().is_some_and(|pipes| pipes.line.is_revocable())
    }

    /// V-9. Its memory will be taken away.
    fn is_to_leave(&self) -> bool {
        self.pipes.get().is_some_and(|pipes| pipes.line.is_leaving())
    }

    /// Why it is on TCP, if it was said to stay there.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self.stage() {
            Stage::Joined if self.is_cut_off() && !self.stage.is_leaving() => Some(Reason::PeerGone),
            Stage::Joined if self.leaves() => Some(self.stage.reason()),
            Stage::Plain => Some(self.stage.reason()),
            Stage::Candidate | Stage::Joined => None,
        }
    }

    /// This process gives the socket up. Says whether there is no other of this end.
    pub fn depart(&self) -> bool {
        // Without a group there is nobody who could use the pipes by turns.
        let _still = self.members.group().and_then(|_| self.pipes.get()).map(Pipes::still);
        self.members.depart()
    }

    // ---- counting

    /// A call that moves bytes by the kernel begins, if this end has no pipes.
    #[must_use]
    pub fn plain(&self, direction: Direction) -> Option<Plain<'_>> {
        match self.stage() {
            Stage::Candidate => {}
            // Both for good: nobody joins it any more, who would have to know of the call.
            Stage::Plain => return Some(Plain::new(self, direction, false)),
            Stage::Joined => return None,
        }
        self.trial.enter_call(direction);
        let plain = Plain::new(self, direction, true);
        (self.stage() != Stage::Joined).then_some(plain)
    }

    /// So many bytes went over TCP. Says how many there were before.
    pub(crate) fn count(&self, direction: Direction, bytes: usize) -> u64 {
        let before = self.members.count(direction, bytes);
        self.row.count(direction, Transport::Tcp, before + bytes as u64);
        before
    }

    /// Whether enough has passed to be worth the trouble: so many bytes, or two turns with as much as a proof needs.
    pub(crate) fn is_due(&self, after: u64) -> bool {
        let [sent, received] = Direction::BOTH.map(|direction| self.members.counted(direction));
        let turned = self.trial.turns() >= 4 && sent.max(received) >= ENOUGH.into();
        (sent + received >= after || turned) && sent + received >= ENOUGH.into()
    }

    // ---- with pipes

    /// Whether the kernel has nothing new to say of it. Where several processes are at it, another may have seen the edge.
    #[inline]
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.wiring.is_quiet() && self.members.is_alone()
    }

    /// A call that has given bytes met this error: the next one gives it, as in the kernel.
    pub fn store_error(&self, error: Errno) {
        if let Some(pipes) = self.pipes.get() {
            pipes.store_error(error);
        }
    }

    /// Whether something happened in shared memory that makes a read worth a try: a hint, without a call.
    #[inline]
    #[must_use]
    pub fn stirs(&self) -> bool {
        self.pipes.get().is_some_and(Pipes::stirs)
    }

    /// Whether all that comes is expected in the pipe, and nothing has: a read would find nothing there, and what TCP has to say
    /// whoever waits hears from the kernel.
    #[inline]
    #[must_use]
    pub fn rests(&self) -> bool {
        self.members.is_alone() && !self.leaves() && self.pipes.get().is_some_and(Pipes::rests)
    }

    /// S-15. Whether the last read ended where the sender has left a carrier: there may be more on the other one.
    #[inline]
    #[must_use]
    pub fn is_crossing(&self) -> bool {
        self.pipes.get().is_some_and(Pipes::is_crossing)
    }

    /// Whether the peer asks for TCP, and waits for this end to look.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.pipes.get().is_some_and(Pipes::is_asked)
    }

    /// A position that grows with every byte that arrives in the pipe.
    #[inline]
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.pipes.get().map_or(0, Pipes::arrived)
    }

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

    /// S-13. Where who waits for this connection is woken, once it has pipes.
    #[must_use]
    pub fn bell(&self) -> Option<&Arc<SingleDoorbell>> {
        self.pipes.get().map(|pipes| &pipes.bell)
    }
}
