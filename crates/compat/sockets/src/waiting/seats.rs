// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where threads wait for one connection.

use std::sync::{Mutex, MutexGuard};

use tombolo_os::lock::lock;

use super::instance::Instance;

/// Places that are left to a connection: one for a thread that reads, one for a thread that sends.
const SEATS: usize = 2;

/// The places at which threads wait for one connection, while none does.
#[derive(Debug, Default)]
pub(crate) struct Seats(Mutex<Vec<Instance>>);

impl Seats {
    pub(super) fn find_free(&self) -> Option<Instance> {
        lock(&self.0).pop()
    }

    /// Nobody waits there any more: it is left for the next one, unless there are enough.
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

    /// Nobody begins or ends to wait while this is held.
    pub fn lock_instances(&self) -> MutexGuard<'_, Vec<Instance>> {
        lock(&self.0)
    }
}
