// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Simulates, for tests, a process of a peer domain that misuses its own pages, ports and nodes. It runs over the
//! simulated Xen and over the real one.

use std::{sync::Arc, thread, time::Duration};

use tombolo_domain::{Deadline, Result};
use tombolo_layout::xen as at;
use tombolo_mem::{OwnControl, OwnWord, PeerWord};

use crate::{
    core::folder,
    hypervisor::{DomId, Grants, Hypervisor, Port},
    names::{self, Record},
    page::{PeerMessage, PeerPage, mark_of},
    store::Store,
};

/// A hostile peer.
pub struct Hostile {
    xen: Arc<dyn Hypervisor>,
    store: Store,
    own: DomId,
    peer: DomId,
    /// State of a xorshift generator for garbage, so that a run can be repeated.
    seed: u64,
    /// Pages and ports that live as long as this does.
    kept: Vec<HeldPages>,
}

/// Pages, mappings and the port of an endpoint.
#[derive(Default)]
struct HeldPages {
    _pages: Vec<(Arc<dyn Grants>, OwnControl)>,
    _mapped: Vec<PeerPage>,
    _port: Option<Arc<dyn Port>>,
}

/// A page that this peer wrote and granted.
struct Page {
    grants: Arc<dyn Grants>,
    words: OwnControl,
}

impl Page {
    fn reference(&self) -> u32 {
        self.grants.references()[0]
    }

    fn set(&self, offset: usize, word: u64) {
        self.words.word(offset).store_release(word);
    }
}

/// A reconnect page that a listener knows.
struct JoinedReconnectPage {
    page: Page,
    port: Arc<dyn Port>,
}

/// An endpoint that was answered, and that this peer can then misuse.
struct Joined {
    mailbox: Page,
    port: Arc<dyn Port>,
    theirs: PeerPage,
}

/// Time within which a victim must answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// An attack of a hostile peer on `service`, which lasts at most until the deadline.
pub type Act = fn(&mut Hostile, &str, Deadline) -> Result<()>;

/// Attacks of hostile peers on listeners.
pub const CALLERS: [(&str, Act); 18] = [
    ("knocks_with_garbage", |it, service, _| {
        for name in ["", "x", "0", "4294967295", "99999999999", "1@2", "-1"] {
            it.store.write(&format!("{}/{service}@{name}", folder(it.own, it.peer)), "garbage")?;
        }
        Ok(())
    }),
    ("knocks_with_a_page_that_is_none", |it, service, _| {
        let page = it.page()?;
        page.set(at::AT_MAGIC, 0x6262_6262);
        it.request_with(service, &page)?;
        it.keep_mapped(page, None);
        Ok(())
    }),
    ("knocks_with_a_port_that_is_none", |it, service, _| {
        let page = it.mailbox(0xffff_fff0)?;
        it.request_with(service, &page)?;
        it.keep_mapped(page, None);
        Ok(())
    }),
    ("dies_before_its_knock", |it, _, _| it.mailbox(1).map(drop)),
    ("dies_after_its_knock", |it, service, _| {
        let port = it.xen.offer_port(it.peer)?;
        let page = it.mailbox(port.number())?;
        it.request_with(service, &page)
    }),
    ("dies_once_answered", |it, service, _| {
        let port = it.xen.offer_port(it.peer)?;
        let page = it.mailbox(port.number())?;
        it.request_with(service, &page)?;
        it.answer(service, page.reference()).map(drop)
    }),
    ("dies_once_joined", |it, service, _| it.join(service, 0).map(drop)),
    ("is_answered_and_never_joins", |it, service, _| {
        for _ in 0..20 {
            let port = it.xen.offer_port(it.peer)?;
            let page = it.mailbox(port.number())?;
            it.request_with(service, &page)?;
            it.keep_mapped(page, Some(port));
        }
        Ok(())
    }),
    ("counts_what_cannot_be", |it, service, _| {
        let joined = it.join(service, 0)?;
        for count in [9, 1 << 63, u64::MAX] {
            joined.mailbox.set(at::AT_SENT, count);
            joined.mailbox.set(at::AT_RECEIVED, count);
            joined.port.notify();
        }
        it.hold(joined);
        Ok(())
    }),
    ("sends_garbage", |it, service, _| {
        let joined = it.join(service, 0)?;
        for word in (at::AT_MESSAGES..at::PAGE).step_by(8) {
            joined.mailbox.set(word, it.random());
        }
        joined.mailbox.set(at::AT_SENT, at::MESSAGES);
        joined.port.notify();
        it.hold(joined);
        Ok(())
    }),
    ("sends_segments_that_are_none", |it, service, _| {
        let joined = it.join(service, 0)?;
        // The first list refers to itself for ever, the second one names nothing, and the last one does not exist.
        let (endless, empty) = (it.page()?, it.page()?);
        let own = endless.reference();
        endless.set(0, own.into());
        for at in (8..at::PAGE).step_by(8) {
            endless.set(at, u64::from(own) << 32 | u64::from(own));
        }
        let lists = [(own, 16), (own, 4000), (empty.reference(), 3), (empty.reference(), 1 << 20), (0x7fff_ffff, 1)];
        // Small segments, whose references in the mailbox belong to nobody; one page more than can stand there, and
        // very many more.
        let lists = lists.into_iter().chain([(0, 24), (0, 25), (0, 1 << 20)]);
        for (number, (list, pages)) in (0..).zip(lists) {
            let name = at::SegmentName { list, pages, place: number, generation: 1 };
            it.send(&joined, number.into(), at::MessageHead { len: 1, segment: Some(name) });
        }
        it.keep_mapped(endless, None);
        it.keep_mapped(empty, None);
        it.hold(joined);
        Ok(())
    }),
    ("revokes_what_it_sent", |it, service, _| {
        let joined = it.join(service, 0)?;
        for number in 0..8 {
            let list = it.page()?;
            let grants = it.xen.grant(it.peer, 2)?;
            list.set(8, u64::from(grants.references()[0]) | u64::from(grants.references()[1]) << 32);
            let segment = Arc::clone(&grants).map(0, 2)?;
            let name = at::SegmentName { list: list.reference(), pages: 2, place: number, generation: 1 };
            it.send(&joined, number.into(), at::MessageHead { len: 1, segment: Some(name) });
            drop((segment, grants, list));
        }
        it.hold(joined);
        Ok(())
    }),
    ("writes_all_over_its_mailbox", |it, service, deadline| {
        let joined = it.join(service, 0)?;
        while !deadline.expired() {
            for _ in 0..100 {
                let offset = it.random() as usize % (at::PAGE / 8) * 8;
                let word = it.random() >> (it.random() % 64);
                joined.mailbox.set(offset, word);
            }
            joined.port.notify();
            pause();
        }
        Ok(())
    }),
    ("storms", |it, service, deadline| {
        let joined = it.join(service, 0)?;
        while !deadline.expired() {
            joined.port.notify();
        }
        Ok(())
    }),
    ("has_a_line_that_is_none", |it, service, _| {
        let (empty, portless) = (it.page()?, it.headed(at::RECONNECT_MAGIC, 0xffff_fff0)?);
        for reconnect_page in [empty.reference().into(), portless.reference().into(), 0x7fff_ffff, u64::MAX] {
            let port = it.xen.offer_port(it.peer)?;
            let page = it.mailbox(port.number())?;
            page.set(at::AT_RECONNECT_PAGE, reconnect_page);
            it.request_with(service, &page)?;
            it.keep_mapped(page, Some(port));
        }
        it.keep_mapped(empty, None);
        it.keep_mapped(portless, None);
        Ok(())
    }),
    ("knocks_with_garbage_by_line", |it, service, deadline| {
        let reconnect_page = it.reconnect_page(service)?;
        while !deadline.expired() {
            for place in (at::AT_REQUESTS..at::PAGE).step_by(8) {
                let reference = it.random() % 0x4000;
                reconnect_page.page.set(place, it.random() << 32 | reference);
            }
            reconnect_page.port.notify();
            pause();
        }
        it.keep_mapped(reconnect_page.page, Some(reconnect_page.port));
        Ok(())
    }),
    ("storms_by_line", |it, service, deadline| {
        let reconnect_page = it.reconnect_page(service)?;
        while !deadline.expired() {
            reconnect_page.port.notify();
        }
        it.keep_mapped(reconnect_page.page, Some(reconnect_page.port));
        Ok(())
    }),
    ("hoards_what_it_is_sent", |it, service, deadline| {
        let joined = it.join(service, 0)?;
        let mut received = 0;
        while !deadline.expired() && received < 4 {
            if joined.theirs.word(at::AT_SENT).hint() <= received {
                pause();
                continue;
            }
            if let Ok(PeerMessage { segment: Some(name), references, .. }) = joined.theirs.message(received) {
                let pages = match name.list {
                    0 => references,
                    list => {
                        let list = PeerPage::unchecked(it.xen.map(it.peer, &[list], None, Box::new(()))?);
                        list.references(8, name.pages as usize).collect()
                    }
                };
                let _mapped = vec![PeerPage::unchecked(it.xen.map(it.peer, &pages, None, Box::new(()))?)];
                it.kept.push(HeldPages { _mapped, ..HeldPages::default() });
            }
            received += 1;
            joined.mailbox.set(at::AT_RECEIVED, received);
            joined.port.notify();
        }
        it.hold(joined);
        Ok(())
    }),
];

/// Attacks of hostile peers on callers.
pub const LISTENERS: [(&str, Act); 6] = [
    ("has_a_door_that_is_none", |it, service, _| {
        let page = it.page()?;
        page.set(at::AT_MAGIC, 0x6262_6262);
        it.open(service, page)
    }),
    ("never_answers", |it, service, _| {
        let listener_page = it.listener_page(service)?;
        it.open(service, listener_page)
    }),
    ("answers_with_garbage", |it, service, _| {
        let listener_page = it.listener_page(service)?;
        for index in 0..at::ANSWERS {
            // These are the references that a caller's mailbox is likely to have.
            listener_page.set(at::AT_ANSWERS + 8 * index, (index as u64) << 32 | 0x7fff_0000 | index as u64);
        }
        it.open(service, listener_page)
    }),
    ("has_a_door_that_flickers", |it, service, deadline| {
        let listener_page = it.listener_page(service)?;
        it.name(service, &listener_page)?;
        while !deadline.expired() {
            for _ in 0..100 {
                let offset = it.random() as usize % (at::PAGE / 8) * 8;
                listener_page.set(offset, it.random() >> (it.random() % 64));
            }
            pause();
        }
        Ok(())
    }),
    ("dies_before_its_answer", |it, service, _| {
        let listener_page = it.listener_page(service)?;
        it.name(service, &listener_page)?;
        pause();
        Ok(())
    }),
    ("names_its_door_anew_all_the_time", |it, service, deadline| {
        let node = format!("{}/{service}", it.folder()?);
        while !deadline.expired() {
            let value = match it.random() % 4 {
                0 => "not a number".into(),
                1 => String::new(),
                2 => it.random().to_string(),
                _ => (it.random() % 64).to_string(),
            };
            it.store.write(&node, &value)?;
        }
        Ok(())
    }),
];

/// Attacks of hostile peers on processes that look for the other endpoints of their connections.
pub const FINDERS: [(&str, Act); 4] = [
    ("shows_hints_that_are_none", |it, service, _| {
        let listener_page = it.published_listener_page(service)?;
        let own = u64::from(listener_page.reference());
        let empty = it.page()?;
        // The reader reads each of these services once.
        for (at, hints) in [0, own, empty.reference().into(), 0x7fff_ffff, u64::MAX].into_iter().enumerate() {
            let service = format!("{service}{at}");
            let listener_page = it.published_listener_page(&service)?;
            listener_page.set(at::AT_HINTS, hints);
            it.open(&service, listener_page)?;
        }
        it.keep_mapped(empty, None);
        it.keep_mapped(listener_page, None);
        Ok(())
    }),
    ("shows_hints_that_flicker", |it, service, deadline| {
        let (listener_page, hints) = it.hinting(service)?;
        while !deadline.expired() {
            for _ in 0..100 {
                let offset = it.random() as usize % (at::PAGE / 8) * 8;
                hints.set(offset, it.random() >> (it.random() % 64));
            }
            hints.set(at::AT_STATE, it.random() % 2);
            pause();
        }
        it.keep_mapped(listener_page, None);
        it.keep_mapped(hints, None);
        Ok(())
    }),
    ("shows_hints_and_dies", |it, service, deadline| {
        while !deadline.expired() {
            // Both pages end with this statement.
            it.hinting(service)?;
            pause();
        }
        Ok(())
    }),
    ("waits_for_everything_and_never_answers", |it, service, _| {
        let (listener_page, hints) = it.hinting(service)?;
        for key in 0..at::KEYS {
            hints.set(at::AT_KEYS + 8 * key, at::key_word(key as u32));
        }
        it.keep_mapped(listener_page, None);
        it.keep_mapped(hints, None);
        Ok(())
    }),
];

fn pause() {
    thread::park_timeout(Duration::from_millis(1));
}

impl Hostile {
    pub(crate) fn new(xen: Arc<dyn Hypervisor>, peer: DomId) -> Result<Self> {
        let mut store = Store::new(xen.store()?);
        let own = store.own_id()?;
        let mut it = Self { xen, store, own, peer, seed: 0x9e37_79b9_7f4a_7c15, kept: Vec::new() };
        it.folder()?;
        Ok(it)
    }

    /// Performs the attack `name` of [`CALLERS`], [`LISTENERS`] or [`FINDERS`] on `service`. Holds its pages and ports
    /// until it is dropped.
    ///
    /// # Blocking
    /// At most until `deadline`, and as long as the victim takes to answer.
    ///
    /// # Errors
    /// Xen or the victim prevented the attack.
    ///
    /// # Panics
    /// There is no attack of that name.
    pub fn act(&mut self, name: &str, service: &str, deadline: Deadline) -> Result<()> {
        let acts = CALLERS.iter().chain(&LISTENERS).chain(&FINDERS);
        let (_, act) = acts.into_iter().find(|(known, _)| *known == name).expect("an act that is known");
        act(self, service, deadline)
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn folder(&mut self) -> Result<String> {
        let path = folder(self.own, self.peer);
        self.store.make_folder(&path, self.own, self.peer)?;
        Ok(path)
    }

    fn page(&self) -> Result<Page> {
        let grants = self.xen.grant(self.peer, 1)?;
        let (words, _no_data) = Arc::clone(&grants).map(0, 1)?.split(at::PAGE);
        Ok(Page { grants, words })
    }

    fn headed(&self, magic: u64, port: u32) -> Result<Page> {
        let page = self.page()?;
        page.set(at::AT_PORT, u64::from(at::VERSION) | u64::from(port) << 32);
        page.set(at::AT_STATE, at::OPEN);
        page.set(at::AT_MAGIC, magic);
        Ok(page)
    }

    fn mailbox(&self, port: u32) -> Result<Page> {
        self.headed(at::MAILBOX_MAGIC, port)
    }

    fn listener_page(&self, service: &str) -> Result<Page> {
        let listener_page = self.headed(at::LISTENER_PAGE_MAGIC, 0)?;
        listener_page.set(at::AT_JOINED, mark_of(service));
        Ok(listener_page)
    }

    /// Makes a listener page for the pair of domains that dom0 publishes.
    fn published_listener_page(&mut self, service: &str) -> Result<Page> {
        let told = self.store.read(&format!("{}/{}", names::folder_of(self.own), self.peer))?;
        let record = told.and_then(|text| Record::parse(&text)).expect("dom0 tells of the victim");
        let listener_page = self.listener_page(service)?;
        listener_page.set(at::AT_PAIR, record.pair.shows);
        Ok(listener_page)
    }

    /// Makes a listener page with a hints page that claims the addresses of the tests for all domains from 1 to 16.
    fn hinting(&mut self, service: &str) -> Result<(Page, Page)> {
        let (listener_page, hints) = (self.published_listener_page(service)?, self.headed(at::HINTS_MAGIC, 0)?);
        for at in 0..at::ADDRESSES {
            let mut address = [0xfd; 16];
            address[14..].copy_from_slice(&(at as u16 + 1).to_be_bytes());
            let number = u128::from_le_bytes(address);
            hints.set(at::AT_ADDRESSES + 16 * at, number as u64);
            hints.set(at::AT_ADDRESSES + 16 * at + 8, (number >> 64) as u64);
        }
        listener_page.set(at::AT_HINTS, hints.reference().into());
        self.name(service, &listener_page)?;
        Ok((listener_page, hints))
    }

    fn name(&mut self, service: &str, listener_page: &Page) -> Result<()> {
        let node = format!("{}/{service}", self.folder()?);
        self.store.write(&node, &listener_page.reference().to_string())
    }

    fn open(&mut self, service: &str, listener_page: Page) -> Result<()> {
        self.name(service, &listener_page)?;
        self.keep_mapped(listener_page, None);
        Ok(())
    }

    fn request_with(&mut self, service: &str, mailbox: &Page) -> Result<()> {
        mailbox.set(at::AT_WANTED, mark_of(service));
        self.request_connection(service, mailbox.reference())
    }

    fn request_connection(&mut self, service: &str, reference: u32) -> Result<()> {
        self.store.write(&format!("{}/{service}@{reference}", folder(self.own, self.peer)), "")
    }

    fn keep_mapped(&mut self, page: Page, port: Option<Arc<dyn Port>>) {
        self.kept.push(HeldPages { _pages: vec![(page.grants, page.words)], _port: port, ..HeldPages::default() });
    }

    fn hold(&mut self, joined: Joined) {
        let Joined { mailbox, port, theirs } = joined;
        let _pages = vec![(mailbox.grants, mailbox.words)];
        self.kept.push(HeldPages { _pages, _mapped: vec![theirs], _port: Some(port) });
    }

    /// Waits for the listener page's answer to the mailbox `reference`. Returns the reference of the listener's
    /// mailbox.
    fn answer(&mut self, service: &str, reference: u32) -> Result<u32> {
        let deadline = Deadline::after(PATIENCE);
        let node = format!("{}/{service}", folder(self.peer, self.own));
        let text = self.store.read(&node)?.expect("somebody listens");
        let listener_page = self.xen.map(self.peer, &[text.parse().expect("a reference")], None, Box::new(()))?;
        while !deadline.expired() {
            let words =
                (0..at::ANSWERS).map(|index| listener_page.word(at::AT_ANSWERS + 8 * index).load_acquire().hint());
            if let Some(word) = words.into_iter().find(|word| (word >> 32) as u32 == reference) {
                return Ok(word as u32);
            }
            pause();
        }
        Err(tombolo_domain::Error::TimedOut)
    }

    fn reconnect_page(&mut self, service: &str) -> Result<JoinedReconnectPage> {
        let port = self.xen.offer_port(self.peer)?;
        let page = self.headed(at::RECONNECT_MAGIC, port.number())?;
        let joined = self.join(service, page.reference().into())?;
        self.hold(joined);
        Ok(JoinedReconnectPage { page, port })
    }

    fn join(&mut self, service: &str, reconnect_page: u64) -> Result<Joined> {
        let port = self.xen.offer_port(self.peer)?;
        let mailbox = self.mailbox(port.number())?;
        mailbox.set(at::AT_RECONNECT_PAGE, reconnect_page);
        self.request_with(service, &mailbox)?;
        let reference = self.answer(service, mailbox.reference())?;
        let theirs = PeerPage::unchecked(self.xen.map(self.peer, &[reference], None, Box::new(()))?);
        mailbox.set(at::AT_JOINED, 1);
        Ok(Joined { mailbox, port, theirs })
    }

    fn send(&self, joined: &Joined, number: u64, head: at::MessageHead) {
        let base = at::AT_MESSAGES + (number % at::MESSAGES) as usize * at::MESSAGE_STRIDE;
        for (index, word) in head.encode().into_iter().enumerate() {
            joined.mailbox.set(base + 8 * index, word);
        }
        joined.mailbox.set(at::AT_SENT, number + 1);
        joined.port.notify();
    }
}
