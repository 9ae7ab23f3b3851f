// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A program of the host that talks to the broker without the library, and so keeps all descriptors that it gets.

use std::{os::fd::OwnedFd, path::Path};

use rustix::net::{SocketType, sockopt};
use tombolo_broker::fd_passing;
use tombolo_control::{Envelope, MESSAGE_MAX, Message, Path as Way};

pub struct ByHand(OwnedFd);

impl ByHand {
    /// Makes a program that listens.
    pub fn listen(socket: &Path, service: &str) -> Self {
        let program = Self(fd_passing::connect(socket, SocketType::SEQPACKET).unwrap());
        program.send_message(0, super::hello());
        assert!(matches!(program.receive_message(), Some((Message::Hello { .. }, _))));
        program.send_message(1, Message::Listen { service: service.parse().unwrap() });
        assert!(matches!(program.receive_message(), Some((Message::Done {}, _))));
        program
    }

    pub fn send_message(&self, serial: u32, message: Message) {
        assert!(fd_passing::send(&self.0, &Envelope { serial, message }.encode(), &[]).unwrap());
    }

    pub fn receive_message(&self) -> Option<(Message, Vec<OwnedFd>)> {
        receive_message(&self.0)
    }

    /// Takes what the broker sends about a caller: the connection's socket, its memory, its files and its doorbells.
    pub fn accept(&self) -> Vec<OwnedFd> {
        let (stated, descriptors) = self.receive_message().unwrap();
        assert!(matches!(stated, Message::Connect { .. }) && descriptors.len() == 8, "{stated:?}");
        descriptors
    }
}

/// Returns the next message; `None` at the end.
pub fn receive_message(socket: &OwnedFd) -> Option<(Message, Vec<OwnedFd>)> {
    let mut buffer = [0; MESSAGE_MAX];
    rustix::io::ioctl_fionbio(socket, false).unwrap();
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(super::LIMIT)).unwrap();
    match fd_passing::receive(socket, &mut buffer).expect("something is said within the time") {
        (0, _) => None,
        (len, descriptors) => Some((Envelope::decode(Way::Socket, &buffer[..len]).unwrap().message, descriptors)),
    }
}
