// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A reader that polls instead of sleeping: the shipping `arm`, and the steps by which a channel serves a descriptor
//! (`Waiter::arm_for_poll` of `tombolo-channel`), repeated here because descriptors are the kernel's. The descriptor is
//! a flag of the poller's own beside the doorbell. Naps are left out: a clock ends them, and a clock's event cannot be
//! lost.

use loom::thread;
use tombolo_mem::Mem;
use tombolo_ring::{Deadline, Error, FenceMode, Reader, WaitContext, Woken, arm};

use crate::{
    asymmetric::Light,
    check,
    doorbell::Doorbells,
    memory::Sound,
    pipe::{Modelled, Pipe, messages, notify_if_owed, send},
};

/// When a poller is woken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trigger {
    /// As long as the doorbell holds a notification or the flag is up.
    Level,
    /// Once for each notification, and once when the flag goes up.
    Edge,
}

/// Fault of a poller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutant {
    None,
    /// Forgets notifications once it has armed.
    DrainsLate,
    /// Forgets a notification, and relies on having armed before.
    ForgetsANotification,
    /// Leaves bytes unread and raises no flag for them.
    RaisesNoFlag,
    /// Does not look again once it has armed.
    LooksNotAgain,
}

struct Poller {
    doorbells: Doorbells,
    trigger: Trigger,
    mutant: Mutant,
    /// The flag, and whether it went up since it was last reported.
    flag: (bool, bool),
    promised: bool,
    armed: Option<u64>,
}

/// [`arm`] drains nothing more: that was done before.
struct Drained<'a>(&'a mut Doorbells);

impl WaitContext for Drained<'_> {
    type Error = Error;

    fn notify(&mut self) {
        self.0.notify();
    }

    fn drain(&mut self) {}

    fn barrier(&mut self) {
        self.0.barrier();
    }

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        unreachable!("one who polls does not sleep in a call");
    }

    fn may_spin(&mut self) -> bool {
        false
    }
}

impl Poller {
    fn new(mut doorbells: Doorbells, trigger: Trigger, mutant: Mutant) -> Self {
        if trigger == Trigger::Edge {
            doorbells.tell_edges();
        }
        Self { doorbells, trigger, mutant, flag: (true, true), promised: false, armed: None }
    }

    /// Does what `epoll_wait` does.
    fn poll(&mut self) {
        match self.trigger {
            Trigger::Level if self.flag.0 => {}
            Trigger::Edge if std::mem::take(&mut self.flag.1) => {}
            Trigger::Level => self.doorbells.await_notification(),
            Trigger::Edge => self.doorbells.await_edge(),
        }
    }

    /// Runs at the end of each call.
    fn raise_flag(&mut self) {
        if !self.promised && self.mutant != Mutant::RaisesNoFlag {
            (self.flag, self.promised, self.armed) = ((true, true), true, None);
        }
    }

    /// Arms. Returns whether there is something after all.
    fn arm<M: Mem>(&mut self, reader: &mut Reader<M>) -> bool {
        let need = reader.need().unwrap();
        let wanted = reader.position().wrapping_add(need);
        let notified = self.doorbells.take_notification();
        let stays = self.armed == Some(wanted) && (!notified || self.mutant == Mutant::ForgetsANotification);
        if stays {
            return false;
        }
        (self.flag, self.promised, self.armed) = ((false, false), false, None);
        let mut ready = arm(reader, &mut Drained(&mut self.doorbells), need).unwrap();
        match self.mutant {
            Mutant::DrainsLate => drop(self.doorbells.take_notification()),
            Mutant::LooksNotAgain => ready = false,
            _ => {}
        }
        self.promised = !ready;
        self.armed = (!ready).then_some(wanted);
        ready
    }

    /// Makes a non-blocking receive.
    fn try_recv<M: Mem>(&mut self, reader: &mut Reader<M>) -> Option<Vec<u8>> {
        let (mut record, mut looked) = (vec![0; reader.message_max() as usize], false);
        loop {
            let received = reader.recv(&mut record).unwrap();
            notify_if_owed(reader, &mut self.doorbells);
            if let Some(len) = received {
                self.raise_flag();
                record.truncate(len);
                return Some(record);
            }
            if !looked && self.arm(reader) {
                looked = true;
                continue;
            }
            self.raise_flag();
            return None;
        }
    }

    fn recv<M: Mem>(&mut self, reader: &mut Reader<M>) -> Vec<u8> {
        loop {
            self.poll();
            if let Some(record) = self.try_recv(reader) {
                // A reader that is woken for edges alone reads until there is nothing, or comes again by itself.
                self.flag.1 |= self.trigger == Trigger::Edge;
                return record;
            }
        }
    }
}

/// Sends two records to a reader that polls.
fn polled<W: Modelled + 'static, R: Modelled + 'static>(ordering: FenceMode, trigger: Trigger, mutant: Mutant) {
    check(&format!("{trigger:?}, {ordering:?}, {mutant:?}"), 3, move || {
        let pipe = Pipe::new(messages(64));
        let (mut writers, readers) = Doorbells::pair();
        let (mut writer, mut reader) = (pipe.writer_of::<W>(ordering), pipe.reader_of::<R>(ordering));
        let mut poller = Poller::new(readers, trigger, mutant);
        let other = thread::spawn(move || {
            for i in 0..2 {
                send(&mut writer, &mut writers, &[i; 3]).unwrap();
            }
        });
        for i in 0..2 {
            assert_eq!(poller.recv(&mut reader), [i; 3]);
        }
        other.join().unwrap();
    });
}

#[test]
fn r12_poller_misses_nothing() {
    for trigger in [Trigger::Level, Trigger::Edge] {
        polled::<Sound, Sound>(FenceMode::Fences, trigger, Mutant::None);
    }
}

#[test]
fn r13_poller_with_a_barrier_misses_nothing() {
    for trigger in [Trigger::Level, Trigger::Edge] {
        polled::<Light<0>, Light<1>>(FenceMode::WaiterBarrier, trigger, Mutant::None);
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_poller_that_drains_once_it_has_armed_is_refuted() {
    polled::<Sound, Sound>(FenceMode::Fences, Trigger::Level, Mutant::DrainsLate);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_poller_that_does_not_look_after_arming_is_refuted() {
    polled::<Sound, Sound>(FenceMode::Fences, Trigger::Edge, Mutant::LooksNotAgain);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_poller_that_raises_no_flag_for_what_is_left_is_refuted() {
    polled::<Sound, Sound>(FenceMode::Fences, Trigger::Level, Mutant::RaisesNoFlag);
}

#[test]
#[should_panic(expected = "deadlock")]
fn canary_r12_poller_that_forgets_a_notification_it_was_armed_for_is_refuted() {
    polled::<Light<0>, Light<1>>(FenceMode::WaiterBarrier, Trigger::Level, Mutant::ForgetsANotification);
}
