// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker: one loop that hears of everything, changes its book, and then makes the world agree with it.

mod accounts;
mod addresses;
mod answers;
mod leaving;
mod local_links;
mod migration;
mod reconcile;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use tombolo_control::{Life, Name};

use crate::{
    config::Config,
    discard,
    host::{
        accounts::{
            Local,
            relay::CALM,
            stored::{self, Key, StoredConnection},
        },
        descriptor_store::DescriptorStore,
        event::{Event, TURN},
        guest::GuestRequest,
        ivshmem::Device,
        journal::Journal,
        memory::{Regions, drop_aside},
        memory_jobs::Chores,
        memory_rate::Pace,
        qemu::News,
        schedule::{RETRY, Schedule},
        state::{BrokerState, Machine, is_unsaved, machine_key, memory_key},
        vm::{Vm, start},
    },
};

use self::{
    leaving::LeavingLink,
    migration::{Departure, LoneVm},
};

/// All that the broker has.
#[derive(Debug)]
pub struct Broker {
    pub(crate) config_path: PathBuf,
    pub(crate) config: Config,
    pub(crate) book: BrokerState,
    pub(crate) journal: Journal,
    pub(crate) schedule: Schedule,
    pub(crate) vms: BTreeMap<String, Vm>,
    /// Calls of programs of the host that an earlier broker left, until their account takes them up.
    pub(crate) calls: BTreeMap<Key, Vec<StoredConnection>>,
    /// The host and its accounts.
    pub(crate) locals: BTreeMap<String, Local>,
    /// Memory of links.
    pub(crate) memory: BTreeMap<u32, Regions>,
    /// B-11. Memory that is out of use and not given back by all.
    pub(crate) retired: BTreeMap<(u32, u32), Regions>,
    /// Links for which memory is being made.
    pub(crate) making: BTreeSet<u32>,
    /// Memory of ends on this host that is being mapped, or when that failed last.
    pub(crate) mapping: BTreeMap<(u32, u32, usize), Option<Instant>>,
    /// Regions that are being sealed.
    pub(crate) sealing: BTreeSet<(u32, u32, usize)>,
    /// Regions that could not be sealed, and of which that was said.
    pub(crate) unsealed: BTreeSet<(u32, u32, usize)>,
    pub(crate) chores: Chores,
    /// B-21. Links that are taken away soon.
    pub(crate) leaving: BTreeMap<u32, LeavingLink>,
    /// B-26. Machines that are made ready to migrate.
    pub(crate) departures: BTreeMap<String, Departure>,
    /// B-27. How each machine is looked for while its QEMU is not connected.
    pub(crate) alone: BTreeMap<String, LoneVm>,
    /// B-21. Connections that were open when a link was taken away, by the memory that it had.
    pub(crate) cut: BTreeMap<(u32, u32), String>,
    /// How often links got new memory.
    pub(crate) paces: BTreeMap<u32, Pace>,
    /// How often an end of a link rang the other without end.
    pub(crate) storms: BTreeMap<(u32, String), u32>,
    /// Links for which no memory was to be had, and when that was tried.
    pub(crate) short: BTreeMap<u32, Instant>,
    /// Links of the configuration that cannot be had, and of which that was said.
    pub(crate) unmade: BTreeSet<[Name; 2]>,
    /// When a QEMU is asked again for what it tells of by no event.
    ask_again: Duration,
}

impl Broker {
    /// Begins, with all that an earlier broker left (B-16).
    ///
    /// # Errors
    /// The book cannot be read, or the holder does not answer.
    pub fn begin(
        folder: &Path,
        config_path: &Path,
        config: Config,
        holder: DescriptorStore,
        events: mpsc::Sender<Event>,
        ask_again: Duration,
    ) -> io::Result<Self> {
        let book = BrokerState::read(folder)?;
        let kept = holder.all()?;
        let mut broker = Self {
            config_path: config_path.into(),
            config,
            journal: Journal::new(folder.into(), book.clone(), holder),
            chores: Chores::new(events.clone()),
            schedule: Schedule::new(events),
            book,
            calls: BTreeMap::new(),
            vms: BTreeMap::new(),
            locals: BTreeMap::new(),
            memory: BTreeMap::new(),
            retired: BTreeMap::new(),
            making: BTreeSet::new(),
            mapping: BTreeMap::new(),
            sealing: BTreeSet::new(),
            unsealed: BTreeSet::new(),
            leaving: BTreeMap::new(),
            departures: BTreeMap::new(),
            alone: BTreeMap::new(),
            cut: BTreeMap::new(),
            paces: BTreeMap::new(),
            storms: BTreeMap::new(),
            short: BTreeMap::new(),
            unmade: BTreeSet::new(),
            ask_again,
        };
        broker.take_up(kept)?;
        broker.settle_accounts()?;
        broker.reconcile()?;
        broker.tell_of_the_lost();
        Ok(broker)
    }

    /// B-16. What is kept and known goes on; what is only one of the two is dropped.
    fn take_up(&mut self, mut kept: BTreeMap<String, Vec<OwnedFd>>) -> io::Result<()> {
        let known = self.book.keys();
        let calls = kept.extract_if(.., |key, _| stored::parse(key).is_some_and(|(link, _)| self.book.has(link)));
        for (key, descriptors) in calls.collect::<Vec<_>>() {
            if let Some((link, made)) = stored::parse(&key)
                && let Some(call) = StoredConnection::from_descriptors(made, descriptors)
            {
                self.calls.entry(link).or_default().push(call);
            }
        }
        let stray: BTreeMap<_, _> = kept.extract_if(.., |key, _| !known.contains(key)).collect();
        for (key, descriptors) in &stray {
            // Somebody may have filled a socket, and the holder is not to close it last.
            discard::end_all(descriptors);
            self.journal.holder.forget(key)?;
        }
        drop_aside(stray);
        let mut lost = Vec::new();
        for (name, machine) in &self.book.machines {
            let device = kept.remove(&machine_key(name, machine.process));
            // Of one that is not served somebody may have filled the socket, and neither this broker nor the holder is to
            // close it last.
            let copies: Vec<_> = device.iter().flatten().take(1).filter_map(|socket| socket.try_clone().ok()).collect();
            let device = device.map_or(Ok(None), |descriptors| Device::from_descriptors(name, descriptors));
            let is_served = |it: &Device| machine.greeted && !it.is_gone() && self.config.domains.contains_key(name);
            let begun = device.and_then(|device| {
                let device = device.filter(is_served);
                device
                    .map(|it| {
                        start(
                            name,
                            machine,
                            it,
                            &self.config,
                            &self.journal.folder,
                            &self.schedule.events,
                            self.ask_again,
                        )
                    })
                    .transpose()
            });
            match begun {
                Ok(Some(vm)) => drop(self.vms.insert(name.clone(), vm)),
                Ok(None) => {
                    discard::end_all(&copies);
                    lost.push((name.clone(), machine.process));
                }
                // One machine is lost, and no more: all others go on.
                Err(error) => {
                    tracing::error!(
                        stranger = name,
                        "{name}: its QEMU cannot be served any more: {error}; start it anew"
                    );
                    discard::end_all(&copies);
                    lost.push((name.clone(), machine.process));
                }
            }
        }
        for (number, link) in self.book.links.iter_mut().filter(|(_, link)| link.has_memory) {
            let memory = kept.remove(&memory_key(*number, link.generation)).and_then(Regions::from_descriptors);
            match memory {
                Some(memory) => drop(self.memory.insert(*number, memory)),
                None => (link.has_memory, link.sealed, link.up) = (false, [false; 2], false),
            }
        }
        for (name, process) in lost {
            let left = self.left(&name, process);
            self.journal.defer_unsaved(left, &mut self.schedule)?;
        }
        for old in &self.book.quarantine {
            let memory = kept.remove(&memory_key(old.link, old.generation)).and_then(Regions::from_descriptors);
            self.retired.extend(memory.map(|memory| ((old.link, old.generation), memory)));
        }
        // What programs of the host still map of it is theirs: who would say that they let go is no more.
        let config = &self.config;
        self.book.quarantine.iter_mut().for_each(|old| old.held_by.retain(|holder, _| !config.is_local(holder)));
        // Whether QEMU was told all of such a doorbell nobody knows: it is taken back, and a new number given.
        for name in self.vms.keys().cloned().collect::<Vec<_>>() {
            let half: Vec<u16> =
                self.book.machines[&name].bells.iter().filter(|(_, bell)| !bell.given).map(|(n, _)| *n).collect();
            let withdrawn = half.into_iter().try_for_each(|number| self.withdraw(&name, number));
            self.journal.defer_unsaved(withdrawn, &mut self.schedule)?;
        }
        Ok(())
    }

    /// Hears of something; [`reconcile`](Self::reconcile) draws the consequences.
    ///
    /// # Errors
    /// The holder is gone, or a part that all need: the broker cannot go on.
    pub fn handle_event(&mut self, event: Event) -> io::Result<()> {
        let is_reload = matches!(event, Event::Reload);
        let handled = self.handle(event);
        if is_reload && handled.as_ref().is_err_and(is_unsaved) {
            self.schedule.send_after(RETRY, Event::Reload);
        }
        self.journal.defer_unsaved(handled, &mut self.schedule)
    }

    fn handle(&mut self, event: Event) -> io::Result<()> {
        match event {
            Event::Joined(name, socket) => {
                self.schedule.pace.request();
                self.joined(&name, socket)?;
            }
            Event::Left(name, process) => {
                self.schedule.pace.request();
                self.left(&name, process)?;
            }
            Event::Room(name, process) if self.is_current(&name, process) => {
                self.schedule.pace.request();
                self.flush(&name);
            }
            Event::Rang(name, process) if self.is_current(&name, process) => self.converse(&name, TURN),
            Event::Rang(name, _) if self.locals.contains_key(&name) => self.converse_with_account(&name, TURN),
            Event::Loud(name, process) if self.is_current(&name, process) => self.loud(&name),
            Event::Stormed(name, link) => self.storm(&name, link),
            Event::Knocked(program, user) => self.knocked(program, user),
            Event::Entered(client, account) => self.entered(client, &account),
            Event::Told(name, process, news) if self.is_current(&name, process) => {
                self.schedule.pace.request();
                self.told(&name, news);
            }
            Event::Alone(name, said) => self.heard_alone(&name, said),
            Event::Calm(name, by) => {
                if let Some(stormed_by) = self.stormed_by(&name) {
                    stormed_by.remove(&by);
                }
            }
            Event::Asked(question) => {
                if question.changes_something() && self.schedule.pace.is_due() {
                    // It is answered by how things are: what was given back by now is free.
                    self.reconcile()?;
                }
                self.asked(question)?;
            }
            Event::Reload => self.reload()?,
            Event::Made(link, generation, made) => self.made(link, generation, made)?,
            Event::Mapped(region, mapped) => self.mapped(region, mapped),
            // Others go on; what it has it keeps, and a QEMU that is started anew is served again.
            Event::Faulty(name, _) if self.locals.contains_key(&name) => {
                return Err(io::Error::other(format!(
                    "what hears the account {name} has failed: the broker has to begin anew"
                )));
            }
            Event::Faulty(name, process) => {
                tracing::error!("{name}: a task that serves its QEMU has failed; start it anew");
                self.left(&name, process)?;
            }
            Event::Broken(what) => {
                return Err(io::Error::other(format!("{what} has failed: the broker has to begin anew")));
            }
            Event::Sealed(link, generation, side, done) => self.sealed((link, generation, side), done),
            Event::Unsettled => self.schedule.pace.request(),
            // Of a QEMU that is no more.
            Event::Room(..) | Event::Rang(..) | Event::Loud(..) | Event::Told(..) => {}
        }
        Ok(())
    }

    fn is_current(&self, name: &str, process: u64) -> bool {
        self.book.machines.get(name).is_some_and(|machine| machine.process == process)
    }

    /// B-9. Makes a device for a QEMU, puts it into safe keeping, and then greets.
    fn joined(&mut self, name: &str, socket: OwnedFd) -> io::Result<()> {
        let Some(vectors) = self.config.domains.get(name).map(|domain| domain.vectors) else {
            discard::end(socket.as_fd());
            return Ok(());
        };
        if let Some(vm) = self.vms.get(name) {
            if !vm.device.is_gone() {
                tracing::warn!(stranger = name, "{name}: a second QEMU connected while the first one lives: refused");
                discard::end(socket.as_fd());
                return Ok(());
            }
            self.left(name, self.book.machines[name].process).inspect_err(|_| discard::end(socket.as_fd()))?;
        }
        let machine = Machine::new(self.book.number(), self.book.number());
        let process = machine.process;
        let copy = match socket.try_clone() {
            Ok(copy) => copy,
            Err(error) => {
                tracing::error!(stranger = name, "{name}: its QEMU cannot be served: {error}");
                discard::end(socket.as_fd());
                return Ok(());
            }
        };
        let Err(error) = self.serve(name, machine, socket, vectors) else {
            tracing::info!(stranger = name, "{name}: QEMU connected");
            return Ok(());
        };
        // It can be tried again, and all others go on.
        tracing::error!(stranger = name, "{name}: its QEMU cannot be served: {error}");
        discard::end(copy.as_fd());
        self.vms.remove(name);
        self.book.machines.remove(name);
        self.journal.give_up(&self.book, machine_key(name, process))
    }

    /// B-9, B-16. A device for a QEMU, in safe keeping before the QEMU hears of it.
    fn serve(&mut self, name: &str, machine: Machine, socket: OwnedFd, vectors: u16) -> io::Result<()> {
        let device = Device::new(name, socket, vectors)?;
        self.journal.holder.store_descriptors(&machine_key(name, machine.process), &device.descriptors())?;
        let mut vm =
            start(name, &machine, device, &self.config, &self.journal.folder, &self.schedule.events, self.ask_again)?;
        vm.outbound.push(vm.device.greeting()?);
        self.book.machines.insert(name.into(), machine);
        self.journal.save(&self.book)?;
        self.vms.insert(name.into(), vm);
        self.flush(name);
        self.journal.save(&self.book)
    }

    /// B-12. The QEMU is no more.
    fn left(&mut self, name: &str, process: u64) -> io::Result<()> {
        if !self.is_current(name, process) {
            return Ok(());
        }
        if let Some(vm) = self.vms.remove(name) {
            // A write that this QEMU made wait would wait for ever, as nobody reads any more.
            vm.device.own.iter().for_each(|own| _ = crate::host::eventfd::drain(own));
            discard::end(vm.device.socket.as_fd());
        }
        self.book.machines.remove(name);
        for old in &mut self.book.quarantine {
            old.held_by.retain(|holder, held| holder != name || *held != process);
        }
        self.left_departing(name);
        tracing::info!(stranger = name, "{name}: QEMU is gone");
        self.journal.give_up(&self.book, machine_key(name, process))
    }

    /// Sends what waits for a QEMU.
    pub(crate) fn flush(&mut self, name: &str) {
        let (Some(vm), Some(machine)) = (self.vms.get_mut(name), self.book.machines.get_mut(name)) else { return };
        match vm.outbound.flush(&vm.device.socket) {
            Ok(true) => {
                machine.greeted = true;
                machine.bells.values_mut().for_each(|bell| bell.given = true);
            }
            Ok(false) => {
                let (name, process) = (name.to_owned(), machine.process);
                let (events, socket) = (self.schedule.events.clone(), vm.device.socket.try_clone());
                vm.tasks.push(tokio::spawn(async move {
                    let Ok(socket) = socket.and_then(crate::host::async_fd::watch) else { return };
                    let _ = socket.writable().await;
                    let _ = events.send(Event::Room(name, process)).await;
                }));
            }
            // The task that reads from the socket says that it left.
            Err(_) => {}
        }
    }

    /// Exchanges messages with a guest: hears at most `limit`, and sends what there is room for. What it says has consequences, and
    /// that it can be told more; that it rings has none.
    pub(crate) fn converse(&mut self, name: &str, limit: usize) {
        let Some(vm) = self.vms.get_mut(name) else { return };
        let before = vm.guest.standing();
        let heard = match vm.guest.turn(&vm.device.boxes, &self.config.host, limit) {
            Ok((heard, ring)) => {
                if !heard.is_empty() || vm.guest.standing() != before {
                    self.schedule.pace.request();
                }
                if ring {
                    vm.device.notify();
                }
                heard
            }
            Err(error) => {
                tracing::error!(stranger = name, "{name}: the device's memory cannot be reached: {error}");
                return;
            }
        };
        for heard in heard {
            match heard {
                GuestRequest::Hello(boot) => self.hello(name, boot),
                GuestRequest::Storm(link) => self.storm(name, link),
                // What follows is drawn with all the rest.
                GuestRequest::Left | GuestRequest::Moved => {}
                // What it has QEMU knows better.
                GuestRequest::Released(..) => {}
            }
        }
    }

    /// A guest rings the host without end. That bell it keeps: without it nobody hears of its links.
    fn loud(&mut self, name: &str) {
        let Some(vm) = self.vms.get_mut(name) else { return };
        let now = Instant::now();
        if vm.loud.replace(now).is_none_or(|last| now.duration_since(last) > CALM) {
            tracing::warn!(stranger = name, "{name}: it rings the host without end, and is heard less often");
        }
    }

    /// B-6. A guest's broker is there; in a new boot it is a new life.
    fn hello(&mut self, name: &str, boot: [u8; 16]) {
        let Some(machine) = self.book.machines.get_mut(name) else { return };
        if machine.boot == Some(boot) {
            return;
        }
        let first = machine.boot.replace(boot).is_none();
        machine.ended = false;
        if let Some(vm) = self.vms.get_mut(name) {
            vm.booted = Some(Instant::now());
        }
        if !first {
            let life = self.book.number();
            if let Some(machine) = self.book.machines.get_mut(name) {
                machine.life = life;
            }
        }
    }

    /// B-8. Takes the doorbell away from the peer on `link`, for a while.
    pub(crate) fn storm(&mut self, name: &str, link: u32) {
        let peer = self.book.links.get(&link).and_then(|link| Some(link.ends[1 - link.side(name)?].clone()));
        let Some(peer) = peer else { return };
        if self.stormed_by(name).is_some_and(|stormed_by| stormed_by.insert(peer.clone())) {
            let times = self.storms.entry((link, peer.clone())).or_default();
            *times = times.saturating_add(1);
            let by = peer.clone();
            tracing::warn!(
                stranger = by.as_str(),
                "{name}: {peer} rings without end: its doorbell is taken away for {} s",
                CALM.as_secs()
            );
            self.schedule.send_after(CALM, Event::Calm(name.to_owned(), peer));
        }
    }

    /// B-8. Who may not ring a domain for now.
    fn stormed_by(&mut self, name: &str) -> Option<&mut BTreeSet<String>> {
        let vm = self.vms.get_mut(name).map(|vm| &mut vm.stormed_by);
        vm.or_else(|| self.locals.get_mut(name).map(|local| &mut local.stormed_by))
    }

    fn told(&mut self, name: &str, news: News) {
        self.told_departure(name, &news);
        let (Some(vm), Some(machine)) = (self.vms.get_mut(name), self.book.machines.get_mut(name)) else { return };
        match news {
            News::Running(running) => vm.running = Some(running),
            News::Stopped(is_stopped) => vm.is_stopped = is_stopped,
            // One that is told late ended a life before this one.
            News::Ended(at) => machine.ended |= vm.booted.is_none_or(|booted| at >= booted),
            News::Has { version, places, holds, free, trouble, process } => {
                if trouble.is_some() && trouble != vm.trouble {
                    tracing::warn!(stranger = name, "{name}: {}", trouble.as_deref().unwrap_or_default());
                }
                vm.trouble = trouble;
                self.given_back(name, version, &holds);
                if let Some(vm) = self.vms.get_mut(name) {
                    (vm.has, vm.process) = (Some((places, free)), Some(process));
                }
            }
            News::Marked | News::KeepsDoorbell(_) | News::Bare { .. } => {}
            News::Lost(why) => {
                vm.running = None;
                vm.trouble = Some(why);
            }
        }
    }

    /// B-12. How a domain fares.
    pub(crate) fn liveness(&self, name: &str) -> Life {
        if self.config.is_local(name) {
            return Life::Running;
        }
        match (self.book.machines.get(name), self.vms.get(name)) {
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

    /// Reads the configuration again; one with mistakes changes nothing.
    fn reload(&mut self) -> io::Result<()> {
        match Config::read(&self.config_path) {
            Ok(config) => {
                self.config = config;
                self.unmade.clear();
                self.chores.retain(|domain| self.config.knows(domain));
                let gone: Vec<_> =
                    self.vms.keys().filter(|name| !self.config.domains.contains_key(*name)).cloned().collect();
                for name in gone {
                    tracing::info!("{name}: it is not configured any more");
                    // A QEMU whose server goes away keeps what it was given.
                    let machine = &self.book.machines[&name];
                    let (process, bells) = (machine.process, machine.bells.keys().copied().collect::<Vec<_>>());
                    bells.into_iter().try_for_each(|bell| self.withdraw(&name, bell))?;
                    self.left(&name, process)?;
                }
                for (name, vm) in &self.vms {
                    let user = self.config.domains[name].user;
                    vm.user.send_if_modified(|old| std::mem::replace(old, user) != user);
                }
                tracing::info!("the configuration was read again");
                if let Err(error) = self.settle_accounts() {
                    tracing::warn!("not all accounts can be served, read it again later: {error}");
                }
            }
            Err(error) => {
                tracing::error!("the configuration stays as it was");
                error.mistakes().for_each(|mistake| tracing::error!("{mistake}"));
            }
        }
        Ok(())
    }

    /// What is configured.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The domains that are configured.
    #[must_use]
    pub fn domains(&self) -> &BTreeMap<String, crate::config::Domain> {
        &self.config.domains
    }

    /// The broker ends. What has nothing to keep goes: the book, and the holder if this broker may end it.
    pub fn end(mut self, with_holder: bool) {
        self.vms.clear();
        self.alone.clear();
        self.locals.clear();
        if self.book.keys().is_empty() {
            if self.book.links.is_empty() {
                let _ = std::fs::remove_file(self.journal.folder.join("state.json"));
            }
            if with_holder {
                let _ = self.journal.holder.leave();
            }
        }
    }
}
