// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The waiter's half of the wake protocol, around it the spin, below it the sleep.

use tombolo_mem::Mem;

use crate::{Counters, Deadline, Error, FenceMode, spin::Spin};

/// A half of a pipe that can wait: a reader for data, a writer for space.
pub trait Side {
    /// The memory it runs over.
    type Mem: Mem;

    /// Whether `need` bytes are there, or something else that the caller must look at (an end, a new ring).
    ///
    /// # Errors
    /// Where the peer's words are impossible.
    fn ready(&mut self, need: u64) -> Result<bool, Error>;

    /// A1: publishes what the peer may wait for, then the own wait word.
    fn arm(&mut self, need: u64);

    /// What the peer must see before this endpoint spins.
    fn before_spin(&mut self) {}

    /// After the fence: looks whether the peer sleeps and waits for what was published before.
    fn before_sleep(&mut self);

    /// Whether the peer must be rung now; asking answers it.
    fn take_ring(&mut self) -> bool;

    /// Who fences.
    fn ordering(&self) -> FenceMode;

    /// What is counted.
    fn waits(&mut self) -> &mut Waits;

    /// What was counted.
    fn counted(&self) -> Counters;
}

/// What a sleep needs of the world outside the ring: a doorbell, a barrier, a CPU number.
pub trait WaitContext {
    /// Why sleeping failed.
    type Error: From<Error>;

    /// Wakes the peer.
    fn notify(&mut self);

    /// Forgets notifications that came before now.
    fn drain(&mut self);

    /// Makes every CPU that runs the peer pass a full fence.
    fn barrier(&mut self);

    /// Says what this half has counted by the time it sleeps (C-12).
    fn publish_counters(&mut self, _counters: &Counters) {}

    /// A4: sleeps until rung, until the peer is gone, or until `deadline`.
    ///
    /// # Errors
    /// Where sleeping is impossible.
    fn sleep(&mut self, deadline: Deadline) -> Result<Woken, Self::Error>;

    /// Whether letting other threads have this CPU once can pay.
    fn may_offer(&mut self) -> bool {
        false
    }

    /// Whether spinning can pay: not where both endpoints share a CPU.
    fn may_spin(&mut self) -> bool;
}

/// Why a sleep ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// Rung, perhaps for nothing.
    Rung,
    /// Nobody rang, and it is time to look all the same: the barrier may have missed the peer.
    LookDue,
    /// The deadline passed.
    TimedOut,
    /// Nobody is left to ring.
    PeerGone,
}

/// How a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waited {
    /// There is something to do.
    Ready,
    /// The deadline passed and there is nothing to do.
    TimedOut,
    /// The peer is gone and there is nothing to do: nothing more will come.
    PeerGone,
}

/// What waiting counts.
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

/// Waits until `side` has `need` bytes or something else to look at: spins while that is likely to pay, then arms,
/// fences, looks again and sleeps.
///
/// # Errors
/// Where the peer's words are impossible or sleeping is.
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
    // Where there are more threads than CPUs the peer may be one of those that wait for this CPU. Letting them have it
    // costs next to nothing if there is none, and a sleep and a wake-up less if there is.
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
        side.waits().received += u64::from(woken == Woken::Rung);
        if side.ready(need)? {
            return Ok(Waited::Ready);
        }
        match woken {
            Woken::Rung => side.waits().spurious += 1,
            Woken::LookDue => {}
            Woken::TimedOut => return Ok(Waited::TimedOut),
            Woken::PeerGone => return Ok(Waited::PeerGone),
        }
    }
}

/// Spins in slices; between two of them looks whether anybody is left to spin for.
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

/// A1 to A3: says whether there is something to do after all. If not, the peer will ring once there is.
///
/// # Errors
/// Where the peer's words are impossible.
pub fn arm<S: Side, Z: WaitContext>(side: &mut S, context: &mut Z, need: u64) -> Result<bool, Z::Error> {
    // Rings from before are about what was looked at already.
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
    if side.take_ring() {
        context.notify();
    }
}
