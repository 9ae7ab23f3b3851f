// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether this thread is in the middle of something here. A call that finds it so was made by a signal's handler, which
//! interrupted it: what is locked stays locked until the handler returns, so such a call takes no lock.
//!
//! While the kernel makes the thread wait nothing is locked, and a handler's calls are like any others.

use std::cell::Cell;

use smallvec::SmallVec;
use tombolo_sockets::aside;

thread_local! {
    /// Without a destructor, so that its first use in a handler allocates nothing.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// What a call has of each of its buffers or descriptors. Where they are as few as most calls have, no memory is got for it: the call
/// may be a handler's, of a signal that has interrupted `malloc`.
pub(crate) type Few<T> = SmallVec<[T; 8]>;

/// While it lives this thread is in the middle of something.
#[derive(Debug)]
pub(crate) struct Inside(());

/// Something begins that takes locks.
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

/// Whether this call has interrupted another one.
#[inline]
pub(crate) fn has_interrupted() -> bool {
    DEPTH.get() != 0
}

/// Does `f`, which opens descriptors of this library's ([`aside::lifted`]), for which it takes a lock.
pub(crate) fn lifted<T>(f: impl FnOnce() -> T) -> T {
    let _inside = enter();
    aside::lifted(f)
}

/// Does `f`, which takes no lock, and may take long.
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
