// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Callers whose descriptors take long to close (L-5): TCP connections that linger because they have bytes for a peer
//! that does not read, and whose last holder is their receiver. Files of a FUSE server that answers nothing are left
//! out: they close only when their server goes, and so do the processes that close them.

mod support;

use std::{
    fs,
    io::{ErrorKind, Write},
    net::{TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use support::{Child, Folder, eventually, raw::send_to};
use tombolo_domain::{Deadline, Endpoint, Error, Rendezvous};
use tombolo_layout::local::Head;

/// Long enough that a wait for it would be noticed.
const LINGER: Duration = Duration::from_secs(30);
const CALLS: usize = 60;

/// Returns a connection that closes only after its peer, which does not read, is closed.
fn lingering(to: &TcpListener) -> (OwnedFd, TcpStream) {
    let mut stream = TcpStream::connect(to.local_addr().unwrap()).unwrap();
    let (other, _) = to.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    assert_eq!(stream.write(&[0; 1 << 16]).unwrap_err().kind(), ErrorKind::WouldBlock);
    sockopt::set_socket_linger(&stream, Some(LINGER)).unwrap();
    (stream.into(), other)
}

fn count(folder: &str) -> usize {
    fs::read_dir(folder).unwrap().count()
}

fn call(service: &str, head: Head, files: &[BorrowedFd<'_>]) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(service).unwrap()).unwrap();
    send_to(&socket, &[&head.encode()[..], b"x"].concat(), files);
    socket
}

#[test]
fn l5_descriptors_that_do_not_close_cost_a_listener_few_threads_and_descriptors_and_no_time() {
    let folder = Folder::new();
    let service = folder.service();
    let mut listener = folder.domain.listen(&service).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut refused, mut quota, mut longest, mut readers) = (0, 0, Duration::ZERO, Vec::new());
    for turn in 0..CALLS {
        let (stuck, reader) = lingering(&tcp);
        let (head, times) = match turn % 3 {
            0 => (Head { doorbells: true, single: false, segment: true, len: 1 }, 3),
            1 => (Head { doorbells: true, single: false, segment: true, len: 1 }, 50),
            _ => (Head { doorbells: false, single: false, segment: false, len: 1 }, 50),
        };
        let caller = call(&service, head, &vec![stuck.as_fd(); times]);
        drop(stuck); // The last holder is the message in flight.
        readers.push(reader);
        let began = Instant::now();
        let mut link = support::accept(&mut *listener);
        match link.recv(1 << 20) {
            Err(Error::Malformed { clause: "L-5" | "L-7", .. }) => refused += 1,
            Err(Error::Quota(_)) => quota += 1,
            other => panic!("{other:?}"),
        }
        drop((link, caller));
        longest = longest.max(began.elapsed());
    }
    // Each connection left one file open on this side: the one that lingers in a thread. The rest belong to the readers
    // and to this test.
    let (files, threads) = (count("/proc/self/fd") - CALLS, count("/proc/self/task"));
    assert!(longest < LINGER / 3, "{longest:?} for one call");
    assert!(files < 200 && threads < 40, "{files} files, {threads} threads");
    assert!(threads > 5, "canary: closing these takes long, or the test shows nothing ({refused}, {quota})");
    let mut honest = Child::start(&[], "honest", &service);
    let mut link: Box<dyn Endpoint> = support::accept(&mut *listener);
    eventually("an honest caller is heard", || link.recv(1 << 20).is_ok_and(|got| got.is_some()));
    honest.kill();
    drop((link, listener, readers, tcp));
    eventually("all is closed once nobody is waited for", || count("/proc/self/task") <= 4);
}

#[test]
fn child_process() {
    let Some((_, service)) = support::role() else { return };
    let domain = tombolo_domain_local::LocalDomain::new();
    let mut link = domain.connect(&service, Deadline::NEVER).unwrap();
    link.send(b"good day", None).unwrap();
    loop {
        std::thread::park();
    }
}
