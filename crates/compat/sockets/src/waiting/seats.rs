// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps the instances at which threads wait for one connection.

use std::sync::{Mutex, MutexGuard};

use tombolo_os::lock::lock;

use super::instance::Instance;

/// Number of instances kept for a connection: one for a thread that reads, one for a thread that sends.
const SEATS: usize = 2;

/// Instances at which threads wait for one connection, while no thread uses them.
#[derive(Debug, Default)]
pub(crate) struct Seats(Mutex<Vec<Instance>>);

impl Seats {
    pub(super) fn find_free(&self) -> Option<Instance> {
        lock(&self.0).pop()
    }

    /// Takes an instance back at which no thread waits any more: keeps it for the next one, unless there are enough.
    pub(super) fn put_back(&self, instance: Option<Instance>) {
        let mut free = lock(&self.0);
        if free.len() < SEATS {
            free.extend(instance);
            return;
        }
        drop(free);
        drop(instance);
    }

    pub(super) fn clear(&self) {
        lock(&self.0).clear();
    }

    /// Locks the instances. No thread begins or ends a wait while the result is held.
    pub fn lock_instances(&self) -> MutexGuard<'_, Vec<Instance>> {
        lock(&self.0)
    }
}
