// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Answers to callers on one kernel that break the rules of the backend (C-3, C-7). Once no further caller is let in,
//! connected callers continue.

mod common;

use std::{
    fs::File,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use common::{SOON, World, eventually, raw};
use rustix::{
    event::EventfdFlags,
    fs::{Mode, OFlags},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        SocketAddrUnix, SocketFlags, SocketType,
    },
};
use tombolo_channel::{Address, Backends, Deadline, Error, Listener, Options, Stream};
use tombolo_domain::{Endpoint, Error as DomainError, Listener as DomainListener, Rendezvous, SingleDoorbell};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::{
    handshake::{Message, Refusal},
    local::{HEAD_LEN, Head},
    state::{Phase, State},
    words,
};
use tombolo_mem::OwnWord;

/// Returns the refusal that a caller gets for `datagram` with `files`.
fn refusal(world: &World, listener: &mut Listener<Stream>, datagram: &[u8], files: &[BorrowedFd<'_>]) -> Refusal {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(world.address.service()).unwrap()).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
    let sent = rustix::net::sendmsg(&socket, &[IoSlice::new(datagram)], &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent, Ok(datagram.len()));
    let mut answer = [0; 512];
    let mut len = 0;
    eventually("the listener answers", || {
        assert!(listener.try_accept().unwrap().is_none(), "the listener agreed to what it must not");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got =
            rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut answer)], &mut control, RecvFlags::CMSG_CLOEXEC);
        len = got.map_or(0, |got| got.bytes);
        len > 0
    });
    match Message::decode(&answer[HEAD_LEN..len]) {
        Ok(Message::Refuse(code, reason)) => {
            assert!(!reason.is_empty());
            code
        }
        other => panic!("no refusal but {other:?}"),
    }
}

fn doorbell() -> OwnedFd {
    let flags = EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
    rustix::event::eventfd(1 << 20, flags).unwrap()
}

#[test]
fn c3_l4_l5_l7_what_breaks_the_backends_rules_is_refused_as_not_understood_and_l6_as_a_segment() {
    let world = World::local();
    let mut listener = world.listen::<Stream>();
    let hello = Message::Hello(raw::greeting()).encode();
    let head = Head { doorbells: true, single: false, segment: true, len: hello.len() as u16 };
    let with = |head: Head| [&head.encode()[..], &hello].concat();
    let whole = with(head);
    let changed = |at: usize, to: u8| {
        let mut bytes = whole.clone();
        bytes[at] = to;
        bytes
    };
    let (a, b, null) = (doorbell(), doorbell(), OwnedFd::from(File::open("/dev/null").unwrap()));
    let path = format!("/proc/self/fd/{}", a.as_raw_fd());
    let a_path = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let (a, b, null, a_path) = (a.as_fd(), b.as_fd(), null.as_fd(), a_path.as_fd());
    let bare = Head { doorbells: false, single: false, segment: false, ..head };
    for (what, code, datagram, files) in [
        ("L-4: another magic", Refusal::Malformed, changed(0, b'X'), vec![a, b, null]),
        ("L-4: four doorbells", Refusal::Malformed, changed(4, 4), vec![a, b, null]),
        ("L-4: two segments", Refusal::Malformed, changed(5, 2), vec![a, b, null]),
        ("L-4: another length", Refusal::Malformed, changed(6, 1), vec![a, b, null]),
        ("L-4: half a head", Refusal::Malformed, whole[..HEAD_LEN / 2].to_vec(), vec![]),
        ("L-4: half a message", Refusal::Malformed, whole[..whole.len() / 2].to_vec(), vec![a, b, null]),
        ("L-4: empty, with files", Refusal::Malformed, vec![], vec![a, b]),
        ("L-4: too long", Refusal::Malformed, vec![0; 400], vec![]),
        ("L-5: announced and not there", Refusal::Malformed, whole.clone(), vec![]),
        ("L-5: fewer than announced", Refusal::Malformed, whole.clone(), vec![a, b]),
        ("L-5: one more than announced", Refusal::Malformed, whole.clone(), vec![a, b, null, null]),
        ("L-5: many more than announced", Refusal::Malformed, whole.clone(), vec![null; 16]),
        ("L-5: there and not announced", Refusal::Malformed, with(bare), vec![a, b]),
        ("L-5: no doorbells at first", Refusal::Malformed, with(bare), vec![]),
        ("L-7: no eventfd", Refusal::Malformed, whole.clone(), vec![a, null, null]),
        ("L-7: opened as a path", Refusal::Malformed, whole.clone(), vec![a_path, b, null]),
        ("L-7 before L-6", Refusal::Malformed, whole.clone(), vec![null, null, null]),
        ("L-6: no memory", Refusal::Segment, whole.clone(), vec![a, b, null]),
    ] {
        assert_eq!(refusal(&world, &mut listener, &datagram, &files), code, "{what}");
    }
    // An honest caller is served after all that.
    thread::scope(|scope| {
        let client = scope.spawn(|| world.connect::<Stream>());
        listener.accept_until(Deadline::after(SOON)).unwrap();
        client.join().unwrap();
    });
}

#[test]
fn c2_bell_that_comes_with_a_message_of_a_channel_is_refused() {
    let world = World::local();
    let mut listener = world.listen::<Stream>();
    let doorbell = SingleDoorbell::new().unwrap();
    let hello = Message::Hello(raw::greeting()).encode();
    let greet = |link: &mut dyn Endpoint, message: &[u8]| {
        let header = raw::header(0);
        let (control, offer) = raw::segment(link, header.segment_len as usize, &header.encode());
        link.send_with_doorbell(message, Some(&offer), &doorbell).unwrap();
        (control, offer)
    };
    let mut link = world.connect_raw();
    let _kept = greet(&mut *link, &hello);
    assert!(listener.try_accept().unwrap().is_none());
    let answer = raw::receive_message(&mut *link).unwrap();
    assert!(matches!(&answer, Message::Refuse(Refusal::Malformed, why) if why.contains("doorbell")), "{answer:?}");

    // The other way round; and with a refusal.
    drop(listener);
    for refuses in [false, true] {
        let mut listener = world.domain_listener();
        thread::scope(|scope| {
            let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &Options::new()));
            let mut link = raw::open(&mut *listener);
            assert!(matches!(raw::receive_message(&mut *link), Ok(Message::Hello(_))));
            let _kept = if refuses {
                link.send_with_doorbell(&Message::Refuse(Refusal::Denied, "no".into()).encode(), None, &doorbell)
                    .unwrap();
                None
            } else {
                Some(greet(&mut *link, &Message::Welcome(raw::greeting()).encode()))
            };
            let told = client.join().unwrap().map(drop);
            assert!(matches!(&told, Err(Error::Malformed { clause: "C-2", .. })), "{told:?}");
        });
    }

    // And with a ring to move to.
    let mut listener = world.listen::<Stream>();
    let mut link = world.connect_raw();
    let (control, _offer) = raw::send_with_segment(&mut *link, &hello, 0);
    let mut stream = listener.accept_until(Deadline::after(SOON)).unwrap();
    let header = raw::header(1);
    let (_ring, offer) = raw::segment(&mut *link, header.segment_len as usize, &header.encode());
    let ring = Message::Ring { generation: 1, epoch: raw::EPOCH };
    link.send_with_doorbell(&ring.encode(), Some(&offer), &doorbell).unwrap();
    let state = State { phase: Phase::Open, ready: 1, current: 0 };
    control.word(words::WRITER_STATE).store_release(state.encode());
    let told = stream.split().0.read_until(&mut [0; 64], Deadline::after(SOON));
    assert!(matches!(&told, Err(Error::Malformed { clause: "C-2", .. })), "{told:?}");
}

/// A backend whose listeners let nobody in while the flag is set.
#[derive(Debug)]
struct Crowding {
    local: LocalDomain,
    is_crowded: Arc<AtomicBool>,
}

#[derive(Debug)]
struct CrowdingListener {
    listener: Box<dyn DomainListener>,
    is_crowded: Arc<AtomicBool>,
}

impl Rendezvous for Crowding {
    fn scheme(&self) -> &'static str {
        self.local.scheme()
    }

    fn listen(&self, service: &str) -> tombolo_domain::Result<Box<dyn DomainListener>> {
        let listener = self.local.listen(service)?;
        Ok(Box::new(CrowdingListener { listener, is_crowded: Arc::clone(&self.is_crowded) }))
    }

    fn connect(&self, service: &str, deadline: Deadline) -> tombolo_domain::Result<Box<dyn Endpoint>> {
        self.local.connect(service, deadline)
    }
}

impl DomainListener for CrowdingListener {
    fn accept(&mut self) -> tombolo_domain::Result<Option<Box<dyn Endpoint>>> {
        if self.is_crowded.load(Ordering::SeqCst) {
            return Err(DomainError::Crowded("the test says so"));
        }
        self.listener.accept()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.listener.fd()
    }
}

#[test]
fn c7_where_nobody_is_let_in_those_who_are_in_stay_and_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let (local, is_crowded) = (LocalDomain::new(), Arc::new(AtomicBool::new(false)));
    let crowding = Crowding { local: local.clone(), is_crowded: Arc::clone(&is_crowded) };
    let address: Address = format!("local:{}/test.sock", folder.path().display()).parse().unwrap();
    let mut listener: Listener<Stream> = Backends::new().with(crowding).listen(&address, &Options::new()).unwrap();
    let connect = || local.connect(address.service(), Deadline::after(SOON)).unwrap();
    let mut early: Vec<_> = (0..3).map(|_| connect()).collect();
    assert!(listener.try_accept().unwrap().is_none());

    is_crowded.store(true, Ordering::SeqCst);
    let mut late = connect();
    for _ in 0..5 {
        let told = listener.try_accept().map(drop);
        assert!(matches!(told, Err(Error::Domain(DomainError::Crowded(_)))), "{told:?}");
    }
    for link in &mut early {
        assert!(matches!(link.recv(0), Ok(None)), "nobody was dismissed");
    }
    let timed_out = listener.accept_until(Deadline::after(Duration::from_millis(50))).map(drop);
    assert!(matches!(timed_out, Err(Error::TimedOut)), "one who waits goes on waiting: {timed_out:?}");
    let _kept = raw::send_with_segment(&mut *early[1], &Message::Hello(raw::greeting()).encode(), 0);
    listener.accept_until(Deadline::after(SOON)).unwrap();
    assert!(matches!(raw::receive_message(&mut *early[1]), Ok(Message::Welcome(_))));

    // A listener that waits when the flag is cleared lets the next caller in, without a further connect request.
    let _kept = raw::send_with_segment(&mut *late, &Message::Hello(raw::greeting()).encode(), 0);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| listener.accept_until(Deadline::after(SOON)).map(drop));
        is_crowded.store(false, Ordering::SeqCst);
        waiting.join().unwrap().unwrap();
    });
    assert!(matches!(raw::receive_message(&mut *late), Ok(Message::Welcome(_))));
}
