// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two addresses of a connection, as one endpoint sees them (S-4).

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use sha2::{Digest, Sha256};
use tombolo_layout::sockets::Address;

/// Own address and the peer's. A v4-mapped IPv6 address and the IPv4 address are the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tuple {
    /// Address of this endpoint.
    pub own: Address,
    /// Address of the peer.
    pub peer: Address,
}

/// Role of this endpoint. Only the order of the addresses decides, so that both endpoints agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The endpoint with the lower address: it claims the connection and waits.
    Waiting,
    /// The endpoint with the higher address: it looks for the claim.
    Seeking,
}

fn address(from: SocketAddr) -> Address {
    let host = match from.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    Address { host: host.octets(), port: from.port() }
}

impl Tuple {
    /// Makes a tuple from the results of `getsockname` and `getpeername`.
    #[must_use]
    pub fn new(own: SocketAddr, peer: SocketAddr) -> Self {
        Self { own: address(own), peer: address(peer) }
    }

    /// Makes the addresses that both endpoints derive from the initial sequence numbers, the own one first, where they
    /// see different addresses of each other (S-7).
    #[must_use]
    pub fn of_sequences([own, peer]: [u32; 2]) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"tombolo");
        hash.update(own.min(peer).to_le_bytes());
        hash.update(own.max(peer).to_le_bytes());
        let hash: [u8; 32] = hash.finalize().into();
        let half = |number: u32| {
            let upper = number > own.min(peer);
            let at = if upper { 16 } else { 0 };
            Address { host: core::array::from_fn(|index| hash[at + index]), port: 1 + u16::from(upper) }
        };
        Self { own: half(own), peer: half(peer) }
    }

    /// Returns the tuple as the peer must see it: NAT, port forwarding and proxies show in a difference.
    #[must_use]
    pub fn mirrored(self) -> Self {
        Self { own: self.peer, peer: self.own }
    }

    /// Returns the port that the connection was made to, at an endpoint that `dialled` or one that accepted.
    #[must_use]
    pub fn service_port(self, dialled: bool) -> u16 {
        if dialled { self.peer.port } else { self.own.port }
    }

    /// Returns this endpoint's role; `None` where a socket is connected to itself.
    #[must_use]
    pub fn role(self) -> Option<Role> {
        match self.own.cmp(&self.peer) {
            std::cmp::Ordering::Less => Some(Role::Waiting),
            std::cmp::Ordering::Greater => Some(Role::Seeking),
            std::cmp::Ordering::Equal => None,
        }
    }

    /// Returns whether an address means something else in another network namespace: loopback, link-local and
    /// unspecified ones.
    #[must_use]
    pub fn is_local(self) -> bool {
        [self.own, self.peer].into_iter().any(|address| {
            let v6 = Ipv6Addr::from(address.host);
            match v6.to_ipv4_mapped() {
                Some(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_unspecified(),
                None => v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified(),
            }
        })
    }

    /// Returns the name under which both endpoints claim the connection: the same from either side, 32 hexadecimal
    /// digits.
    #[must_use]
    pub fn key(self) -> String {
        let mut hash = Sha256::new();
        let mut both = [self.own, self.peer];
        both.sort_unstable();
        for address in both {
            hash.update(address.host);
            hash.update(address.port.to_be_bytes());
        }
        hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the key under which the two endpoints of a connection between two kernels find each other; `None` where they
/// cannot be told apart (S-18). It is short on purpose: whoever is asked for it learns 32 of the 64 bits that prove the
/// connection, and nothing by which to search for the others.
#[must_use]
pub fn key_of_sequences([own, peer]: [u32; 2]) -> Option<u32> {
    let mut hash = Sha256::new();
    hash.update(b"tombolo key");
    hash.update(own.min(peer).to_le_bytes());
    hash.update(own.max(peer).to_le_bytes());
    let hash: [u8; 32] = hash.finalize().into();
    (own != peer).then(|| u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]))
}

impl std::fmt::Display for Tuple {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |address: Address| SocketAddr::new(Ipv6Addr::from(address.host).to_canonical(), address.port);
        write!(f, "{} - {}", show(self.own), show(self.peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(own: &str, peer: &str) -> Tuple {
        Tuple::new(own.parse().unwrap(), peer.parse().unwrap())
    }

    #[test]
    fn s4_mapped_and_plain_ipv4_addresses_are_the_same() {
        let plain = tuple("10.0.0.1:80", "10.0.0.2:4000");
        assert_eq!(plain, tuple("[::ffff:10.0.0.1]:80", "10.0.0.2:4000"));
        assert_eq!(plain.to_string(), "10.0.0.1:80 - 10.0.0.2:4000");
    }

    #[test]
    fn s4_both_ends_find_one_key_and_two_roles() {
        let one = tuple("10.0.0.1:80", "10.0.0.2:4000");
        assert_eq!(one.key(), one.mirrored().key());
        assert_eq!((one.role(), one.mirrored().role()), (Some(Role::Waiting), Some(Role::Seeking)));
        assert_ne!(one.key(), tuple("10.0.0.1:80", "10.0.0.2:4001").key());
        assert_eq!(tuple("127.0.0.1:9", "127.0.0.1:9").role(), None);
    }

    #[test]
    fn s7_addresses_made_of_sequence_numbers_mirror_each_other() {
        let one = Tuple::of_sequences([7, 9]);
        assert_eq!(one, Tuple::of_sequences([9, 7]).mirrored());
        assert_ne!(one.role(), one.mirrored().role());
        for other in [[7, 8], [6, 9], [9, 9]] {
            assert_ne!(one.key(), Tuple::of_sequences(other).key(), "{other:?}");
        }
        assert_eq!(Tuple::of_sequences([7, 7]).role(), None, "which end is which cannot be told");
    }

    #[test]
    fn s18_both_ends_make_one_key_of_their_numbers_and_other_numbers_another() {
        // The first four bytes of the SHA-256 of "tombolo key" and the words 7 and 9.
        assert_eq!(key_of_sequences([7, 9]), Some(0x4f19_f9d7));
        assert_eq!(key_of_sequences([7, 9]), key_of_sequences([9, 7]));
        assert_ne!(key_of_sequences([7, 9]), key_of_sequences([7, 8]));
        assert_eq!(key_of_sequences([7, 7]), None);
    }

    #[test]
    fn s5_addresses_that_every_namespace_has_are_local() {
        for (own, peer) in [("127.0.0.1:1", "127.0.0.1:2"), ("[::1]:1", "[::1]:2"), ("[fe80::1]:1", "[fe80::2]:2")] {
            assert!(tuple(own, peer).is_local());
        }
        assert!(!tuple("172.17.0.2:1", "172.17.0.3:2").is_local());
    }
}
