// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes a machine ready to migrate: its links are left, then its devices are removed, and the askers are answered
//! (B-26). Gives a doorbell to a machine that arrived without one (B-27).

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, watch};
use tombolo_control::{Message, Name, code};

use super::{
    domains::Domains,
    event::{Asker, Event, answer, refuse},
    leaving::LeavingLinks,
    paths::{device_socket, qmp_socket},
    qemu::{Alone, News, Watched, watch_alone},
    schedule::Schedule,
    tasks::{self, Tasks},
};

/// A connected machine that is made ready to migrate.
#[derive(Debug)]
pub(crate) struct Departure {
    began: Instant,
    /// Time at which the askers are told that it takes longer.
    until: Instant,
    /// Those who asked for it, and are answered once the machine is ready.
    askers: Vec<Asker>,
    /// The one who asked to cancel it.
    canceller: Option<Asker>,
    /// Number of links that were left.
    links: u16,
    /// Connections that were open when their link lost its memory: a domain, and their number.
    cut: Vec<(String, u16)>,
    /// Whether QEMU was asked to remove the doorbell. From then on, cancelling is impossible until that is done.
    is_marked: bool,
    /// Whether QEMU may get devices again, once the doorbell is removed.
    is_bare: Option<bool>,
    /// Version of the last list of regions that QEMU was seen to meet.
    met: u64,
}

/// State of a machine whose QEMU is not connected.
#[derive(Debug)]
pub(crate) struct LoneVm {
    watched: watch::Sender<Watched>,
    said: Alone,
    /// The one who asked that the machine gets its devices again.
    restorer: Option<Asker>,
    _tasks: Tasks,
}

/// Returns why a machine that was made ready gets no device.
fn spent(name: &str) -> String {
    format!(
        "{name} was made ready to migrate, and its QEMU would not survive another device: it goes on without links until it is \
         migrated or started anew"
    )
}

/// Machines that are made ready to migrate, and unconnected machines that the broker looks for.
#[derive(Debug)]
pub(crate) struct Migrations {
    departures: BTreeMap<String, Departure>,
    alone: BTreeMap<String, LoneVm>,
    folder: PathBuf,
    events: mpsc::Sender<Event>,
}

impl Migrations {
    /// Starts without any machine. The sockets of unconnected machines are in `folder`.
    pub fn new(folder: PathBuf, events: mpsc::Sender<Event>) -> Self {
        Self { departures: BTreeMap::new(), alone: BTreeMap::new(), folder, events }
    }

    /// Stops looking for unconnected machines.
    pub fn stop_watching(&mut self) {
        self.alone.clear();
    }

    /// Begins to make a machine ready. `asker` is answered once it is.
    pub fn prepare_machine(&mut self, domain: &Name, asker: Asker, domains: &Domains, ask_again: Duration) {
        let (name, began) = (domain.as_str(), Instant::now());
        // Time at which the guest would be asked once more to release its devices.
        let until = began + domains.config.leave + ask_again;
        if let Some(departure) = self.departures.get_mut(name) {
            // An asker who asks again waits on.
            departure.until = until;
            departure.askers.push(asker);
            return;
        }
        if let Some(no) = self.why_not_prepared(domain, domains) {
            answer([asker], &no);
            return;
        }
        let (askers, canceller, links, cut) = (vec![asker], None, 0, Vec::new());
        let (is_marked, is_bare, met) = (false, None, 0);
        let departure = Departure { began, until, askers, canceller, links, cut, is_marked, is_bare, met };
        self.departures.insert(name.to_owned(), departure);
        tracing::info!("{name}: it is made ready to migrate");
    }

    /// Returns why a machine cannot be made ready.
    fn why_not_prepared(&self, domain: &Name, domains: &Domains) -> Option<Vec<Message>> {
        let name = domain.as_str();
        if !domains.config.domains.contains_key(name) {
            return Some(domains.unknown(domain));
        }
        let Some(vm) = domains.vms.get(name) else {
            return Some(match self.alone.get(name).map(|lone| &lone.said) {
                Some(Alone::Left { .. }) => refuse(code::EXISTS, format!("{name} is ready to migrate already")),
                _ => {
                    refuse(code::NO_QEMU, format!("{name}: no QEMU is connected, so nothing of it is to be taken away"))
                }
            });
        };
        if vm.has.is_none() || vm.running.is_none() {
            let why = vm.trouble.clone().unwrap_or_else(|| "it has not answered yet".into());
            return Some(refuse(code::NO_QEMU, format!("{name}: its QEMU takes no commands: {why}")));
        }
        // QEMU has already freed what it would free once more with its doorbell.
        domains.state.machines.get(name).is_some_and(|machine| machine.is_spent).then(|| {
            let why = "its QEMU had to forget a doorbell (a link that was removed, a storm): it would end with its own. Start it anew";
            refuse(code::QEMU_REFUSES, format!("{name}: {why}"))
        })
    }

    /// Cancels that a machine is made ready, or was. `asker` is told the outcome.
    pub fn cancel_preparation(&mut self, domain: &Name, asker: Asker, domains: &Domains) {
        let name = domain.as_str();
        if let Some(departure) = self.departures.get_mut(name) {
            if departure.canceller.is_none() {
                departure.canceller = Some(asker);
            } else {
                answer([asker], &refuse(code::EXISTS, format!("{name}: somebody else takes it back already")));
            }
            return;
        }
        let no = match self.alone.get_mut(name).map(|lone| (lone.said.clone(), lone)) {
            Some((Alone::Left { is_filled: true }, lone)) if lone.restorer.is_none() => {
                lone.restorer = Some(asker);
                lone.watched.send_modify(|watched| watched.is_restored = true);
                return;
            }
            Some((Alone::Left { is_filled: false }, _)) => refuse(code::MIGRATES, spent(name)),
            Some((Alone::Left { .. }, _)) => {
                refuse(code::EXISTS, format!("{name}: somebody else takes it back already"))
            }
            _ if !domains.config.domains.contains_key(name) => domains.unknown(domain),
            _ => refuse(code::NOT_FOUND, format!("{name} was not made ready to migrate")),
        };
        answer([asker], &no);
    }

    /// Returns why a machine is to have no link now, if it is made ready to migrate, or is ready.
    pub fn why_without_links(&self, name: &str) -> Option<String> {
        if let Some(departure) = self.departures.get(name) {
            return (!departure.is_cancelled()).then(|| format!("{name} is made ready to migrate"));
        }
        match self.alone.get(name)?.said {
            Alone::Left { is_filled: true } => Some(format!(
                "{name} is ready to migrate and has no links; if it stays: tombolo vm cancel-migration {name}"
            )),
            Alone::Left { is_filled: false } => Some(spent(name)),
            _ => None,
        }
    }

    /// Returns whether a machine's doorbell is being removed, or is to be removed.
    pub fn is_departing(&self, name: &str) -> bool {
        self.departures.get(name).is_some_and(|departure| !departure.is_cancelled())
    }

    /// Returns why a machine's QEMU cannot get its doorbell.
    pub fn doorbell_trouble(&self, name: &str) -> Option<String> {
        match &self.alone.get(name)?.said {
            Alone::Trouble(why) => Some(format!("{name} has no doorbell: {why}")),
            _ => None,
        }
    }

    /// Returns whether a machine's doorbell is to be removed, and none of its links has memory any more.
    pub fn is_to_be_bare(&self, name: &str, domains: &Domains) -> bool {
        self.is_departing(name) && domains.state.links_of(name).all(|(_, link)| !link.has_memory)
    }

    /// Stops notifying machines whose doorbell is to be removed.
    pub fn mute_departing(&self, domains: &mut Domains) {
        for name in domains.vms.keys().cloned().collect::<Vec<_>>() {
            let is_muted = self.is_to_be_bare(&name, domains);
            if let Some(vm) = domains.vms.get_mut(&name) {
                vm.device.mute(is_muted);
            }
        }
    }

    /// Counts a link of a machine that is made ready, and the connections that were open when the link lost its memory.
    pub fn count_cut(&mut self, ends: &[String; 2], open: &[(String, u16)]) {
        for end in ends {
            if let Some(departure) = self.departures.get_mut(end) {
                departure.links = departure.links.saturating_add(1);
                departure.cut.extend(open.iter().cloned());
            }
        }
    }

    /// Takes the next steps for machines that are made ready.
    pub fn advance_departures(&mut self, domains: &Domains, leaving: &mut LeavingLinks, schedule: &mut Schedule) {
        let now = Instant::now();
        for name in self.departures.keys().cloned().collect::<Vec<_>>() {
            let links: Vec<u32> =
                domains.state.links_of(&name).filter(|(_, link)| link.has_memory).map(|(number, _)| number).collect();
            let is_asked = domains.vms.get(&name).is_some_and(|vm| vm.wanted.borrow().bare);
            let version = domains.vms.get(&name).map_or(0, |vm| vm.wanted.borrow().version);
            let Some(departure) = self.departures.get_mut(&name) else { continue };
            if departure.is_marked
                && let Some(canceller) = departure.canceller.take()
            {
                let why = format!("{name}: its doorbell is on its way out; once it is ready, take that back");
                answer([canceller], &refuse(code::MIGRATES, why));
            }
            // While QEMU may still act on the list that removes the doorbell, the outcome is unknown.
            if departure.is_cancelled() && !is_asked && departure.met >= version {
                tracing::info!("{name}: that it is made ready to migrate was taken back");
                let Some(departure) = self.departures.remove(&name) else { continue };
                answer(departure.canceller, &[Message::Done {}]);
                let why = format!("{name}: it was taken back that it is made ready to migrate");
                answer(departure.askers, &refuse(code::MIGRATES, why));
                continue;
            }
            if !departure.is_cancelled() {
                let left = departure.until.saturating_duration_since(now);
                if left.is_zero() && !departure.askers.is_empty() {
                    let askers = std::mem::take(&mut departure.askers);
                    let why = why_kept(&name, domains);
                    tracing::warn!("{why}");
                    answer(askers, &refuse(code::KEPT, why));
                } else if !left.is_zero() {
                    schedule.remind_after(left);
                }
                for link in links {
                    leaving.begin_rest(link, domains.config.leave, &name);
                }
            }
        }
    }

    /// Handles a report of QEMU on a machine that is made ready.
    pub fn apply_news(&mut self, name: &str, news: &News) {
        let is_known = self.departures.contains_key(name);
        if let (News::Marked, false) = (news, is_known) {
            // An earlier broker began it, and no asker waits for it any more.
            let (began, askers, canceller, cut) = (Instant::now(), Vec::new(), None, Vec::new());
            let (links, is_marked, is_bare, met, until) = (0, true, None, 0, began);
            let departure = Departure { began, until, askers, canceller, links, cut, is_marked, is_bare, met };
            self.departures.insert(name.to_owned(), departure);
            tracing::info!("{name}: it was being made ready to migrate, which goes on");
        }
        let Some(departure) = self.departures.get_mut(name) else { return };
        match news {
            News::Marked => departure.is_marked = true,
            News::Bare { is_filled } => departure.is_bare = Some(*is_filled),
            News::Has { version, .. } => departure.met = *version,
            News::KeepsDoorbell(why) => {
                let Some(departure) = self.departures.remove(name) else { return };
                let why = format!("{name} cannot be made ready to migrate: {why}");
                tracing::warn!("{why}");
                answer(departure.askers, &refuse(code::QEMU_REFUSES, why));
                answer(departure.canceller, &[Message::Done {}]);
            }
            _ => {}
        }
    }

    /// Handles the end of a QEMU's connection: a machine that was made ready has no device any more, or is gone.
    pub fn finish_departure(&mut self, name: &str, domains: &Domains) {
        let Some(departure) = self.departures.remove(name) else { return };
        answer(departure.canceller, &refuse(code::MIGRATES, format!("{name} is ready to migrate meanwhile")));
        let Some(is_filled) = departure.is_bare else {
            answer(departure.askers, &refuse(code::NO_QEMU, format!("{name}: its QEMU is gone")));
            return;
        };
        let took = u32::try_from(departure.began.elapsed().as_millis()).unwrap_or(u32::MAX);
        let cut = departure.cut.iter().map(|(_, connections)| u32::from(*connections).max(1)).sum();
        let ends: Vec<String> = departure
            .cut
            .iter()
            .map(|(end, connections)| format!("{} connections of {end}", (*connections).max(1)))
            .collect();
        let mut note = if ends.is_empty() { String::new() } else { format!("{} were cut", ends.join(" and ")) };
        if !is_filled {
            note += if note.is_empty() { "" } else { "; " };
            note += "its QEMU gets no device again";
        }
        tracing::info!("{name}: it is ready to migrate after {took} ms, {} links were left; {note}", departure.links);
        let domain = crate::config::checked_name(name);
        let row = Message::PreparedRow { domain, links: departure.links, cut, took, note: note.into() };
        answer(departure.askers, &[row, Message::Done {}]);
        self.watch_machine(name, domains);
        if let Some(lone) = self.alone.get_mut(name) {
            lone.said = Alone::Left { is_filled };
        }
    }

    /// Looks for each configured machine at its control socket while its QEMU is not connected.
    pub fn watch_machines(&mut self, domains: &Domains) {
        self.alone.retain(|name, _| domains.config.domains.contains_key(name));
        for name in domains.config.domains.keys().cloned().collect::<Vec<_>>() {
            self.watch_machine(&name, domains);
        }
    }

    fn watch_machine(&mut self, name: &str, domains: &Domains) {
        let Some(domain) = domains.config.domains.get(name) else { return };
        let is_served = domains.vms.contains_key(name);
        let now = Watched {
            is_served,
            is_restored: !is_served && self.alone.get(name).is_some_and(|lone| lone.restorer.is_some()),
            path: qmp_socket(&self.folder, &domains.config, name),
            device: device_socket(&self.folder, name),
            machine_type: domain.machine,
            user: domain.user,
            vectors: domain.vectors,
        };
        if let Some(lone) = self.alone.get_mut(name) {
            if is_served {
                lone.said = Alone::Unseen;
                answer(lone.restorer.take(), &[Message::Done {}]);
            }
            lone.watched.send_if_modified(|old| {
                let is_new = *old != now;
                *old = now;
                is_new
            });
            return;
        }
        let (watched, watcher) = watch::channel(now);
        let (owner, sender, mut tasks) = (name.to_owned(), self.events.clone(), Tasks::default());
        let work = watch_alone(watcher, async move |said| {
            let _ = sender.send(Event::Alone(owner.clone(), said)).await;
        });
        tasks.push(tasks::begin_watched(&self.events, Event::Broken("what looks for machines that arrive"), work));
        self.alone.insert(name.to_owned(), LoneVm { watched, said: Alone::Unseen, restorer: None, _tasks: tasks });
    }

    /// Handles what was seen of a QEMU that is not connected.
    pub fn apply_sighting(&mut self, name: &str, said: Alone, domains: &Domains) {
        let is_served = domains.vms.contains_key(name);
        let Some(lone) = self.alone.get_mut(name).filter(|_| !is_served) else { return };
        if let Alone::Trouble(why) = &said
            && said != lone.said
        {
            tracing::warn!(stranger = name, "{name}: it has no doorbell: {why}");
        }
        if said == Alone::Plugged {
            // The asker is answered once the machine has connected.
            lone.said = Alone::Unseen;
            return;
        }
        if let Some(restorer) = lone.restorer.take() {
            let no = match &said {
                Alone::Left { .. } => refuse(code::MIGRATES, spent(name)),
                Alone::Trouble(why) => refuse(code::QEMU_REFUSES, format!("{name} stays without links: {why}")),
                Alone::Unseen | Alone::Plugged => refuse(code::NO_QEMU, format!("{name}: its QEMU is gone")),
            };
            answer([restorer], &no);
            if matches!(said, Alone::Trouble(_)) {
                // The machine is as ready as before.
                return;
            }
        }
        lone.said = said;
    }
}

/// Returns what still prevents a machine from being ready.
fn why_kept(name: &str, domains: &Domains) -> String {
    let trouble = domains.vms.get(name).and_then(|vm| vm.trouble.clone());
    match trouble {
        Some(trouble) => format!("{name} is not ready to migrate: {trouble}"),
        None => format!("{name} is not ready to migrate: its guest has not let go of its devices yet; ask again"),
    }
}

impl Departure {
    fn is_cancelled(&self) -> bool {
        self.canceller.is_some() && !self.is_marked
    }
}
