// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A mutex that needs no locked instruction in the one thread that always takes it.
//!
//! A small message takes some twelve nanoseconds without a lock, and the two locked instructions of a mutex take as
//! long again. Nearly always one thread reads and one thread writes. So a thread that takes the mutex often enough
//! becomes the *favourite*. The favourite sets `inside` with a plain store, and then checks that it still is the
//! favourite. Any other thread first takes that status away, has the kernel execute a fence on all CPUs that run this
//! process (`membarrier`), and then checks `inside`. At least one of both threads sees the other. Where the kernel has
//! no such fence, there is no favourite, and this is an ordinary mutex.
//!
//! Only one thread is ever the favourite of a mutex, from its first time on. A former favourite may be delayed for any
//! time before it sets `inside` and sees that it is the favourite no more. It would then overwrite what the next
//! favourite stored.
#![allow(unsafe_code)]

use std::{
    cell::UnsafeCell,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    sync::{
        Condvar, LazyLock, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence},
    },
};

use rustix::thread::{MembarrierCommand, membarrier};
use tombolo_os::lock::lock;

/// Number of times in a row that one thread must take the mutex to become the favourite.
const OFTEN: u32 = 32;
/// Value of `favourite` while no thread is it.
const NOBODY: usize = 0;

/// A value that one thread at a time may use. Without the kernel's fence (`FENCED` false) it is a canary for tests.
#[derive(Debug)]
pub(crate) struct BiasedMutex<T, const FENCED: bool = true> {
    /// Held by a thread that comes without being the favourite.
    others: Mutex<Others>,
    left: Condvar,
    favourite: AtomicUsize,
    /// Whether the favourite, or the thread that just was it, is inside. No other thread ever stores here.
    inside: AtomicBool,
    value: UnsafeCell<T>,
}

/// State of the threads that come without being the favourite.
#[derive(Debug)]
struct Others {
    /// The thread that came last, and how often in a row.
    last: usize,
    often: u32,
    /// The one thread that may be the favourite; any thread at first.
    chosen: usize,
}

// SAFETY: (shared access) `value` is reached only through a `BiasedGuard` or in `favourite`, by one thread at a time:
// see `lock`; (other threads) the value may move from one thread to the next.
unsafe impl<T: Send, const FENCED: bool> Sync for BiasedMutex<T, FENCED> {}

/// Access to the value, until this is dropped.
#[derive(Debug)]
pub(crate) struct BiasedGuard<'a, T, const FENCED: bool = true> {
    of: &'a BiasedMutex<T, FENCED>,
    way: GuardKind<'a, T, FENCED>,
    /// Keeps the guard on the thread that took it.
    _stays: PhantomData<*const ()>,
}

/// Way in which a thread got its turn.
#[derive(Debug)]
enum GuardKind<'a, T, const FENCED: bool> {
    Favourite(#[allow(dead_code, reason = "it leaves when it is dropped")] Inside<'a, T, FENCED>),
    Other(MutexGuard<'a, Others>),
}

/// The turn of the favourite, until this is dropped.
#[derive(Debug)]
struct Inside<'a, T, const FENCED: bool> {
    of: &'a BiasedMutex<T, FENCED>,
    me: usize,
}

impl<T, const FENCED: bool> Drop for Inside<'_, T, FENCED> {
    #[inline]
    fn drop(&mut self) {
        self.of.leave(self.me);
    }
}

/// Returns a number that no other living thread has, and that is not [`NOBODY`].
#[inline]
fn me() -> usize {
    // SAFETY: (always allowed) it reads a number of the calling thread.
    unsafe { libc::pthread_self() as usize }
}

/// Returns whether there may be favourites; registers the process with the kernel once.
fn may_favour() -> bool {
    static REGISTERED: LazyLock<bool> =
        LazyLock::new(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok());
    *REGISTERED
}

impl Others {
    fn may_choose(&self) -> bool {
        self.often >= OFTEN && (self.chosen == NOBODY || self.chosen == self.last)
    }
}

impl<T, const FENCED: bool> BiasedMutex<T, FENCED> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            others: Mutex::new(Others { last: NOBODY, often: 0, chosen: NOBODY }),
            left: Condvar::new(),
            favourite: AtomicUsize::new(NOBODY),
            inside: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for its turn.
    #[inline]
    pub(crate) fn lock(&self) -> BiasedGuard<'_, T, FENCED> {
        self.enter().map_or_else(|| self.wait(), |inside| self.turn(GuardKind::Favourite(inside)))
    }

    /// Returns the guard if it is free now.
    pub(crate) fn try_lock(&self) -> Option<BiasedGuard<'_, T, FENCED>> {
        if let Some(inside) = self.enter() {
            return Some(self.turn(GuardKind::Favourite(inside)));
        }
        let others = match self.others.try_lock() {
            Ok(others) => others,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        // ORDER: Acquire; pairs with the Release in `leave`.
        (self.take_back() && !self.inside.load(Ordering::Acquire)).then(|| self.turn(GuardKind::Other(others)))
    }

    #[inline]
    fn turn<'a>(&'a self, way: GuardKind<'a, T, FENCED>) -> BiasedGuard<'a, T, FENCED> {
        BiasedGuard { of: self, way, _stays: PhantomData }
    }

    /// Enters as the favourite. Returns `None` if this thread is not the favourite or a thread is inside.
    #[inline]
    fn enter(&self) -> Option<Inside<'_, T, FENCED>> {
        let me = me();
        // This thread sees what others did inside: it held their mutex when it became the favourite.
        if self.favourite.load(Ordering::Relaxed) != me || self.inside.load(Ordering::Relaxed) {
            return None;
        }
        // ORDER: Relaxed; with the compiler kept in order, the kernel's fence in `take_back` makes either that thread
        // see this store, or the load below see that the status was taken back.
        self.inside.store(true, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        if self.favourite.load(Ordering::Relaxed) == me {
            return Some(Inside { of: self, me });
        }
        self.leave(me);
        None
    }

    /// Runs `act` if this thread is the favourite and no thread is inside.
    #[inline]
    pub(crate) fn favourite<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        let _inside = self.enter()?;
        // SAFETY: (aliasing) the favourite has its turn until `_inside` is dropped, and `act` can keep no reference.
        Some(act(unsafe { &mut *self.value.get() }))
    }

    /// Leaves, as the favourite or as the thread that was it when it entered.
    #[inline]
    fn leave(&self, me: usize) {
        // ORDER: Release; pairs with the Acquire of the thread that waits for it.
        self.inside.store(false, Ordering::Release);
        compiler_fence(Ordering::SeqCst);
        // As in `enter`: either this thread sees that the status was taken back, or the other one sees that `inside` is
        // false.
        if self.favourite.load(Ordering::Relaxed) != me {
            self.wake_waiter();
        }
    }

    /// A thread that found the favourite inside holds the mutex until it sleeps.
    #[cold]
    fn wake_waiter(&self) {
        drop(lock(&self.others));
        self.left.notify_all();
    }

    #[cold]
    fn wait(&self) -> BiasedGuard<'_, T, FENCED> {
        let mut others = lock(&self.others);
        loop {
            // Repeated after each sleep: a thread may have become the favourite meanwhile.
            assert!(self.take_back(), "the kernel has no fence (membarrier) any more");
            // ORDER: Acquire; pairs with the Release in `leave`.
            if !self.inside.load(Ordering::Acquire) {
                break;
            }
            others = self.left.wait(others).unwrap_or_else(PoisonError::into_inner);
        }
        let me = me();
        others.often = if others.last == me { others.often.saturating_add(1) } else { 0 };
        others.last = me;
        self.turn(GuardKind::Other(others))
    }

    /// Ends the status of the favourite; the caller holds the mutex. Afterwards `inside` tells whether the former
    /// favourite is inside. Returns `false` where that cannot be known.
    fn take_back(&self) -> bool {
        let favourite = self.favourite.swap(NOBODY, Ordering::SeqCst);
        if favourite == NOBODY || !FENCED || membarrier(MembarrierCommand::PrivateExpedited).is_ok() {
            return true;
        }
        // Whether it is inside is unknown, so it stays the favourite.
        self.favourite.store(favourite, Ordering::SeqCst);
        false
    }
}

impl<T, const FENCED: bool> Deref for BiasedGuard<'_, T, FENCED> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: (aliasing) the guard has the turn until it is dropped, and a `&mut` of the value needs `&mut` of the
        // guard.
        unsafe { &*self.of.value.get() }
    }
}

impl<T, const FENCED: bool> DerefMut for BiasedGuard<'_, T, FENCED> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: (aliasing) the guard has the turn until it is dropped, and this borrows the guard uniquely.
        unsafe { &mut *self.of.value.get() }
    }
}

impl<T, const FENCED: bool> Drop for BiasedGuard<'_, T, FENCED> {
    #[inline]
    fn drop(&mut self) {
        match &mut self.way {
            GuardKind::Favourite(_) => {}
            // Made the favourite only when it leaves: earlier it could enter twice.
            GuardKind::Other(others) if others.may_choose() && may_favour() => {
                others.often = 0;
                others.chosen = others.last;
                self.of.favourite.store(others.chosen, Ordering::Relaxed);
            }
            GuardKind::Other(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        iter,
        sync::{Barrier, mpsc},
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    fn become_favourite<T>(turns: &BiasedMutex<T>) {
        for _ in 0..2 * OFTEN {
            drop(turns.lock());
        }
        assert_eq!(turns.favourite.load(Ordering::Relaxed), if may_favour() { me() } else { NOBODY });
    }

    /// Two threads add. One locks all the time and is the favourite; the other takes that role away again and again, at
    /// any moment, and waits for its turn or only tries. Returns how many additions were made and how many are in the
    /// sum.
    fn additions<const FENCED: bool>(tries: bool) -> (u64, u64) {
        let (turns, begin) = (&BiasedMutex::<u64, FENCED>::new(0), &Barrier::new(2));
        let turn_by_trying =
            || iter::repeat_with(|| turns.try_lock()).find_map(|turn| turn).expect("it tries for ever");
        let add = move |pause: u32| {
            begin.wait();
            for _ in 0..200_000 / (1 + pause) {
                let mut turn = if tries && pause > 0 { turn_by_trying() } else { turns.lock() };
                let before = *turn;
                std::hint::black_box(&mut *turn);
                *turn = before + 1;
                drop(turn);
                for _ in 0..pause {
                    std::hint::spin_loop();
                }
            }
            200_000 / (1 + u64::from(pause))
        };
        let made = thread::scope(|scope| {
            let adding = [scope.spawn(move || add(0)), scope.spawn(move || add(99))];
            adding.map(|adding| adding.join().unwrap()).iter().sum::<u64>()
        });
        (made, *turns.lock())
    }

    #[test]
    fn turns_never_overlap_whoever_is_the_favourite() {
        for tries in [false, true] {
            let (made, there) = additions::<true>(tries);
            assert_eq!(made, there);
        }
    }

    /// Two threads inside at once lose additions, which the test above would see. Without the fence a thread that waits
    /// for its turn might wait for ever.
    #[test]
    fn canary_turns_without_the_kernels_fence_overlap() {
        if !may_favour() || thread::available_parallelism().map_or(1, usize::from) < 2 {
            let line =
                "SKIP canary_turns_without_the_kernels_fence_overlap (needs membarrier and two CPUs): not here\n";
            return std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
        }
        let until = Instant::now() + Duration::from_secs(60);
        let mut lost = false;
        while !lost {
            assert!(Instant::now() < until, "no additions were lost");
            let (made, there) = additions::<false>(true);
            lost = there < made;
        }
    }

    #[test]
    fn nobody_follows_a_favourite_who_may_be_on_its_way_in() {
        let turns = <BiasedMutex<()>>::new(());
        become_favourite(&turns);
        thread::scope(|scope| {
            scope.spawn(|| (0..4 * OFTEN).for_each(|_| drop(turns.lock())));
        });
        assert_eq!(turns.favourite.load(Ordering::Relaxed), NOBODY);
        become_favourite(&turns);
    }

    #[test]
    fn favourite_who_stays_inside_is_waited_for_and_not_disturbed() {
        let (turns, (leave, told)) = (&<BiasedMutex<i32>>::new(0), mpsc::channel::<()>());
        let (inside, is_inside) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                become_favourite(turns);
                let mut turn = turns.lock();
                assert!(turns.try_lock().is_none(), "not even the favourite comes in twice");
                inside.send(()).unwrap();
                told.recv().unwrap();
                *turn += 1;
            });
            is_inside.recv().unwrap();
            assert!(turns.try_lock().is_none());
            let waiting = scope.spawn(|| *turns.lock());
            leave.send(()).unwrap();
            assert_eq!(waiting.join().unwrap(), 1);
        });
    }

    #[test]
    fn nobody_comes_in_twice_on_the_way_to_be_the_favourite() {
        let turns = <BiasedMutex<()>>::new(());
        for _ in 0..4 * OFTEN {
            let turn = turns.lock();
            assert!(turns.try_lock().is_none());
            drop(turn);
        }
        thread::scope(|scope| scope.spawn(|| assert!(turns.try_lock().is_some())).join().unwrap());
    }
}
