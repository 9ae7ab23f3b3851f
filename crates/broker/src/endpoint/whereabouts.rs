// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Collects the addresses at which programs of this kernel may be reached: those of the broker's own network namespace,
//! and those of others in which programs look for the other ends of TCP connections (B-22). The kernel reports them; no
//! program is asked.

use std::{
    collections::BTreeMap,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use tombolo_control::ADDRESSES_MAX;
use tombolo_os::addresses::{AddressWatch, addresses_of, namespace_of, own_addresses};

use crate::endpoint::program::{Program, may_be_admitted};

/// Largest number of addresses published for one namespace other than the broker's own.
const EACH_MAX: usize = 8;
/// Largest number of namespaces besides the broker's own.
const NAMESPACES_MAX: usize = 32;
/// Minimum time between two looks at such a namespace; nothing reports that its addresses changed.
const AGAIN: Duration = Duration::from_secs(1);
/// Time for which a namespace without programs is kept: programs come and go, and other domains are told of each
/// change.
const KEPT: Duration = Duration::from_secs(30);

/// A network namespace that is not the broker's.
#[derive(Debug)]
struct Namespace {
    /// User whose program was seen in it first.
    user: u32,
    addresses: Vec<[u8; 16]>,
    /// Time of the last look; below, the last time that a program was seen in it.
    looked: Instant,
    used: Instant,
}

/// Addresses at which the programs of this kernel may be reached.
#[derive(Debug, Default)]
pub(crate) struct Whereabouts {
    /// Whether the addresses are published.
    is_published: bool,
    /// `None` if the kernel is not watched for changes.
    watch: Option<AddressWatch>,
    /// Addresses of the broker's own namespace.
    own: Vec<[u8; 16]>,
    /// Other namespaces, by the kernel's numbers.
    others: BTreeMap<u64, Namespace>,
    published: Vec<[u8; 16]>,
}

impl Whereabouts {
    /// Publishes these addresses, which never change.
    pub(crate) fn fixed(own: Vec<[u8; 16]>) -> Self {
        Self { is_published: true, published: own.clone(), own, ..Self::default() }
    }

    /// Begins to watch the kernel's addresses.
    pub(crate) fn begin(&mut self) {
        self.is_published = true;
        self.watch = AddressWatch::new().inspect_err(|error| tracing::warn!("addresses: {error}")).ok();
        self.look_at_own();
    }

    /// Returns a descriptor that polls readable once the addresses of the broker's own namespace may have changed.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(AddressWatch::fd)
    }

    /// Reads the addresses of the broker's own namespace again.
    pub(crate) fn look_again(&mut self) {
        self.watch.iter().for_each(AddressWatch::drain);
        self.look_at_own();
    }

    fn look_at_own(&mut self) {
        self.own = own_addresses(ADDRESSES_MAX);
        self.collect();
    }

    /// Looks at the namespace of a program that looks for the other ends of its connections, if it is not the broker's,
    /// at most once a second.
    pub(crate) fn look_at_program(&mut self, program: &mut Program, now: Instant) {
        if !self.is_published {
            return;
        }
        program.namespace = namespace_of(program.process).filter(|it| Some(*it) != namespace_of(std::process::id()));
        if let Some(namespace) = program.namespace {
            self.look_at_namespace(namespace, program.user, now, || addresses_of(program.process, ADDRESSES_MAX));
        }
    }

    fn look_at_namespace(&mut self, namespace: u64, user: u32, now: Instant, read: impl Fn() -> Vec<[u8; 16]>) {
        if let Some(known) = self.others.get_mut(&namespace) {
            known.used = now;
            if now.duration_since(known.looked) >= AGAIN {
                (known.addresses, known.looked) = (read(), now);
                self.collect();
            }
            return;
        }
        let own = self.others.values().filter(|it| it.user == user).count();
        let theirs = self.others.len() - own;
        if self.others.len() < NAMESPACES_MAX && (user == 0 || may_be_admitted(own, theirs, NAMESPACES_MAX)) {
            self.others.insert(namespace, Namespace { user, addresses: read(), looked: now, used: now });
            self.collect();
        }
    }

    /// Forgets namespaces in which there was no program for a while.
    pub(crate) fn forget_unused(&mut self, now: Instant, programs: &BTreeMap<u64, Program>) {
        if self.late_at().is_none_or(|at| now < at) {
            return;
        }
        for namespace in programs.values().filter_map(|program| program.namespace) {
            self.others.entry(namespace).and_modify(|known| known.used = now);
        }
        self.others.retain(|_, known| now.duration_since(known.used) < KEPT);
        self.collect();
    }

    /// Returns when the first namespace is to be checked for being unused.
    pub(crate) fn late_at(&self) -> Option<Instant> {
        self.others.values().map(|known| known.used + KEPT).min()
    }

    /// Returns the addresses to send to the host, with those of the broker's own namespace first.
    pub(crate) fn published(&self) -> Option<&[[u8; 16]]> {
        self.is_published.then_some(&self.published[..])
    }

    fn collect(&mut self) {
        self.published.clone_from(&self.own);
        for address in self.others.values().flat_map(|known| known.addresses.iter().take(EACH_MAX)) {
            if !self.published.contains(address) {
                self.published.push(*address);
            }
        }
        self.published.truncate(ADDRESSES_MAX);
    }

    /// Returns whether a program may take an address as this kernel's own: one of the broker's namespace, or of the
    /// program's.
    pub(crate) fn is_own(&self, address: [u8; 16], program: &Program) -> bool {
        let of_program = program.namespace.and_then(|it| self.others.get(&it));
        self.own.contains(&address) || of_program.is_some_and(|known| known.addresses.contains(&address))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(number: u64) -> [u8; 16] {
        Ipv4Addr::from(0x0a00_0000 + number as u32).to_ipv6_mapped().octets()
    }

    #[test]
    fn b22_one_user_with_many_namespaces_leaves_room_for_others_and_for_the_brokers_own_addresses() {
        let (mut all, now) = (Whereabouts::fixed(vec![address(0)]), Instant::now());
        let many: Vec<_> = (100..200).map(address).collect();
        for namespace in 1..=100 {
            all.look_at_namespace(namespace, 1000, now, || many.clone());
        }
        assert_eq!(all.others.len(), NAMESPACES_MAX / 2);
        assert_eq!(all.published().unwrap(), [&[address(0)], &many[..EACH_MAX]].concat());
        all.look_at_namespace(101, 1001, now, || vec![address(5)]);
        assert!(all.published().unwrap().contains(&address(5)));
        for namespace in 1..=100 {
            all.look_at_namespace(200 + namespace, 0, now, || {
                (0..100).map(|at| address(1000 * namespace + at)).collect()
            });
        }
        assert_eq!((all.others.len(), all.published().unwrap().len()), (NAMESPACES_MAX, ADDRESSES_MAX));
        assert_eq!(all.published().unwrap()[0], address(0));
    }

    #[test]
    fn b22_namespace_is_looked_at_again_now_and_then_and_forgotten_once_no_program_is_in_it() {
        let (mut all, now) = (Whereabouts::fixed(Vec::new()), Instant::now());
        all.look_at_namespace(1, 1000, now, || vec![address(1)]);
        all.look_at_namespace(1, 1000, now + AGAIN / 2, || unreachable!("it was looked at just now"));
        all.look_at_namespace(1, 1000, now + AGAIN, || vec![address(2)]);
        assert_eq!(all.published().unwrap(), [address(2)]);
        all.forget_unused(now + KEPT, &BTreeMap::new());
        assert_eq!(all.published().unwrap(), [address(2)]);
        all.forget_unused(now + AGAIN + KEPT, &BTreeMap::new());
        assert!(all.published().unwrap().is_empty() && all.late_at().is_none());
    }
}
