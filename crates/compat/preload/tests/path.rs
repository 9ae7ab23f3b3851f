// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The path of the packets: one that drops them, one that translates their addresses, one with a proxy, and IPv6.

#[macro_use]
mod place;

use std::{fs, io::Write};

use place::{
    LONG, Place, SERVER, SERVER_6, Started, output, random_file,
    world::{CLIENTS, SERVERS, World, echo_at, interpreter, script},
};

/// Returns what the programs report when their packets are dropped, with the library or without.
fn cut(test: &str, dress: bool) -> Option<(Vec<String>, Place)> {
    let world = World::new(test, &[], Place::new)?;
    let mut command = world.namespaces.bare(CLIENTS, &interpreter());
    command.args(["-uB", &script("halfopen.py"), world.namespaces.name(SERVERS), "v0", SERVER]);
    if dress {
        world.place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    }
    let said = output(&mut command, &world.place.path("out"));
    Some((said.lines().map(str::to_owned).collect(), world.place))
}

#[test]
fn s12_ends_whose_packets_are_dropped_hear_what_tcp_says_when_it_gives_up() {
    let test = "s12_ends_whose_packets_are_dropped_hear_what_tcp_says_when_it_gives_up";
    let Some(((mut plain, _), (mut with, place))) = cut(test, false).zip(cut(test, true)) else { return };
    assert_eq!(plain.len(), 13, "{plain:?}");
    // Bytes in shared memory are not packets, so they are not dropped.
    assert_eq!((plain.pop().unwrap(), with.pop().unwrap()), ("crosses 0".into(), "crosses 20000".into()));
    for (plain, with) in plain.iter().zip(&with) {
        assert_eq!(with, plain, "{}", place.log());
    }
    assert_eq!(with.len(), plain.len());
    assert_eq!(place.log().matches("joined").count(), 2 * 13, "{}", place.log());
    place.assert_none_reset();
}

/// Moves streams over IPv6.
fn ipv6(world: &World) -> u64 {
    let words = [interpreter(), script("streams.py")];
    let words = [&words[0][..], &words[1]];
    echo_at(world, SERVER_6, &words, &words, LONG)
}

accelerated! {
    ipv6_goes_through_shared_memory, [], ipv6;
}

// ---- addresses that differ between the two endpoints

/// Checks what a server receives at its port 9000 of bytes sent to `address`; both programs have the library.
fn sent_to(world: &World, address: &str) {
    let sent = random_file(&world.place.path("from"), 24 << 20);
    let (from, to) = (world.text("from"), world.text("to"));
    let mut server = world.serve(9000, &["socat", "-u", "TCP-LISTEN:9000", &format!("CREATE:{to}")]);
    world.ask(&["socat", "-u", &format!("FILE:{from}"), &format!("TCP:{address}")]);
    assert!(server.finish().success());
    assert!(fs::read(to).unwrap() == sent, "{address}: {}", world.place.log());
    assert_eq!(world.place.received(), (sent.len() as u64, 0), "{}", world.place.log());
}

#[test]
fn s5_addresses_that_are_translated_leave_the_connection_on_tcp() {
    let test = "s5_addresses_that_are_translated_leave_the_connection_on_tcp";
    let Some(world) = World::new(test, &["socat", "iptables"], Place::new) else { return };
    for [chain, rule] in [
        ["OUTPUT", "-d 10.77.0.9 --dport 8000 -j DNAT --to-destination 10.77.0.1:9000"],
        ["POSTROUTING", "-d 10.77.0.1 --dport 9000 -j MASQUERADE --to-ports 30000-40000"],
    ] {
        let mut add = world.namespaces.bare(CLIENTS, "iptables");
        add.args(["-t", "nat", "-A", chain, "-p", "tcp"]).args(rule.split(' '));
        if !add.status().unwrap().success() {
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs NAT): the kernel has none");
            return;
        }
    }
    sent_to(&world, "10.77.0.9:8000");
}

#[test]
fn s5_proxy_in_between_leaves_both_connections_on_tcp() {
    let test = "s5_proxy_in_between_leaves_both_connections_on_tcp";
    let Some(world) = World::new(test, &["socat"], Place::new) else { return };
    // The proxy has no library, and sends from an address that differs from those of both endpoints.
    let to = format!("TCP:{SERVER}:9000");
    let mut proxy = world.namespaces.bare(SERVERS, "socat");
    let _proxy = Started::new(proxy.args(["-u", "TCP-LISTEN:8000", &to]));
    world.namespaces.wait_for(8000);
    sent_to(&world, &format!("{SERVER}:8000"));
}
