// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes memory for a connection before it is sent, by the connection's own calls (ADR 0069).
//!
//! Zeroing takes a hundred times as long as sending a message. Where many connections begin at once, no thread zeroes
//! memory while others wait for the state that all connections share.

use std::sync::{Arc, Mutex};

use tombolo_domain::{Allocator, Offer, SingleDoorbell, aside};
use tombolo_mem::OwnSegment;
use tombolo_os::lock::lock;

use crate::{
    Reason,
    quota::{Lease, Quota},
};

/// State of the resources that a connection will bring to its peer.
#[derive(Debug, Default)]
pub(crate) enum Spare {
    #[default]
    None,
    /// A thread is to make them with this allocator; the segment has this many bytes.
    Wanted(Allocator, u64),
    /// Another thread is making them.
    Begun,
    Made(Resources),
    /// Memory or a descriptor was missing.
    Failed,
}

/// A segment of `len` bytes that was not offered to anyone yet, and a doorbell.
#[derive(Debug)]
pub(crate) struct Resources {
    pub segment: OwnSegment,
    pub offer: Offer,
    pub len: u64,
    pub lease: Lease,
    pub doorbell: Arc<SingleDoorbell>,
}

impl Resources {
    /// Makes them with `allocate`, if the `quota` has room.
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
    /// Makes what is wanted; returns whether anything was. No lock is held meanwhile.
    pub fn make_wanted(spare: &Mutex<Self>, quota: &Quota) -> bool {
        let Some((allocator, len)) = lock(spare).begin() else { return false };
        let made = Resources::new(quota, len, |len| allocator.allocate(len));
        let mut spare = lock(spare);
        // Otherwise the resources are not wanted any more.
        if matches!(*spare, Self::Begun) {
            *spare = made.map_or(Self::Failed, Self::Made);
        }
        true
    }

    /// Returns what the caller is to make now; no other thread is told of it.
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
