// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory as the model checker sees it: each word is an atomic with a history, and each byte of data is watched for
//! races.
//!
//! loom runs all threads of a model on one thread of the system, so `Rc` and `Cell` share and keep what is no part of
//! the model. A byte's value is in such a `Cell`. Beside it is an `UnsafeCell<()>` of loom's, whose accesses are
//! checked for an order between them. It is empty, so that an access takes no `unsafe`.

use std::{cell::Cell, fmt, rc::Rc};

use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU64, Ordering, fence},
};
use tombolo_layout::state::{Phase, State};
use tombolo_mem::{Mem, OwnData, OwnWord, PeerData, PeerWord, Untrusted};

/// The memory model of C11 as loom implements it; a mutant omits the fences.
#[derive(Debug)]
pub enum LoomMem<const FENCED: bool> {}

/// The memory that ships.
pub type Sound = LoomMem<true>;

impl<const FENCED: bool> Mem for LoomMem<FENCED> {
    type OwnWord = Word;
    type PeerWord = Word;
    type OwnData = Bytes;
    type PeerData = Bytes;

    fn fence() {
        if FENCED {
            // loom does not switch threads at a fence, but at an access that all fences share.
            FENCES.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }

    fn light_fence() {
        unreachable!("`asymmetric` models that order");
    }

    fn pause() {
        loom::thread::yield_now();
    }
}

loom::lazy_static! {
    static ref FENCES: AtomicU64 = AtomicU64::new(0);
}

/// One endpoint's view of a word.
#[derive(Clone, Debug)]
pub struct Word {
    at: Rc<AtomicU64>,
    pub publish: Ordering,
    pub acquire: Ordering,
    pub fault: Fault,
    /// Number of stores, through any view.
    stores: Rc<Cell<u64>>,
}

/// Fault of a mutant's view of a word.
#[derive(Clone, Debug, Default)]
pub enum Fault {
    #[default]
    None,
    /// What is published through this view becomes visible only after ...
    Held(Rc<Cell<Option<u64>>>),
    /// ... the next access to this view.
    Frees(Rc<Cell<Option<u64>>>, Rc<AtomicU64>),
    /// Once `told` is set, returns its last answer instead of loading.
    Blind { told: Rc<Cell<bool>>, last: Rc<Cell<u64>> },
    /// Sets the flag when it sees that the peer is no longer open.
    Blinds(Rc<Cell<bool>>),
    /// Returns the first armed wait word, once there was one: later ones are taken for notified.
    Sticks(Rc<Cell<u64>>),
    /// Returns no armed wait word twice: one that was seen is taken for notified.
    Once(Rc<Cell<u64>>),
}

impl Word {
    pub fn new(value: u64) -> Self {
        let at = Rc::new(AtomicU64::new(value));
        Self { at, publish: Ordering::Release, acquire: Ordering::Acquire, fault: Fault::None, stores: Rc::default() }
    }

    /// Returns the number of stores.
    pub fn stores(&self) -> u64 {
        self.stores.get()
    }

    /// Makes what is published through `self` visible only after an access through `other`.
    pub fn hold_until_access_to(&mut self, other: &mut Self) {
        let held = Rc::default();
        self.fault = Fault::Held(Rc::clone(&held));
        other.fault = Fault::Frees(held, Rc::clone(&self.at));
    }

    /// Makes `self` load no more once a look at `state` has shown that its owner is done.
    pub fn do_not_load_after_end_in(&mut self, state: &mut Self) {
        let told = Rc::new(Cell::new(false));
        self.fault = Fault::Blind { told: Rc::clone(&told), last: Rc::default() };
        state.fault = Fault::Blinds(told);
    }

    fn store(&self, value: u64, ordering: Ordering) {
        self.stores.set(self.stores.get() + 1);
        if let Fault::Held(held) = &self.fault {
            held.set(Some(value));
            return;
        }
        self.at.store(value, ordering);
        self.free_held();
    }

    fn load_peer(&self, ordering: Ordering) -> Untrusted<u64> {
        if let Fault::Blind { told, last } = &self.fault {
            if !told.get() {
                last.set(self.at.load(ordering));
            }
            return Untrusted::new(last.get());
        }
        let value = self.at.load(ordering);
        if let Fault::Sticks(first) = &self.fault {
            if first.get() & 1 == 0 {
                first.set(value);
            }
            return Untrusted::new(first.get());
        }
        if let Fault::Once(last) = &self.fault {
            return Untrusted::new(if last.replace(value) == value { 0 } else { value });
        }
        self.free_held();
        if let Fault::Blinds(told) = &self.fault {
            let phase = State::decode(value).map(|state| state.phase);
            told.set(told.get() || matches!(phase, Some(Phase::Closed | Phase::Aborted)));
        }
        Untrusted::new(value)
    }

    fn free_held(&self) {
        if let Fault::Frees(held, at) = &self.fault
            && let Some(value) = held.take()
        {
            at.store(value, Ordering::Release);
        }
    }
}

impl OwnWord for Word {
    fn store_release(&self, value: u64) {
        self.store(value, self.publish);
    }

    fn store_relaxed(&self, value: u64) {
        self.store(value, Ordering::Relaxed);
    }

    fn load(&self) -> u64 {
        self.at.load(Ordering::Relaxed)
    }
}

impl PeerWord for Word {
    fn load_acquire(&self) -> Untrusted<u64> {
        self.load_peer(self.acquire)
    }

    fn load_relaxed(&self) -> Untrusted<u64> {
        self.load_peer(Ordering::Relaxed)
    }
}

/// The data of a ring, with the same view for both endpoints.
#[derive(Clone)]
pub struct Bytes(Rc<[Byte]>);

#[derive(Default)]
struct Byte {
    watch: UnsafeCell<()>,
    value: Cell<u8>,
}

impl Bytes {
    pub fn new(len: usize) -> Self {
        Self((0..len).map(|_| Byte::default()).collect())
    }

    fn read(&self, offset: usize, to: &mut [u8]) {
        for (byte, to) in self.0[offset..].iter().zip(to) {
            byte.watch.with(|_| *to = byte.value.get());
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} watched bytes", self.0.len())
    }
}

impl OwnData for Bytes {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn copy_in(&mut self, offset: usize, from: &[u8]) {
        assert!(from.len() <= self.0.len() - offset);
        for (byte, from) in self.0[offset..].iter().zip(from) {
            byte.watch.with_mut(|_| byte.value.set(*from));
        }
    }

    fn copy_back(&self, offset: usize, to: &mut [u8]) {
        assert!(to.len() <= self.0.len() - offset);
        self.read(offset, to);
    }
}

impl PeerData for Bytes {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn copy_out(&self, offset: usize, to: &mut [u8]) {
        assert!(to.len() <= self.0.len() - offset);
        self.read(offset, to);
    }

    fn prefetch(&self, _: usize, _: usize) {}
}
