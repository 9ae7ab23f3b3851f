// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tracks whether this thread is inside a call of this library. If a call finds it so, a signal handler made that call
//! and interrupted the first one. What the first call has locked stays locked until the handler returns, so the
//! handler's call takes no lock.
//!
//! While the kernel makes the thread wait, nothing is locked, and a handler's calls are like any others.

use std::cell::Cell;

use smallvec::SmallVec;
use tombolo_sockets::aside;

thread_local! {
    /// Depth of nested calls. It has no destructor, so that its first use in a signal handler allocates nothing.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// List with an item for each buffer or descriptor of a call. Up to the number that most calls have, it allocates
/// nothing, because the call may come from a signal handler that has interrupted `malloc`.
pub(crate) type Few<T> = SmallVec<[T; 8]>;

/// Guard that marks this thread as inside a call of this library while it lives.
#[derive(Debug)]
pub(crate) struct Inside(());

/// Marks the beginning of work that takes locks.
#[inline]
pub(crate) fn enter() -> Inside {
    DEPTH.set(DEPTH.get() + 1);
    Inside(())
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Returns whether this call has interrupted another one.
#[inline]
pub(crate) fn has_interrupted() -> bool {
    DEPTH.get() != 0
}

/// Calls `f`, which opens descriptors of this library's ([`aside::lifted`]) and takes a lock for that.
pub(crate) fn lifted<T>(f: impl FnOnce() -> T) -> T {
    let _inside = enter();
    aside::lifted(f)
}

/// Calls `f`, which takes no lock and may take long, as if outside of any call.
#[inline]
pub(crate) fn leave<T>(f: impl FnOnce() -> T) -> T {
    struct DepthGuard(u32);
    impl Drop for DepthGuard {
        fn drop(&mut self) {
            DEPTH.set(self.0);
        }
    }
    let _back = DepthGuard(DEPTH.replace(0));
    f()
}
