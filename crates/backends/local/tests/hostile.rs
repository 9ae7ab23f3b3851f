// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that truncates, violates the protocol, sends unexpected messages, and interferes with what both endpoints
//! hold (L-4 to L-7).
//!
//! The tests count this process's open files, so they run one at a time.

mod support;

use std::{
    fs::{self, File},
    io::Write,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use rustix::{
    event::EventfdFlags,
    fs::{MemfdFlags, OFlags, SealFlags},
};
use support::{
    Folder, eventually,
    raw::{Raw, eventfd},
    unblocked,
};
use tombolo_domain::{Deadline, Doorbell, Error, Liveness, Slot, Woken};
use tombolo_layout::local::Head;
use tombolo_mem::OwnData;

const ALL_SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL).union(SealFlags::FUTURE_WRITE);
const BARE: Head = Head { doorbells: false, single: false, segment: false, len: 1 };
const WITH_SEGMENT: Head = Head { doorbells: false, single: false, segment: true, len: 1 };
const WITH_DOORBELLS: Head = Head { doorbells: true, single: false, segment: false, len: 1 };

fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

/// Runs `attack` and checks that it leaves no descriptor behind.
fn without_leak(attack: impl FnOnce()) {
    let before = open_files();
    attack();
    eventually("as many open files as before", || open_files() == before);
}

#[track_caller]
fn refused(raw: &mut Raw, clause: &str) {
    match raw.link.recv(1 << 30) {
        Err(Error::Malformed { clause: broken, .. }) if broken == clause => {}
        other => panic!("{clause}: {other:?}"),
    }
}

fn dev_null() -> OwnedFd {
    File::options().read(true).write(true).open("/dev/null").unwrap().into()
}

fn memfd(len: u64, flags: MemfdFlags, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("hostile", flags | MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    let _ = rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, len.max(1));
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn l4_truncated_overlong_or_lying_datagram_is_refused() {
    let _alone = alone();
    let folder = Folder::new();
    without_leak(|| {
        let mut raw = Raw::introduced(&folder);
        let whole = [&Head { len: 5, ..BARE }.encode()[..], b"hello"].concat();
        for len in 1..whole.len() {
            raw.send(&whole[..len], &[]);
            refused(&mut raw, "L-4");
        }
        raw.send(&[&whole[..], b"!"].concat(), &[]);
        refused(&mut raw, "L-4");
        raw.send_message(Head { len: 257, ..BARE }, &[0; 257], &[]);
        refused(&mut raw, "L-4");
        raw.send(&[0; 4096], &[]);
        refused(&mut raw, "L-4");
        raw.send(&whole, &[]);
        assert_eq!(raw.link.recv(0).unwrap().unwrap().message, b"hello", "canary: the whole one is taken");
    });
}

#[test]
fn l4_random_datagrams_are_refused_or_understood() {
    let _alone = alone();
    let folder = Folder::new();
    let null = dev_null();
    without_leak(|| {
        let mut raw = Raw::introduced(&folder);
        let mut seed = 1u64;
        let mut random = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize
        };
        let (mut understood, mut malformed) = (0, 0);
        for _ in 0..5000 {
            let len = random() % 6;
            let mut datagram = [&Head { len: len as u16, ..BARE }.encode()[..], &[7; 5][..len]].concat();
            for _ in 0..random() % 3 {
                let at = random() % datagram.len();
                datagram[at] = random() as u8;
            }
            datagram.truncate(datagram.len() - random() % 2);
            let fds = [null.as_fd(); 6];
            let few = if random() % 4 == 0 { random() % 6 } else { 0 };
            raw.send(&datagram, &fds[..few]);
            match raw.link.recv(1 << 20) {
                Ok(Some(_)) => understood += 1,
                Err(Error::Malformed { .. }) => {
                    malformed += 1;
                    if few > 0 {
                        raw = Raw::introduced(&folder); // The datagram may have been left unread.
                    }
                }
                // The files that the peer sent before are being closed.
                Err(Error::Quota(_)) => raw = Raw::introduced(&folder),
                other => panic!("{datagram:x?}: {other:?}"),
            }
        }
        assert!(understood > 500 && malformed > 500, "{understood} {malformed}");
    });
}

#[test]
fn l4_l8_empty_datagram_is_refused_and_no_end_and_its_descriptors_are_closed() {
    let _alone = alone();
    let folder = Folder::new();
    let null = dev_null();
    without_leak(|| {
        let mut raw = Raw::introduced(&folder);
        raw.send(&[], &[]);
        refused(&mut raw, "L-4");
        assert_eq!(raw.link.liveness(), Liveness::Running);
        raw.send_message(BARE, b"x", &[]);
        assert_eq!(raw.link.recv(0).unwrap().unwrap().message, b"x", "the link goes on");
        raw.send(&[], &[null.as_fd()]);
        refused(&mut raw, "L-4");
        drop(raw.socket);
        raw.link.recv(0).unwrap_err();
        assert_eq!(raw.link.liveness(), Liveness::ProcessGone);
    });
}

/// An endpoint that looked at a datagram and took nothing of it closes like this: the kernel reports once that the
/// connection was reset.
#[test]
fn l8_last_words_of_a_peer_that_left_something_unread_are_received_before_its_end() {
    let _alone = alone();
    let folder = Folder::new();
    let mut raw = Raw::introduced(&folder);
    raw.link.send(b"nobody reads this", None).unwrap();
    raw.send_message(BARE, b"x", &[]);
    drop(raw.socket);
    assert_eq!(raw.link.recv(0).unwrap().unwrap().message, b"x");
    assert!(matches!(raw.link.recv(0), Err(Error::PeerGone)));
}

#[test]
fn l5_what_is_refused_with_descriptors_that_were_not_taken_stays_refused() {
    let _alone = alone();
    let folder = Folder::new();
    let null = dev_null();
    without_leak(|| {
        let mut raw = Raw::introduced(&folder);
        raw.send_message(BARE, b"x", &[null.as_fd()]);
        refused(&mut raw, "L-5");
        raw.send_message(BARE, b"y", &[]);
        refused(&mut raw, "L-5");
    });
}

#[test]
fn l5_descriptors_other_than_those_announced_are_refused_and_closed() {
    let _alone = alone();
    let folder = Folder::new();
    let (null, doorbell) = (dev_null(), eventfd());
    let segment = memfd(4096, MemfdFlags::empty(), ALL_SEALS);
    without_leak(|| {
        for (head, fds) in [
            (BARE, vec![null.as_fd()]),
            (BARE, vec![null.as_fd(); 4]),
            (BARE, vec![null.as_fd(); 253]),
            (WITH_SEGMENT, vec![]),
            (WITH_SEGMENT, vec![segment.as_fd(); 2]),
            (WITH_SEGMENT, vec![segment.as_fd(); 253]),
            (WITH_DOORBELLS, vec![doorbell.as_fd(); 2]),
        ] {
            let mut raw = Raw::introduced(&folder);
            raw.send_message(head, b"x", &fds);
            refused(&mut raw, "L-5");
        }
    });
}

#[test]
fn l5_first_datagram_without_both_doorbells_is_refused() {
    let _alone = alone();
    let folder = Folder::new();
    let doorbell = eventfd();
    let segment = memfd(4096, MemfdFlags::empty(), ALL_SEALS);
    without_leak(|| {
        for (head, fds) in [
            (BARE, vec![]),
            (WITH_SEGMENT, vec![segment.as_fd()]),
            (WITH_DOORBELLS, vec![]),
            (WITH_DOORBELLS, vec![doorbell.as_fd()]),
            (WITH_DOORBELLS, vec![doorbell.as_fd(); 3]),
        ] {
            let mut raw = Raw::meet(&folder);
            raw.send_message(head, b"x", &fds);
            refused(&mut raw, "L-5");
            assert!(raw.link.doorbell().is_none());
        }
    });
}

#[test]
fn l5_too_few_open_files_is_a_limit_and_not_the_peers_fault() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let _alone = alone();
    let folder = Folder::new();
    without_leak(|| {
        let mut raw = Raw::meet(&folder);
        let doorbell = eventfd();
        raw.send_message(WITH_DOORBELLS, b"x", &[doorbell.as_fd(), doorbell.as_fd()]);
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(doorbell.as_raw_fd() as u64 + 1), ..before }).unwrap();
        let received = raw.link.recv(0);
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(matches!(received, Err(Error::Limit { .. })), "{received:?}");
    });
}

#[test]
fn l6_segment_that_is_no_sealed_and_present_memory_is_refused() {
    let _alone = alone();
    let folder = Folder::new();
    let none = MemfdFlags::empty();
    let sparse = rustix::fs::memfd_create("sparse", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&sparse, 1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&sparse, ALL_SEALS).unwrap();
    let faked = rustix::fs::memfd_create("faked", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&faked, 1 << 20).unwrap();
    rustix::fs::fallocate(&faked, rustix::fs::FallocateFlags::KEEP_SIZE, 1 << 20, 1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&faked, ALL_SEALS).unwrap();
    let reopened = |flags| {
        let fd = memfd(4096, none, ALL_SEALS);
        rustix::fs::open(format!("/proc/self/fd/{}", fd.as_raw_fd()), flags, rustix::fs::Mode::empty()).unwrap()
    };
    let mut wrong: Vec<(&str, OwnedFd)> = vec![
        ("opened as a path", reopened(OFlags::PATH)),
        ("opened for writing", reopened(OFlags::WRONLY)),
        ("a regular file", tempfile::tempfile().unwrap().into()),
        ("a folder", File::open("/proc").unwrap().into()),
        ("/dev/null", dev_null()),
        ("/dev/zero", File::open("/dev/zero").unwrap().into()),
        ("an eventfd", eventfd()),
        ("unsealed", memfd(4096, none, SealFlags::empty())),
        ("no size", memfd(0, none, ALL_SEALS)),
        ("half a page", memfd(2048, none, ALL_SEALS)),
        ("sparse", sparse),
    ];
    if tombolo_mem::counts_pages() {
        wrong.push(("allocated beyond its end", faked));
    } else {
        let _ = writeln!(
            std::io::stderr(),
            "SKIP l6_segment_that_is_no_sealed_and_present_memory_is_refused (needs cachestat): Linux 6.5"
        );
    }
    for (name, seal) in [
        ("without the seal against shrinking", SealFlags::SHRINK),
        ("without the seal against growing", SealFlags::GROW),
        ("without the seal of seals", SealFlags::SEAL),
        ("without the seal against writing", SealFlags::FUTURE_WRITE),
    ] {
        wrong.push((name, memfd(4096, none, ALL_SEALS.difference(seal))));
    }
    match rustix::fs::memfd_create("huge", MemfdFlags::HUGETLB | MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC) {
        Ok(huge) => {
            rustix::fs::ftruncate(&huge, 2 << 20).unwrap();
            rustix::fs::fcntl_add_seals(&huge, ALL_SEALS).unwrap();
            wrong.push(("huge pages", huge));
        }
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "SKIP l6_segment_that_is_no_sealed_and_present_memory_is_refused (needs hugetlb): {error}"
            );
        }
    }
    without_leak(|| {
        for (name, fd) in &wrong {
            let mut raw = Raw::introduced(&folder);
            raw.send_message(WITH_SEGMENT, b"x", &[fd.as_fd()]);
            match raw.link.recv(1 << 30) {
                Err(Error::Malformed { clause: "L-6", .. }) => {}
                other => panic!("{name}: {other:?}"),
            }
        }
        // Canary: a valid segment passes, one larger than agreed does not.
        let good = memfd(8192, none, ALL_SEALS);
        let mut raw = Raw::introduced(&folder);
        raw.send_message(WITH_SEGMENT, b"x", &[good.as_fd()]);
        assert_eq!(raw.link.recv(8192).unwrap().unwrap().segment.unwrap().len(), 8192);
        raw.send_message(WITH_SEGMENT, b"x", &[good.as_fd()]);
        assert!(matches!(raw.link.recv(4096), Err(Error::Malformed { clause: "L-6", .. })));
    });
}

#[test]
fn l7_doorbell_that_is_no_eventfd_is_refused() {
    let _alone = alone();
    let folder = Folder::new();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut wrong: Vec<(&str, OwnedFd)> = vec![
        ("/dev/null", dev_null()),
        ("a pipe to read", reader),
        ("a pipe to write", writer),
        ("a socket", socket.into()),
        ("a regular file", tempfile::tempfile().unwrap().into()),
        ("a memfd named like one", rustix::fs::memfd_create("anon_inode:[eventfd]", MemfdFlags::CLOEXEC).unwrap()),
        ("an epoll instance", rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap()),
    ];
    let good = eventfd();
    let path = format!("/proc/self/fd/{}", good.as_raw_fd());
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    wrong.push(("an eventfd opened as a path", rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap()));
    without_leak(|| {
        for (name, fd) in &wrong {
            for fds in [[fd.as_fd(), good.as_fd()], [good.as_fd(), fd.as_fd()]] {
                let mut raw = Raw::meet(&folder);
                raw.send_message(WITH_DOORBELLS, b"x", &fds);
                match raw.link.recv(0) {
                    Err(Error::Malformed { clause: "L-7", .. }) => assert!(raw.link.doorbell().is_none()),
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    });
}

/// Makes every call on such a descriptor block.
fn make_blocking(fd: BorrowedFd<'_>) {
    rustix::fs::fcntl_setfl(fd, OFlags::empty()).unwrap();
}

#[test]
fn l7_d5_notifying_a_doorbell_that_the_waiter_spoilt_blocks_nobody() {
    let _alone = alone();
    let folder = Folder::new();
    let spoilt = |fill: u64, flags: EventfdFlags| {
        let fd = rustix::event::eventfd(0, flags | EventfdFlags::NONBLOCK).unwrap();
        rustix::io::write(&fd, &fill.to_ne_bytes()).unwrap();
        make_blocking(fd.as_fd());
        fd
    };
    for (what, doorbell) in [
        ("empty", spoilt(0, EventfdFlags::SEMAPHORE)),
        ("full", spoilt(u64::MAX - 1, EventfdFlags::SEMAPHORE)),
        ("empty and no semaphore", spoilt(0, EventfdFlags::empty())),
        ("full and no semaphore", spoilt(u64::MAX - 1, EventfdFlags::empty())),
    ] {
        let mut raw = Raw::meet(&folder);
        raw.send_message(WITH_DOORBELLS, b"x", &[doorbell.as_fd(), doorbell.as_fd()]);
        raw.link.recv(0).unwrap().unwrap();
        let notifier = raw.link.doorbell().unwrap();
        unblocked(what, move || (0..1000).for_each(|ring| notifier.notify(Slot::ALL[ring % 2])));
    }
}

/// Waits and drains; neither may take longer than the deadline.
fn wait_a_little(doorbell: &Arc<dyn Doorbell>) -> Woken {
    let doorbell = Arc::clone(doorbell);
    unblocked("waiting and draining", move || {
        let woken = doorbell.wait(Slot::Data, Deadline::after(Duration::from_millis(20))).unwrap();
        doorbell.drain(Slot::Data);
        doorbell.drain(Slot::Data);
        woken
    })
}

#[test]
fn l7_d6_waiter_whose_doorbell_the_notifier_spoils_ends_at_its_deadline() {
    let _alone = alone();
    let folder = Folder::new();
    let mut raw = Raw::introduced(&folder);
    let [data, space] = raw.doorbells();
    let waiter = raw.link.doorbell().unwrap();
    let notify = || rustix::io::read(&data, &mut [0; 8]).map(drop);
    let fill = |count: u64| rustix::io::write(&data, &count.to_ne_bytes());

    notify().unwrap();
    assert_eq!(wait_a_little(&waiter), Woken::Notified, "canary: a valid notification wakes");
    assert_eq!(wait_a_little(&waiter), Woken::TimedOut);
    make_blocking(data.as_fd());
    assert_eq!(wait_a_little(&waiter), Woken::TimedOut);
    notify().unwrap();
    assert_eq!(wait_a_little(&waiter), Woken::Notified, "the flag changes nothing");
    // Full: one more would block the hostile peer itself.
    fill(2).unwrap();
    wait_a_little(&waiter);
    notify().unwrap();
    wait_a_little(&waiter);
    assert_eq!(wait_a_little(&waiter), Woken::TimedOut, "one drain is enough");
    drop((data, space));
    assert_eq!(wait_a_little(&waiter), Woken::TimedOut, "a closed doorbell is no hang-up, and no ring");
    drop(raw.socket);
    assert_eq!(wait_a_little(&waiter), Woken::PeerGone);
}

#[test]
fn l7_d7_notification_is_kept_between_wait_and_drain_for_whoever_polls() {
    let _alone = alone();
    let folder = Folder::new();
    let mut raw = Raw::introduced(&folder);
    let [data, _space] = raw.doorbells();
    let waiter = raw.link.doorbell().unwrap();
    let now = || Deadline::at(Instant::now());
    let notify = || rustix::io::read(&data, &mut [0; 8]).map(drop).unwrap();
    // The descriptor was not requested before the wait; it is readable all the same.
    notify();
    assert_eq!(waiter.wait(Slot::Data, now()).unwrap(), Woken::Notified);
    assert!(tombolo_domain::wait_readable(waiter.fd(Slot::Data), now()).unwrap());
    assert_eq!(waiter.wait(Slot::Data, now()).unwrap(), Woken::Notified);
    assert!(tombolo_domain::wait_readable(waiter.fd(Slot::Data), now()).unwrap());
    waiter.drain(Slot::Data);
    assert!(!tombolo_domain::wait_readable(waiter.fd(Slot::Data), now()).unwrap());
    assert_eq!(waiter.wait(Slot::Data, now()).unwrap(), Woken::TimedOut);
}

#[test]
fn l7_waiter_of_a_link_that_this_end_gave_up_is_not_left_behind() {
    let _alone = alone();
    let folder = Folder::new();
    let raw = Raw::introduced(&folder);
    let waiter = raw.link.doorbell().unwrap();
    let waiting = std::thread::spawn(move || Slot::ALL.map(|slot| waiter.wait(slot, Deadline::NEVER).unwrap()));
    drop(raw.link);
    assert_eq!(unblocked("a wait for ever", move || waiting.join().unwrap()), [Woken::PeerGone; 2]);
}

#[test]
fn l5_links_that_come_and_go_leave_nothing() {
    let _alone = alone();
    let folder = Folder::new();
    Raw::introduced(&folder);
    without_leak(|| {
        for _ in 0..100 {
            let mut raw = Raw::introduced(&folder);
            let (segment, offer) = raw.link.allocate(8192).unwrap();
            raw.link.send(b"take", Some(&offer)).unwrap();
            raw.link.send(b"never read", Some(&offer)).unwrap();
            raw.link.retire(Some(segment), offer);
            assert_eq!(raw.link.quarantined(), 0);
            let (datagram, fds) = raw.receive_datagram();
            assert_eq!((datagram.len(), fds.len()), (12, 3));
        }
    });
}

#[test]
fn l11_retired_memory_stays_as_it_was_for_whoever_holds_it() {
    let _alone = alone();
    let folder = Folder::new();
    let mut raw = Raw::introduced(&folder);
    let (own, offer) = raw.link.allocate(8192).unwrap();
    raw.link.send(b"take", Some(&offer)).unwrap();
    let held = raw.receive_datagram().1.pop().unwrap();
    let (control, mut data) = own.split(4096);
    data.copy_in(0, &[7; 4096]);
    drop((control, data));
    raw.link.retire(None, offer);
    let (again, _offer) = raw.link.allocate(8192).unwrap();
    again.split(0).1.copy_in(0, &[9; 8192]);
    drop(raw);
    let mut bytes = [0; 4096];
    rustix::io::pread(&held, &mut bytes, 4096).unwrap();
    assert_eq!(bytes, [7; 4096]);
}
