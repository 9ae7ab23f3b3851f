// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where virtual machines may be reached, as each says of itself, told to those that have a link with it (B-22).

use std::collections::BTreeMap;

use crate::host::{broker::Broker, guest::LinkNews};

impl Broker {
    /// Tells a machine where the peers of its links may be reached. True if something was said.
    pub(super) fn tell_addresses(&mut self, domain: &str, told: &BTreeMap<u32, LinkNews>) -> bool {
        let of = |peer: &str| self.vms.get(peer).map_or_else(Vec::new, |vm| vm.guest.addresses().to_vec());
        let peers = told.iter().map(|(&link, told)| (link, of(told.peer.as_str()))).collect();
        self.vms.get_mut(domain).is_some_and(|vm| vm.guest.send_addresses(peers))
    }
}
