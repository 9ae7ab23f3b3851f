// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queries and configures an interface, whichever engine moves its frames.

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

/// Configuration of an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NicConfig {
    /// Name of the interface.
    pub name: String,
    /// Network namespace in which to make the interface: a name as `ip netns` knows it, or a path.
    pub netns: Option<String>,
    /// Its hardware address, else the one that the kernel chose.
    pub mac: Option<Mac>,
    /// Its hardware address if the interface is new and `mac` gives none.
    pub default_mac: Option<Mac>,
    /// Its MTU, else 1500 or the MTU that it has.
    pub mtu: Option<u32>,
    /// Its IP address, if it is to get one.
    pub ip: Option<IpConfig>,
    /// The bridge whose port it is to be, if any.
    pub port: Option<PortConfig>,
}

/// The bridge whose port an interface is, and the peer behind the port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortConfig {
    /// Name of the bridge, in the namespace of the interface.
    pub bridge: String,
    /// Only hardware address behind the port.
    pub peer: Mac,
    /// The peer's IP address, if it is reached through the bridge.
    pub peer_ip: Option<IpAddr>,
}

/// An IP address, and the addresses reached through it. Routes that result from it are ignored while there is no
/// carrier (N-13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpConfig {
    /// The interface's own address.
    pub own: IpAddr,
    /// The addresses reached: an address, and the length of its prefix in bits.
    pub reached: (IpAddr, u8),
}

impl IpConfig {
    /// Makes an address through which `prefix` bits are reached, or else the `peer` alone, or else nothing.
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

/// Finds an interface by the open file to which it belongs.
pub trait Finder: std::fmt::Debug + Send + Sync {
    /// Returns the interface's network namespace, and its name there.
    fn find(&self) -> io::Result<(OwnedFd, String)>;
}

/// An interface, wherever its administrator has moved it.
#[derive(Debug)]
pub struct Handle {
    place: Mutex<Place>,
    finder: Box<dyn Finder>,
}

/// An interface by its number in its namespace.
#[derive(Debug)]
struct Place {
    netlink: Netlink,
    name: String,
    index: i32,
}

impl Place {
    /// Finds the interface `name` in the namespace of `netlink`.
    fn of(netlink: Netlink, name: String) -> io::Result<Self> {
        match netlink.find(&name)? {
            Some(link) => Ok(Self { netlink, name, index: link.index }),
            None => Err(Errno::NODEV.into()),
        }
    }
}

impl Handle {
    /// Makes a handle of the interface `name`, which is in this thread's namespace now.
    pub fn new(name: &str, finder: Box<dyn Finder>) -> Result<Self> {
        let netlink = Netlink::open().os("socket")?;
        let place = Place::of(netlink, name.to_owned()).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::NODEV) => Error::Removed(name.to_owned()),
            _ => FailedCall { call: "RTM_GETLINK", source: error }.into(),
        })?;
        Ok(Self { place: Mutex::new(place), finder })
    }

    /// Returns the interface's name.
    pub fn name(&self) -> String {
        lock(&self.place).name.clone()
    }

    /// Asks the kernel about the interface. If it has left its namespace, looks for it, each time anew: a socket left
    /// open in the new namespace would keep that, and the interface with it, from going away.
    fn ask<T>(&self, question: impl Fn(&Netlink, i32) -> io::Result<T>) -> io::Result<T> {
        let mut place = lock(&self.place);
        let answer = question(&place.netlink, place.index);
        match &answer {
            Err(error) if Errno::from_io_error(error) == Some(Errno::NODEV) => {}
            _ => return answer,
        }
        // If it cannot be found, it was removed.
        let Ok(found) = self.find() else { return answer };
        place.name.clone_from(&found.name);
        question(&found.netlink, found.index)
    }

    fn find(&self) -> io::Result<Place> {
        let (namespace, name) = self.finder.find()?;
        // The namespace belongs to one thread, and ends with it.
        thread::scope(|scope| {
            let found = scope.spawn(|| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                Place::of(Netlink::open()?, name)
            });
            found.join().expect("the thread that looks for an interface does not panic")
        })
    }

    /// Sets a new interface's MTU, makes it a port if it is to be one, switches it on, and gives it its IP address.
    pub fn begin(&self, mtu: Option<u32>, config: &NicConfig) -> Result<()> {
        if let Some(mtu) = mtu {
            self.set_mtu(mtu)?;
        }
        if let Some(port) = &config.port {
            // The bridge has the IPv6 address that results from their common hardware address, so its ports make none.
            write_setting("ipv6", &self.name(), "addr_gen_mode", "1").or_else(none_is_fine)?;
            self.join(port)?;
        }
        if let Some(ip) = config.ip {
            ignore_routes_without_carrier(&self.name(), ip.own)?;
        }
        self.switch_on()?;
        config.ip.map_or(Ok(()), |ip| self.give_ip(ip, config.port.as_ref()))
    }

    /// Adds the interface's IP address, and for a port a neighbour entry of its peer. Existing addresses and entries
    /// stay.
    fn give_ip(&self, IpConfig { own, reached: (reached, bits) }: IpConfig, port: Option<&PortConfig>) -> Result<()> {
        let failed = |source| Error::Ip { name: self.name(), address: own, source };
        self.ask(|netlink, index| netlink.add_address(index, own, reached, bits)).map_err(failed)?;
        match port {
            // The peer's answers arrive at the bridge, so this interface cannot ask for the peer's hardware address.
            Some(port) => self
                .ask(|netlink, index| netlink.add_neighbour(index, reached, port.peer))
                .map_err(|error| self.failed("RTM_NEWNEIGH", error)),
            None => Ok(()),
        }
    }

    /// Makes the interface a port again if it no longer is one, and restores what the kernel forgot while it was off.
    /// Returns whether it was no port.
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

    /// Removes the port's neighbour entry of its peer from the bridge.
    pub fn leave(&self, port: &PortConfig) {
        if let Some(ip) = port.peer_ip {
            // If the bridge is gone, so are its entries.
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

    /// Makes the kernel act on a carrier that changed. From Linux 6.8 on it does so when asked about the interface.
    /// Otherwise it may take up to a second, if another carrier changed shortly before.
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

    /// Returns the interface's properties, which its administrator may change at any time.
    pub fn link(&self) -> Result<Link> {
        self.ask(Netlink::link).map_err(|error| self.failed("RTM_GETLINK", error))
    }

    /// Changes the interface's hardware address.
    pub fn set_mac(&self, mac: Mac) -> Result<()> {
        let set = self.ask(|netlink, index| netlink.set_mac(index, mac));
        set.map_err(|source| Error::Mac { name: self.name(), mac, source })
    }

    /// Changes the interface's MTU.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        // A user to whom root gave the interface may not set its MTU, even to the same value.
        if self.link()?.mtu == mtu {
            return Ok(());
        }
        self.ask(|netlink, index| netlink.set_mtu(index, mtu)).map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::NODEV) => Error::Removed(self.name()),
            _ => Error::Mtu { name: self.name(), mtu, source },
        })
    }

    /// Switches the interface's carrier off, if its driver lets others do that.
    pub fn lose_carrier(&self) -> io::Result<()> {
        self.ask(Netlink::lose_carrier)
    }

    /// Makes the error of a failed call about the interface.
    pub fn failed(&self, call: &'static str, source: io::Error) -> Error {
        match Errno::from_io_error(&source) {
            // The descriptor no longer has an interface.
            Some(Errno::BADFD | Errno::NODEV | Errno::NXIO | Errno::NOTCONN) => Error::Removed(self.name()),
            _ => FailedCall { call, source }.into(),
        }
    }
}

/// Adds the neighbour entry of the peer's IP address at a bridge, so that no other peer can claim that address.
fn name_peer(netlink: &Netlink, bridge: i32, port: &PortConfig) -> io::Result<()> {
    port.peer_ip.map_or(Ok(()), |ip| netlink.add_neighbour(bridge, ip, port.peer))
}

/// Writes a setting of an interface in the namespace of this thread.
pub fn write_setting(family: &str, interface: &str, setting: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{family}/conf/{interface}/{setting}");
    fs::write(&path, value).map_err(|source| Error::Setting { path: path.into(), source })
}

/// Ignores the error that a kernel does not have a setting, for example of IPv6.
pub fn none_is_fine(error: Error) -> Result<()> {
    match &error {
        Error::Setting { source, .. } if source.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

/// Makes the kernel choose other routes from the moment in which the carrier is lost (N-13). Acts in this thread's
/// namespace.
pub fn ignore_routes_without_carrier(interface: &str, own: IpAddr) -> Result<()> {
    let family = if own.is_ipv4() { "ipv4" } else { "ipv6" };
    write_setting(family, interface, "ignore_routes_with_linkdown", "1")
}

/// Runs `make` in the namespace in which an interface `name` is to be made.
pub fn in_namespace<T: Send>(name: &str, netns: Option<&str>, make: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    check_name(name)?;
    enter_and(netns, make)
}

/// Runs `act` in a namespace.
pub fn enter_and<T: Send>(netns: Option<&str>, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    match netns {
        None => act(),
        // The namespace belongs to one thread, and ends with it.
        Some(netns) => thread::scope(|scope| {
            let acted = scope.spawn(|| {
                enter(&namespace_path(netns))?;
                act()
            });
            acted.join().expect("the thread that acts in a namespace does not panic")
        }),
    }
}

/// Checks that an interface can have this name.
pub fn check_name(name: &str) -> Result<()> {
    let fits = (1..=15).contains(&name.len()) && name != "." && name != "..";
    let plain = name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:%".contains(&byte));
    if fits && plain { Ok(()) } else { Err(Error::BadName(name.into())) }
}

/// Returns the path of a namespace; a name is one of `ip netns`.
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
