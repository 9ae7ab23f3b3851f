// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What every interface is asked and told, whoever moves its frames.

use std::{
    fs::{self, File},
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
};

use rustix::{
    io::Errno,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use tombolo_os::lock::lock;

use crate::{
    error::{Error, FailedCall, Os, Result},
    mac::Mac,
    netlink::{Link, Netlink},
};

/// How an interface is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NicConfig {
    /// Its name.
    pub name: String,
    /// The network namespace that it is to be in: a name as `ip netns` knows it, or a path.
    pub netns: Option<String>,
    /// Its address, else what the kernel has chosen.
    pub mac: Option<Mac>,
    /// Its address if it is new and none is asked for.
    pub default_mac: Option<Mac>,
    /// Its MTU, else 1500 or what it has.
    pub mtu: Option<u32>,
    /// Its address of IP, if it is to get one.
    pub ip: Option<IpConfig>,
    /// The bridge whose port it is to be, if any.
    pub port: Option<PortConfig>,
}

/// Which bridge's port an interface is, and who is behind it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortConfig {
    /// The bridge's name, in the namespace in which the interface is.
    pub bridge: String,
    /// The only hardware address behind it.
    pub peer: Mac,
    /// That one's address of IP, where it is reached by the bridge.
    pub peer_ip: Option<IpAddr>,
}

/// An address of IP, and what is reached by it. Routes that come of it count for nothing while there is no carrier (N-13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpConfig {
    /// The address.
    pub own: IpAddr,
    /// What is reached: an address, and how many bits of it count.
    pub reached: (IpAddr, u8),
}

impl IpConfig {
    /// An address by which `prefix` bits are reached, or else the `peer` alone, or else nothing.
    #[must_use]
    pub fn new(own: IpAddr, prefix: Option<u8>, peer: Option<IpAddr>) -> Self {
        let all = if own.is_ipv4() { 32 } else { 128 };
        let reached = match (prefix, peer) {
            (Some(prefix), _) => (own, prefix),
            (None, Some(peer)) => (peer, all),
            (None, None) => (own, all),
        };
        Self { own, reached }
    }
}

/// Who knows where an interface is: the file that it belongs to.
pub trait Finder: std::fmt::Debug + Send + Sync {
    /// The network namespace that it is in, and what it is called there.
    fn find(&self) -> io::Result<(OwnedFd, String)>;
}

/// An interface, wherever its administrator has moved it.
#[derive(Debug)]
pub struct Handle {
    place: Mutex<Place>,
    finder: Box<dyn Finder>,
}

/// An interface by its number, in its namespace.
#[derive(Debug)]
struct Place {
    netlink: Netlink,
    name: String,
    index: i32,
}

impl Place {
    /// Looks for the interface `name` in the namespace that `netlink` asks.
    fn of(netlink: Netlink, name: String) -> io::Result<Self> {
        match netlink.find(&name)? {
            Some(link) => Ok(Self { netlink, name, index: link.index }),
            None => Err(Errno::NODEV.into()),
        }
    }
}

impl Handle {
    /// Of the interface `name`, which is in this thread's namespace now.
    pub fn new(name: &str, finder: Box<dyn Finder>) -> Result<Self> {
        let netlink = Netlink::open().os("socket")?;
        let place = Place::of(netlink, name.to_owned()).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::NODEV) => Error::Removed(name.to_owned()),
            _ => FailedCall { call: "RTM_GETLINK", source: error }.into(),
        })?;
        Ok(Self { place: Mutex::new(place), finder })
    }

    /// What it is called.
    pub fn name(&self) -> String {
        lock(&self.place).name.clone()
    }

    /// Asks the kernel about it. Where it is not any more, looks where it is, each time anew: a socket that stayed there would keep
    /// that namespace from going, and the interface with it.
    fn ask<T>(&self, question: impl Fn(&Netlink, i32) -> io::Result<T>) -> io::Result<T> {
        let mut place = lock(&self.place);
        let answer = question(&place.netlink, place.index);
        match &answer {
            Err(error) if Errno::from_io_error(error) == Some(Errno::NODEV) => {}
            _ => return answer,
        }
        // Nobody knows where: it was removed.
        let Ok(found) = self.find() else { return answer };
        place.name.clone_from(&found.name);
        question(&found.netlink, found.index)
    }

    fn find(&self) -> io::Result<Place> {
        let (namespace, name) = self.finder.find()?;
        // A namespace is a thread's: this one ends with it.
        thread::scope(|scope| {
            let found = scope.spawn(|| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                Place::of(Netlink::open()?, name)
            });
            found.join().expect("the thread that looks for an interface does not panic")
        })
    }

    /// Gives a new interface its MTU, makes it a port if it is to be one, switches it on, and gives it its address of IP.
    pub fn begin(&self, mtu: Option<u32>, config: &NicConfig) -> Result<()> {
        if let Some(mtu) = mtu {
            self.set_mtu(mtu)?;
        }
        if let Some(port) = &config.port {
            // Its bridge has the address for all, which comes of the same hardware address.
            write_setting("ipv6", &self.name(), "addr_gen_mode", "1").or_else(none_is_fine)?;
            self.join(port)?;
        }
        if let Some(ip) = config.ip {
            ignore_routes_without_carrier(&self.name(), ip.own)?;
        }
        self.switch_on()?;
        config.ip.map_or(Ok(()), |ip| self.give_ip(ip, config.port.as_ref()))
    }

    /// Gives it its address of IP, and who is reached by it if it is a port. What it has already stays.
    fn give_ip(&self, IpConfig { own, reached: (reached, bits) }: IpConfig, port: Option<&PortConfig>) -> Result<()> {
        let failed = |source| Error::Ip { name: self.name(), address: own, source };
        self.ask(|netlink, index| netlink.add_address(index, own, reached, bits)).map_err(failed)?;
        match port {
            // What the peer answers comes in by the bridge, so nobody can be asked by this interface.
            Some(port) => self
                .ask(|netlink, index| netlink.add_neighbour(index, reached, port.peer))
                .map_err(|error| self.failed("RTM_NEWNEIGH", error)),
            None => Ok(()),
        }
    }

    /// Makes it the port that it is to be, if it is none any more, and tells the kernel again what that forgot while it was off.
    /// Returns whether it was none.
    pub fn keep_port(&self, port: &PortConfig, ip: Option<IpConfig>) -> Result<bool> {
        let bridge =
            self.ask(|netlink, _| netlink.find(&port.bridge)).map_err(|error| self.failed("RTM_GETLINK", error))?;
        let link = self.link()?;
        let is_port = link.master == bridge.map_or(-1, |bridge| bridge.index);
        if is_port {
            let named = self.ask(|netlink, _| name_peer(netlink, link.master, port));
            named.map_err(|error| self.failed("RTM_NEWNEIGH", error))?;
        } else {
            self.join(port)?;
        }
        if let Some(ip) = ip
            && link.up
        {
            self.give_ip(ip, Some(port))?;
        }
        Ok(!is_port)
    }

    /// What a port had said of its peer is said no more.
    pub fn leave(&self, port: &PortConfig) {
        if let Some(ip) = port.peer_ip {
            // Where the bridge is gone, so is what it said.
            let _ = self.ask(|netlink, _| match netlink.find(&port.bridge)? {
                Some(bridge) => netlink.delete_neighbour(bridge.index, ip),
                None => Ok(()),
            });
        }
    }

    fn join(&self, port: &PortConfig) -> Result<()> {
        let joined = self.ask(|netlink, index| match netlink.find(&port.bridge)? {
            Some(bridge) => {
                netlink.join_bridge(index, bridge.index, port.peer)?;
                name_peer(netlink, bridge.index, port)
            }
            None => Err(Errno::NOTUNIQ.into()),
        });
        joined.map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::NOTUNIQ) => Error::NoBridge { name: self.name(), bridge: port.bridge.clone() },
            _ => self.failed("RTM_NEWLINK of a bridge's port", error),
        })
    }

    /// Has the kernel act on a carrier that came or went: asked about an interface it does so, from Linux 6.8 on, and else up to a
    /// second later, where another carrier came or went shortly before.
    pub fn settle_carrier(&self, port: Option<&PortConfig>) {
        let _ = self.ask(Netlink::link);
        if let Some(port) = port {
            let _ = self.ask(|netlink, _| netlink.find(&port.bridge));
        }
    }

    fn switch_on(&self) -> Result<()> {
        if self.link()?.up {
            return Ok(());
        }
        self.ask(Netlink::set_up).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::PERM) => Error::NotPermitted(self.name()),
            _ => FailedCall { call: "RTM_NEWLINK", source: error }.into(),
        })
    }

    /// What it is like now: its administrator may change that at any time.
    pub fn link(&self) -> Result<Link> {
        self.ask(Netlink::link).map_err(|error| self.failed("RTM_GETLINK", error))
    }

    /// Changes its address.
    pub fn set_mac(&self, mac: Mac) -> Result<()> {
        let set = self.ask(|netlink, index| netlink.set_mac(index, mac));
        set.map_err(|source| Error::Mac { name: self.name(), mac, source })
    }

    /// Changes its MTU.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        // Who was given an interface by root may not change it, nor need to.
        if self.link()?.mtu == mtu {
            return Ok(());
        }
        self.ask(|netlink, index| netlink.set_mtu(index, mtu)).map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::NODEV) => Error::Removed(self.name()),
            _ => Error::Mtu { name: self.name(), mtu, source },
        })
    }

    /// Takes its carrier off, where its driver lets others do that.
    pub fn lose_carrier(&self) -> io::Result<()> {
        self.ask(Netlink::lose_carrier)
    }

    /// Why a call about it failed.
    pub fn failed(&self, call: &'static str, source: io::Error) -> Error {
        match Errno::from_io_error(&source) {
            // The descriptor has no interface any more.
            Some(Errno::BADFD | Errno::NODEV | Errno::NXIO | Errno::NOTCONN) => Error::Removed(self.name()),
            _ => FailedCall { call, source }.into(),
        }
    }
}

/// Says at a bridge who has the peer's address of IP, so that no other peer can say that it has.
fn name_peer(netlink: &Netlink, bridge: i32, port: &PortConfig) -> io::Result<()> {
    port.peer_ip.map_or(Ok(()), |ip| netlink.add_neighbour(bridge, ip, port.peer))
}

/// Writes a setting of an interface in the namespace of this thread.
pub fn write_setting(family: &str, interface: &str, setting: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{family}/conf/{interface}/{setting}");
    fs::write(&path, value).map_err(|source| Error::Setting { path: path.into(), source })
}

/// What a kernel has not, such as IPv6, need not be set.
pub fn none_is_fine(error: Error) -> Result<()> {
    match &error {
        Error::Setting { source, .. } if source.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

/// From the moment in which the carrier goes the kernel takes other routes (N-13). Of the namespace of this thread.
pub fn ignore_routes_without_carrier(interface: &str, own: IpAddr) -> Result<()> {
    let family = if own.is_ipv4() { "ipv4" } else { "ipv6" };
    write_setting(family, interface, "ignore_routes_with_linkdown", "1")
}

/// Makes an interface `name` in the namespace that it is to be in.
pub fn in_namespace<T: Send>(name: &str, netns: Option<&str>, make: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    check_name(name)?;
    enter_and(netns, make)
}

/// Does something in a namespace.
pub fn enter_and<T: Send>(netns: Option<&str>, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    match netns {
        None => act(),
        // A namespace is a thread's: this one ends with it.
        Some(netns) => thread::scope(|scope| {
            let acted = scope.spawn(|| {
                enter(&namespace_path(netns))?;
                act()
            });
            acted.join().expect("the thread that acts in a namespace does not panic")
        }),
    }
}

/// Whether an interface can be called so.
pub fn check_name(name: &str) -> Result<()> {
    let fits = (1..=15).contains(&name.len()) && name != "." && name != "..";
    let plain = name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:%".contains(&byte));
    if fits && plain { Ok(()) } else { Err(Error::BadName(name.into())) }
}

/// Where the kernel shows a namespace: a name is one of `ip netns`.
#[must_use]
pub fn namespace_path(netns: &str) -> PathBuf {
    if netns.contains('/') { netns.into() } else { Path::new("/run/netns").join(netns) }
}

fn enter(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(|source| Error::NoNamespace { path: path.into(), source })?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).map_err(|error| {
        let (path, source) = (path.into(), error.into());
        if error == Errno::PERM { Error::Namespace { path, source } } else { Error::NoNamespace { path, source } }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_interface_can_have_are_refused() {
        for good in ["tmb0", "a", "fifteen-bytes-x", "a.b_c@d"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a:1", "tmb%d", "a b", "a\tb", "sixteen-bytes-xy", "ä"] {
            let error = check_name(bad).unwrap_err().to_string();
            assert!(error.contains("is no name of an interface"), "{error}");
        }
        assert_eq!(namespace_path("web").to_str(), Some("/run/netns/web"));
        assert_eq!(namespace_path("/proc/7/ns/net").to_str(), Some("/proc/7/ns/net"));
    }
}
