// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists the addresses of a network namespace, and tells when they may have changed (B-22).
//!
//! The addresses are read from `/proc/net`, which is a list of the kernel's own. A netlink socket tells that it may
//! have changed; what comes over the socket is not looked at.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
};

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, netlink};

use crate::reserved::ReservedFd;

/// Netlink groups `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR`.
const GROUPS: u32 = 0x10 | 0x100;
/// Largest number of bytes of a list that are read.
const READ_MAX: u64 = 1 << 20;

/// Watch for changes of addresses.
#[derive(Debug)]
pub struct AddressWatch(ReservedFd);

impl AddressWatch {
    /// Begins to watch.
    ///
    /// # Errors
    /// Any error that the kernel returns.
    pub fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::RAW;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, flags, None)?;
        rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, GROUPS))?;
        Ok(Self(ReservedFd::new(socket)?))
    }

    /// Returns a descriptor that polls readable once addresses may have changed.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Discards what was reported before.
    pub fn drain(&self) {
        let mut room = [0; 64];
        // The kernel discards what does not fit, and reports once that there was more than it could keep.
        for _ in 0..1024 {
            if let Err(error) = rustix::net::recv(&self.0, &mut room, RecvFlags::DONTWAIT | RecvFlags::TRUNC)
                && error != rustix::io::Errno::NOBUFS
            {
                break;
            }
        }
    }
}

/// Returns the addresses of this network namespace that another machine could know, in order, as IPv6; at most `most`.
#[must_use]
pub fn own_addresses(most: usize) -> Vec<[u8; 16]> {
    addresses_of(std::process::id(), most)
}

/// Returns the same of the network namespace that a process is in, or nothing if that is not visible from here.
#[must_use]
pub fn addresses_of(process: u32, most: usize) -> Vec<[u8; 16]> {
    let read = |name| {
        let mut text = String::new();
        let file = fs::File::open(format!("/proc/{process}/net/{name}")).ok()?;
        io::Read::read_to_string(&mut io::Read::take(file, READ_MAX), &mut text).ok()?;
        Some(text)
    };
    let v4 = read("fib_trie").map(|text| v4_of(&text)).unwrap_or_default();
    let v6 = read("if_inet6").map(|text| v6_of(&text)).unwrap_or_default();
    let mut all: Vec<_> = v4.into_iter().map(|it| it.to_ipv6_mapped().octets()).collect();
    all.extend(v6.into_iter().map(|it| it.octets()));
    all.retain(is_published);
    all.sort_unstable();
    all.dedup();
    all.truncate(most);
    all
}

/// Returns the number by which the kernel distinguishes the network namespace of a process from others: each has files
/// of its own below `/proc`. Anything that tells more takes the right to look into the process.
#[must_use]
pub fn namespace_of(process: u32) -> Option<u64> {
    Some(fs::metadata(format!("/proc/{process}/net/dev")).ok()?.ino())
}

/// Returns whether a process, by its number in this PID namespace, is in this one's network namespace. If `/proc` is
/// another PID namespace's, or hides the process, returns `false`.
#[must_use]
pub fn shares_namespace(process: u32) -> bool {
    let own = std::process::id();
    let has_own_numbers = fs::read_link("/proc/self").is_ok_and(|to| to.as_os_str() == own.to_string().as_str());
    has_own_numbers && namespace_of(process).is_some_and(|theirs| namespace_of(own) == Some(theirs))
}

/// Returns whether an address means the same to a peer: those that each kernel has (loopback, link-local) do not
/// (B-22).
#[must_use]
pub fn is_published(address: &[u8; 16]) -> bool {
    match Ipv6Addr::from(*address).to_canonical() {
        IpAddr::V4(v4) => {
            !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified() && !v4.is_multicast() && !v4.is_broadcast()
        }
        IpAddr::V6(v6) => {
            !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified() && !v6.is_multicast()
        }
    }
}

/// Returns the local addresses among the kernel's routes: an address is in one line, and its kind in those below.
fn v4_of(text: &str) -> Vec<Ipv4Addr> {
    let (mut all, mut last) = (Vec::new(), None);
    for line in text.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL" {
            all.extend(last);
        }
    }
    all
}

/// Returns the addresses of a list that has a line for each: 32 hexadecimal digits, and more about it.
fn v6_of(text: &str) -> Vec<Ipv6Addr> {
    let address = |line: &str| u128::from_str_radix(line.split_whitespace().next()?, 16).ok().map(Ipv6Addr::from);
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s5_process_shares_the_namespace_if_the_kernel_says_so() {
        assert!(shares_namespace(std::process::id()));
        for nobody in [0, u32::MAX >> 1] {
            assert!(!shares_namespace(nobody), "two that are not known are not one");
        }
    }

    #[test]
    fn b22_addresses_are_what_the_kernel_lists_as_local_and_others_can_know() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 10.9.0.0\n        \
                    /24 link UNICAST\nLocal:\n     |-- 10.9.0.2\n        /32 host LOCAL\n     |-- 10.9.0.255\n        \
                    /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n";
        assert_eq!(v4_of(trie), ["10.9.0.2", "127.0.0.1"].map(|it| it.parse::<Ipv4Addr>().unwrap()));
        let inet6 = "00000000000000000000000000000001 01 80 10 80       lo\nfd000000000000000000000000000002 02 40 00 80     eth0\n";
        assert_eq!(v6_of(inet6), ["::1", "fd00::2"].map(|it| it.parse::<Ipv6Addr>().unwrap()));
        let published = |text: &str| {
            let address: IpAddr = text.parse().unwrap();
            let v6 = match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            is_published(&v6.octets())
        };
        assert!(["10.9.0.2", "192.0.2.1", "fd00::2", "2001:db8::1"].into_iter().all(published));
        assert!(
            !["127.0.0.1", "169.254.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1", "::"].into_iter().any(published)
        );
    }

    #[test]
    fn b22_own_addresses_are_in_order_and_few() {
        let own = own_addresses(1);
        assert!(own.is_sorted() && own.len() <= 1 && own.iter().all(is_published));
        let watch = AddressWatch::new().unwrap();
        watch.drain();
        assert!(!crate::poll::polls_as(watch.fd(), rustix::event::PollFlags::IN));
    }
}
