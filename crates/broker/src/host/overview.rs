// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists domains and links for tools (B-15).

use tombolo_control::{Life, LinkState, Message, NO_DOORBELL, Stage};

use super::{
    accounts::relay::STORM_PAUSE, domains::Domains, doorbells::Storms, leaving::LeavingLinks, link_memory::LinkMemory,
    migration::Migrations, state::Link, units::bytes,
};
use crate::config::checked_name;

/// Number of seconds after which a domain that keeps memory is named (B-11).
const OVERDUE: u64 = 10;

/// Everything that is shown, as it is now.
pub(crate) struct Overview<'a> {
    pub domains: &'a Domains,
    pub memory: &'a LinkMemory,
    pub leaving: &'a LeavingLinks,
    pub migrations: &'a Migrations,
    pub storms: &'a Storms,
}

impl Overview<'_> {
    pub fn list_links(&self) -> Vec<Message> {
        let mut rows = Vec::new();
        for (&number, link) in &self.domains.state.links {
            let old = self.domains.state.quarantine.iter().filter(|old| old.link == number);
            let short = !link.has_memory
                && link.ends.iter().all(|end| self.domains.is_there(end))
                && !self.memory.making.contains(&number);
            let waits =
                short.then(|| "it gets memory once there is room in both quotas, or old memory is given back".into());
            let mut open = (0..2).filter(|side| link.has_memory && !link.sealed[*side]);
            let unguarded = || open.by_ref().filter_map(|side| self.domains.guard_of(link, side)).find_map(Result::err);
            let trouble = link.ends.iter().find_map(|end| self.trouble(end));
            let goes = self.leaving.describe_link(number, self.domains);
            let note = goes
                .clone()
                .or(trouble)
                .or(waits)
                .or_else(unguarded)
                .or_else(|| self.idle_end(number, link))
                .unwrap_or_default();
            let [a, b] = link.ends.each_ref().map(|end| checked_name(end));
            rows.push(Message::LinkRow {
                link: number,
                generation: link.generation,
                a,
                b,
                size: link.size,
                state: if goes.is_some() { LinkState::Leaving } else { self.link_state(number) },
                quarantined: old.map(|old| old.bytes).sum(),
                note: note.into(),
            });
            rows.extend(link.ends.iter().map(|end| self.end_row(number, link, end)));
        }
        for old in self.domains.state.quarantine.iter().filter(|old| !self.domains.state.links.contains_key(&old.link))
        {
            let [a, b] = old.ends.each_ref().map(|end| checked_name(end));
            rows.push(Message::LinkRow {
                link: old.link,
                generation: old.generation,
                a,
                b,
                size: old.bytes / 2,
                state: LinkState::Leaving,
                quarantined: old.bytes,
                note: self.leaving.describe_quarantined(old).into(),
            });
        }
        rows.push(Message::Done {});
        rows
    }

    pub fn list_domains(&self) -> Vec<Message> {
        let row = |name: &str, (slots_used, slots), memory, who: String| Message::DomainRow {
            name: checked_name(name),
            life: self.domains.liveness(name),
            slots_used,
            slots,
            memory_used: self.domains.state.memory_of(name),
            memory,
            note: self.trouble(name).unwrap_or(who).into(),
        };
        let config = &self.domains.config;
        let machines = config.domains.iter().map(|(name, domain)| {
            let slots = domain.slots();
            row(name, (slots.saturating_sub(self.domains.free_slots(name)), slots), domain.memory, String::new())
        });
        let accounts = config.accounts.iter();
        let accounts = accounts.map(|(name, user)| row(name, (0, 0), 0, format!("programs of user {user} here")));
        let host = row(config.host.as_str(), (0, 0), 0, "programs of root and of the broker's user here".into());
        machines.chain(accounts).chain([host, Message::Done {}]).collect()
    }

    /// Returns the state of a link (B-7).
    fn link_state(&self, number: u32) -> LinkState {
        let link = &self.domains.state.links[&number];
        if self.domains.is_up(number) {
            LinkState::Up
        } else if !link.ends.iter().all(|end| self.domains.is_there(end))
            || !link.has_memory && !self.memory.making.contains(&number)
        {
            LinkState::Waiting
        } else {
            LinkState::Wanted
        }
    }

    /// Returns the stage of one domain of a link.
    fn stage(&self, number: u32, link: &Link, end: &str) -> Stage {
        let Some(guest) = self.domains.guest_of(end) else { return Stage::Absent };
        let is_plugged = self.domains.config.is_local(end) || self.has_both(number, link, end);
        let is_sent = guest.sent_links().get(&number).is_some_and(|sent| sent.generation == link.generation);
        match guest.usage(number, link.generation) {
            _ if !guest.is_there() => Stage::Silent,
            _ if !is_plugged => Stage::Unplugged,
            Some(_) => Stage::Open,
            None if is_sent => Stage::Closed,
            // The guest may not know of the link yet.
            None => Stage::Unplugged,
        }
    }

    fn end_row(&self, number: u32, link: &Link, end: &String) -> Message {
        let (vm, machine) = (self.domains.vms.get(end), self.domains.state.machines.get(end));
        let guest = self.domains.guest_of(end);
        let (connections, used) = guest.and_then(|guest| guest.usage(number, link.generation)).unwrap_or_default();
        let doorbell = machine.and_then(|it| {
            it.doorbells.iter().find(|(_, doorbell)| doorbell.link == number).map(|(doorbell, _)| *doorbell)
        });
        Message::EndRow {
            link: number,
            name: checked_name(end),
            stage: self.stage(number, link, end),
            life: self.domains.liveness(end),
            doorbell: doorbell.unwrap_or(NO_DOORBELL),
            vector: vm.map_or(0, |vm| vm.device.vector(number)),
            connections,
            used,
            storms: self.storms.count_storms(number, end),
        }
    }

    /// Returns why programs cannot use a link that QEMU has.
    fn idle_end(&self, number: u32, link: &Link) -> Option<String> {
        link.ends.iter().find_map(|end| match self.stage(number, link, end) {
            _ if self.domains.liveness(end) == Life::Paused => Some(format!("{end} is paused")),
            Stage::Silent => {
                Some(format!("{end}'s guest says nothing: has it the driver, and does tombolod --guest run?"))
            }
            Stage::Closed => {
                Some(format!("{end}'s broker runs and has not opened the link: see dmesg and its log there"))
            }
            _ => None,
        })
    }

    /// Returns what an administrator should know of a domain.
    fn trouble(&self, name: &str) -> Option<String> {
        if let Some((kept, seconds)) = self.domains.state.owed_by(name).filter(|(_, seconds)| *seconds >= OVERDUE) {
            let kept = bytes(kept);
            return Some(format!("{name} has not given back {kept} for {seconds} s"));
        }
        let vms = self.domains.vms.iter().map(|(victim, vm)| (victim, &vm.stormed_by));
        let locals = self.domains.locals.iter().map(|(victim, local)| (victim, &local.stormed_by));
        if let Some((victim, _)) = vms.chain(locals).find(|(_, stormed_by)| stormed_by.contains(name)) {
            return Some(format!("{name} rings {victim} without end: its doorbell is taken away for a while"));
        }
        if self.domains.vms.get(name).and_then(|vm| vm.loud).is_some_and(|loud| loud.elapsed() < STORM_PAUSE) {
            return Some(format!("{name} rings the host without end"));
        }
        if let Some(why) = self.migrations.why_without_links(name).or_else(|| self.migrations.doorbell_trouble(name)) {
            return Some(why);
        }
        if let Some(trouble) = self.domains.vms.get(name).and_then(|vm| vm.trouble.clone()) {
            return Some(format!("{name}: {trouble}"));
        }
        if self.domains.vms.get(name).is_some_and(|vm| vm.is_stopped) {
            return Some(format!("{name}: its QEMU is stopped, by a signal or a debugger"));
        }
        let there = self.domains.config.domains.contains_key(name) && self.domains.liveness(name) != Life::DomainGone;
        (there && self.domains.free_slots(name) < 2).then(|| format!("{name} has no slots for another link"))
    }

    /// Returns whether a domain's QEMU has both regions of a link.
    fn has_both(&self, number: u32, link: &Link, domain: &str) -> bool {
        link.has_memory
            && [true, false]
                .iter()
                .all(|own| self.domains.has_region(domain, number, link.generation, *own) == Some(true))
    }
}
