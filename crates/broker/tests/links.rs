// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links: memory, the order of sealing, incarnations, quarantine, quotas; with simulated QEMUs that have a control
//! socket.

mod common;

use std::os::fd::AsRawFd;

use common::{Daemon, TRIO, Vm, add, qmp, remove, until};
use rustix::fs::{Mode, OFlags, SealFlags};
use tombolo_control::{Envelope, Life, LinkState, Message, Way, code};

fn is_up(daemon: &Daemon) -> Option<u32> {
    daemon.client().links().into_iter().find_map(|row| match row {
        Message::LinkRow { state: LinkState::Up, generation, .. } => Some(generation),
        _ => None,
    })
}

fn quarantined(daemon: &Daemon) -> u64 {
    daemon
        .client()
        .links()
        .iter()
        .map(|row| if let Message::LinkRow { quarantined, .. } = row { *quarantined } else { 0 })
        .sum()
}

fn life_of(daemon: &Daemon, domain: &str) -> Life {
    let rows = daemon.client().domains();
    let found = rows.iter().find_map(|row| match row {
        Message::DomainRow { name, life, .. } if name.as_str() == domain => Some(*life),
        _ => None,
    });
    found.unwrap()
}

fn is_link(said: &Message) -> bool {
    matches!(said, Message::Link { .. })
}

/// Returns the names of the memories that a QEMU has.
fn memories(vm: &Vm) -> Vec<String> {
    vm.qmp.state().memories.keys().cloned().collect()
}

#[test]
fn b7_b10_each_end_gets_its_region_before_the_seal_and_the_peers_after() {
    let daemon = Daemon::start(TRIO);
    let (a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    until("the link is up", || is_up(&daemon));
    let inode = |vm: &Vm, name: &str| {
        let state = vm.qmp.state();
        let (_, memory) = state.memories.iter().find(|(id, _)| id.ends_with(name)).unwrap();
        let stat = rustix::fs::fstat(&memory.fd).unwrap();
        assert_eq!((stat.st_size, stat.st_blocks * 512), (1 << 20, 1 << 20));
        let sealed = memory.seals.contains(SealFlags::FUTURE_WRITE | SealFlags::SEAL);
        assert_eq!((memory.readonly, sealed), (name == "peer", name == "peer"), "{name} of {}", vm.name);
        assert!(memory.seals.contains(SealFlags::SHRINK | SealFlags::GROW));
        // By now nothing can newly gain write access to either memory, not even by a new open.
        let path = format!("/proc/self/fd/{}", memory.fd.as_raw_fd());
        let again = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        assert_eq!(rustix::io::pwrite(&again, &[1], 0), Err(rustix::io::Errno::PERM));
        let as_given = rustix::io::pwrite(&memory.fd, &[1], 0).unwrap_err();
        assert_eq!(as_given == rustix::io::Errno::BADF, memory.readonly, "{as_given}");
        stat.st_ino
    };
    assert_eq!((inode(&a, "own"), inode(&a, "peer")), (inode(&b, "peer"), inode(&b, "own")));
    assert_ne!(inode(&a, "own"), inode(&b, "own"));
}

#[test]
fn b7_b13_guests_are_told_of_their_link_and_its_rules() {
    let daemon = Daemon::start(TRIO);
    let (mut a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    a.boot(3, 1);
    daemon.client().link("a", "b");
    b.boot(4, 1);
    for (vm, peer, way, end) in [(&mut a, "b", Way::Out, 0), (&mut b, "a", Way::In, 1)] {
        let said = vm.listen_until("the link", |said| matches!(said, Message::Link { doorbell: 2, .. }));
        let Message::Link { peer: named, own, theirs, size, vectors, side, allows, .. } = said else { panic!() };
        assert_eq!((named.as_str(), size, vectors, side, allows), (peer, 1 << 20, 1, end, 1));
        assert_ne!(own, theirs);
        let said = vm.listen_until("the rule", |said| matches!(said, Message::Allow { .. }));
        assert!(
            matches!(&said, Message::Allow { way: said, service, .. } if *said == way && service.as_str() == "*"),
            "{said:?}"
        );
        vm.listen_until("the peer's life", |said| matches!(said, Message::Life { life: Life::Running, .. }));
    }
    assert_eq!(daemon.client().ask(remove("b", "a")), []);
    a.listen_until("the end of the link", |said| matches!(said, Message::Unlink { .. }));
    b.listen_until("the end of the link", |said| matches!(said, Message::Unlink { .. }));
}

#[test]
fn b6_guest_learns_from_the_host_what_it_is_called() {
    let mut daemon = Daemon::start(TRIO);
    let mut a = Vm::start(&daemon, "a");
    let you = |said: &Message| matches!(said, Message::You { .. });
    // The name by which it calls itself has no effect.
    a.name = "b".into();
    a.boot(3, 1);
    assert_eq!(a.listen_until("its name", you), Message::You { name: "a".parse().unwrap() });
    daemon.kill();
    daemon.restart();
    assert_eq!(a.listen_until("its name again", you), Message::You { name: "a".parse().unwrap() });
}

#[test]
fn b6_guest_that_does_not_begin_with_hello_is_told_nothing() {
    let daemon = Daemon::start(TRIO);
    let (mut a, _b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    let mut session =
        tombolo_control::Session::begin(tombolo_control::Path::Host, 7, &mut common::GuestBoxes(&a.memory)).unwrap();
    session.queue_message(&tombolo_control::Envelope::statement(Message::Storm { link: 1 }));
    until("the host's Hello and the guest's name", || {
        let mut boxes = common::GuestBoxes(&a.memory);
        let (event, _) = session.turn(&mut boxes).unwrap();
        a.ring_host();
        if matches!(event, Some(tombolo_control::Event::Began)) {
            session.queue_message(&tombolo_control::Envelope::statement(Message::Storm { link: 1 }));
        }
        let name = |said: &Envelope| matches!(said.message, Message::You { .. });
        matches!(event, Some(tombolo_control::Event::Said(said)) if name(&said)).then_some(())
    });
    until("the link is up", || is_up(&daemon));
    for _ in 0..50 {
        let (event, _) = session.turn(&mut common::GuestBoxes(&a.memory)).unwrap();
        assert!(event.is_none(), "{event:?}");
        a.ring_host();
        daemon.client().links();
    }
    // It is served again when it begins anew and behaves.
    a.boot(8, 1);
    a.listen_until("the link", is_link);
}

#[test]
fn b12_peer_is_told_of_pause_reset_and_the_death_of_a_qemu() {
    let daemon = Daemon::start(TRIO);
    let (mut a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    a.boot(3, 1);
    b.boot(4, 1);
    a.listen_until("the link", is_link);
    let mut expect = |life: Life| {
        a.listen_until(&format!("{life:?}"), |said| matches!(said, Message::Life { life: said, .. } if *said == life));
    };
    expect(Life::Running);
    for (event, life) in
        [("STOP", Life::Paused), ("RESUME", Life::Running), ("STOP", Life::Paused), ("RESUME", Life::Running)]
    {
        b.qmp.event(event);
        expect(life);
    }
    for event in ["GUEST_PANICKED", "RESET", "SHUTDOWN"] {
        b.qmp.event(event);
        until("it is over", || (life_of(&daemon, "b") == Life::DomainGone).then_some(()));
    }
    expect(Life::DomainGone);
    assert_eq!(life_of(&daemon, "c"), Life::DomainGone);
}

#[test]
fn b12_qemu_that_is_gone_is_told_at_once_and_its_data_stays_readable() {
    let daemon = Daemon::start(TRIO);
    let (mut a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    until("the link is up", || is_up(&daemon));
    a.boot(3, 1);
    a.listen_until("the link", is_link);
    let before = memories(&a);
    drop(b);
    until("b is gone", || (life_of(&daemon, "b") == Life::DomainGone).then_some(()));
    a.listen_until("the end of b", |said| matches!(said, Message::Life { life: Life::DomainGone, .. }));
    assert!(!a.heard.iter().any(|said| matches!(said, Message::Unlink { .. })), "{:?}", a.heard);
    assert_eq!(memories(&a), before, "what b had published was taken away with it");
}

#[test]
fn b10_b12_new_life_gets_new_memory_and_the_old_is_given_back() {
    let daemon = Daemon::start(TRIO);
    let (mut a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    a.boot(3, 1);
    b.boot(4, 1);
    let first = until("the link is up", || is_up(&daemon));
    let old = [memories(&a), memories(&b)].concat();
    // A broker that begins anew in the same boot changes nothing.
    b.boot(5, 1);
    b.listen_until("the link", is_link);
    assert_eq!(is_up(&daemon), Some(first));
    // A reset, and another boot.
    b.qmp.event("RESET");
    b.boot(6, 2);
    let second = until("the link is up with other memory", || is_up(&daemon).filter(|now| *now != first));
    assert_eq!(second, first + 1);
    until("the old memory is given back", || (quarantined(&daemon) == 0).then_some(()));
    assert!(memories(&a).iter().chain(&memories(&b)).all(|name| !old.contains(name)));
    assert_eq!(daemon.kept().iter().filter(|key| key.starts_with("memory/")).count(), 1);
    // And another QEMU.
    drop(b);
    let _b = Vm::start(&daemon, "b");
    until("the link is up once more", || is_up(&daemon).filter(|now| *now == second + 1));
}

#[test]
fn b11_memory_that_a_guest_keeps_is_quarantined_and_counted_until_it_goes() {
    let daemon = Daemon::start(&TRIO.replace("[domain.b]", "[domain.b]\nmemory = \"4MiB\""));
    let (a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    until("the link is up", || is_up(&daemon));
    b.qmp.state().stubborn = true;
    assert_eq!(daemon.client().ask(remove("a", "b")), []);
    until("a gives back", || memories(&a).is_empty().then_some(()));
    assert_eq!(quarantined(&daemon), 2 << 20);
    let by_b = |rows: Vec<Message>| matches!(&rows[..], [Message::LinkRow { state: LinkState::Leaving, note, .. }] if note.as_str() == "not given back by b");
    until("b alone has it", || by_b(daemon.client().links()).then_some(()));
    // The quarantined memory counts: there is room for one link more, and not for two.
    assert_eq!(daemon.client().ask(add("a", "b", 1 << 20)), []);
    assert_eq!(daemon.client().ask(remove("a", "b")), []);
    let (number, why) = daemon.client().refusal(add("a", "b", 2 << 20));
    assert_eq!(number, code::QUOTA, "{why}");
    // The guest releases the devices after all.
    let mut state = b.qmp.state();
    state.stubborn = false;
    for id in state.devices.keys().cloned().collect::<Vec<_>>() {
        qmp::Fake::delete(&mut state, &id);
    }
    drop(state);
    until("all is given back", || (quarantined(&daemon) == 0).then_some(()));
    assert!(daemon.kept().iter().all(|key| !key.starts_with("memory/")));
}

#[test]
fn b17_guest_that_begins_a_life_a_moment_makes_its_link_wait() {
    let daemon = Daemon::start(TRIO);
    let (a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    until("the link is up", || is_up(&daemon));
    a.qmp.state().stubborn = true;
    // Incarnations in quick succession share the memory that is made for them.
    let mut life = 0;
    let mut begin = || {
        life += 1;
        b.boot(life, life as u8);
    };
    until("the second memory is out of use", || {
        begin();
        (quarantined(&daemon) == 4 << 20).then_some(())
    });
    (0..10).for_each(|_| begin());
    assert_eq!(quarantined(&daemon), 4 << 20);
    assert_eq!(daemon.kept().iter().filter(|key| key.starts_with("memory/")).count(), 2);
    let mut state = a.qmp.state();
    state.stubborn = false;
    for id in state.devices.keys().cloned().collect::<Vec<_>>() {
        qmp::Fake::delete(&mut state, &id);
    }
    drop(state);
    until("the link is up", || is_up(&daemon));
}

#[test]
fn b10_b17_domain_whose_quota_is_full_waits_for_its_old_memory() {
    let daemon = Daemon::start(&TRIO.replace("[domain.b]", "[domain.b]\nmemory = \"2MiB\""));
    let (a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    let first = until("the link is up", || is_up(&daemon));
    b.boot(3, 1);
    b.listen_until("the link", is_link);
    b.qmp.state().stubborn = true;
    b.boot(4, 2);
    until("a gives back", || memories(&a).is_empty().then_some(()));
    assert_eq!((is_up(&daemon), quarantined(&daemon)), (None, 2 << 20));
    let rows = daemon.client().links();
    assert!(
        matches!(&rows[..], [Message::LinkRow { state: LinkState::Waiting, note, .. }, ..] if note.as_str().starts_with("it gets memory once")),
        "{rows:?}"
    );
    let mut state = b.qmp.state();
    state.stubborn = false;
    for id in state.devices.keys().cloned().collect::<Vec<_>>() {
        qmp::Fake::delete(&mut state, &id);
    }
    drop(state);
    assert_eq!(until("the link is up", || is_up(&daemon)), first + 1);
}

#[test]
fn b17_memory_that_a_neighbour_keeps_is_not_counted_against_who_gave_it_back() {
    let daemon = Daemon::start(&TRIO.replace("[domain.b]", "[domain.b]\nmemory = \"2MiB\""));
    let (a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    a.qmp.state().stubborn = true;
    let uses = |name: &str| {
        let rows = daemon.client().domains();
        rows.iter().find_map(|row| match row {
            Message::DomainRow { name: it, memory_used, .. } if it.as_str() == name => Some(*memory_used),
            _ => None,
        })
    };
    for _ in 0..3 {
        daemon.client().link("a", "b");
        until("the link is up", || is_up(&daemon));
        assert_eq!(daemon.client().ask(remove("a", "b")), []);
        until("b gives back", || memories(&b).is_empty().then_some(()));
        // The broker learns of it after b has released everything.
        until("all is given back", || (uses("b") == Some(0)).then_some(()));
    }
    assert_eq!(uses("a"), Some(6 << 20));
    b.boot(3, 1);
}

#[test]
fn b11_quarantine_outlives_the_broker_and_ends_with_the_qemu() {
    let mut daemon = Daemon::start(TRIO);
    let (_a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    until("the link is up", || is_up(&daemon));
    b.qmp.state().stubborn = true;
    daemon.client().ask(remove("a", "b"));
    daemon.kill();
    daemon.restart();
    assert_eq!(quarantined(&daemon), 2 << 20);
    drop(b);
    until("it ends with the QEMU", || (quarantined(&daemon) == 0).then_some(()));
}

#[test]
fn b16_broker_killed_at_any_moment_of_making_a_link_finishes_it() {
    let mut daemon = Daemon::start(TRIO);
    let (a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    // A guest's broker sends Hello to each broker of the host. These guests do so once, and their Hellos are saved in
    // turn (B-17).
    until("both Hellos are saved", || {
        let saved = std::fs::read_to_string(daemon.file("state.json")).unwrap_or_default();
        (saved.matches(r#""boot":["#).count() == 2).then_some(())
    });
    for delay in 0..16i64 {
        daemon.client().send_message(1, add("a", "b", 64 << 10));
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: delay * 400_000 };
        rustix::event::poll(&mut [], Some(&pause)).unwrap();
        daemon.kill();
        daemon.restart();
        let links = daemon.client().links();
        if links.is_empty() {
            daemon.client().link("a", "b");
        }
        until("the link is up", || is_up(&daemon));
        assert_eq!((memories(&a).len(), memories(&b).len()), (2, 2));
        for vm in [&a, &b] {
            for memory in vm.qmp.state().memories.values() {
                assert!(
                    rustix::fs::fcntl_get_seals(&memory.fd)
                        .unwrap()
                        .contains(SealFlags::FUTURE_WRITE | SealFlags::SEAL)
                );
            }
        }
        assert_eq!(daemon.client().ask(remove("a", "b")), []);
        until("all is given back", || {
            (memories(&a).is_empty() && memories(&b).is_empty() && quarantined(&daemon) == 0).then_some(())
        });
    }
}

#[test]
fn b16_broker_killed_amid_all_that_can_happen_loses_and_leaks_nothing() {
    let mut daemon = Daemon::start(TRIO);
    let (mut a, mut b) = (Vm::start(&daemon, "a"), Some(Vm::start(&daemon, "b")));
    let mut number = 0x5eed_u64;
    let mut random = move |below: u64| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (number >> 33) % below
    };
    let mut boots = 0;
    for round in 0..60u8 {
        for _ in 0..1 + random(3) {
            match random(5) {
                0 => daemon.client().send_message(1, add("a", "b", 64 << 10)),
                1 => daemon.client().send_message(1, remove("a", "b")),
                2 => drop(b.take()),
                3 if b.is_none() => b = Some(Vm::start(&daemon, "b")),
                3 | 4 => {
                    boots += 1;
                    a.boot(boots, round);
                }
                _ => unreachable!(),
            }
        }
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: random(4_000_000) as i64 };
        rustix::event::poll(&mut [], Some(&pause)).unwrap();
        daemon.kill();
        daemon.restart();
    }
    let b = b.unwrap_or_else(|| Vm::start(&daemon, "b"));
    if daemon.client().links().is_empty() {
        daemon.client().link("a", "b");
    }
    until("the link is up", || is_up(&daemon));
    until("all else is given back", || (quarantined(&daemon) == 0 && daemon.kept().len() == 3).then_some(()));
    until("no memory is left over", || (memories(&a).len() == 2 && memories(&b).len() == 2).then_some(()));
}

#[test]
fn b13_link_that_no_rule_allows_is_refused_with_the_remedy() {
    let daemon = Daemon::start(TRIO);
    let client = daemon.client();
    for (a, b, number, said) in [
        ("a", "c", code::DENIED, "no rule allows a and c anything: add an [[allow]] to"),
        ("b", "host", code::DENIED, "no rule allows b and host anything"),
        ("a", "a", code::DENIED, "no rule allows a and a anything"),
        ("a", "d", code::NOT_FOUND, "no domain is called d"),
    ] {
        let (refused, why) = client.refusal(add(a, b, 0));
        assert_eq!(refused, number, "{why}");
        assert!(why.starts_with(said), "{why}");
    }
    client.link("b", "a");
    assert_eq!(client.refusal(add("a", "b", 0)).0, code::EXISTS);
    assert_eq!(client.refusal(remove("a", "c")).0, code::NOT_FOUND);
    assert_eq!(client.refusal(add("a", "host", 3 << 20)).0, code::FAILED);
}

#[test]
fn b10_slot_that_became_free_is_not_used_at_once() {
    let daemon = Daemon::start(TRIO);
    let (a, _b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    let slots = || -> Vec<String> { a.qmp.state().devices.values().map(|(_, slot)| slot.clone()).collect() };
    let mut used = Vec::new();
    for turn in 0..16 {
        daemon.client().link("a", "b");
        until("the link is up", || is_up(&daemon));
        let now = slots();
        assert_eq!(now.len(), 2);
        // 28 slots, two for each link: the fifteenth link begins again with those of the first.
        let first = used.len().saturating_sub(26);
        assert!(now.iter().all(|slot| !used[first..].contains(slot)), "{turn}: {now:?} after {used:?}");
        used.extend(now);
        assert_eq!(daemon.client().ask(remove("a", "b")), []);
        until("the link is gone", || daemon.client().links().is_empty().then_some(()));
    }
}

#[test]
fn b10_slot_of_a_link_that_was_there_for_long_is_not_used_at_once_either() {
    let daemon = Daemon::start(&TRIO.replace("to = \"b\"", "to = \"*\""));
    let (a, _b, _c) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"), Vm::start(&daemon, "c"));
    let slots = || -> Vec<String> { a.qmp.state().devices.values().map(|(_, slot)| slot.clone()).collect() };
    let link = |peer| {
        daemon.client().link("a", peer);
        let up = |row: &Message| matches!(row, Message::LinkRow { state: LinkState::Up, b, .. } if b.as_str() == peer);
        until("the link is up", || daemon.client().links().iter().any(up).then_some(()));
    };
    let unlink = |peer| {
        let before = daemon.client().links().len();
        assert_eq!(daemon.client().ask(remove("a", peer)), []);
        until("the link is gone", || (daemon.client().links().len() < before).then_some(()));
    };
    link("b");
    let old = slots();
    for _ in 0..13 {
        link("c");
        unlink("c");
    }
    unlink("b");
    link("c");
    assert!(slots().iter().all(|slot| !old.contains(slot)), "{:?} after {old:?}", slots());
    // Nor does a conversation that broke off make it forget.
    let old = slots();
    unlink("c");
    let before = a.qmp.state().conversations;
    qmp::Fake::hang_up(&mut a.qmp.state());
    until("the broker is back", || (a.qmp.state().conversations > before).then_some(()));
    link("c");
    assert!(slots().iter().all(|slot| !old.contains(slot)), "{:?} after {old:?}", slots());
}

#[test]
fn b12_reset_that_is_told_late_ends_no_life_that_began_after_it() {
    let daemon = Daemon::start(TRIO);
    let (_a, mut b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    for life in [4, 5] {
        b.boot(life, life as u8);
        b.listen_until("the link", is_link);
    }
    // The broker, or QEMU, was slow: the guest was there again first.
    b.qmp.event_of("RESET", std::time::Duration::from_secs(60));
    b.qmp.event("STOP");
    until("it is paused", || (life_of(&daemon, "b") != Life::Running).then_some(()));
    assert_eq!(life_of(&daemon, "b"), Life::Paused);
    b.qmp.event("RESET");
    until("it is over", || (life_of(&daemon, "b") == Life::DomainGone).then_some(()));
}

/// A link's rules and its other messages are more than may wait in a box.
#[test]
fn b5_guest_is_told_all_of_more_rules_than_messages_may_wait() {
    let mut config = "[domain.a]\n[domain.b]\n[domain.c]\n[host]\nregion = \"64KiB\"\n".to_owned();
    for service in 0..140 {
        config += &format!("[[allow]]\nfrom = \"a\"\nto = \"*\"\nservice = \"s{service}\"\n");
    }
    let daemon = Daemon::start(&config);
    let (mut a, _b, _c) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"), Vm::start(&daemon, "c"));
    daemon.client().link("a", "b");
    daemon.client().link("a", "c");
    let up = |row: &Message| matches!(row, Message::LinkRow { state: LinkState::Up, .. });
    until("both are up", || (daemon.client().links().iter().filter(|row| up(row)).count() == 2).then_some(()));
    a.boot(3, 1);
    for _ in 0..2 {
        a.listen_until("a link", is_link);
        let last = |said: &Message| matches!(said, Message::Allow { service, .. } if service.as_str() == "s139");
        a.listen_until("its last rule", last);
        a.listen_until("the peer's life", |said| matches!(said, Message::Life { .. }));
    }
}

#[test]
fn b5_guest_that_was_paused_for_long_is_told_how_things_are_by_then() {
    let daemon = Daemon::start(TRIO);
    let (mut a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    a.boot(3, 1);
    a.listen_until("b's life", |said| matches!(said, Message::Life { life: Life::Running, .. }));
    for _ in 0..150 {
        for (event, life) in [("STOP", Life::Paused), ("RESUME", Life::Running)] {
            b.qmp.event(event);
            until("it is seen", || (life_of(&daemon, "b") == life).then_some(()));
        }
    }
    b.qmp.event("RESET");
    a.listen_until("what became of b", |said| matches!(said, Message::Life { life: Life::DomainGone, .. }));
    assert!(a.heard.len() < 10, "all that is over by then: {}", a.heard.len());
}

#[test]
fn b17_quotas_and_slots_are_told_before_they_are_hit() {
    let all = "[[allow]]\nfrom = \"*\"\nto = \"*\"\nservice = \"*\"\n";
    let config = format!(
        "[host]\nregion = \"1MiB\"\n[domain.a]\nmemory = \"4MiB\"\n[domain.b]\nlinks = 1\n[domain.c]\nmachine = \"q35\"\nports = 3\n[domain.d]\n{all}"
    );
    let daemon = Daemon::start(&config);
    let client = daemon.client();
    client.link("a", "b");
    let (number, why) = client.refusal(add("b", "d", 0));
    assert_eq!((number, why.as_str()), (code::QUOTA, "b has 1 links of 1"));
    let (number, why) = client.refusal(add("a", "d", 2 << 20));
    assert_eq!((number, why.as_str()), (code::QUOTA, "a uses 2 MiB of 4 MiB; the link would take 4 MiB"));
    client.link("c", "d");
    let (number, why) = client.refusal(add("c", "host", 0));
    assert_eq!(number, code::NO_SLOT);
    assert!(why.starts_with("c has 1 of 3 slots free, a link takes 2: raise `ports`"), "{why}");
    // QEMU's report of its bus is what counts.
    let d = Vm::start(&daemon, "d");
    d.qmp.state().foreign = (4..29).collect();
    until("d says what it has", || daemon.log().contains("d: QEMU connected").then_some(()));
    d.qmp.event("RESET");
    until("the bus is full", || {
        let full =
            |row: &Message| matches!(row, Message::DomainRow { name, slots_used: 27, .. } if name.as_str() == "d");
        client.domains().iter().any(full).then_some(())
    });
    let (number, why) = client.refusal(add("d", "host", 0));
    assert_eq!(number, code::NO_SLOT);
    assert!(why.contains("d has 1 of 28 slots free, a link takes 2: remove"), "{why}");
}

#[test]
fn accounts_and_the_host_are_listed_with_the_domains() {
    let daemon = Daemon::start(&format!("[account.alice]\nuser = 4711\n{TRIO}"));
    let rows: Vec<_> = daemon.client().domains();
    let row = |wanted: &str| {
        rows.iter().find_map(|row| match row {
            Message::DomainRow { name, life, slots, memory, note, .. } if name.as_str() == wanted => {
                Some((*life, *slots, *memory, note.to_string()))
            }
            _ => None,
        })
    };
    let here = |note: &str| Some((Life::Running, 0, 0, note.to_owned()));
    assert_eq!(row("alice"), here("programs of user 4711 here"));
    assert_eq!(row("host"), here("programs of root and of the broker's user here"));
    assert!(row("a").is_some_and(|(_, slots, memory, _)| slots > 0 && memory > 0), "{rows:?}");
}

#[test]
fn b8_link_with_the_host_has_a_region_each_way_and_a_doorbell_of_its_own() {
    let daemon = Daemon::start(TRIO);
    let mut a = Vm::start(&daemon, "a");
    daemon.client().link("a", "host");
    until("the link is up", || is_up(&daemon));
    a.boot(3, 1);
    let said = a.listen_until("the link", is_link);
    assert!(
        matches!(&said, Message::Link { peer, doorbell: 2, vectors: 1, .. } if peer.as_str() == "host"),
        "{said:?}"
    );
    let state = a.qmp.state();
    let peer = state.memories.iter().find(|(id, _)| id.ends_with("peer")).unwrap().1;
    assert!(peer.readonly && !peer.seals.contains(SealFlags::FUTURE_WRITE) && peer.seals.contains(SealFlags::SEAL));
    let own = state.memories.iter().find(|(id, _)| id.ends_with("own")).unwrap().1;
    assert!(rustix::fs::fcntl_get_seals(&own.fd).unwrap().contains(SealFlags::FUTURE_WRITE));
    drop(state);
    let (number, doorbell) = a.device.must();
    assert!(number == 2 && doorbell.is_some());
    assert!(a.device.next(std::time::Duration::from_millis(100)).is_none(), "a host has one vector");
}
