// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine learns of a rule for a network through the host's broker, a process as it ships, and through the guest's
//! broker (B-28).

mod common;

use std::{io::Write, path::Path, thread};

use common::{Client, Daemon, Vm, host::Guest, until};
use rustix::process::{Signal, Uid};
use tombolo_control::{Message, NetRole, Seen, code};

const MACHINES: &str = "[domain.a]\n[domain.b]\n";
const NET: &str = "[[net]]\nname = \"tmb0\"\ndomains = [\"a\", \"b\"]\nmtu = 9000\n\
                   addresses = { a = \"10.9.0.1/24\", b = \"10.9.0.2/24\" }\n";

/// Returns the answers of the guest's broker at `socket` to a program.
fn ask(socket: &Path, question: Message) -> Vec<Message> {
    Client::of_socket(socket).ask(question)
}

/// Returns the interfaces that the guest is to have, if its broker knows them.
fn nets(guest: &Guest) -> Option<Vec<Message>> {
    let rows = ask(&guest.socket, Message::Look { at: Seen::Nets, after: 0 });
    match &rows[..] {
        [Message::Refuse { code: code::FAILED, reason }] => {
            assert!(reason.to_string().contains("has not said yet"), "{reason}");
            None
        }
        _ => Some(rows),
    }
}

/// Returns the rows that the machine a gets for [`NET`].
fn interfaces() -> Vec<Message> {
    let mapped = |last| std::net::Ipv4Addr::new(10, 9, 0, last).to_ipv6_mapped().octets();
    let (interface, peer, service) = ("tmb0".parse().unwrap(), "b".parse().unwrap(), "net.tmb0".parse().unwrap());
    let (role, own, theirs) = (NetRole::Listen, mapped(1), mapped(2));
    let (network, own_mac, their_mac) = ("".into(), [0; 6], [0; 6]);
    let (at, mtu, prefix) = (1, 9000, 120);
    vec![Message::Net { at, interface, peer, service, role, mtu, own, prefix, theirs, network, own_mac, their_mac }]
}

#[test]
fn b28_machine_is_told_of_its_interfaces_and_of_none_when_the_rule_goes() {
    let daemon = Daemon::start(&format!("{MACHINES}{NET}"));
    let vm = Vm::start(&daemon, "a");
    let guest = Guest::start(&daemon, &vm, 1);
    until("it is told", || nets(&guest).filter(|rows| *rows == interfaces()));
    // The rule stands for a link as well.
    assert_eq!(daemon.client().links().len(), 1);
    assert_eq!(ask(&guest.socket, Message::Look { at: Seen::Nets, after: 1 }), []);
    daemon.configure(MACHINES);
    daemon.signal(Signal::HUP);
    until("it is told of none", || nets(&guest).filter(Vec::is_empty));
    until("the link goes", || daemon.client().links().is_empty().then_some(()));
    daemon.configure(&format!("{MACHINES}{NET}"));
    daemon.signal(Signal::HUP);
    until("it is told again", || nets(&guest).filter(|rows| *rows == interfaces()));
}

#[test]
fn b28_broker_that_begins_anew_says_nothing_before_it_knows_and_the_same_then() {
    let mut daemon = Daemon::start(&format!("{MACHINES}{NET}"));
    let vm = Vm::start(&daemon, "a");
    let mut guest = Guest::start(&daemon, &vm, 1);
    until("it is told", || nets(&guest).filter(|rows| *rows == interfaces()));
    // Without the host's broker, the guest's broker still knows what it knew.
    daemon.kill();
    assert_eq!(nets(&guest), Some(interfaces()));
    daemon.restart();
    assert_eq!(nets(&guest), Some(interfaces()));
    // Another broker in the guest knows nothing, and never reports that there are none.
    guest.forget();
    drop(guest);
    let guest = Guest::start(&daemon, &vm, 1);
    until("it is told", || {
        let rows = nets(&guest)?;
        assert_eq!(rows, interfaces());
        Some(())
    });
}

#[test]
fn b28_services_of_interfaces_are_for_root_alone() {
    let test = "b28_services_of_interfaces_are_for_root_alone";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let daemon = Daemon::start(&format!("{MACHINES}{NET}"));
    let vm = Vm::start(&daemon, "a");
    let guest = Guest::start(&daemon, &vm, 1);
    until("it is told", || nets(&guest).filter(|rows| *rows == interfaces()));
    let listen = |service: &str| Message::Listen { service: service.parse().unwrap() };
    let (peer, service, offset, len, channel) = ("b".parse().unwrap(), "net.tmb0".parse().unwrap(), 0, 0, 0);
    let questions = [listen("net.tmb0"), Message::Connect { peer, service, offset, len, channel }];
    for path in guest.socket.ancestors().take(2) {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    }
    let socket = guest.socket.clone();
    let answers = thread::spawn(move || {
        let user = Uid::from_raw(54321);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        questions.map(|question| ask(&socket, question))
    });
    for answer in answers.join().unwrap() {
        let [Message::Refuse { code: code::DENIED, reason }] = &answer[..] else { panic!("{answer:?}") };
        assert!(reason.to_string().contains("for root alone"), "{reason}");
    }
    assert_eq!(ask(&guest.socket, listen("net.tmb0")), []);
}
