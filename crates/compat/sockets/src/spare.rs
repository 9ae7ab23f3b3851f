// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory for a connection, made before it is sent and by the connection's own calls (ADR 0069).
//!
//! Zeroing takes a hundred times as long as to send a message. Where many connections begin at once, no thread does that while
//! others wait for what all have in common.

use std::sync::{Arc, Mutex};

use tombolo_domain::{Allocator, Offer, SingleDoorbell, aside};
use tombolo_mem::OwnSegment;
use tombolo_os::lock::lock;

use crate::{
    Reason,
    quota::{Lease, Quota},
};

/// What a connection is to bring to its peer.
#[derive(Debug, Default)]
pub(crate) enum Spare {
    #[default]
    None,
    /// It is to be made so, of this many bytes.
    Wanted(Allocator, u64),
    /// Another thread makes it.
    Begun,
    Made(Resources),
    /// It could not be.
    Failed,
}

/// A segment of so many bytes, which nobody was offered yet, and a doorbell.
#[derive(Debug)]
pub(crate) struct Resources {
    pub segment: OwnSegment,
    pub offer: Offer,
    pub len: u64,
    pub lease: Lease,
    pub doorbell: Arc<SingleDoorbell>,
}

impl Resources {
    /// Makes them by `allocate`, if the `quota` has room.
    pub fn new(
        quota: &Quota,
        len: u64,
        allocate: impl FnOnce(usize) -> tombolo_domain::Result<(OwnSegment, Offer)>,
    ) -> Result<Self, Reason> {
        let lease = quota.reserve_bytes(len).ok_or(Reason::Resources)?;
        let (segment, offer) = allocate(len as usize).map_err(|_| Reason::Resources)?;
        let doorbell = aside::lifted(SingleDoorbell::new).map_err(|_| Reason::Resources)?;
        Ok(Self { segment, offer, len, lease, doorbell: Arc::new(doorbell) })
    }
}

impl Spare {
    /// Makes what is wanted, and says whether it did. Nothing is held meanwhile.
    pub fn make_wanted(spare: &Mutex<Self>, quota: &Quota) -> bool {
        let Some((allocator, len)) = lock(spare).begin() else { return false };
        let made = Resources::new(quota, len, |len| allocator.allocate(len));
        let mut spare = lock(spare);
        // Else it is not wanted any more.
        if matches!(*spare, Self::Begun) {
            *spare = made.map_or(Self::Failed, Self::Made);
        }
        true
    }

    /// What is to be made now, by whoever asks; nobody else is told of it.
    fn begin(&mut self) -> Option<(Allocator, u64)> {
        match std::mem::replace(self, Self::Begun) {
            Self::Wanted(allocator, len) => Some((allocator, len)),
            other => {
                *self = other;
                None
            }
        }
    }
}
