// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a broker that begins must know besides the descriptors: one file, replaced as a whole (B-16).
//!
//! The order makes it safe to die anywhere. What begins: descriptors go to the descriptor store, *then* the broker
//! state is saved, *then* somebody is told. What is given up leaves the broker state first and the store after. At the
//! start, descriptors that the state does not know are forgotten, and entries whose descriptors are not there are
//! removed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, Permissions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tombolo_control::{FIRST_DOORBELL, NO_DOORBELL, Name, vector_of};

/// All of it.
#[derive(Serialize, Deserialize, Default, Debug, Clone, PartialEq)]
pub struct BrokerState {
    /// Number of the last QEMU process and life that was given out; none is used twice.
    pub last: u64,
    /// Number of the last link. These have numbers of their own: a guest can use up as many lives as it likes.
    #[serde(default)]
    pub last_link: u32,
    /// QEMU processes that are connected, by domain.
    pub machines: BTreeMap<String, Machine>,
    /// Links by number.
    pub links: BTreeMap<u32, Link>,
    /// Memory that is out of use and not given back.
    pub quarantine: Vec<Quarantined>,
    /// The accounts that are served, and whose they are (B-7).
    #[serde(default)]
    pub accounts: BTreeMap<String, u32>,
}

/// A connected QEMU.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct Machine {
    /// Which process it is.
    pub process: u64,
    /// Which life of the domain runs in it.
    pub life: u64,
    /// The guest was reset, shut down or panicked, and has not said Hello since.
    pub ended: bool,
    /// Of the guest that said Hello last (B-6).
    pub boot: Option<[u8; 16]>,
    /// The greeting of B-9 went out whole.
    pub greeted: bool,
    /// The next number for a doorbell (B-8).
    #[serde(rename = "next_bell")]
    pub next_doorbell: u16,
    /// Doorbells that it was given.
    #[serde(rename = "bells")]
    pub doorbells: BTreeMap<u16, GrantedDoorbell>,
    /// Numbers that each peer used up (B-17).
    pub spent: BTreeMap<String, u16>,
    /// Doorbells that it has still of peers whose QEMU is gone, of each so many (B-8).
    #[serde(default)]
    pub dead: BTreeMap<String, u16>,
    /// It was told to forget a doorbell: it would not survive to lose its own (B-26).
    #[serde(default)]
    pub is_spent: bool,
}

/// Why the broker's state is not saved. A broker goes on then, and nothing that is to be in the state first is done before it is.
#[derive(Debug, thiserror::Error)]
#[error("the broker's state cannot be saved in {folder}: {why}")]
struct Unsaved {
    folder: PathBuf,
    why: io::Error,
}

/// Whether an error is that the broker's state could not be saved.
#[must_use]
pub fn is_unsaved(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<Unsaved>())
}

/// How many numbers are looked at for a link: all pairs of vectors of two devices, in nearly all cases (B-8).
const SPREAD: u32 = 255;

/// Most doorbells of one peer that a QEMU keeps though nobody hears them: each is a descriptor (B-8).
const DEAD_MAX: u16 = 8;

/// Numbers for doorbells that one peer may use up (B-17).
const SHARE: u16 = 1024;

impl Machine {
    /// A QEMU that just connected.
    #[must_use]
    pub fn new(process: u64, life: u64) -> Self {
        Self {
            process,
            life,
            ended: false,
            boot: None,
            greeted: false,
            next_doorbell: FIRST_DOORBELL,
            doorbells: BTreeMap::new(),
            spent: BTreeMap::new(),
            dead: BTreeMap::new(),
            is_spent: false,
        }
    }

    /// Leaves it a doorbell of a peer whose QEMU is gone, which rings nobody any more, if there is room for that (B-8).
    pub fn bury_doorbell(&mut self, number: u16) -> bool {
        let Some(doorbell) = self.doorbells.get(&number) else { return false };
        let dead = self.dead.entry(doorbell.peer.clone()).or_default();
        if *dead >= DEAD_MAX {
            return false;
        }
        *dead += 1;
        self.doorbells.remove(&number).is_some()
    }

    /// A number for the doorbell of `peer`, which is never given again; none if it had its share (B-8).
    pub fn number_for(&mut self, peer: &str) -> Option<u16> {
        let spent = self.spent.entry(peer.into()).or_default();
        if *spent >= SHARE || self.next_doorbell == NO_DOORBELL {
            return None;
        }
        *spent += 1;
        self.next_doorbell += 1;
        Some(self.next_doorbell - 1)
    }
}

/// A doorbell that a QEMU was given.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct GrantedDoorbell {
    /// Whose it is.
    pub peer: String,
    /// In which process.
    pub process: u64,
    /// For which link: it is the vector of that.
    pub link: u32,
    /// It went out.
    pub given: bool,
}

/// A link.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct Link {
    /// Its two ends.
    pub ends: [String; 2],
    /// Bytes of each region.
    pub size: u64,
    /// It is there because the configuration says so.
    pub configured: bool,
    /// Whether it has memory now.
    pub has_memory: bool,
    /// Which memory it has, or had last; 0: it had none yet.
    pub generation: u32,
    /// Whether the region of each end is sealed, so that the other may have it.
    pub sealed: [bool; 2],
    /// Both ends had both regions when that was last known.
    pub up: bool,
    /// The lives for which the memory is.
    pub lives: [u64; 2],
}

/// Memory out of use (B-11).
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct Quarantined {
    /// The link whose it was.
    pub link: u32,
    /// Which of its memories.
    pub generation: u32,
    /// Both ends, against which it counts.
    pub ends: [String; 2],
    /// Bytes of both regions.
    pub bytes: u64,
    /// The QEMU processes that have not given it back, by domain.
    pub held_by: BTreeMap<String, u64>,
    /// Seconds since this kernel began when it was taken out of use.
    pub since: u64,
}

impl BrokerState {
    /// The next number that nobody had.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The next number for a link, if there is one that none had.
    #[cfg(test)]
    pub fn link_number(&mut self) -> Option<u32> {
        self.last_link = self.last_link.checked_add(1)?;
        Some(self.last_link)
    }

    /// The same for a link between `ends`, of which each waits at a vector that its number says: one where as few others wait as
    /// can be had by leaving out some numbers (B-8). An end has so many `vectors`; none: it is on this host.
    pub fn link_number_for(&mut self, ends: [&str; 2], vectors: [Option<u16>; 2]) -> Option<u32> {
        let first = self.last_link.checked_add(1)?;
        let shared = |number: u32| {
            let of_end = |(end, vectors): (&str, Option<u16>)| {
                let Some(vectors) = vectors else { return 0 };
                let vector = vector_of(number, vectors);
                self.links_of(end).filter(|(other, _)| vector_of(*other, vectors) == vector).count()
            };
            ends.into_iter().zip(vectors).map(of_end).sum::<usize>()
        };
        let candidates = first..=first.saturating_add(SPREAD);
        let best = candidates.min_by_key(|number| (shared(*number), *number))?;
        self.last_link = best;
        Some(best)
    }

    /// Reads the broker's state in `folder`; an empty one where there is none.
    ///
    /// # Errors
    /// It cannot be read, or is something else.
    pub fn read(folder: &Path) -> io::Result<Self> {
        let path = folder.join("state.json");
        match std::fs::read(&path) {
            Ok(bytes) => {
                let mut state: Self = serde_json::from_slice(&bytes).map_err(|error| {
                    let path = path.display();
                    io::Error::other(format!(
                        "{path} is not the state of a broker: {error}; remove it once no QEMU is connected"
                    ))
                })?;
                // One of before links had numbers of their own.
                if state.last_link == 0 {
                    state.last_link = u32::try_from(state.last).unwrap_or(u32::MAX);
                }
                Ok(state)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    /// Replaces the state in `folder`.
    ///
    /// # Errors
    /// What the file system says; then the old one is still there, and [`is_unsaved`] knows the error.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        self.write(folder).map_err(|why| io::Error::new(why.kind(), Unsaved { folder: folder.into(), why }))
    }

    fn write(&self, folder: &Path) -> io::Result<()> {
        let new = folder.join("state.json.new");
        // It says who has links with whom: for this user alone, also where one of before was for others.
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(&serde_json::to_vec(self).map_err(io::Error::other)?)?;
        std::fs::rename(new, folder.join("state.json"))
    }

    /// Whether a link has its memory in this generation.
    #[must_use]
    pub fn has(&self, (link, generation): (u32, u32)) -> bool {
        self.links.get(&link).is_some_and(|link| link.has_memory && link.generation == generation)
    }

    /// Names under which descriptors are kept for this state.
    #[must_use]
    pub fn keys(&self) -> BTreeSet<String> {
        let machines = self.machines.iter().map(|(name, machine)| machine_key(name, machine.process));
        let links = self.links.iter().filter(|(_, link)| link.has_memory);
        let links = links.map(|(number, link)| memory_key(*number, link.generation));
        let quarantine = self.quarantine.iter().map(|old| memory_key(old.link, old.generation));
        machines.chain(links).chain(quarantine).collect()
    }

    /// Bytes that count against `domain`: its links', whether they have memory now or not, and what it has not given back of the
    /// quarantine (B-17). What others keep is theirs to answer for.
    #[must_use]
    pub fn memory_of(&self, domain: &str) -> u64 {
        let mine = |ends: &[String; 2]| ends.iter().any(|end| end == domain);
        let links = self.links.values().filter(|link| mine(&link.ends)).map(|link| 2 * link.size);
        let old = self.quarantine.iter().filter(|old| old.held_by.contains_key(domain)).map(|old| old.bytes);
        links.chain(old).sum()
    }

    /// The link that two domains have.
    pub fn link_between(&self, a: &Name, b: &Name) -> Option<u32> {
        let mut links = self.links_of(a.as_str());
        links.find(|(_, link)| a != b && link.side(b.as_str()).is_some()).map(|(number, _)| number)
    }

    /// What a domain has not given back: bytes, and the seconds since it should have (B-11).
    pub fn owed_by(&self, domain: &str) -> Option<(u64, u64)> {
        let owed = self.quarantine.iter().filter(|old| old.held_by.contains_key(domain));
        let now = now();
        owed.fold(None, |sum, old| {
            let (bytes, seconds) = sum.unwrap_or((0, 0));
            Some((bytes + old.bytes, seconds.max(now.saturating_sub(old.since))))
        })
    }

    /// Links of `domain`.
    pub fn links_of<'a>(&'a self, domain: &'a str) -> impl Iterator<Item = (u32, &'a Link)> {
        self.links.iter().filter(move |(_, link)| link.side(domain).is_some()).map(|(number, link)| (*number, link))
    }
}

impl Link {
    /// Which of its ends `domain` is.
    #[must_use]
    pub fn side(&self, domain: &str) -> Option<usize> {
        self.ends.iter().position(|end| end == domain)
    }
}

/// Under which name a QEMU's descriptors are kept.
#[must_use]
pub fn machine_key(name: &str, process: u64) -> String {
    format!("machine/{name}/{process}")
}

/// Under which name a link's memory is kept.
#[must_use]
pub fn memory_key(link: u32, generation: u32) -> String {
    format!("memory/{link}/{generation}")
}

/// Seconds since this kernel began: brokers come and go meanwhile, and people set clocks.
#[must_use]
pub fn now() -> u64 {
    u64::try_from(rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec).unwrap_or_default()
}

/// A region's name in QEMU: whose memory it is shows in it, so that other memory has another name.
#[must_use]
pub fn plug_name(link: u32, generation: u32, own: bool) -> String {
    format!("{link}-{generation}-{}", if own { "own" } else { "peer" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b16_state_comes_back_as_it_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(BrokerState::read(folder.path()).unwrap(), BrokerState::default());
        let mut state = BrokerState::default();
        assert_eq!((state.number(), state.number(), state.link_number()), (1, 2, Some(1)));
        let ends = ["a".to_owned(), "b".to_owned()];
        let (sealed, lives, up) = ([true, false], [4, 0], false);
        state.links.insert(
            7,
            Link {
                ends: ends.clone(),
                size: 1 << 20,
                has_memory: true,
                configured: true,
                generation: 3,
                sealed,
                up,
                lives,
            },
        );
        let held_by = BTreeMap::from([("a".to_owned(), 5)]);
        state.quarantine.push(Quarantined { link: 7, generation: 2, ends, bytes: 2 << 20, held_by, since: 9 });
        std::fs::write(folder.path().join("state.json.new"), "left by one that died").unwrap();
        state.save(folder.path()).unwrap();
        let mode = std::fs::metadata(folder.path().join("state.json")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "others read it");
        assert_eq!(BrokerState::read(folder.path()).unwrap(), state);
        assert_eq!(state.keys(), ["memory/7/2", "memory/7/3"].map(String::from).into());
        let uses = ["a", "b", "c"].map(|domain| state.memory_of(domain));
        assert_eq!(uses, [4 << 20, 2 << 20, 0], "what a keeps is not b's");
    }

    #[test]
    fn b17_guest_that_begins_lives_without_end_uses_up_no_numbers_of_links() {
        let mut state = BrokerState { last: u64::from(u32::MAX), ..BrokerState::default() };
        state.number();
        assert_eq!(state.link_number(), Some(1));
        state.last_link = u32::MAX;
        assert_eq!(state.link_number(), None);
        // The state of an earlier broker knows the last of all numbers alone.
        let folder = tempfile::tempdir().unwrap();
        BrokerState { last: 7, ..BrokerState::default() }.save(folder.path()).unwrap();
        assert_eq!(BrokerState::read(folder.path()).unwrap().link_number(), Some(8));
    }

    #[test]
    fn b8_links_share_a_vector_only_where_none_is_free() {
        let mut state = BrokerState::default();
        let vectors = [Some(8), Some(4)];
        for nth in 0..14 {
            // Others make links in between.
            state.last_link += 6;
            let peer = format!("b{nth}");
            let number = state.link_number_for(["a", &peer], vectors).unwrap();
            let ends = ["a".to_owned(), peer];
            let (has_memory, configured, sealed, up, lives) = (false, false, [false; 2], false, [0; 2]);
            let link = Link { ends, size: 1 << 20, has_memory, configured, generation: 0, sealed, up, lives };
            state.links.insert(number, link);
            let used: BTreeSet<u16> = state.links.keys().map(|number| vector_of(*number, 8)).collect();
            assert_eq!(used.len(), 7.min(nth + 1), "{:?}", state.links.keys());
        }
        state.last_link = u32::MAX;
        assert_eq!(state.link_number_for(["a", "b"], vectors), None);
    }

    #[test]
    fn b17_peer_that_uses_up_its_numbers_takes_none_of_anothers() {
        let mut machine = Machine::new(1, 2);
        let used: Vec<_> = std::iter::from_fn(|| machine.number_for("b")).collect();
        assert_eq!((used.len(), used[0], used[1023]), (1024, 2, 1025));
        assert_eq!((machine.number_for("b"), machine.number_for("c")), (None, Some(1026)));
        machine.next_doorbell = NO_DOORBELL;
        assert_eq!(machine.number_for("d"), None);
    }
}
