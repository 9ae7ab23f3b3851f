// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Manages segments: their pages, the list of their references, and whether the peer may still map them.

use std::sync::{
    Arc, OnceLock, Weak,
    atomic::{AtomicBool, Ordering},
};

use rustix::io::Errno;
use tombolo_domain::{Error, Result};
use tombolo_layout::xen::{AT_MADE, AT_RELEASED, LIST_REFS, PAGE, PLACES, REFERENCES, SegmentName};
use tombolo_mem::{OwnSegment, OwnWord, PeerSegment};

use crate::{
    core::Core,
    end::End,
    os::lock,
    page::{PeerPage, malformed, words_of},
    places::GrantedPages,
    quarantine::Quarantined,
    reaper_client::Note,
};

/// Content of an offer: the right to map a segment. Dropping it revokes the right as soon as that is possible.
pub(crate) struct Token {
    core: Arc<Core>,
    end: Arc<End>,
    pub name: SegmentName,
    len: usize,
    held: Option<Arc<GrantedPages>>,
    sent: AtomicBool,
}

impl Token {
    /// Returns whether the offer belongs to `end` and was not sent before.
    pub(crate) fn may_go(&self, end: &Arc<End>) -> bool {
        Arc::ptr_eq(&self.end, end) && !self.sent.load(Ordering::Relaxed)
    }

    /// Returns the references that go with the message: those of a small segment.
    pub(crate) fn references(&self) -> &[u32] {
        let small = self.held.as_ref().filter(|_| self.name.list == 0);
        small.map_or(&[], |held| held.grants.references())
    }

    pub(crate) fn mark_sent(&self) {
        self.sent.store(true, Ordering::Relaxed);
        if let Some(held) = self.held.as_ref().filter(|held| !entrust(held, &self.core, &self.end)) {
            lock(&self.end.unknown).push(Arc::downgrade(held));
        }
    }
}

/// Hands the pages to the domain's grant reaper, if there is one. Returns false while the peer's mailbox is not known
///
fn entrust(held: &GrantedPages, core: &Core, end: &End) -> bool {
    let (Some(page), Some(mailbox)) = (end.peer.get(), end.peer_reference.get()) else { return false };
    let note = Note {
        id: 0,
        peer: end.domain.id,
        mailbox: *mailbox,
        made: page.word(AT_MADE).hint(),
        place: held.name.place,
        generation: held.name.generation,
        pages: held.grants.references().len() as u32,
        service: end.service().into(),
    };
    if let Some(entrusted) = core.keeping.entrust(&*core.xen, held.grants.file(), note) {
        let _ = held.entrusted.set(entrusted);
    }
    true
}

/// Hands over the pages that were sent before the peer's mailbox was known.
pub(crate) fn entrust_sent(core: &Core, end: &End) {
    for held in std::mem::take(&mut *lock(&end.unknown)).iter().filter_map(Weak::upgrade) {
        entrust(&held, core, end);
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        let kept = Quarantined::new(Arc::clone(&self.end), self.name, self.len, self.held.take());
        if *self.sent.get_mut() && self.end.is_ours() && !kept.is_free() {
            self.core.quarantine_memory(kept);
        }
    }
}

/// Makes a segment of `len` bytes for the peer of `end`.
pub(crate) fn allocate(core: &Arc<Core>, end: &Arc<End>, len: usize) -> Result<(OwnSegment, Token)> {
    core.sweep();
    let pages = len / PAGE;
    if len == 0 || len % PAGE != 0 {
        return Err(Error::os("allocate", Errno::INVAL));
    }
    // The references of a small segment go with the message, which saves a page to grant and to map.
    let lists = if pages <= REFERENCES { 0 } else { pages.div_ceil(LIST_REFS) };
    let grants = core.xen.grant(end.domain.id, lists + pages)?;
    let (list_refs, refs) = grants.references().split_at(lists);
    for (index, (refs, _)) in refs.chunks(LIST_REFS).zip(list_refs).enumerate() {
        let (words, _no_data) = Arc::clone(&grants).map(index, 1)?.split(PAGE);
        let next = list_refs.get(index + 1).copied().unwrap_or(0);
        words.word(0).store_release(next.into());
        for (at, word) in words_of(refs).enumerate() {
            words.word(8 + 8 * at).store_release(word);
        }
    }
    let list = list_refs.first().copied().unwrap_or(0);
    let segment = Arc::clone(&grants).map(lists, pages)?;
    let (place, generation) = lock(&end.places).take_place()?;
    let name = SegmentName { list, pages: pages as u32, place, generation };
    let (core, end) = (Arc::clone(core), Arc::clone(end));
    let held = Some(Arc::new(GrantedPages { grants, name, entrusted: OnceLock::new() }));
    Ok((segment, Token { core, end, name, len, held, sent: AtomicBool::new(false) }))
}

/// Last generation received from each of the peer's places.
#[derive(Debug)]
pub(crate) struct Seen([u32; PLACES]);

impl Default for Seen {
    fn default() -> Self {
        Self([0; PLACES])
    }
}

impl Seen {
    /// Maps the segment that the peer sent if it is valid; otherwise lets go of it.
    pub(crate) fn open(
        &mut self,
        core: &Core,
        end: &Arc<End>,
        name: SegmentName,
        small: Vec<u32>,
        max: u64,
    ) -> Result<PeerSegment> {
        let last = &mut self.0[usize::from(name.place)];
        if name.generation <= *last {
            return Err(malformed("X-7", format!("segment {} of place {} came before", name.generation, name.place)));
        }
        *last = name.generation;
        let guard = Release { end: Arc::clone(end), name };
        let size = u64::from(name.pages) * PAGE as u64;
        if size > max {
            return Err(malformed("X-7", format!("segment of {size} bytes, where at most {max} may be")));
        }
        let references = if name.list == 0 { small } else { read_list(core, end, name)? };
        core.xen.map(end.domain.id, &references, Some(end.port_number()), Box::new(guard))
    }
}

/// Copies the references of a segment out of the peer's list, each once.
fn read_list(core: &Core, end: &End, name: SegmentName) -> Result<Vec<u32>> {
    let (mut left, mut list) = (name.pages as usize, name.list);
    let mut references = Vec::with_capacity(left);
    while left > 0 {
        if list == 0 {
            return Err(malformed("X-7", format!("list of {} pages ends {left} too early", name.pages)));
        }
        let page = PeerPage::unchecked(core.xen.map(end.domain.id, &[list], None, Box::new(()))?);
        list = page.word(0).hint() as u32;
        let count = left.min(LIST_REFS);
        references.extend(page.references(8, count));
        left -= count;
    }
    Ok(references)
}

/// Tells the peer, when dropped, that its segment is no longer mapped here.
#[derive(Debug)]
struct Release {
    end: Arc<End>,
    name: SegmentName,
}

impl Drop for Release {
    fn drop(&mut self) {
        if self.end.is_ours() {
            self.end.own.set(AT_RELEASED + 8 * usize::from(self.name.place), self.name.generation.into());
        }
    }
}
