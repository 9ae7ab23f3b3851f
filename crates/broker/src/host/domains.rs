// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds what is known of the domains of this host and their links: the configuration, the saved state, and who is
//! there.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Instant,
};

use tokio::sync::mpsc;
use tombolo_control::{Life, Message, Name, code};

use super::{
    accounts::Local,
    event::{Event, refuse},
    guard::{self, Guard},
    guest::Guest,
    ivshmem,
    journal::Journal,
    state::{BrokerState, Link, is_unsaved, plug_name},
    units::bytes,
    vm::Vm,
};
use crate::{config::Config, endpoint::host_session::LINKS_MAX};

/// Reason for a refusal: a code for programs, and a text for people.
pub(crate) type Refusal = (u16, String);

/// All domains, and what can be derived from what is known of them.
#[derive(Debug)]
pub(crate) struct Domains {
    pub config: Config,
    pub state: BrokerState,
    /// Connected QEMUs.
    pub vms: BTreeMap<String, Vm>,
    /// The host and its accounts.
    pub locals: BTreeMap<String, Local>,
}

impl Domains {
    /// Returns whether this process is the QEMU of a domain.
    pub fn is_current(&self, name: &str, process: u64) -> bool {
        self.state.machines.get(name).is_some_and(|machine| machine.process == process)
    }

    /// Returns the liveness of a domain (B-12).
    pub fn liveness(&self, name: &str) -> Life {
        if self.config.is_local(name) {
            return Life::Running;
        }
        match (self.state.machines.get(name), self.vms.get(name)) {
            (Some(machine), Some(_)) if machine.ended => Life::DomainGone,
            (Some(_), Some(vm)) if vm.is_stopped => Life::Paused,
            (Some(_), Some(vm)) => match vm.running {
                Some(true) => Life::Running,
                Some(false) => Life::Paused,
                None => Life::Unknown,
            },
            _ => Life::DomainGone,
        }
    }

    /// Records that a guest's broker is there. A new boot begins a new incarnation (B-6).
    pub fn begin_life(&mut self, name: &str, boot: [u8; 16]) {
        let Some(machine) = self.state.machines.get_mut(name) else { return };
        if machine.boot == Some(boot) {
            return;
        }
        let first = machine.boot.replace(boot).is_none();
        machine.ended = false;
        if let Some(vm) = self.vms.get_mut(name) {
            vm.booted = Some(Instant::now());
        }
        if !first {
            let life = self.state.number();
            if let Some(machine) = self.state.machines.get_mut(name) {
                machine.life = life;
            }
        }
    }

    /// Returns the peers that may not notify a domain for now (B-8).
    pub fn stormed_by(&self, name: &str) -> Option<&BTreeSet<String>> {
        let vm = self.vms.get(name).map(|vm| &vm.stormed_by);
        vm.or_else(|| self.locals.get(name).map(|local| &local.stormed_by))
    }

    /// Returns the same peers, to change them.
    pub fn stormed_by_mut(&mut self, name: &str) -> Option<&mut BTreeSet<String>> {
        let vm = self.vms.get_mut(name).map(|vm| &mut vm.stormed_by);
        vm.or_else(|| self.locals.get_mut(name).map(|local| &mut local.stormed_by))
    }

    /// Returns whether a domain's incarnation is over and no new one has begun.
    #[must_use]
    pub fn is_gone(&self, domain: &str) -> bool {
        self.liveness(domain) == Life::DomainGone
    }

    /// Returns the incarnations of both domains of a link, if both are there.
    pub fn lives(&self, link: &Link) -> Option<[u64; 2]> {
        let lives = link.ends.each_ref().map(|end| match self.state.machines.get(end) {
            _ if self.config.is_local(end) => Some(0),
            machine => machine.map(|machine| machine.life),
        });
        let [a, b] = lives;
        Some([a?, b?])
    }

    /// Returns whether a domain's QEMU has a region; none if QEMU has not reported yet.
    pub fn has_region(&self, domain: &str, link: u32, generation: u32, own: bool) -> Option<bool> {
        let (places, _) = self.vms.get(domain)?.has.as_ref()?;
        Some(places.contains_key(&plug_name(link, generation, own)))
    }

    /// Returns what protects the region of one side from the other, or why nothing would (B-10).
    pub fn guard_of(&self, link: &Link, side: usize) -> Option<Result<Guard, String>> {
        let [owner, reader] = [side, 1 - side].map(|side| link.ends[side].as_str());
        let process = |end: &str| self.vms.get(end).and_then(|vm| vm.process.as_ref());
        let own = rustix::process::geteuid().as_raw();
        guard::choose((owner, process(owner)?), (reader, process(reader)), self.config.is_local(reader), own)
    }

    /// Returns whether a domain is there: its QEMU is connected, or it is on this host.
    pub fn is_there(&self, end: &str) -> bool {
        self.config.is_local(end) || self.vms.contains_key(end)
    }

    /// Returns whether both domains of a link have both regions.
    pub fn is_up(&self, number: u32) -> bool {
        let link = &self.state.links[&number];
        let has = |end: &String, own| match self.has_region(end, number, link.generation, own) {
            _ if self.config.is_local(end) => true,
            Some(has) => has,
            // After a restart, the saved state counts until QEMU has reported.
            None => link.up,
        };
        let is_ready = |end: &String| self.is_there(end) && has(end, true) && has(end, false);
        link.has_memory && link.sealed == [true; 2] && link.ends.iter().all(is_ready)
    }

    /// Returns the links that are up, as one domain sees them: number and peer.
    pub fn up_links(&self, domain: &str) -> Vec<(u32, String)> {
        let up = self.state.links_of(domain).filter(|(number, _)| self.is_up(*number));
        up.filter_map(|(number, link)| Some((number, link.ends[1 - link.side(domain)?].clone()))).collect()
    }

    /// Counts as given back what a QEMU does not have any more and will not be given (B-11).
    pub fn apply_returns(&mut self, domain: &str, version: u64, holds: &BTreeSet<String>) {
        let Some(vm) = self.vms.get(domain) else { return };
        let wanted = vm.wanted.borrow();
        for old in &mut self.state.quarantine {
            let names = [true, false].map(|own| plug_name(old.link, old.generation, own));
            let had = names.iter().any(|name| holds.contains(name));
            // A report on a list that is older than the one without this memory proves nothing.
            let outdated = version < wanted.version || wanted.plugs.iter().any(|plug| names.contains(&plug.name));
            if !had && !outdated {
                old.held_by.remove(domain);
            }
        }
    }

    /// Returns the guest of a domain, or what stands for it in an account.
    pub fn guest_of(&self, domain: &str) -> Option<&Guest> {
        let vm = self.vms.get(domain).map(|vm| &vm.guest);
        vm.or_else(|| self.locals.get(domain).map(|local| &local.guest))
    }

    /// Returns the same, to send it messages.
    pub fn guest_of_mut(&mut self, domain: &str) -> Option<&mut Guest> {
        let vm = self.vms.get_mut(domain).map(|vm| &mut vm.guest);
        vm.or_else(|| self.locals.get_mut(domain).map(|local| &mut local.guest))
    }

    /// Returns the domains that have not left a link yet, and how many connections each last reported. A domain that
    /// cannot be told, because its broker is not there or predates Leave, is not waited for, and neither is one that is
    /// gone.
    pub fn open_on(&self, number: u32) -> Vec<(String, u16)> {
        let Some(link) = self.state.links.get(&number).filter(|link| link.has_memory) else { return Vec::new() };
        // Whether a domain is still in the incarnation for which the link's memory was made.
        let has_its_life = |end: &String| {
            let life = link.side(end).map(|side| link.lives[side]);
            self.config.is_local(end) || self.state.machines.get(end).map(|machine| machine.life) == life
        };
        let open = |end: &String| {
            let guest = self.guest_of(end).filter(|it| it.is_to_leave(number, link.generation))?;
            let connections = guest.usage(number, link.generation).map_or(0, |(connections, _)| connections);
            (has_its_life(end) && self.liveness(end) != Life::DomainGone).then(|| (end.clone(), connections))
        };
        link.ends.iter().filter_map(open).collect()
    }

    /// Returns the answer that no domain has this name.
    pub fn unknown(&self, domain: &Name) -> Vec<Message> {
        let path = self.config.path.display();
        refuse(code::NOT_FOUND, format!("no domain is called {domain}: {path} has a [domain.NAME] for each"))
    }

    /// Returns why a domain may not have one more link (B-17).
    pub fn check_quota(&self, name: &Name, size: u64) -> Option<Refusal> {
        let links = self.state.links_of(name.as_str()).count();
        let Some(domain) = self.config.domains.get(name.as_str()) else {
            let full = links >= LINKS_MAX;
            return full.then(|| (code::QUOTA, format!("{name} has {links} links, the most there can be")));
        };
        if links >= usize::from(domain.links) {
            return Some((code::QUOTA, format!("{name} has {links} links of {}", domain.links)));
        }
        let (used, more) = (self.state.memory_of(name.as_str()), 2 * size);
        if used + more > domain.memory {
            let [used, all, more] = [used, domain.memory, more].map(bytes);
            return Some((code::QUOTA, format!("{name} uses {used} of {all}; the link would take {more}")));
        }
        let (free, all) = (self.free_slots(name.as_str()), domain.slots());
        if free < 2 {
            let remedy = match domain.machine {
                crate::config::MachineType::Pc => "remove a link or a device",
                crate::config::MachineType::Q35 => "raise `ports`, and start it anew with more root ports",
            };
            return Some((code::NO_SLOT, format!("{name} has {free} of {all} slots free, a link takes 2: {remedy}")));
        }
        None
    }

    /// Returns the slots that further links may have: those that QEMU reports as free, less those that are to be
    /// filled.
    pub fn free_slots(&self, name: &str) -> u16 {
        let needed = 2 * self.state.links_of(name).count() as u16;
        match self.vms.get(name).and_then(|vm| Some((vm, vm.has.as_ref()?))) {
            Some((vm, (places, free))) => {
                let there = vm.wanted.borrow().plugs.iter().filter(|plug| places.contains_key(&plug.name)).count();
                (free + there as u16).saturating_sub(needed)
            }
            None => self.config.domains.get(name).map_or(0, |domain| domain.slots()).saturating_sub(needed),
        }
    }

    /// Sends a QEMU a message, if it is connected.
    pub fn send_message(&mut self, name: &str, message: ivshmem::Message, events: &mpsc::Sender<Event>) {
        if let Some(vm) = self.vms.get_mut(name) {
            vm.send_message(message);
            self.flush_messages(name, events);
        }
    }

    /// Sends the messages that wait for a QEMU.
    pub fn flush_messages(&mut self, name: &str, events: &mpsc::Sender<Event>) {
        if let (Some(vm), Some(machine)) = (self.vms.get_mut(name), self.state.machines.get_mut(name)) {
            vm.flush_messages(name, machine, events);
        }
    }

    /// Adds a link to the saved state, or returns why not.
    pub fn insert_link(
        &mut self,
        ends: [&Name; 2],
        size: u64,
        configured: bool,
        journal: &mut Journal,
    ) -> io::Result<Option<Refusal>> {
        if let Some(refusal) = ends.into_iter().find_map(|name| self.check_quota(name, size)) {
            return Ok(Some(refusal));
        }
        let vectors = ends.map(|name| self.config.domains.get(name.as_str()).map(|domain| domain.vectors));
        let Some(number) = self.state.link_number_for(ends.map(Name::as_str), vectors) else {
            return Ok(Some((code::QUOTA, "all numbers of links are used up".into())));
        };
        let ends = ends.map(|name| name.as_str().to_owned());
        let (has_memory, generation, sealed, up, lives) = (false, 0, [false; 2], false, [0; 2]);
        self.state.links.insert(number, Link { ends, size, configured, has_memory, generation, sealed, up, lives });
        match journal.save(&self.state) {
            Err(error) if is_unsaved(&error) => {
                self.state.links.remove(&number);
                Ok(Some((code::FAILED, error.to_string())))
            }
            saved => saved.map(|()| None),
        }
    }

    /// Returns the link of two domains that may be removed on request, or the answer why there is none.
    pub fn removable_link(&self, a: &Name, b: &Name) -> Result<u32, Vec<Message>> {
        let Some(number) = self.state.link_between(a, b) else {
            return Err(refuse(code::NOT_FOUND, format!("{a} and {b} have no link")));
        };
        if self.state.links[&number].configured {
            let path = self.config.path.display();
            return Err(refuse(
                code::DENIED,
                format!("the configuration says that it is there: take its [[link]] out of {path}"),
            ));
        }
        Ok(number)
    }
}
