// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Allocates segments within the own window. Tracks which pages are free, which are in use, and which the peer may
//! still have mapped (V-6).

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tombolo_domain::{Error, Result};
use tombolo_mem::OwnSegment;

use crate::{
    forks::Mapping,
    mailbox::{self, HANDLES, Passed, PeerPage},
    port::Port,
};

/// A segment is *large* if it takes more than this fraction of the window: one part in `LARGE`.
const LARGE: u64 = 32;
/// Largest number of ranges that one endpoint of a channel has: its first ring, the one in use, and the one to which it
/// moves. Many connections share a window with more ranges.
const OF_ONE: usize = 3;

/// A range in use.
#[derive(Debug)]
pub(crate) struct Extent {
    offset: u64,
    len: u64,
    handle: usize,
    /// Number under which the range was passed to the peer; 0: not passed yet.
    serial: AtomicU64,
    since: Mapping,
}

impl Extent {
    /// Returns whether the peer may have the range mapped.
    fn is_out(&self, peer: &PeerPage) -> bool {
        let serial = self.serial.load(Ordering::Relaxed);
        serial != 0 && peer.let_go(self.handle) != serial
    }

    /// Returns whether the peer or a copy of this process may have the range mapped.
    fn may_be_mapped_elsewhere(&self, peer: &PeerPage) -> bool {
        self.is_out(peer) || self.since.may_be_shared()
    }
}

/// Content of an offer: the right to pass the range on.
#[derive(Debug)]
pub(crate) struct Token(Arc<Extent>);

/// Returns whether either side has a range mapped, or may still map it.
fn is_used(extent: &Arc<Extent>, port: &Port, peer: &PeerPage) -> bool {
    Arc::strong_count(extent) > 1 || port.own().is_mapped(extent.offset) || extent.may_be_mapped_elsewhere(peer)
}

#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Range of each handle. Other owners of the `Arc` are offers of it.
    extents: Vec<Option<Arc<Extent>>>,
    /// Offset below which pages were used before and are no longer zero.
    used: u64,
    serial: u64,
}

impl Pool {
    /// Frees ranges that neither side has mapped any more.
    fn reap(&mut self, port: &Port, peer: &PeerPage) {
        for place in &mut self.extents {
            if !place.as_ref().is_some_and(|it| is_used(it, port, peer)) {
                *place = None;
            }
        }
    }

    /// Returns the bytes of the longest segment for which there is room, or 0 if no handle is free.
    pub(crate) fn largest_gap(&self, port: &Port, peer: &PeerPage) -> u64 {
        let used = self.extents.iter().flatten().filter(|it| is_used(it, port, peer));
        let mut taken: Vec<_> = used.map(|it| (it.offset, it.offset + it.len)).collect();
        if taken.len() >= HANDLES {
            return 0;
        }
        taken.push((port.own().len(), u64::MAX));
        taken.sort_unstable();
        let mut from = mailbox::LEN;
        let gaps = taken.into_iter().map(|(offset, end)| offset.saturating_sub(std::mem::replace(&mut from, end)));
        gaps.max().unwrap_or(0)
    }

    pub(crate) fn allocate(&mut self, len: usize, port: &Port, peer: &PeerPage) -> Result<(OwnSegment, Token)> {
        self.reap(port, peer);
        let wanted = len as u64;
        let handle = self.extents.iter().position(Option::is_none).unwrap_or(self.extents.len());
        if handle == HANDLES {
            let remedy = "retire some, or have the peer let go of those that were retired";
            return Err(Error::Limit { what: "the 64 segments that a channel may have", remedy });
        }
        let offset = self.place(wanted, port.own().len()).ok_or(Error::Limit {
            what: "the memory that the broker gave this channel",
            remedy: "use smaller rings, or raise `window` in the configuration of the guest's tombolod",
        })?;
        let end = offset + wanted;
        if offset < self.used {
            let dirty = (self.used.min(end) - offset) as usize;
            let (_, mut data) = port.map_own(offset, dirty)?.split(0);
            data.slice_mut(0, dirty).fill(0);
        }
        let segment = port.map_own(offset, len)?;
        self.used = self.used.max(end);
        let extent = Arc::new(Extent { offset, len: wanted, handle, serial: 0.into(), since: Mapping::now() });
        self.extents.resize(self.extents.len().max(handle + 1), None);
        self.extents[handle] = Some(Arc::clone(&extent));
        Ok((segment, Token(extent)))
    }

    /// Finds a gap of `len` bytes: normally the first one, where tools look for a channel's rings (B-20). In a window
    /// that many connections share, a large segment is put at the end of the last gap. Small segments last and large
    /// ones come and go, so this keeps room for the large ones.
    fn place(&self, len: u64, window: u64) -> Option<u64> {
        let mut taken: Vec<_> = self.extents.iter().flatten().map(|it| (it.offset, it.offset + it.len)).collect();
        let is_apart = taken.len() >= OF_ONE && len > window / LARGE;
        taken.push((window, window));
        taken.sort_unstable();
        let mut from = mailbox::LEN;
        let gaps = taken.into_iter().map(|(offset, end)| (std::mem::replace(&mut from, end), offset));
        let mut fitting = gaps.filter(|(from, to)| to.checked_sub(*from).is_some_and(|gap| gap >= len));
        match is_apart {
            true => fitting.last().map(|(_, to)| to - len),
            false => fitting.next().map(|(from, _)| from),
        }
    }

    /// Returns the fields by which an offer of this pool is passed, or none if the offer belongs to another pool.
    pub(crate) fn pass(&self, token: &Token) -> Option<Passed> {
        let extent = self.extents[token.0.handle].as_ref().filter(|it| Arc::ptr_eq(it, &token.0))?;
        Some(Passed { offset: extent.offset, len: extent.len, handle: extent.handle, serial: self.serial + 1 })
    }

    /// Records that the range was passed.
    pub(crate) fn passed(&mut self, token: &Token) {
        self.serial += 1;
        token.0.serial.store(self.serial, Ordering::Relaxed);
    }

    /// Returns the bytes that were retired, and that the peer or a copy of this process may still have mapped.
    pub(crate) fn quarantined(&self, port: &Port, peer: &PeerPage) -> u64 {
        let retired = |it: &&Arc<Extent>| {
            Arc::strong_count(it) == 1 && !port.own().is_mapped(it.offset) && it.may_be_mapped_elsewhere(peer)
        };
        self.extents.iter().flatten().filter(retired).map(|it| it.len).sum()
    }
}
