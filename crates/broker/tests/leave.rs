// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A link is left before it is taken away: no byte that was accepted is lost, and nothing waits longer than configured
//! (B-21, V-9).

mod common;

use std::{
    io::{Read, Write},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use common::{
    Daemon, LIMIT, Vm,
    host::{PAIR, World},
    remove, until,
};
use rustix::process::Signal;
use tombolo_channel::{Address, Backends, Deadline, Ending, Error, Listener, Options, Stream};
use tombolo_control::{LinkState, Message};
use tombolo_domain::Error as DomainError;
use tombolo_domain_ivshmem::VmDomain;

/// Longer than any test takes: a removal that ends sooner did not wait for it.
const LONG: &str = "60s";

/// Returns a machine and its host with a link that may be removed. Programs may take `leave` to leave it.
fn world(leave: &str) -> World {
    let (config, _) = PAIR.split_once("[[link]]").unwrap();
    let config = config.replace("[host]\n", &format!("[host]\nleave = \"{leave}\"\n"));
    let config = config + "[domain.b]\n";
    World::start(&config, |daemon| daemon.client().link("a", "host"))
}

/// Returns a stream over the link: the machine's endpoint, then the host's.
fn streams(world: &World) -> (Stream, Stream) {
    let service = world.service("host");
    let address: Address = format!("vm:{service}").parse().unwrap();
    let on = |domain: &VmDomain| Backends::new().with(domain.clone());
    let mut listener: Listener<Stream> = on(&world.host).listen(&address, &Options::new()).unwrap();
    let caller = on(&world.guest.domain);
    thread::scope(|scope| {
        let caller = scope.spawn(|| caller.connect::<Stream>(&address, &Options::new()).unwrap());
        let connected = listener.accept_until(Deadline::after(LIMIT)).unwrap();
        (caller.join().unwrap(), connected)
    })
}

/// Removes the link. Returns the time that took.
fn take_away(world: &World) -> Duration {
    let began = Instant::now();
    assert_eq!(world.daemon.client().ask(remove("a", "host")), []);
    began.elapsed()
}

fn until_leaving(daemon: &Daemon) {
    let leaving = |row: &Message| matches!(row, Message::LinkRow { state: LinkState::Leaving, .. });
    until("the link is told as leaving", || daemon.client().links().iter().any(leaving).then_some(()));
}

fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Writes until it may not. Returns how many bytes were taken, and why no more were.
fn write_all_it_takes(stream: Stream, flowing: &mpsc::Sender<()>) -> (u64, Error) {
    let (_reads, mut writer) = stream.into_split();
    let mut sent = 0;
    loop {
        let chunk: Vec<u8> = (sent..sent + 3000).map(byte_at).collect();
        match writer.write_until(&chunk, Deadline::after(LIMIT)) {
            Ok(written) => sent += written as u64,
            Err(error) => return (sent, error),
        }
        if sent > 1 << 20 {
            let _ = flowing.send(());
        }
    }
}

/// Reads to the end, and checks each byte. Returns how many bytes came, how the stream ended, and when.
fn read_all_there_is(stream: Stream) -> ((u64, Option<Ending>), Instant) {
    let (mut reader, _writes) = stream.into_split();
    let (mut position, mut buffer) = (0, vec![0; 5000]);
    loop {
        match reader.read_until(&mut buffer, Deadline::after(LIMIT)).unwrap() {
            0 => return ((position, reader.ending()), Instant::now()),
            read => {
                for byte in &buffer[..read] {
                    assert_eq!(*byte, byte_at(position), "at {position}");
                    position += 1;
                }
            }
        }
    }
}

/// Number of bytes that the writer was told were taken, and why no more were; number that the reader read, and how it
/// ended; whether the link was there until then.
type Flowed = ((u64, Error), (u64, Option<Ending>), bool);

/// Takes a link away while a stream flows over it, to the host or from it.
fn take_away_under_a_stream(leave: &str, to_host: bool) -> Flowed {
    let world = world(leave);
    let (guest, host) = streams(&world);
    let (from, to) = if to_host { (guest, host) } else { (host, guest) };
    let (flowing, flows) = mpsc::channel();
    let writing = thread::spawn(move || write_all_it_takes(from, &flowing));
    let reading = thread::spawn(move || read_all_there_is(to));
    flows.recv_timeout(LIMIT).unwrap();
    let began = Instant::now();
    let gone = began + take_away(&world);
    let (read, ended) = reading.join().unwrap();
    (writing.join().unwrap(), read, ended <= gone)
}

#[test]
fn b21_v9_all_that_a_writer_was_told_was_taken_is_read_before_the_end_either_way() {
    for to_host in [true, false] {
        let ((sent, refused), read, in_time) = take_away_under_a_stream(LONG, to_host);
        assert_eq!(read, (sent, Some(Ending::Revoked)), "to the host: {to_host}");
        assert!(matches!(refused, Error::Domain(DomainError::Leaving)), "{refused:?}");
        assert!(in_time, "it went before all was read");
    }
}

/// No process is left that could write: the link waits for the reader alone.
#[test]
fn b21_v9_unread_bytes_of_a_sender_that_exited_are_kept_until_they_are_read() {
    for to_host in [true, false] {
        let world = world(LONG);
        let (guest, host) = streams(&world);
        let (mut from, to) = if to_host { (guest, host) } else { (host, guest) };
        let all: Vec<u8> = (0..50_000).map(byte_at).collect();
        from.write_all(&all).unwrap();
        drop(from);
        thread::scope(|scope| {
            let removing = scope.spawn(|| (take_away(&world), Instant::now()));
            until_leaving(&world.daemon);
            let (read, ended) = read_all_there_is(to);
            assert_eq!(read, (50_000, Some(Ending::Closed)), "to the host: {to_host}");
            let (took, gone) = removing.join().unwrap();
            assert!(ended <= gone, "it went before all was read");
            assert!(took < LIMIT, "{took:?}");
        });
    }
}

/// Without time to leave, a link is cut as before there was Leave, and the test above would notice.
#[test]
fn canary_b21_link_that_nobody_has_time_to_leave_is_cut() {
    let ((sent, _), read, _) = take_away_under_a_stream("0s", true);
    assert_ne!(read, (sent, Some(Ending::Revoked)));
}

#[test]
fn v9_ends_that_wait_for_each_other_both_learn_that_the_link_goes() {
    let world = world(LONG);
    let (mut guest, mut host) = streams(&world);
    guest.write_all(b"question").unwrap();
    host.read_exact(&mut [0; 8]).unwrap();
    let wait = |mut stream: Stream| {
        thread::spawn(move || {
            let read = stream.read(&mut [0; 8]);
            (read.unwrap(), stream.split().0.ending())
        })
    };
    let waiting = [wait(guest), wait(host)];
    let took = take_away(&world);
    for end in waiting {
        assert_eq!(end.join().unwrap(), (0, Some(Ending::Revoked)));
    }
    assert!(took < LIMIT, "{took:?}");
}

/// The deadline and half a second: on a machine that is busy elsewhere, one of a few runs meets it.
#[test]
fn b21_end_that_makes_no_call_costs_the_deadline_and_is_counted_and_named() {
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= Duration::from_millis(1200)) {
        assert!(took.len() < 8, "it is taken away late: {took:?}");
        took.push(take_away_under_idle_programs());
    }
}

/// Takes a link away in 700 ms under programs that make no call, and checks the messages about it. Returns the time
/// that took.
fn take_away_under_idle_programs() -> Duration {
    let world = world("700ms");
    let (_guest, _host) = streams(&world);
    let daemon = &world.daemon;
    let removing = thread::scope(|scope| {
        let removing = scope.spawn(|| take_away(&world));
        let note = until("the link is told as leaving", || {
            daemon.client().links().into_iter().find_map(|row| match row {
                Message::LinkRow { state: LinkState::Leaving, note, .. } => Some(note.to_string()),
                _ => None,
            })
        });
        assert!(note.contains("1 connections of a") && note.contains("1 connections of host"), "{note}");
        removing.join().unwrap()
    });
    assert!(removing >= Duration::from_millis(700), "{removing:?}");
    let log = until("it is in the log", || Some(daemon.log()).filter(|log| log.contains("still open after 700 ms")));
    assert!(log.contains("1 connections of a and 1 connections of host still open"), "{log}");
    until("the connection is named", || daemon.log().contains("its connection is cut").then_some(()));
    removing
}

#[test]
fn b21_link_that_nobody_uses_goes_at_once_and_one_that_goes_takes_no_connections() {
    let world = world(LONG);
    let held = streams(&world);
    let address: Address = format!("vm:{}", world.service("host")).parse().unwrap();
    let on = |domain: &VmDomain| Backends::new().with(domain.clone());
    thread::scope(|scope| {
        let removing = scope.spawn(|| take_away(&world));
        until("calls are refused", || {
            let refused = on(&world.guest.domain).connect::<Stream>(&address, &Options::new()).err()?;
            refused.to_string().contains("is being taken away").then_some(())
        });
        assert!(!removing.is_finished(), "somebody has a connection");
        drop(held);
        assert!(removing.join().unwrap() < LIMIT);
    });
}

#[test]
fn b21_guest_of_before_is_asked_nothing_and_waited_for_by_nobody() {
    let (config, _) = PAIR.split_once("[[link]]").unwrap();
    let daemon = Daemon::start(&config.replace("[host]\n", &format!("[host]\nleave = \"{LONG}\"\n")));
    let mut vm = Vm::start(&daemon, "a");
    vm.qmp.state().unsealed = true;
    vm.boot(3, 1);
    daemon.client().link("a", "host");
    vm.listen_until("its link", |said| matches!(said, Message::Link { .. }));
    let began = Instant::now();
    assert_eq!(daemon.client().ask(remove("a", "host")), []);
    assert!(began.elapsed() < LIMIT);
    vm.listen_until("that the link goes", |said| matches!(said, Message::Unlink { .. }));
    assert!(!vm.heard.iter().any(|said| matches!(said, Message::Leave { .. })), "{:?}", vm.heard);
}

#[test]
fn b21_rule_that_goes_takes_its_link_the_same_way() {
    let world = world(LONG);
    let (guest, host) = streams(&world);
    let (flowing, flows) = mpsc::channel();
    let writing = thread::spawn(move || write_all_it_takes(guest, &flowing));
    let reading = thread::spawn(move || read_all_there_is(host));
    flows.recv_timeout(LIMIT).unwrap();
    let config = std::fs::read_to_string(world.daemon.file("tombolod.toml")).unwrap();
    let (before, rest) = config.split_once("[[allow]]").unwrap();
    let (_, after) = rest.split_once("[domain.b]").unwrap();
    world.daemon.configure(&format!("{before}[domain.b]{after}"));
    world.daemon.signal(Signal::HUP);
    let ((sent, _), (read, _)) = (writing.join().unwrap(), reading.join().unwrap());
    assert_eq!(read, (sent, Some(Ending::Revoked)));
}

#[test]
fn b21_end_that_never_answers_delays_no_other_link() {
    let world = world(LONG);
    let _held = streams(&world);
    let daemon = &world.daemon;
    let waiting = daemon.client();
    waiting.send_message(7, remove("a", "host"));
    let leaving = |row: &Message| matches!(row, Message::LinkRow { state: LinkState::Leaving, .. });
    until("the link is told as leaving", || daemon.client().links().iter().any(leaving).then_some(()));
    let mut vm = Vm::start(daemon, "b");
    vm.qmp.state().unsealed = true;
    vm.boot(3, 1);
    daemon.client().link("b", "host");
    vm.listen_until("its link", |said| matches!(said, Message::Link { .. }));
    assert_eq!(daemon.client().ask(remove("b", "host")), []);
    assert!(daemon.client().links().iter().any(leaving), "the other one waits on");
    // A client that does not wait for the answer does not keep the link either.
    drop(waiting);
}

#[test]
fn b21_left_that_nobody_asked_for_counts_for_nothing() {
    let (config, _) = PAIR.split_once("[[link]]").unwrap();
    let daemon = Daemon::start(config);
    let mut vm = Vm::start(&daemon, "a");
    vm.qmp.state().unsealed = true;
    vm.boot(3, 1);
    daemon.client().link("a", "host");
    let said = vm.listen_until("its link", |said| matches!(said, Message::Link { .. }));
    let Message::Link { link, generation, .. } = said else { unreachable!() };
    vm.send_message(Message::Left { link, generation });
    vm.send_message(Message::Left { link: link + 1, generation });
    vm.send_message(Message::Usage { link, generation, connections: 3, used: 4096 });
    until("it is heard", || {
        vm.listen_once();
        daemon.client().ends().iter().any(|row| matches!(row, Message::EndRow { connections: 3, .. })).then_some(())
    });
}

#[test]
fn b21_broker_that_begins_anew_takes_leave_back() {
    let mut world = world(LONG);
    let held = streams(&world);
    world.daemon.client().send_message(7, remove("a", "host"));
    until_leaving(&world.daemon);
    world.daemon.kill();
    world.daemon.restart();
    drop(held);
    until("the link is up again", || {
        let up = |row: &Message| matches!(row, Message::LinkRow { state: LinkState::Up, .. });
        world.daemon.client().links().iter().any(up).then_some(())
    });
    world.meet();
}
