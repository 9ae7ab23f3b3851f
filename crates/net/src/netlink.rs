// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The five things that are asked of the kernel about an interface: what it is like, and to change its address, its MTU
//! and whether it is up, and to give it an address of IP. Messages of `rtnetlink`, which are plain bytes.

use std::{io, net::IpAddr, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt},
};

use crate::mac::Mac;

/// Kinds of messages.
const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const NEW_ADDRESS: u16 = 20;
const ERROR: u16 = 2;
/// Flags of a request: it is one, and it is to be answered.
const REQUEST: u16 = 1;
const ANSWER: u16 = 4;
/// And what it names is to be made.
const CREATE: u16 = 0x400;
/// Kinds of attributes.
const ADDRESS: u16 = 1;
const NAME: u16 = 3;
const MTU: u16 = 4;
/// Kinds of attributes of an address: what is reached by it, the address itself, flags.
const PREFIX: u16 = 1;
const LOCAL: u16 = 2;
const ADDRESS_FLAGS: u16 = 8;
/// Nobody else can have this address: it is of use at once.
const NO_DETECTION: u32 = 2;
/// The flag of an interface that its administrator switched on.
const UP: u32 = 1;
/// Bytes of a message's head, and of what follows it about a link.
const HEAD: usize = 16;
const LINK: usize = 16;
/// An answer about one link has a few KiB.
const ANSWER_MOST: usize = 32 << 10;

/// What the kernel says of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// Its number.
    pub index: i32,
    /// Its address.
    pub mac: Mac,
    /// Its MTU.
    pub mtu: u32,
    /// Whether its administrator switched it on.
    pub up: bool,
}

/// A socket to the kernel's tables of one network namespace.
#[derive(Debug)]
pub struct Netlink(OwnedFd);

impl Netlink {
    /// Opens one in the namespace of this thread.
    pub fn open() -> io::Result<Self> {
        // No protocol stands for `NETLINK_ROUTE`, which has the number 0.
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        // The kernel answers within the call that asks; this is against a hang.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(std::time::Duration::from_secs(5)))?;
        Ok(Self(socket))
    }

    /// Finds an interface by its name.
    pub fn find(&self, name: &str) -> io::Result<Option<Link>> {
        let mut zero_ended = name.as_bytes().to_vec();
        zero_ended.push(0);
        match self.ask(&request(GET_LINK, REQUEST, 0, 0, 0, &[(NAME, &zero_ended)])) {
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
            answer => parse_link(&answer?).map(Some),
        }
    }

    /// What an interface is like now.
    pub fn link(&self, index: i32) -> io::Result<Link> {
        parse_link(&self.ask(&request(GET_LINK, REQUEST, index, 0, 0, &[]))?)
    }

    /// Changes an interface's address.
    pub fn set_mac(&self, index: i32, mac: Mac) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(ADDRESS, &mac.0)])).map(drop)
    }

    /// Changes an interface's MTU.
    pub fn set_mtu(&self, index: i32, mtu: u32) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(MTU, &mtu.to_ne_bytes())])).map(drop)
    }

    /// Switches an interface on.
    pub fn set_up(&self, index: i32) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, UP, UP, &[])).map(drop)
    }

    /// Gives an interface an address of IP, by which `bits` of `reached` are reached. One that it has stays.
    pub fn add_address(&self, index: i32, own: IpAddr, reached: IpAddr, bits: u8) -> io::Result<()> {
        let family = match own {
            IpAddr::V4(_) => AddressFamily::INET,
            IpAddr::V6(_) => AddressFamily::INET6,
        };
        let octets = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let mut about = vec![family.as_raw() as u8, bits, 0, 0];
        about.extend(index.to_ne_bytes());
        let (local, prefix, flags) = (octets(own), octets(reached), NO_DETECTION.to_ne_bytes());
        let attributes: [(u16, &[u8]); 3] = [(LOCAL, &local), (PREFIX, &prefix), (ADDRESS_FLAGS, &flags)];
        match self.ask(&message(NEW_ADDRESS, REQUEST | ANSWER | CREATE, &about, &attributes)) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::EXIST) => Ok(()),
            answer => answer.map(drop),
        }
    }

    fn ask(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        rustix::net::send(&self.0, request, SendFlags::empty())?;
        let mut answer = vec![0; ANSWER_MOST];
        let (len, _) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty())?;
        answer.truncate(len);
        let kind = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
        if kind == Some(ERROR) {
            let code = i32_at(&answer, HEAD).ok_or_else(cut_off)?;
            return if code == 0 { Ok(answer) } else { Err(io::Error::from_raw_os_error(-code)) };
        }
        Ok(answer)
    }
}

fn request(kind: u16, flags: u16, index: i32, link_flags: u32, change: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut about = [0; LINK];
    about[4..8].copy_from_slice(&index.to_ne_bytes());
    about[8..12].copy_from_slice(&link_flags.to_ne_bytes());
    about[12..].copy_from_slice(&change.to_ne_bytes());
    message(kind, flags, &about, attributes)
}

fn message(kind: u16, flags: u16, about: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; HEAD];
    bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
    bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    bytes.extend(about);
    for (kind, value) in attributes {
        bytes.extend(((value.len() + 4) as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(*value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes
}

fn parse_link(answer: &[u8]) -> io::Result<Link> {
    let index = i32_at(answer, HEAD + 4).ok_or_else(cut_off)?;
    let up = i32_at(answer, HEAD + 8).ok_or_else(cut_off)? as u32 & UP != 0;
    let (mut mac, mut mtu) = (None, None);
    let mut rest = answer.get(HEAD + LINK..).unwrap_or_default();
    while let [a, b, c, d, ..] = *rest {
        let (len, kind) = (usize::from(u16::from_ne_bytes([a, b])), u16::from_ne_bytes([c, d]));
        let value = rest.get(4..len).ok_or_else(cut_off)?;
        match kind {
            ADDRESS => mac = value.try_into().ok().map(Mac),
            MTU => mtu = value.try_into().ok().map(u32::from_ne_bytes),
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    match (mac, mtu) {
        (Some(mac), Some(mtu)) => Ok(Link { index, mac, mtu, up }),
        _ => Err(io::Error::other("the interface has no Ethernet address")),
    }
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    bytes.get(at..at + 4).map(|word| i32::from_ne_bytes(word.try_into().expect("four bytes")))
}

fn cut_off() -> io::Error {
    io::Error::other("the kernel's answer about an interface is cut off")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_to_their_end_and_cut_off_ones_refused() {
        let mac = Mac([2, 0, 0, 0, 0, 7]);
        let answer = request(16, 0, 5, UP, 0, &[(99, b"other"), (ADDRESS, &mac.0), (MTU, &1400_u32.to_ne_bytes())]);
        assert_eq!(parse_link(&answer).unwrap(), Link { index: 5, mac, mtu: 1400, up: true });
        for len in 0..answer.len() {
            assert!(parse_link(&answer[..len]).is_err(), "{len}");
        }
        // An attribute that says it is shorter than its own head, or longer than the answer.
        for len in [0_u16, 3, 0xffff] {
            let mut bad = answer.clone();
            bad[HEAD + LINK..HEAD + LINK + 2].copy_from_slice(&len.to_ne_bytes());
            assert!(parse_link(&bad).is_err(), "{len}");
        }
    }
}
