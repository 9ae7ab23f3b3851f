// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Determines what a guest or an account is to know of its links (B-7).

use std::collections::BTreeMap;

use tombolo_control::{FIRST_DOORBELL, NO_DOORBELL, Name, Pattern, Place, Way};

use super::{
    domains::Domains,
    guest::{Guest, LinkNews},
    state::plug_name,
};
use crate::config::checked_name;

/// What one domain is to know of its links.
pub(crate) struct GuestView<'a> {
    pub name: &'a str,
    pub guest: &'a Guest,
    pub domains: &'a Domains,
    /// Time for which each link that is removed soon still stays, in milliseconds.
    pub leaving: &'a BTreeMap<u32, u32>,
}

impl GuestView<'_> {
    /// Returns the links of the domain. A link whose other end is gone keeps its memory, so that its content can be
    /// read to the end. Only the peer's liveness changes, and there is no doorbell any more.
    pub fn links(&self) -> BTreeMap<u32, LinkNews> {
        let up = self.domains.up_links(self.name);
        let mut shown: BTreeMap<u32, LinkNews> =
            up.iter().filter_map(|(number, peer)| Some((*number, self.link_news(*number, peer)?))).collect();
        for (number, old) in self.guest.sent_links() {
            let link =
                self.domains.state.links.get(number).filter(|it| it.has_memory && it.generation == old.generation);
            if link.is_some() && self.leaving.contains_key(number) {
                // The link's rules may be gone. The link stays as it is until it is removed (B-21).
                let life = self.domains.liveness(old.peer.as_str());
                shown.insert(*number, LinkNews { life, ..old.clone() });
            } else if link.is_some() && !shown.contains_key(number) {
                let life = self.domains.liveness(old.peer.as_str());
                shown.insert(*number, LinkNews { life, doorbell: NO_DOORBELL, ..old.clone() });
            }
        }
        shown
    }

    /// Returns a link as one domain is to see it.
    fn link_news(&self, number: u32, peer: &str) -> Option<LinkNews> {
        let domain = self.name;
        let link = &self.domains.state.links[&number];
        let place = |own| -> Option<Place> {
            if self.domains.config.is_local(domain) {
                return "".parse().ok();
            }
            let (places, _) = self.domains.vms.get(domain)?.has.as_ref()?;
            places.get(&plug_name(number, link.generation, own))?.parse().ok()
        };
        let (me, peer_name): (Name, Name) = (checked_name(domain), checked_name(peer));
        let doorbell = match self.domains.state.machines.get(domain) {
            Some(machine) => {
                let mut doorbells = machine.doorbells.iter();
                doorbells.find(|(_, doorbell)| doorbell.peer == peer).map_or(NO_DOORBELL, |(number, _)| *number)
            }
            // An account has the eventfds themselves, and respects whether it may notify.
            None if self.domains.vms.get(peer)?.stormed_by.contains(domain) => NO_DOORBELL,
            None => FIRST_DOORBELL,
        };
        let allow = |way: Way| move |service: &Pattern| (way, service.clone());
        let mut rules: Vec<_> = self.domains.config.services(&peer_name, &me).map(allow(Way::In)).collect();
        rules.extend(self.domains.config.services(&me, &peer_name).map(allow(Way::Out)));
        let (own, theirs, life) = (place(true)?, place(false)?, self.domains.liveness(peer));
        let (generation, size, side) = (link.generation, link.size, link.side(domain)? as u8);
        Some(LinkNews { generation, peer: peer_name, own, theirs, size, doorbell, side, rules, life })
    }

    /// Returns where the peers of the links may be reached, as each machine and each account reports of itself (B-22).
    pub fn addresses(&self, links: &BTreeMap<u32, LinkNews>) -> BTreeMap<u32, Vec<[u8; 16]>> {
        let of = |peer: &str| self.domains.guest_of(peer).map_or_else(Vec::new, |guest| guest.addresses().to_vec());
        links.iter().map(|(&link, shown)| (link, of(shown.peer.as_str()))).collect()
    }
}
