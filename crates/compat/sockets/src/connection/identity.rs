// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses and number that identify an endpoint of a connection.

use std::{
    os::fd::RawFd,
    sync::{
        Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU16, Ordering},
    },
};

use tombolo_os::lock::lock;

use crate::{kernel::Kernel, random::random_id, tuple::Tuple};

/// Addresses of a connection and the number of this endpoint, found out when they are due and constant from then on.
#[derive(Debug, Default)]
pub struct Identity {
    /// Addresses, and the number that names this endpoint (M-3).
    found: Mutex<Option<(Tuple, u64)>>,
    /// Addresses under which both endpoints know the connection (S-7).
    meeting: OnceLock<Tuple>,
    /// Port that it was made to; 0 until it was asked for. There is no lock here, which a fork might find taken.
    service_port: AtomicU16,
}

impl Identity {
    /// Returns the same addresses with another number, for the endpoint that takes the place of this one.
    pub(super) fn begin_anew(&self) -> Self {
        let found = self.addresses().map(|tuple| (tuple, random_id()));
        Self { found: Mutex::new(found), meeting: self.meeting.clone(), service_port: AtomicU16::default() }
    }

    /// Returns its addresses, once they were asked for.
    #[must_use]
    pub fn addresses(&self) -> Option<Tuple> {
        lock(&self.found).map(|(tuple, _)| tuple)
    }

    /// Returns the addresses of `fd` with the number of this endpoint; asks the kernel if they are not known yet.
    /// Returns `None` where it is no TCP connection.
    pub(crate) fn find(&self, kernel: &dyn Kernel, fd: RawFd) -> Option<(Tuple, u64)> {
        let mut found = lock(&self.found);
        if found.is_none() {
            *found = kernel.tuple(fd).map(|tuple| (tuple, random_id()));
        }
        *found
    }

    /// Returns the port that `fd` was connected to, at an endpoint that `dialled` or one that accepted; `None` where it
    /// is no TCP connection. Costs much less than the whole identity, which a short connection does not need.
    pub(crate) fn service_port(&self, kernel: &dyn Kernel, fd: RawFd, dialled: bool) -> Option<u16> {
        let known = self.service_port.load(Ordering::Relaxed);
        if known != 0 {
            return Some(known);
        }
        kernel.service_port(fd, dialled).inspect(|port| self.service_port.store(*port, Ordering::Relaxed))
    }

    /// Returns the addresses under which both endpoints know the connection, once that was decided (S-7).
    pub(crate) fn meeting(&self) -> Option<Tuple> {
        self.meeting.get().copied()
    }

    /// Returns the same addresses, which `choose` decides if nobody has yet.
    pub(crate) fn decide_meeting(&self, choose: impl FnOnce() -> Tuple) -> Tuple {
        *self.meeting.get_or_init(choose)
    }

    /// Locks the identity: no other thread finds it out while the result is held.
    pub(crate) fn lock_identity(&self) -> MutexGuard<'_, Option<(Tuple, u64)>> {
        lock(&self.found)
    }
}
