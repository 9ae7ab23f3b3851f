// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Questions from the socket and their answers (B-15, B-17).

use std::{io, time::Instant};

use tombolo_control::{Life, LinkState, Message, NO_BELL, Name, Stage, What, code};

use crate::{
    config::is_region,
    endpoint::host_session::LINKS_MAX,
    host::{
        accounts::relay::CALM,
        broker::Broker,
        event::{Question, refuse},
        snippet,
        state::{Link, is_unsaved},
        units::bytes,
    },
};

/// B-11. After how many seconds a domain that keeps memory is named.
const OVERDUE: u64 = 10;

/// Why something is not done: for programs, and for people.
pub(crate) type Refusal = (u16, String);

/// Whether a user may change something: root and the broker's own may.
fn may_change(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

impl Broker {
    pub(crate) fn asked(&mut self, question: Question) -> io::Result<()> {
        let Question { message, user, answer } = question;
        let began = Instant::now();
        if let (Message::RemoveLink { a, b }, true) = (&message, may_change(user))
            && let Ok(link) = self.link_to_take(a, b)
        {
            // Who asked hears of it once it is done.
            return self.leave_link(link, "it is removed", Some(answer));
        }
        match &message {
            Message::Prepare { domain } if may_change(user) => return self.prepare(domain, answer),
            Message::CancelPrepare { domain } if may_change(user) => {
                self.cancel_prepare(domain, answer);
                return Ok(());
            }
            _ => {}
        }
        let answers = match self.answers_to(message, user) {
            // It is done, and may be undone by a broker that begins before it is written down.
            Err(error) if is_unsaved(&error) => refuse(code::FAILED, format!("{error}; this is tried again")),
            answers => answers?,
        };
        // Who does not wait for the answer does not get it.
        let _ = answer.send((answers, began.elapsed()));
        Ok(())
    }

    fn answers_to(&mut self, message: Message, user: u32) -> io::Result<Vec<Message>> {
        let own = may_change(user);
        Ok(match message {
            Message::List { what: What::Links } => self.list_links(),
            Message::List { what: What::Domains } => self.list_domains(),
            Message::AddLink { .. }
            | Message::RemoveLink { .. }
            | Message::Snippet { .. }
            | Message::Prepare { .. }
            | Message::CancelPrepare { .. }
                if !own =>
            {
                refuse(code::DENIED, format!("user {user} may look, and change nothing: ask root"))
            }
            Message::AddLink { a, b, size } => self.add_link(&a, &b, size)?,
            Message::RemoveLink { a, b } => self.link_to_take(&a, &b).err().unwrap_or_default(),
            Message::Snippet { form, domain } => match self.config.domains.get(domain.as_str()) {
                Some(found) => {
                    let lines = snippet::lines(form, &domain, found, &self.journal.folder, &self.config);
                    let lines = lines.into_iter().map(|line| Message::Line { line: line.into() });
                    lines.chain([Message::Done {}]).collect()
                }
                None => self.unknown(&domain),
            },
            _ => {
                let programs = crate::host::paths::program_socket(&self.journal.folder);
                refuse(code::UNSUPPORTED, format!("this socket is for tools; programs use {}", programs.display()))
            }
        })
    }

    pub(crate) fn unknown(&self, domain: &Name) -> Vec<Message> {
        let path = self.config_path.display();
        refuse(code::NOT_FOUND, format!("no domain is called {domain}: {path} has a [domain.NAME] for each"))
    }

    fn add_link(&mut self, a: &Name, b: &Name, size: u64) -> io::Result<Vec<Message>> {
        let size = if size == 0 { self.config.region } else { size };
        if let Some(missing) = [a, b].into_iter().find(|name| !self.config.knows(name.as_str())) {
            return Ok(self.unknown(missing));
        }
        if !is_region(size) {
            let size = bytes(size);
            return Ok(refuse(code::FAILED, format!("{size}: a region is a power of two from 64KiB to 1GiB")));
        }
        if !self.config.may_link(a, b) {
            let path = self.config_path.display();
            return Ok(refuse(
                code::DENIED,
                format!("no rule allows {a} and {b} anything: add an [[allow]] to {path}"),
            ));
        }
        if let Some(why) = [a, b].into_iter().find_map(|name| self.leaves(name.as_str())) {
            return Ok(refuse(code::MIGRATES, why));
        }
        if self.link_between(a, b).is_some() {
            return Ok(refuse(code::EXISTS, format!("{a} and {b} have a link already")));
        }
        Ok(match self.new_link([a, b], size, false)? {
            Some((code, why)) => refuse(code, why),
            None => vec![Message::Done {}],
        })
    }

    /// The link that two domains have.
    pub(crate) fn link_between(&self, a: &Name, b: &Name) -> Option<u32> {
        let mut links = self.book.links_of(a.as_str());
        links.find(|(_, link)| a != b && link.side(b.as_str()).is_some()).map(|(number, _)| number)
    }

    /// Writes a link into the book, or says why not.
    pub(crate) fn new_link(&mut self, ends: [&Name; 2], size: u64, configured: bool) -> io::Result<Option<Refusal>> {
        if let Some(refusal) = ends.into_iter().find_map(|name| self.over_quota(name, size)) {
            return Ok(Some(refusal));
        }
        let vectors = ends.map(|name| self.config.domains.get(name.as_str()).map(|domain| domain.vectors));
        let Some(number) = self.book.link_number_for(ends.map(Name::as_str), vectors) else {
            return Ok(Some((code::QUOTA, "all numbers of links are used up".into())));
        };
        let ends = ends.map(|name| name.as_str().to_owned());
        let (has_memory, generation, sealed, up, lives) = (false, 0, [false; 2], false, [0; 2]);
        self.book.links.insert(number, Link { ends, size, configured, has_memory, generation, sealed, up, lives });
        match self.journal.save(&self.book) {
            Err(error) if is_unsaved(&error) => {
                self.book.links.remove(&number);
                Ok(Some((code::FAILED, error.to_string())))
            }
            saved => saved.map(|()| None),
        }
    }

    /// B-17. Why a domain may not have one more link.
    fn over_quota(&self, name: &Name, size: u64) -> Option<Refusal> {
        let links = self.book.links_of(name.as_str()).count();
        let Some(domain) = self.config.domains.get(name.as_str()) else {
            let full = links >= LINKS_MAX;
            return full.then(|| (code::QUOTA, format!("{name} has {links} links, the most there can be")));
        };
        if links >= usize::from(domain.links) {
            return Some((code::QUOTA, format!("{name} has {links} links of {}", domain.links)));
        }
        let (used, more) = (self.book.memory_of(name.as_str()), 2 * size);
        if used + more > domain.memory {
            let [used, all, more] = [used, domain.memory, more].map(bytes);
            return Some((code::QUOTA, format!("{name} uses {used} of {all}; the link would take {more}")));
        }
        let (free, all) = (self.free_slots(name.as_str()), domain.slots());
        if free < 2 {
            let remedy = match domain.machine {
                crate::config::Board::Pc => "remove a link or a device",
                crate::config::Board::Q35 => "raise `ports`, and start it anew with more root ports",
            };
            return Some((code::NO_SLOT, format!("{name} has {free} of {all} slots free, a link takes 2: {remedy}")));
        }
        None
    }

    /// Slots that links to come may have: those that QEMU says are free, less what is to be plugged into them.
    fn free_slots(&self, name: &str) -> u16 {
        let needed = 2 * self.book.links_of(name).count() as u16;
        match self.vms.get(name).and_then(|vm| Some((vm, vm.has.as_ref()?))) {
            Some((vm, (places, free))) => {
                let there = vm.wanted.borrow().plugs.iter().filter(|plug| places.contains_key(&plug.name)).count();
                (free + there as u16).saturating_sub(needed)
            }
            None => self.config.domains.get(name).map_or(0, |domain| domain.slots()).saturating_sub(needed),
        }
    }

    /// The link of two domains that may be taken away on demand, or why there is none.
    fn link_to_take(&self, a: &Name, b: &Name) -> Result<u32, Vec<Message>> {
        let Some(number) = self.link_between(a, b) else {
            return Err(refuse(code::NOT_FOUND, format!("{a} and {b} have no link")));
        };
        if self.book.links[&number].configured {
            let path = self.config_path.display();
            return Err(refuse(
                code::DENIED,
                format!("the configuration says that it is there: take its [[link]] out of {path}"),
            ));
        }
        Ok(number)
    }

    fn list_links(&self) -> Vec<Message> {
        let mut rows = Vec::new();
        for (&number, link) in &self.book.links {
            let old = self.book.quarantine.iter().filter(|old| old.link == number);
            let there = |end: &String| self.config.is_local(end) || self.vms.contains_key(end);
            let short = !link.has_memory && link.ends.iter().all(there) && !self.is_making(number);
            let waits =
                short.then(|| "it gets memory once there is room in both quotas, or old memory is given back".into());
            let mut open = (0..2).filter(|side| link.has_memory && !link.sealed[*side]);
            let unguarded = || open.by_ref().filter_map(|side| self.guard_of(link, side)).find_map(Result::err);
            let trouble = link.ends.iter().find_map(|end| self.trouble(end));
            let goes = self.leaving_note(number);
            let note = goes
                .clone()
                .or(trouble)
                .or(waits)
                .or_else(unguarded)
                .or_else(|| self.idle_end(number, link))
                .unwrap_or_default();
            let [a, b] = link.ends.each_ref().map(|end| crate::config::checked_name(end));
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
        for old in self.book.quarantine.iter().filter(|old| !self.book.links.contains_key(&old.link)) {
            let held_by: Vec<&str> = old.held_by.keys().map(String::as_str).collect();
            let [a, b] = old.ends.each_ref().map(|end| crate::config::checked_name(end));
            rows.push(Message::LinkRow {
                link: old.link,
                generation: old.generation,
                a,
                b,
                size: old.bytes / 2,
                state: LinkState::Leaving,
                quarantined: old.bytes,
                note: self.quarantine_note(old, &held_by).into(),
            });
        }
        rows.push(Message::Done {});
        rows
    }

    /// How far one end of a link is.
    fn stage(&self, number: u32, link: &Link, end: &str) -> Stage {
        let guest = match (self.vms.get(end), self.locals.get(end)) {
            (Some(vm), _) => &vm.guest,
            (_, Some(local)) => &local.guest,
            _ => return Stage::Absent,
        };
        let is_plugged = self.config.is_local(end) || self.has_both(number, link, end);
        let is_told = guest.told().get(&number).is_some_and(|told| told.generation == link.generation);
        match guest.usage(number, link.generation) {
            _ if !is_plugged => Stage::Unplugged,
            _ if !guest.is_there() => Stage::Silent,
            Some(_) => Stage::Open,
            None if is_told => Stage::Closed,
            // It may not know of it yet.
            None => Stage::Unplugged,
        }
    }

    fn end_row(&self, number: u32, link: &Link, end: &String) -> Message {
        let (vm, machine) = (self.vms.get(end), self.book.machines.get(end));
        let guest = vm.map(|vm| &vm.guest).or_else(|| self.locals.get(end).map(|local| &local.guest));
        let (calls, used) = guest.and_then(|guest| guest.usage(number, link.generation)).unwrap_or_default();
        let bell = machine.and_then(|it| it.bells.iter().find(|(_, bell)| bell.link == number).map(|(bell, _)| *bell));
        Message::EndRow {
            link: number,
            name: crate::config::checked_name(end),
            stage: self.stage(number, link, end),
            life: self.liveness(end),
            bell: bell.unwrap_or(NO_BELL),
            vector: vm.map_or(0, |vm| vm.device.vector(number)),
            calls,
            used,
            storms: self.storms.get(&(number, end.clone())).copied().unwrap_or_default(),
        }
    }

    /// Why a link that QEMU has is of no use to programs.
    fn idle_end(&self, number: u32, link: &Link) -> Option<String> {
        link.ends.iter().find_map(|end| match self.stage(number, link, end) {
            _ if self.liveness(end) == Life::Paused => Some(format!("{end} is paused")),
            Stage::Silent => {
                Some(format!("{end}'s guest says nothing: has it the driver, and does tombolod --guest run?"))
            }
            Stage::Closed => {
                Some(format!("{end}'s broker runs and has not opened the link: see dmesg and its log there"))
            }
            _ => None,
        })
    }

    fn list_domains(&self) -> Vec<Message> {
        let mut rows = Vec::new();
        for (name, domain) in &self.config.domains {
            let note = self.trouble(name).unwrap_or_default().into();
            let slots = domain.slots();
            rows.push(Message::DomainRow {
                name: crate::config::checked_name(name),
                life: self.liveness(name),
                slots_used: slots.saturating_sub(self.free_slots(name)),
                slots,
                memory_used: self.book.memory_of(name),
                memory: domain.memory,
                note,
            });
        }
        let accounts = self.config.accounts.iter();
        let accounts = accounts.map(|(name, user)| (name.as_str(), format!("programs of user {user} here")));
        let host = (self.config.host.as_str(), "programs of root and of the broker's user here".to_owned());
        for (name, who) in accounts.chain([host]) {
            rows.push(Message::DomainRow {
                name: crate::config::checked_name(name),
                life: self.liveness(name),
                slots_used: 0,
                slots: 0,
                memory_used: self.book.memory_of(name),
                memory: 0,
                note: self.trouble(name).unwrap_or(who).into(),
            });
        }
        rows.push(Message::Done {});
        rows
    }

    /// What an administrator should know of a domain.
    fn trouble(&self, name: &str) -> Option<String> {
        if let Some((kept, seconds)) = self.owed_by(name).filter(|(_, seconds)| *seconds >= OVERDUE) {
            let kept = bytes(kept);
            return Some(format!("{name} has not given back {kept} for {seconds} s"));
        }
        let vms = self.vms.iter().map(|(victim, vm)| (victim, &vm.stormed_by));
        let locals = self.locals.iter().map(|(victim, local)| (victim, &local.stormed_by));
        if let Some((victim, _)) = vms.chain(locals).find(|(_, stormed_by)| stormed_by.contains(name)) {
            return Some(format!("{name} rings {victim} without end: its doorbell is taken away for a while"));
        }
        if self.vms.get(name).and_then(|vm| vm.loud).is_some_and(|loud| loud.elapsed() < CALM) {
            return Some(format!("{name} rings the host without end"));
        }
        if let Some(why) = self.leaves(name).or_else(|| self.lone_trouble(name)) {
            return Some(why);
        }
        if let Some(trouble) = self.vms.get(name).and_then(|vm| vm.trouble.clone()) {
            return Some(format!("{name}: {trouble}"));
        }
        if self.vms.get(name).is_some_and(|vm| vm.is_stopped) {
            return Some(format!("{name}: its QEMU is stopped, by a signal or a debugger"));
        }
        let there = self.config.domains.contains_key(name) && self.liveness(name) != Life::DomainGone;
        (there && self.free_slots(name) < 2).then(|| format!("{name} has no slots for another link"))
    }
}
