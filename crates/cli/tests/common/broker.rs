// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A broker's reports to tools about a channel to a machine and a listener for machines, without a machine.

use std::{io::IoSlice, os::fd::OwnedFd, path::PathBuf, thread};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use tombolo_control::{ConnectionEnd, Envelope, Life, MESSAGE_MAX, Message, Path, Progress, ROW_WORDS, Seen, VERSION};

use super::Place;

/// Starts a broker of the machine `web`, at a socket of its own: with a channel to `db`, and a listener. It answers
/// until the test ends.
pub fn of_web(place: &Place) -> PathBuf {
    let path = place.path("broker.sock");
    let kind = SocketType::SEQPACKET;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    thread::spawn(move || {
        while let Ok(tool) = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
            thread::spawn(move || serve(&tool));
        }
    });
    path
}

fn serve(tool: &OwnedFd) {
    let mut buffer = [0; MESSAGE_MAX];
    loop {
        let len = match rustix::net::recv(tool, &mut buffer, RecvFlags::empty()) {
            Ok((len, _)) if len > 0 => len,
            _ => return,
        };
        let asked = Envelope::decode(Path::Socket, &buffer[..len]).expect("a tool speaks well");
        let answers = match asked.message {
            Message::Hello { .. } => {
                let (version_min, version_max, epoch, boot) = (VERSION, VERSION, 1, [1; 16]);
                vec![Message::Hello { version_min, version_max, epoch, boot, name: "web".parse().unwrap() }]
            }
            Message::Look { at: Seen::Connections, after: 0 } => vec![call(), Message::Done {}],
            Message::Look { at: Seen::Listeners, after: 0 } => vec![listener(), Message::Done {}],
            _ => vec![Message::Done {}],
        };
        for message in answers {
            let bytes = Envelope { serial: asked.serial, message }.encode();
            let _ = rustix::net::sendmsg(tool, &[IoSlice::new(&bytes)], &mut Default::default(), SendFlags::NOSIGNAL);
        }
    }
}

fn own() -> (u32, u32) {
    (std::process::id(), rustix::process::geteuid().as_raw())
}

fn call() -> Message {
    let (process, user) = own();
    Message::CallRow {
        at: 1,
        link: 7,
        generation: 2,
        peer: "db".parse().unwrap(),
        life: Life::Running,
        service: "sql".into(),
        end: ConnectionEnd::Connected,
        progress: Progress::Up,
        process,
        user,
        age: 1500,
        own: 2 << 20,
        theirs: 1 << 20,
        storms: 4,
        own_words: Box::new([0; ROW_WORDS]),
        their_words: Box::new([0; ROW_WORDS]),
    }
}

fn listener() -> Message {
    let (process, user) = own();
    Message::ListenerRow { at: 1, service: "log".parse().unwrap(), process, user }
}
