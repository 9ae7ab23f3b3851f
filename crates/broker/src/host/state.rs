// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds what a starting broker must know besides the descriptors, in one file that is replaced as a whole (B-16).
//!
//! The order of steps makes it safe to die at any point. For something new, the descriptors go to the descriptor store,
//! *then* the broker state is saved, *then* others are told. Something that is given up leaves the broker state first
//! and the store after that. A starting broker forgets descriptors that the state does not know, and removes entries
//! whose descriptors are missing.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, Permissions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tombolo_control::{FIRST_DOORBELL, NO_DOORBELL, Name, vector_of};

/// State of a broker.
#[derive(Serialize, Deserialize, Default, Debug, Clone, PartialEq)]
pub struct BrokerState {
    /// Last number given to a QEMU process or an incarnation; none is used twice.
    pub last: u64,
    /// Number of the last link. Links have numbers of their own, because a guest can use up any number of incarnations.
    #[serde(default)]
    pub last_link: u32,
    /// Connected QEMU processes, by domain.
    pub machines: BTreeMap<String, Machine>,
    /// Links by number.
    pub links: BTreeMap<u32, Link>,
    /// Memory that was retired and not given back.
    pub quarantine: Vec<Quarantined>,
    /// Accounts that are served, with the user of each (B-7).
    #[serde(default)]
    pub accounts: BTreeMap<String, u32>,
}

/// A connected QEMU.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct Machine {
    /// Number of the QEMU process.
    pub process: u64,
    /// Incarnation of the domain that runs in the process.
    pub life: u64,
    /// Whether the guest was reset, shut down or panicked, and has not said Hello since.
    pub ended: bool,
    /// Boot of the guest that said Hello last (B-6).
    pub boot: Option<[u8; 16]>,
    /// Whether the greeting of B-9 was sent in full.
    pub greeted: bool,
    /// Next number for a doorbell (B-8).
    #[serde(rename = "next_bell")]
    pub next_doorbell: u16,
    /// Doorbells that the QEMU was given.
    #[serde(rename = "bells")]
    pub doorbells: BTreeMap<u16, GrantedDoorbell>,
    /// Number of doorbell numbers that each peer has used up (B-17).
    pub spent: BTreeMap<String, u16>,
    /// Number of doorbells that the QEMU still has of each peer whose QEMU is gone (B-8).
    #[serde(default)]
    pub dead: BTreeMap<String, u16>,
    /// Whether the QEMU was told to forget a doorbell. It would not survive the removal of its own doorbell device then
    /// (B-26).
    #[serde(default)]
    pub is_spent: bool,
}

/// Failure to save the broker's state. The broker continues, but does nothing that requires a saved state first.
#[derive(Debug, thiserror::Error)]
#[error("the broker's state cannot be saved in {folder}: {why}")]
struct Unsaved {
    folder: PathBuf,
    why: io::Error,
}

/// Returns whether an error is a failure to save the broker's state.
#[must_use]
pub fn is_unsaved(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<Unsaved>())
}

/// Number of further numbers that are examined for a new link. In nearly all cases they cover all pairs of vectors of
/// two devices (B-8).
const SPREAD: u32 = 255;

/// Most doorbells of one peer that a QEMU keeps after nobody waits for them any more. Each costs a descriptor (B-8).
const DEAD_MAX: u16 = 8;

/// Number of doorbell numbers that one peer may use up (B-17).
const SHARE: u16 = 1024;

impl Machine {
    /// Returns the state of a QEMU that has just connected.
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

    /// Leaves the QEMU a doorbell of a peer whose QEMU is gone, and which therefore notifies nobody any more. Returns
    /// whether there was room for that (B-8).
    pub fn bury_doorbell(&mut self, number: u16) -> bool {
        let Some(doorbell) = self.doorbells.get(&number) else { return false };
        let dead = self.dead.entry(doorbell.peer.clone()).or_default();
        if *dead >= DEAD_MAX {
            return false;
        }
        *dead += 1;
        self.doorbells.remove(&number).is_some()
    }

    /// Returns a number for the doorbell of `peer` that is never given again, or none if the peer has used up its share
    /// (B-8).
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
    /// Domain that the doorbell notifies.
    pub peer: String,
    /// QEMU process of that domain.
    pub process: u64,
    /// Link whose vector the doorbell is.
    pub link: u32,
    /// Whether the doorbell was sent to the QEMU.
    pub given: bool,
}

/// A link.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct Link {
    /// The two domains that it joins.
    pub ends: [String; 2],
    /// Bytes of each region.
    pub size: u64,
    /// Whether the link exists because the configuration has it.
    pub configured: bool,
    /// Whether it has memory now.
    pub has_memory: bool,
    /// Generation of the memory that the link has, or had last; 0 if it has had none yet.
    pub generation: u32,
    /// Whether the region of each side is sealed, so that the other side may have it.
    pub sealed: [bool; 2],
    /// Whether both domains had both regions when that was last known.
    pub up: bool,
    /// Incarnations of the two domains for which the memory was made.
    pub lives: [u64; 2],
}

/// Retired memory (B-11).
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub struct Quarantined {
    /// Link to which the memory belonged.
    pub link: u32,
    /// Generation of the memory.
    pub generation: u32,
    /// The two domains of the link, against which the memory counts.
    pub ends: [String; 2],
    /// Bytes of both regions.
    pub bytes: u64,
    /// QEMU processes that have not given the memory back, by domain.
    pub held_by: BTreeMap<String, u64>,
    /// Time at which the memory was retired, in seconds since the kernel's start.
    pub since: u64,
}

impl BrokerState {
    /// Returns the next unused number.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Returns the next unused number for a link, if there is one.
    #[cfg(test)]
    pub fn link_number(&mut self) -> Option<u32> {
        self.last_link = self.last_link.checked_add(1)?;
        Some(self.last_link)
    }

    /// Returns a number for a link between `ends`. The number determines the vector at which each domain waits. By
    /// leaving out some numbers, it picks the one whose vectors the fewest other links share (B-8). `vectors` are the
    /// numbers of vectors that each domain has; none for a domain on this host.
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

    /// Reads the broker's state in `folder`. Returns an empty state if there is none.
    ///
    /// # Errors
    /// The file cannot be read, or is not the state of a broker.
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
                // The state dates from before links had numbers of their own.
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
    /// The error of the file system. The old state is then still there, and [`is_unsaved`] recognises the error.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        self.write(folder).map_err(|why| io::Error::new(why.kind(), Unsaved { folder: folder.into(), why }))
    }

    fn write(&self, folder: &Path) -> io::Result<()> {
        let new = folder.join("state.json.new");
        // The state tells who has links with whom, so only this user may read it. An older file may be readable for
        // others.
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(&serde_json::to_vec(self).map_err(io::Error::other)?)?;
        std::fs::rename(new, folder.join("state.json"))
    }

    /// Returns whether a link has memory, and of this generation.
    #[must_use]
    pub fn has(&self, (link, generation): (u32, u32)) -> bool {
        self.links.get(&link).is_some_and(|link| link.has_memory && link.generation == generation)
    }

    /// Returns the names under which descriptors are kept for this state.
    #[must_use]
    pub fn keys(&self) -> BTreeSet<String> {
        let machines = self.machines.iter().map(|(name, machine)| machine_key(name, machine.process));
        let links = self.links.iter().filter(|(_, link)| link.has_memory);
        let links = links.map(|(number, link)| memory_key(*number, link.generation));
        let quarantine = self.quarantine.iter().map(|old| memory_key(old.link, old.generation));
        machines.chain(links).chain(quarantine).collect()
    }

    /// Returns the bytes that count against `domain` (B-17). These are the bytes of its links, whether or not they have
    /// memory now, and those in quarantine that it has not given back. What other domains keep counts against them.
    #[must_use]
    pub fn memory_of(&self, domain: &str) -> u64 {
        let mine = |ends: &[String; 2]| ends.iter().any(|end| end == domain);
        let links = self.links.values().filter(|link| mine(&link.ends)).map(|link| 2 * link.size);
        let old = self.quarantine.iter().filter(|old| old.held_by.contains_key(domain)).map(|old| old.bytes);
        links.chain(old).sum()
    }

    /// Returns the link between two domains.
    pub fn link_between(&self, a: &Name, b: &Name) -> Option<u32> {
        let mut links = self.links_of(a.as_str());
        links.find(|(_, link)| a != b && link.side(b.as_str()).is_some()).map(|(number, _)| number)
    }

    /// Returns the bytes that a domain has not given back, and for how many seconds it should have (B-11).
    pub fn owed_by(&self, domain: &str) -> Option<(u64, u64)> {
        let owed = self.quarantine.iter().filter(|old| old.held_by.contains_key(domain));
        let now = now();
        owed.fold(None, |sum, old| {
            let (bytes, seconds) = sum.unwrap_or((0, 0));
            Some((bytes + old.bytes, seconds.max(now.saturating_sub(old.since))))
        })
    }

    /// Returns the links of `domain`.
    pub fn links_of<'a>(&'a self, domain: &'a str) -> impl Iterator<Item = (u32, &'a Link)> {
        self.links.iter().filter(move |(_, link)| link.side(domain).is_some()).map(|(number, link)| (*number, link))
    }
}

impl Link {
    /// Returns the side of the link that `domain` is.
    #[must_use]
    pub fn side(&self, domain: &str) -> Option<usize> {
        self.ends.iter().position(|end| end == domain)
    }
}

/// Returns the name under which a QEMU's descriptors are kept.
#[must_use]
pub fn machine_key(name: &str, process: u64) -> String {
    format!("machine/{name}/{process}")
}

/// Returns the name under which a link's memory is kept.
#[must_use]
pub fn memory_key(link: u32, generation: u32) -> String {
    format!("memory/{link}/{generation}")
}

/// Returns the seconds since the kernel's start: restarts of brokers and changed clocks do not affect them.
#[must_use]
pub fn now() -> u64 {
    u64::try_from(rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec).unwrap_or_default()
}

/// Returns a region's name in QEMU. It states whose memory it is, so that other memory has another name.
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
        // The state of an earlier broker has only the last of all numbers.
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
