// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker: one loop that receives all events, changes its state, and then brings everything else in line with it.

mod answers;
mod reconcile;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::sync::mpsc;
use tombolo_control::Name;

use super::{
    descriptor_store::DescriptorStore,
    domains::Domains,
    doorbells::{Doorbells, Storms},
    event::{Event, TURN},
    guest::{Guest, GuestRequest},
    ivshmem::Device,
    journal::Journal,
    leaving::LeavingLinks,
    link_memory::LinkMemory,
    memory::drop_in_background,
    memory_jobs::Chores,
    migration::Migrations,
    programs::{Programs, admit_administrator, admit_program, report_lost_peers},
    qemu::News,
    schedule::{RETRY, Schedule},
    state::{BrokerState, Machine, is_unsaved, machine_key},
    vm::start,
};
use crate::{config::Config, discard};

/// The broker of a host, with all that it has.
#[derive(Debug)]
pub struct Broker {
    pub(crate) domains: Domains,
    pub(crate) journal: Journal,
    pub(crate) schedule: Schedule,
    pub(crate) memory: LinkMemory,
    pub(crate) storms: Storms,
    pub(crate) programs: Programs,
    pub(crate) leaving: LeavingLinks,
    pub(crate) migrations: Migrations,
    /// Configured links that cannot be created, and for which that was logged.
    pub(crate) unmade: BTreeSet<[Name; 2]>,
    /// Time after which a QEMU is asked again about what it reports by no event.
    ask_again: Duration,
}

impl Broker {
    /// Starts with all that an earlier broker left (B-16).
    ///
    /// # Errors
    /// The saved state cannot be read, or the descriptor store does not answer.
    pub fn begin(
        folder: &Path,
        config: Config,
        store: DescriptorStore,
        events: mpsc::Sender<Event>,
        ask_again: Duration,
    ) -> io::Result<Self> {
        let state = BrokerState::read(folder)?;
        let kept = store.all()?;
        let journal = Journal::new(folder.into(), state.clone(), store);
        let mut broker = Self {
            memory: LinkMemory::new(Arc::clone(&journal.store), Chores::new(events.clone())),
            storms: Storms::default(),
            programs: Programs::new(Arc::clone(&journal.store)),
            leaving: LeavingLinks::default(),
            migrations: Migrations::new(folder.into(), events.clone()),
            domains: Domains { config, state, vms: BTreeMap::new(), locals: BTreeMap::new() },
            journal,
            schedule: Schedule::new(events),
            unmade: BTreeSet::new(),
            ask_again,
        };
        broker.take_up_descriptors(kept)?;
        broker.programs.serve_accounts(&mut broker.domains, &mut broker.memory, &broker.schedule)?;
        broker.reconcile()?;
        report_lost_peers(&broker.domains);
        Ok(broker)
    }

    /// Takes up what is both kept and known, and drops what is only one of the two (B-16).
    fn take_up_descriptors(&mut self, mut kept: BTreeMap<String, Vec<OwnedFd>>) -> io::Result<()> {
        let known = self.domains.state.keys();
        self.programs.restore_connections(&mut kept, &self.domains);
        let stray: BTreeMap<_, _> = kept.extract_if(.., |key, _| !known.contains(key)).collect();
        for (key, descriptors) in &stray {
            // An untrusted process may have filled a socket, so the descriptor store must not be the last to close it.
            discard::end_all(descriptors);
            self.journal.store.forget(key)?;
        }
        drop_in_background(stray);
        let (config, events, mut lost) = (&self.domains.config, &self.schedule.events, Vec::new());
        for (name, machine) in &self.domains.state.machines {
            let device = kept.remove(&machine_key(name, machine.process));
            // If a QEMU is not served, an untrusted process may have filled its socket. Neither this broker nor the
            // descriptor store must be the last to close it.
            let copies: Vec<_> = device.iter().flatten().take(1).filter_map(|socket| socket.try_clone().ok()).collect();
            let device = device.map_or(Ok(None), |descriptors| Device::from_descriptors(name, descriptors));
            let is_served = |it: &Device| machine.greeted && !it.is_gone() && config.domains.contains_key(name);
            let begun = device.and_then(|device| {
                let device = device.filter(is_served);
                device
                    .map(|it| start(name, machine, it, config, &self.journal.folder, events, self.ask_again))
                    .transpose()
            });
            // Only this machine is lost; all others continue.
            if let Err(error) = &begun {
                tracing::error!(stranger = name, "{name}: its QEMU cannot be served any more: {error}; start it anew");
            }
            match begun {
                Ok(Some(vm)) => drop(self.domains.vms.insert(name.clone(), vm)),
                Ok(None) | Err(_) => {
                    discard::end_all(&copies);
                    lost.push((name.clone(), machine.process));
                }
            }
        }
        self.memory.take_up_regions(&mut kept, &mut self.domains.state);
        for (name, process) in lost {
            let left = self.remove_qemu(&name, process);
            self.journal.defer_unsaved(left, &mut self.schedule)?;
        }
        // Programs of the host keep what they still map of retired memory: the broker that would report its release is
        // gone.
        let Domains { config, state, .. } = &mut self.domains;
        state.quarantine.iter_mut().for_each(|old| old.held_by.retain(|domain, _| !config.is_local(domain)));
        // Nobody knows whether QEMU received such a doorbell in full. It is withdrawn, and a new number is given.
        for name in self.domains.vms.keys().cloned().collect::<Vec<_>>() {
            let doorbells = self.domains.state.machines[&name].doorbells.iter();
            let half: Vec<u16> = doorbells.filter(|(_, doorbell)| !doorbell.given).map(|(number, _)| *number).collect();
            let mut doorbells = self.doorbells();
            let withdrawn = half.into_iter().try_for_each(|number| doorbells.withdraw_doorbell(&name, number));
            self.journal.defer_unsaved(withdrawn, &mut self.schedule)?;
        }
        Ok(())
    }

    /// Handles an event. [`reconcile`](Self::reconcile) then acts on the new state.
    ///
    /// # Errors
    /// The descriptor store is gone, or something that all domains need has failed: the broker cannot go on.
    pub fn handle_event(&mut self, event: Event) -> io::Result<()> {
        let is_reload = matches!(event, Event::Reload);
        let handled = self.dispatch_event(event);
        if is_reload && handled.as_ref().is_err_and(is_unsaved) {
            self.schedule.send_after(RETRY, Event::Reload);
        }
        self.journal.defer_unsaved(handled, &mut self.schedule)
    }

    fn dispatch_event(&mut self, event: Event) -> io::Result<()> {
        match event {
            Event::Joined(name, socket) => {
                self.schedule.pace.request();
                self.accept_qemu(&name, socket)?;
            }
            Event::Left(name, process) => {
                self.schedule.pace.request();
                self.remove_qemu(&name, process)?;
            }
            Event::Room(name, process) if self.domains.is_current(&name, process) => {
                self.schedule.pace.request();
                self.domains.flush_messages(&name, &self.schedule.events);
            }
            Event::Notified(name, process) if self.domains.is_current(&name, process) => {
                self.exchange_messages(&name, TURN)
            }
            Event::Notified(name, _) if self.domains.locals.contains_key(&name) => self.exchange_messages(&name, TURN),
            Event::Loud(name, process) if self.domains.is_current(&name, process) => {
                if let Some(vm) = self.domains.vms.get_mut(&name) {
                    vm.report_loud(&name);
                }
            }
            Event::Stormed(name, link) => {
                self.storms.begin_storm(&name, link, &mut self.domains, &self.schedule);
            }
            Event::ProgramConnected(program, user) => admit_program(program, user, &self.domains),
            Event::Entered(client, account) => admit_administrator(client, &account, &self.domains),
            Event::Qemu(name, process, news) if self.domains.is_current(&name, process) => {
                self.schedule.pace.request();
                self.apply_news(&name, news);
            }
            Event::Alone(name, said) => self.migrations.apply_sighting(&name, said, &self.domains),
            Event::Calm(name, by) => {
                if let Some(stormed_by) = self.domains.stormed_by_mut(&name) {
                    stormed_by.remove(&by);
                }
            }
            Event::Asked(question) => {
                if question.changes_something() && self.schedule.pace.is_due() {
                    // The answer depends on the state of this moment: what was given back by now is free.
                    self.reconcile()?;
                }
                self.answer_question(question)?;
            }
            Event::Reload => self.reload()?,
            Event::Made(link, generation, made) => {
                let Self { memory, domains, migrations, schedule, .. } = self;
                memory.store_created((link, generation), made, domains, migrations, schedule)?;
            }
            Event::Mapped(region, mapped) => self.memory.finish_mapping(region, mapped, &self.domains.state),
            Event::Faulty(name, _) if self.domains.locals.contains_key(&name) => {
                return Err(io::Error::other(format!(
                    "what hears the account {name} has failed: the broker has to begin anew"
                )));
            }
            // The broker goes on for others. This QEMU keeps what it has, and a QEMU that is started anew is served
            // again.
            Event::Faulty(name, process) => {
                tracing::error!("{name}: a task that serves its QEMU has failed; start it anew");
                self.remove_qemu(&name, process)?;
            }
            Event::Broken(what) => {
                return Err(io::Error::other(format!("{what} has failed: the broker has to begin anew")));
            }
            Event::Sealed(link, generation, side, done) => {
                let region = (link, generation, side);
                self.memory.finish_sealing(region, done, &mut self.domains, &mut self.schedule);
            }
            Event::Unsettled => self.schedule.pace.request(),
            // Events of a QEMU that is gone.
            Event::Room(..) | Event::Notified(..) | Event::Loud(..) | Event::Qemu(..) => {}
        }
        Ok(())
    }

    /// Creates a device for a QEMU, puts it into the descriptor store, and then sends the greeting (B-9).
    fn accept_qemu(&mut self, name: &str, socket: OwnedFd) -> io::Result<()> {
        let Some(vectors) = self.domains.config.domains.get(name).map(|domain| domain.vectors) else {
            discard::end(socket.as_fd());
            return Ok(());
        };
        if let Some(vm) = self.domains.vms.get(name) {
            if !vm.device.is_gone() {
                tracing::warn!(stranger = name, "{name}: a second QEMU connected while the first one lives: refused");
                discard::end(socket.as_fd());
                return Ok(());
            }
            self.remove_qemu(name, self.domains.state.machines[name].process)
                .inspect_err(|_| discard::end(socket.as_fd()))?;
        }
        let machine = Machine::new(self.domains.state.number(), self.domains.state.number());
        let process = machine.process;
        let copy = match socket.try_clone() {
            Ok(copy) => copy,
            Err(error) => {
                tracing::error!(stranger = name, "{name}: its QEMU cannot be served: {error}");
                discard::end(socket.as_fd());
                return Ok(());
            }
        };
        let Err(error) = self.serve_qemu(name, machine, socket, vectors) else {
            tracing::info!(stranger = name, "{name}: QEMU connected");
            return Ok(());
        };
        // QEMU can be connected again, and all others continue.
        tracing::error!(stranger = name, "{name}: its QEMU cannot be served: {error}");
        discard::end(copy.as_fd());
        self.domains.vms.remove(name);
        self.domains.state.machines.remove(name);
        self.journal.give_up(&self.domains.state, machine_key(name, process))
    }

    /// Creates a device for a QEMU, and puts it into the descriptor store before QEMU learns of it (B-9, B-16).
    fn serve_qemu(&mut self, name: &str, machine: Machine, socket: OwnedFd, vectors: u16) -> io::Result<()> {
        let device = Device::new(name, socket, vectors)?;
        self.journal.store.store_descriptors(&machine_key(name, machine.process), &device.descriptors())?;
        let (config, folder, events) = (&self.domains.config, &self.journal.folder, &self.schedule.events);
        let mut vm = start(name, &machine, device, config, folder, events, self.ask_again)?;
        vm.outbound.push(vm.device.greeting()?);
        self.domains.state.machines.insert(name.into(), machine);
        self.journal.save(&self.domains.state)?;
        self.domains.vms.insert(name.into(), vm);
        self.domains.flush_messages(name, &self.schedule.events);
        self.journal.save(&self.domains.state)
    }

    /// Returns the doorbells of all QEMUs, to change them.
    pub(super) fn doorbells(&mut self) -> Doorbells<'_> {
        let Self { domains, memory, migrations, journal, schedule, .. } = self;
        Doorbells { domains, memory, migrations, journal, schedule }
    }

    /// Removes a QEMU that is gone (B-12).
    fn remove_qemu(&mut self, name: &str, process: u64) -> io::Result<()> {
        if !self.domains.is_current(name, process) {
            return Ok(());
        }
        if let Some(vm) = self.domains.vms.remove(name) {
            // This QEMU may have blocked a lane in a write. Without a reader, that write would never return.
            vm.device.own.iter().for_each(|own| _ = tombolo_os::event::drain(own));
            discard::end(vm.device.socket.as_fd());
        }
        self.domains.state.machines.remove(name);
        for old in &mut self.domains.state.quarantine {
            old.held_by.retain(|domain, held| domain != name || *held != process);
        }
        self.migrations.finish_departure(name, &self.domains);
        tracing::info!(stranger = name, "{name}: QEMU is gone");
        self.journal.give_up(&self.domains.state, machine_key(name, process))
    }

    /// Exchanges messages with a guest, or with the broker of an account. Receives at most `limit` messages, and sends
    /// what there is room for. The broker reconciles after messages, and after a change in whether more can be sent;
    /// not after a mere notification.
    pub(crate) fn exchange_messages(&mut self, name: &str, limit: usize) {
        let (host, is_account) = (&self.domains.config.host, !self.domains.vms.contains_key(name));
        let before = self.domains.guest_of(name).map(Guest::standing);
        let turned = match (self.domains.vms.get_mut(name), self.domains.locals.get_mut(name)) {
            (Some(vm), _) => vm.guest.turn(&vm.device.boxes, host, limit),
            (_, Some(local)) => local.guest.turn(&local.boxes, host, limit),
            _ => return,
        };
        let (requests, is_due) = match turned {
            Ok(turned) => turned,
            Err(error) => {
                let what = if is_account { "its boxes" } else { "the device's memory" };
                tracing::error!(stranger = name, "{name}: {what} cannot be reached: {error}");
                return;
            }
        };
        match self.domains.vms.get_mut(name) {
            _ if !is_due => {}
            Some(vm) => vm.device.notify(),
            None => self.domains.locals[name].notify(),
        }
        if !requests.is_empty() || self.domains.guest_of(name).map(Guest::standing) != before {
            self.schedule.pace.request();
        }
        for request in requests {
            match request {
                GuestRequest::Hello(boot) => self.domains.begin_life(name, boot),
                GuestRequest::Storm(link) => {
                    self.storms.begin_storm(name, link, &mut self.domains, &self.schedule);
                }
                // The broker of an account is in this process, so its report is trusted.
                GuestRequest::Released(link, generation) if is_account => {
                    self.memory.apply_release(name, link, generation, &mut self.domains.state);
                }
                // QEMU knows better what memory a machine has. The broker acts on the others when it reconciles.
                GuestRequest::Released(..) | GuestRequest::Left | GuestRequest::Moved => {}
            }
        }
    }

    fn apply_news(&mut self, name: &str, news: News) {
        self.migrations.apply_news(name, &news);
        let (Some(vm), Some(machine)) = (self.domains.vms.get_mut(name), self.domains.state.machines.get_mut(name))
        else {
            return;
        };
        match news {
            News::Running(running) => vm.running = Some(running),
            News::Stopped(is_stopped) => vm.is_stopped = is_stopped,
            // An end that is reported late belongs to an earlier incarnation.
            News::Ended(at) => machine.ended |= vm.booted.is_none_or(|booted| at >= booted),
            News::Has { version, places, holds, free, trouble, process } => {
                if trouble.is_some() && trouble != vm.trouble {
                    tracing::warn!(stranger = name, "{name}: {}", trouble.as_deref().unwrap_or_default());
                }
                vm.trouble = trouble;
                self.domains.apply_returns(name, version, &holds);
                if let Some(vm) = self.domains.vms.get_mut(name) {
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

    /// Reads the configuration again. One with mistakes changes nothing.
    fn reload(&mut self) -> io::Result<()> {
        match Config::read(&self.domains.config.path) {
            Ok(config) => {
                self.domains.config = config;
                self.unmade.clear();
                self.memory.chores.retain(|domain| self.domains.config.knows(domain));
                let gone: Vec<_> = self
                    .domains
                    .vms
                    .keys()
                    .filter(|name| !self.domains.config.domains.contains_key(*name))
                    .cloned()
                    .collect();
                for name in gone {
                    tracing::info!("{name}: it is not configured any more");
                    // A QEMU whose server goes away keeps the doorbells that it was given.
                    let machine = &self.domains.state.machines[&name];
                    let (process, doorbells) = (machine.process, machine.doorbells.keys().copied().collect::<Vec<_>>());
                    doorbells
                        .into_iter()
                        .try_for_each(|doorbell| self.doorbells().withdraw_doorbell(&name, doorbell))?;
                    self.remove_qemu(&name, process)?;
                }
                for (name, vm) in &self.domains.vms {
                    let user = self.domains.config.domains[name].user;
                    vm.user.send_if_modified(|old| std::mem::replace(old, user) != user);
                }
                tracing::info!("the configuration was read again");
                if let Err(error) = self.programs.serve_accounts(&mut self.domains, &mut self.memory, &self.schedule) {
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

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.domains.config
    }

    /// Ends the broker. Removes what has nothing to keep: the saved state, and the descriptor store if this broker may
    /// end it.
    pub fn end(mut self, with_store: bool) {
        self.domains.vms.clear();
        self.migrations.stop_watching();
        self.domains.locals.clear();
        if self.domains.state.keys().is_empty() {
            if self.domains.state.links.is_empty() {
                let _ = std::fs::remove_file(self.journal.folder.join("state.json"));
            }
            if with_store {
                let _ = self.journal.store.leave();
            }
        }
    }
}
