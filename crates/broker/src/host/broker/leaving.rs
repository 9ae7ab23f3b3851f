// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A link is left before it is taken away: both ends are told, and have a bounded time to end what they have on it (B-21).

use std::{
    collections::BTreeMap,
    io,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;
use tombolo_control::{Life, Message, code};

use crate::host::{
    broker::Broker,
    event::refuse,
    guest::Guest,
    state::{Link, Quarantined},
};

/// Where the answer goes, with the time that it took to find it.
pub(crate) type Asker = oneshot::Sender<(Vec<Message>, Duration)>;

/// A link that is taken away soon.
#[derive(Debug)]
pub(crate) struct LeavingLink {
    /// When it goes at the latest.
    until: Instant,
    /// Why, for people.
    why: String,
    /// Who asked for it, and is to hear once it is done.
    askers: Vec<Asker>,
    /// B-26. The link stays, without memory until its machine is there again.
    stays: bool,
}

impl Broker {
    /// Begins to take a link away; `asker` hears once it is gone. Where nobody is to be told it goes at once.
    pub(crate) fn leave_link(&mut self, number: u32, why: &'static str, asker: Option<Asker>) -> io::Result<()> {
        let until = Instant::now() + self.config.leave;
        // Who asks again for what was begun hears of the same end.
        let fresh = || LeavingLink { until, why: why.into(), askers: Vec::new(), stays: false };
        let leaving = self.leaving.entry(number).or_insert_with(fresh);
        leaving.stays = false;
        leaving.askers.extend(asker);
        self.settle_leaving()
    }

    /// B-26. The same of the link's memory alone, unless the link goes already.
    pub(crate) fn leave_for_now(&mut self, number: u32, domain: &str) {
        let until = Instant::now() + self.config.leave;
        let why = format!("{domain} is to migrate");
        let fresh = || LeavingLink { until, why, askers: Vec::new(), stays: true };
        self.leaving.entry(number).or_insert_with(fresh);
    }

    /// Takes those links away that all ends left, or that they had long enough to leave.
    pub(crate) fn settle_leaving(&mut self) -> io::Result<()> {
        let now = Instant::now();
        for number in self.leaving.keys().copied().collect::<Vec<_>>() {
            let Some(left) = self.leaving.get(&number).map(|it| it.until.saturating_duration_since(now)) else {
                continue;
            };
            let open = self.open_on(number);
            if !open.is_empty() && !left.is_zero() {
                self.schedule.remind_after(left);
                continue;
            }
            let Some(leaving) = self.leaving.remove(&number) else { continue };
            self.report_cut(number, &leaving.why, &open);
            let removed = match self.book.links.get(&number).map(|link| link.ends.clone()) {
                Some(ends) => {
                    self.count_departed(&ends, &open);
                    if leaving.stays { self.rest_link(number) } else { self.remove_link(number) }
                }
                None => Ok(()),
            };
            let answer = || match &removed {
                // It goes, and may be there again for a broker that begins before that is written down.
                Err(error) => refuse(code::FAILED, format!("{error}; this is tried again")),
                Ok(()) => vec![Message::Done {}],
            };
            // Who does not wait for the answer does not get it. To wait took nobody's time.
            leaving.askers.into_iter().for_each(|asker| _ = asker.send((answer(), Duration::ZERO)));
            removed?;
        }
        Ok(())
    }

    /// The guest of a domain, or what stands for it in an account.
    fn guest_of(&self, domain: &str) -> Option<&Guest> {
        let vm = self.vms.get(domain).map(|vm| &vm.guest);
        vm.or_else(|| self.locals.get(domain).map(|local| &local.guest))
    }

    /// The ends that have not left a link yet, and how many connections each said last that it has. One that cannot be told, as
    /// its broker is not there or of before Leave, is not waited for, and neither is one that is no more.
    fn open_on(&self, number: u32) -> Vec<(String, u16)> {
        let Some(link) = self.book.links.get(&number).filter(|link| link.has_memory) else { return Vec::new() };
        let open = |end: &String| {
            let guest = self.guest_of(end).filter(|it| it.is_to_leave(number, link.generation))?;
            let calls = guest.usage(number, link.generation).map_or(0, |(calls, _)| calls);
            (self.has_its_life(link, end) && self.liveness(end) != Life::DomainGone).then(|| (end.clone(), calls))
        };
        link.ends.iter().filter_map(open).collect()
    }

    /// Whether an end still lives the life for which a link's memory is.
    fn has_its_life(&self, link: &Link, end: &str) -> bool {
        let life = link.side(end).map(|side| link.lives[side]);
        self.config.is_local(end) || self.book.machines.get(end).map(|machine| machine.life) == life
    }

    /// Says what was still open when a link was taken away.
    fn report_cut(&mut self, number: u32, why: &str, open: &[(String, u16)]) {
        if open.is_empty() {
            tracing::info!("link {number} goes, as {why}: nobody had a connection on it any more");
            return;
        }
        let cut = connections(open);
        let wait = self.config.leave.as_millis();
        tracing::warn!("link {number} goes, as {why}: {cut} still open after {wait} ms");
        if let Some(link) = self.book.links.get(&number) {
            self.cut.insert((number, link.generation), cut);
        }
    }

    /// How long each link stays that goes soon, in milliseconds.
    pub(crate) fn leaving_soon(&self) -> BTreeMap<u32, u32> {
        let now = Instant::now();
        let wait = |until: Instant| millis(until.saturating_duration_since(now));
        self.leaving.iter().map(|(number, it)| (*number, wait(it.until))).collect()
    }

    /// What there is to know of a link that goes soon.
    pub(crate) fn leaving_note(&self, number: u32) -> Option<String> {
        let leaving = self.leaving.get(&number)?;
        let left = millis(leaving.until.saturating_duration_since(Instant::now()));
        Some(format!("it goes within {left} ms, as {}: {} still open", leaving.why, connections(&self.open_on(number))))
    }

    /// What there is to know of memory of a link that is no more.
    pub(crate) fn quarantine_note(&self, old: &Quarantined, held_by: &[&str]) -> String {
        let kept = format!("not given back by {}", held_by.join(", "));
        match self.cut.get(&(old.link, old.generation)) {
            Some(cut) => format!("{kept}; {cut} still open when it went"),
            None => kept,
        }
    }
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// The connections of each end, in words.
fn connections(open: &[(String, u16)]) -> String {
    // Who has not answered has one at least, whatever it said last.
    let of = |(end, calls): &(String, u16)| format!("{} connections of {end}", (*calls).max(1));
    open.iter().map(of).collect::<Vec<_>>().join(" and ")
}
