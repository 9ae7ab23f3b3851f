// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Manages the memory of links, from its creation until all domains have given it back (B-10, B-11).

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    io,
    os::fd::OwnedFd,
    sync::Arc,
    time::Instant,
};

use super::{
    accounts::relay::RelayedLink,
    descriptor_store::DescriptorStore,
    domains::Domains,
    event::Event,
    guard::Guard,
    guest::LinkNews,
    journal::Journal,
    leaving::LeavingLinks,
    mapped::Mapped,
    memory::{self, Regions},
    memory_jobs::{Chore, Chores, What},
    memory_rate::Pace,
    migration::Migrations,
    qemu::{Plug, Wanted},
    schedule::{RETRY, Schedule},
    state::{BrokerState, Link, Quarantined, memory_key, now, plug_name},
    units::bytes,
};
use crate::panics;

/// Number of retired memories of a link at which it gets no new one until one of them is given back (B-17).
const OLD_MAX: usize = 2;

/// A link, a generation of its memory, and the side that owns the region.
type RegionKey = (u32, u32, usize);

/// Memory that links have, had and are to get.
#[derive(Debug)]
pub(crate) struct LinkMemory {
    /// Memory in use, by link.
    pub regions: BTreeMap<u32, Regions>,
    /// Retired memory that not all domains have given back, by link and generation.
    pub retired: BTreeMap<(u32, u32), Regions>,
    /// Links for which memory is being created.
    pub making: BTreeSet<u32>,
    /// Links for which no memory was available, and the time of the last attempt.
    short: BTreeMap<u32, Instant>,
    /// Limits on how often links get new memory.
    paces: BTreeMap<u32, Pace>,
    /// Regions of domains on this host that are being mapped, or the time at which that last failed.
    mapping: BTreeMap<RegionKey, Option<Instant>>,
    /// Regions that are being sealed.
    sealing: BTreeSet<RegionKey>,
    /// Regions that could not be sealed, and for which that was logged.
    unsealed: BTreeSet<RegionKey>,
    pub chores: Chores,
    store: Arc<DescriptorStore>,
}

impl LinkMemory {
    pub fn new(store: Arc<DescriptorStore>, chores: Chores) -> Self {
        let (regions, retired, making, short) = Default::default();
        let (paces, mapping, sealing, unsealed) = Default::default();
        Self { regions, retired, making, short, paces, mapping, sealing, unsealed, chores, store }
    }

    /// Restores the memory of an earlier broker from what the descriptor store kept. A link whose memory is missing has
    /// none.
    pub fn take_up_regions(&mut self, kept: &mut BTreeMap<String, Vec<OwnedFd>>, state: &mut BrokerState) {
        for (number, link) in state.links.iter_mut().filter(|(_, link)| link.has_memory) {
            let memory = kept.remove(&memory_key(*number, link.generation)).and_then(Regions::from_descriptors);
            match memory {
                Some(memory) => drop(self.regions.insert(*number, memory)),
                None => (link.has_memory, link.sealed, link.up) = (false, [false; 2], false),
            }
        }
        for old in &state.quarantine {
            let memory = kept.remove(&memory_key(old.link, old.generation)).and_then(Regions::from_descriptors);
            self.retired.extend(memory.map(|memory| ((old.link, old.generation), memory)));
        }
    }

    /// Forgets how often a removed link got memory.
    pub fn forget_link(&mut self, number: u32) {
        self.short.remove(&number);
        self.paces.remove(&number);
    }

    /// Has memory created for a link whose two domains are there, and new memory after one of them began a new
    /// incarnation (B-10).
    pub fn renew_memory(
        &mut self,
        number: u32,
        domains: &mut Domains,
        migrations: &Migrations,
        schedule: &mut Schedule,
    ) {
        let link = &domains.state.links[&number];
        let Some(lives) = domains.lives(link) else { return };
        // A region that was handed over and is gone cannot be had again, because it is sealed.
        let lost = |side: usize| {
            link.sealed[side] && domains.has_region(&link.ends[side], number, link.generation, true) == Some(false)
        };
        if link.has_memory && (link.lives != lives || lost(0) || lost(1)) {
            self.retire_memory(number, domains);
        }
        if !domains.state.links[&number].has_memory && may_have_memory(number, domains, migrations) {
            self.begin_creation(number, domains, schedule);
        }
    }

    /// Has another thread create memory for a link: that takes time, and others are served meanwhile.
    fn begin_creation(&mut self, number: u32, domains: &Domains, schedule: &mut Schedule) {
        if self.making.contains(&number) {
            return;
        }
        let left = self.short.get(&number).map(|tried| RETRY.saturating_sub(tried.elapsed()));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            schedule.remind_after(left);
            return;
        }
        if let Err(wait) = self.paces.entry(number).or_default().take_permit(Instant::now()) {
            schedule.remind_after(wait);
            return;
        }
        let link = &domains.state.links[&number];
        let (ends, size, generation) = (link.ends.clone(), link.size, link.generation + 1);
        let local = ends.each_ref().map(|end| domains.config.is_local(end));
        self.making.insert(number);
        let events = schedule.events.clone();
        tokio::task::spawn_blocking(move || {
            let made = panics::catch_panic(|| memory::create_pair(number, &ends, size, local));
            let _ = events.blocking_send(Event::Made(number, generation, made));
        });
    }

    /// Puts new memory of a link into the descriptor store, unless it is not wanted any more (B-10, B-16).
    pub fn store_created(
        &mut self,
        (number, generation): (u32, u32),
        made: io::Result<Regions>,
        domains: &mut Domains,
        migrations: &Migrations,
        schedule: &mut Schedule,
    ) -> io::Result<()> {
        self.making.remove(&number);
        let link = domains.state.links.get(&number).filter(|it| !it.has_memory && it.generation + 1 == generation);
        let lives = link.and_then(|link| domains.lives(link)).filter(|_| may_have_memory(number, domains, migrations));
        let (Some(link), Some(lives)) = (link, lives) else {
            memory::drop_in_background(made);
            return Ok(());
        };
        let key = memory_key(number, generation);
        let regions = match made.and_then(|made| self.store.store_descriptors(&key, &made.descriptors()).map(|()| made))
        {
            Ok(regions) => regions,
            Err(error) => {
                if self.short.insert(number, Instant::now()).is_none() {
                    let size = bytes(link.size);
                    tracing::warn!("link {number}: no memory for two regions of {size} yet: {error}");
                }
                schedule.remind_after(RETRY);
                // If even that fails, the descriptor store is gone.
                return self.store.forget(&key);
            }
        };
        self.short.remove(&number);
        let sealed = link.ends.each_ref().map(|end| domains.config.is_local(end));
        if let Some(link) = domains.state.links.get_mut(&number) {
            (link.has_memory, link.generation, link.sealed, link.lives) = (true, generation, sealed, lives);
        }
        self.regions.insert(number, regions);
        Ok(())
    }

    /// Begins to seal each region that its owner's QEMU has, so that nobody else will write it (B-10).
    pub fn begin_sealing(&mut self, number: u32, domains: &Domains, schedule: &mut Schedule) {
        let link = &domains.state.links[&number];
        let Some(own) = self.regions.get(&number).map(|memory| memory.own.clone()) else { return };
        for (side, memory) in own.into_iter().enumerate() {
            let (owner, region) = (&link.ends[side], (number, link.generation, side));
            let is_due = !link.sealed[side] && !self.sealing.contains(&region);
            if !is_due || domains.has_region(owner, number, link.generation, true) != Some(true) {
                continue;
            }
            let what = match domains.guard_of(link, side) {
                Some(Ok(Guard::Seal)) => What::Seal,
                Some(Ok(Guard::Rights)) => What::Guard,
                Some(Err(_)) | None => continue,
            };
            if self.chores.ask(owner, Chore { what, memory, region: Some(region) }) {
                self.sealing.insert(region);
            } else {
                schedule.remind_after(RETRY);
            }
        }
    }

    /// Handles the outcome of sealing a region (B-10).
    pub fn finish_sealing(
        &mut self,
        region: RegionKey,
        done: io::Result<()>,
        domains: &mut Domains,
        schedule: &mut Schedule,
    ) {
        self.sealing.remove(&region);
        let (number, generation, side) = region;
        let has_it = |link: &&mut Link| link.has_memory && link.generation == generation;
        let Some(link) = domains.state.links.get_mut(&number).filter(has_it) else { return };
        match done {
            Ok(()) => {
                link.sealed[side] = true;
                self.unsealed.remove(&region);
            }
            Err(error) => {
                // Logged once: sealing is tried again each second, for as long as that takes.
                if self.unsealed.insert(region) {
                    let owner = &link.ends[side];
                    tracing::warn!("link {number}: the memory of {owner} cannot be sealed yet: {error}");
                }
                schedule.remind_after(RETRY);
            }
        }
    }

    /// Tells each QEMU's task which regions QEMU should have: none before its guest's broker said Hello. Firmware
    /// places regions that it finds below 4 GiB, where the guest does not cache them (B-10).
    pub fn update_plugs(&self, domains: &Domains, migrations: &Migrations) {
        for (domain, vm) in &domains.vms {
            let mut plugs = Vec::new();
            for (number, link) in domains.state.links_of(domain) {
                let (Some(side), Some(memory)) = (link.side(domain), self.regions.get(&number)) else { continue };
                let machine = &domains.state.machines[domain];
                if link.lives[side] != machine.life || machine.boot.is_none() {
                    continue;
                }
                let mut plug = |own: bool, memory: &Arc<_>| {
                    let name = plug_name(number, link.generation, own);
                    plugs.push(Plug { name, memory: Arc::clone(memory), size: link.size, readonly: !own });
                };
                plug(true, &memory.own[side]);
                if link.sealed[1 - side] {
                    plug(false, &memory.readonly[1 - side]);
                }
            }
            let bare = plugs.is_empty() && migrations.is_to_be_bare(domain, domains);
            vm.wanted.send_if_modified(|wanted| {
                let same = wanted.plugs.iter().map(|plug| &plug.name).eq(plugs.iter().map(|plug| &plug.name));
                let changed = wanted.version == 0 || !same || wanted.bare != bare;
                if changed {
                    *wanted = Wanted { version: wanted.version + 1, plugs: plugs.into(), bare };
                }
                changed
            });
        }
    }

    /// Retires a link's memory (B-11).
    pub fn retire_memory(&mut self, number: u32, domains: &mut Domains) {
        let Some(link) = domains.state.links.get_mut(&number).filter(|link| link.has_memory) else { return };
        (link.has_memory, link.sealed, link.up, link.lives) = (false, [false; 2], false, [0; 2]);
        let process = |end: &String| Some((end.clone(), domains.state.machines.get(end)?.process));
        // An account that was told of the memory reports when its programs have released it.
        let knows = |sent: &LinkNews| sent.generation == link.generation;
        let has_it = |end: &&String| {
            domains.locals.get(*end).is_some_and(|it| it.guest.sent_links().get(&number).is_some_and(knows))
        };
        let local = link.ends.iter().filter(has_it).map(|end| (end.clone(), 0)).collect::<Vec<_>>();
        domains.state.quarantine.push(Quarantined {
            link: number,
            generation: link.generation,
            ends: link.ends.clone(),
            bytes: 2 * link.size,
            held_by: link.ends.iter().filter_map(process).chain(local).collect(),
            since: now(),
        });
        let (generation, ends) = (link.generation, link.ends.clone());
        self.unsealed.retain(|(link, ..)| *link != number);
        self.mapping.retain(|(link, ..), failed| *link != number || failed.is_none());
        if let Some(mut memory) = self.regions.remove(&number) {
            memory::drop_in_background(std::mem::take(&mut memory.mapped));
            self.retired.insert((number, generation), memory);
        }
        // Nobody else ends connections that an earlier broker left and that their account has not taken up.
        for local in ends.iter().filter_map(|end| domains.locals.get(end)) {
            local.kept.end_connections((number, generation));
        }
    }

    /// Records that an account's programs have released memory (B-11).
    pub fn apply_release(&mut self, account: &str, link: u32, generation: u32, state: &mut BrokerState) {
        for old in state.quarantine.iter_mut().filter(|old| (old.link, old.generation) == (link, generation)) {
            old.held_by.remove(account);
            if let Some(memory) = self.retired.get_mut(&(link, generation)) {
                memory.is_known = true;
            }
        }
    }

    /// Frees memory that all domains have given back (B-11).
    pub fn free_returned(
        &mut self,
        domains: &mut Domains,
        leaving: &mut LeavingLinks,
        journal: &mut Journal,
        schedule: &mut Schedule,
    ) -> io::Result<()> {
        let free: Vec<_> = domains.state.quarantine.extract_if(.., |old| old.held_by.is_empty()).collect();
        if free.is_empty() {
            return Ok(());
        }
        if let Err(error) = journal.save(&domains.state) {
            domains.state.quarantine.extend(free);
            return Err(error);
        }
        // A link that waited for room may have it now, but was looked at before.
        schedule.pace.request();
        for old in free {
            leaving.forget_cut(&old);
            self.store.forget(&memory_key(old.link, old.generation))?;
            let Some(memory) = self.retired.remove(&(old.link, old.generation)) else { continue };
            let local = |side: &usize| memory.is_known && domains.config.is_local(&old.ends[*side]);
            for side in (0..2).filter(local) {
                let memory = Arc::clone(&memory.own[side]);
                // If too many jobs wait, the pages are freed with the last process that maps them.
                self.chores.ask(&old.ends[side], Chore { what: What::Free, memory, region: None });
            }
            memory::drop_in_background(memory);
        }
        Ok(())
    }

    /// Has another thread map a region that this broker writes.
    fn begin_mapping(&mut self, number: u32, side: usize, state: &BrokerState, schedule: &mut Schedule) {
        let (Some(link), Some(memory)) = (state.links.get(&number), self.regions.get(&number)) else { return };
        let region = (number, link.generation, side);
        match self.mapping.get(&region) {
            Some(None) => return,
            Some(Some(failed)) if failed.elapsed() < RETRY => return schedule.remind_after(RETRY),
            _ => {}
        }
        let (memory, events) = (Arc::clone(&memory.own[side]), schedule.events.clone());
        tokio::task::spawn_blocking(move || {
            let mapped = panics::catch_panic(|| Mapped::new(&*memory));
            let _ = events.blocking_send(Event::Mapped(region, mapped));
        });
        self.mapping.insert(region, None);
    }

    /// Handles the outcome of mapping a region that this broker writes.
    pub fn finish_mapping(&mut self, region: RegionKey, mapped: io::Result<Mapped>, state: &BrokerState) {
        let (number, generation, side) = region;
        self.mapping.remove(&region);
        let is_current = state.has((number, generation));
        match (self.regions.get_mut(&number).filter(|_| is_current), mapped) {
            (Some(memory), Ok(mapped)) => memory.mapped[side] = Some(mapped),
            (Some(_), Err(error)) => {
                tracing::warn!("link {number}: its memory cannot be mapped yet: {error}");
                self.mapping.insert(region, Some(Instant::now()));
            }
            (None, mapped) => memory::drop_in_background(mapped),
        }
    }

    /// Gives each account the memory and eventfds of its links, once this broker has mapped the regions that it writes
    /// (V-2).
    pub fn update_relays(&mut self, domains: &Domains, schedule: &mut Schedule) {
        let (mut unmapped, mut is_short) = (Vec::new(), false);
        for (account, local) in &domains.locals {
            let mut lines = tombolo_os::lock::lock(&local.lines);
            let links: BTreeMap<u32, u32> =
                domains.state.links_of(account).map(|(number, link)| (number, link.generation)).collect();
            let gone = lines.extract_if(.., |(number, generation), _| links.get(number) != Some(generation));
            // Unmapping much memory takes long, too.
            gone.for_each(|(_, line)| memory::drop_in_background(line));
            let mut is_new = false;
            for (number, peer) in domains.up_links(account) {
                let link = &domains.state.links[&number];
                let (Some(side), Some(memory), Some(vm)) =
                    (link.side(account), self.regions.get(&number), domains.vms.get(&peer))
                else {
                    continue;
                };
                if let (Entry::Vacant(line), Some(doorbell)) =
                    (lines.entry((number, link.generation)), &memory.doorbell)
                {
                    let Some(own_memory) = memory.mapped[side].clone() else {
                        unmapped.push((number, side));
                        continue;
                    };
                    let copies = || -> io::Result<_> {
                        Ok(RelayedLink {
                            own: memory.own[side].try_clone()?,
                            own_memory,
                            peer: memory.readonly[1 - side].try_clone()?,
                            outgoing: Arc::clone(vm.device.doorbell(number)),
                            lane: vm.device.lane(number).clone(),
                            incoming: doorbell.try_clone()?,
                        })
                    };
                    // If no descriptor is available, one will be later.
                    match copies() {
                        Ok(made) => {
                            line.insert(Arc::new(made));
                            is_new = true;
                        }
                        Err(_) => is_short = true,
                    }
                }
            }
            drop(lines);
            if is_new {
                // The account may have been told of the link before.
                local.notify();
            }
        }
        unmapped.into_iter().for_each(|(number, side)| self.begin_mapping(number, side, &domains.state, schedule));
        if is_short {
            schedule.remind_after(RETRY);
        }
    }
}

/// Returns whether there is room for new memory beside that which is not given back (B-17).
fn may_have_memory(number: u32, domains: &Domains, migrations: &Migrations) -> bool {
    let old = domains.state.quarantine.iter().filter(|old| old.link == number).count();
    let over = |end: &String| {
        domains.config.domains.get(end).is_some_and(|domain| domains.state.memory_of(end) > domain.memory)
    };
    let ends = &domains.state.links[&number].ends;
    old < OLD_MAX && !ends.iter().any(over) && ends.iter().all(|end| migrations.why_without_links(end).is_none())
}
