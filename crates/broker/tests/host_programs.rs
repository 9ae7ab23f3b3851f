// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TCP connections between programs of the host and of a machine: found by their brokers and joined like those of two
//! machines (S-18, S-21, B-22, B-23). The host's broker is the process that ships, in a network namespace of its own.

mod common;

use std::{
    env,
    io::Write,
    process::{Command, Stdio},
    thread,
    time::Instant,
};

use common::{
    Daemon,
    host::{PAIR, World},
    remove,
    tcp::{NUMBERS, Program, SOON, address, both_joined, mirrored, pairs_between, talk, until_joined, until_near},
};
use tombolo_domain_ivshmem::VmDomain;
use tombolo_sockets::connection::Stage;

const OF_A: &str = "10.0.0.1";
const OF_HOST: &str = "10.0.0.254";
const OF_CONTAINER: &str = "10.0.0.77";
/// Address of the machine, and of a container on the host: two networks may have the same addresses.
const TWIN: &str = "10.0.0.99";

/// Command that executes the host's broker where the host can be reached at that address.
const UNDER: [&str; 5] =
    ["unshare", "-rn", "sh", "-c", "ip link set lo up && ip addr add 10.0.0.254/32 dev lo && exec \"$0\" \"$@\""];

#[test]
fn child_process() {
    common::host::play();
}

/// Returns a host and a machine that know where each other are; `None` where the kernel allows no namespace.
fn world(test: &str, config: &str, link: impl FnOnce(&Daemon)) -> Option<World> {
    if !Command::new(UNDER[0]).args(&UNDER[1..]).arg("true").status().is_ok_and(|status| status.success()) {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs netns): it cannot be had here");
        return None;
    }
    let mut daemon = Daemon::new(config);
    daemon.under = UNDER.to_vec();
    daemon.restart();
    let world = World::start_at(daemon, Some([OF_A, TWIN].map(address).into()), link);
    until_near(&world.host, address(OF_A));
    until_near(&world.guest.domain, address(OF_HOST));
    Some(world)
}

fn pair_of(domains: [&VmDomain; 2], numbers: [Option<[u32; 2]>; 2], addresses: [&str; 2]) -> (Program, Program) {
    let (mut clients, mut servers) = pairs_between(domains, &[numbers], addresses);
    (clients.remove(0), servers.remove(0))
}

/// Returns a client in the machine and a server on the host, or the other way round.
fn pair(world: &World, to_host: bool) -> (Program, Program) {
    let [host, guest] = [&world.host, &world.guest.domain];
    match to_host {
        true => pair_of([guest, host], mirrored(NUMBERS), [OF_A, OF_HOST]),
        false => pair_of([host, guest], mirrored(NUMBERS), [OF_HOST, OF_A]),
    }
}

#[test]
fn s21_programs_of_host_and_machine_are_joined_whoever_connects_and_every_byte_arrives_once() {
    let test = "s21_programs_of_host_and_machine_are_joined_whoever_connects_and_every_byte_arrives_once";
    let Some(world) = world(test, PAIR, |_| ()) else { return };
    for to_host in [true, false] {
        let (mut client, mut server) = pair(&world, to_host);
        let mut at = 0;
        until_joined(&mut client, &mut server, &mut at);
        talk(&mut client, &mut server, &mut at, 200, |_, _| false);
        let before = client.kernel().counts(-1, true).unwrap().counts.written;
        talk(&mut client, &mut server, &mut at, 200, |_, _| false);
        assert_eq!(client.kernel().counts(-1, true).unwrap().counts.written, before, "TCP carries some of it still");
    }
}

/// Returns a pair that is joined, and the number of bytes that went between them.
fn joined(world: &World, to_host: bool) -> (Program, Program, u64) {
    let (mut client, mut server) = pair(world, to_host);
    let mut at = 0;
    until_joined(&mut client, &mut server, &mut at);
    // Each direction moves with its next bytes.
    talk(&mut client, &mut server, &mut at, 50, |_, _| false);
    (client, server, at)
}

#[test]
fn s21_connections_of_a_link_with_the_host_that_is_removed_go_on_over_tcp() {
    let test = "s21_connections_of_a_link_with_the_host_that_is_removed_go_on_over_tcp";
    let config = PAIR.split("[[link]]").next().unwrap().replace("[host]", "[host]\nleave = \"20s\"");
    for to_host in [true, false] {
        let Some(world) = world(test, &config, |daemon| daemon.client().link("a", "host")) else { return };
        let (mut client, mut server, mut at) = joined(&world, to_host);
        let client_of_broker = world.daemon.client();
        let removal = thread::spawn(move || client_of_broker.ask(remove("a", "host")));
        let deadline = Instant::now() + SOON;
        while !removal.is_finished() {
            talk(&mut client, &mut server, &mut at, 1, |_, _| false);
            [&client, &server].iter().for_each(|it| it.sleep());
            assert!(Instant::now() < deadline, "the link is not left");
        }
        removal.join().unwrap();
        talk(&mut client, &mut server, &mut at, 200, |_, _| false);
        assert!([&client, &server].iter().all(|it| it.connection.is_back_on_tcp()));
        assert!(world.daemon.log().contains("nobody had a connection on it any more"), "{}", world.daemon.log());
    }
}

/// The rule states who may connect, as for all connections (B-13).
#[test]
fn s21_b13_host_and_machine_are_joined_only_as_the_rules_let_them_connect() {
    let test = "s21_b13_host_and_machine_are_joined_only_as_the_rules_let_them_connect";
    let (all, links) = (PAIR.split("[[allow]]").next().unwrap(), PAIR.split("[[link]]").nth(1).unwrap());
    let rule = "[[allow]]\nfrom = \"a\"\nto = \"host\"\nservice";
    let config = format!("{all}{rule} = \"sockets-*\"\n{rule} = \"meet*\"\n[[link]]{links}");
    let Some(world) = world(test, &config, |_| ()) else { return };
    let (mut client, mut server) = pair(&world, false);
    talk(&mut client, &mut server, &mut 0, 1000, both_joined);
    assert!(!client.is_joined() && !server.is_joined());
    assert_eq!(client.connection.stage(), Stage::Candidate);
    joined(&world, true);
}

#[test]
fn s21_b16_broker_of_the_host_that_begins_anew_finds_and_what_is_joined_goes_on() {
    let test = "s21_b16_broker_of_the_host_that_begins_anew_finds_and_what_is_joined_goes_on";
    let Some(mut world) = world(test, PAIR, |_| ()) else { return };
    let (mut client, mut server, mut at) = joined(&world, true);
    let before = client.kernel().counts(-1, true).unwrap().counts.written;
    world.daemon.kill();
    talk(&mut client, &mut server, &mut at, 100, |_, _| false);
    world.daemon.restart();
    talk(&mut client, &mut server, &mut at, 100, |_, _| false);
    assert_eq!(client.kernel().counts(-1, true).unwrap().counts.written, before, "TCP carries some of it");
    world.meet();
    until_near(&world.host, address(OF_A));
    until_near(&world.guest.domain, address(OF_HOST));
    joined(&world, false);
}

/// Environment variable that names the broker's socket to the program.
const SOCKET: &str = "TOMBOLO_TEST_BROKER";

/// A program of the host in a namespace of its own, as in a container. It ends with its input.
struct Contained(std::process::Child);

impl Contained {
    fn start(world: &World, own: &[&str]) -> Self {
        let add: String = own.iter().map(|it| format!("ip addr add {it}/32 dev lo && ")).collect();
        let commands = format!("ip link set lo up && {add} exec \"$0\" \"$@\"");
        let mut command = Command::new("unshare");
        command.args(["-rn", "sh", "-c", &commands]).arg(env::current_exe().unwrap());
        command.args(["--exact", "child_looks_for_addresses", "--nocapture"]);
        command.env(SOCKET, world.socket()).stdin(Stdio::piped()).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let ended = self.0.wait();
        if !thread::panicking() {
            assert!(ended.is_ok_and(|status| status.success()));
        }
    }
}

/// The program's part; does nothing where no test started it.
#[test]
fn child_looks_for_addresses() {
    let Some(socket) = env::var_os(SOCKET) else { return };
    let host = VmDomain::through(socket);
    let mut finder = tombolo_domain::Rendezvous::peer_finder(&host, "sockets-00000000000c0de5").unwrap();
    let deadline = Instant::now() + SOON;
    let mut is_near = |text: &str| loop {
        if let Some(near) = finder.is_near(address(text)) {
            return near;
        }
        assert!(Instant::now() < deadline, "no answer");
    };
    // The machine's address, and its own, which the machine has as well.
    assert!(is_near(OF_A) && !is_near(TWIN));
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

#[test]
fn b22_addresses_of_a_namespace_in_which_a_program_looks_for_ends_are_told_and_are_its_own() {
    let test = "b22_addresses_of_a_namespace_in_which_a_program_looks_for_ends_are_told_and_are_its_own";
    let Some(world) = world(test, PAIR, |_| ()) else { return };
    let is_near = |text: &str| {
        let mut asks =
            tombolo_domain::Rendezvous::peer_finder(&world.guest.domain, "sockets-000000000000a5c5").unwrap();
        common::until("an answer", || asks.is_near(address(text)))
    };
    assert!(!is_near(OF_CONTAINER));
    until_near(&world.host, address(TWIN));
    let contained = Contained::start(&world, &[OF_CONTAINER, TWIN]);
    until_near(&world.guest.domain, address(OF_CONTAINER));
    drop(contained);
}
