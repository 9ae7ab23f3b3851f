// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the waiter's half of the wake protocol, with a spin before it and a sleep at its end.

use tombolo_mem::Mem;

use crate::{Counters, Deadline, Error, FenceMode, spin::Spin};

/// A half of a pipe that can wait: a reader for data, a writer for space.
pub trait Side {
    /// Kind of memory that the pipe uses.
    type Mem: Mem;

    /// Returns whether `need` bytes are there, or something else that the caller must handle (an end, a new ring).
    ///
    /// # Errors
    /// If the peer's words are impossible.
    fn ready(&mut self, need: u64) -> Result<bool, Error>;

    /// A1: publishes what the peer may be waiting for, then this side's wait word.
    fn arm(&mut self, need: u64);

    /// Publishes what the peer must see before this endpoint spins.
    fn before_spin(&mut self) {}

    /// After the fence: checks whether the peer sleeps and waits for what was published before.
    fn before_sleep(&mut self);

    /// Returns whether the peer must be notified now, and clears that request.
    fn take_notification(&mut self) -> bool;

    /// Returns which side pays for the fence.
    fn ordering(&self) -> FenceMode;

    /// Returns the counters that waiting changes.
    fn waits(&mut self) -> &mut Waits;

    /// Returns all counters of this half.
    fn counted(&self) -> Counters;
}

/// Operations outside the ring that a sleep needs: a doorbell, a barrier, a CPU number.
pub trait WaitContext {
    /// Error of a sleep that failed.
    type Error: From<Error>;

    /// Wakes the peer.
    fn notify(&mut self);

    /// Forgets notifications that came before now.
    fn drain(&mut self);

    /// Makes every CPU that runs the peer pass a full fence.
    fn barrier(&mut self);

    /// Publishes this half's counters before it sleeps (C-12).
    fn publish_counters(&mut self, _counters: &Counters) {}

    /// A4: sleeps until notified, until the peer is gone, or until `deadline`.
    ///
    /// # Errors
    /// If sleeping is impossible.
    fn sleep(&mut self, deadline: Deadline) -> Result<Woken, Self::Error>;

    /// Returns whether it can pay to let other threads have this CPU once.
    fn may_offer(&mut self) -> bool {
        false
    }

    /// Returns whether spinning can pay: it cannot where both endpoints share a CPU.
    fn may_spin(&mut self) -> bool;
}

/// Reason why a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// The peer notified this waiter, perhaps for nothing.
    Notified,
    /// Nobody notified, but a check is due all the same: the barrier may have missed the peer.
    LookDue,
    /// The deadline passed.
    TimedOut,
    /// The peer is gone, so nobody is left to notify.
    PeerGone,
}

/// Result of a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waited {
    /// There is something to do.
    Ready,
    /// The deadline passed and there is nothing to do.
    TimedOut,
    /// The peer is gone and there is nothing to do: nothing more will come.
    PeerGone,
}

/// Counters of waiting.
#[derive(Clone, Copy, Default, Debug)]
pub struct Waits {
    pub(crate) received: u64,
    pub(crate) spurious: u64,
    pub(crate) spins_paid: u64,
    pub(crate) spins_wasted: u64,
    pub(crate) sleeps: u64,
    pub(crate) stalls: u64,
}

impl Waits {
    pub(crate) fn counters(&self) -> Counters {
        Counters {
            notifications_received: self.received,
            wakeups_spurious: self.spurious,
            spins_paid: self.spins_paid,
            spins_wasted: self.spins_wasted,
            sleeps: self.sleeps,
            stalls: self.stalls,
            ..Counters::default()
        }
    }
}

/// Waits until `side` has `need` bytes or something else to handle: spins while that is likely to pay, then arms the
/// wait word, fences, checks again and sleeps.
///
/// # Errors
/// If the peer's words are impossible, or sleeping is.
pub fn wait<S: Side, Z: WaitContext>(
    side: &mut S,
    context: &mut Z,
    spin: &mut Spin,
    need: u64,
    deadline: Deadline,
) -> Result<Waited, Z::Error> {
    side.before_spin();
    notify_if_owed(side, context);
    if side.ready(need)? {
        return Ok(Waited::Ready);
    }
    if spin.always() {
        return spin_for_ever(side, context, spin, need, deadline);
    }
    if spin.worthwhile() && context.may_spin() {
        if spin.run::<S::Mem, _, _>(deadline, || side.ready(need))? {
            side.waits().spins_paid += 1;
            return Ok(Waited::Ready);
        }
        side.waits().spins_wasted += 1;
    }
    // Where there are more threads than CPUs, the peer may be one of the threads that wait for this CPU. Offering it to
    // them costs next to nothing if the peer is not among them, and less than a sleep and a wake-up if it is.
    if context.may_offer() && spin.offer() && side.ready(need)? {
        return Ok(Waited::Ready);
    }
    let asleep_since = spin.now();
    loop {
        if arm(side, context, need)? {
            return Ok(Waited::Ready);
        }
        if deadline.expired() {
            return Ok(Waited::TimedOut);
        }
        side.waits().sleeps += 1;
        context.publish_counters(&side.counted());
        let woken = context.sleep(deadline)?;
        spin.learn(asleep_since);
        side.waits().received += u64::from(woken == Woken::Notified);
        if side.ready(need)? {
            return Ok(Waited::Ready);
        }
        match woken {
            Woken::Notified => side.waits().spurious += 1,
            Woken::LookDue => {}
            Woken::TimedOut => return Ok(Waited::TimedOut),
            Woken::PeerGone => return Ok(Waited::PeerGone),
        }
    }
}

/// Spins in slices, and checks between two slices whether the peer is still there.
fn spin_for_ever<S: Side, Z: WaitContext>(
    side: &mut S,
    context: &mut Z,
    spin: &mut Spin,
    need: u64,
    deadline: Deadline,
) -> Result<Waited, Z::Error> {
    loop {
        if spin.run::<S::Mem, _, _>(deadline, || side.ready(need))? {
            side.waits().spins_paid += 1;
            return Ok(Waited::Ready);
        }
        context.publish_counters(&side.counted());
        let woken = context.sleep(Deadline::NOW)?;
        if side.ready(need)? {
            return Ok(Waited::Ready);
        }
        if woken == Woken::PeerGone {
            return Ok(Waited::PeerGone);
        }
        if deadline.expired() {
            return Ok(Waited::TimedOut);
        }
    }
}

/// Does A1 to A3, and returns whether there is something to do after all. If not, the peer will notify once there is.
///
/// # Errors
/// If the peer's words are impossible.
pub fn arm<S: Side, Z: WaitContext>(side: &mut S, context: &mut Z, need: u64) -> Result<bool, Z::Error> {
    // Earlier notifications are about changes that were seen already.
    context.drain();
    side.arm(need);
    match side.ordering() {
        FenceMode::Fences => S::Mem::fence(),
        FenceMode::WaiterBarrier => context.barrier(),
    }
    side.before_sleep();
    notify_if_owed(side, context);
    Ok(side.ready(need)?)
}

fn notify_if_owed<S: Side, Z: WaitContext>(side: &mut S, context: &mut Z) {
    if side.take_notification() {
        context.notify();
    }
}
