// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A doorbell as weak as one may be: sticky, and apart from that it orders nothing. What is proved over it holds over
//! an eventfd, an event channel and an interrupt alike.

use std::{cell::RefCell, rc::Rc};

use loom::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, Thread},
};
use tombolo_ring::{Deadline, Error, Sleeper, Woken};

#[derive(Debug)]
struct Bell {
    rung: AtomicBool,
    sleeper: RefCell<Option<Thread>>,
}

/// The two bells as one end sees them: its own to sleep by, the peer's to ring.
#[derive(Debug)]
pub struct Bells {
    own: Rc<Bell>,
    peer: Rc<Bell>,
    /// A mutant forgets rings that came before the sleep.
    pub sticky: bool,
}

impl Bells {
    pub fn pair() -> (Self, Self) {
        let bell = || Rc::new(Bell { rung: AtomicBool::new(false), sleeper: RefCell::default() });
        let (a, b) = (bell(), bell());
        let end = |own: &Rc<Bell>, peer: &Rc<Bell>| Self { own: Rc::clone(own), peer: Rc::clone(peer), sticky: true };
        (end(&a, &b), end(&b, &a))
    }
}

impl Sleeper for Bells {
    type Error = Error;

    fn ring(&mut self) {
        // A swap, since loom lets a plain store be overtaken by the sleeper's earlier swap.
        self.peer.rung.swap(true, Ordering::Relaxed);
        // Waking a thread that is not asleep would order memory for it, in loom.
        let asleep = self.peer.sleeper.borrow_mut().take();
        asleep.inspect(Thread::unpark);
    }

    fn drain(&mut self) {
        self.own.rung.swap(false, Ordering::Relaxed);
    }

    fn barrier(&mut self) {
        unreachable!("only Ordering::Fences is modelled");
    }

    fn sleep(&mut self, _: Deadline) -> Result<Woken, Error> {
        if !self.sticky {
            self.drain();
        }
        while !self.own.rung.swap(false, Ordering::Relaxed) {
            // loom switches threads at atomics only: nobody rings between the swap and the parking.
            *self.own.sleeper.borrow_mut() = Some(thread::current());
            thread::park();
        }
        Ok(Woken::Rung)
    }

    fn may_spin(&mut self) -> bool {
        false
    }
}
