// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds memory that the peer may still map.

use std::{fmt, sync::Arc};

use tombolo_layout::xen::{AT_RELEASED, SegmentName};

use crate::{end::End, page::PeerPage, places::GrantedPages};

/// Memory that was retired and that the peer may still map. Dropping this frees it.
pub(crate) struct Quarantined {
    end: Arc<End>,
    name: SegmentName,
    len: usize,
    _held: Option<Arc<GrantedPages>>,
}

impl fmt::Debug for Quarantined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes that domain {} may map", self.len, self.end.domain.id)
    }
}

impl Quarantined {
    pub(crate) fn new(end: Arc<End>, name: SegmentName, len: usize, held: Option<Arc<GrantedPages>>) -> Self {
        end.account(|places| places.quarantined += len as u64);
        Self { end, name, len, _held: held }
    }

    /// Returns whether the peer let go of the memory.
    pub(crate) fn is_free(&self) -> bool {
        let released = |page| released(page, self.name.place, self.name.generation);
        self.end.maps_nothing() || self.end.peer.get().is_some_and(released)
    }
}

/// Returns whether the peer's mailbox reports that the peer let go of a segment. A false report frees nothing, because
/// the kernel keeps what is mapped.
pub(crate) fn released(page: &PeerPage, place: u8, generation: u32) -> bool {
    page.word(AT_RELEASED + 8 * usize::from(place)).hint() == u64::from(generation)
}

impl Drop for Quarantined {
    fn drop(&mut self) {
        self.end.account(|places| {
            places.release(self.name.place);
            places.quarantined -= self.len as u64;
        });
    }
}
