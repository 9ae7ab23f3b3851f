// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Asks the kernel about an interface, and changes its hardware address, its MTU and whether it is up, gives it an IP
//! address, and makes it a bridge's port. Uses messages of `rtnetlink`, which are plain bytes.

use std::{io, net::IpAddr, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt},
};

use crate::mac::Mac;

/// Types of messages.
const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const GET_LINK: u16 = 18;
const NEW_ADDRESS: u16 = 20;
const NEW_NEIGHBOUR: u16 = 28;
const DELETE_NEIGHBOUR: u16 = 29;
const ERROR: u16 = 2;
/// Flags of a request: that it is one, and that it is to be acknowledged.
const REQUEST: u16 = 1;
const ANSWER: u16 = 4;
/// Flags of a request that makes something: make it if there is none, fail if there is one, or replace that.
const CREATE: u16 = 0x400;
const EXCLUSIVE: u16 = 0x200;
const REPLACE: u16 = 0x100;
/// Types of attributes.
const ADDRESS: u16 = 1;
const NAME: u16 = 3;
const MTU: u16 = 4;
const CARRIER: u16 = 33;
const MASTER: u16 = 10;
const INFO: u16 = 18;
const ALIAS: u16 = 20;
/// Attributes within `INFO`: the kind of an interface and its data, and the same of the bridge whose port it is.
const KIND: u16 = 1;
const DATA: u16 = 2;
const PORT_KIND: u16 = 4;
const PORT_DATA: u16 = 5;
/// Attributes of a bridge: the delay of its ports, whether it runs the spanning tree protocol, and whether it snoops
/// multicast. VLAN filtering is off by default, and kernels that lack it refuse the attribute.
const FORWARD_DELAY: u16 = 1;
const SPANNING_TREE: u16 = 5;
const SNOOPING: u16 = 23;
/// Attributes of a port: whether it learns, gets frames to unknown addresses, and exchanges no frames with other
/// isolated ports.
const LEARNING: u16 = 8;
const UNKNOWN: u16 = 9;
const ISOLATED: u16 = 33;
/// Attributes of a neighbour: its IP address, and its hardware address.
const NEIGHBOUR: u16 = 1;
const NEIGHBOUR_ADDRESS: u16 = 2;
/// State of a neighbour that is never asked for, and of an entry of a bridge's table that does not age.
const PERMANENT: u16 = 0x80;
const STATIC: u16 = 0x40;
/// Flags of an entry: it is in the table of the bridge whose port this is, and it stays with its port, wherever frames
/// come from.
const OF_MASTER: u8 = 2 << 1;
const STICKY: u8 = 0x40;
/// Attributes of an IP address: the addresses reached through it, the address itself, and flags.
const PREFIX: u16 = 1;
const LOCAL: u16 = 2;
const ADDRESS_FLAGS: u16 = 8;
/// Flag of an IP address that no other host can have, so that it is usable at once.
const NO_DETECTION: u32 = 2;
/// Flag of an interface that its administrator switched on.
const UP: u32 = 1;
/// Flag of an interface that is on and has a carrier.
const LOWER_UP: u32 = 0x1_0000;
/// Length in bytes of a message's header, and of the header that follows it in a message about a link.
const HEAD: usize = 16;
const LINK: usize = 16;
/// Room for an answer about one link, which has a few KiB.
const ANSWER_MOST: usize = 32 << 10;

/// Properties of an interface, as the kernel reports them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Number of the interface.
    pub index: i32,
    /// Its hardware address.
    pub mac: Mac,
    /// Its MTU.
    pub mtu: u32,
    /// Whether its administrator switched it on.
    pub up: bool,
    /// Whether it is on and has a carrier.
    pub has_carrier: bool,
    /// Number of the bridge whose port it is, or 0.
    pub master: i32,
    /// Kind of the interface, if it is not a card.
    pub kind: String,
    /// Its alias, a text for people and tools.
    pub alias: String,
}

/// A socket to the kernel's tables of one network namespace.
#[derive(Debug)]
pub struct Netlink(OwnedFd);

impl Netlink {
    /// Opens a socket in the namespace of this thread.
    pub fn open() -> io::Result<Self> {
        // No protocol stands for `NETLINK_ROUTE`, which has the number 0.
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        // The kernel answers within the call that asks; the timeout guards against a hang.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(std::time::Duration::from_secs(5)))?;
        Ok(Self(socket))
    }

    /// Finds an interface by its name.
    pub fn find(&self, name: &str) -> io::Result<Option<Link>> {
        match self.ask(&request(GET_LINK, REQUEST, 0, 0, 0, &[(NAME, &zero_ended(name))])) {
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
            answer => parse_link(&answer?).map(Some),
        }
    }

    /// Returns the current properties of an interface.
    pub fn link(&self, index: i32) -> io::Result<Link> {
        parse_link(&self.ask(&request(GET_LINK, REQUEST, index, 0, 0, &[]))?)
    }

    /// Changes an interface's hardware address.
    pub fn set_mac(&self, index: i32, mac: Mac) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(ADDRESS, &mac.0)])).map(drop)
    }

    /// Changes an interface's MTU.
    pub fn set_mtu(&self, index: i32, mtu: u32) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(MTU, &mtu.to_ne_bytes())])).map(drop)
    }

    /// Switches an interface's carrier off, if its driver lets others do that.
    pub fn lose_carrier(&self, index: i32) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(CARRIER, &[0])])).map(drop)
    }

    /// Switches an interface on.
    pub fn set_up(&self, index: i32) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, UP, UP, &[])).map(drop)
    }

    /// Gives an interface an IP address, through which `bits` of `reached` are reached. An existing address stays.
    pub fn add_address(&self, index: i32, own: IpAddr, reached: IpAddr, bits: u8) -> io::Result<()> {
        let family = family_of(own);
        let mut about = vec![family.as_raw() as u8, bits, 0, 0];
        about.extend(index.to_ne_bytes());
        let (local, prefix, flags) = (octets(own), octets(reached), NO_DETECTION.to_ne_bytes());
        let attributes: [(u16, &[u8]); 3] = [(LOCAL, &local), (PREFIX, &prefix), (ADDRESS_FLAGS, &flags)];
        match self.ask(&message(NEW_ADDRESS, REQUEST | ANSWER | CREATE, &about, &attributes)) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::EXIST) => Ok(()),
            answer => answer.map(drop),
        }
    }

    /// Makes a bridge without ports, spanning tree protocol and multicast snooping.
    pub fn add_bridge(&self, name: &str, mac: Mac) -> io::Result<()> {
        let name = zero_ended(name);
        let never = 0_u32.to_ne_bytes();
        let data: [(u16, &[u8]); 3] = [(SPANNING_TREE, &never), (FORWARD_DELAY, &never), (SNOOPING, &[0])];
        let info = attributes(&[(KIND, b"bridge"), (DATA, &attributes(&data))]);
        let attributes: [(u16, &[u8]); 3] = [(NAME, &name), (ADDRESS, &mac.0), (INFO, &info)];
        self.ask(&request(NEW_LINK, REQUEST | ANSWER | CREATE | EXCLUSIVE, 0, 0, 0, &attributes)).map(drop)
    }

    /// Sets an interface's alias, for those who look at it.
    pub fn set_alias(&self, index: i32, alias: &str) -> io::Result<()> {
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(ALIAS, alias.as_bytes())])).map(drop)
    }

    /// Removes an interface.
    pub fn delete_link(&self, index: i32) -> io::Result<()> {
        self.ask(&request(DELETE_LINK, REQUEST | ANSWER, index, 0, 0, &[])).map(drop)
    }

    /// Makes an interface a bridge's port. It gets frames to `peer`, multicasts and broadcasts, and none from other
    /// ports made by this function.
    pub fn join_bridge(&self, index: i32, bridge: i32, peer: Mac) -> io::Result<()> {
        let master = bridge.to_ne_bytes();
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(MASTER, &master)]))?;
        let data = attributes(&[(ISOLATED, &[1]), (LEARNING, &[0]), (UNKNOWN, &[0])]);
        let info = attributes(&[(PORT_KIND, b"bridge"), (PORT_DATA, &data)]);
        self.ask(&request(NEW_LINK, REQUEST | ANSWER, index, 0, 0, &[(INFO, &info)]))?;
        let about = neighbour(AddressFamily::BRIDGE, index, STATIC, OF_MASTER | STICKY);
        let flags = REQUEST | ANSWER | CREATE | REPLACE;
        self.ask(&message(NEW_NEIGHBOUR, flags, &about, &[(NEIGHBOUR_ADDRESS, &peer.0)])).map(drop)
    }

    /// Adds a neighbour entry of an IP address, so that the kernel need not ask who has it.
    pub fn add_neighbour(&self, index: i32, ip: IpAddr, mac: Mac) -> io::Result<()> {
        let about = neighbour(family_of(ip), index, PERMANENT, 0);
        let flags = REQUEST | ANSWER | CREATE | REPLACE;
        let attributes: [(u16, &[u8]); 2] = [(NEIGHBOUR, &octets(ip)), (NEIGHBOUR_ADDRESS, &mac.0)];
        self.ask(&message(NEW_NEIGHBOUR, flags, &about, &attributes)).map(drop)
    }

    /// Removes the neighbour entry of an IP address, so that the kernel asks who has it.
    pub fn delete_neighbour(&self, index: i32, ip: IpAddr) -> io::Result<()> {
        let about = neighbour(family_of(ip), index, 0, 0);
        self.ask(&message(DELETE_NEIGHBOUR, REQUEST | ANSWER, &about, &[(NEIGHBOUR, &octets(ip))])).map(drop)
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
    bytes.extend(self::attributes(attributes));
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes
}

fn attributes(attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, value) in attributes {
        bytes.extend(((value.len() + 4) as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(*value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// Returns the header of a message about a neighbour, which precedes its attributes.
fn neighbour(family: AddressFamily, index: i32, state: u16, flags: u8) -> Vec<u8> {
    let mut about = vec![family.as_raw() as u8, 0, 0, 0];
    about.extend(index.to_ne_bytes());
    about.extend(state.to_ne_bytes());
    about.extend([flags, 0]);
    about
}

fn zero_ended(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

fn family_of(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Calls `each` with the attributes in `bytes`. Fails at an attribute that is cut off.
fn parse_attributes<'a>(bytes: &'a [u8], mut each: impl FnMut(u16, &'a [u8])) -> io::Result<()> {
    let mut rest = bytes;
    while let [a, b, c, d, ..] = *rest {
        let (len, kind) = (usize::from(u16::from_ne_bytes([a, b])), u16::from_ne_bytes([c, d]));
        each(kind, rest.get(4..len).ok_or_else(cut_off)?);
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(())
}

/// Returns the text before the terminating zero.
fn parse_text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

fn parse_link(answer: &[u8]) -> io::Result<Link> {
    let index = i32_at(answer, HEAD + 4).ok_or_else(cut_off)?;
    let flags = i32_at(answer, HEAD + 8).ok_or_else(cut_off)? as u32;
    let (mut mac, mut mtu, mut master) = (None, None, 0);
    let (mut info, mut kind, mut alias): (&[u8], _, _) = (&[], String::new(), String::new());
    parse_attributes(answer.get(HEAD + LINK..).unwrap_or_default(), |attribute, value| match attribute {
        ADDRESS => mac = value.try_into().ok().map(Mac),
        MTU => mtu = value.try_into().ok().map(u32::from_ne_bytes),
        MASTER => master = value.try_into().map_or(0, i32::from_ne_bytes),
        INFO => info = value,
        ALIAS => alias = parse_text(value),
        _ => {}
    })?;
    parse_attributes(info, |attribute, value| {
        if attribute == KIND {
            kind = parse_text(value);
        }
    })?;
    let (up, has_carrier) = (flags & UP != 0, flags & LOWER_UP != 0);
    match (mac, mtu) {
        (Some(mac), Some(mtu)) => Ok(Link { index, mac, mtu, up, has_carrier, master, kind, alias }),
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
        let info = attributes(&[(DATA, b"of the kind"), (KIND, b"bridge\0")]);
        let told: [(u16, &[u8]); 6] = [
            (99, b"other"),
            (MASTER, &7_i32.to_ne_bytes()),
            (ALIAS, b"text\0"),
            (INFO, &info),
            (ADDRESS, &mac.0),
            (MTU, &1400_u32.to_ne_bytes()),
        ];
        let answer = request(16, 0, 5, UP | LOWER_UP, 0, &told);
        let (kind, alias) = ("bridge".to_owned(), "text".to_owned());
        let link = Link { index: 5, mac, mtu: 1400, up: true, has_carrier: true, master: 7, kind, alias };
        assert_eq!(parse_link(&answer).unwrap(), link);
        for len in 0..answer.len() {
            assert!(parse_link(&answer[..len]).is_err(), "{len}");
        }
        // An attribute that claims to be shorter than its own head, or longer than the answer.
        for len in [0_u16, 3, 0xffff] {
            let mut bad = answer.clone();
            bad[HEAD + LINK..HEAD + LINK + 2].copy_from_slice(&len.to_ne_bytes());
            assert!(parse_link(&bad).is_err(), "{len}");
        }
    }
}
