// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The route that the kernel would take for a packet, queried from its routes alone. `ip route get` queries the
//! interface too, for its name, and thereby makes the kernel act on a carrier change that it had put off.

use std::{net::Ipv4Addr, os::fd::OwnedFd};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use super::{Netns, PATIENCE};

const GET_ROUTE: u16 = 26;
const NEW_ROUTE: u16 = 24;
const REQUEST: u16 = 1;
/// Attributes of a route: destination and interface.
const DESTINATION: u16 = 1;
const INTERFACE: u16 = 4;

/// The routes of one namespace.
pub struct Routes(OwnedFd);

impl Routes {
    pub fn of(netns: &Netns) -> Self {
        Self(netns.enter(|| {
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None).unwrap();
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
            socket
        }))
    }

    /// Returns the number of the interface by which an address is reached; `None` if it is not.
    pub fn way_to(&self, to: Ipv4Addr) -> Option<u32> {
        let mut request = vec![36, 0, 0, 0];
        request.extend([GET_ROUTE, REQUEST].map(u16::to_ne_bytes).concat());
        request.extend([0; 8]);
        request.extend([AddressFamily::INET.as_raw() as u8, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        request.extend([8, DESTINATION].map(u16::to_ne_bytes).concat());
        request.extend(to.octets());
        rustix::net::send(&self.0, &request, SendFlags::empty()).unwrap();
        let mut answer = [0; 4096];
        let (len, _) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty()).unwrap();
        if u16::from_ne_bytes([answer[4], answer[5]]) != NEW_ROUTE {
            return None;
        }
        let mut rest = &answer[28..len];
        while let [a, b, c, d, ..] = *rest {
            let len = usize::from(u16::from_ne_bytes([a, b]));
            if u16::from_ne_bytes([c, d]) == INTERFACE {
                return Some(u32::from_ne_bytes(rest[4..8].try_into().unwrap()));
            }
            rest = &rest[len.next_multiple_of(4)..];
        }
        None
    }
}

impl Netns {
    /// Returns the number of an interface.
    pub fn index(&self, name: &str) -> u32 {
        let shown = self.ip(&["-o", "link", "show", name]);
        shown.split(':').next().and_then(|index| index.parse().ok()).unwrap_or_else(|| panic!("{shown}"))
    }
}
