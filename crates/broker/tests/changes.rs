// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes that happen while a QEMU runs, and that it does not report by itself.

mod common;

use std::{io::Write, os::unix::fs::PermissionsExt, path::Path};

use common::{Daemon, TRIO, Vm, qmp::Fake, until};
use rustix::process::Signal;
use tombolo_control::{Life, LinkState, Message};

/// Returns the state of the only link, and the note on it.
fn link(daemon: &Daemon) -> (LinkState, String) {
    match &daemon.client().links()[..] {
        [Message::LinkRow { state, note, .. }] => (*state, note.to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn b10_link_that_waits_for_a_vhost_user_network_card_to_go_is_there_soon_after() {
    let mut daemon = Daemon::new(TRIO);
    daemon.options = vec!["--ask-again", "500"];
    daemon.restart();
    let (a, _b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    (a.qmp.state().shared, a.qmp.state().backend) = (true, true);
    daemon.client().link("a", "b");
    until("it is refused", || link(&daemon).1.contains("(a network card)").then_some(()));
    assert_eq!(link(&daemon).0, LinkState::Wanted);
    // QEMU has both regions, and its card was checked after that, so the broker has nothing left to ask it. QEMU sends
    // no event when the card goes.
    until("QEMU is quiet", || {
        let mut state = a.qmp.state();
        let is_quiet = state.devices.len() == 2 && state.last == "human-monitor-command";
        is_quiet.then(|| state.backend = false)
    });
    assert_eq!(link(&daemon).0, LinkState::Wanted);
    until("it is there", || (link(&daemon).0 == LinkState::Up).then_some(()));
}

/// Makes a control socket on which `user` listens.
fn listen_as(user: u32, path: &Path) -> Fake {
    let path = path.to_owned();
    let begun = std::thread::spawn(move || {
        let user = rustix::fs::Uid::from_raw(user);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        Fake::start(&path)
    });
    begun.join().unwrap()
}

#[test]
fn b10_b13_reload_that_names_another_user_counts_for_who_listens_already() {
    let test = "b10_b13_reload_that_names_another_user_counts_for_who_listens_already";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let path = folder.path().join("a.qmp");
    let config = |user: u32| format!("[domain.a]\nuser = {user}\nqmp = \"{}\"\n", path.display());
    let qemu = listen_as(12345, &path);
    let daemon = Daemon::start(&config(12345));
    let _a = Vm::start(&daemon, "a");
    let runs =
        |row: &Message| matches!(row, Message::DomainRow { life: Life::Running, name, .. } if name.as_str() == "a");
    until("it is asked", || daemon.client().domains().iter().any(runs).then_some(()));
    let before = qemu.state().conversations;
    let note = || {
        daemon.client().domains().into_iter().find_map(|row| match row {
            Message::DomainRow { name, note, .. } if name.as_str() == "a" => Some(note.to_string()),
            _ => None,
        })
    };
    let reload = |user: u32| {
        daemon.configure(&config(user));
        daemon.signal(Signal::HUP);
    };
    reload(54321);
    until("it is told nothing more", || note().filter(|note| note.contains("user 12345 listens there")));
    assert_eq!(qemu.state().conversations, before);
    reload(12345);
    until("it is asked again", || (qemu.state().conversations == before + 1).then_some(()));
}
