// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements hints pages, in which a process shows other domains its addresses and the keys of the connections for
//! which it waits.

use std::{collections::BTreeMap, sync::Mutex};

use tombolo_domain::Result;
use tombolo_layout::xen as at;

use crate::{
    hypervisor::{DomId, Hypervisor},
    os::lock,
    page::{OwnPage, PeerPage},
};

/// Hints pages of this process, one for each domain that may connect to it, all with the same hints.
#[derive(Debug, Default)]
pub(crate) struct OwnHints(Mutex<Hints>);

#[derive(Debug, Default)]
struct Hints {
    pages: BTreeMap<DomId, OwnPage>,
    addresses: Vec<[u8; 16]>,
    /// Keys by their places in a page.
    keys: Vec<Option<u32>>,
}

impl OwnHints {
    /// Grants a page to `peer`, with all known hints. Returns its reference.
    pub(crate) fn grant_page(&self, xen: &dyn Hypervisor, peer: DomId) -> Result<u32> {
        let grants = xen.grant(peer, 1)?;
        let reference = grants.references()[0];
        grants.when_gone(at::AT_STATE, None)?;
        let page = OwnPage::new(grants.map(0, 1)?, at::HINTS_MAGIC, 0);
        let mut hints = lock(&self.0);
        hints.show_addresses(&page);
        hints.keys.iter().enumerate().for_each(|(place, key)| show_key(&page, place, *key));
        hints.pages.insert(peer, page);
        Ok(reference)
    }

    /// Closes the page of `peer`.
    pub(crate) fn withdraw_page(&self, peer: DomId) {
        if let Some(page) = lock(&self.0).pages.remove(&peer) {
            page.close();
        }
    }

    /// Shows these addresses, as many of the first ones as there is room for.
    pub(crate) fn set_addresses(&self, addresses: Vec<[u8; 16]>) {
        let mut hints = lock(&self.0);
        hints.addresses = addresses;
        hints.addresses.truncate(at::ADDRESSES);
        hints.pages.values().for_each(|page| hints.show_addresses(page));
    }

    /// Returns whether an address is this process's own.
    pub(crate) fn is_own(&self, address: [u8; 16]) -> bool {
        lock(&self.0).addresses.contains(&address)
    }

    /// Shows that this process waits for `key`. If there is no room, nobody finds the key.
    pub(crate) fn add_key(&self, key: u32) {
        let mut hints = lock(&self.0);
        if hints.keys.contains(&Some(key)) {
            return;
        }
        let place = match hints.keys.iter().position(Option::is_none) {
            Some(place) => place,
            None if hints.keys.len() < at::KEYS => {
                hints.keys.push(None);
                hints.keys.len() - 1
            }
            None => return,
        };
        hints.set_key(place, Some(key));
    }

    /// Shows that this process no longer waits for `key`.
    pub(crate) fn remove_key(&self, key: u32) {
        let mut hints = lock(&self.0);
        if let Some(place) = hints.keys.iter().position(|known| *known == Some(key)) {
            hints.set_key(place, None);
        }
    }

    /// Closes all pages, so that nobody connects any more.
    pub(crate) fn withdraw_all(&self) {
        std::mem::take(&mut lock(&self.0).pages).values().for_each(OwnPage::close);
    }
}

impl Hints {
    fn show_addresses(&self, page: &OwnPage) {
        let shown = self.addresses.iter().copied().chain(std::iter::repeat([0; 16])).take(at::ADDRESSES);
        for (at, address) in shown.enumerate() {
            for (half, word) in words_of(address).into_iter().enumerate() {
                page.set(at::AT_ADDRESSES + 16 * at + 8 * half, word);
            }
        }
    }

    fn set_key(&mut self, place: usize, key: Option<u32>) {
        self.keys[place] = key;
        self.pages.values().for_each(|page| show_key(page, place, key));
    }
}

fn show_key(page: &OwnPage, place: usize, key: Option<u32>) {
    page.set(at::AT_KEYS + 8 * place, key.map_or(0, at::key_word));
}

/// Returns an address as two words.
fn words_of(address: [u8; 16]) -> [u64; 2] {
    let number = u128::from_le_bytes(address);
    [number as u64, (number >> 64) as u64]
}

/// Hints page of a process in another domain. None of its content can be trusted.
#[derive(Debug)]
pub(crate) struct PeerHints(PeerPage);

impl PeerHints {
    /// Maps the page that has `reference` in `peer`.
    pub(crate) fn map(xen: &dyn Hypervisor, peer: DomId, reference: u32) -> Result<Self> {
        let page = xen.map(peer, &[reference], None, Box::new(()))?;
        PeerPage::new(page, at::HINTS_MAGIC).map(|(page, _)| Self(page))
    }

    /// Returns whether its process lives and listens.
    pub(crate) fn is_open(&self) -> bool {
        self.0.state() == at::OPEN
    }

    /// Returns whether the process may have this address.
    pub(crate) fn has_address(&self, address: [u8; 16]) -> bool {
        let wanted = words_of(address);
        let stands = |at: usize, half: usize| self.0.word(at::AT_ADDRESSES + 16 * at + 8 * half).hint();
        (0..at::ADDRESSES).any(|at| [stands(at, 0), stands(at, 1)] == wanted)
    }

    /// Returns whether the process waits for `key`.
    pub(crate) fn has_key(&self, key: u32) -> bool {
        let wanted = at::key_word(key);
        (0..at::KEYS).any(|place| self.0.word(at::AT_KEYS + 8 * place).hint() == wanted)
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;
    use crate::FakeXen;

    fn address(last: u8) -> [u8; 16] {
        let mut address = [0xfd; 16];
        address[15] = last;
        address
    }

    #[test]
    fn x23_hints_page_shows_what_was_said_before_and_after_it_was_granted_and_forgets_what_is_withdrawn() {
        let xen = FakeXen::new();
        let (here, there) = (xen.domain(5).xen, xen.domain(7).xen);
        let hints = OwnHints::default();
        hints.set_addresses((1..40).map(address).collect());
        (0..at::KEYS as u32 + 9).for_each(|key| hints.add_key(key));
        let page = PeerHints::map(&*there, 5, hints.grant_page(&*here, 7).unwrap()).unwrap();
        let last = at::ADDRESSES as u8;
        assert!(page.is_open() && page.has_address(address(1)) && page.has_address(address(last)));
        assert!(!page.has_address(address(last + 1)) && hints.is_own(address(1)) && !hints.is_own(address(last + 1)));
        let has = |key: usize| page.has_key(key as u32);
        assert!(has(0) && has(at::KEYS - 1) && !has(at::KEYS), "no more than there is room for");
        hints.remove_key(0);
        assert!(!has(0) && has(1));
        hints.add_key(at::KEYS as u32);
        assert!(has(at::KEYS), "there is room again");
        hints.set_addresses(vec![address(77)]);
        assert!(page.has_address(address(77)) && !page.has_address(address(2)));
        hints.withdraw_page(7);
        assert!(!page.is_open());
    }

    #[test]
    fn x23_page_that_is_no_hints_page_is_refused() {
        let xen = FakeXen::new();
        let (here, there) = (xen.domain(5).xen, xen.domain(7).xen);
        let grants = here.grant(7, 1).unwrap();
        assert!(PeerHints::map(&*there, 5, grants.references()[0]).is_err());
        assert!(PeerHints::map(&*there, 5, xen.next_reference()).is_err());
    }
}
