// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Asks the broker of this kernel about TCP connections that may be with programs of another machine. For one process
//! it listens, claims the keys that the process waits for, and asks which process elsewhere waits for a key (B-22,
//! B-23).
//!
//! The process runs a program that is unaware of this, so nothing here blocks. Each call processes what has arrived and
//! sends the next message. A broker that is absent or does not answer counts as one that knows no peers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    path::PathBuf,
    time::{Duration, Instant},
};

use tombolo_control::{Message, Name, VERSION_FIND};
use tombolo_domain::{Endpoint, Error, PeerFinder, Result, Sought};

use crate::{
    client::{self, Client},
    link::VmEndpoint,
    mailbox::malformed,
    socket::receive,
};

/// Time for which an answer is used: whether a peer has an address, and where an endpoint waits.
const FRESH: Duration = Duration::from_secs(10);
/// The same for an address that no peer has: at first and at most, doubled each time. A peer with the address may have
/// begun since.
const FAR: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];
/// Time within which the broker must answer before it counts as absent.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for which a broker that is absent or breaks the protocol is not contacted again.
const REST: Duration = Duration::from_secs(5);
/// Time after which a key for which nobody waited is asked for again: at first, and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_secs(1)];
/// Largest number of addresses, of keys and of waiting questions that are kept.
const KEPT: usize = 4096;
/// Largest number of messages processed at once, so that a call of the program stays short.
const HEARD: usize = 16;

/// A question to the broker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Question {
    Locate([u8; 16]),
    Find(u32, [u8; 16]),
}

/// Known facts about a key.
#[derive(Debug)]
struct Known {
    /// Service where an endpoint waits; none if nobody waited.
    at: Option<String>,
    /// Time until which this is used.
    until: Instant,
    /// Length of that time if nobody waited.
    pause: Duration,
}

/// Known facts about an address.
#[derive(Clone, Copy, Debug)]
struct KnownAddress {
    /// Whether a peer may have it.
    is_near: bool,
    /// Time until which this is used.
    until: Instant,
    /// Length of that time if no peer has the address.
    pause: Duration,
}

/// State of the conversation with the broker.
#[derive(Debug)]
enum Talk {
    /// There is none before that time.
    Absent(Instant),
    /// Hello and Listen were sent at `since` and are not both answered yet. `greeted` is whether Hello was answered.
    Begun { client: Client, since: Instant, greeted: bool },
    /// The broker answers questions.
    Open(Client),
}

#[derive(Debug)]
pub(crate) struct VmFinder {
    broker: PathBuf,
    service: Name,
    talk: Talk,
    /// Keys that this process claims, and the changes that the broker was not told yet.
    claims: BTreeSet<u32>,
    news: VecDeque<Message>,
    /// Question under way, with its serial and the time at which it was sent.
    asked: Option<(u32, Question, Instant)>,
    serial: u32,
    waiting: VecDeque<Question>,
    near: HashMap<[u8; 16], KnownAddress>,
    found: BTreeMap<u32, Known>,
    arrived: VecDeque<VmEndpoint>,
}

impl VmFinder {
    pub(crate) fn new(broker: PathBuf, service: Name) -> Self {
        Self {
            broker,
            service,
            talk: Talk::Absent(Instant::now()),
            claims: BTreeSet::new(),
            news: VecDeque::new(),
            asked: None,
            serial: 1,
            waiting: VecDeque::new(),
            near: HashMap::new(),
            found: BTreeMap::new(),
            arrived: VecDeque::new(),
        }
    }

    /// Processes what the broker sent, and sends the next message.
    fn get_on(&mut self) {
        let now = Instant::now();
        if self.try_to_get_on(now).is_err() {
            self.rest(now);
        }
    }

    /// Gives the broker up for a while.
    fn rest(&mut self, now: Instant) {
        self.talk = Talk::Absent(now + REST);
        self.asked = None;
        self.waiting.clear();
        self.news.clear();
    }

    fn try_to_get_on(&mut self, now: Instant) -> Result<()> {
        match &mut self.talk {
            Talk::Absent(until) if now < *until => return Ok(()),
            Talk::Absent(_) => {
                let client = Client::reach(&self.broker)?;
                client.send_message(1, Message::Listen { service: self.service.clone() })?;
                self.talk = Talk::Begun { client, since: now, greeted: false };
                self.news = self.claims.iter().map(|&key| Message::Claim { key }).collect();
            }
            Talk::Begun { since, .. } if now.duration_since(*since) > PATIENCE => return Err(Error::TimedOut),
            Talk::Begun { .. } | Talk::Open(_) => {}
        }
        for _ in 0..HEARD {
            let (Talk::Begun { client, .. } | Talk::Open(client)) = &self.talk else { return Ok(()) };
            let Some((said, descriptors)) = receive(client.fd())? else { break };
            if matches!(said.message, Message::Connect { .. }) {
                // A connection that cannot be taken fails for its caller alone.
                self.arrived.extend(client::begin(said.message, descriptors));
            } else {
                self.handle_answer(said.serial, said.message, now)?;
            }
        }
        self.speak(now)
    }

    fn handle_answer(&mut self, serial: u32, message: Message, now: Instant) -> Result<()> {
        match (&mut self.talk, serial, message) {
            (Talk::Begun { greeted, .. }, 0, Message::Hello { version_max, .. }) if version_max >= VERSION_FIND => {
                *greeted = true;
                Ok(())
            }
            (Talk::Begun { greeted: true, .. }, 1, Message::Done {}) => {
                if let Talk::Begun { client, .. } = std::mem::replace(&mut self.talk, Talk::Absent(now)) {
                    self.talk = Talk::Open(client);
                }
                Ok(())
            }
            (Talk::Open(_), _, message) => {
                let Some((_, question, _)) = self.asked.take_if(|asked| asked.0 == serial) else {
                    return Err(malformed("B-23", "an answer to nothing"));
                };
                self.learn(question, message, now)
            }
            _ => Err(malformed("B-15", "the broker does not know how to find anybody")),
        }
    }

    fn learn(&mut self, question: Question, message: Message, now: Instant) -> Result<()> {
        match (question, message) {
            (Question::Locate(address), Message::Near { domains }) => {
                let known = self.near.get(&address).filter(|known| !known.is_near);
                let pause = known.map_or(FAR[0], |known| FAR[1].min(2 * known.pause));
                let (is_near, lasts) = if domains == 0 { (false, pause) } else { (true, FRESH) };
                self.near.insert(address, KnownAddress { is_near, until: now + lasts, pause });
            }
            (Question::Find(key, _), Message::Found { peer, service }) => {
                let at = Some(format!("{peer}/{service}"));
                self.found.insert(key, Known { at, until: now + FRESH, pause: PAUSES[0] });
            }
            (Question::Find(key, _), Message::Refuse { .. }) => {
                let pause = self.found.get(&key).map_or(PAUSES[0], |known| PAUSES[1].min(2 * known.pause));
                self.found.insert(key, Known { at: None, until: now + pause, pause });
            }
            _ => return Err(malformed("B-23", "an answer to another question")),
        }
        Ok(())
    }

    /// Sends the waiting messages, as far as the socket has room.
    fn speak(&mut self, now: Instant) -> Result<()> {
        if let Some((_, question, since)) = self.asked
            && now.duration_since(since) > PATIENCE
        {
            // The broker answers each question sooner than that, whatever the peers' brokers do.
            return Err(match question {
                Question::Locate(_) | Question::Find(..) => Error::TimedOut,
            });
        }
        let Talk::Open(client) = &self.talk else { return Ok(()) };
        while let Some(message) = self.news.front() {
            match client.send_message(0, message.clone()) {
                Ok(()) => drop(self.news.pop_front()),
                Err(error) if is_full(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if self.asked.is_some() {
            return Ok(());
        }
        let Some(question) = self.waiting.pop_front() else { return Ok(()) };
        self.serial = self.serial.wrapping_add(1).max(2);
        let message = match question {
            Question::Locate(address) => Message::Locate { address },
            Question::Find(key, address) => Message::Find { key, address },
        };
        match client.send_message(self.serial, message) {
            Ok(()) => self.asked = Some((self.serial, question, now)),
            Err(error) if is_full(&error) => self.waiting.push_front(question),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Queues a question, unless it was asked already.
    fn ask(&mut self, question: Question) {
        let is_asked = self.asked.is_some_and(|(_, asked, _)| asked == question) || self.waiting.contains(&question);
        if !is_asked && self.waiting.len() < KEPT {
            self.waiting.push_back(question);
        }
        self.get_on();
    }

    fn is_absent(&self) -> bool {
        matches!(self.talk, Talk::Absent(until) if Instant::now() < until)
    }

    fn tell_broker(&mut self, message: Message) {
        if matches!(self.talk, Talk::Open(_) | Talk::Begun { .. }) {
            self.news.push_back(message);
        }
        if self.news.len() > KEPT {
            // The broker does not read its messages.
            self.rest(Instant::now());
        }
        self.get_on();
    }
}

fn is_full(error: &Error) -> bool {
    matches!(error, Error::Os { source, .. } if source.kind() == std::io::ErrorKind::WouldBlock)
}

/// Makes room for one more address: drops those that are outdated, or all of them if that is not enough.
fn make_room(all: &mut HashMap<[u8; 16], KnownAddress>, now: Instant) {
    if all.len() >= KEPT {
        all.retain(|_, known| now < known.until);
    }
    if all.len() >= KEPT {
        all.clear();
    }
}

impl PeerFinder for VmFinder {
    fn is_near(&mut self, address: [u8; 16]) -> Option<bool> {
        let now = Instant::now();
        let known = self.near.get(&address).copied();
        if let Some(known) = known.filter(|known| now < known.until) {
            return Some(known.is_near);
        }
        if self.is_absent() {
            return Some(false);
        }
        make_room(&mut self.near, now);
        self.ask(Question::Locate(address));
        match self.near.get(&address) {
            Some(known) if now < known.until => Some(known.is_near),
            // An outdated answer is better than a wait for a new one.
            _ if self.is_absent() => Some(false),
            _ => known.map(|known| known.is_near),
        }
    }

    fn claim_key(&mut self, key: u32) {
        if self.claims.insert(key) {
            self.tell_broker(Message::Claim { key });
        }
    }

    fn withdraw_key(&mut self, key: u32) {
        if self.claims.remove(&key) {
            self.tell_broker(Message::Unclaim { key });
        }
    }

    fn seek_key(&mut self, key: u32, address: [u8; 16]) -> Sought {
        let now = Instant::now();
        if let Some(known) = self.found.get(&key).filter(|known| now < known.until) {
            return known.at.clone().map_or(Sought::Nobody, Sought::At);
        }
        if self.is_absent() {
            return Sought::Nobody;
        }
        if self.found.len() >= KEPT {
            self.found.retain(|_, known| now < known.until);
        }
        if self.found.len() >= KEPT {
            return Sought::Later;
        }
        self.ask(Question::Find(key, address));
        let known = self.found.get(&key).filter(|known| now < known.until);
        known.map_or(Sought::Later, |known| known.at.clone().map_or(Sought::Nobody, Sought::At))
    }

    fn forget_key(&mut self, key: u32) {
        self.found.remove(&key);
    }

    fn accept_peer(&mut self) -> Option<Box<dyn Endpoint>> {
        if self.arrived.is_empty() {
            self.get_on();
        }
        self.arrived.pop_front().map(|endpoint| Box::new(endpoint) as Box<dyn Endpoint>)
    }
}
