// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A link is left before it is taken away: both ends are told, and have a bounded time to end what they have on it (B-21).

use std::{
    collections::BTreeMap,
    io,
    time::{Duration, Instant},
};

use tombolo_control::{Message, code};

use super::{
    domains::Domains,
    event::{Asker, answer, refuse},
    schedule::Schedule,
    state::Quarantined,
};

/// A link that is taken away soon.
#[derive(Debug)]
pub(crate) struct LeavingLink {
    /// When it goes at the latest.
    until: Instant,
    /// Why, for people.
    why: String,
    /// Who asked for it, and is to hear once it is done.
    askers: Vec<Asker>,
    /// The link stays, without memory until its machine is there again (B-26).
    pub stays: bool,
}

impl LeavingLink {
    /// Answers who asked for it.
    pub fn answer(self, removed: &io::Result<()>) {
        let said = match removed {
            // It goes, and may be there again for a broker that begins before that is written down.
            Err(error) => refuse(code::FAILED, format!("{error}; this is tried again")),
            Ok(()) => vec![Message::Done {}],
        };
        answer(self.askers, &said);
    }
}

/// Links that are taken away soon, and what was cut when others went.
#[derive(Debug, Default)]
pub(crate) struct LeavingLinks {
    links: BTreeMap<u32, LeavingLink>,
    /// Connections that were open when a link was taken away, by the memory that it had.
    cut: BTreeMap<(u32, u32), String>,
}

impl LeavingLinks {
    /// Begins to take a link away within a time; `asker` hears once it is gone.
    pub fn begin_removal(&mut self, number: u32, within: Duration, why: &str, asker: Option<Asker>) {
        let until = Instant::now() + within;
        // Who asks again for what was begun hears of the same end.
        let fresh = || LeavingLink { until, why: why.into(), askers: Vec::new(), stays: false };
        let leaving = self.links.entry(number).or_insert_with(fresh);
        leaving.stays = false;
        leaving.askers.extend(asker);
    }

    /// The same of the link's memory alone, unless the link goes already (B-26).
    pub fn begin_rest(&mut self, number: u32, within: Duration, domain: &str) {
        let (until, why) = (Instant::now() + within, format!("{domain} is to migrate"));
        let fresh = || LeavingLink { until, why, askers: Vec::new(), stays: true };
        self.links.entry(number).or_insert_with(fresh);
    }

    /// Whether a link goes soon.
    pub fn contains(&self, number: u32) -> bool {
        self.links.contains_key(&number)
    }

    /// The links that go soon.
    pub fn numbers(&self) -> Vec<u32> {
        self.links.keys().copied().collect()
    }

    /// Takes out a link that all ends left, or that they had long enough to leave, with what is still open on it.
    pub fn remove_due(
        &mut self,
        number: u32,
        domains: &Domains,
        schedule: &mut Schedule,
    ) -> Option<(LeavingLink, Vec<(String, u16)>)> {
        let left = self.links.get(&number)?.until.saturating_duration_since(Instant::now());
        let open = domains.open_on(number);
        if !open.is_empty() && !left.is_zero() {
            schedule.remind_after(left);
            return None;
        }
        let leaving = self.links.remove(&number)?;
        self.report_cut(number, &leaving.why, &open, domains);
        Some((leaving, open))
    }

    /// Says what was still open when a link was taken away.
    fn report_cut(&mut self, number: u32, why: &str, open: &[(String, u16)], domains: &Domains) {
        if open.is_empty() {
            tracing::info!("link {number} goes, as {why}: nobody had a connection on it any more");
            return;
        }
        let cut = connections(open);
        let wait = domains.config.leave.as_millis();
        tracing::warn!("link {number} goes, as {why}: {cut} still open after {wait} ms");
        if let Some(link) = domains.state.links.get(&number) {
            self.cut.insert((number, link.generation), cut);
        }
    }

    /// Forgets what was cut when memory went that everybody gave back.
    pub fn forget_cut(&mut self, old: &Quarantined) {
        self.cut.remove(&(old.link, old.generation));
    }

    /// How long each link stays that goes soon, in milliseconds.
    pub fn waits(&self) -> BTreeMap<u32, u32> {
        let now = Instant::now();
        let wait = |until: Instant| millis(until.saturating_duration_since(now));
        self.links.iter().map(|(number, it)| (*number, wait(it.until))).collect()
    }

    /// What there is to know of a link that goes soon.
    pub fn describe_link(&self, number: u32, domains: &Domains) -> Option<String> {
        let leaving = self.links.get(&number)?;
        let left = millis(leaving.until.saturating_duration_since(Instant::now()));
        let open = connections(&domains.open_on(number));
        Some(format!("it goes within {left} ms, as {}: {open} still open", leaving.why))
    }

    /// What there is to know of memory of a link that is no more.
    pub fn describe_quarantined(&self, old: &Quarantined) -> String {
        let kept = format!("not given back by {}", old.held_by.keys().cloned().collect::<Vec<_>>().join(", "));
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
    let of = |(end, connections): &(String, u16)| format!("{} connections of {end}", (*connections).max(1));
    open.iter().map(of).collect::<Vec<_>>().join(" and ")
}
