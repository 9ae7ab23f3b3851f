// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Describes networks: which machines have interfaces with each other, and what each machine is told (B-28).

use std::{collections::BTreeMap, net::IpAddr, str::FromStr, sync::OnceLock};

use sha2::{Digest, Sha256};
use tombolo_control::{Message, NETS_MAX, Name, NetRole, Reason, parse_ip};

/// Largest length of an interface's name in bytes, a limit of the kernel.
pub const INTERFACE_MAX: usize = 15;
/// The smallest MTU (N-5).
pub const MTU_LEAST: u16 = 68;

/// An address of a machine, and the addresses reached through its interface besides the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The machine's address.
    pub ip: IpAddr,
    /// Prefix length of the network behind the interface, if that is more than the peer.
    pub prefix: Option<u8>,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?}: an address is written as 10.9.0.1, as 10.9.0.1/24 or as fd00::1/64");
        let (ip, prefix) = parse_ip(text).ok_or_else(wrong)?;
        let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_broadcast {
            return Err(format!("{text:?} is no address that a machine can have"));
        }
        Ok(Self { ip, prefix })
    }
}

/// Machines each of which has an interface with every other one.
#[derive(Debug, Clone, PartialEq)]
pub struct Net {
    /// Name of the network, and prefix of its interfaces' names.
    pub name: Name,
    /// Names and addresses of the machines.
    pub machines: BTreeMap<Name, Option<Address>>,
    /// Whether it has two machines by name, and can have no third: then the interface has the network's name.
    pub is_pair: bool,
    /// MTU of its interfaces.
    pub mtu: Option<u16>,
}

impl Net {
    /// Returns all pairs of machines, of which the first one listens.
    pub fn pairs(&self) -> impl Iterator<Item = [&Name; 2]> {
        let names = || self.machines.keys();
        names().enumerate().flat_map(move |(at, first)| names().skip(at + 1).map(move |second| [first, second]))
    }

    /// Returns the name of the interface with `peer`.
    #[must_use]
    pub fn interface(&self, peer: &Name) -> String {
        if self.is_pair { self.name.to_string() } else { format!("{}-{peer}", self.name) }
    }

    /// Returns the service at which two machines meet. It is the listening machine's, which has another one for each
    /// interface.
    #[must_use]
    pub fn service(&self, [_, second]: [&Name; 2]) -> Name {
        format!("net.{}", self.interface(second)).parse().expect("checked: its parts are names, and short")
    }

    /// Returns the hardware address of `machine` in this network, at all its ports (N-14): always the same on one host,
    /// and another for each machine, network and host. In a pair the machine chooses its address, and this returns
    /// zeros.
    fn mac(&self, machine: &Name) -> [u8; 6] {
        if self.is_pair {
            return [0; 6];
        }
        let mut hash = Sha256::new_with_prefix(b"tombolo network\0");
        for part in [host_id(), self.name.as_str().as_bytes(), machine.as_str().as_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let mut mac: [u8; 6] = hash.finalize()[..6].try_into().expect("six bytes");
        // Unicast and locally administered.
        mac[0] = mac[0] & 0xfc | 2;
        mac
    }

    /// Returns what `own` is told of its interface with `peer`.
    fn message(&self, at: u64, own: &Name, peer: &Name) -> Message {
        let (pair, role) = if own < peer { ([own, peer], NetRole::Listen) } else { ([peer, own], NetRole::Connect) };
        let address_of = |name| self.machines.get(name).copied().flatten();
        let bytes = |address: Option<Address>| address.map_or([0; 16], |it| as_ipv6(it.ip));
        let own_address = address_of(own);
        let prefix = own_address.and_then(|it| Some(it.prefix? + if it.ip.is_ipv4() { 96 } else { 0 }));
        Message::Net {
            at,
            interface: self.interface(peer).parse().expect("checked"),
            peer: peer.clone(),
            service: self.service(pair),
            role,
            mtu: self.mtu.unwrap_or(0),
            own: bytes(own_address),
            prefix: prefix.unwrap_or(0),
            theirs: bytes(address_of(peer)),
            network: Reason::from(if self.is_pair { "" } else { self.name.as_str() }),
            own_mac: self.mac(own),
            their_mac: self.mac(peer),
        }
    }

    /// Returns the mistakes of the network as a whole, besides those of its parts.
    pub fn mistakes(&self) -> Vec<String> {
        let mut mistakes = Vec::new();
        let machines = self.machines.len();
        if machines < 2 {
            mistakes.push(format!("a network has two machines or more, and {} has {machines}", self.name));
        }
        if machines > usize::from(NETS_MAX) + 1 {
            mistakes
                .push(format!("{} has {machines} machines, of which each can have {NETS_MAX} interfaces", self.name));
        }
        let names = self.machines.keys().map(|peer| self.interface(peer));
        if let Some(name) = names.max_by_key(String::len).filter(|name| name.len() > INTERFACE_MAX) {
            mistakes.push(format!(
                "an interface would be called {name}, and its name has at most {INTERFACE_MAX} bytes: choose a shorter \
                 name for the network or the machine"
            ));
        }
        let mut known: Vec<(&Name, Address)> = Vec::new();
        for (name, address) in self.machines.iter().filter_map(|(name, address)| Some((name, (*address)?))) {
            if let Some((other, _)) = known.iter().find(|(_, it)| it.ip == address.ip) {
                mistakes.push(format!("{other} and {name} have the address {}", address.ip));
            }
            if known.first().is_some_and(|(_, it)| it.ip.is_ipv4() != address.ip.is_ipv4()) {
                mistakes.push(format!("{name}'s address is not of the kind that the others have (IPv4 or IPv6)"));
            }
            known.push((name, address));
        }
        mistakes
    }
}

/// Returns an identifier of this host, so that machines of two hosts that share a wire have different hardware
/// addresses.
fn host_id() -> &'static [u8] {
    static ID: OnceLock<Vec<u8>> = OnceLock::new();
    ID.get_or_init(|| std::fs::read("/etc/machine-id").unwrap_or_default())
}

fn as_ipv6(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// Returns what `domain` is told of its interfaces, in a stable order.
#[must_use]
pub fn messages(nets: &[Net], domain: &Name) -> Vec<Message> {
    let of_domain = nets.iter().filter(|net| net.machines.contains_key(domain));
    let ends =
        of_domain.flat_map(|net| net.machines.keys().filter(|peer| *peer != domain).map(move |peer| (net, peer)));
    (1..).zip(ends).map(|(at, (net, peer))| net.message(at, domain, peer)).collect()
}

/// Returns the later of two networks that would give a machine an interface of the same name, the machine, and that
/// name.
#[must_use]
pub fn clash(nets: &[Net]) -> Option<(usize, Name, String)> {
    let mut taken = std::collections::BTreeSet::new();
    nets.iter().enumerate().find_map(|(at, net)| {
        let ports = net.pairs().flat_map(|[a, b]| [(a, net.interface(b)), (b, net.interface(a))]);
        // A network with ports has a bridge as well, which has the network's name.
        let whole = net.machines.keys().filter(|_| !net.is_pair).map(|own| (own, net.name.to_string()));
        let mut all = ports.chain(whole);
        all.find_map(|(own, interface)| {
            (!taken.insert((own.clone(), interface.clone()))).then(|| (at, own.clone(), interface))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn b28_addresses_are_those_that_a_machine_can_have() {
        let parse = |text: &str| text.parse::<Address>();
        let net = parse("10.9.0.1/24").unwrap();
        assert_eq!((net.ip, net.prefix), ("10.9.0.1".parse().unwrap(), Some(24)));
        assert_eq!(parse("fd00::1").unwrap().prefix, None);
        for bad in ["10.9.0", "10.9.0.1/33", "10.9.0.1/0", "10.9.0.1/", "fd00::1/129", "", "web"] {
            assert!(parse(bad).unwrap_err().contains("is written as"), "{bad}");
        }
        for bad in ["127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "::1", "ff02::1"] {
            assert!(parse(bad).unwrap_err().contains("no address that a machine"), "{bad}");
        }
    }

    #[test]
    fn b28_two_ends_are_told_of_the_same_service_one_listens_and_each_has_the_others_address() {
        let address = |text: &str| Some(text.parse::<Address>().unwrap());
        let machines = BTreeMap::from([(name("b"), address("10.9.0.2/24")), (name("a"), address("10.9.0.1/24"))]);
        let net = Net { name: name("tmb0"), machines, is_pair: true, mtu: Some(9000) };
        let [a, b] = ["a", "b"].map(|own| messages(std::slice::from_ref(&net), &name(own)));
        let mapped = |last| std::net::Ipv4Addr::new(10, 9, 0, last).to_ipv6_mapped().octets();
        let row = |peer: &str, role, own, theirs| Message::Net {
            at: 1,
            interface: name("tmb0"),
            peer: name(peer),
            service: name("net.tmb0"),
            role,
            mtu: 9000,
            own: mapped(own),
            prefix: 120,
            theirs: mapped(theirs),
            network: "".into(),
            own_mac: [0; 6],
            their_mac: [0; 6],
        };
        assert_eq!(a, [row("b", NetRole::Listen, 1, 2)]);
        assert_eq!(b, [row("a", NetRole::Connect, 2, 1)]);
        assert_eq!(messages(&[net], &name("c")), []);
    }

    #[test]
    fn b28_larger_networks_have_an_interface_and_a_service_for_each_two() {
        let machines = ["a", "b", "c"].map(|it| (name(it), None)).into();
        let net = Net { name: name("lan"), machines, is_pair: false, mtu: None };
        let all = ["a", "b", "c"].map(|own| messages(std::slice::from_ref(&net), &name(own)));
        let shown = all.map(|rows| {
            let shown = rows.into_iter().map(|it| match it {
                Message::Net { at, interface, service, role, .. } => format!("{at} {interface} {service} {role:?}"),
                other => panic!("{other:?}"),
            });
            shown.collect::<Vec<_>>()
        });
        assert_eq!(shown[0], ["1 lan-b net.lan-b Listen", "2 lan-c net.lan-c Listen"]);
        assert_eq!(shown[1], ["1 lan-a net.lan-b Connect", "2 lan-c net.lan-c Listen"]);
        assert_eq!(shown[2], ["1 lan-a net.lan-c Connect", "2 lan-b net.lan-c Connect"]);
        assert_eq!(net.pairs().count(), 3);
    }

    #[test]
    fn b28_n14_machine_has_one_hardware_address_in_a_network_and_each_peer_is_told_it() {
        let machines = ["a", "b", "c"].map(|it| (name(it), None)).into();
        let lan = Net { name: name("lan"), machines, is_pair: false, mtu: None };
        let macs = |net: &Net, own: &str| {
            let rows = messages(std::slice::from_ref(net), &name(own)).into_iter();
            let macs = rows.map(|it| match it {
                Message::Net { network, peer, own_mac, their_mac, .. } => {
                    assert_eq!(network.as_str(), net.name.as_str());
                    (peer.to_string(), own_mac, their_mac)
                }
                other => panic!("{other:?}"),
            });
            macs.collect::<Vec<_>>()
        };
        let [a, b, c] = ["a", "b", "c"].map(|own| macs(&lan, own));
        let of = [&a, &b, &c].map(|rows| rows[0].1);
        for (rows, own) in [&a, &b, &c].into_iter().zip(of) {
            assert!(rows.iter().all(|row| row.1 == own) && own[0] & 3 == 2, "{rows:?}");
        }
        assert!(of[0] != of[1] && of[1] != of[2] && of[0] != of[2], "{of:?}");
        assert_eq!(a, [("b".into(), of[0], of[1]), ("c".into(), of[0], of[2])]);
        assert_eq!(c, [("a".into(), of[2], of[0]), ("b".into(), of[2], of[1])]);
        let other = Net { name: name("wan"), ..lan };
        assert_ne!(macs(&other, "a")[0].1, of[0]);
    }
}
