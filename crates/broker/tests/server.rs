// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ivshmem server, and what outlives the broker: a client that speaks as QEMU does, and SIGKILL.

mod common;

use std::{os::fd::AsFd, time::Duration};

use common::{Daemon, Device, LIMIT, TRIO, VECTORS, Vm, take_notifications, until};
use rustix::{net::SocketType, process::Signal};
use tombolo_broker::{
    fd_passing,
    host::descriptor_store::{DescriptorStore, is_refusal},
};
use tombolo_control::{Message, vector_of};

/// Time after which a message that has not come counts as not sent.
const QUIET: Duration = Duration::from_millis(200);

#[test]
fn b9_qemu_is_greeted_with_its_own_memory_and_doorbells() {
    let daemon = Daemon::start(TRIO);
    let (a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    let stat = |vm: &Vm| rustix::fs::fstat(&vm.memory).unwrap();
    assert_eq!(stat(&a).st_size, 64 << 10);
    assert_ne!(stat(&a).st_ino, stat(&b).st_ino, "two QEMUs have one memory");
    assert_eq!(a.own.len(), VECTORS);
    assert!(a.device.next(QUIET).is_none() && b.device.next(QUIET).is_none(), "more than the greeting");
}

#[test]
fn b8_b13_qemu_gets_no_doorbell_of_a_peer_without_a_link() {
    let daemon = Daemon::start(TRIO);
    let vms = ["a", "b", "c"].map(|name| Vm::start(&daemon, name));
    daemon.client().link("a", "b");
    let (to_b, doorbell_b) = vms[0].doorbell();
    let (to_a, _doorbell_a) = vms[1].doorbell();
    assert_eq!((to_a, to_b), (2, 2), "numbers are each QEMU's own");
    assert!(vms[2].device.next(QUIET).is_none(), "c learned of somebody");
    // The doorbell that a has is b's for their link, and a has no other doorbell of b's.
    let Message::LinkRow { link, .. } = daemon.client().links().remove(0) else { panic!("a link") };
    let waits = usize::from(vector_of(link, VECTORS as u16));
    assert_ne!(waits, 0, "that is the host's");
    let before: u64 = vms[1].own.iter().map(take_notifications).sum();
    rustix::io::write(&doorbell_b, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(
        vms[1].own.iter().position(|own| take_notifications(own) > 0),
        Some(waits),
        "after {before} notifications"
    );
    assert!(vms[0].device.next(QUIET).is_none() && vms[1].device.next(QUIET).is_none(), "more than one vector");
}

#[test]
fn b3_host_marks_its_own_page_before_it_notifies() {
    let mut daemon = Daemon::start(TRIO);
    let mut a = Vm::start(&daemon, "a");
    let sequence = |vm: &Vm| {
        let mut word = [0; 4];
        rustix::io::pread(&vm.memory, &mut word, 0x800).unwrap();
        u32::from_le_bytes(word)
    };
    let first = sequence(&a);
    take_notifications(&a.own[0]);
    a.boot(3, 1);
    until("the host notifies it", || (take_notifications(&a.own[0]) > 0).then_some(()));
    assert!(sequence(&a) > first);
    let before = sequence(&a);
    daemon.kill();
    daemon.restart();
    assert!(sequence(&a) > before, "a driver would not see a notification of the new broker");
}

#[test]
fn b9_second_qemu_of_a_domain_and_one_that_talks_are_closed() {
    let daemon = Daemon::start(TRIO);
    let first = Vm::start(&daemon, "a");
    assert!(Device::connect(daemon.path(), "a").is_closed());
    rustix::io::write(&first.device.socket, b"something").unwrap();
    until("the place is free again", || {
        let device = Device::connect(daemon.path(), "a");
        matches!(device.next(LIMIT), Some((0, None))).then_some(())
    });
}

#[test]
fn b16_connections_doorbell_and_regions_outlive_a_killed_broker() {
    let mut daemon = Daemon::start(TRIO);
    let (mut a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    let ((_, to_b), _) = (a.doorbell(), b.doorbell());
    a.boot(9, 1);
    a.listen_until("the link", |said| matches!(said, Message::Link { .. }));
    let (devices, inode) = (a.qmp.state().devices.clone(), rustix::fs::fstat(&a.memory).unwrap().st_ino);
    let kept = daemon.kept();
    for _ in 0..5 {
        daemon.kill();
        daemon.restart();
    }
    until("the link is up again", || {
        let links = daemon.client().links();
        matches!(links[..], [Message::LinkRow { state: tombolo_control::LinkState::Up, .. }]).then_some(())
    });
    assert_eq!(daemon.kept(), kept);
    assert_eq!(a.qmp.state().devices, devices, "an established link was touched");
    assert!(a.device.next(QUIET).is_none() && b.device.next(QUIET).is_none(), "a doorbell was touched");
    rustix::io::write(&to_b, &1u64.to_ne_bytes()).unwrap();
    assert!(b.own[1..].iter().any(|own| take_notifications(own) > 0));
    assert_eq!(rustix::fs::fstat(&a.memory).unwrap().st_ino, inode);
    // The sockets are served: the guest's messages are read, a new peer is reported, and one that leaves is missed.
    a.listen_until("the link, from the new broker", |said| matches!(said, Message::Link { .. }));
    drop(b);
    let _b = Vm::start(&daemon, "b");
    assert_eq!(a.doorbell().0, 3, "a number came a second time");
}

#[test]
fn b16_qemu_that_left_while_the_broker_was_away_is_missed() {
    let mut daemon = Daemon::start(TRIO);
    let (a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    let _ = (a.doorbell(), b.doorbell());
    daemon.kill();
    drop(b);
    daemon.restart();
    until("b's device is forgotten", || (!daemon.kept().iter().any(|key| key.starts_with("machine/b"))).then_some(()));
}

#[test]
fn b16_killed_at_any_moment_of_joining_it_comes_back_in_order() {
    let mut daemon = Daemon::start(TRIO);
    for delay in 0..24u64 {
        let _device = Device::connect(daemon.path(), "a");
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: (delay * 100_000) as i64 };
        rustix::event::poll(&mut [], Some(&pause)).unwrap();
        daemon.kill();
        daemon.restart();
    }
    let device = until("a new QEMU is let in", || {
        let device = Device::connect(daemon.path(), "a");
        matches!(device.next(LIMIT), Some((0, None))).then_some(device)
    });
    let mine = |keys: Vec<String>| keys.iter().filter(|key| key.starts_with("machine/a")).count();
    until("only its device is kept", || (mine(daemon.kept()) == 1).then_some(()));
    drop(device);
}

#[test]
fn b16_broker_that_ends_with_nothing_to_keep_leaves_nothing_behind() {
    let mut daemon = Daemon::start(TRIO);
    let a = Vm::start(&daemon, "a");
    drop(a);
    until("the device is forgotten", || daemon.kept().is_empty().then_some(()));
    daemon.stop();
    let mut left: Vec<_> = std::fs::read_dir(daemon.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.retain(|name| !["a.qmp", "log", "tombolod.toml", "lock", "holder.lock"].contains(&name.as_str()));
    until("the descriptor store's socket goes", || (!daemon.file("holder.socket").exists()).then_some(()));
    left.retain(|name| name != "holder.socket");
    assert_eq!(left, [""; 0]);
}

#[test]
fn b8_numbers_of_doorbells_are_never_used_twice_in_one_qemu() {
    let daemon = Daemon::start(TRIO);
    let a = Vm::start(&daemon, "a");
    daemon.client().link("a", "b");
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..20 {
        let b = Vm::start(&daemon, "b");
        let (number, _) = a.doorbell();
        assert!(seen.insert(number), "{number} came a second time");
        let _ = b.doorbell();
        drop(b);
        // The broker keeps a few doorbells of a QEMU that is gone: to take one back could make this QEMU lose its own
        // (B-26).
        if round >= 8 {
            assert_eq!(a.device.must().0, number, "the number is taken back");
        }
    }
}

#[test]
fn b8_doorbell_of_a_peer_that_storms_is_taken_away() {
    let daemon = Daemon::start(TRIO);
    let (a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    let _ = (a.doorbell(), b.doorbell());
    b.boot(5, 1);
    let Message::Link { link, .. } = b.listen_until("the link", |said| matches!(said, Message::Link { .. })) else {
        panic!()
    };
    b.send_message(Message::Storm { link });
    let (number, doorbell) = a.device.must();
    assert_eq!((number, doorbell.is_none()), (2, true));
    // The doorbell comes back under another number.
    assert_eq!(a.doorbell().0, 3);
}

#[test]
fn b5_guest_that_notifies_and_scribbles_without_end_costs_little() {
    let daemon = Daemon::start(TRIO);
    let a = Vm::start(&daemon, "a");
    let before = daemon.resident();
    let began = std::time::Instant::now();
    let mut number = 1u64;
    while began.elapsed() < Duration::from_secs(1) {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        for at in [0x10u64, 0x18, 0x40, 0x80, 0x100, 0x108] {
            rustix::io::pwrite(&a.memory, &number.rotate_left(at as u32).to_le_bytes(), 4096 + at).unwrap();
        }
        a.ring_host();
    }
    let mut a = a;
    daemon.client().links();
    assert!(daemon.resident() < before + (8 << 20), "{before} became {}", daemon.resident());
    // And its messages are read again once they are valid.
    rustix::io::pwrite(&a.memory, &[0; 4096], 4096).unwrap();
    a.boot(3, 1);
}

#[test]
fn b13_links_of_the_configuration_come_and_go_with_it() {
    let with = format!("{TRIO}[[link]]\nbetween = [\"a\", \"b\"]\nsize = \"64KiB\"\n");
    let mut daemon = Daemon::start(&with);
    let rows = daemon.client().links();
    assert!(matches!(rows[..], [Message::LinkRow { size: 65536, .. }]), "{rows:?}");
    let (code, why) = daemon.client().refusal(common::remove("a", "b"));
    assert!(code == tombolo_control::code::DENIED && why.contains("take its [[link]] out of"), "{why}");
    daemon.kill();
    daemon.restart();
    assert_eq!(daemon.client().links(), rows);
    daemon.configure(TRIO);
    daemon.signal(Signal::HUP);
    until("the link goes", || daemon.client().links().is_empty().then_some(()));
}

#[test]
fn b13_rules_are_read_again_and_what_they_forbid_goes() {
    let daemon = Daemon::start(TRIO);
    let (a, _b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    let _ = a.doorbell();
    daemon.configure("[domain.a]\nthis is no configuration");
    daemon.signal(Signal::HUP);
    until("the mistake is told", || daemon.log().contains("tombolod.toml:2: ").then_some(()));
    assert_eq!(daemon.client().links().len(), 1, "a mistake changed something");
    daemon.configure("[domain.a]\n[domain.b]\n");
    daemon.signal(Signal::HUP);
    assert_eq!(a.device.must().0, 2, "the doorbell is taken back");
    until("the link goes", || daemon.client().links().is_empty().then_some(()));
    until("the regions go", || a.qmp.state().memories.is_empty().then_some(()));
}

#[test]
fn b8_b13_domain_that_is_no_longer_configured_keeps_no_doorbell_of_others() {
    let daemon = Daemon::start(TRIO);
    let (a, _b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    assert_eq!(a.doorbell().0, 2);
    daemon.configure("[domain.b]\n");
    daemon.signal(Signal::HUP);
    // A QEMU whose server goes away keeps what it was given.
    let (number, doorbell) = a.device.must();
    assert!(number == 2 && doorbell.is_none(), "the doorbell is not taken back: {number}");
    assert!(a.device.is_closed());
}

#[test]
fn b17_descriptors_that_are_used_up_cost_who_comes_and_nobody_else() {
    let daemon = Daemon::start(TRIO);
    let a = Vm::start(&daemon, "a");
    daemon.client().link("a", "b");
    daemon.allow_files(daemon.open_files() as u64 + 6);
    // Only the device of b takes more.
    assert!(Device::connect(daemon.path(), "b").is_closed());
    until("it is told", || daemon.log().contains("b: its QEMU cannot be served").then_some(()));
    assert_eq!(daemon.client().links().len(), 1);
    assert!(a.device.next(Duration::from_millis(1)).is_none(), "a was given up");
    daemon.allow_files(1024);
    let _b = Vm::start(&daemon, "b");
    assert_eq!(a.doorbell().0, 2);
}

#[test]
fn b16_store_without_a_free_descriptor_refuses_and_rests() {
    let (daemon, null) = (Daemon::start(TRIO), std::fs::File::open("/dev/null").unwrap());
    let store = || DescriptorStore::find(daemon.path(), false).unwrap();
    let (first, some) = (store(), [null.as_fd(); 20]);
    first.store_descriptors("some", &some).unwrap();
    let pid = daemon.store();
    let files = || std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64;
    common::allow_files(pid, files());
    let error = first.store_descriptors("more", &some).unwrap_err();
    assert!(is_refusal(&error) && error.to_string().contains("LimitNOFILE"), "{error}");
    // A client that waits finds no room. It costs no CPU time, and the connected client is served.
    let second = fd_passing::connect(&daemon.file("holder.socket"), SocketType::SEQPACKET).unwrap();
    let used = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<u64> = stat.rsplit(')').next().unwrap().split(' ').filter_map(|it| it.parse().ok()).collect();
        // The sum of utime and stime, which follow ten other numeric fields.
        fields[10] + fields[11]
    };
    let (began, before) = (std::time::Instant::now(), used());
    until("a while", || (began.elapsed() > Duration::from_millis(600)).then_some(()));
    assert!(used() - before < 20, "{} ticks of 60", used() - before);
    assert_eq!(first.all().unwrap().len(), 1);
    first.forget("some").unwrap();
    drop(second);
    common::allow_files(pid, 1024);
    store().store_descriptors("more", &some).unwrap();
}

#[test]
fn b13_configuration_that_cannot_be_met_in_full_ends_nothing() {
    let daemon = Daemon::start(TRIO);
    let a = Vm::start(&daemon, "a");
    std::fs::create_dir(daemon.file("d.ivshmem")).unwrap();
    daemon.configure(&format!("{TRIO}[domain.d]\n[domain.e]\n"));
    daemon.signal(Signal::HUP);
    until("it is told", || daemon.log().contains("d.ivshmem").then_some(()));
    until("the others have theirs", || daemon.file("e.ivshmem").exists().then_some(()));
    assert_eq!(daemon.client().links(), []);
    assert!(a.device.next(Duration::from_millis(1)).is_none(), "a was given up");
    // It is done once the reason is gone.
    std::fs::remove_dir(daemon.file("d.ivshmem")).unwrap();
    daemon.signal(Signal::HUP);
    Vm::start(&daemon, "d");
}
