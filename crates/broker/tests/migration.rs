// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine is made ready to migrate, and one arrives (B-26, B-27).

mod common;

use std::{
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard},
};

use common::{
    Daemon, TRIO, Vm, add,
    host::{PAIR, World, accept, patience},
    qmp::Fake,
    until,
};
use tombolo_control::{Life, LinkState, Message, QUEUE_MAX, code};
use tombolo_domain::Rendezvous;
use tombolo_os::{event::eventfd, lock::lock};

/// Closed numbers show in the whole process, so the tests run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    lock(&ALONE)
}

fn prepare() -> Message {
    Message::Prepare { domain: "a".parse().unwrap() }
}

fn cancel() -> Message {
    Message::CancelPrepare { domain: "a".parse().unwrap() }
}

/// Returns the state of the only link, and the note on it.
fn link(daemon: &Daemon) -> (LinkState, String) {
    let rows = daemon.client().links();
    let row = rows.iter().find_map(|row| match row {
        Message::LinkRow { state, note, quarantined: 0, .. } => Some((*state, note.to_string())),
        _ => None,
    });
    row.unwrap_or((LinkState::Leaving, format!("{rows:?}")))
}

fn until_up(daemon: &Daemon) {
    until("the link is up", || (link(daemon).0 == LinkState::Up).then_some(()));
}

/// Returns the note on the machine a.
fn note_on_a(daemon: &Daemon) -> String {
    let is_a = |row: Message| match row {
        Message::DomainRow { name, note, .. } if name.as_str() == "a" => Some(note.to_string()),
        _ => None,
    };
    daemon.client().domains().into_iter().find_map(is_a).unwrap()
}

/// Returns two machines with a link that is up.
fn pair(daemon: &Daemon) -> (Vm, Vm) {
    let (a, b) = (Vm::start(daemon, "a"), Vm::start(daemon, "b"));
    daemon.client().link("a", "b");
    until_up(daemon);
    (a, b)
}

/// Makes a ready, and takes its QEMU apart meanwhile. Returns the broker's answers, and what is left of the QEMU.
fn make_ready(daemon: &Daemon, a: Vm) -> (Vec<Message>, Fake) {
    let asking = daemon.client();
    asking.send_message(7, prepare());
    let Vm { qmp, device, .. } = a;
    until("its chardev goes", || qmp.state().chardevs.is_empty().then_some(()));
    drop(device);
    let said: Vec<Message> = (0..2).map(|_| asking.receive_message().unwrap().message).collect();
    (said, qmp)
}

fn fillers() -> Vec<OwnedFd> {
    (0..3).map(|_| eventfd(0).unwrap()).collect()
}

fn is_ready(said: &[Message]) -> bool {
    matches!(said, [Message::PreparedRow { domain, links: 1, cut: 0, .. }, Message::Done {}] if domain.as_str() == "a")
}

#[test]
fn b26_devices_go_in_order_and_no_qemu_is_told_to_forget_a_doorbell() {
    let _alone = alone();
    let daemon = Daemon::start(TRIO);
    let (a, b) = pair(&daemon);
    let _ = (a.doorbell(), b.doorbell());
    a.qmp.state().done.clear();
    let (said, qmp) = make_ready(&daemon, a);
    assert!(is_ready(&said), "{said:?}");
    let quiet = std::time::Duration::from_millis(100);
    assert!(b.device.next(quiet).is_none(), "b is to forget a doorbell, and could not migrate afterwards");
    let mut done = std::mem::take(&mut qmp.state().done);
    // Numbers that other threads of this process close meanwhile are filled as well, as if the doorbell had left them.
    done.retain(|done| done != "object-add tombolo-filled");
    done[..2].sort();
    done[2..4].sort();
    let regions = ["own", "peer"].map(|side| format!("device_del tombolo-d-1-1-{side}"));
    let memories = ["own", "peer"].map(|side| format!("object-del tombolo-m-1-1-{side}"));
    let rest = ["object-add tombolo-left", "device_del tombolo", "chardev-remove tombolo"].map(String::from);
    assert_eq!(done, [&regions[..], &memories, &rest].concat());
}

#[test]
fn b26_ready_machine_gets_no_device_and_says_so_also_after_the_broker_began_anew() {
    let _alone = alone();
    let mut daemon = Daemon::start(TRIO);
    let (a, _b) = pair(&daemon);
    (a.qmp.state().takes_no_fillers, a.qmp.state().of_doorbell) = (true, fillers());
    let (_, qmp) = make_ready(&daemon, a);
    qmp.state().done.clear();
    for begins in ["it was made ready", "the broker began anew"] {
        until(begins, || note_on_a(&daemon).contains("would not survive another device").then_some(()));
        until("its link says so", || {
            let (state, why) = link(&daemon);
            (state == LinkState::Waiting && why.contains("made ready to migrate")).then_some(())
        });
        assert_eq!(daemon.client().refusal(add("a", "host", 0)).0, code::MIGRATES);
        assert_eq!(daemon.client().refusal(prepare()).0, code::EXISTS);
        // Closed numbers are free for any later descriptor.
        assert_eq!(daemon.client().refusal(cancel()).0, code::MIGRATES);
        daemon.kill();
        daemon.restart();
    }
    assert_eq!(qmp.state().done, [""; 0]);
    // Another QEMU is another incarnation.
    let _a = Vm::start(&daemon, "a");
    until_up(&daemon);
}

#[test]
fn b26_machine_that_stays_gets_its_devices_again_if_its_numbers_are_filled() {
    let _alone = alone();
    let mut daemon = Daemon::start(TRIO);
    let (a, _b) = pair(&daemon);
    a.qmp.state().of_doorbell = fillers();
    let (said, qmp) = make_ready(&daemon, a);
    assert!(is_ready(&said), "{said:?}");
    assert!(qmp.state().marks.contains("tombolo-filled"), "{:?}", qmp.state().marks);
    assert!(qmp.state().fillers.len() >= 3, "{:?}", qmp.state().fillers);
    daemon.kill();
    daemon.restart();
    until("the broker sees it", || note_on_a(&daemon).contains("cancel-migration a").then_some(()));
    let asking = daemon.client();
    asking.send_message(7, cancel());
    let a = Vm::arrived("a", qmp);
    assert_eq!(asking.receive_message().unwrap().message, Message::Done {});
    a.greet();
    until_up(&daemon);
    assert_eq!(a.qmp.state().marks.len(), 0, "it is as any other");
    assert_eq!(a.qmp.state().plugged_twice, [""; 0]);
}

#[test]
fn b26_fillers_are_never_readable() {
    let _alone = alone();
    let daemon = Daemon::start(TRIO);
    let (a, _b) = pair(&daemon);
    a.qmp.state().of_doorbell = fillers();
    let (_, qmp) = make_ready(&daemon, a);
    let fillers = std::mem::take(&mut qmp.state().fillers);
    assert!(fillers.len() >= 3 && fillers.iter().all(|filler| common::take_notifications(filler) == 0), "{fillers:?}");
}

#[test]
fn b26_guest_that_does_not_let_go_is_named_and_it_may_be_taken_back() {
    let _alone = alone();
    let mut daemon = Daemon::new(TRIO);
    daemon.options = vec!["--ask-again", "500"];
    daemon.restart();
    let (a, _b) = pair(&daemon);
    a.qmp.state().stubborn = true;
    let (kept, why) = daemon.client().refusal(prepare());
    assert!(kept == code::KEPT && why.contains("has not let go"), "{kept} {why}");
    assert!(note_on_a(&daemon).contains("is made ready to migrate"));
    assert_eq!(daemon.client().ask(cancel()), []);
    assert_eq!(daemon.client().refusal(cancel()).0, code::NOT_FOUND);
    // Its regions are being removed, and others come.
    a.qmp.state().stubborn = false;
    until_up(&daemon);
    assert!(a.qmp.state().doorbell.is_some() && a.qmp.state().marks.is_empty());
}

#[test]
fn b26_doorbell_that_is_to_go_is_not_notified() {
    let _alone = alone();
    let mut daemon = Daemon::new(TRIO);
    daemon.options = vec!["--ask-again", "500"];
    daemon.restart();
    let (mut a, _b) = pair(&daemon);
    a.boot(3, 1);
    a.qmp.state().stubborn = true;
    assert_eq!(daemon.client().refusal(prepare()).0, code::KEPT);
    common::take_notifications(&a.own[0]);
    // The guest's messages are read all the same.
    a.send_message(Message::Storm { link: 99 });
    until("it is heard", || {
        a.listen_once();
        (a.guest.as_ref().unwrap().room() == QUEUE_MAX).then_some(())
    });
    let _ = daemon.client().links();
    // Another thread notifies.
    while a.device.next(std::time::Duration::from_millis(100)).is_some() {}
    assert_eq!(common::take_notifications(&a.own[0]), 0);
    a.qmp.state().stubborn = false;
    assert_eq!(daemon.client().ask(cancel()), []);
    until("it is notified again", || (common::take_notifications(&a.own[0]) != 0).then_some(()));
}

#[test]
fn b26_connections_that_stay_open_are_counted_and_named() {
    let _alone = alone();
    let config = PAIR.replace("[host]\n", "[host]\nleave = \"300ms\"\n");
    let world = World::start(&config, |_| {});
    let service = world.service("host");
    let mut listener = world.host.listen(&service).unwrap();
    let client = world.guest.domain.connect(&service, patience()).unwrap();
    let accepted = accept(&mut *listener);
    let asking = world.daemon.client();
    asking.send_message(7, prepare());
    until("its chardev goes", || world.vm.qmp.state().chardevs.is_empty().then_some(()));
    rustix::net::shutdown(&world.vm.device.socket, rustix::net::Shutdown::Both).unwrap();
    let said = asking.receive_message().unwrap().message;
    let Message::PreparedRow { links: 1, cut: 2, took, note, .. } = &said else { panic!("{said:?}") };
    assert!(*took >= 300 && note.as_str().contains("1 connections of a and 1 connections of host"), "{said:?}");
    drop((client, accepted));
}

#[test]
fn b26_qemu_that_keeps_its_doorbell_goes_on_with_its_links() {
    let _alone = alone();
    let daemon = Daemon::start(TRIO);
    let (a, _b) = pair(&daemon);
    a.qmp.state().keeps_doorbell = Some("Bus 'pcie.0' does not support hotplugging");
    let (refused, why) = daemon.client().refusal(prepare());
    assert!(refused == code::QEMU_REFUSES && why.contains("hotplugging"), "{refused} {why}");
    until_up(&daemon);
    assert!(a.qmp.state().marks.is_empty());
}

#[test]
fn b26_machine_that_is_not_there_or_has_no_control_socket_is_refused_as_such() {
    let _alone = alone();
    let daemon = Daemon::start(TRIO);
    assert_eq!(daemon.client().refusal(prepare()).0, code::NO_QEMU);
    assert_eq!(daemon.client().refusal(cancel()).0, code::NOT_FOUND);
    let nobody = Message::Prepare { domain: "nobody".parse().unwrap() };
    assert_eq!(daemon.client().refusal(nobody).0, code::NOT_FOUND);
    // A QEMU without a control socket: only its doorbell is known.
    let _device = common::Device::connect(daemon.path(), "b");
    let of_b = || daemon.client().refusal(Message::Prepare { domain: "b".parse().unwrap() });
    let (refused, why) = until("the broker has looked for it", || Some(of_b()).filter(|(_, why)| why.contains("qmp")));
    assert!(refused == code::NO_QEMU, "{why}");
}

#[test]
fn b26_qemu_that_had_to_forget_a_doorbell_keeps_its_own() {
    let _alone = alone();
    let mut daemon = Daemon::start(TRIO);
    let (a, _b) = pair(&daemon);
    let _ = a.doorbell();
    // A guest that is reset gets new memory over the same doorbells.
    a.qmp.event("RESET");
    assert_eq!(daemon.client().ask(common::remove("a", "b")), []);
    assert!(a.device.must().1.is_none(), "the doorbell of b is taken back");
    for _ in 0..2 {
        let (refused, why) = until("QEMU was asked", || {
            Some(daemon.client().refusal(prepare())).filter(|(refused, _)| *refused != code::NO_QEMU)
        });
        assert!(refused == code::QEMU_REFUSES && why.contains("forget a doorbell"), "{refused} {why}");
        daemon.kill();
        a.qmp.forget_client();
        daemon.restart();
    }
    assert!(a.qmp.state().doorbell.is_some());
}

#[test]
fn b26_qemu_whose_doorbell_is_on_its_way_out_is_told_to_forget_none_whatever_becomes_of_its_links() {
    let _alone = alone();
    let mut daemon = Daemon::new(TRIO);
    daemon.options = vec!["--ask-again", "500"];
    daemon.restart();
    let (a, b) = pair(&daemon);
    let _ = (a.doorbell(), b.doorbell());
    a.qmp.state().stubborn = true;
    assert_eq!(daemon.client().refusal(prepare()).0, code::KEPT);
    assert_eq!(daemon.client().ask(common::remove("a", "b")), []);
    assert!(b.device.must().1.is_none(), "b is not about to migrate, and has one less");
    let quiet = std::time::Duration::from_millis(100);
    assert!(a.device.next(quiet).is_none(), "a would end with its own doorbell");
    a.qmp.state().stubborn = false;
    assert!(is_ready(&make_ready(&daemon, a).0));
}

#[test]
fn b26_machine_whose_guest_or_peer_began_anew_can_be_made_ready() {
    let _alone = alone();
    let daemon = Daemon::start(TRIO);
    let (mut a, mut b) = pair(&daemon);
    a.boot(3, 1);
    b.boot(3, 1);
    let _ = (a.doorbell(), b.doorbell());
    a.qmp.event("RESET");
    a.boot(4, 2);
    let generation = || match &daemon.client().links()[..] {
        [.., Message::LinkRow { generation, state: LinkState::Up, .. }] => Some(*generation),
        _ => None,
    };
    until("it has other memory", || {
        // Its Hello may still wait for room.
        a.listen_once();
        generation().filter(|generation| *generation == 2)
    });
    drop(b);
    let _b = Vm::start(&daemon, "b");
    until("it has other memory once more", || generation().filter(|generation| *generation == 3));
    let (number, doorbell) = a.doorbell();
    assert!(number == 3, "{doorbell:?}");
    assert!(is_ready(&make_ready(&daemon, a).0));
}

#[test]
fn b26_broker_that_dies_meanwhile_goes_on_with_it() {
    let _alone = alone();
    let mut daemon = Daemon::start(TRIO);
    let (a, _b) = pair(&daemon);
    let asking = daemon.client();
    asking.send_message(7, prepare());
    // Its regions go, and its doorbell takes longer.
    until("the doorbell is to go", || {
        let mut state = a.qmp.state();
        state.stubborn = state.devices.is_empty();
        state.done.iter().any(|done| done == "object-add tombolo-left").then_some(())
    });
    let was_stubborn = a.qmp.state().doorbell.is_some();
    daemon.kill();
    a.qmp.forget_client();
    a.qmp.state().stubborn = false;
    daemon.restart();
    let Vm { qmp, device, .. } = a;
    until("its chardev goes", || qmp.state().chardevs.is_empty().then_some(()));
    drop(device);
    until("it is known as ready", || note_on_a(&daemon).contains("ready to migrate").then_some(()));
    let plugged = qmp.state().done.iter().filter(|done| done.starts_with("device_add")).count();
    assert_eq!(plugged, 2, "the regions of the beginning alone: {:?} {was_stubborn}", qmp.state().done);
}

#[test]
fn b27_machine_that_arrives_gets_a_doorbell_once_it_has_arrived() {
    let _alone = alone();
    let daemon = Daemon::start(TRIO);
    let b = Vm::start(&daemon, "b");
    daemon.client().link("a", "b");
    let qmp = Fake::start(&daemon.file("a.qmp"));
    {
        let mut state = qmp.state();
        (state.doorbell, state.status) = (None, "inmigrate");
        state.chardevs.clear();
    }
    until("it is looked at", || (qmp.state().last == "query-status").then_some(()));
    assert!(qmp.state().chardevs.is_empty(), "it has not arrived");
    qmp.state().status = "running";
    let a = Vm::arrived("a", qmp);
    assert!(a.qmp.state().memories.is_empty(), "its guest's broker says Hello first");
    a.greet();
    until_up(&daemon);
    assert_eq!(b.doorbell().0, 2);
    let runs =
        |row: &Message| matches!(row, Message::DomainRow { name, life: Life::Running, .. } if name.as_str() == "a");
    until("it runs", || daemon.client().domains().iter().any(runs).then_some(()));
    drop(a);
}

#[test]
fn b27_doorbell_that_cannot_be_plugged_is_complained_of_and_leaves_no_chardev() {
    let _alone = alone();
    let daemon = Daemon::start(TRIO);
    let qmp = Fake::start(&daemon.file("a.qmp"));
    {
        let mut state = qmp.state();
        state.doorbell = None;
        state.chardevs.clear();
        state.foreign = (4..32).collect();
    }
    until("it is complained of", || note_on_a(&daemon).contains("no slot is free for the doorbell").then_some(()));
    assert!(qmp.state().chardevs.is_empty());
    {
        let mut state = qmp.state();
        state.refuses_doorbell = Some("no interrupt is left");
        state.foreign.clear();
    }
    until("QEMU is asked", || qmp.state().done.iter().any(|done| done == "device_add tombolo").then_some(()));
    until("the chardev goes", || qmp.state().chardevs.is_empty().then_some(()));
    qmp.state().refuses_doorbell = None;
    let _a = Vm::arrived("a", qmp);
}
