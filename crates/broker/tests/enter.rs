// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Administrators of a host see what the brokers of its accounts report (B-20).

mod common;

use std::{io::Write, thread};

use common::{Client, Daemon, hello};
use tombolo_control::{Envelope, Message, Name, Seen, code};
use tombolo_domain::Rendezvous;

const USER: u32 = 12345;

/// Returns the listeners that the broker of an account reports, or the code of its refusal.
fn listeners(daemon: &Daemon, account: &str) -> Result<Vec<String>, u16> {
    let client = Client::connect_raw(daemon.path()).unwrap();
    client.send_message(0, hello());
    client.receive_message().unwrap();
    client.send_message(1, Message::Enter { account: account.parse().unwrap() });
    client.send_message(2, hello());
    match client.receive_message().unwrap().message {
        Message::Hello { name, .. } => assert_eq!(name.as_str(), account),
        Message::Refuse { code, .. } => return Err(code),
        other => panic!("{other:?}"),
    }
    client.send_message(3, Message::Look { at: Seen::Listeners, after: 0 });
    let mut found = Vec::new();
    while let Some(Envelope { message: Message::ListenerRow { service, user, .. }, .. }) = client.receive_message() {
        found.push(format!("{user} {service}"));
    }
    Ok(found)
}

#[test]
fn b20_root_enters_the_broker_of_each_account_and_nobody_else_does() {
    let test = "b20_root_enters_the_broker_of_each_account_and_nobody_else_does";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let config = common::TRIO.replace("[domain.a]", &format!("[account.alice]\nuser = {USER}\n[domain.a]"));
    let config = config.replace("[host]\n", &format!("[host]\ngroup = {USER}\n"));
    let daemon = Daemon::start(&config);
    let socket = tombolo_broker::host::paths::program_socket(daemon.path());
    let become_alice = || {
        rustix::thread::set_thread_res_gid(
            rustix::fs::Gid::from_raw(USER),
            rustix::fs::Gid::from_raw(USER),
            rustix::fs::Gid::from_raw(USER),
        )
        .unwrap();
        let user = rustix::fs::Uid::from_raw(USER);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
    };
    let listen = || {
        become_alice();
        tombolo_domain_ivshmem::VmDomain::through(socket).listen("hers").unwrap()
    };
    let _hers = thread::scope(|scope| scope.spawn(listen).join().unwrap());
    let host: Name = "host".parse().unwrap();
    assert_eq!(listeners(&daemon, "alice"), Ok(vec![format!("{USER} hers")]));
    assert_eq!(listeners(&daemon, host.as_str()), Ok(vec![]));
    assert_eq!(listeners(&daemon, "nobody"), Err(code::NOT_FOUND));
    // A user who may look at links is not an administrator.
    let asked = || {
        become_alice();
        listeners(&daemon, "alice")
    };
    assert_eq!(thread::scope(|scope| scope.spawn(asked).join().unwrap()), Err(code::DENIED));
}
