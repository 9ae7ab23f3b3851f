// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks between threads, and between processes by a file.

use std::{
    io,
    os::fd::AsFd,
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::{fs::FlockOperation, io::Errno};

/// Locks a mutex whose holders leave nothing half done when they panic.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks an open file or folder for this open file alone, unless somebody has it locked. Returns whether it did. The
/// lock ends with [`unlock_file`], or with the last descriptor of the open file.
///
/// # Errors
/// The file system does not support locks.
pub fn try_lock_file(file: impl AsFd) -> io::Result<bool> {
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Releases the lock of a file.
pub fn unlock_file(file: impl AsFd) {
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn file_is_locked_by_one_open_file_at_a_time() {
        let folder = std::env::temp_dir();
        // The executable of this test: nothing else locks it.
        let path = std::env::current_exe().unwrap_or(folder);
        let (one, other) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        assert!(try_lock_file(&one).unwrap());
        assert!(!try_lock_file(&other).unwrap());
        unlock_file(&one);
        assert!(try_lock_file(&other).unwrap());
        assert!(!try_lock_file(&one).unwrap());
    }

    #[test]
    fn mutex_of_a_thread_that_panicked_is_locked_all_the_same() {
        let mutex = Mutex::new(7);
        let poisoned = std::thread::scope(|scope| scope.spawn(|| panic!("{}", lock(&mutex))).join());
        assert!(poisoned.is_err() && mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 7);
    }
}
