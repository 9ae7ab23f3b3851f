// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Manages the places of an endpoint's segments, and the pages granted for each.

use std::sync::{Arc, OnceLock};

use tombolo_domain::{Error, Result};
use tombolo_layout::xen::{PLACES, SegmentName};

use crate::{hypervisor::Grants, reaper_client::Entrusted};

/// Granted pages, and the record that the grant reaper has them.
#[derive(Debug)]
pub(crate) struct GrantedPages {
    // Dropped first: pages that are no longer granted need not be kept.
    pub grants: Arc<dyn Grants>,
    pub name: SegmentName,
    /// Record that the domain's grant reaper holds the pages, too.
    pub entrusted: OnceLock<Entrusted>,
}

/// The places of an endpoint's segments.
#[derive(Debug)]
pub(crate) struct Places {
    of: [Place; PLACES],
    /// Number of bytes that were retired and that the peer may still map.
    pub quarantined: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    taken: bool,
    generation: u32,
}

impl Default for Places {
    fn default() -> Self {
        Self { of: [Place::default(); PLACES], quarantined: 0 }
    }
}

impl Places {
    pub(crate) fn take_place(&mut self) -> Result<(u8, u32)> {
        let free = self.of.iter_mut().zip(0..).find(|(place, _)| !place.taken && place.generation < u32::MAX);
        let (place, number) = free.ok_or(Error::Limit {
            what: "the segments that one link may have (64)",
            remedy: "retire segments, or have the peer unmap those in quarantine",
        })?;
        place.taken = true;
        place.generation += 1;
        Ok((number, place.generation))
    }

    pub(crate) fn release(&mut self, place: u8) {
        self.of[usize::from(place)].taken = false;
    }
}
