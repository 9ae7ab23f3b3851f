// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds the peer domain that may have an address, and the program that waits for the other end of a TCP connection
//! (B-22, B-23).
//!
//! All of it is hints. A hostile peer that claims what is not its own attracts proposals, which prove nothing to it,
//! and the connections stay on TCP.

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

/// Largest number of keys that one program may claim.
const CLAIMS_MAX: usize = 1024;
/// Number of claims beyond which those of programs that have gone are removed.
const CLAIMS_KEPT: usize = 4096;
/// Largest number of peers that are asked about one connection.
const CANDIDATES: usize = 4;
/// Time that these peers may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// A program's question that waits for answers of peers.
#[derive(Debug)]
struct Pending {
    program: u64,
    asked: u32,
    serial: u32,
    /// Links whose peers have not answered.
    links: BTreeSet<u32>,
    until: Instant,
}

/// Addresses of peers, and programs that wait for TCP connections.
#[derive(Debug, Default)]
pub(crate) struct Finding {
    /// Addresses that the peer of each link claims.
    near: BTreeMap<u32, Vec<[u8; 16]>>,
    /// Program that waits for each key; `None` if more than one claims it.
    claims: BTreeMap<u32, Option<u64>>,
    pending: Vec<Pending>,
    serial: u32,
}

impl Finding {
    /// Stores the addresses at which the peer of a link may be reached, as the host sent them (B-22).
    pub(crate) fn learn(&mut self, link: u32, mut addresses: Vec<[u8; 16]>) {
        addresses.truncate(ADDRESSES_MAX);
        self.near.insert(link, addresses);
    }

    pub(crate) fn forget_link(&mut self, link: u32) {
        self.near.remove(&link);
    }

    /// Forgets all links, because the host is another one: its links have nothing to do with those before.
    pub(crate) fn forget_links(&mut self) {
        self.near.clear();
    }

    /// Returns the links whose peers may have `address`.
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
        // A contested key belongs to nobody: when one of its two claimants withdraws, the other does not get it.
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

    /// Handles a question or answer of the peer's broker. Returns whether an answer to the peer was queued.
    pub(crate) fn handle_inquiry<R: Region>(
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

    /// Returns the service of the program that waits for `key`, if the peer of `link` may connect to it.
    fn claimant<R: Region>(&self, key: u32, link: &Link<R>, programs: &BTreeMap<u64, Program>) -> Option<Name> {
        let program = programs.get(&(*self.claims.get(&key)?)?)?;
        let ProgramState::Listening(service) = &program.doing else { return None };
        let may = link.news.allows(Way::In, service) && !link.draining.is_on();
        may.then(|| service.clone())
    }

    /// Removes and returns the question with this serial, if the peer of this link was asked.
    fn answered(&mut self, serial: u32, link: u32) -> Option<Pending> {
        let at = self.pending.iter().position(|it| it.serial == serial && it.links.contains(&link))?;
        Some(self.pending.swap_remove(at))
    }

    /// Returns when the first question times out.
    pub(crate) fn late_at(&self) -> Option<Instant> {
        self.pending.iter().map(|pending| pending.until).min()
    }

    /// Answers questions that timed out: peers that take too long count as knowing nobody.
    pub(crate) fn give_up(&mut self, now: Instant, programs: &BTreeMap<u64, Program>) {
        let late: Vec<_> = self.pending.extract_if(.., |pending| now >= pending.until).collect();
        late.iter().for_each(|pending| answer_program(pending, nobody(), programs));
    }
}

fn nobody() -> Message {
    Message::Refuse { code: code::NOT_FOUND, reason: "nobody waits there".into() }
}

/// Answers a program's question. Errors are ignored: a program that does not read its answer asks no other question.
fn answer_program(pending: &Pending, message: Message, programs: &BTreeMap<u64, Program>) {
    if let Some(program) = programs.get(&pending.program) {
        let _ = program::send(program.fd(), pending.asked, message, &[]);
    }
}
