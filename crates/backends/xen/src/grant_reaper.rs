// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the grant reaper of a domain, a part of `tombolod`. It holds a descriptor of each segment that programs
//! of this domain grant. When a program dies, it keeps those segments whose peer has not reported that it unmapped them
//!
//!
//! Programs' messages come from strangers who may open gntalloc: all of them are bounded, and false ones harm only the
//! program that sent them. Peers report in their own mailboxes: a false report releases pages that the kernel then
//! keeps itself.

use std::{
    collections::{BTreeSet, HashMap},
    fmt, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags},
    process::Resource,
};
use tombolo_domain::{Error, Result};
use tombolo_layout::xen as at;
use tombolo_os::{
    credentials,
    passing::{self, SCM_MAX_FD},
};

use crate::{
    core::{Core, folder},
    end::PeerDomain,
    hypervisor::{DomId, Hypervisor},
    os::lock,
    page::PeerPage,
    quarantine::released,
    reaper_client::{ANSWER_MAX, Note, OrphanedGrants, Request},
    sys,
};

/// Interval at which the peers' mailboxes are read.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Largest number of programs at a time.
const PROGRAMS_MAX: usize = 256;
/// Largest number of descriptors that one program may hand over.
const FILES_MAX: usize = 4096;
/// Largest number of domains whose mailboxes are read: XenStore allows few watches for each domain.
const PEERS_MAX: usize = 64;
/// Divisor of the pages that this domain may grant. The result bounds the pages of dead programs of one user for one
/// peer; the kernel keeps further ones.
const SHARE: usize = 4;
/// Largest length of a request.
const REQUEST_MAX: usize = 256;

/// The grant reaper.
#[derive(Debug)]
pub struct GrantReaper {
    xen: Arc<dyn Hypervisor>,
    /// Made when a program died for the first time.
    core: Option<Arc<Core>>,
    programs: Vec<Program>,
    peers: BTreeSet<DomId>,
    orphans: Vec<Orphan>,
    let_go: u64,
    /// Largest number of descriptors of all programs together: the rest is for everything else that this process opens.
    files_max: usize,
}

/// A live program.
#[derive(Debug)]
struct Program {
    socket: OwnedFd,
    pid: u32,
    uid: u32,
    command: String,
    files: HashMap<u64, (Note, OwnedFd)>,
}

/// Pages of a program that died.
struct Orphan {
    kept: OrphanedGrants,
    since: Instant,
    note: Note,
    domain: Arc<PeerDomain>,
    /// The peer's mailbox.
    page: PeerPage,
    /// Descriptor whose close ends the grants, unless they are mapped.
    _file: OwnedFd,
}

impl fmt::Debug for Orphan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kept)
    }
}

impl Orphan {
    /// Returns whether the peer let go of the pages.
    fn is_free(&self) -> bool {
        let Note { place, generation, .. } = self.note;
        self.domain.is_gone() || self.page.state() == at::GONE || released(&self.page, place, generation)
    }
}

/// Result of reading a socket.
enum Received {
    Nothing,
    Said(Request, Vec<OwnedFd>),
    /// The program is gone, or violates the protocol.
    End,
}

impl GrantReaper {
    /// Makes the grant reaper of this domain.
    ///
    /// # Errors
    /// This is no Xen domain, or its drivers are not loaded.
    pub fn new() -> Result<Self> {
        sys::drivers_are_there()?;
        Ok(Self::on(Arc::new(sys::Xen)))
    }

    pub(crate) fn on(xen: Arc<dyn Hypervisor>) -> Self {
        let (programs, orphans, peers) = (Vec::new(), Vec::new(), BTreeSet::new());
        let may_open = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let files_max = usize::try_from(may_open / 4).unwrap_or(usize::MAX);
        Self { xen, core: None, programs, peers, orphans, let_go: 0, files_max }
    }

    /// Returns the mode and the group of gntalloc: a process that may open it may hand descriptors over.
    ///
    /// # Errors
    /// The device does not exist.
    pub fn admits() -> io::Result<(u32, u32)> {
        let device = std::fs::metadata(sys::GNTALLOC)?;
        Ok((device.mode() & 0o666, device.gid()))
    }

    /// Serves `listener`, which does not block, until `stop` is readable.
    ///
    /// # Errors
    /// The error of `poll`.
    pub fn serve(mut self, listener: &OwnedFd, stop: &OwnedFd) -> io::Result<()> {
        let every = Timespec::try_from(LOOK_EVERY).ok();
        loop {
            let all = [stop, listener].into_iter().chain(self.programs.iter().map(|program| &program.socket));
            let mut polled: Vec<_> = all.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            let timeout = if self.orphans.is_empty() { None } else { every.as_ref() };
            match rustix::event::poll(&mut polled, timeout) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return Ok(());
            }
            self.receive_notes(&ready[2..]);
            if ready[1] {
                self.admit(listener);
            }
            self.orphans.retain(|orphan| !orphan.is_free());
        }
    }

    fn admit(&mut self, listener: &OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(listener, flags) else { return };
        let Ok(who) = credentials::peer_of(&socket) else { return };
        if self.programs.len() < PROGRAMS_MAX {
            let pid = who.pid.unwrap_or(0);
            let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_else(|_| "?".into());
            let command = command.trim_end().replace(char::is_control, "?");
            self.programs.push(Program {
                socket,
                pid,
                uid: who.uid.unwrap_or(u32::MAX),
                command,
                files: HashMap::new(),
            });
        }
    }

    /// Receives one message from each program that has sent one.
    fn receive_notes(&mut self, ready: &[bool]) {
        let mut ended = Vec::new();
        for (index, _) in ready.iter().enumerate().filter(|(_, ready)| **ready) {
            let held = self.programs.iter().map(|program| program.files.len()).sum::<usize>() + self.orphans.len();
            let program = &mut self.programs[index];
            let ends = match receive(program.socket.as_fd()) {
                Received::Nothing => false,
                Received::Said(Request::Keep(note), files) => match <[OwnedFd; 1]>::try_from(files) {
                    Ok([file]) if self.xen.is_grant(file.as_fd()) => {
                        if program.files.len() < FILES_MAX && held < self.files_max {
                            program.files.insert(note.id, (note, file));
                        }
                        false
                    }
                    _ => true,
                },
                Received::Said(Request::Forget(id), _) => {
                    program.files.remove(&id);
                    false
                }
                Received::Said(Request::List, _) => {
                    send_listing(program.socket.as_fd(), &self.orphans, self.let_go).is_err()
                }
                Received::End => true,
            };
            if ends {
                ended.push(index);
            }
        }
        for index in ended.into_iter().rev() {
            let program = self.programs.swap_remove(index);
            self.take_over(program);
        }
    }

    /// Keeps the pages of a dead program that its peers may still map.
    fn take_over(&mut self, program: Program) {
        let Program { pid, uid, command, files, .. } = program;
        for (note, file) in files.into_values() {
            let pages = u64::from(note.pages);
            match self.mailbox(&note) {
                // The peer's mailbox is gone, and the peer's endpoint with it.
                Ok(None) => {}
                Ok(Some((domain, page))) if self.has_room(uid, &note) => {
                    let (peer, service, command) = (note.peer, note.service.clone(), command.clone());
                    let kept = OrphanedGrants { peer, pages, age: Duration::ZERO, pid, uid, service, command };
                    self.orphans.push(Orphan { kept, since: Instant::now(), note, domain, page, _file: file });
                }
                _ => self.let_go += pages,
            }
        }
        self.orphans.retain(|orphan| !orphan.is_free());
    }

    /// Returns whether there is room for more pages of this user that this peer may still map.
    fn has_room(&self, uid: u32, note: &Note) -> bool {
        let same = self.orphans.iter().filter(|orphan| orphan.kept.uid == uid && orphan.kept.peer == note.peer);
        let pages: u64 = same.map(|orphan| orphan.kept.pages).sum();
        pages + u64::from(note.pages) <= (self.xen.room() / SHARE) as u64
    }

    /// Returns the peer's mailbox, if it is still the one that the program knew.
    fn mailbox(&mut self, note: &Note) -> Result<Option<(Arc<PeerDomain>, PeerPage)>> {
        let core = match &self.core {
            Some(core) => Arc::clone(core),
            None => Arc::clone(self.core.insert(Core::new(Arc::clone(&self.xen))?)),
        };
        let orphans = &self.orphans;
        self.peers.retain(|peer| orphans.iter().any(|orphan| orphan.note.peer == *peer));
        if !self.peers.contains(&note.peer) && self.peers.len() == PEERS_MAX {
            return Err(Error::Limit { what: "domains that are watched", remedy: "none: the kernel keeps the pages" });
        }
        self.peers.insert(note.peer);
        let domain = core.peer(note.peer)?;
        // The domain had a folder, or there would be no channel.
        domain.seen.store(true, std::sync::atomic::Ordering::Release);
        if domain.is_gone() || lock(&core.store).read(&folder(note.peer, core.own))?.is_none() {
            return Ok(None);
        }
        let page = match core.xen.map(note.peer, &[note.mailbox], None, Box::new(())) {
            Err(Error::Revoked) => return Ok(None),
            page => page?,
        };
        let Ok((page, _port)) = PeerPage::new(page, at::MAILBOX_MAGIC) else { return Ok(None) };
        let same = page.word(at::AT_MADE).hint() == note.made;
        Ok(same.then_some((domain, page)))
    }
}

/// Receives the next message of a program.
fn receive(socket: BorrowedFd<'_>) -> Received {
    let mut buffer = [0; REQUEST_MAX];
    let received = match passing::receive(socket, &mut buffer, SCM_MAX_FD, RecvFlags::DONTWAIT) {
        Ok(received) => received,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Received::Nothing,
        Err(_) => return Received::End,
    };
    if received.len == 0 || received.is_longer || received.more_came {
        return Received::End;
    }
    let text = std::str::from_utf8(&buffer[..received.len]).ok();
    text.and_then(Request::parse).map_or(Received::End, |request| Received::Said(request, received.descriptors))
}

/// Sends the list of kept pages. Does not wait for a client that does not read.
fn send_listing(socket: BorrowedFd<'_>, orphans: &[Orphan], let_go: u64) -> rustix::io::Result<()> {
    let say = |text: &str| rustix::net::send(socket, text.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let mut lines = String::new();
    for orphan in orphans {
        let line = OrphanedGrants { age: orphan.since.elapsed(), ..orphan.kept.clone() }.to_string();
        if lines.len() + line.len() > ANSWER_MAX {
            say(&std::mem::take(&mut lines))?;
        }
        lines += &line;
    }
    if !lines.is_empty() {
        say(&lines)?;
    }
    say(&format!("end {let_go}")).map(drop)
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::{
        io::Read,
        os::unix::net::UnixStream,
        path::{Path, PathBuf},
        thread::{self, JoinHandle},
    };

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    use tombolo_domain::{Deadline, Endpoint, Offer, Received, Rendezvous, wait_readable};
    use tombolo_mem::{OwnSegment, PeerSegment};

    use super::*;
    use crate::{FakeXen, ReaperListing, XenDomain, end::End, names::Names, os::raise};

    /// Domain 5 with a grant reaper.
    struct ReaperFixture {
        xen: FakeXen,
        folder: tempfile::TempDir,
        stop: Arc<OwnedFd>,
        thread: Option<JoinHandle<()>>,
    }

    impl ReaperFixture {
        fn new() -> Self {
            let (xen, folder) = (FakeXen::new(), tempfile::tempdir().unwrap());
            let mut five = Self { xen, folder, stop: Arc::new(tombolo_os::event::eventfd(0).unwrap()), thread: None };
            five.start();
            five
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("keeper")
        }

        fn start(&mut self) {
            self.start_with(|_| {});
        }

        fn start_with(&mut self, change: impl FnOnce(&mut GrantReaper)) {
            let mut reaper = self.xen.grant_reaper(5, self.path());
            change(&mut reaper);
            let listener = listen(&self.path());
            let stop = Arc::clone(&self.stop);
            self.thread = Some(thread::spawn(move || reaper.serve(&listener, &stop).unwrap()));
        }

        fn stop(&mut self) {
            raise(&self.stop);
            self.thread.take().unwrap().join().unwrap();
            let _ = rustix::io::read(&*self.stop, &mut [0; 8]);
            std::fs::remove_file(self.path()).unwrap();
        }

        fn reaper_listing(&self) -> ReaperListing {
            ReaperListing::ask_at(&self.path()).unwrap()
        }

        /// Returns the listing once `is` holds for it.
        fn until(&self, what: &str, is: impl Fn(&ReaperListing) -> bool) -> ReaperListing {
            let deadline = Deadline::after(Duration::from_secs(30));
            loop {
                let found = self.reaper_listing();
                if is(&found) {
                    return found;
                }
                assert!(!deadline.expired(), "{what}: {found:?}");
                thread::park_timeout(Duration::from_millis(2));
            }
        }

        /// Returns the listing after all earlier messages were handled: a question may be answered before a message
        /// that came with it.
        fn heard(&self) -> ReaperListing {
            self.reaper_listing();
            self.reaper_listing()
        }

        /// Waits until no segment is granted any more.
        fn until_ungranted(&self) {
            let deadline = Deadline::after(Duration::from_secs(30));
            while self.xen.grants() >= PAGES {
                assert!(!deadline.expired(), "{} pages are granted", self.xen.grants());
                thread::park_timeout(Duration::from_millis(2));
            }
        }
    }

    impl Drop for ReaperFixture {
        fn drop(&mut self) {
            if self.thread.is_some() {
                self.stop();
            }
        }
    }

    fn listen(path: &Path) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, 16).unwrap();
        socket
    }

    /// A program of domain 5 that sent a segment of `PAGES` pages, and its peer in domain 7, which mapped it.
    struct OrphanFixture {
        five: XenDomain,
        here: Option<(Box<dyn Endpoint>, OwnSegment, Offer)>,
        there: Option<Box<dyn Endpoint>>,
        mapped: Option<PeerSegment>,
        _seven: XenDomain,
    }

    const PAGES: usize = 30;
    /// Number of pages granted for a segment: its pages and one for their list.
    const KEPT: u64 = PAGES as u64 + 1;

    impl OrphanFixture {
        /// The program listens.
        fn new(xen: &FakeXen) -> Self {
            let (five, seven) = (xen.domain(5), xen.domain(7));
            let mut listener = five.listen("7/a").unwrap();
            let mut there = seven.connect("5/a", deadline()).unwrap();
            wait_readable(listener.fd(), deadline()).unwrap();
            let mut here = listener.accept().unwrap().expect("somebody asked to connect");
            there.send(b"hello", None).unwrap();
            receive(&mut *here);
            let (segment, offer) = here.allocate(PAGES * at::PAGE).unwrap();
            here.send(b"ring", Some(&offer)).unwrap();
            let mapped = receive(&mut *there).segment;
            Self { five, here: Some((here, segment, offer)), there: Some(there), mapped, _seven: seven }
        }

        /// The program calls, and sends its segment before it knows which listener it will reach.
        fn calling(xen: &FakeXen) -> Self {
            let (five, seven) = (xen.domain(5), xen.domain(7));
            let mut listener = seven.listen("5/a").unwrap();
            let mut here = five.connect("7/a", deadline()).unwrap();
            let (segment, offer) = here.allocate(PAGES * at::PAGE).unwrap();
            here.send(b"ring", Some(&offer)).unwrap();
            wait_readable(listener.fd(), deadline()).unwrap();
            let mut there = listener.accept().unwrap().expect("somebody asked to connect");
            let mapped = receive(&mut *there).segment;
            there.send(b"hello", None).unwrap();
            receive(&mut *here);
            Self { five, here: Some((here, segment, offer)), there: Some(there), mapped, _seven: seven }
        }

        /// The program dies: its side of the grant reaper's socket closes, and its grants go.
        fn die(&mut self) {
            self.hang_up();
            drop(self.here.take());
            self.five = XenDomain::new();
        }

        fn hang_up(&self) {
            let core = self.five.core().unwrap();
            let socket = core.keeping.socket().expect("it has handed something over");
            rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both).unwrap();
        }
    }

    fn deadline() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    fn receive(link: &mut dyn Endpoint) -> Received {
        loop {
            if let Some(received) = link.recv(1 << 20).unwrap() {
                return received;
            }
            wait_readable(link.fd(), deadline()).unwrap();
        }
    }

    #[test]
    fn x13_pages_of_a_program_that_died_are_kept_until_its_peer_unmaps_them() {
        for meet in [OrphanFixture::new, OrphanFixture::calling] {
            kept_and_let_go(meet);
        }
    }

    fn kept_and_let_go(meet: fn(&FakeXen) -> OrphanFixture) {
        let five = ReaperFixture::new();
        let mut met = meet(&five.xen);
        assert!(met.mapped.is_some());
        assert_eq!(five.reaper_listing(), ReaperListing::default(), "the program lives");
        met.die();
        let found = five.until("kept", |found| !found.kept.is_empty());
        let [kept] = &found.kept[..] else { panic!("{found:?}") };
        assert_eq!((kept.peer, kept.pages, kept.service.as_str()), (7, KEPT, "a"));
        assert_eq!((kept.pid, kept.uid), (std::process::id(), rustix::process::geteuid().as_raw()));
        assert!(five.xen.grants() >= KEPT as usize, "they are no longer granted");
        let again = five.until("older", |again| again.kept.iter().any(|again| again.age > kept.age));
        assert_eq!(again.kept.len(), 1, "nobody said that it unmapped them");
        met.mapped = None;
        five.until("let go", |found| found.kept.is_empty());
        assert_eq!(five.reaper_listing().let_go, 0);
        five.until_ungranted();
    }

    #[test]
    fn x13_pages_are_let_go_when_the_peer_closed_or_its_domain_is_gone() {
        for destroyed in [false, true] {
            let five = ReaperFixture::new();
            let mut met = OrphanFixture::new(&five.xen);
            met.die();
            five.until("kept", |found| found.kept.len() == 1);
            if destroyed {
                five.xen.destroy(7);
            } else {
                drop((met.there.take(), met.mapped.take()));
            }
            five.until("let go", |found| found.kept.is_empty());
        }
    }

    #[test]
    fn x13_what_the_living_let_go_of_is_not_held_by_the_keeper() {
        let five = ReaperFixture::new();
        let mut met = OrphanFixture::new(&five.xen);
        let (mut link, segment, offer) = met.here.take().unwrap();
        link.retire(Some(segment), offer);
        assert_eq!(link.quarantined(), (PAGES * at::PAGE) as u64);
        met.mapped = None;
        let deadline = deadline();
        while link.quarantined() > 0 {
            assert!(!deadline.expired());
            thread::park_timeout(Duration::from_millis(2));
        }
        five.until_ungranted();
        met.hang_up();
        assert_eq!(five.heard(), ReaperListing::default());
    }

    #[test]
    fn x13_program_finds_the_keeper_that_was_started_anew_by_its_next_segment() {
        let mut five = ReaperFixture::new();
        let mut met = OrphanFixture::new(&five.xen);
        five.stop();
        five.start();
        let (link, ..) = met.here.as_mut().unwrap();
        let (segment, offer) = link.allocate(at::PAGE).unwrap();
        link.send(b"another", Some(&offer)).unwrap();
        let _mapped = receive(&mut **met.there.as_mut().unwrap()).segment;
        met.die();
        drop((segment, offer));
        let found = five.until("kept", |found| !found.kept.is_empty());
        assert_eq!(found.kept.iter().map(|kept| kept.pages).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn x13_dead_take_their_share_of_the_pages_and_no_more() {
        let five = ReaperFixture::new();
        let mut met = [(); 2].map(|()| OrphanFixture::new(&five.xen));
        // The rest is four times what one of them has, and some pages.
        five.xen.limit_grants(400);
        let room = five.xen.domain(5).xen.room();
        five.xen.limit_grants(400 - room + SHARE * (KEPT as usize + 2));
        met.iter_mut().for_each(OrphanFixture::die);
        let found = five.until("both", |found| found.let_go > 0);
        assert_eq!((found.kept.len(), found.let_go), (1, KEPT));
    }

    #[test]
    fn x13_keeper_that_has_all_the_files_it_may_leaves_the_rest_to_the_kernel() {
        let mut five = ReaperFixture::new();
        five.stop();
        five.start_with(|reaper| reaper.files_max = 1);
        let mut met = [(); 2].map(|()| OrphanFixture::new(&five.xen));
        five.heard();
        met.iter_mut().for_each(OrphanFixture::die);
        five.until("one", |found| found.kept.len() == 1);
        assert_eq!(five.heard().kept.len(), 1);
    }

    #[test]
    fn x13_peers_of_whom_nothing_is_kept_any_more_leave_room_for_others() {
        let mut five = ReaperFixture::new();
        five.stop();
        five.start_with(|reaper| reaper.peers.extend(100..100 + PEERS_MAX as DomId));
        let mut met = OrphanFixture::new(&five.xen);
        met.die();
        let found = five.until("kept", |found| found.let_go > 0 || !found.kept.is_empty());
        assert_eq!((found.kept.len(), found.let_go), (1, 0));
    }

    #[test]
    fn x13_mailbox_that_is_another_than_the_program_had_keeps_nothing() {
        let five = ReaperFixture::new();
        let met = OrphanFixture::new(&five.xen);
        let core = met.five.core().unwrap();
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        // The peer's own mailbox, one that was made at another time, and one that is no mailbox.
        let (seven, its_five) = (five.xen.domain(7), PeerDomain::new(5, &Arc::new(Names::new(&core.xen, 7))));
        let port = seven.xen.offer_port(5).unwrap();
        let end = End::new(&*seven.xen, &Arc::new(its_five), port, "a").unwrap();
        let page = core.xen.map(7, &[end.reference], None, Box::new(())).unwrap();
        let made = PeerPage::unchecked(page).word(at::AT_MADE).hint();
        for (mailbox, made) in [(end.reference, made), (end.reference, made + 1), (end.reference + 1000, made)] {
            let (place, generation, pages, service) = (1, 9, 3, "a".into());
            let note = Note { id: 0, peer: 7, mailbox, made, place, generation, pages, service };
            let keeping = crate::reaper_client::ReaperClient::default();
            std::mem::forget(keeping.entrust(&*core.xen, pipe.as_fd(), note));
            rustix::net::shutdown(&*keeping.socket().unwrap(), rustix::net::Shutdown::Both).unwrap();
            five.until("kept", |found| found.kept.len() == 1);
            assert_eq!((five.heard().kept.len(), five.heard().let_go), (1, 0));
        }
    }

    #[test]
    fn x13_program_that_says_what_it_should_not_is_not_heard_again() {
        let five = ReaperFixture::new();
        let (file, _other) = rustix::pipe::pipe().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let note = "keep 1 7 8 9 0 1 3 a";
        let files: [(&str, &[BorrowedFd<'_>]); 5] = [
            ("keep 1 2 3", &[file.as_fd()]),
            (note, &[]),
            (note, &[null.as_fd()]),
            (note, &[file.as_fd(), file.as_fd()]),
            ("", &[]),
        ];
        for (text, files) in files {
            let text = if text.is_empty() { "x".repeat(REQUEST_MAX + 1) } else { text.to_owned() };
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(five.path()).unwrap()).unwrap();
            passing::send(&socket, &[io::IoSlice::new(text.as_bytes())], files, SendFlags::empty()).unwrap();
            assert_eq!(UnixStream::from(socket).read(&mut [0; 8]).unwrap(), 0, "it is heard on: {text}");
        }
        assert_eq!(five.reaper_listing(), ReaperListing::default());
    }
}
