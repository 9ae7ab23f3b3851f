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

    /// Asks the kernel about it. Where it is not any more, looks where it is.
    fn ask<T>(&self, question: impl Fn(&Netlink, i32) -> io::Result<T>) -> io::Result<T> {
        let mut place = lock(&self.place);
        let answer = question(&place.netlink, place.index);
        match &answer {
            Err(error) if Errno::from_io_error(error) == Some(Errno::NODEV) => {}
            _ => return answer,
        }
        // Nobody knows where: it was removed.
        let Ok(found) = self.find() else { return answer };
        *place = found;
        question(&place.netlink, place.index)
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

    /// Gives a new interface its MTU, switches it on, and gives it its address of IP.
    pub fn begin(&self, mtu: Option<u32>, ip: Option<IpConfig>) -> Result<()> {
        if let Some(mtu) = mtu {
            self.set_mtu(mtu)?;
        }
        if let Some(ip) = ip {
            self.ignore_routes_without_carrier(ip.own)?;
        }
        self.switch_on()?;
        let Some(IpConfig { own, reached: (reached, bits) }) = ip else { return Ok(()) };
        let failed = |source| Error::Ip { name: self.name(), address: own, source };
        self.ask(|netlink, index| netlink.add_address(index, own, reached, bits)).map_err(failed)
    }

    /// From the moment in which the carrier goes the kernel takes other routes (N-13). Of the namespace of this thread.
    fn ignore_routes_without_carrier(&self, own: IpAddr) -> Result<()> {
        let family = if own.is_ipv4() { "ipv4" } else { "ipv6" };
        let path = format!("/proc/sys/net/{family}/conf/{}/ignore_routes_with_linkdown", self.name());
        fs::write(&path, "1").map_err(|source| Error::Setting { path: path.into(), source })
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

    /// Why a call about it failed.
    pub fn failed(&self, call: &'static str, source: io::Error) -> Error {
        match Errno::from_io_error(&source) {
            // The descriptor has no interface any more.
            Some(Errno::BADFD | Errno::NODEV | Errno::NXIO | Errno::NOTCONN) => Error::Removed(self.name()),
            _ => FailedCall { call, source }.into(),
        }
    }
}

/// Makes an interface in the namespace that it is to be in.
pub fn in_namespace<T: Send>(config: &NicConfig, make: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    check_name(&config.name)?;
    match &config.netns {
        None => make(),
        // A namespace is a thread's: this one ends with it.
        Some(netns) => thread::scope(|scope| {
            let made = scope.spawn(|| {
                enter(&namespace_path(netns))?;
                make()
            });
            made.join().expect("the thread that makes an interface does not panic")
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
