// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hostile peer that uses the socket itself.

use std::{
    io::IoSlice,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    event::EventfdFlags,
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType},
};
use tombolo_domain::{Endpoint, Error, Rendezvous};
use tombolo_layout::local::Head;
use tombolo_os::passing::{self, SCM_MAX_FD};

use super::{Folder, accept};

/// A hostile peer, and the endpoint that it talks to.
pub struct Raw {
    pub socket: OwnedFd,
    pub link: Box<dyn Endpoint>,
}

impl Raw {
    /// Connects to an endpoint that has received nothing yet.
    pub fn meet(folder: &Folder) -> Self {
        let service = folder.service();
        let mut listener = folder.domain.listen(&service).expect("a fresh service is free");
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(service.as_str()).unwrap()).expect("somebody listens");
        Self { socket, link: accept(&mut *listener) }
    }

    /// Connects to an endpoint and introduces itself correctly.
    pub fn introduced(folder: &Folder) -> Self {
        let mut raw = Self::meet(folder);
        let doorbells = [eventfd(), eventfd()];
        raw.send_message(
            Head { doorbells: true, single: false, segment: false, len: 5 },
            b"hello",
            &[doorbells[0].as_fd(), doorbells[1].as_fd()],
        );
        // Files that this process sent before, as a peer, may still have to be closed by it, as a listener.
        let heard = loop {
            match raw.link.recv(0) {
                Err(Error::Quota(_)) => std::thread::yield_now(),
                heard => break heard.expect("it is well formed").expect("it was sent"),
            }
        };
        assert_eq!(heard.message, b"hello");
        raw
    }

    /// Sends a datagram with a head of its own choice.
    pub fn send_message(&self, head: Head, message: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send(&[&head.encode()[..], message].concat(), fds);
    }

    /// Sends any datagram.
    pub fn send(&self, datagram: &[u8], fds: &[BorrowedFd<'_>]) {
        send_to(&self.socket, datagram, fds);
    }

    /// Returns what the endpoint sent: the datagram and its descriptors.
    pub fn receive_datagram(&self) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut datagram = vec![0; 4096];
        let received = passing::receive(&self.socket, &mut datagram, SCM_MAX_FD, RecvFlags::empty()).unwrap();
        datagram.truncate(received.len);
        (datagram, received.descriptors)
    }

    /// Returns the endpoint's two doorbells.
    pub fn doorbells(&mut self) -> [OwnedFd; 2] {
        self.link.send(b"", None).expect("the path has room");
        self.receive_datagram().1.try_into().expect("two doorbells come with the first datagram")
    }
}

/// Sends any datagram, once fewer descriptors are in flight than this user may have there.
pub fn send_to(socket: &OwnedFd, datagram: &[u8], fds: &[BorrowedFd<'_>]) {
    super::eventually("descriptors in flight arrive", || {
        match passing::send(socket, &[IoSlice::new(datagram)], fds, SendFlags::empty()) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::TOOMANYREFS) => false,
            sent => sent.unwrap() == datagram.len(),
        }
    });
}

/// Returns a well-formed doorbell.
pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(1 << 20, EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}
