// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Removes links after both domains were told, and had a bounded time to end what they have on the link (B-21).

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

/// A link that is removed soon.
#[derive(Debug)]
pub(crate) struct LeavingLink {
    /// Latest time at which it is removed.
    until: Instant,
    /// Reason, for people.
    why: String,
    /// Those who asked for it, and are answered once it is done.
    askers: Vec<Asker>,
    /// Whether the link itself stays, without memory until its machine is there again (B-26).
    pub stays: bool,
}

impl LeavingLink {
    /// Answers those who asked for it.
    pub fn answer(self, removed: &io::Result<()>) {
        let said = match removed {
            // The link is removed, but may be there again if a broker starts before that is saved.
            Err(error) => refuse(code::FAILED, format!("{error}; this is tried again")),
            Ok(()) => vec![Message::Done {}],
        };
        answer(self.askers, &said);
    }
}

/// Links that are removed soon, and what was cut when others were removed.
#[derive(Debug, Default)]
pub(crate) struct LeavingLinks {
    links: BTreeMap<u32, LeavingLink>,
    /// Connections that were open when a link was removed, by the memory that it had.
    cut: BTreeMap<(u32, u32), String>,
}

impl LeavingLinks {
    /// Begins to remove a link within a time. `asker` is answered once it is gone.
    pub fn begin_removal(&mut self, number: u32, within: Duration, why: &str, asker: Option<Asker>) {
        let until = Instant::now() + within;
        // Another asker for the same removal is answered with the first one.
        let fresh = || LeavingLink { until, why: why.into(), askers: Vec::new(), stays: false };
        let leaving = self.links.entry(number).or_insert_with(fresh);
        leaving.stays = false;
        leaving.askers.extend(asker);
    }

    /// Begins to remove the link's memory alone, unless the link is being removed already (B-26).
    pub fn begin_rest(&mut self, number: u32, within: Duration, domain: &str) {
        let (until, why) = (Instant::now() + within, format!("{domain} is to migrate"));
        let fresh = || LeavingLink { until, why, askers: Vec::new(), stays: true };
        self.links.entry(number).or_insert_with(fresh);
    }

    /// Returns whether a link is removed soon.
    pub fn contains(&self, number: u32) -> bool {
        self.links.contains_key(&number)
    }

    /// Returns the links that are removed soon.
    pub fn numbers(&self) -> Vec<u32> {
        self.links.keys().copied().collect()
    }

    /// Takes out a link that all domains have left, or had long enough to leave. Returns it, and what is still open on
    /// it.
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

    /// Reports what was still open when a link was removed.
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

    /// Forgets what was cut, once all domains have given back the link's memory.
    pub fn forget_cut(&mut self, old: &Quarantined) {
        self.cut.remove(&(old.link, old.generation));
    }

    /// Returns how long each link that is removed soon still stays, in milliseconds.
    pub fn waits(&self) -> BTreeMap<u32, u32> {
        let now = Instant::now();
        let wait = |until: Instant| millis(until.saturating_duration_since(now));
        self.links.iter().map(|(number, it)| (*number, wait(it.until))).collect()
    }

    /// Describes a link that is removed soon.
    pub fn describe_link(&self, number: u32, domains: &Domains) -> Option<String> {
        let leaving = self.links.get(&number)?;
        let left = millis(leaving.until.saturating_duration_since(Instant::now()));
        let open = connections(&domains.open_on(number));
        Some(format!("it goes within {left} ms, as {}: {open} still open", leaving.why))
    }

    /// Describes memory of a link that is gone.
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

/// Returns the connections of each domain in words.
fn connections(open: &[(String, u16)]) -> String {
    // A domain that has not answered has at least one connection, whatever it last reported.
    let of = |(end, connections): &(String, u16)| format!("{} connections of {end}", (*connections).max(1));
    open.iter().map(of).collect::<Vec<_>>().join(" and ")
}
