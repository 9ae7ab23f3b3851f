// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell as weak as one may be: sticky, and apart from that it orders nothing. What is proved over it holds over
//! an eventfd, an event channel and an interrupt alike.

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
    rung: AtomicBool,
    /// There was a ring since the last was told of, for one who is told of edges.
    edge: AtomicBool,
    /// There is such a one.
    has_edges: Cell<bool>,
    waiter: RefCell<Option<Thread>>,
}

/// The two doorbells as one end sees them: its own to sleep by, the peer's to ring.
#[derive(Debug)]
pub struct Doorbells {
    own: Rc<Doorbell>,
    peer: Rc<Doorbell>,
    /// A mutant forgets rings that came before the sleep.
    pub sticky: bool,
    /// Which of the two this is, for its barrier, and what that does.
    end: usize,
    pub barrier: Barrier,
}

impl Doorbells {
    pub fn pair() -> (Self, Self) {
        let doorbell = || {
            Rc::new(Doorbell {
                rung: AtomicBool::new(false),
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

    /// From the first ring on, [`await_edge`](Self::await_edge) is told of it.
    pub fn tell_edges(&mut self) {
        self.own.has_edges.set(true);
    }

    /// Empties the own doorbell; says whether it was rung.
    pub fn take_ring(&mut self) -> bool {
        self.own.rung.swap(false, Ordering::Relaxed)
    }

    /// Waits for a ring, which stays.
    pub fn await_ring(&mut self) {
        while !self.own.rung.fetch_or(false, Ordering::Relaxed) {
            self.park();
        }
    }

    /// Waits for a ring that it was not told of before.
    pub fn await_edge(&mut self) {
        while !self.own.edge.swap(false, Ordering::Relaxed) {
            self.park();
        }
    }

    /// loom switches threads at atomics only: nobody rings between a look and the parking.
    fn park(&self) {
        *self.own.waiter.borrow_mut() = Some(thread::current());
        thread::park();
    }
}

impl WaitContext for Doorbells {
    type Error = Error;

    fn notify(&mut self) {
        // A swap, since loom lets a plain store be overtaken by the waiter's earlier swap.
        self.peer.rung.swap(true, Ordering::Relaxed);
        if self.peer.has_edges.get() {
            self.peer.edge.swap(true, Ordering::Relaxed);
        }
        // Waking a thread that is not asleep would order memory for it, in loom.
        let asleep = self.peer.waiter.borrow_mut().take();
        asleep.inspect(Thread::unpark);
    }

    fn drain(&mut self) {
        self.own.rung.swap(false, Ordering::Relaxed);
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
        while !self.own.rung.swap(false, Ordering::Relaxed) {
            self.park();
        }
        Ok(Woken::Notified)
    }

    fn may_spin(&mut self) -> bool {
        false
    }
}
