// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Failures in the broker, or beside it: a full disk, too few descriptors, machines and accounts that go. Each affects
//! those whom it concerns, and nobody else.

mod common;

use std::{fs, io::Write, os::fd::OwnedFd, thread, time::Duration};

use common::{
    Client, Daemon, Device, TWO, Vm, add, allow_files,
    by_hand::{ByHand, receive_message},
    host::{Guest, PAIR, World, patience},
    remove, until,
};
use rustix::{
    fs::Uid,
    net::{Shutdown, SocketType},
    process::Signal,
};
use tombolo_broker::{fd_passing, host::paths::program_socket};
use tombolo_channel::{Backends, Ending, Messages, Options};
use tombolo_control::{Envelope, LinkState, Message, code};
use tombolo_domain::Rendezvous;

const USER: u32 = 12345;

#[test]
fn child_process() {
    common::host::play();
}

fn is_up(daemon: &Daemon, end: &str) -> Option<()> {
    let rows = daemon.client().links();
    let is = |row: &Message| matches!(row, Message::LinkRow { a, state: LinkState::Up, .. } if a.as_str() == end);
    rows.iter().any(is).then_some(())
}

#[test]
fn b16_broker_that_cannot_save_its_state_goes_on_with_what_it_has_and_begins_nothing_new() {
    let mut daemon = Daemon::start(TWO);
    let a = Vm::start(&daemon, "a");
    daemon.client().link("a", "host");
    until("the link is up", || is_up(&daemon, "a"));
    // Has the effect of a full disk, for any user: the new file cannot be written.
    let blocked = daemon.file("state.json.new");
    // Not during a save.
    let block = || until("nothing is saved", || fs::create_dir(&blocked).ok());
    block();
    let (number, why) = daemon.client().refusal(add("b", "host", 0));
    assert!(number == code::FAILED && why.contains("cannot be saved"), "{number} {why}");
    assert!(Device::connect(daemon.path(), "b").is_closed(), "a QEMU would be lost with this broker");
    is_up(&daemon, "a").expect("what is there goes on");
    // The next broker begins all the same, though a machine went meanwhile.
    fs::remove_dir(&blocked).unwrap();
    let b = Vm::start(&daemon, "b");
    until("both are written down", || {
        fs::read_to_string(daemon.file("state.json")).unwrap().contains("\"b\"").then_some(())
    });
    block();
    daemon.kill();
    drop(b);
    a.qmp.forget_client();
    daemon.restart();
    until("the link is up", || is_up(&daemon, "a"));
    // The link is removed all the same; the descriptor store keeps its memory for the state that still lists it.
    let (number, why) = daemon.client().refusal(remove("a", "host"));
    assert!(number == code::FAILED && why.contains("tried again"), "{number} {why}");
    assert_eq!(daemon.client().links().len(), 1, "its memory is not given back yet");
    assert!(daemon.kept().iter().any(|key| key.starts_with("memory/")));
    fs::remove_dir(&blocked).unwrap();
    until("all of it is given back", || (daemon.client().links().is_empty()).then_some(()));
    until("the descriptor store forgets it", || {
        (daemon.kept().iter().all(|key| key.starts_with("machine/a/"))).then_some(())
    });
    let log = daemon.log();
    assert!(log.contains("nothing new is begun") && log.contains("saved again"), "{log}");
    let _b = Vm::start(&daemon, "b");
    daemon.client().link("b", "host");
    until("the link is up", || is_up(&daemon, "b"));
}

#[test]
fn b15_account_whose_broker_fails_goes_on_with_the_connections_that_it_has() {
    let world = World::new();
    let options = Options::new().spin(Duration::ZERO);
    let [host, guest] = [&world.host, &world.guest.domain].map(|domain| Backends::new().with(domain.clone()));
    let address = format!("vm:{}", world.service("host")).parse().unwrap();
    let mut listener = host.listen::<Messages>(&address, &options).unwrap();
    let accepts = thread::spawn(move || listener.accept().unwrap());
    let (mut questions, _replies) = guest.connect::<Messages>(&address, &options).unwrap().into_split();
    let (_questions, mut heard) = accepts.join().unwrap().into_split();
    // A process may not even poll more descriptors than it may have.
    let pid = world.daemon.pid();
    allow_files(pid, 2);
    let refused = world.guest.domain.connect(&world.service("host"), common::host::patience());
    assert!(refused.is_err());
    until("its broker fails", || world.daemon.log().contains("programs of host are not served").then_some(()));
    allow_files(pid, 4096);
    world.meet();
    questions.send(b"still there").unwrap();
    let mut message = [0; 64];
    assert_eq!(heard.recv(&mut message).unwrap(), Some(11));
}

#[test]
fn v7_programs_of_the_host_hear_of_a_machine_that_went_while_no_broker_was_there() {
    let mut world = World::new();
    let options = Options::new().spin(Duration::ZERO);
    let [host, guest] = [&world.host, &world.guest.domain].map(|domain| Backends::new().with(domain.clone()));
    let address = format!("vm:{}", world.service("host")).parse().unwrap();
    let mut listener = host.listen::<Messages>(&address, &options).unwrap();
    let waits = thread::spawn(move || {
        let (_sender, mut receiver) = listener.accept().unwrap().into_split();
        let received = receiver.recv(&mut [0; 64]).map(drop);
        (received, receiver.ending())
    });
    let client = guest.connect::<Messages>(&address, &options).unwrap();
    let by_hand = ByHand::listen(&world.socket(), "kept");
    let _connected = world.guest.domain.connect("host/kept", patience()).unwrap();
    let descriptors = by_hand.accept();
    world.daemon.kill();
    world.guest.forget();
    rustix::net::shutdown(&world.vm.device.socket, Shutdown::Both).unwrap();
    world.vm.qmp.forget_client();
    world.daemon.restart();
    until("who waits is woken", || waits.is_finished().then_some(()));
    let (received, ending) = waits.join().unwrap();
    assert_eq!(ending, Some(Ending::DomainGone), "{received:?}");
    drop(client);
    // A program that keeps the connection until the machine is there again learns that this is another incarnation.
    world.vm = Vm::start(&world.daemon, "a");
    world.vm.qmp.state().unsealed = true;
    while !matches!(receive_message(&descriptors[0]).expect("it hears").0, Message::Close {}) {}
    assert!(receive_message(&descriptors[0]).is_none(), "and that is the end");
    until("nothing is kept", || (!world.daemon.kept().iter().any(|key| key.starts_with("call/"))).then_some(()));
}

/// A machine `a` with a link with the account `alice`, and a program of the account that has a connection with it.
struct Alice {
    daemon: Daemon,
    vm: Vm,
    guest: Guest,
    program: ByHand,
    connection: Vec<OwnedFd>,
    generation: u32,
}

/// Makes this thread a thread of another user.
fn become_user(user: u32) {
    let user = Uid::from_raw(user);
    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
}

impl Alice {
    fn config(user: u32) -> String {
        let config = PAIR.replace(r#"["a", "host"]"#, r#"["a", "alice"]"#);
        format!("{config}[account.alice]\nuser = {user}\n")
    }

    fn new() -> Self {
        let daemon = Daemon::start(&Self::config(USER));
        let vm = Vm::start(&daemon, "a");
        vm.qmp.state().unsealed = true;
        let guest = Guest::start(&daemon, &vm, 1);
        let (_, generation) = guest.plug(&daemon, &vm);
        let socket = program_socket(daemon.path());
        let listens = || {
            become_user(USER);
            ByHand::listen(&socket, "hers")
        };
        let program = thread::scope(|scope| scope.spawn(listens).join().unwrap());
        let connected = until("the brokers meet", || guest.domain.connect("alice/hers", patience()).ok());
        let connection = program.accept();
        drop(connected);
        assert!(daemon.kept().iter().any(|key| key.starts_with("call/")));
        Self { daemon, vm, guest, program, connection, generation }
    }

    /// Checks that all that the account has of the link ends, and that no broker keeps it.
    fn has_nothing(&self) {
        while receive_message(&self.connection[0]).is_some() {}
        while self.program.receive_message().is_some() {}
        until("nothing is kept", || (!self.daemon.kept().iter().any(|key| key.starts_with("call/"))).then_some(()));
    }

    /// Checks that the machine's link with the account has other memory now.
    fn has_new_memory(&self) {
        until("there is new memory", || {
            let rows = self.daemon.client().links();
            let is_new = |row: &Message| matches!(row, Message::LinkRow { generation, state: LinkState::Up, .. } if *generation > self.generation);
            rows.iter().any(is_new).then_some(())
        });
    }

    fn is_skipped(test: &str) -> bool {
        let skip = !rustix::process::geteuid().is_root();
        if skip {
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        }
        skip
    }
}

#[test]
fn b11_account_that_becomes_another_users_leaves_nothing_of_it_to_who_had_it() {
    if Alice::is_skipped("b11_account_that_becomes_another_users_leaves_nothing_of_it_to_who_had_it") {
        return;
    }
    for is_away in [false, true] {
        let mut alice = Alice::new();
        if is_away {
            alice.daemon.kill();
        }
        alice.daemon.configure(&Alice::config(USER + 1));
        if is_away {
            alice.vm.qmp.forget_client();
            alice.daemon.restart();
        } else {
            alice.daemon.signal(Signal::HUP);
        }
        alice.has_nothing();
        alice.has_new_memory();
        alice.guest.forget();
    }
}

#[test]
fn b11_b16_account_that_is_no_more_leaves_no_connection_to_anybody() {
    if Alice::is_skipped("b11_b16_account_that_is_no_more_leaves_no_connection_to_anybody") {
        return;
    }
    for is_away in [false, true] {
        let mut alice = Alice::new();
        if is_away {
            alice.daemon.kill();
        }
        alice.daemon.configure("[domain.a]\n");
        if is_away {
            alice.vm.qmp.forget_client();
            alice.daemon.restart();
        } else {
            alice.daemon.signal(Signal::HUP);
        }
        alice.has_nothing();
        alice.guest.forget();
    }
}

/// Returns the number of page faults so far of the thread that serves all.
fn faults(daemon: &Daemon) -> u64 {
    let pid = daemon.pid();
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).unwrap();
    let behind_name = stat.rsplit_once(')').unwrap().1;
    behind_name.split_whitespace().nth(7).unwrap().parse().unwrap()
}

#[test]
fn b17_region_of_the_host_is_mapped_beside_the_thread_that_serves_all() {
    // Regions of 128 MiB have 32,768 pages.
    let world = World::new();
    let had = faults(&world.daemon);
    assert!(had < 16_384, "{had} pages");
}

#[test]
fn b15_users_without_a_number_are_nobodys_account() {
    let test = "b15_users_without_a_number_are_nobodys_account";
    let skip = |what: &str| _ = writeln!(std::io::stderr(), "SKIP {test} (needs {what}): it cannot be had here");
    if !rustix::process::geteuid().is_root() {
        return skip("root");
    }
    let under = ["unshare", "--user", "--map-root-user"];
    let tried = std::process::Command::new(under[0]).args(&under[1..]).arg("true").status();
    if !tried.is_ok_and(|status| status.success()) {
        return skip("userns");
    }
    let number = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap();
    let mut daemon = Daemon::new(&format!("{TWO}[account.everybody]\nuser = {}\n", number.trim()));
    daemon.under = under.to_vec();
    daemon.restart();
    let socket = program_socket(daemon.path());
    let asks = || {
        become_user(USER);
        let program = fd_passing::connect(&socket, SocketType::SEQPACKET).unwrap();
        let said = Envelope { serial: 0, message: common::hello() }.encode();
        fd_passing::send(&program, &said, &[]).unwrap();
        receive_message(&program).map(|(message, _)| message)
    };
    let answer = thread::scope(|scope| scope.spawn(asks).join().unwrap());
    assert!(matches!(answer, Some(Message::Refuse { code: code::DENIED, .. })), "{answer:?}");
    // Canary: a user with a number is served.
    assert!(Client::try_connect(daemon.path()).is_some());
}
