// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which neighbour may have an address, and where the other end of a TCP connection waits (B-22, B-23).
//!
//! All of it is hints. A neighbour that claims what is not its own draws proposals to itself, which prove nothing to it, and the
//! connections stay on TCP.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use tombolo_control::{ADDRESSES_MAX, Message, Name, Way, code};

use crate::endpoint::{
    connections::Refusal,
    devices::Region,
    link::Link,
    peer_session::Inquiry,
    program::{self, Program, ProgramState},
};

/// Keys that one program may claim.
const CLAIMS_MAX: usize = 1024;
/// Claims beyond which those of programs that have gone are cleared away.
const CLAIMS_KEPT: usize = 4096;
/// Neighbours that are asked for one connection.
const CANDIDATES: usize = 4;
/// How long they may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// A question of a program's that neighbours are to answer.
#[derive(Debug)]
struct Pending {
    program: u64,
    asked: u32,
    serial: u32,
    /// The links whose peers have not answered.
    links: BTreeSet<u32>,
    until: Instant,
}

/// What is known of who is where.
#[derive(Debug, Default)]
pub(crate) struct Finding {
    /// Of the peer of each link, as it says.
    near: BTreeMap<u32, Vec<[u8; 16]>>,
    /// Who waits for a key. None: more than one program says so.
    claims: BTreeMap<u32, Option<u64>>,
    pending: Vec<Pending>,
    serial: u32,
}

impl Finding {
    /// Stores the addresses at which the peer of a link may be reached, as the host told (B-22).
    pub(crate) fn learn(&mut self, link: u32, mut addresses: Vec<[u8; 16]>) {
        addresses.truncate(ADDRESSES_MAX);
        self.near.insert(link, addresses);
    }

    pub(crate) fn forget_link(&mut self, link: u32) {
        self.near.remove(&link);
    }

    /// The host is another one: its links have nothing to do with those before.
    pub(crate) fn forget_links(&mut self) {
        self.near.clear();
    }

    /// The links whose peers may have `address`.
    fn candidates(&self, address: [u8; 16]) -> impl Iterator<Item = u32> {
        let near = self.near.iter().filter(move |(_, addresses)| addresses.contains(&address));
        near.map(|(link, _)| *link).take(CANDIDATES)
    }

    /// Counts the peer domains that may have `address` (B-22).
    pub(crate) fn locate(&self, address: [u8; 16]) -> u8 {
        self.candidates(address).count() as u8
    }

    /// Records that a listening program waits for `key` (B-23).
    pub(crate) fn claim(&mut self, id: u64, key: u32, programs: &BTreeMap<u64, Program>) {
        if self.claims.len() >= CLAIMS_KEPT {
            self.claims.retain(|_, id| id.is_some_and(|id| programs.contains_key(&id)));
        }
        if self.claims.values().filter(|it| **it == Some(id)).count() >= CLAIMS_MAX {
            return;
        }
        let taken = self.claims.get(&key).copied().flatten().filter(|it| *it != id && programs.contains_key(it));
        let contested = self.claims.get(&key) == Some(&None);
        self.claims.insert(key, Some(id).filter(|_| taken.is_none() && !contested));
    }

    /// Records that the program waits for `key` no longer (B-23).
    pub(crate) fn unclaim(&mut self, id: u64, key: u32) {
        // What two have claimed is nobody's for as long as one of them goes on.
        if self.claims.get(&key).is_some_and(|it| it.is_none_or(|it| it == id)) {
            self.claims.remove(&key);
        }
    }

    /// Asks the peer domains that may have `address` who waits for `key` (B-23).
    pub(crate) fn find<R: Region>(
        &mut self,
        (program, asked): (u64, u32),
        (key, address): (u32, [u8; 16]),
        links: &mut BTreeMap<u32, Link<R>>,
    ) -> Result<(), Refusal> {
        if self.pending.iter().any(|pending| pending.program == program) {
            return Err(Refusal(code::MALFORMED, "one question at a time".into()));
        }
        self.serial = self.serial.wrapping_add(1).max(1);
        let mut asks = BTreeSet::new();
        for number in self.candidates(address).collect::<Vec<_>>() {
            let Some(link) = links.get_mut(&number).filter(|link| !link.leaving && !link.draining.is_on()) else {
                continue;
            };
            let Some((_, peer)) = link.memory.as_mut().filter(|(_, peer)| peer.is_there() && peer.finds()) else {
                continue;
            };
            if peer.queue_message(self.serial, Message::Seek { key }) {
                asks.insert(number);
            }
        }
        if asks.is_empty() {
            return Err(Refusal(code::NOT_FOUND, "no neighbour has this address".into()));
        }
        let (serial, until) = (self.serial, Instant::now() + PATIENCE);
        self.pending.push(Pending { program, asked, serial, links: asks, until });
        Ok(())
    }

    /// What the peer's broker says of it. True if it is to hear an answer.
    pub(crate) fn hear_inquiry<R: Region>(
        &mut self,
        inquiry: Inquiry,
        own: &Name,
        link: &mut Link<R>,
        programs: &BTreeMap<u64, Program>,
    ) -> bool {
        match inquiry {
            Inquiry::Seek(serial, key) => {
                let service = self.claimant(key, link, programs);
                let Some((_, peer)) = &mut link.memory else { return false };
                let answer = match service {
                    Some(service) => Message::Found { peer: own.clone(), service },
                    None => Message::Nobody {},
                };
                peer.queue_message(serial, answer);
                return true;
            }
            Inquiry::Found(serial, service) => {
                if let Some(pending) = self.answered(serial, link.news.link) {
                    answer_program(&pending, Message::Found { peer: link.news.peer.clone(), service }, programs);
                }
            }
            Inquiry::Nobody(serial) => {
                let number = link.news.link;
                let last = self
                    .pending
                    .iter_mut()
                    .find(|it| it.serial == serial)
                    .is_some_and(|pending| pending.links.len() > 1 && pending.links.remove(&number));
                if !last && let Some(pending) = self.answered(serial, number) {
                    answer_program(&pending, nobody(), programs);
                }
            }
        }
        false
    }

    /// The service of who waits for `key`, if the peer of `link` may connect to it.
    fn claimant<R: Region>(&self, key: u32, link: &Link<R>, programs: &BTreeMap<u64, Program>) -> Option<Name> {
        let program = programs.get(&(*self.claims.get(&key)?)?)?;
        let ProgramState::Listening(service) = &program.doing else { return None };
        let may = link.news.allows(Way::In, service) && !link.draining.is_on();
        may.then(|| service.clone())
    }

    /// A question that this link was asked for.
    fn answered(&mut self, serial: u32, link: u32) -> Option<Pending> {
        let at = self.pending.iter().position(|it| it.serial == serial && it.links.contains(&link))?;
        Some(self.pending.swap_remove(at))
    }

    /// When the first neighbour will have taken too long.
    pub(crate) fn late_at(&self) -> Option<Instant> {
        self.pending.iter().map(|pending| pending.until).min()
    }

    /// Neighbours that take too long know nobody.
    pub(crate) fn give_up(&mut self, now: Instant, programs: &BTreeMap<u64, Program>) {
        let late: Vec<_> = self.pending.extract_if(.., |pending| now >= pending.until).collect();
        late.iter().for_each(|pending| answer_program(pending, nobody(), programs));
    }
}

fn nobody() -> Message {
    Message::Refuse { code: code::NOT_FOUND, reason: "nobody waits there".into() }
}

/// One that does not read its answer asks no other question.
fn answer_program(pending: &Pending, message: Message, programs: &BTreeMap<u64, Program>) {
    if let Some(program) = programs.get(&pending.program) {
        let _ = program::send(program.fd(), pending.asked, message, &[]);
    }
}
