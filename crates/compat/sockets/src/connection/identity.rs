// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What names an end of a connection.

use std::{
    os::fd::RawFd,
    sync::{
        Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU16, Ordering},
    },
};

use tombolo_os::lock::lock;

use crate::{kernel::Kernel, random::random_id, tuple::Tuple};

/// The addresses of a connection and the number of this end, found out when they are due and the same from then on.
#[derive(Debug, Default)]
pub struct Identity {
    /// Its addresses, and the number that names this end (M-3).
    found: Mutex<Option<(Tuple, u64)>>,
    /// The addresses under which both ends know it (S-7).
    meeting: OnceLock<Tuple>,
    /// The port that it was made to; 0 until it was asked for. No lock, which a fork might find taken.
    service_port: AtomicU16,
}

impl Identity {
    /// The same addresses, and another number: of an end that takes the place of this one.
    pub(super) fn begin_anew(&self) -> Self {
        let found = self.addresses().map(|tuple| (tuple, random_id()));
        Self { found: Mutex::new(found), meeting: self.meeting.clone(), service_port: AtomicU16::default() }
    }

    /// Its addresses, once they were asked for.
    #[must_use]
    pub fn addresses(&self) -> Option<Tuple> {
        lock(&self.found).map(|(tuple, _)| tuple)
    }

    /// Asks the kernel for the addresses of `fd` where they are not known yet, and gives them with the number of this end. None
    /// where it is no TCP connection.
    pub(crate) fn find(&self, kernel: &dyn Kernel, fd: RawFd) -> Option<(Tuple, u64)> {
        let mut found = lock(&self.found);
        if found.is_none() {
            *found = kernel.tuple(fd).map(|tuple| (tuple, random_id()));
        }
        *found
    }

    /// The port that `fd` was connected to, at an end that `dialled` or one that accepted; none where it is no TCP connection. Costs
    /// much less than all that names the connection, which a short one does not need.
    pub(crate) fn service_port(&self, kernel: &dyn Kernel, fd: RawFd, dialled: bool) -> Option<u16> {
        let known = self.service_port.load(Ordering::Relaxed);
        if known != 0 {
            return Some(known);
        }
        kernel.service_port(fd, dialled).inspect(|port| self.service_port.store(*port, Ordering::Relaxed))
    }

    /// The addresses under which both ends know it, once that was decided (S-7).
    pub(crate) fn meeting(&self) -> Option<Tuple> {
        self.meeting.get().copied()
    }

    /// The same, which `choose` decides if nobody has yet.
    pub(crate) fn decide_meeting(&self, choose: impl FnOnce() -> Tuple) -> Tuple {
        *self.meeting.get_or_init(choose)
    }

    /// Nobody finds it out while this is held.
    pub(crate) fn lock_identity(&self) -> MutexGuard<'_, Option<(Tuple, u64)>> {
        lock(&self.found)
    }
}
