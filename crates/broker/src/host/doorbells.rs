// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides who may notify whom, and counts who did so without end (B-8).

use std::{collections::BTreeMap, io, os::fd::OwnedFd};

use super::{
    accounts::relay::STORM_PAUSE,
    domains::Domains,
    event::Event,
    journal::Journal,
    link_memory::LinkMemory,
    migration::Migrations,
    schedule::{RETRY, Schedule},
    state::GrantedDoorbell,
};

/// Doorbells, and all that decides which domain has which.
pub(crate) struct Doorbells<'a> {
    pub domains: &'a mut Domains,
    pub memory: &'a LinkMemory,
    pub migrations: &'a Migrations,
    pub journal: &'a mut Journal,
    pub schedule: &'a mut Schedule,
}

impl Doorbells<'_> {
    /// Gives each QEMU the doorbells of those peers with which it has a link, and no other (B-8).
    pub fn update_doorbells(&mut self) -> io::Result<()> {
        for viewer in self.domains.vms.keys().cloned().collect::<Vec<_>>() {
            let mut wanted: BTreeMap<String, (u64, u32)> = BTreeMap::new();
            for (number, peer) in self.domains.up_links(&viewer) {
                let process = match self.domains.state.machines.get(&peer) {
                    Some(machine) => machine.process,
                    // Other memory has another doorbell.
                    None => u64::from(self.domains.state.links[&number].generation),
                };
                if self.domains.stormed_by(&peer).is_some_and(|stormed_by| !stormed_by.contains(&viewer)) {
                    wanted.insert(peer, (process, number));
                }
            }
            let mut stale = Vec::new();
            for (number, doorbell) in &self.domains.state.machines[&viewer].doorbells {
                if wanted.get(&doorbell.peer) == Some(&(doorbell.process, doorbell.link)) {
                    wanted.remove(&doorbell.peer);
                } else if !(self.migrations.is_departing(&viewer) || keeps_doorbell(&viewer, doorbell, self.domains)) {
                    let process = self.domains.state.machines.get(&doorbell.peer).map(|peer| peer.process);
                    stale.push((*number, process != Some(doorbell.process)));
                }
            }
            for (number, is_dead) in stale {
                let peer = self.domains.state.machines[&viewer].doorbells[&number].peer.clone();
                let is_dead = is_dead && !self.domains.config.is_local(&peer);
                let machine = self.domains.state.machines.get_mut(&viewer);
                if !(is_dead && machine.is_some_and(|machine| machine.bury_doorbell(number))) {
                    self.withdraw_doorbell(&viewer, number)?;
                }
            }
            for (peer, (process, link)) in wanted {
                self.give_doorbell(&viewer, GrantedDoorbell { peer, process, link, given: false })?;
            }
        }
        Ok(())
    }

    /// Gives a QEMU a doorbell once that is saved.
    pub fn give_doorbell(&mut self, viewer: &str, doorbell: GrantedDoorbell) -> io::Result<()> {
        let (peer, link) = (doorbell.peer.clone(), doorbell.link);
        let eventfd = match self.domains.vms.get(&peer) {
            Some(vm) => Some(&**vm.device.doorbell(link)),
            None => self.memory.regions.get(&link).and_then(|memory| memory.doorbell.as_deref()),
        };
        // If no descriptor is available, the doorbell is given later.
        let eventfd = match eventfd.map(OwnedFd::try_clone) {
            Some(Ok(eventfd)) => eventfd,
            Some(Err(_)) => {
                self.schedule.remind_after(RETRY);
                return Ok(());
            }
            None => return Ok(()),
        };
        let most = self.domains.config.domains.get(viewer).map_or(0, |domain| usize::from(domain.doorbells));
        let Some(machine) = self.domains.state.machines.get_mut(viewer) else { return Ok(()) };
        let number = if machine.doorbells.len() < most { machine.number_for(&peer) } else { None };
        let Some(number) = number else {
            if let Some(vm) = self.domains.vms.get_mut(viewer) {
                vm.trouble =
                    Some(format!("it gets no doorbell of {peer}: it has {} of {most}", machine.doorbells.len()));
            }
            return Ok(());
        };
        machine.doorbells.insert(number, doorbell);
        if let Err(error) = self.journal.save(&self.domains.state) {
            // The doorbell was not given.
            self.domains.state.machines.get_mut(viewer).map(|machine| machine.doorbells.remove(&number));
            return Err(error);
        }
        self.domains.send_message(viewer, (number.into(), Some(eventfd)), &self.schedule.events);
        Ok(())
    }

    /// Withdraws a doorbell. Its number is not used again (B-8).
    pub fn withdraw_doorbell(&mut self, viewer: &str, number: u16) -> io::Result<()> {
        if let Some(doorbell) =
            self.domains.state.machines.get_mut(viewer).and_then(|machine| machine.doorbells.get_mut(&number))
        {
            // A broker that starts before this is done does it again.
            doorbell.given = false;
            if let Some(machine) = self.domains.state.machines.get_mut(viewer) {
                machine.is_spent = true;
            }
            self.journal.save(&self.domains.state)?;
        }
        self.domains.send_message(viewer, (number.into(), None), &self.schedule.events);
        if let Some(machine) = self.domains.state.machines.get_mut(viewer) {
            machine.doorbells.remove(&number);
        }
        Ok(())
    }
}

/// Number of times that a domain notified the other domain of a link without end.
#[derive(Debug, Default)]
pub(crate) struct Storms(BTreeMap<(u32, String), u32>);

impl Storms {
    /// Takes the doorbell away for a while from the peer on `link`, which notified without end (B-8).
    pub fn begin_storm(&mut self, name: &str, link: u32, domains: &mut Domains, schedule: &Schedule) {
        let peer = domains.state.links.get(&link).and_then(|link| Some(link.ends[1 - link.side(name)?].clone()));
        let Some(peer) = peer else { return };
        if domains.stormed_by_mut(name).is_some_and(|stormed_by| stormed_by.insert(peer.clone())) {
            let times = self.0.entry((link, peer.clone())).or_default();
            *times = times.saturating_add(1);
            let by = peer.clone();
            tracing::warn!(
                stranger = by.as_str(),
                "{name}: {peer} rings without end: its doorbell is taken away for {} s",
                STORM_PAUSE.as_secs()
            );
            schedule.send_after(STORM_PAUSE, Event::Calm(name.to_owned(), peer));
        }
    }

    /// Returns how often a domain notified the other domain of a link without end.
    pub fn count_storms(&self, number: u32, end: &str) -> u32 {
        self.0.get(&(number, end.to_owned())).copied().unwrap_or_default()
    }

    /// Forgets the storms of a link that is gone.
    pub fn forget_link(&mut self, number: u32) {
        self.0.retain(|(link, _), _| *link != number);
    }
}

/// Returns whether a domain keeps a doorbell that it would not be given now. A QEMU from which one was withdrawn cannot
/// be made ready to migrate (B-8, B-26).
fn keeps_doorbell(viewer: &str, doorbell: &GrantedDoorbell, domains: &Domains) -> bool {
    let Some(link) = domains.state.links.get(&doorbell.link).filter(|link| link.side(viewer).is_some()) else {
        return false;
    };
    let is_same = match domains.state.machines.get(&doorbell.peer) {
        Some(machine) => machine.process == doorbell.process,
        None => domains.config.is_local(&doorbell.peer) && u64::from(link.generation) == doorbell.process,
    };
    is_same && domains.stormed_by(&doorbell.peer).is_some_and(|stormed_by| !stormed_by.contains(viewer))
}
