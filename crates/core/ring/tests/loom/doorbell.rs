// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell as weak as the specification allows: it is sticky, and orders nothing else. Proofs over it hold for an
//! eventfd, an event channel and an interrupt alike.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use loom::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, Thread},
};
use tombolo_ring::{Deadline, Error, WaitContext, Woken};

use crate::asymmetric::Barrier;

#[derive(Debug)]
struct Doorbell {
    notified: AtomicBool,
    /// Whether a notification has come since the last one that was reported to a waiter for edges.
    edge: AtomicBool,
    /// Whether there is a waiter for edges.
    has_edges: Cell<bool>,
    waiter: RefCell<Option<Thread>>,
}

/// The two doorbells as one endpoint sees them: its own to sleep on, the peer's to notify.
#[derive(Debug)]
pub struct Doorbells {
    own: Rc<Doorbell>,
    peer: Rc<Doorbell>,
    /// Whether notifications that came before the sleep are kept. A mutant forgets them.
    pub sticky: bool,
    /// Index of this endpoint, for its barrier, and the barrier's effect.
    end: usize,
    pub barrier: Barrier,
}

impl Doorbells {
    pub fn pair() -> (Self, Self) {
        let doorbell = || {
            Rc::new(Doorbell {
                notified: AtomicBool::new(false),
                edge: AtomicBool::new(false),
                has_edges: Cell::default(),
                waiter: RefCell::default(),
            })
        };
        let (a, b) = (doorbell(), doorbell());
        let doorbells = |end, own: &Rc<Doorbell>, peer: &Rc<Doorbell>| {
            let (own, peer) = (Rc::clone(own), Rc::clone(peer));
            Self { own, peer, sticky: true, end, barrier: Barrier::Sound }
        };
        (doorbells(0, &a, &b), doorbells(1, &b, &a))
    }

    /// From the first notification on, [`await_edge`](Self::await_edge) reports each.
    pub fn tell_edges(&mut self) {
        self.own.has_edges.set(true);
    }

    /// Drains the own doorbell. Returns whether it was notified.
    pub fn take_notification(&mut self) -> bool {
        self.own.notified.swap(false, Ordering::Relaxed)
    }

    /// Waits for a notification, and keeps it.
    pub fn await_notification(&mut self) {
        while !self.own.notified.fetch_or(false, Ordering::Relaxed) {
            self.park();
        }
    }

    /// Waits for a notification that was not reported before.
    pub fn await_edge(&mut self) {
        while !self.own.edge.swap(false, Ordering::Relaxed) {
            self.park();
        }
    }

    /// loom switches threads at atomics only: no notification comes between a look and the parking.
    fn park(&self) {
        *self.own.waiter.borrow_mut() = Some(thread::current());
        thread::park();
    }
}

impl WaitContext for Doorbells {
    type Error = Error;

    fn notify(&mut self) {
        // A swap, because in loom the waiter's earlier swap may overtake a plain store.
        self.peer.notified.swap(true, Ordering::Relaxed);
        if self.peer.has_edges.get() {
            self.peer.edge.swap(true, Ordering::Relaxed);
        }
        // In loom, waking a thread that is not asleep would order memory for it.
        let asleep = self.peer.waiter.borrow_mut().take();
        asleep.inspect(Thread::unpark);
    }

    fn drain(&mut self) {
        self.own.notified.swap(false, Ordering::Relaxed);
    }

    fn barrier(&mut self) {
        self.barrier.issue(self.end);
    }

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        if !self.sticky {
            self.drain();
        }
        if self.barrier == Barrier::LeavesOut {
            self.barrier = Barrier::Sound;
            return Ok(Woken::LookDue);
        }
        while !self.own.notified.swap(false, Ordering::Relaxed) {
            self.park();
        }
        Ok(Woken::Notified)
    }

    fn may_spin(&mut self) -> bool {
        false
    }
}
