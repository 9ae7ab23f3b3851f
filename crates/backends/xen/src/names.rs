// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds what the broker of dom0 publishes about other domains: their names, what rules allow, and their liveness (X-20
//! to X-22).

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use tombolo_control::{Name, Pattern};
use tombolo_domain::{Liveness, Result, aside::ReservedFd};
use tombolo_layout::xen as at;

use crate::{
    hypervisor::{DomId, Hypervisor},
    os::{eventfd, lock, raise},
    page::PeerPage,
    place::{DOMID_MAX, Pair},
    store::Store,
};

/// Version of a record, with which the record begins.
const VERSION: &str = "1";
/// Largest length of a record: with its path it fits into a message of XenStore.
pub(crate) const RECORD_MAX: usize = 3072;
/// Node with the reference of the page by which the broker shows that it lives.
pub(crate) const ALIVE: &str = "alive";
/// Node with a domain's own name.
pub(crate) const OWN: &str = "self";
/// Name that the broker claims in dom0, where that page cannot be mapped.
pub(crate) const BROKER: &str = "tombolod";

/// Returns the folder in which the broker publishes what `reader` may know.
pub(crate) fn folder_of(reader: DomId) -> String {
    format!("/local/domain/{reader}/tombolo")
}

/// Parses a domain's number as XenStore has it: only digits, no leading zero, and not too large.
pub(crate) fn domid(text: &str) -> Option<DomId> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !(text.len() > 1 && text.starts_with('0'));
    text.parse().ok().filter(|id| plain && *id <= DOMID_MAX)
}

/// Liveness of a domain, as dom0 sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum State {
    /// The domain runs.
    Running,
    /// The domain was paused.
    Paused,
    /// The state could not be determined.
    #[default]
    Unknown,
}

impl State {
    const ALL: [(&str, Self); 3] = [("running", Self::Running), ("paused", Self::Paused), ("unknown", Self::Unknown)];
}

/// View that one domain may have of another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct View {
    /// Name of the other domain.
    pub name: Name,
    /// Liveness of the other domain.
    pub state: State,
    /// Services of the reader to which the other domain may connect.
    pub ours: Vec<Pattern>,
    /// Services of the other domain to which the reader may connect.
    pub theirs: Vec<Pattern>,
}

/// A view, and the numbers by which the two domains recognise each other as those that were meant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub view: View,
    pub pair: Pair,
}

impl Record {
    /// Parses the value of a node. Returns none unless all of it is valid.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix('\n').filter(|_| text.len() <= RECORD_MAX)?.split('\n');
        let mut words = lines.next()?.split(' ');
        let mut word = || words.next();
        word().filter(|version| *version == VERSION)?;
        let name = word()?.parse().ok()?;
        let state = word()?;
        let (_, state) = State::ALL.into_iter().find(|(known, _)| *known == state)?;
        let number = |text: &str| {
            let plain = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            u64::from_str_radix(text, 16).ok().filter(|number| plain && *number != 0)
        };
        let pair = Pair { shows: number(word()?)?, expects: number(word()?)? };
        if word().is_some() {
            return None;
        }
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for line in lines {
            let (way, pattern) = line.split_once(' ')?;
            let list = match way {
                "ours" => &mut ours,
                "theirs" => &mut theirs,
                _ => return None,
            };
            list.push(pattern.parse().ok()?);
        }
        Some(Self { view: View { name, state, ours, theirs }, pair })
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (View { name, state, ours, theirs }, Pair { shows, expects }) = (&self.view, self.pair);
        let (state, _) = State::ALL.into_iter().find(|(_, known)| known == state).expect("all are there");
        writeln!(f, "{VERSION} {name} {state} {shows:016x} {expects:016x}")?;
        ours.iter().try_for_each(|pattern| writeln!(f, "ours {pattern}"))?;
        theirs.iter().try_for_each(|pattern| writeln!(f, "theirs {pattern}"))
    }
}

/// State that the broker published.
#[derive(Debug, Default)]
struct Published {
    /// Whether the folder exists.
    there: bool,
    own: Option<Name>,
    records: BTreeMap<DomId, Record>,
    /// The broker's page and its reference.
    alive: Option<(u32, PeerPage)>,
    /// Eventfds raised when the set of domains that may connect changes.
    ears: Vec<Weak<ReservedFd>>,
}

/// Published state for this domain, kept up to date by the watch of the process's thread.
#[derive(Debug)]
pub(crate) struct Names {
    xen: Arc<dyn Hypervisor>,
    own: DomId,
    folder: String,
    told: Mutex<Published>,
    /// Held from a request to XenStore until its answer is stored, so that the last request determines the result.
    turn: Mutex<()>,
    /// Whether everything was read once.
    loaded: AtomicBool,
}

impl Names {
    pub(crate) fn new(xen: &Arc<dyn Hypervisor>, own: DomId) -> Self {
        let (told, turn, loaded) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        Self { xen: Arc::clone(xen), own, folder: folder_of(own), told, turn, loaded }
    }

    /// Returns the folder that must be watched.
    pub(crate) fn folder(&self) -> &str {
        &self.folder
    }

    /// Returns whether a change of `path` concerns what is published here.
    pub(crate) fn is_about(&self, path: &str) -> bool {
        path.strip_prefix(&self.folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Updates the published state after a change.
    pub(crate) fn update_from_store(&self, store: &mut Store, path: &str) -> Result<()> {
        let _turn = lock(&self.turn);
        match path.strip_prefix(&self.folder).and_then(|rest| rest.strip_prefix('/')) {
            Some(node) if lock(&self.told).there => self.read(store, node),
            _ => self.load(store),
        }
    }

    /// Returns whether anything is published. That is looked up once; the watch reports later changes.
    pub(crate) fn are_published(&self, store: &Mutex<Store>) -> Result<bool> {
        if !self.loaded.load(Ordering::Acquire) {
            let (mut store, _turn) = (lock(store), lock(&self.turn));
            self.load(&mut store)?;
        }
        Ok(lock(&self.told).there)
    }

    /// Reads everything that is published. The caller holds `turn`.
    fn load(&self, store: &mut Store) -> Result<()> {
        let nodes = store.folder(&self.folder)?;
        lock(&self.told).there = nodes.is_some();
        let nodes = nodes.unwrap_or_default();
        let known: Vec<DomId> = lock(&self.told).records.keys().copied().collect();
        let gone = known.iter().map(DomId::to_string).filter(|node| !nodes.contains(node));
        for node in nodes.iter().cloned().chain(gone) {
            self.read(store, &node)?;
        }
        self.loaded.store(true, Ordering::Release);
        Ok(())
    }

    /// Reads one node. The caller holds `turn`.
    fn read(&self, store: &mut Store, node: &str) -> Result<()> {
        let mut value = || store.read(&format!("{}/{node}", self.folder));
        if node == OWN {
            let own = value()?.and_then(|text| text.parse().ok());
            lock(&self.told).own = own;
        } else if node == ALIVE {
            let reference = value()?.and_then(|text| text.parse().ok());
            self.sweep();
            if lock(&self.told).alive.as_ref().map(|(known, _)| *known) != reference {
                let page = reference.and_then(|reference| Some((reference, self.open(reference)?)));
                lock(&self.told).alive = page;
            }
        } else if let Some(id) = domid(node).filter(|id| *id != self.own) {
            let record = value()?.and_then(|text| Record::parse(&text));
            let callers = |record: &Record| (record.view.ours.clone(), record.view.theirs.clone(), record.pair);
            let now = record.as_ref().map(callers);
            let mut told = lock(&self.told);
            let before = match record {
                Some(record) => told.records.insert(id, record),
                None => told.records.remove(&id),
            };
            if before.as_ref().map(callers) != now {
                told.ears.retain(|ear| ear.upgrade().inspect(|ear| raise(ear)).is_some());
            }
        }
        Ok(())
    }

    /// Maps the broker's page, which dom0 grants. dom0 itself cannot map it.
    fn open(&self, reference: u32) -> Option<PeerPage> {
        let page = (self.own != 0).then(|| self.xen.map(0, &[reference], None, Box::new(())))?.ok()?;
        PeerPage::new(page, at::BROKER_MAGIC).ok().map(|(page, _)| page)
    }

    /// Returns whether the broker that published this is still alive.
    fn broker_lives(&self, told: &Published) -> bool {
        match self.own {
            0 => matches!(self.xen.claim(BROKER), Ok(None)),
            _ => told.alive.as_ref().is_some_and(|(_, page)| page.state() == at::OPEN),
        }
    }

    /// Unmaps the page of a broker that died, because the mapping keeps the page from being freed.
    pub(crate) fn sweep(&self) {
        lock(&self.told).alive.take_if(|(_, page)| page.state() != at::OPEN);
    }

    /// Returns the liveness of a domain that shows no sign of its end.
    pub(crate) fn liveness(&self, id: DomId) -> Liveness {
        let told = lock(&self.told);
        match told.records.get(&id).map(|record| record.view.state) {
            Some(State::Running) if self.broker_lives(&told) => Liveness::Running,
            Some(State::Paused) if self.broker_lives(&told) => Liveness::Paused,
            _ => Liveness::Unknown,
        }
    }

    /// Returns the name of this domain.
    pub(crate) fn own(&self) -> Option<Name> {
        lock(&self.told).own.clone()
    }

    /// Returns the numbers of the pair of this domain and `id`, while that domain is published.
    pub(crate) fn pair_of(&self, id: DomId) -> Option<Pair> {
        lock(&self.told).records.get(&id).map(|record| record.pair)
    }

    /// Returns all domains that are published to this one.
    pub(crate) fn all(&self) -> Vec<(DomId, Record)> {
        lock(&self.told).records.iter().map(|(id, record)| (*id, record.clone())).collect()
    }

    /// Returns the domain called `name`.
    pub(crate) fn find(&self, name: &Name) -> Option<(DomId, Record)> {
        let told = lock(&self.told);
        let mut found = told.records.iter().filter(|(_, record)| record.view.name == *name);
        match (found.next(), found.next()) {
            (Some((id, record)), None) => Some((*id, record.clone())),
            // Two domains with one name are both ignored.
            _ => None,
        }
    }

    /// Returns the domains that may connect to `service` here.
    pub(crate) fn callers(&self, service: &Name) -> BTreeMap<DomId, Pair> {
        let told = lock(&self.told);
        let may = |record: &Record| record.view.ours.iter().any(|pattern| pattern.matches(service));
        told.records.iter().filter(|(_, record)| may(record)).map(|(id, record)| (*id, record.pair)).collect()
    }

    /// Returns a descriptor that polls readable when the set of domains that may connect changes from now on.
    pub(crate) fn ear(&self) -> Result<Arc<ReservedFd>> {
        let ear = Arc::new(eventfd()?);
        lock(&self.told).ears.push(Arc::downgrade(&ear));
        Ok(ear)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = "1 right paused 00000000000000a1 b2b2b2b2b2b2b2b2\nours sql-*\ntheirs file\ntheirs log\n";

    #[test]
    fn x20_record_is_what_was_written() {
        let record = Record::parse(GOOD).unwrap();
        assert_eq!(record.to_string(), GOOD);
        assert_eq!((record.view.name.as_str(), record.view.state), ("right", State::Paused));
        assert_eq!(record.pair, Pair { shows: 0xa1, expects: 0xb2b2_b2b2_b2b2_b2b2 });
        assert_eq!((record.view.ours.len(), record.view.theirs.len()), (1, 2));
        assert!(Record::parse("1 a unknown 0000000000000001 0000000000000002\n").is_some());
    }

    #[test]
    fn x20_record_that_makes_no_sense_is_not_believed() {
        let head = "1 a running 0000000000000001 0000000000000002";
        let long = format!("{head}\n{}", "ours a\n".repeat(RECORD_MAX / 7));
        for bad in [
            "",
            "\n",
            head,
            "2 a running 0000000000000001 0000000000000002\n",
            "1 -a running 0000000000000001 0000000000000002\n",
            "1 a resting 0000000000000001 0000000000000002\n",
            "1 a running 0000000000000000 0000000000000002\n",
            "1 a running 0000000000000001 2\n",
            "1 a running 0000000000000001 +000000000000002\n",
            "1 a running 0000000000000001\n",
            "1 a running 0000000000000001 0000000000000002 \n",
            "1 a running 0000000000000001 0000000000000002\n\n",
            "1 a running 0000000000000001 0000000000000002\nours\n",
            "1 a running 0000000000000001 0000000000000002\nours a b\n",
            "1 a running 0000000000000001 0000000000000002\nfrom a\n",
            "1  running 0000000000000001 0000000000000002\n",
            &long,
        ] {
            assert_eq!(Record::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn x20_number_of_a_domain_is_digits_in_range() {
        assert_eq!(["0", "7", "32751"].map(domid), [0, 7, 32751].map(Some));
        assert!(
            ["", "+7", "07", "00", "32752", "65536", "99999999999", "7 ", "alive", "-1"]
                .iter()
                .all(|bad| domid(bad).is_none())
        );
    }

    proptest! {
        #[test]
        fn x20_any_text_is_taken_apart_without_harm(text in "\\PC{0,200}|[0-9a-z \n*.-]{0,200}") {
            if let Some(record) = Record::parse(&text) {
                prop_assert_eq!(Record::parse(&record.to_string()), Some(record));
            }
        }
    }
}
