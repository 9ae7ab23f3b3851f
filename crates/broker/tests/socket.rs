// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients of every kind at the broker's socket, above all hostile ones (B-15).

mod common;

use std::{io::Write, os::fd::AsFd, process::Command};

use common::{Client, Daemon, TRIO, add, hello, until};
use tombolo_broker::fd_passing;
use tombolo_control::{Envelope, Form, Message, code};

#[test]
fn b15_client_that_does_not_say_hello_first_is_refused_and_closed() {
    let daemon = Daemon::start(TRIO);
    let client = Client::connect_raw(daemon.path()).unwrap();
    client.send_message(1, add("a", "b", 0));
    assert!(matches!(
        client.receive_message(),
        Some(Envelope { message: Message::Refuse { code: code::MALFORMED, .. }, .. })
    ));
    assert_eq!(client.receive_message(), None);
    assert_eq!(daemon.client().links(), []);
}

#[test]
fn b15_what_the_broker_cannot_do_is_refused_and_ends_nothing() {
    let daemon = Daemon::start(TRIO);
    let client = daemon.client();
    let (number, why) = client.refusal(Message::Listen { service: "sql".parse().unwrap() });
    assert_eq!(number, code::UNSUPPORTED);
    assert!(why.starts_with("this socket is for tools; programs use") && why.ends_with("broker.sock"), "{why}");
    assert_eq!(client.links(), []);
}

#[test]
fn b15_version_that_the_broker_does_not_speak_is_refused() {
    let daemon = Daemon::start(TRIO);
    let client = Client::connect_raw(daemon.path()).unwrap();
    let Message::Hello { epoch, boot, name, .. } = hello() else { panic!() };
    client.send_message(0, Message::Hello { version_min: 2, version_max: 9, epoch, boot, name });
    assert!(matches!(
        client.receive_message(),
        Some(Envelope { message: Message::Refuse { code: code::VERSION, .. }, .. })
    ));
}

#[test]
fn b1_b15_garbage_of_any_kind_ends_its_sender_alone() {
    let daemon = Daemon::start(TRIO);
    let patient = daemon.client();
    let files = daemon.open_files();
    let mut number = 1u64;
    for round in 0..500usize {
        let client = Client::connect_raw(daemon.path()).unwrap();
        if round % 2 == 0 {
            client.send_message(0, hello());
            client.receive_message().unwrap();
        }
        let bytes: Vec<u8> = (0..round * 4 % 1500 + 1)
            .map(|_| {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (number >> 33) as u8
            })
            .collect();
        let _ = fd_passing::send(&client.socket, &bytes, &[]);
        if round % 3 == 0 {
            while client.receive_message().is_some() {}
        }
    }
    assert_eq!(patient.links(), []);
    until("their descriptors go", || (daemon.open_files() <= files + 1).then_some(()));
}

#[test]
fn b15_descriptors_that_nobody_asked_for_are_closed() {
    let daemon = Daemon::start(TRIO);
    daemon.client();
    let files = until("at rest", || Some(daemon.open_files()));
    for _ in 0..20 {
        let client = Client::connect_raw(daemon.path()).unwrap();
        client.send_message(0, hello());
        client.receive_message().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let many: Vec<_> = (0..60).map(|_| null.as_fd()).collect();
        let list = Envelope { serial: 1, message: Message::List { what: tombolo_control::What::Links } };
        let _ = fd_passing::send(&client.socket, &list.encode(), &many);
        assert_eq!(client.receive_message(), None);
    }
    until("they are closed", || (daemon.open_files() <= files + 1).then_some(()));
}

#[test]
fn b15_many_silent_clients_keep_nobody_out_for_long() {
    let daemon = Daemon::start(TRIO);
    let silent: Vec<_> = (0..100).filter_map(|_| Client::connect_raw(daemon.path())).collect();
    assert_eq!(silent.len(), 100);
    // Their time to send Hello ends, and the next client gets its turn.
    assert_eq!(daemon.client().links(), []);
}

#[test]
fn b15_client_that_asks_and_does_not_read_is_given_up() {
    let daemon = Daemon::start(TRIO);
    let (deaf, before) = (daemon.client(), daemon.resident());
    rustix::io::ioctl_fionbio(&deaf.socket, true).unwrap();
    let form = Form::Libvirt;
    for _ in 0..10_000 {
        deaf.send_message(1, Message::Snippet { form, domain: "a".parse().unwrap() });
    }
    assert_eq!(daemon.client().links(), []);
    assert!(daemon.resident() < before + (8 << 20));
}

#[test]
fn b15_sockets_are_for_their_users_and_groups_alone() {
    let test = "b15_sockets_are_for_their_users_and_groups_alone";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can give a socket to a group");
        return;
    }
    use std::os::unix::fs::MetadataExt;
    let daemon = Daemon::start(&TRIO.replace("[host]", "[host]\ngroup = 54321"));
    let meta = std::fs::metadata(tombolo_broker::host::paths::control_socket(daemon.path())).unwrap();
    assert_eq!((meta.mode() & 0o777, meta.gid()), (0o660, 54321));
    assert_eq!(std::fs::metadata(daemon.file("a.ivshmem")).unwrap().mode() & 0o777, 0o600);
    assert_eq!(std::fs::metadata(daemon.file("holder.socket")).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn b15_users_of_the_group_may_look_and_change_nothing() {
    let test = "b15_users_of_the_group_may_look_and_change_nothing";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let daemon = Daemon::start(&TRIO.replace("[host]", "[host]\ngroup = 54321"));
    let folder = daemon.path().to_owned();
    let somebody = std::thread::spawn(move || {
        use rustix::{fs::Gid, fs::Uid, thread};
        let (user, group) = (Uid::from_raw(12345), Gid::from_raw(54321));
        thread::set_thread_groups(&[]).unwrap();
        thread::set_thread_res_gid(group, group, group).unwrap();
        thread::set_thread_res_uid(user, user, user).unwrap();
        assert!(fd_passing::connect(&folder.join("a.ivshmem"), rustix::net::SocketType::STREAM).is_err());
        assert!(fd_passing::connect(&folder.join("holder.socket"), rustix::net::SocketType::SEQPACKET).is_err());
        let client = Client::try_connect(&folder).unwrap();
        assert_eq!(client.links(), []);
        for change in [add("a", "b", 0), common::remove("a", "b"), snippet()] {
            let (number, why) = client.refusal(change);
            assert_eq!((number, why.as_str()), (code::DENIED, "user 12345 may look, and change nothing: ask root"));
        }
    });
    somebody.join().unwrap();
}

fn snippet() -> Message {
    Message::Snippet { form: Form::Qemu, domain: "a".parse().unwrap() }
}

#[test]
fn tombolod_check_tells_the_mistake_and_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.toml");
    let check = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_tombolod")).arg("--check").arg(&path).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = check(TRIO);
    assert!(code == 0 && said.contains("3 domains, 2 rules"), "{said}");
    let (code, said) = check("[domain.z]\nvectors = 17\n[domain.a]\nmemory = \"x\"\nvectors = 0\n");
    let lines: Vec<_> = said.lines().filter_map(|line| line.rsplit(".toml:").next()?.split(':').next()).collect();
    assert_eq!((code, lines), (2, vec!["2", "4", "5"]), "{said}");
    let (code, said) = check("[domain.a]\nmemory = 5\n");
    assert!(code == 2 && said.starts_with(&format!("tombolod: {}:2: invalid type", path.display())), "{said}");
}

#[test]
fn second_broker_in_one_folder_is_refused() {
    let daemon = Daemon::start(TRIO);
    let output = Command::new(env!("CARGO_BIN_EXE_tombolod"))
        .arg("--config")
        .arg(daemon.file("tombolod.toml"))
        .arg("--state")
        .arg(daemon.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("another process has"), "{said}");
    assert_eq!(daemon.client().links(), []);
}
