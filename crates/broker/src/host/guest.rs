// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Talks to the broker in a guest, through the outboxes in the doorbell device's memory (B-3 to B-6).

use std::{
    collections::{BTreeMap, VecDeque},
    io,
};

use tombolo_control::{
    Boxes, Envelope, Life, Message, NO_NUMBER, Name, Path, Pattern, Place, QUEUE_MAX, Session, VERSION, VERSION_FIND,
    VERSION_LEAVE, VERSION_NET, Way,
};

use tombolo_os::addresses::is_published;

use crate::host::mapped::Mapped;

/// Offset of the guest's page in the device's memory.
const GUEST_AT: u64 = 4096;

/// The outboxes in the memory of a device, or of an account.
#[derive(Debug)]
pub struct DeviceBoxes<'a>(pub &'a Mapped);

impl Boxes for DeviceBoxes<'_> {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.0.load(GUEST_AT + offset as u64, bytes)
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.0.store(offset as u64, bytes)
    }
}

/// A link as a guest knows it.
#[derive(Clone, PartialEq, Debug)]
pub struct LinkNews {
    /// Generation of the memory.
    pub generation: u32,
    /// Domain on the other side.
    pub peer: Name,
    /// Place of the guest's own region.
    pub own: Place,
    /// Place of the peer's region.
    pub theirs: Place,
    /// Bytes of each region.
    pub size: u64,
    /// Number of the doorbell that notifies the peer.
    pub doorbell: u16,
    /// Side of the link that the guest is.
    pub side: u8,
    /// Services that are allowed, and who may connect to them.
    pub rules: Vec<(Way, Pattern)>,
    /// Liveness of the peer.
    pub life: Life,
}

/// The conversation with one guest.
#[derive(Debug)]
pub struct Guest {
    session: Session,
    name: Name,
    /// Whether the guest said Hello in this session.
    greeted: bool,
    sent_links: BTreeMap<u32, LinkNews>,
    /// Messages for which the session has no room yet.
    waiting: VecDeque<Message>,
    /// Domain numbers that the guest was told (B-19).
    numbers: BTreeMap<Name, u16>,
    /// Links that the guest has open, by number and generation: connections, and the bytes that these have.
    usage: BTreeMap<(u32, u32), (u16, u64)>,
    /// Whether the guest understands Leave (B-21).
    hears_leave: bool,
    /// Whether the guest understands Addresses. The next two fields are its own addresses, as it reports them, and
    /// those of its peers that it was told, by link (B-22).
    finds: bool,
    addresses: Vec<[u8; 16]>,
    sent_addresses: BTreeMap<u32, Vec<[u8; 16]>>,
    /// Whether the guest understands Nets. The next field is what it was told of its interfaces, if anything (B-28).
    hears_nets: bool,
    sent_nets: Option<Vec<Message>>,
    /// Links that the guest was told to leave, by number and generation, and whether it has left (B-21).
    leaving: BTreeMap<(u32, u32), bool>,
}

/// Requests and reports of a guest.
#[derive(Debug, PartialEq, Eq)]
pub enum GuestRequest {
    /// The guest is there; the boot of its kernel.
    Hello([u8; 16]),
    /// A peer notifies the guest without end on this link.
    Storm(u32),
    /// No program of the guest has a connection any more on a link that the guest was told to leave (B-21).
    Left,
    /// The guest has other addresses now (B-22).
    Moved,
    /// The guest has released the memory of this link and generation.
    Released(u32, u32),
}

impl Guest {
    /// Begins a conversation in the memory of the device of the domain `name`.
    ///
    /// # Errors
    /// The memory cannot be written.
    pub fn begin(name: Name, memory: &Mapped) -> io::Result<Self> {
        let session = Session::begin(Path::Host, random()?, &mut DeviceBoxes(memory))?;
        let (sent_links, waiting, numbers, usage) =
            (BTreeMap::new(), VecDeque::new(), BTreeMap::new(), BTreeMap::new());
        let (hears_leave, leaving) = (false, BTreeMap::new());
        let (finds, addresses, sent_addresses) = (false, Vec::new(), BTreeMap::new());
        let greeted = false;
        Ok(Self {
            session,
            name,
            greeted,
            sent_links,
            waiting,
            numbers,
            usage,
            hears_leave,
            finds,
            addresses,
            sent_addresses,
            hears_nets: false,
            sent_nets: None,
            leaving,
        })
    }

    /// Receives at most `limit` messages of the guest, and sends what there is room for. Returns the guest's requests,
    /// and whether to notify it.
    ///
    /// # Errors
    /// The memory cannot be accessed.
    pub fn turn(&mut self, memory: &Mapped, host: &Name, limit: usize) -> io::Result<(Vec<GuestRequest>, bool)> {
        let (mut requests, mut is_due) = (Vec::new(), false);
        for _ in 0..limit {
            while self.session.room() > 0
                && let Some(message) = self.waiting.pop_front()
            {
                self.send_message(message);
            }
            let (event, changed) = self.session.turn(&mut DeviceBoxes(memory))?;
            is_due |= changed;
            match event {
                Some(tombolo_control::Event::Began) => {
                    self.greeted = false;
                    self.sent_links.clear();
                    self.waiting.clear();
                    self.numbers.clear();
                    self.usage.clear();
                    self.leaving.clear();
                    (self.addresses, self.sent_addresses, self.sent_nets) = (Vec::new(), BTreeMap::new(), None);
                    self.send_message(hello(self.session.epoch(), host));
                    self.send_message(Message::You { name: self.name.clone() });
                }
                Some(tombolo_control::Event::Said(said)) => requests.extend(self.understand(said.message)),
                Some(tombolo_control::Event::Broke(_)) | None if !changed => break,
                _ => {}
            }
        }
        Ok((requests, is_due))
    }

    /// Handles one message. Hello comes first and only once; a protocol violation ends the session (B-6).
    fn understand(&mut self, message: Message) -> Option<GuestRequest> {
        match message {
            Message::Hello { version_min, version_max, boot, .. }
                if !self.greeted && version_min <= VERSION && version_max >= VERSION =>
            {
                self.greeted = true;
                self.hears_leave = version_max >= VERSION_LEAVE;
                self.finds = version_max >= VERSION_FIND;
                self.hears_nets = version_max >= VERSION_NET;
                Some(GuestRequest::Hello(boot))
            }
            Message::Storm { link } if self.greeted => Some(GuestRequest::Storm(link)),
            Message::Released { link, generation } if self.greeted => Some(GuestRequest::Released(link, generation)),
            Message::Left { link, generation } if self.greeted => {
                // A guest may send any number of Left for links that it was not told to leave: these do not count.
                let left = self.leaving.get_mut(&(link, generation)).filter(|left| !**left)?;
                *left = true;
                Some(GuestRequest::Left)
            }
            Message::Usage { link, generation, connections, used } if self.greeted => {
                // A guest may send any number of Usage for memory that it was not told of: these do not count.
                if self.sent_links.get(&link).is_some_and(|sent| sent.generation == generation) {
                    self.usage.retain(|(it, _), _| *it != link && self.sent_links.contains_key(it));
                    self.usage.insert((link, generation), (connections, used));
                }
                None
            }
            Message::Addresses { link: 0, mut addresses } if self.greeted => {
                // Addresses that exist in every kernel are not told to other guests, whatever these would do with them.
                addresses.retain(is_published);
                let moved = self.addresses != addresses;
                self.addresses = addresses;
                moved.then_some(GuestRequest::Moved)
            }
            Message::Refuse { .. } if self.greeted => None,
            _ => {
                self.session.spoil();
                None
            }
        }
    }

    fn send_message(&mut self, message: Message) {
        self.session.queue_message(&Envelope::statement(message));
    }

    /// Returns whether the guest's broker is there and has committed no protocol violation.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.greeted && !self.session.is_broken()
    }

    /// Returns the number of connections on a link and their bytes, as the guest reports them; none if it has not
    /// opened the link (B-7).
    #[must_use]
    pub fn usage(&self, link: u32, generation: u32) -> Option<(u16, u64)> {
        self.usage.get(&(link, generation)).copied()
    }

    /// Returns the addresses at which the guest may be reached, as it reports them: hints (B-22).
    #[must_use]
    pub fn addresses(&self) -> &[[u8; 16]] {
        &self.addresses
    }

    /// Sends the addresses of the peers of the guest's links, as far as they have changed. Returns whether there was a
    /// message (B-22).
    pub fn send_addresses(&mut self, peers: BTreeMap<u32, Vec<[u8; 16]>>) -> bool {
        if !self.finds || !self.is_there() || !self.has_sent_all() {
            return false;
        }
        let known = |link: &u32| self.sent_addresses.get(link).map_or(&[][..], Vec::as_slice);
        let news =
            peers.iter().filter(|(link, now)| self.sent_links.contains_key(link) && known(link) != now.as_slice());
        let messages: Vec<_> = news.map(|(&link, now)| Message::Addresses { link, addresses: now.clone() }).collect();
        self.sent_addresses = peers;
        let any = !messages.is_empty();
        self.waiting.extend(messages);
        any
    }

    /// Sends the interfaces that the guest is to have, if they have changed (B-28). Returns whether there was a
    /// message.
    pub fn send_nets(&mut self, nets: Vec<Message>) -> bool {
        if !self.hears_nets || !self.is_there() || !self.has_sent_all() || self.sent_nets.as_ref() == Some(&nets) {
            return false;
        }
        self.waiting.push_back(Message::Nets { count: nets.len() as u16 });
        self.waiting.extend(nets.iter().cloned());
        self.sent_nets = Some(nets);
        true
    }

    /// Returns the links that the guest was told of.
    #[must_use]
    pub fn sent_links(&self) -> &BTreeMap<u32, LinkNews> {
        &self.sent_links
    }

    /// Returns whether the guest has this memory, understands Leave, and has not yet answered that it left (B-21).
    #[must_use]
    pub fn is_to_leave(&self, link: u32, generation: u32) -> bool {
        let has_it = self.sent_links.get(&link).is_some_and(|sent| sent.generation == generation);
        let left = self.leaving.get(&(link, generation)).copied().unwrap_or_default();
        self.is_there() && self.hears_leave && has_it && !left
    }

    /// Returns whether the guest's broker is there, and whether it can be sent more. After a change of either the
    /// broker reconciles.
    pub(crate) fn standing(&self) -> (bool, bool) {
        (self.is_there(), self.has_sent_all())
    }

    /// Returns whether no message waits to be sent.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.waiting.is_empty() && self.session.room() == QUEUE_MAX
    }

    /// Sends what has changed since the last report, once the guest has taken all of that report. A guest that was
    /// paused for long is told the state at that time. `leaving` holds the links that are removed soon, and in how many
    /// milliseconds. Returns whether there was a message.
    pub fn send_changes(
        &mut self,
        links: &BTreeMap<u32, LinkNews>,
        numbers: BTreeMap<Name, u16>,
        leaving: &BTreeMap<u32, u32>,
    ) -> bool {
        if !self.is_there() || !self.has_sent_all() {
            return false;
        }
        let mut messages = Vec::new();
        for name in self.numbers.keys().filter(|name| !numbers.contains_key(*name)) {
            messages.push(Message::Number { name: name.clone(), number: NO_NUMBER });
        }
        let fresh = numbers.iter().filter(|(name, number)| self.numbers.get(*name) != Some(*number));
        messages.extend(fresh.map(|(name, &number)| Message::Number { name: name.clone(), number }));
        self.numbers = numbers;
        for (&link, old) in &self.sent_links {
            if links.get(&link).is_none_or(|new| new.generation != old.generation) {
                messages.push(Message::Unlink { link, generation: old.generation });
            }
        }
        for (&link, new) in links {
            let old = self.sent_links.get(&link).filter(|old| old.generation == new.generation);
            new.append_changes(link, old, &mut messages);
        }
        self.sent_links.clone_from(links);
        self.leaving.retain(|(link, generation), _| links.get(link).is_some_and(|new| new.generation == *generation));
        for (&link, &wait) in leaving.iter().filter(|_| self.hears_leave) {
            if let Some(generation) = links.get(&link).map(|sent| sent.generation)
                && !self.leaving.contains_key(&(link, generation))
            {
                self.leaving.insert((link, generation), false);
                messages.push(Message::Leave { link, generation, wait });
            }
        }
        let any = !messages.is_empty();
        self.waiting.extend(messages);
        any
    }
}

impl LinkNews {
    /// Appends the messages on this link for a guest that knows `old`.
    fn append_changes(&self, link: u32, old: Option<&Self>, messages: &mut Vec<Message>) {
        let same = |old: &Self| Self { doorbell: self.doorbell, life: self.life, ..old.clone() } == *self;
        let life = Message::Life { link, generation: self.generation, life: self.life };
        match old {
            Some(old) if same(old) => {
                if old.doorbell != self.doorbell {
                    messages.push(Message::Bell { link, doorbell: self.doorbell });
                }
                if old.life != self.life {
                    messages.push(life);
                }
            }
            _ => {
                let Self { generation, peer, own, theirs, size, doorbell, side, rules, .. } = self.clone();
                // A peer's doorbell has one vector: that at which the peer waits for this link (B-8).
                let (allows, vectors) = (rules.len() as u16, 1);
                messages.push(Message::Link {
                    link,
                    generation,
                    peer,
                    own,
                    theirs,
                    size,
                    doorbell,
                    vectors,
                    side,
                    allows,
                });
                let allows = rules.into_iter().map(|(way, service)| Message::Allow { link, way, service });
                messages.extend(allows);
                messages.push(life);
            }
        }
    }
}

fn hello(epoch: u64, host: &Name) -> Message {
    let (version_min, version_max) = (VERSION, VERSION_NET);
    Message::Hello { version_min, version_max, epoch, boot: boot(), name: host.clone() }
}

/// Returns the boot identifier of the host's kernel; zeros if it cannot be read.
pub(crate) fn boot() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or_default().to_be_bytes()
}

/// Returns 64 random bits, not all of which are 0.
fn random() -> io::Result<u64> {
    loop {
        match u64::from_le_bytes(tombolo_os::random::bytes()?) {
            0 => {}
            number => return Ok(number),
        }
    }
}
