// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hostile processes that make the kernel wait: files that they share with the broker and lock, and descriptors that
//! they send it. This costs them and nobody else.

mod common;

use std::{
    net::{TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::{
    Client, Daemon, Device, TWO, Vm, add,
    by_hand::ByHand,
    hold::{self, Hold},
    host::World,
    remove, until,
};
use rustix::net::SocketType;
use tombolo_broker::{fd_passing, host::paths::program_socket};
use tombolo_control::{Envelope, Life, LinkState, Message};

/// Returns the state of the link whose first endpoint is `end`.
fn state(daemon: &Daemon, end: &str) -> LinkState {
    let rows = daemon.client().links();
    let found = rows.iter().find_map(|row| match row {
        Message::LinkRow { a, state, .. } if a.as_str() == end => Some(*state),
        _ => None,
    });
    found.expect("the link is there")
}

fn life(daemon: &Daemon, domain: &str) -> Life {
    let rows = daemon.client().domains();
    let found = rows.iter().find_map(|row| match row {
        Message::DomainRow { name, life, .. } if name.as_str() == domain => Some(*life),
        _ => None,
    });
    found.expect("it is configured")
}

/// Kills the broker and starts another one.
fn renew(daemon: &mut Daemon, vms: &[&Vm]) {
    daemon.kill();
    vms.iter().for_each(|vm| vm.qmp.forget_client());
    daemon.restart();
}

#[test]
fn b3_b16_qemu_that_holds_the_lock_of_its_device_stops_no_broker_from_its_first_start_nor_from_the_next() {
    if hold::is_missing(
        "b3_b16_qemu_that_holds_the_lock_of_its_device_stops_no_broker_from_its_first_start_nor_from_the_next",
    ) {
        return;
    }
    let mut daemon = Daemon::start(TWO);
    let (mut a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    a.boot(3, 1);
    let held = Hold::lock_file(&a.memory);
    // The message to `a` about it is in `a`'s device.
    daemon.client().link("a", "host");
    daemon.client().link("b", "host");
    a.ring_host();
    for _ in 0..2 {
        until("the others go on", || (state(&daemon, "b") == LinkState::Up).then_some(()));
        until("itself is served", || (state(&daemon, "a") == LinkState::Up).then_some(()));
        renew(&mut daemon, &[&a, &b]);
    }
    drop(held);
    a.listen_until("its link", |said| matches!(said, Message::Link { .. }));
}

#[test]
fn b10_qemu_that_holds_the_lock_of_its_region_has_no_link_and_all_others_have_theirs() {
    if hold::is_missing("b10_qemu_that_holds_the_lock_of_its_region_has_no_link_and_all_others_have_theirs") {
        return;
    }
    let mut daemon = Daemon::start(TWO);
    let (a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    let held = Arc::new(Mutex::new(Vec::new()));
    let holds = Arc::clone(&held);
    a.qmp.state().on_own = Some(Box::new(move |region| holds.lock().unwrap().push(Hold::lock_file(region))));
    daemon.client().link("a", "host");
    until("it has its region", || (!held.lock().unwrap().is_empty()).then_some(()));
    daemon.client().link("b", "host");
    for _ in 0..2 {
        until("the others go on", || (state(&daemon, "b") == LinkState::Up).then_some(()));
        assert_eq!(state(&daemon, "a"), LinkState::Wanted, "nobody has what is not sealed");
        renew(&mut daemon, &[&a, &b]);
    }
    // Its memory goes out of use, and memory for others is made all the same.
    for _ in 0..4 {
        assert_eq!(daemon.client().ask(remove("a", "host")), []);
        assert_eq!(daemon.client().ask(remove("b", "host")), []);
        daemon.client().link("a", "host");
        daemon.client().link("b", "host");
        until("the others go on", || (state(&daemon, "b") == LinkState::Up).then_some(()));
    }
    a.qmp.state().on_own = None;
    held.lock().unwrap().clear();
    until("it is sealed, and handed over", || (state(&daemon, "a") == LinkState::Up).then_some(()));
}

#[test]
fn b11_program_that_holds_the_lock_of_its_regions_stops_neither_its_account_nor_the_broker() {
    if hold::is_missing("b11_program_that_holds_the_lock_of_its_regions_stops_neither_its_account_nor_the_broker") {
        return;
    }
    let mut world = World::new();
    let program = ByHand::listen(&world.socket(), "held");
    let client = world.guest.domain.clone();
    let caller = std::thread::spawn(move || {
        use tombolo_domain::Rendezvous;
        client.connect("host/held", common::host::patience()).map(drop)
    });
    let descriptors = program.accept();
    let _ = caller.join();
    let _held: Vec<Hold> = descriptors[1..2].iter().map(Hold::lock_file).collect();
    // Sequence words, boxes and windows of other connections are in the same region.
    world.meet();
    renew(&mut world.daemon, &[&world.vm]);
    let began = Instant::now();
    while world.daemon.client().links().is_empty() {
        assert!(began.elapsed() < common::LIMIT, "links are not answered for");
    }
    world.meet();
}

/// Returns a connection whose last close waits for ten minutes: bytes sent on it never arrive, and it lingers.
fn lingering() -> (OwnedFd, TcpListener) {
    use std::io::Write;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[7; 64 << 10]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(600))).unwrap();
    (stream.into(), listener)
}

#[test]
fn b15_connections_that_linger_and_are_sent_to_the_broker_stop_nobody() {
    let mut daemon = Daemon::start(TWO);
    let b = Vm::start(&daemon, "b");
    let mut peers = Vec::new();
    let mut send = |socket: &OwnedFd, bytes: &[u8]| {
        let (lingers, peer) = lingering();
        peers.push(peer);
        let _ = fd_passing::send(socket, bytes, &[lingers.as_fd()]);
        // If the broker closed it first, this close waits as long as the broker's would have.
        std::thread::spawn(move || drop(lingers));
    };
    let hello = Envelope { serial: 0, message: common::hello() }.encode();
    // To the socket for tools, within a conversation and before it.
    let client = daemon.client();
    send(&client.socket, &hello);
    let client = Client::connect_raw(daemon.path()).unwrap();
    send(&client.socket, &hello);
    drop(client);
    // To the socket for programs.
    let program = fd_passing::connect(&program_socket(daemon.path()), SocketType::SEQPACKET).unwrap();
    send(&program, &hello);
    // As a QEMU.
    let device = Device::connect(daemon.path(), "a");
    device.must();
    send(&device.socket, &[0; 8]);
    until("it is sent away", || (life(&daemon, "a") == Life::DomainGone).then_some(()));
    let again = Device::connect(daemon.path(), "a");
    again.must();
    daemon.client().link("b", "host");
    until("the others go on", || (state(&daemon, "b") == LinkState::Up).then_some(()));
    renew(&mut daemon, &[&b]);
    until("the others go on", || (state(&daemon, "b") == LinkState::Up).then_some(()));
    assert!(daemon.client().refusal(add("b", "host", 0)).1.contains("already"));
}

#[test]
fn b15_b16_qemu_that_fills_its_socket_while_the_broker_is_away_stops_neither_the_next_nor_what_keeps_descriptors() {
    let mut daemon = Daemon::start(TWO);
    let b = Vm::start(&daemon, "b");
    let device = Device::connect(daemon.path(), "a");
    device.must();
    until("it is served", || (life(&daemon, "a") != Life::DomainGone).then_some(()));
    daemon.kill();
    let (lingers, _peer) = lingering();
    fd_passing::send(&device.socket, &[0; 8], &[lingers.as_fd()]).unwrap();
    drop((lingers, device));
    b.qmp.forget_client();
    daemon.restart();
    daemon.client().link("b", "host");
    until("the others go on", || (state(&daemon, "b") == LinkState::Up).then_some(()));
    // And once more: the broker keeps nothing of it.
    renew(&mut daemon, &[&b]);
    until("the others go on", || (state(&daemon, "b") == LinkState::Up).then_some(()));
}

#[test]
fn b9_qemus_that_come_and_go_without_end_are_let_in_one_after_the_other() {
    let daemon = Daemon::start(TWO);
    let began = Instant::now();
    for _ in 0..40 {
        Device::connect(daemon.path(), "a").must();
    }
    // For each, the thread that serves all makes a device; that thread must get to other work.
    assert!(began.elapsed() >= Duration::from_millis(390), "{:?}", began.elapsed());
}

#[test]
fn b9_domain_whose_second_qemu_comes_without_end_has_no_more_lines_of_the_log_than_its_share() {
    let daemon = Daemon::start(TWO);
    let _a = Vm::start(&daemon, "a");
    for _ in 0..300 {
        assert!(Device::connect(daemon.path(), "a").is_closed());
    }
    let _b = Vm::start(&daemon, "b");
    until("another domain has its line", || daemon.log().contains("b: QEMU connected").then_some(()));
    let lines = daemon.log().lines().filter(|line| line.contains("a: a second QEMU connected")).count();
    // The broker's own share is 200 lines at once, a domain's is 20.
    assert!((1..100).contains(&lines), "{lines}");
}
