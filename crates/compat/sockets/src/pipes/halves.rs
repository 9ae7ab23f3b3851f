// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps each of the two directions under its lock; the processes of an endpoint use them in turns.

use std::{
    io,
    sync::{Mutex, MutexGuard, RwLockWriteGuard},
};

use rustix::io::Errno;
use tombolo_domain::SingleNotifier;
use tombolo_layout::sockets::Followed;
use tombolo_mem::OwnWord;
use tombolo_os::lock::lock;
use tombolo_ring::{Error, Record};

use super::{
    Failed, Rx, Tx,
    hints::{Hints, LaterTails},
};
use crate::{
    connection::Membership,
    direction::Direction,
    fork_group::ForkGroup,
    switch::{Receiver, Sender},
};

/// Both directions, the hints that a turn leaves to those who take none, and the notifier that wakes the peer
/// afterwards.
#[derive(Debug)]
pub(crate) struct Halves {
    // If a thread panics while it holds either lock, the words that it leaves are checked again.
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    pub hints: Hints,
    notifier: SingleNotifier,
}

/// Both directions, locked so that no other thread uses them.
pub(crate) struct FrozenPipes<'a> {
    tx: MutexGuard<'a, Tx>,
    rx: MutexGuard<'a, Rx>,
    /// Held so that in a child's copy no thread is at the later tails. A forking thread that was interrupted there
    /// holds them itself.
    _tails: Option<RwLockWriteGuard<'a, LaterTails>>,
}

impl Halves {
    pub(super) fn new(tx: Tx, rx: Rx, hints: Hints, notifier: SingleNotifier) -> Self {
        Self { tx: Mutex::new(tx), rx: Mutex::new(rx), hints, notifier }
    }

    /// Takes one turn at the direction that this endpoint sends.
    #[inline]
    pub fn with_tx<T>(&self, members: &Membership, f: impl FnOnce(&mut Tx) -> T) -> Result<T, Failed> {
        self.take_turn(members, &self.tx, f)
    }

    /// Takes one turn at the direction that it receives.
    #[inline]
    pub fn with_rx<T>(&self, members: &Membership, f: impl FnOnce(&mut Rx) -> T) -> Result<T, Failed> {
        self.take_turn(members, &self.rx, f)
    }

    /// Returns the direction that this endpoint sends, as this process knows it, without a turn.
    pub(super) fn lock_tx(&self) -> MutexGuard<'_, Tx> {
        lock(&self.tx)
    }

    /// Does the same for the direction that it receives.
    pub(super) fn lock_rx(&self) -> MutexGuard<'_, Rx> {
        lock(&self.rx)
    }

    /// Takes one turn at a direction. While this process is the only one of its endpoint, it takes no more than the
    /// process's own lock.
    #[inline]
    fn take_turn<H: Half, T>(
        &self,
        members: &Membership,
        half: &Mutex<H>,
        f: impl FnOnce(&mut H) -> T,
    ) -> Result<T, Failed> {
        let mut half = lock(half);
        match members.group() {
            Some(group) if !group.is_alone() || *half.behind() => self.share_turn(members, group, &mut *half, f),
            _ => {
                let result = f(&mut half);
                half.publish_hints(&self.hints);
                self.notify_if(half.take_notification());
                Ok(result)
            }
        }
    }

    #[cold]
    fn share_turn<H: Half, T>(
        &self,
        members: &Membership,
        group: &ForkGroup,
        half: &mut H,
        f: impl FnOnce(&mut H) -> T,
    ) -> Result<T, Failed> {
        if members.has_departed() {
            return Err(Failed::Os(Errno::BADF));
        }
        // A process that is alone stays alone: only it could make another one, and for that it takes the lock.
        let alone = group.is_alone();
        let turn = group.turn(H::DIRECTION).map_err(|_| Failed::Os(Errno::CONNRESET))?;
        let resumed = half.resume(group, turn.record().as_ref());
        if group.is_detached() {
            // Another process has found that the memory is needed no more. Nothing there is to be believed.
            self.hints.detach();
        } else {
            resumed?;
        }
        let result = f(half);
        half.publish_hints(&self.hints);
        let record = half.save();
        self.notify_if(half.take_notification());
        turn.leave(&record);
        *half.behind() = !alone;
        Ok(result)
    }

    /// Locks both directions: no other thread of this process uses either while the result is held.
    pub fn freeze(&self) -> FrozenPipes<'_> {
        let (tx, rx) = (lock(&self.tx), lock(&self.rx));
        FrozenPipes { tx, rx, _tails: self.hints.hold_tails() }
    }

    /// Leaves the state of both directions, which are frozen, to a child before a fork. The child finds them as they
    /// are now.
    pub fn hand_on(&self, still: &mut FrozenPipes<'_>, group: &ForkGroup) -> io::Result<()> {
        if let Some(base) = still.tx.recalled {
            group.set_recalled(base);
        }
        self.leave_record(group, &mut *still.tx)?;
        self.leave_record(group, &mut *still.rx)
    }

    fn leave_record<H: Half>(&self, group: &ForkGroup, half: &mut H) -> io::Result<()> {
        if !*half.behind() {
            let turn = group.turn(H::DIRECTION)?;
            let record = half.save();
            self.notify_if(half.take_notification());
            turn.leave(&record);
            *half.behind() = true;
        }
        Ok(())
    }

    /// Notifies the peer if a notification is owed.
    #[inline]
    pub(super) fn notify_if(&self, owed: bool) {
        if owed {
            // One doorbell serves both waiters of the peer, which look at both directions anyway.
            self.notifier.notify();
        }
    }
}

/// One direction, as the processes of this endpoint use it in turns.
trait Half {
    const DIRECTION: Direction;
    fn behind(&mut self) -> &mut bool;
    /// Goes on from the record of the previous process, or from what that process left in the segment when it died.
    fn resume(&mut self, group: &ForkGroup, record: Option<&Record>) -> Result<(), Error>;
    fn save(&mut self) -> Record;
    fn take_notification(&mut self) -> bool;
    /// Shows after a turn what has changed, to those who look without one.
    fn publish_hints(&mut self, _: &Hints) {}
}

impl Half for Tx {
    const DIRECTION: Direction = Direction::Out;

    fn behind(&mut self) -> &mut bool {
        &mut self.behind
    }

    fn resume(&mut self, group: &ForkGroup, record: Option<&Record>) -> Result<(), Error> {
        self.sender = Sender::at(self.moves.load());
        self.recalled = group.recalled();
        match record {
            Some(record) => self.writer.load(record),
            None => caught(self.writer.rebuild()),
        }
    }

    fn save(&mut self) -> Record {
        self.writer.save()
    }

    fn take_notification(&mut self) -> bool {
        self.writer.take_notification()
    }
}

impl Half for Rx {
    const DIRECTION: Direction = Direction::In;

    fn behind(&mut self) -> &mut bool {
        &mut self.behind
    }

    fn resume(&mut self, _: &ForkGroup, record: Option<&Record>) -> Result<(), Error> {
        self.receiver = Receiver::at(Followed::decode(self.followed.load()));
        match record {
            Some(record) => self.reader.load(record),
            None => caught(self.reader.rebuild()),
        }
    }

    fn save(&mut self) -> Record {
        self.reader.save()
    }

    fn take_notification(&mut self) -> bool {
        self.reader.take_notification()
    }

    #[inline]
    fn publish_hints(&mut self, hints: &Hints) {
        hints.turn_to_ring(self.reader.handover().ring_written(), &mut self.ring);
    }
}

/// Drops a protocol violation that was found while rebuilding: it is remembered, and the next call finds it again.
fn caught(rebuilt: Result<(), Error>) -> Result<(), Error> {
    match rebuilt {
        Err(Error::Corrupt(_)) => Ok(()),
        other => other,
    }
}
