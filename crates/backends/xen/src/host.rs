// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Publishes to each domain, as dom0's broker, which other domains there are and their liveness.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::BorrowedFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tombolo_control::Name;
use tombolo_domain::{Error, Result, aside::ReservedFd};
use tombolo_layout::xen as at;

use crate::{
    hypervisor::{DomId, Hypervisor},
    names::{ALIVE, BROKER, OWN, RECORD_MAX, Record, View, domid, folder_of},
    os::random,
    page::OwnPage,
    place::Pair,
    store::Store,
    sys,
};

/// Time for which a broker waits until another one is gone. A process that checks whether the broker lives also holds
/// the claim for a moment.
const PATIENCE: Duration = Duration::from_secs(1);
/// Folder of all domains.
const DOMAINS: &str = "/local/domain";
/// Special paths by which XenStore reports that domains come and go.
const COMING_AND_GOING: [&str; 2] = ["@introduceDomain", "@releaseDomain"];

/// For each domain to which anything is published, its name and its views of other domains. Two domains know of
/// each other or not at all.
pub type Views = BTreeMap<u16, (Name, BTreeMap<u16, View>)>;

/// dom0, in its role of publishing the domains to each other.
#[derive(Debug)]
pub struct XenHost {
    xen: Arc<dyn Hypervisor>,
    store: Store,
    /// Records that were published.
    told: BTreeMap<DomId, BTreeMap<DomId, Record>>,
    names: BTreeMap<DomId, Name>,
    /// Pages by which domains see that this process lives.
    pages: BTreeMap<DomId, OwnPage>,
    /// Domains whose name is watched.
    watched: BTreeSet<DomId>,
    /// Domains that are watched until they have a folder for another domain, as every domain has that ever had a
    /// channel.
    quiet: BTreeSet<DomId>,
    _claim: ReservedFd,
}

impl XenHost {
    /// Takes over what an earlier broker published.
    ///
    /// # Errors
    /// This is not dom0, or another broker runs, or XenStore's error.
    pub fn new() -> Result<Self> {
        Self::on(Arc::new(sys::Xen))
    }

    pub(crate) fn on(xen: Arc<dyn Hypervisor>) -> Result<Self> {
        let mut store = Store::new(xen.store()?);
        if store.own_id()? != 0 {
            return Err(Error::Denied("other domains' names: this is not dom0".into()));
        }
        let begun = Instant::now();
        let claim = loop {
            match xen.claim(BROKER)? {
                Some(claim) => break claim,
                None if begun.elapsed() > PATIENCE => return Err(Error::InUse("XenStore's folder of names".into())),
                None => thread::park_timeout(PATIENCE / 50),
            }
        };
        COMING_AND_GOING.iter().try_for_each(|what| store.watch(what))?;
        let mut told = BTreeMap::new();
        for id in ids(&mut store, DOMAINS)? {
            if let Some(nodes) = store.folder(&folder_of(id))? {
                told.insert(id, records(&mut store, id, &nodes)?);
            }
        }
        let (names, pages) = (BTreeMap::new(), BTreeMap::new());
        let (watched, quiet) = (BTreeSet::new(), BTreeSet::new());
        Ok(Self { xen, store, told, names, pages, watched, quiet, _claim: claim })
    }

    /// Returns a descriptor that polls readable when [`changed`](Self::changed) may report something.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.store.fd()
    }

    /// Returns whether a domain came, went or was renamed. Never blocks for long.
    ///
    /// # Errors
    /// XenStore's error.
    pub fn changed(&mut self) -> Result<bool> {
        let mut changed = false;
        // Repeats until nothing is left, because what fires while an answer is awaited no longer makes the descriptor
        // readable.
        loop {
            let fired = self.store.fired()?;
            if fired.is_empty() {
                return Ok(changed);
            }
            let spoke: Vec<DomId> = self
                .quiet
                .iter()
                .copied()
                .filter(|id| fired.iter().any(|path| path.starts_with(&channels_of(*id))))
                .collect();
            changed |= fired.iter().any(|path| path.starts_with('@') || path.ends_with("/name"));
            for id in spoke {
                if !self.store.list(&channels_of(id))?.is_empty() {
                    self.store.unwatch(&channels_of(id))?;
                    self.quiet.remove(&id);
                }
            }
        }
    }

    /// Returns the existing domains with the names that dom0 gave them.
    ///
    /// # Errors
    /// XenStore's error; [`Error::Limit`] if the domains are too many for one message of XenStore.
    pub fn domains(&mut self) -> Result<BTreeMap<u16, String>> {
        let mut domains = BTreeMap::new();
        let there = ids(&mut self.store, DOMAINS)?;
        for &id in &there {
            let path = name_of(id);
            if self.watched.insert(id) {
                self.store.watch(&path)?;
            }
            match self.store.read(&path)? {
                Some(name) => drop(domains.insert(id, name)),
                // The domain went while this broker wrote to it, and the write made its folder again.
                None if self.store.list(&format!("{DOMAINS}/{id}"))? == ["tombolo"] => {
                    self.store.remove(&format!("{DOMAINS}/{id}"))?;
                }
                None => {}
            }
        }
        let gone: Vec<DomId> = self.watched.extract_if(.., |id| !there.contains(id)).collect();
        for id in gone {
            self.store.unwatch(&name_of(id))?;
        }
        // Without the folder the number belongs to another domain, or to none.
        for id in self.told.keys().copied().collect::<Vec<_>>() {
            if self.store.read(&folder_of(id))?.is_none() {
                self.forget(id)?;
            }
        }
        Ok(domains)
    }

    fn forget(&mut self, id: DomId) -> Result<()> {
        self.told.remove(&id);
        self.names.remove(&id);
        self.pages.remove(&id);
        if self.quiet.remove(&id) {
            self.store.unwatch(&channels_of(id))?;
        }
        Ok(())
    }

    /// Returns whether a domain to which anything is published has ever had a channel. Such a domain may want to know
    /// the liveness of others.
    #[must_use]
    pub fn has_listeners(&self) -> bool {
        self.told.iter().any(|(id, records)| !records.is_empty() && !self.quiet.contains(id))
    }

    /// Makes what is published equal to `wanted`.
    ///
    /// # Errors
    /// XenStore's error, or that no page can be granted.
    pub fn publish_views(&mut self, wanted: &Views) -> Result<()> {
        let gone: Vec<DomId> = self.told.keys().copied().filter(|id| !wanted.contains_key(id)).collect();
        for id in gone {
            self.store.remove(&folder_of(id))?;
            self.forget(id)?;
        }
        let mut pairs = BTreeMap::new();
        for (&reader, (_, views)) in wanted {
            for &other in views.keys().filter(|other| **other > reader) {
                pairs.insert((reader, other), self.pair(reader, other)?);
            }
        }
        for (&reader, (name, views)) in wanted {
            self.meet(reader, name)?;
            let wanted = views.iter().filter_map(|(&other, view)| {
                let pair = if reader < other {
                    *pairs.get(&(reader, other))?
                } else {
                    let Pair { shows, expects } = *pairs.get(&(other, reader))?;
                    Pair { shows: expects, expects: shows }
                };
                Some((other, fitting(Record { view: view.clone(), pair })))
            });
            let wanted: BTreeMap<DomId, Record> = wanted.collect();
            let told = self.told.entry(reader).or_default();
            let folder = folder_of(reader);
            for other in told.keys().filter(|other| !wanted.contains_key(*other)) {
                self.store.remove(&format!("{folder}/{other}"))?;
            }
            for (other, record) in wanted.iter().filter(|(other, record)| told.get(*other) != Some(*record)) {
                self.store.write(&format!("{folder}/{other}"), &record.to_string())?;
            }
            *told = wanted;
        }
        Ok(())
    }

    /// Makes a domain's folder, and the nodes that it always has.
    fn meet(&mut self, id: DomId, name: &Name) -> Result<()> {
        let folder = folder_of(id);
        if self.names.get(&id) == Some(name) {
            return Ok(());
        }
        self.store.make_folder(&folder, 0, id)?;
        self.store.write(&format!("{folder}/{OWN}"), name.as_str())?;
        if id != 0 && !self.pages.contains_key(&id) {
            let grants = self.xen.grant(id, 1)?;
            let reference = grants.references()[0];
            grants.when_gone(at::AT_STATE, None)?;
            self.pages.insert(id, OwnPage::new(grants.map(0, 1)?, at::BROKER_MAGIC, 0));
            self.store.write(&format!("{folder}/{ALIVE}"), &reference.to_string())?;
        }
        if self.names.insert(id, name.clone()).is_none() {
            self.store.watch(&channels_of(id))?;
            self.quiet.insert(id);
        }
        Ok(())
    }

    /// Returns the numbers of two domains: those that were published to both, or new ones. What is published to
    /// a domain disappears with it, so numbers that both have were published to these very two domains.
    fn pair(&self, one: DomId, other: DomId) -> Result<Pair> {
        let told = |reader: DomId, of: DomId| self.told.get(&reader)?.get(&of).map(|record| record.pair);
        if let (Some(here), Some(there)) = (told(one, other), told(other, one))
            && (here.shows, here.expects) == (there.expects, there.shows)
        {
            return Ok(here);
        }
        let random = random::<16>()?;
        let ([shows, expects], _) = random.as_chunks::<8>() else { unreachable!("sixteen bytes") };
        // The number is never 0, which means no number.
        let number = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes) | 1;
        Ok(Pair { shows: number(shows), expects: number(expects) })
    }
}

/// Shortens a record that is too long. Patterns that do not fit are not allowed.
fn fitting(mut record: Record) -> Record {
    while record.to_string().len() > RECORD_MAX {
        let View { ours, theirs, .. } = &mut record.view;
        if ours.len() > theirs.len() {
            ours.pop()
        } else {
            theirs.pop()
        };
    }
    record
}

fn name_of(id: DomId) -> String {
    format!("{DOMAINS}/{id}/name")
}

/// Returns the folder in which a domain has its folders for others.
fn channels_of(id: DomId) -> String {
    format!("{DOMAINS}/{id}/data/tombolo")
}

/// Returns the domain numbers among the nodes of a folder.
fn ids(store: &mut Store, folder: &str) -> Result<Vec<DomId>> {
    Ok(store.folder(folder)?.unwrap_or_default().iter().filter_map(|node| domid(node)).collect())
}

/// Reads what an earlier broker published, and removes what is invalid.
fn records(store: &mut Store, reader: DomId, nodes: &[String]) -> Result<BTreeMap<DomId, Record>> {
    let mut records = BTreeMap::new();
    for node in nodes {
        let path = format!("{}/{node}", folder_of(reader));
        let Some(id) = domid(node) else { continue };
        match store.read(&path)?.and_then(|text| Record::parse(&text)) {
            Some(record) => drop(records.insert(id, record)),
            None => store.remove(&path)?,
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::names::State;

    #[test]
    fn x20_record_that_would_be_too_long_allows_less() {
        let pattern = |number: u32| format!("service-{number}-{}", "x".repeat(40)).parse().unwrap();
        let (ours, theirs): (Vec<_>, Vec<_>) = ((0..80).map(pattern).collect(), (0..3).map(pattern).collect());
        let view = View { name: "a".parse().unwrap(), state: State::Running, ours, theirs };
        let record = fitting(Record { view, pair: Pair { shows: 1, expects: 2 } });
        assert_eq!(Record::parse(&record.to_string()), Some(record.clone()));
        assert_eq!(record.view.theirs.len(), 3, "what fits stays");
        assert!((30..80).contains(&record.view.ours.len()));
    }
}
