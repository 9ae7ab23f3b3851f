// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One end of a TCP connection, from the moment the program has it.
//!
//! It begins as a *candidate*: the program's calls go to the kernel as ever, and this end counts what they move. When
//! both ends have found each other it gets its pipes, and from then on the calls come here. Or it is *plain* for good,
//! for a [`Reason`].

mod calls;
mod options;
mod over;
mod plain;
mod told;

use std::{
    io,
    os::fd::RawFd,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering},
    },
};

use rustix::io::Errno;
use tombolo_domain::SingleDoorbell;
use tombolo_os::lock::lock;

use crate::{
    Reason,
    family::ForkGroup,
    kernel::Kernel,
    negotiation::NegotiationStage,
    pipes::Pipes,
    proof::{ENOUGH, History},
    random::random_id,
    roster::Row,
    spare::Spare,
    switch::Transport,
    tuple::Tuple,
    waiting::Instance,
};

pub use crate::{
    direction::Direction,
    stage::{ReturnStage, Stage},
};
pub use options::{Set, set_anew};
pub use plain::Plain;

/// One end of a connection. All descriptors of it in this process share this.
#[derive(Debug)]
pub struct Connection {
    /// This end connected, the other accepted.
    pub dialled: bool,
    /// Its addresses, and what names this end (M-3): found out when it is due.
    pub(crate) identity: Mutex<Option<(Tuple, u64)>>,
    /// S-7. The addresses under which both ends know it.
    pub(crate) meeting: OnceLock<Tuple>,
    stage: AtomicU8,
    reason: AtomicU16,
    /// Bytes that went over TCP through this library.
    counted: [AtomicU64; 2],
    /// Bytes that went through the pipes.
    piped: [AtomicU64; 2],
    /// What is shown of it from outside, once it was due.
    row: OnceLock<Option<Row>>,
    /// Threads inside a kernel call that moves bytes.
    inside: [AtomicU32; 2],
    pub(crate) history: Mutex<Option<Box<History>>>,
    /// Which directions the history still wants.
    remembers: [AtomicBool; 2],
    /// Calls so far, and turns: a read after a write.
    calls: AtomicU64,
    /// The call that gets on with finding the other end.
    next_try: AtomicU64,
    turns: AtomicU64,
    last: AtomicU8,
    /// A descriptor of it that is open now.
    fd: AtomicI32,
    /// How many descriptors there are.
    descriptors: AtomicU32,
    pub(crate) pipes: OnceLock<Pipes>,
    /// Itself, once it has pipes.
    pub(crate) own: OnceLock<Weak<Connection>>,
    pub(crate) talk: Mutex<NegotiationStage>,
    /// What it brings to its peer, where that is made ahead.
    pub(crate) spare: Mutex<Spare>,
    /// The front has made its preparations for readiness that the kernel does not know of.
    wired: AtomicBool,
    leaves: AtomicBool,
    /// The front watches the kernel's edges of this socket, and there was none since the last look.
    quiet: AtomicBool,
    /// Sends that found no room.
    stalls: AtomicU64,
    options: options::Options,
    /// Where threads wait for it, while none does.
    pub(crate) seats: Mutex<Vec<Instance>>,
    /// The processes that this end is, once there was more than one.
    family: OnceLock<ForkGroup>,
    /// This process is none of them any more.
    departed: AtomicBool,
    /// It was ended, because it had to be on TCP and could not.
    given_up: AtomicBool,
    /// The peer broke the specification.
    broken: AtomicBool,
    /// The program has ended its sending; and its receiving.
    shut: AtomicBool,
    deaf: AtomicBool,
    /// S-12. The kernel has ended it both ways; and when who only sends last asked for that.
    over: AtomicBool,
    asked: AtomicI64,
    /// The kernel has said that the peer sends no more, or is gone.
    end_heard: AtomicBool,
}

impl Connection {
    pub(crate) fn new(dialled: bool, fd: RawFd) -> Self {
        Self {
            dialled,
            identity: Mutex::default(),
            meeting: OnceLock::new(),
            stage: AtomicU8::new(0),
            reason: AtomicU16::new(0),
            counted: [const { AtomicU64::new(0) }; 2],
            piped: [const { AtomicU64::new(0) }; 2],
            row: OnceLock::new(),
            inside: [const { AtomicU32::new(0) }; 2],
            history: Mutex::new(Some(Box::default())),
            remembers: [const { AtomicBool::new(true) }; 2],
            calls: AtomicU64::new(0),
            next_try: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            last: AtomicU8::new(2),
            fd: AtomicI32::new(fd),
            descriptors: AtomicU32::new(1),
            pipes: OnceLock::new(),
            own: OnceLock::new(),
            talk: Mutex::new(NegotiationStage::default()),
            spare: Mutex::default(),
            wired: AtomicBool::new(false),
            leaves: AtomicBool::new(false),
            quiet: AtomicBool::new(false),
            stalls: AtomicU64::new(0),
            options: options::Options::default(),
            seats: Mutex::default(),
            family: OnceLock::new(),
            departed: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            shut: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            over: AtomicBool::new(false),
            end_heard: AtomicBool::new(false),
            asked: AtomicI64::new(0),
        }
    }

    /// Its addresses, once they were asked for.
    #[must_use]
    pub fn tuple(&self) -> Option<Tuple> {
        lock(&self.identity).map(|(tuple, _)| tuple)
    }

    pub(crate) fn meeting(&self) -> Option<Tuple> {
        self.meeting.get().copied()
    }

    /// Its addresses and its number; none where it is no TCP connection.
    pub(crate) fn identity(&self, kernel: &dyn Kernel) -> Option<(Tuple, u64)> {
        let mut known = lock(&self.identity);
        if known.is_none() {
            *known = kernel.tuple(self.fd()).map(|tuple| (tuple, random_id()));
        }
        *known
    }

    /// How far it is.
    #[inline]
    #[must_use]
    pub fn stage(&self) -> Stage {
        // ORDER SeqCst: with `inside`; see `Plain::begin`.
        match self.stage.load(Ordering::SeqCst) {
            0 => Stage::Candidate,
            1 => Stage::Joined,
            _ => Stage::Plain,
        }
    }

    pub(crate) fn join(&self, pipes: Pipes) {
        if self.pipes.set(pipes).is_ok() {
            let _ = self.stage.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst);
            *lock(&self.history) = None;
            self.remembers.iter().for_each(|wanted| wanted.store(false, Ordering::Relaxed));
            if self.shut.load(Ordering::SeqCst) {
                self.end_sending();
            }
            self.publish_stage();
        }
    }

    /// Leaves the connection on TCP for good; says whether this is news. One that has pipes retreats from them instead.
    pub fn stay_plain(&self, reason: Reason) -> bool {
        let news = self.stage.compare_exchange(0, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if news {
            // What happens to it here is not seen by others who have it.
            self.family().inspect(|family| family.crowd());
            self.reason.store(reason as u16, Ordering::Relaxed);
            *lock(&self.history) = None;
            *lock(&self.spare) = Spare::None;
            self.remembers.iter().for_each(|wanted| wanted.store(false, Ordering::Relaxed));
            self.publish_stage();
        }
        news
    }

    /// Both directions go back to TCP as soon as the other end lets them, and stay there.
    pub fn leave(&self, reason: Reason) {
        if !self.leaves.swap(true, Ordering::SeqCst) {
            self.reason.store(reason as u16, Ordering::Relaxed);
            self.publish_stage();
        }
        if let Some(family) = self.family() {
            family.leave();
        }
    }

    // ---- what is shown

    #[inline]
    fn row(&self) -> Option<&Row> {
        self.row.get()?.as_ref()
    }

    fn publish_stage(&self) {
        if let Some(row) = self.row() {
            row.publish_stage(self.stage(), self.reason());
        }
    }

    /// In a child made by fork: what is shown of it is its parent's, and so are the calls that others were in.
    pub(crate) fn disown(&self) {
        self.inside.iter().for_each(|inside| inside.store(0, Ordering::SeqCst));
        if let Some(row) = self.row() {
            row.disown();
        }
    }

    pub(crate) fn leaves(&self) -> bool {
        self.leaves.load(Ordering::Relaxed)
            || self.family().is_some_and(ForkGroup::leaves)
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
            Stage::Joined if self.is_cut_off() && !self.leaves.load(Ordering::Relaxed) => Some(Reason::PeerGone),
            Stage::Joined if self.leaves() => Some(self.said()),
            Stage::Plain => Some(self.said()),
            Stage::Candidate | Stage::Joined => None,
        }
    }

    fn said(&self) -> Reason {
        Reason::from_number(self.reason.load(Ordering::Relaxed))
    }

    pub(crate) fn bypassed(&self) {
        self.leave(Reason::Bypassed);
    }

    // ---- the processes of this end

    pub(crate) fn family(&self) -> Option<&ForkGroup> {
        self.family.get()
    }

    /// Whether no other process has this socket, as far as is known.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.family().is_none_or(ForkGroup::is_alone)
    }

    /// The family of this end, which begins with this process.
    pub(crate) fn found_family(&self) -> io::Result<&ForkGroup> {
        if let Some(family) = self.family.get() {
            return Ok(family);
        }
        let family = ForkGroup::new(Direction::BOTH.map(|direction| self.counted(direction)))?;
        if self.leaves() {
            family.leave();
        }
        Ok(self.family.get_or_init(|| family))
    }

    /// This process gives the socket up. Says whether there is no other of this end.
    pub fn depart(&self) -> bool {
        let Some(family) = self.family() else { return true };
        let _still = self.pipes.get().map(Pipes::still);
        let last = family.depart();
        self.departed.store(!last, Ordering::SeqCst);
        last
    }

    /// It did not give it up after all.
    pub fn come_back(&self) {
        if let Some(family) = self.family().filter(|_| self.departed.swap(false, Ordering::SeqCst)) {
            family.stay();
        }
    }

    pub(crate) fn has_departed(&self) -> bool {
        self.departed.load(Ordering::Relaxed)
    }

    pub(crate) fn set_recalled(&self, base: u64) {
        if let Some(family) = self.family() {
            family.set_recalled(base);
        }
    }

    pub(crate) fn has_ended_sending(&self) -> bool {
        self.family().is_some_and(ForkGroup::has_ended_sending)
    }

    /// A process died while it counted: from now on the count is the kernel's. Within a turn.
    pub(crate) fn recount(&self, kernel: &dyn Kernel, fd: RawFd, direction: Direction) {
        let Some(family) = self.family().filter(|family| family.is_unsure(direction)) else { return };
        if let Some(sample) = kernel.counts(fd, self.dialled) {
            let counted = if direction == Direction::Out { sample.counts.written } else { sample.read() };
            family.counted(direction).store(counted, Ordering::SeqCst);
        }
    }

    // ---- descriptors

    /// A descriptor of it.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.fd.load(Ordering::Relaxed)
    }

    /// Another descriptor of it was made.
    pub fn opened(&self, fd: RawFd) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        self.fd.store(fd, Ordering::Relaxed);
    }

    /// Whether there is no other descriptor of it in this process.
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.descriptors.load(Ordering::Relaxed) == 1
    }

    /// Whether the last descriptor of it in this process was closed: the number may be another file's by now.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.descriptors.load(Ordering::SeqCst) == 0
    }

    /// A descriptor of it is about to be closed; `other` is one that stays, if there is one. Says whether this is the
    /// last.
    pub fn closing(&self, other: Option<RawFd>) -> bool {
        if let Some(fd) = other {
            self.fd.store(fd, Ordering::Relaxed);
        }
        // ORDER SeqCst: who closes it says so and then wakes; who was woken looks at this.
        self.descriptors.fetch_sub(1, Ordering::SeqCst) == 1
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
        // ORDER SeqCst: whoever joins stores the stage and then looks at `inside`; one of the two sees the other.
        self.inside[direction as usize].fetch_add(1, Ordering::SeqCst);
        let plain = Plain::new(self, direction, true);
        (self.stage() != Stage::Joined).then_some(plain)
    }

    pub(crate) fn is_inside(&self, direction: Direction) -> bool {
        self.inside[direction as usize].load(Ordering::SeqCst) != 0
    }

    fn counter(&self, direction: Direction) -> &AtomicU64 {
        self.family().map_or(&self.counted[direction as usize], |family| family.counted(direction))
    }

    /// Says how many there were before.
    pub(crate) fn count(&self, direction: Direction, bytes: usize) -> u64 {
        let before = self.counter(direction).fetch_add(bytes as u64, Ordering::Relaxed);
        if let Some(row) = self.row() {
            row.count(direction, Transport::Tcp, before + bytes as u64);
        }
        before
    }

    pub(crate) fn counted(&self, direction: Direction) -> u64 {
        self.counter(direction).load(Ordering::SeqCst)
    }

    /// Whether enough has passed to be worth the trouble: so many bytes, or two turns with as much as a proof needs.
    pub(crate) fn is_due(&self, after: u64) -> bool {
        let [sent, received] = [self.counted(Direction::Out), self.counted(Direction::In)];
        let turned = self.turns.load(Ordering::Relaxed) >= 4 && sent.max(received) >= ENOUGH.into();
        (sent + received >= after || turned) && sent + received >= ENOUGH.into()
    }

    /// Calls so far, this one included.
    pub(crate) fn call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn is_before_next_try(&self, call: u64) -> bool {
        call < self.next_try.load(Ordering::Relaxed)
    }

    pub(crate) fn try_next_at(&self, call: u64) {
        self.next_try.store(call, Ordering::Relaxed);
    }

    pub(crate) fn with_history<T>(&self, f: impl FnOnce(&History) -> T) -> T {
        let history = lock(&self.history);
        match history.as_deref() {
            Some(history) => f(history),
            None => f(&History::default()),
        }
    }

    // ---- with pipes

    /// The front is ready for bytes that the kernel does not know of.
    pub fn set_wired(&self) {
        self.wired.store(true, Ordering::SeqCst);
    }

    /// Whether it is.
    #[inline]
    #[must_use]
    pub fn is_wired(&self) -> bool {
        self.wired.load(Ordering::SeqCst)
    }

    /// `false`: the front saw an edge of the socket. `true`: it watches for edges, and is about to look.
    #[inline]
    pub fn set_quiet(&self, quiet: bool) {
        self.quiet.store(quiet, Ordering::SeqCst);
    }

    /// Whether the kernel has nothing new to say of it. Where several processes are at it, another may have seen the edge.
    #[inline]
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::SeqCst) && self.is_alone()
    }

    /// Sends that found too little room so far: an edge of writability is due after each.
    #[inline]
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
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
        self.is_alone() && !self.leaves() && self.pipes.get().is_some_and(Pipes::rests)
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
        // ORDER SeqCst: whoever joins sets the pipes and then looks at this; one of the two sees the other.
        self.shut.store(true, Ordering::SeqCst);
        if let Some(family) = self.family() {
            family.end_sending();
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
