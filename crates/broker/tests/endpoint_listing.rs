// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rows with which a broker reports the connections and listeners of its programs to tools.

mod common;

use std::{
    io::Write,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::Path,
    thread,
};

use common::{
    Client,
    endpoint::{LINK, World, name, patience},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
    process::{Uid, geteuid},
};
use tombolo_channel::{Backends, Options, Stream};
use tombolo_control::{ConnectionEnd, Envelope, Message, Progress, ROW_WORDS, Seen, VERSION};
use tombolo_domain::{Rendezvous, wait_readable};
use tombolo_testing::conformance::eventually;

/// A user to whom nothing here belongs.
const SOMEBODY: u32 = 54321;

#[test]
fn child_process() {
    common::endpoint::play();
}

/// Returns all rows that the broker at `socket` shows this thread's user.
fn seen(socket: &Path, at: Seen) -> Vec<Message> {
    let tool = Client::of_socket(socket);
    let (mut rows, mut after) = (Vec::new(), 0);
    loop {
        let before = rows.len();
        for row in tool.ask(Message::Look { at, after }) {
            let (Message::CallRow { at, .. } | Message::ListenerRow { at, .. }) = row else { panic!("{row:?}") };
            assert!(at > after, "{at} behind {after}");
            after = at;
            rows.push(row);
        }
        if rows.len() == before {
            return rows;
        }
        assert!(rows.len() - before <= 16, "an answer is bounded");
    }
}

/// Returns all rows that the broker shows another user.
fn seen_by(user: u32, socket: &Path, at: Seen) -> Vec<Message> {
    let ask = || {
        let user = Uid::from_raw(user);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        seen(socket, at)
    };
    thread::scope(|scope| scope.spawn(ask).join().unwrap())
}

/// Returns the position. It follows the nine words of the header, and the peer's epoch comes next (B-20).
fn tail(words: &[u64; ROW_WORDS]) -> u64 {
    words[9]
}

#[test]
fn b20_both_ends_are_told_of_a_connection_with_the_words_of_both() {
    let world = World::new();
    let [a, b] = [&world.a, &world.b].map(|machine| Backends::new().with(machine.domain.clone()));
    let mut listener = a.listen::<Stream>(&"vm:a/shown".parse().unwrap(), &Options::new()).unwrap();
    let rows = seen(&world.a.socket, Seen::Listeners);
    let listens = |row: &Message| {
        matches!(row, Message::ListenerRow { service, process, user, .. }
            if service.as_str() == "shown" && *process == std::process::id() && *user == geteuid().as_raw())
    };
    assert!(rows.iter().any(listens), "{rows:?}");

    let (connected, listened) = thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().unwrap());
        let connected: Stream = b.connect(&"vm:a/shown".parse().unwrap(), &Options::new()).unwrap();
        (connected, accepted.join().unwrap())
    });
    let (reader, mut writer) = connected.into_split();
    writer.write_all(b"seven b").unwrap();
    let rows = [&world.a, &world.b].map(|machine| {
        let rows = seen(&machine.socket, Seen::Connections);
        let found = rows
            .into_iter()
            .filter(|row| matches!(row, Message::CallRow { service, .. } if service.as_str() == "shown"));
        let [row] = found.collect::<Vec<_>>().try_into().expect("one connection");
        row
    });
    for (row, wanted, other) in [(&rows[0], ConnectionEnd::Listened, "b"), (&rows[1], ConnectionEnd::Connected, "a")] {
        let Message::CallRow {
            link,
            generation,
            peer,
            end,
            progress,
            process,
            user,
            storms,
            own_words,
            their_words,
            ..
        } = row
        else {
            panic!("{row:?}")
        };
        assert_eq!((*link, *generation, peer.as_str(), *end, *progress), (LINK, 1, other, wanted, Progress::Up));
        assert_eq!((*process, *user, *storms), (std::process::id(), geteuid().as_raw(), 0));
        let (writers, readers) =
            if wanted == ConnectionEnd::Connected { (own_words, their_words) } else { (their_words, own_words) };
        assert_eq!((tail(writers), tail(readers)), (7, 0), "{row:?}");
    }

    // A connection that is over on both sides is not listed.
    drop((reader, writer, listened));
    let shown = |row: &Message| matches!(row, Message::CallRow { service, .. } if service.as_str() == "shown");
    eventually("the connection is over", || !seen(&world.a.socket, Seen::Connections).iter().any(shown));
}

#[test]
fn b20_more_connections_and_listeners_than_one_answer_has_are_told_one_after_the_other() {
    let world = World::new();
    let mut listeners = Vec::new();
    for number in 0..20 {
        listeners.push(world.a.domain.listen(&format!("a/many{number}")).unwrap());
    }
    let links: Vec<_> =
        (0..20).map(|number| world.b.domain.connect(&format!("a/many{number}"), patience()).unwrap()).collect();
    assert_eq!(seen(&world.a.socket, Seen::Listeners).len(), 20);
    for machine in [&world.a, &world.b] {
        let many =
            |row: &Message| matches!(row, Message::CallRow { service, .. } if service.as_str().starts_with("many"));
        assert_eq!(seen(&machine.socket, Seen::Connections).into_iter().filter(many).count(), links.len());
    }
}

#[test]
fn b20_user_is_told_of_its_own_connections_and_listeners_alone() {
    if !geteuid().is_root() {
        let _ = writeln!(
            std::io::stderr(),
            "SKIP b20_user_is_told_of_its_own_connections_and_listeners_alone (needs root): somebody else is to ask"
        );
        return;
    }
    let world = World::new();
    for socket in [&world.a.socket, &world.b.socket] {
        for path in [socket, socket.parent().unwrap()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
    }
    let _listener = world.a.domain.listen("a/roots").unwrap();
    let _link = world.b.domain.connect("a/roots", patience()).unwrap();
    let mine = |row: &Message| match row {
        Message::CallRow { user, .. } | Message::ListenerRow { user, .. } => *user == SOMEBODY,
        other => panic!("{other:?}"),
    };
    for at in [Seen::Connections, Seen::Listeners] {
        assert_eq!(seen_by(SOMEBODY, &world.a.socket, at), []);
        assert!(!seen(&world.a.socket, at).is_empty(), "root sees what is its own");
    }
    // The user sees a listener of its own, and so does root.
    let listen = || {
        let user = Uid::from_raw(SOMEBODY);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let own = world.a.domain.listen("a/own").unwrap();
        let rows = seen(&world.a.socket, Seen::Listeners);
        assert!(rows.len() == 1 && rows.iter().all(mine), "{rows:?}");
        own
    };
    let own = thread::scope(|scope| scope.spawn(listen).join().unwrap());
    assert_eq!(seen(&world.a.socket, Seen::Listeners).iter().filter(|row| mine(row)).count(), 1);
    drop(own);
    // The same holds for a connection: the user sees its own endpoint, but not that of root's listener.
    let connection = || {
        let user = Uid::from_raw(SOMEBODY);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let own = world.b.domain.connect("a/roots", patience()).unwrap();
        let rows = seen(&world.b.socket, Seen::Connections);
        assert!(rows.len() == 1 && rows.iter().all(mine), "{rows:?}");
        own
    };
    let _own = thread::scope(|scope| scope.spawn(connection).join().unwrap());
    assert_eq!(seen_by(SOMEBODY, &world.a.socket, Seen::Connections), []);
    let rows = seen(&world.b.socket, Seen::Connections);
    assert_eq!((rows.len(), rows.iter().filter(|row| mine(row)).count()), (2, 1), "{rows:?}");
}

#[test]
fn b20_user_who_looks_without_end_is_answered_after_all_who_want_something_else() {
    const MANY: usize = 100;
    const ATTEMPTS: usize = 100;
    let world = World::new();
    let connect = || {
        let kind = SocketType::SEQPACKET;
        let tool = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&tool, &SocketAddrUnix::new(&world.a.socket).unwrap()).unwrap();
        let (version_min, version_max, epoch, boot) = (VERSION, VERSION, 0, [0; 16]);
        let hello = Message::Hello { version_min, version_max, epoch, boot, name: name("tool") };
        rustix::io::write(&tool, &Envelope { serial: 1, message: hello }.encode()).unwrap();
        tool
    };
    let hear = |tool: &OwnedFd| {
        assert!(wait_readable(tool.as_fd(), patience()).unwrap(), "it is answered");
        rustix::io::read(tool, &mut [0; 1024]).unwrap();
    };
    let looks: Vec<_> = (0..MANY).map(|_| connect()).collect();
    // The broker reads clients in the order in which they came.
    let asks = [connect(), connect()];
    looks.iter().chain(&asks).for_each(hear);
    let look = Envelope { serial: 2, message: Message::Look { at: Seen::Connections, after: u64::MAX } }.encode();
    let question = Envelope { serial: 3, message: Message::Who { number: 1 } }.encode();
    let is_first = || {
        looks.iter().for_each(|tool| _ = rustix::io::write(tool, &look).unwrap());
        // Once the second question is read, in another turn, every client that asked before the first has had a turn.
        for asks in &asks {
            rustix::io::write(asks, &question).unwrap();
            hear(asks);
        }
        let mut polled = [PollFd::new(&looks[MANY - 1], PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        let is_first = polled[0].revents().is_empty();
        // All of them are answered in the end: that there is no more.
        looks.iter().for_each(hear);
        is_first
    };
    // The length of a turn of the broker varies: one success in many attempts is enough.
    assert!((0..ATTEMPTS).any(|_| is_first()), "who asks waits for all who look");
}
