// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds channels to other Xen domains in the pages that processes granted.
//!
//! No descriptor leads to those pages. They are read through `/proc/PID/mem`, as a debugger does, if this user may do
//! that.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    time::{Duration, SystemTime},
};

use serde::Serialize;
use tombolo_backends::xen::ReaperListing;
use tombolo_layout::{
    handshake::{Greeting, Message},
    limits::CONTROL_LEN,
    xen as at,
};

use crate::{
    listener::{Listener, ListenerState},
    process::{Process, known_users, name_of, printable},
    segment::{Segment, word_at},
};

/// A copy of a page.
type Page = Box<[u8; at::PAGE]>;

/// An endpoint, and the memory of its rings that was found.
#[derive(Debug)]
pub struct Link {
    /// Number of the other domain.
    pub peer: u16,
    /// Whether the peer is known to be gone.
    pub gone: bool,
    pub address: String,
    /// Greeting that this endpoint sent when the channel began; below, whether it was the one that listened.
    pub greeting: Greeting,
    pub listened: bool,
    /// Whether it has not closed.
    pub open: bool,
    /// Bytes that it retired, and that the peer has not reported as unmapped.
    pub quarantine: u64,
    pub made: SystemTime,
    /// Its rings, with generation 0 first.
    pub segments: Vec<Segment>,
}

/// A listener page: the domain for which its listener listens, and the grant reference that leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ListenerPage {
    pub peer: u16,
    pub reference: u32,
    /// Whether it is for a domain that is known by name.
    pub named: bool,
}

/// Pages of a program that died, which this domain's grant reaper keeps until the other domain has unmapped them
///
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct OrphanedGrants {
    /// Address at which the program met its peer.
    pub address: String,
    /// Number of the other domain.
    pub peer_domain: u16,
    /// Number of these pages.
    pub pages: u64,
    /// Seconds since the program died.
    pub age: f64,
    /// Number of the program's process.
    pub pid: u32,
    /// Name of the program, safe for a terminal.
    pub command: String,
    /// Number of its user.
    pub uid: u32,
    /// Name of its user.
    pub user: String,
}

/// Pages that the grant reaper of this domain keeps.
#[derive(Debug, Default)]
pub struct ReaperHoldings {
    /// Whether a grant reaper is there and answered.
    pub there: bool,
    /// Kept pages by program.
    pub kept: Vec<OrphanedGrants>,
    /// Number of pages for which it had no room.
    pub let_go: u64,
}

/// Asks the grant reaper of this domain what it keeps. One that does not answer this user counts as none.
#[must_use]
pub fn reaper_holdings() -> ReaperHoldings {
    match ReaperListing::ask() {
        Ok(listing) => holdings(listing),
        Err(_) => ReaperHoldings::default(),
    }
}

fn holdings(ReaperListing { kept, let_go }: ReaperListing) -> ReaperHoldings {
    let users = known_users();
    let kept = kept.into_iter().map(|kept| OrphanedGrants {
        address: printable(&format!("xen:{}/{}", kept.peer, kept.service)),
        peer_domain: kept.peer,
        pages: kept.pages,
        age: kept.age.as_secs_f64(),
        pid: kept.pid,
        command: printable(&kept.command),
        uid: kept.uid,
        user: name_of(kept.uid, &users),
    });
    ReaperHoldings { there: true, kept: kept.collect(), let_go }
}

/// Returns the listeners for other domains, with the names that `names` gives their pages.
pub fn listeners(holders: &[Process], names: impl FnOnce() -> Vec<(u16, String, u32)>) -> Vec<Listener> {
    let pages =
        holders.iter().flat_map(|process| granted(process).listeners.into_iter().map(move |page| (process, page)));
    let pages: Vec<_> = pages.collect();
    let names = if pages.is_empty() { Vec::new() } else { names() };
    let listener = |(process, page): (&Process, ListenerPage)| {
        let name = names.iter().find(|(peer, _, reference)| (*peer, *reference) == (page.peer, page.reference));
        let name = printable(name.map_or("?", |(_, name, _)| name));
        let address = match page.named {
            true => format!("vm:{name} (domain {})", page.peer),
            false => format!("xen:{}/{name}", page.peer),
        };
        let (uid, user) = (process.uid.unwrap_or(u32::MAX), process.user.clone().unwrap_or_else(|| "?".into()));
        let (pid, command) = (Some(process.pid), Some(process.command.clone()));
        Listener { address, state: ListenerState::Listening, uid, user, pid, command }
    };
    pages.into_iter().map(listener).collect()
}

/// Everything that a process has granted to other Xen domains.
#[derive(Debug, Default)]
pub struct Granted {
    pub links: Vec<Link>,
    pub listeners: Vec<ListenerPage>,
    /// Number of pages that it granted and has mapped.
    pub pages: u64,
}

/// Reads the first page of each range that `process` granted.
pub fn granted(process: &Process) -> Granted {
    let Ok(memory) = File::open(format!("/proc/{}/mem", process.pid)) else { return Granted::default() };
    let mut found = Granted::default();
    let mut segments = BTreeMap::<u64, Vec<Segment>>::new();
    for range in &process.granted {
        let len = range.end.saturating_sub(range.start);
        found.pages += len / at::PAGE as u64;
        let mut page: Page = Box::new([0; at::PAGE]);
        // The mapping is gone meanwhile.
        if memory.read_exact_at(&mut page[..], range.start).is_err() {
            continue;
        }
        match word_at(&page[..], at::AT_MAGIC) {
            at::MAILBOX_MAGIC => found.links.extend(link(&page)),
            at::LISTENER_PAGE_MAGIC => found.listeners.extend(listener_page(&page)),
            at::RECONNECT_MAGIC => {}
            _ => {
                const { assert!(at::PAGE as u64 == CONTROL_LEN) };
                if let Some(segment) = Segment::copied(page, len) {
                    segments.entry(segment.header.epoch).or_default().push(segment);
                }
            }
        }
    }
    for link in &mut found.links {
        link.segments = segments.remove(&link.greeting.epoch).unwrap_or_default();
        link.segments.sort_by_key(|segment| segment.header.generation);
    }
    found
}

/// Returns the endpoint to which a mailbox belongs, once it has sent a message.
fn link(page: &Page) -> Option<Link> {
    let word = |offset| word_at(&page[..], offset);
    let (peer, gone) = at::stats_peer(word(at::AT_STATS))?;
    let said = (0..at::MESSAGES).filter_map(|number| message(page, number));
    let (listened, greeting) = said.into_iter().find_map(|message| match message {
        Message::Hello(greeting) => Some((false, greeting)),
        Message::Welcome(greeting) => Some((true, greeting)),
        Message::Refuse(..) | Message::Ring { .. } => None,
    })?;
    let name = page[at::AT_NAME..at::AT_NAME + at::NAME_MAX].split(|byte| *byte == 0).next().unwrap_or_default();
    let name = printable(&String::from_utf8_lossy(name));
    Some(Link {
        peer,
        gone,
        address: format!("xen:{peer}/{name}"),
        greeting,
        listened,
        open: word(at::AT_STATE) & 0xff == at::OPEN,
        quarantine: word(at::AT_QUARANTINE),
        made: SystemTime::UNIX_EPOCH + Duration::from_nanos(word(at::AT_MADE)),
        segments: Vec::new(),
    })
}

/// Decodes a message that the endpoint sent.
fn message(page: &Page, number: u64) -> Option<Message> {
    let base = at::AT_MESSAGES + number as usize * at::MESSAGE_STRIDE;
    let head = at::MessageHead::decode([0, 8, 16, 24].map(|offset| word_at(&page[..], base + offset))).ok()?;
    let bytes = page.get(base + at::MESSAGE_HEAD..)?.get(..usize::from(head.len))?;
    Message::decode(bytes).ok()
}

fn listener_page(page: &Page) -> Option<ListenerPage> {
    let word = |offset| word_at(&page[..], offset);
    let (peer, _) = at::stats_peer(word(at::AT_FOR)).filter(|_| word(at::AT_STATE) & 0xff == at::OPEN)?;
    Some(ListenerPage { peer, reference: (word(at::AT_FOR) >> 32) as u32, named: word(at::AT_PAIR) != 0 })
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use tombolo_layout::{Features, SegmentHeader, words};
    use tombolo_mem::{OwnControl, OwnWord, create_sealed};

    use super::*;
    use crate::channel::{self, Mode, State};

    const EPOCH: u64 = 0x0123_4567_89ab_cdef;

    /// Returns memory of `len` bytes of this process, and where it is mapped.
    fn memory(name: &str, len: usize) -> (OwnControl, Range<u64>) {
        let (segment, _fd) = create_sealed(name, len).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| line.ends_with(&format!("/memfd:{name} (deleted)"))).unwrap();
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).unwrap());
        (segment.split(at::PAGE).0, start..end)
    }

    fn put(page: &OwnControl, offset: usize, bytes: &[u8]) {
        for (index, bytes) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            page.word(offset + 8 * index).store_relaxed(u64::from_le_bytes(word));
        }
    }

    /// Makes a mailbox that holds a Welcome, with `quarantine` bytes.
    fn mailbox(page: &OwnControl, quarantine: u64) {
        let offered = Features::MESSAGES;
        let (version_min, version_max, required) = (1, 1, Features::NONE);
        let greeting = Greeting { version_min, version_max, offered, required, epoch: EPOCH, map_limit: 1 << 20 };
        let said = Message::Welcome(greeting).encode();
        let head = at::MessageHead { len: said.len() as u16, segment: None };
        put(page, at::AT_MESSAGES, &head.encode().map(u64::to_le_bytes).concat());
        put(page, at::AT_MESSAGES + at::MESSAGE_HEAD, &said);
        put(page, at::AT_NAME, b"web\x1b[2J");
        let words = [
            (at::AT_STATE, at::OPEN),
            (at::AT_STATS, at::stats_head(3, false)),
            (at::AT_QUARANTINE, quarantine),
            (at::AT_MAGIC, at::MAILBOX_MAGIC),
        ];
        words.into_iter().for_each(|(offset, word)| page.word(offset).store_relaxed(word));
    }

    fn process(granted: Vec<Range<u64>>) -> Process {
        let (pid, command) = (std::process::id(), "test".into());
        let (memories, mappings) = (Vec::new(), Vec::new());
        Process { pid, command, uid: None, user: None, paused: false, memories, mappings, granted }
    }

    #[test]
    fn x12_channel_is_put_together_from_a_mailbox_and_the_segment_that_it_announced() {
        let (page, at_page) = memory("tombolo-ls-x12", at::PAGE);
        mailbox(&page, 0);
        let (ring, at_ring) = memory("tombolo-ls-x12-ring", 8192);
        ring.write_header(&SegmentHeader::new(4096, 0, 0, Features::MESSAGES, EPOCH).encode());
        ring.word(words::TAIL).store_relaxed(9);
        let process = process(vec![at_ring, at_page]);
        let [link] = granted(&process).links.try_into().unwrap();
        assert_eq!((link.address.as_str(), link.listened), ("xen:3/web?[2J", true));
        let channel = channel::foreign(&process, link);
        assert_eq!((channel.peer_domain, channel.mode, channel.state), (Some(3), Mode::Messages, State::Opening));
        assert_eq!((channel.pipes[0].ring, channel.pipes[0].bytes, channel.pipes[0].fill), (Some(4096), Some(9), None));
        assert_eq!((channel.memory, channel.quarantine), (8192, Some(0)));
    }

    #[test]
    fn x12_quarantine_of_a_channel_that_was_closed_is_seen() {
        let (page, at_page) = memory("tombolo-ls-x12-closed", at::PAGE);
        mailbox(&page, 12288);
        page.word(at::AT_STATE).store_relaxed(at::CLOSED);
        let process = process(vec![at_page]);
        let [link] = granted(&process).links.try_into().unwrap();
        let channel = channel::foreign(&process, link);
        assert_eq!((channel.state, channel.quarantine, channel.memory), (State::Closed, Some(12288), 0));
    }

    #[test]
    fn canary_pages_that_are_no_mailbox_or_are_gone_are_no_channel() {
        let (page, at_page) = memory("tombolo-ls-x12-other", at::PAGE);
        mailbox(&page, 0);
        page.word(at::AT_STATS).store_relaxed(0);
        let gone = 0x1000..0x2000;
        let found = granted(&process(vec![at_page.clone(), gone.clone()]));
        assert!(found.links.is_empty() && found.pages == 2, "{found:?}");
        mailbox(&page, 0);
        assert_eq!(granted(&process(vec![at_page, gone])).links.len(), 1);
    }

    #[test]
    fn x12_door_says_for_whom_it_is() {
        let (page, at_page) = memory("tombolo-ls-x12-door", at::PAGE);
        for (offset, word) in
            [(at::AT_FOR, at::stats_head(7, false) | 99 << 32), (at::AT_MAGIC, at::LISTENER_PAGE_MAGIC)]
        {
            page.word(offset).store_relaxed(word);
        }
        let process = process(vec![at_page]);
        assert!(granted(&process).listeners.is_empty(), "its state says that it is closed");
        page.word(at::AT_STATE).store_relaxed(at::OPEN);
        assert_eq!(granted(&process).listeners, [ListenerPage { peer: 7, reference: 99, named: false }]);
    }
    #[test]
    fn x12_listener_for_another_domain_is_told_with_the_name_that_xenstore_has_for_its_door() {
        let (page, at_page) = memory("tombolo-ls-x12-listener", at::PAGE);
        let words = [
            (at::AT_FOR, at::stats_head(7, false) | 99 << 32),
            (at::AT_MAGIC, at::LISTENER_PAGE_MAGIC),
            (at::AT_STATE, at::OPEN),
        ];
        words.into_iter().for_each(|(offset, word)| page.word(offset).store_relaxed(word));
        let process = [process(vec![at_page])];
        let names = || vec![(7, "other".to_owned(), 98), (3, "other".to_owned(), 99), (7, "web".to_owned(), 99)];
        let told = |names: Vec<_>| listeners(&process, || names).into_iter().map(|one| one.address).collect::<Vec<_>>();
        assert_eq!(told(names()), ["xen:7/web"]);
        assert_eq!(told(Vec::new()), ["xen:7/?"]);
        page.word(at::AT_PAIR).store_relaxed(5);
        assert_eq!(told(names()), ["vm:web (domain 7)"]);
        assert!(listeners(&[], || panic!("nobody listens")).is_empty());
    }

    #[test]
    fn x13_what_the_keeper_says_is_shown_without_what_terminals_obey() {
        let (service, command, age) = ("web".into(), "a\x1bb".into(), Duration::from_millis(1500));
        let kept =
            tombolo_backends::xen::OrphanedGrants { peer: 7, pages: 257, age, pid: 12, uid: 0, service, command };
        let reaper = holdings(ReaperListing { kept: vec![kept], let_go: 3 });
        let [kept] = &reaper.kept[..] else { panic!("one") };
        assert_eq!((kept.address.as_str(), kept.command.as_str(), kept.age), ("xen:7/web", "a?b", 1.5));
        assert_eq!((kept.user.as_str(), reaper.let_go, reaper.there), ("root", 3, true));
    }
}
