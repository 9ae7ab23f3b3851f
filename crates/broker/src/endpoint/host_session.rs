// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the session with the host's broker: the links that exist, what each domain may do on them, and the liveness of
//! peers (B-6 to B-8, B-12, B-13).

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use tombolo_control::{
    Boxes, Envelope, Event, Life, Message, NETS_MAX, NO_NUMBER, NUMBERS, Name, Path, Pattern, Place, QUEUE_MAX,
    Session, VERSION, VERSION_FIND, VERSION_NET, Way,
};

use crate::endpoint::program;

/// Largest number of links kept: more than a machine has slots, or an administrator patience.
pub const LINKS_MAX: usize = 64;
/// Minimum time between two reports to the host of how much of a link is in use.
const USAGE_AGAIN: Duration = Duration::from_secs(1);
/// Largest number of rules kept for one link.
pub const RULES_MAX: u16 = 256;

/// A link, as the host announced it.
#[derive(Clone, PartialEq, Debug)]
pub struct LinkNews {
    /// Number of the link.
    pub link: u32,
    /// Generation of its memory.
    pub generation: u32,
    /// The domain at the other end.
    pub peer: Name,
    /// Place of the region that this domain writes.
    pub own: Place,
    /// Place of the peer's region.
    pub theirs: Place,
    /// Size of each region in bytes.
    pub size: u64,
    /// Side of the link that this domain is (B-14).
    pub side: u8,
    /// Number of the peer's doorbell (B-8).
    pub doorbell: u16,
    /// Number of vectors of the peer's device.
    pub vectors: u16,
    /// Connections that the rules allow (B-13).
    pub rules: Vec<(Way, Pattern)>,
    /// The peer's liveness (B-12).
    pub life: Life,
}

impl LinkNews {
    /// Returns whether a program may connect to `service`, of this domain or of the peer, according to `way` (B-13).
    #[must_use]
    pub fn allows(&self, way: Way, service: &Name) -> bool {
        self.rules.iter().any(|(it, pattern)| *it == way && pattern.matches(service))
    }

    /// Tells the program behind `socket` the peer's liveness (B-12). If the program has left, its socket reports that
    /// later.
    pub(crate) fn send_life(&self, socket: &OwnedFd) {
        let (link, generation, life) = (self.link, self.generation, self.life);
        let _ = program::send(socket.as_fd(), 0, Message::Life { link, generation, life }, &[]);
    }
}

/// A change that the host reported.
#[derive(Clone, PartialEq, Debug)]
pub enum News {
    /// The host is another one than before: what it sent about links no longer holds (B-27).
    OtherHost,
    /// The name of this machine (B-6).
    You(Name),
    /// The number of a domain, or none (B-19).
    Number(Name, Option<u16>),
    /// A link was announced, for the first time or again with other rules.
    Link(LinkNews),
    /// The link with this memory ends.
    Unlink(u32, u32),
    /// The link with this memory will be taken away within this many milliseconds (B-21).
    Leave(u32, u32, u32),
    /// The liveness of a peer changed.
    Life(u32, Life),
    /// The number of a peer's doorbell changed.
    Doorbell(u32, u16),
    /// A peer may be reached at these addresses (B-22).
    Addresses(u32, Vec<[u8; 16]>),
    /// The interfaces that this domain is to have: each a [`Message::Net`] (B-28).
    Nets(Vec<Message>),
}

/// The session with the host's broker.
#[derive(Debug)]
pub struct Host {
    session: Session,
    boot: [u8; 16],
    /// Boot identifier that a host sent last, if any did (B-27).
    host_boot: Option<[u8; 16]>,
    greeted: bool,
    /// Whether the host has sent You.
    named: bool,
    /// Whether the host's broker understands Addresses. The next field holds those last sent to it.
    finds: bool,
    addresses: Option<Vec<[u8; 16]>>,
    links: BTreeMap<u32, LinkNews>,
    /// Last report of each link's use: generation, connections, bytes, and the time of the report.
    usage: BTreeMap<u32, (u32, u16, u64, Instant)>,
    /// A link whose rules are incomplete, and the number of rules still to come.
    half: Option<(LinkNews, u16)>,
    /// Interfaces of an incomplete list, and the number still to come.
    half_nets: Option<(Vec<Message>, u16)>,
}

impl Host {
    /// Begins a new session.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn begin(epoch: u64, boot: [u8; 16], boxes: &mut impl Boxes) -> io::Result<Self> {
        let session = Session::begin(Path::Host, epoch, boxes)?;
        Ok(Self {
            session,
            boot,
            host_boot: None,
            greeted: false,
            named: false,
            finds: false,
            addresses: None,
            links: BTreeMap::new(),
            usage: BTreeMap::new(),
            half: None,
            half_nets: None,
        })
    }

    /// Receives at most `limit` messages, and sends those for which there is room. Returns whether to notify the host,
    /// and whether there may be more.
    ///
    /// # Errors
    /// The memory cannot be reached.
    pub fn turn(&mut self, boxes: &mut impl Boxes, limit: usize, news: &mut Vec<News>) -> io::Result<(bool, bool)> {
        let mut ring = false;
        for _ in 0..limit {
            let (event, changed) = self.session.turn(boxes)?;
            ring |= changed;
            match event {
                // Links stay as they were until the host announces them again (B-7).
                Some(Event::Began) => {
                    (self.greeted, self.named, self.half, self.half_nets) = (false, false, None, None);
                    (self.finds, self.addresses) = (false, None);
                    self.usage.clear();
                    let (name, boot, epoch) = ("guest".parse().expect("a name"), self.boot, self.session.epoch());
                    self.send_message(Message::Hello {
                        version_min: VERSION,
                        version_max: VERSION_NET,
                        epoch,
                        boot,
                        name,
                    });
                }
                Some(Event::Said(said)) => match self.understand(said.message) {
                    Some(more) => news.extend(more),
                    None => self.session.spoil(),
                },
                Some(Event::Broke(fault)) => tracing::warn!("the host's broker: {fault}"),
                None if !changed => return Ok((ring, false)),
                None => {}
            }
        }
        Ok((ring, true))
    }

    fn send_message(&mut self, message: Message) {
        self.session.queue_message(&Envelope::statement(message));
    }

    /// Reports that this domain has unmapped a link's memory (B-11).
    pub fn released(&mut self, link: u32, generation: u32) {
        self.send_message(Message::Released { link, generation });
    }

    /// Reports that no program here has a connection on a link that is to be taken away (B-21).
    pub fn left(&mut self, link: u32, generation: u32) {
        self.send_message(Message::Left { link, generation });
    }

    /// Reports how many connections and bytes are in use on an open link, if that changed, at most once a second (B-7).
    /// Returns whether it still has to be reported.
    pub fn usage(&mut self, link: u32, generation: u32, connections: u16, used: u64, now: Instant) -> bool {
        let known = self.usage.get(&link).filter(|known| known.0 == generation);
        if known.is_some_and(|known| (known.1, known.2) == (connections, used)) {
            return false;
        }
        let due = known.is_none_or(|known| now.duration_since(known.3) >= USAGE_AGAIN);
        if !due || !self.named || self.session.room() < QUEUE_MAX {
            return true;
        }
        self.usage.insert(link, (generation, connections, used, now));
        self.send_message(Message::Usage { link, generation, connections, used });
        true
    }

    /// Reports the addresses at which this kernel may be reached, if they changed. Returns whether they still have to
    /// be reported because there is no room yet (B-22).
    pub fn send_addresses(&mut self, addresses: &[[u8; 16]]) -> bool {
        if !self.finds || !self.named || self.addresses.as_deref() == Some(addresses) {
            return false;
        }
        if self.session.room() < QUEUE_MAX {
            return true;
        }
        self.addresses = Some(addresses.to_vec());
        self.send_message(Message::Addresses { link: 0, addresses: addresses.to_vec() });
        true
    }

    /// Reports that a peer notifies without end (B-8). Skips the report while the host has much left to read.
    pub fn storm(&mut self, link: u32) {
        if self.session.room() > QUEUE_MAX / 2 {
            self.send_message(Message::Storm { link });
        }
    }

    /// Returns the change that a message makes, if any; the outer `None` means a protocol violation.
    fn understand(&mut self, message: Message) -> Option<Option<News>> {
        if !self.greeted {
            let Message::Hello { version_min, version_max, boot, .. } = message else { return None };
            self.greeted = version_min <= VERSION && version_max >= VERSION;
            self.finds = version_max >= VERSION_FIND;
            return self.greeted.then(|| self.meet_host(boot));
        }
        if let Some((nets, left)) = self.half_nets.take() {
            return matches!(message, Message::Net { .. }).then(|| self.complete_nets(nets, message, left));
        }
        match (self.half.take(), message) {
            (Some((mut news, left)), Message::Allow { link, way, service }) if link == news.link => {
                news.rules.push((way, service));
                Some(self.complete(news, left - 1))
            }
            (None, Message::Link { link, generation, peer, own, theirs, size, doorbell, vectors, side, allows }) => {
                let room = self.links.contains_key(&link) || self.links.len() < LINKS_MAX;
                if allows > RULES_MAX
                    || !room
                    || side > 1
                    || !(tombolo_control::REGION_MIN..=tombolo_control::REGION_MAX).contains(&size)
                {
                    return None;
                }
                let (rules, life) = (Vec::new(), self.links.get(&link).map_or(Life::Unknown, |old| old.life));
                Some(self.complete(
                    LinkNews { link, generation, peer, own, theirs, size, side, doorbell, vectors, rules, life },
                    allows,
                ))
            }
            (None, Message::Unlink { link, generation }) => {
                self.links.remove(&link);
                self.usage.remove(&link);
                Some(Some(News::Unlink(link, generation)))
            }
            (None, Message::Leave { link, generation, wait }) => {
                let news = self.links.get(&link).filter(|news| news.generation == generation);
                Some(news.map(|_| News::Leave(link, generation, wait)))
            }
            (None, Message::Life { link, generation, life }) => {
                let news = self.links.get_mut(&link).filter(|news| news.generation == generation);
                Some(news.map(|news| {
                    news.life = life;
                    News::Life(link, life)
                }))
            }
            (None, Message::Bell { link, doorbell }) => Some(self.links.get_mut(&link).map(|news| {
                news.doorbell = doorbell;
                News::Doorbell(link, doorbell)
            })),
            (None, Message::Addresses { link, addresses }) => {
                Some(self.links.contains_key(&link).then_some(News::Addresses(link, addresses)))
            }
            (None, Message::Nets { count: 0 }) => Some(Some(News::Nets(Vec::new()))),
            (None, Message::Nets { count }) if count <= NETS_MAX => {
                self.half_nets = Some((Vec::new(), count));
                Some(None)
            }
            (None, Message::You { name }) if !self.named => {
                self.named = true;
                Some(Some(News::You(name)))
            }
            (None, Message::Number { name, number }) => {
                let number = Some(number).filter(|number| *number != NO_NUMBER);
                (number.is_none_or(|number| number < NUMBERS)).then_some(Some(News::Number(name, number)))
            }
            (None, Message::Refuse { reason, .. }) => {
                tracing::warn!("the host's broker refuses: {reason}");
                Some(None)
            }
            _ => None,
        }
    }

    /// Compares the host's boot with the one before. Another boot means another host, or a host that lost its state
    /// (B-27).
    fn meet_host(&mut self, boot: [u8; 16]) -> Option<News> {
        let said = Some(boot).filter(|boot| *boot != [0; 16]);
        let is_other = self.host_boot.is_some() && said.is_some() && self.host_boot != said;
        self.host_boot = said.or(self.host_boot);
        if is_other {
            self.links.clear();
        }
        is_other.then_some(News::OtherHost)
    }

    /// Adds an interface to an incomplete list, and returns the list once it is complete: all take effect together
    /// (B-28).
    fn complete_nets(&mut self, mut nets: Vec<Message>, net: Message, left: u16) -> Option<News> {
        nets.push(net);
        if left > 1 {
            self.half_nets = Some((nets, left - 1));
            return None;
        }
        Some(News::Nets(nets))
    }

    /// Completes a link once all its rules have come: both take effect together (B-7).
    fn complete(&mut self, news: LinkNews, left: u16) -> Option<News> {
        if left != 0 {
            self.half = Some((news, left));
            return None;
        }
        self.links.insert(news.link, news.clone());
        Some(News::Link(news))
    }
}
