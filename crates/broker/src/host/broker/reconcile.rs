// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What follows from the book: memory, regions, doorbells, and what the guests are told. Each step makes the world agree
//! with the book, and does nothing where it does already.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::OwnedFd,
    sync::Arc,
    time::Instant,
};

use tombolo_control::{FIRST_BELL, Life, LinkState, NO_BELL, Name, Pattern, Place, Way};

use crate::{
    config::checked_name,
    host::{
        broker::Broker,
        event::Event,
        guard::{self, Guard},
        guest::LinkNews,
        memory::{self, Regions},
        memory_jobs::{Chore, What},
        qemu::{Plug, Wanted},
        schedule::RETRY,
        state::{Bell, Link, Quarantined, memory_key},
    },
    panics,
};

/// B-17. Most memories of a link that wait to be given back, before it gets another.
const OLD_MAX: usize = 2;

/// Seconds since this kernel began: brokers come and go meanwhile, and people set clocks.
fn now() -> u64 {
    u64::try_from(rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec).unwrap_or_default()
}

/// A region's name in QEMU: whose memory it is shows in it, so that other memory has another name.
fn plug_name(link: u32, generation: u32, own: bool) -> String {
    format!("{link}-{generation}-{}", if own { "own" } else { "peer" })
}

impl Broker {
    /// Draws the consequences of all that was heard.
    ///
    /// # Errors
    /// The holder is gone.
    pub fn reconcile(&mut self) -> io::Result<()> {
        let began = Instant::now();
        self.schedule.pace.begin();
        let settled = self.settle_all();
        self.schedule.pace.finish(began, Instant::now());
        if self.schedule.pace.is_due() {
            // Somebody answered meanwhile.
            self.schedule.remind_after(self.schedule.pace.rest(Instant::now()));
        }
        self.journal.defer_unsaved(settled, &mut self.schedule)
    }

    /// B-17. Draws those of what guests and QEMUs said, or has that done once it is their turn.
    ///
    /// # Errors
    /// The holder is gone.
    pub fn reconcile_in_turn(&mut self) -> io::Result<()> {
        if !self.schedule.pace.is_due() {
            return Ok(());
        }
        let rest = self.schedule.pace.rest(Instant::now());
        if rest.is_zero() {
            return self.reconcile();
        }
        self.schedule.remind_after(rest);
        Ok(())
    }

    pub(super) fn settle_all(&mut self) -> io::Result<()> {
        self.settle_rules()?;
        self.settle_alone();
        self.settle_departures()?;
        self.settle_leaving()?;
        for link in self.book.links.keys().copied().collect::<Vec<_>>() {
            if !self.leaving.contains_key(&link) {
                self.settle_memory(link)?;
            }
            self.settle_seals(link);
            let up = self.link_state(link) == LinkState::Up;
            if let Some(link) = self.book.links.get_mut(&link) {
                link.up = up;
            }
        }
        self.journal.save(&self.book)?;
        self.settle_plugs();
        self.settle_bells()?;
        self.settle_lines();
        self.settle_guests();
        self.mute_departing();
        self.release()?;
        self.journal.save(&self.book)
    }

    /// B-13. Links that the configuration has are there; those that it does not allow, or had and has no more, go.
    fn settle_rules(&mut self) -> io::Result<()> {
        for (ends, size) in self.config.links.clone() {
            if self.link_between(&ends[0], &ends[1]).is_none()
                && let Some((_, why)) = self.new_link(ends.each_ref(), size, true)?
                && self.unmade.insert(ends.clone())
            {
                tracing::warn!("no link between {} and {}: {why}", ends[0], ends[1]);
            }
        }
        let allowed = |end: &String| self.config.knows(end);
        let forbidden = self.book.links.iter().filter(|(_, link)| {
            let [a, b] = &link.ends;
            let (a_name, b_name) = (checked_name(a), checked_name(b));
            let listed = |(ends, _): &([Name; 2], u64)| ends.contains(&a_name) && ends.contains(&b_name);
            !allowed(a)
                || !allowed(b)
                || !self.config.may_link(&a_name, &b_name)
                || (link.configured && !self.config.links.iter().any(listed))
        });
        for link in forbidden.map(|(number, _)| *number).collect::<Vec<_>>() {
            if !self.leaving.contains_key(&link) {
                tracing::info!("link {link} is not configured or not allowed any more: it goes");
                self.leave_link(link, "no rule allows it any more", None)?;
            }
        }
        Ok(())
    }

    /// Takes a link away; its memory waits until it is given back.
    pub(crate) fn remove_link(&mut self, number: u32) -> io::Result<()> {
        self.retire(number);
        self.book.links.remove(&number);
        self.short.remove(&number);
        self.paces.remove(&number);
        self.storms.retain(|(link, _), _| *link != number);
        self.journal.save(&self.book)
    }

    /// B-26. Takes a link's memory away; it gets other memory when its ends are there again.
    pub(crate) fn rest_link(&mut self, number: u32) -> io::Result<()> {
        self.retire(number);
        self.journal.save(&self.book)
    }

    /// The lives of both ends of a link, if both are there.
    fn lives(&self, link: &Link) -> Option<[u64; 2]> {
        let lives = link.ends.each_ref().map(|end| match self.book.machines.get(end) {
            _ if self.config.is_local(end) => Some(0),
            machine => machine.map(|machine| machine.life),
        });
        let [a, b] = lives;
        Some([a?, b?])
    }

    /// B-10. Memory for a link whose ends are both there, and new memory after an end began a new life.
    fn settle_memory(&mut self, number: u32) -> io::Result<()> {
        let link = &self.book.links[&number];
        let Some(lives) = self.lives(link) else { return Ok(()) };
        // A region that was handed over and is not there any more cannot be had again: it is sealed.
        let lost =
            |side: usize| link.sealed[side] && self.has(&link.ends[side], number, link.generation, true) == Some(false);
        if link.has_memory && (link.lives != lives || lost(0) || lost(1)) {
            self.retire(number);
        }
        if self.book.links[&number].has_memory || !self.may_have_memory(number) {
            return Ok(());
        }
        self.begin_memory(number);
        Ok(())
    }

    /// B-17. Whether there is room for new memory beside what is not given back.
    fn may_have_memory(&self, number: u32) -> bool {
        let old = self.book.quarantine.iter().filter(|old| old.link == number).count();
        let over =
            |end: &String| self.config.domains.get(end).is_some_and(|domain| self.book.memory_of(end) > domain.memory);
        let ends = &self.book.links[&number].ends;
        old < OLD_MAX && !ends.iter().any(over) && ends.iter().all(|end| self.leaves(end).is_none())
    }

    /// Has memory made for a link, by a thread beside this one: it takes time, and others are served meanwhile.
    fn begin_memory(&mut self, number: u32) {
        if self.making.contains(&number) {
            return;
        }
        let left = self.short.get(&number).map(|tried| RETRY.saturating_sub(tried.elapsed()));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            self.schedule.remind_after(left);
            return;
        }
        if let Err(wait) = self.paces.entry(number).or_default().take_permit(Instant::now()) {
            self.schedule.remind_after(wait);
            return;
        }
        let link = &self.book.links[&number];
        let (ends, size, generation) = (link.ends.clone(), link.size, link.generation + 1);
        let local = ends.each_ref().map(|end| self.config.is_local(end));
        self.making.insert(number);
        let events = self.schedule.events.clone();
        tokio::task::spawn_blocking(move || {
            let made = panics::catch_panic(|| memory::create_pair(number, &ends, size, local));
            let _ = events.blocking_send(Event::Made(number, generation, made));
        });
    }

    /// B-10, B-16. Memory for a link is there: it goes into safe keeping, unless it is not wanted any more.
    pub(crate) fn made(&mut self, number: u32, generation: u32, made: io::Result<Regions>) -> io::Result<()> {
        self.making.remove(&number);
        let link = self.book.links.get(&number).filter(|it| !it.has_memory && it.generation + 1 == generation);
        let lives = link.and_then(|link| self.lives(link)).filter(|_| self.may_have_memory(number));
        let (Some(link), Some(lives)) = (link, lives) else {
            memory::drop_aside(made);
            return Ok(());
        };
        let key = memory_key(number, generation);
        let regions = match made
            .and_then(|made| self.journal.holder.store_descriptors(&key, &made.descriptors()).map(|()| made))
        {
            Ok(regions) => regions,
            Err(error) => {
                if self.short.insert(number, Instant::now()).is_none() {
                    let size = crate::host::units::bytes(link.size);
                    tracing::warn!("link {number}: no memory for two regions of {size} yet: {error}");
                }
                self.schedule.remind_after(RETRY);
                // If not even that is to be had the holder is gone.
                return self.journal.holder.forget(&key);
            }
        };
        self.short.remove(&number);
        let sealed = link.ends.each_ref().map(|end| self.config.is_local(end));
        if let Some(link) = self.book.links.get_mut(&number) {
            (link.has_memory, link.generation, link.sealed, link.lives) = (true, generation, sealed, lives);
        }
        self.memory.insert(number, regions);
        Ok(())
    }

    /// Whether a domain's QEMU has a region; none: it has not said.
    fn has(&self, domain: &str, link: u32, generation: u32, own: bool) -> Option<bool> {
        let (places, _) = self.vms.get(domain)?.has.as_ref()?;
        Some(places.contains_key(&plug_name(link, generation, own)))
    }

    /// Whether a domain's QEMU has both regions of a link.
    pub(crate) fn has_both(&self, number: u32, link: &Link, domain: &str) -> bool {
        link.has_memory && [true, false].iter().all(|own| self.has(domain, number, link.generation, *own) == Some(true))
    }

    /// B-10. Once the owner's QEMU has its region nobody else will write it.
    fn settle_seals(&mut self, number: u32) {
        let link = self.book.links[&number].clone();
        let Some(own) = self.memory.get(&number).map(|memory| memory.own.clone()) else { return };
        for (side, memory) in own.into_iter().enumerate() {
            let (owner, region) = (&link.ends[side], (number, link.generation, side));
            let is_due = !link.sealed[side] && !self.sealing.contains(&region);
            if !is_due || self.has(owner, number, link.generation, true) != Some(true) {
                continue;
            }
            let what = match self.guard_of(&link, side) {
                Some(Ok(Guard::Seal)) => What::Seal,
                Some(Ok(Guard::Rights)) => What::Guard,
                Some(Err(_)) | None => continue,
            };
            if self.chores.ask(owner, Chore { what, memory, region: Some(region) }) {
                self.sealing.insert(region);
            } else {
                self.schedule.remind_after(RETRY);
            }
        }
    }

    /// B-10. A region was sealed, or could not be.
    pub(crate) fn sealed(&mut self, region: (u32, u32, usize), done: io::Result<()>) {
        self.sealing.remove(&region);
        let (number, generation, side) = region;
        let has_it = |link: &&mut Link| link.has_memory && link.generation == generation;
        let Some(link) = self.book.links.get_mut(&number).filter(has_it) else { return };
        match done {
            Ok(()) => {
                link.sealed[side] = true;
                self.unsealed.remove(&region);
            }
            Err(error) => {
                // Once: it is tried again each second, for as long as that takes.
                if self.unsealed.insert(region) {
                    let owner = &link.ends[side];
                    tracing::warn!("link {number}: the memory of {owner} cannot be sealed yet: {error}");
                }
                self.schedule.remind_after(RETRY);
            }
        }
    }

    /// B-10. What guards the region of an end from the other; why nothing would.
    pub(crate) fn guard_of(&self, link: &Link, side: usize) -> Option<Result<Guard, String>> {
        let [owner, reader] = [side, 1 - side].map(|side| link.ends[side].as_str());
        let process = |end: &str| self.vms.get(end).and_then(|vm| vm.process.as_ref());
        let own = rustix::process::geteuid().as_raw();
        guard::choose((owner, process(owner)?), (reader, process(reader)), self.config.is_local(reader), own)
    }

    /// What each QEMU should have.
    fn settle_plugs(&mut self) {
        for (domain, vm) in &self.vms {
            let mut plugs = Vec::new();
            for (number, link) in self.book.links_of(domain) {
                let (Some(side), Some(memory)) = (link.side(domain), self.memory.get(&number)) else { continue };
                if link.lives[side] != self.book.machines[domain].life {
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
            let bare = plugs.is_empty() && self.is_to_be_bare(domain);
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

    /// Whether memory for a link is being made.
    pub(crate) fn is_making(&self, number: u32) -> bool {
        self.making.contains(&number)
    }

    /// B-7. How far a link is.
    pub(crate) fn link_state(&self, number: u32) -> LinkState {
        let link = &self.book.links[&number];
        let there = |end: &String| self.config.is_local(end) || self.vms.contains_key(end);
        let has = |end: &String, own| match self.has(end, number, link.generation, own) {
            _ if self.config.is_local(end) => true,
            Some(has) => has,
            // A broker that began anew does not undo what it has not seen yet.
            None => link.up,
        };
        if !link.ends.iter().all(there) || !link.has_memory && !self.is_making(number) {
            LinkState::Waiting
        } else if link.has_memory
            && link.sealed == [true; 2]
            && link.ends.iter().all(|end| has(end, true) && has(end, false))
        {
            LinkState::Up
        } else {
            LinkState::Wanted
        }
    }

    /// Links that are up, as one end sees them: number and peer.
    pub(super) fn up_links(&self, domain: &str) -> Vec<(u32, String)> {
        let up = self.book.links_of(domain).filter(|(number, _)| self.link_state(*number) == LinkState::Up);
        up.filter_map(|(number, link)| Some((number, link.ends[1 - link.side(domain)?].clone()))).collect()
    }

    /// B-8. Each QEMU has the doorbells of those peers that it has a link with, and no other.
    fn settle_bells(&mut self) -> io::Result<()> {
        for viewer in self.vms.keys().cloned().collect::<Vec<_>>() {
            let mut wanted: BTreeMap<String, (u64, u32)> = BTreeMap::new();
            for (number, peer) in self.up_links(&viewer) {
                if let (Some(vm), Some(machine)) = (self.vms.get(&peer), self.book.machines.get(&peer)) {
                    if !vm.stormed_by.contains(&viewer) {
                        wanted.insert(peer, (machine.process, number));
                    }
                } else if self.locals.get(&peer).is_some_and(|local| !local.stormed_by.contains(&viewer)) {
                    // Other memory has another bell.
                    wanted.insert(peer, (u64::from(self.book.links[&number].generation), number));
                }
            }
            let mut stale = Vec::new();
            for (number, bell) in &self.book.machines[&viewer].bells {
                if wanted.get(&bell.peer) == Some(&(bell.process, bell.link)) {
                    wanted.remove(&bell.peer);
                } else if !self.keeps_bell(&viewer, bell) {
                    stale.push((
                        *number,
                        self.book.machines.get(&bell.peer).map(|peer| peer.process) != Some(bell.process),
                    ));
                }
            }
            for (number, is_dead) in stale {
                let peer = self.book.machines[&viewer].bells[&number].peer.clone();
                let is_dead = is_dead && !self.config.is_local(&peer);
                let machine = self.book.machines.get_mut(&viewer);
                if !(is_dead && machine.is_some_and(|machine| machine.bury_bell(number))) {
                    self.withdraw(&viewer, number)?;
                }
            }
            for (peer, (process, link)) in wanted {
                self.give_bell(&viewer, Bell { peer, process, link, given: false })?;
            }
        }
        Ok(())
    }

    /// B-8. Whether a domain keeps a doorbell that it would not be given now: to take one back is what its QEMU does not forget (B-26).
    fn keeps_bell(&self, viewer: &str, bell: &Bell) -> bool {
        if self.is_departing(viewer) {
            return true;
        }
        let stormed_by = self.vms.get(&bell.peer).map(|vm| &vm.stormed_by);
        let stormed_by = stormed_by.or_else(|| self.locals.get(&bell.peer).map(|local| &local.stormed_by));
        let Some(link) = self.book.links.get(&bell.link).filter(|link| link.side(viewer).is_some()) else {
            return false;
        };
        let is_same = match self.book.machines.get(&bell.peer) {
            Some(machine) => machine.process == bell.process,
            None => self.config.is_local(&bell.peer) && u64::from(link.generation) == bell.process,
        };
        is_same && stormed_by.is_some_and(|stormed_by| !stormed_by.contains(viewer))
    }

    fn give_bell(&mut self, viewer: &str, bell: Bell) -> io::Result<()> {
        let (peer, link) = (bell.peer.clone(), bell.link);
        let rings = match self.vms.get(&peer) {
            Some(vm) => Some(&**vm.device.bell(link)),
            None => self.memory.get(&link).and_then(|memory| memory.bell.as_deref()),
        };
        // Without a descriptor there is a doorbell later.
        let rings = match rings.map(OwnedFd::try_clone) {
            Some(Ok(rings)) => rings,
            Some(Err(_)) => {
                self.schedule.remind_after(RETRY);
                return Ok(());
            }
            None => return Ok(()),
        };
        let most = self.config.domains.get(viewer).map_or(0, |domain| usize::from(domain.bells));
        let Some(machine) = self.book.machines.get_mut(viewer) else { return Ok(()) };
        let number = if machine.bells.len() < most { machine.number_for(&peer) } else { None };
        let Some(number) = number else {
            if let Some(vm) = self.vms.get_mut(viewer) {
                vm.trouble = Some(format!("it gets no doorbell of {peer}: it has {} of {most}", machine.bells.len()));
            }
            return Ok(());
        };
        machine.bells.insert(number, bell);
        if let Err(error) = self.journal.save(&self.book) {
            // It was not given.
            self.book.machines.get_mut(viewer).map(|machine| machine.bells.remove(&number));
            return Err(error);
        }
        self.send(viewer, vec![(number.into(), Some(rings))])
    }

    /// B-8. Takes a doorbell away. The number is not used again.
    pub(crate) fn withdraw(&mut self, viewer: &str, number: u16) -> io::Result<()> {
        if let Some(bell) = self.book.machines.get_mut(viewer).and_then(|machine| machine.bells.get_mut(&number)) {
            // Until it is done, a broker that begins does it again.
            bell.given = false;
            if let Some(machine) = self.book.machines.get_mut(viewer) {
                machine.is_spent = true;
            }
            self.journal.save(&self.book)?;
        }
        self.send(viewer, vec![(number.into(), None)])?;
        if let Some(machine) = self.book.machines.get_mut(viewer) {
            machine.bells.remove(&number);
        }
        Ok(())
    }

    fn send(&mut self, viewer: &str, messages: Vec<crate::host::ivshmem::Message>) -> io::Result<()> {
        if let Some(vm) = self.vms.get_mut(viewer) {
            if !vm.outbound.push(messages) {
                // A QEMU that is stopped for so long hears of nothing: better none than a wrong picture.
                vm.trouble = Some("its QEMU does not read from the doorbell socket".into());
            }
            self.flush(viewer);
        }
        Ok(())
    }

    /// B-7. Tells each guest, and each account, of its links what it does not know. What they say meanwhile counts as ever; its
    /// consequences are drawn next.
    fn settle_guests(&mut self) {
        let leaving = self.leaving_soon();
        for domain in self.vms.keys().cloned().collect::<Vec<_>>() {
            let Some(told) = self.vms.get(&domain).map(|vm| self.to_be_told(&domain, vm.guest.told())) else {
                continue;
            };
            let Some(vm) = self.vms.get_mut(&domain) else { continue };
            let numbers = self.config.numbers(&domain, told.values().map(|link| link.peer.clone()));
            let said = vm.guest.send_changes(&told, numbers, &leaving);
            if said | self.tell_addresses(&domain, &told) {
                self.converse(&domain, 1);
            }
        }
        for account in self.locals.keys().cloned().collect::<Vec<_>>() {
            let Some(told) = self.locals.get(&account).map(|it| self.to_be_told(&account, it.guest.told())) else {
                continue;
            };
            let Some(local) = self.locals.get_mut(&account) else { continue };
            let numbers = self.config.numbers(&account, told.values().map(|link| link.peer.clone()));
            if local.guest.send_changes(&told, numbers, &leaving) {
                self.converse_with_account(&account, 1);
            }
        }
    }

    /// The links of a domain as it is to know them. One whose other end went stays as it is with its memory, so that what
    /// is in it can be read to the end; only the peer's life is another.
    fn to_be_told(&self, domain: &str, known: &BTreeMap<u32, LinkNews>) -> BTreeMap<u32, LinkNews> {
        let up = self.up_links(domain);
        let mut told: BTreeMap<u32, LinkNews> =
            up.iter().filter_map(|(number, peer)| Some((*number, self.view(domain, *number, peer)?))).collect();
        for (number, old) in known {
            let link = self.book.links.get(number).filter(|it| it.has_memory && it.generation == old.generation);
            if link.is_some() && self.leaving.contains_key(number) {
                // B-21. Its rules may be gone: it stays as it is until it goes.
                let life = self.liveness(old.peer.as_str());
                told.insert(*number, LinkNews { life, ..old.clone() });
            } else if link.is_some() && !told.contains_key(number) {
                let life = self.liveness(old.peer.as_str());
                told.insert(*number, LinkNews { life, bell: NO_BELL, ..old.clone() });
            }
        }
        told
    }

    /// A link as one end is to see it.
    fn view(&self, domain: &str, number: u32, peer: &str) -> Option<LinkNews> {
        let link = &self.book.links[&number];
        let place = |own| -> Option<Place> {
            if self.config.is_local(domain) {
                return "".parse().ok();
            }
            let (places, _) = self.vms.get(domain)?.has.as_ref()?;
            places.get(&plug_name(number, link.generation, own))?.parse().ok()
        };
        let (me, peer_name): (Name, Name) = (checked_name(domain), checked_name(peer));
        let bell = match self.book.machines.get(domain) {
            Some(machine) => {
                let mut bells = machine.bells.iter();
                bells.find(|(_, bell)| bell.peer == peer).map_or(NO_BELL, |(number, _)| *number)
            }
            // An account has the eventfds themselves; it heeds whether it may ring.
            None if self.vms.get(peer)?.stormed_by.contains(domain) => NO_BELL,
            None => FIRST_BELL,
        };
        let rules = |way: Way, services: Vec<&Pattern>| {
            services.into_iter().map(move |service| (way, service.clone())).collect::<Vec<_>>()
        };
        let mut all = rules(Way::In, self.config.services(&peer_name, &me).collect());
        all.extend(rules(Way::Out, self.config.services(&me, &peer_name).collect()));
        let (own, theirs, life) = (place(true)?, place(false)?, self.liveness(peer));
        let side = link.side(domain)? as u8;
        Some(LinkNews {
            generation: link.generation,
            peer: peer_name,
            own,
            theirs,
            size: link.size,
            bell,
            side,
            rules: all,
            life,
        })
    }

    /// B-11. A link's memory goes out of use.
    pub(crate) fn retire(&mut self, number: u32) {
        let Some(link) = self.book.links.get_mut(&number).filter(|link| link.has_memory) else { return };
        (link.has_memory, link.sealed, link.up, link.lives) = (false, [false; 2], false, [0; 2]);
        let process = |end: &String| Some((end.clone(), self.book.machines.get(end)?.process));
        // An account that was told of it says when its programs let go.
        let knows = |told: &LinkNews| told.generation == link.generation;
        let told =
            |end: &&String| self.locals.get(*end).is_some_and(|it| it.guest.told().get(&number).is_some_and(knows));
        let local = link.ends.iter().filter(told).map(|end| (end.clone(), 0)).collect::<Vec<_>>();
        self.book.quarantine.push(Quarantined {
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
        if let Some(mut memory) = self.memory.remove(&number) {
            memory::drop_aside(std::mem::take(&mut memory.mapped));
            self.retired.insert((number, generation), memory);
        }
        // Of calls that an earlier broker left, and that its account has not taken up, nobody else hears.
        for local in ends.iter().filter_map(|end| self.locals.get(end)) {
            local.kept.end_calls((number, generation));
        }
    }

    /// B-11. What a QEMU does not have any more, and will not be given, is given back.
    pub(crate) fn given_back(&mut self, domain: &str, version: u64, holds: &BTreeSet<String>) {
        let Some(vm) = self.vms.get(domain) else { return };
        let wanted = vm.wanted.borrow();
        for old in &mut self.book.quarantine {
            let names = [true, false].map(|own| plug_name(old.link, old.generation, own));
            let had = names.iter().any(|name| holds.contains(name));
            // A report on an older list than the one that leaves it out says nothing.
            let outdated = version < wanted.version || wanted.plugs.iter().any(|plug| names.contains(&plug.name));
            if !had && !outdated {
                old.held_by.remove(domain);
            }
        }
    }

    /// B-11. An account's programs have let go.
    pub(crate) fn released(&mut self, account: &str, link: u32, generation: u32) {
        for old in self.book.quarantine.iter_mut().filter(|old| (old.link, old.generation) == (link, generation)) {
            old.held_by.remove(account);
            if let Some(memory) = self.retired.get_mut(&(link, generation)) {
                memory.is_known = true;
            }
        }
    }

    /// B-11. What everybody gave back is freed.
    fn release(&mut self) -> io::Result<()> {
        let free: Vec<_> = self.book.quarantine.extract_if(.., |old| old.held_by.is_empty()).collect();
        if free.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.journal.save(&self.book) {
            self.book.quarantine.extend(free);
            return Err(error);
        }
        // Whoever waited for room may have it now, and was looked at before.
        self.schedule.pace.request();
        for old in free {
            self.cut.remove(&(old.link, old.generation));
            self.journal.holder.forget(&memory_key(old.link, old.generation))?;
            let Some(memory) = self.retired.remove(&(old.link, old.generation)) else { continue };
            let local = |side: &usize| memory.is_known && self.config.is_local(&old.ends[*side]);
            for side in (0..2).filter(local) {
                let memory = Arc::clone(&memory.own[side]);
                // Where too much waits they go with whoever maps it.
                self.chores.ask(&old.ends[side], Chore { what: What::Free, memory, region: None });
            }
            memory::drop_aside(memory);
        }
        Ok(())
    }

    /// B-11. What a domain has not given back: bytes, and the seconds since it should have.
    pub(crate) fn owed_by(&self, domain: &str) -> Option<(u64, u64)> {
        let owed = self.book.quarantine.iter().filter(|old| old.held_by.contains_key(domain));
        let now = now();
        owed.fold(None, |sum, old| {
            let (bytes, seconds) = sum.unwrap_or((0, 0));
            Some((bytes + old.bytes, seconds.max(now.saturating_sub(old.since))))
        })
    }

    /// Whether a domain's life is over and a new one is not there yet.
    #[must_use]
    pub fn is_gone(&self, domain: &str) -> bool {
        self.liveness(domain) == Life::DomainGone
    }
}

#[cfg(test)]
mod tests;
