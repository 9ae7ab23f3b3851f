// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A TAP interface: where frames come from and go to.

use std::{
    fs::File,
    io::{self, IoSliceMut},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    thread,
};

use rustix::{
    io::Errno,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use tombolo::SharedSlice;

use crate::{
    error::{Error, Os, Result},
    features::Features,
    frame::HEADER,
    mac::Mac,
    netlink::{Link, Netlink},
    sys::TunFile,
};

/// What may come from the interface (`TUN_F_…`), beside the feature that allows it.
const OFFLOADS: [(Features, u32); 5] = [
    (Features::CHECKSUM, 0x01),
    (Features::TSO4, 0x02),
    (Features::TSO6, 0x04),
    (Features::ECN, 0x08),
    // Over IPv4 and IPv6.
    (Features::USO, 0x60),
];

/// How an interface is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TapConfig {
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
}

/// A TAP interface, which goes with this value unless somebody made it to stay.
#[derive(Debug)]
pub struct Tap {
    file: TunFile,
    netlink: Netlink,
    name: String,
    index: i32,
    takes: Features,
}

impl Tap {
    /// Makes the interface, switched on and without a carrier.
    pub fn open(config: &TapConfig) -> Result<Self> {
        check_name(&config.name)?;
        match &config.netns {
            None => Self::open_here(config),
            // A namespace is a thread's: this one ends with it.
            Some(netns) => thread::scope(|scope| {
                let opened = scope.spawn(|| {
                    enter(&namespace_path(netns))?;
                    Self::open_here(config)
                });
                opened.join().expect("the thread that makes an interface does not panic")
            }),
        }
    }

    fn open_here(config: &TapConfig) -> Result<Self> {
        let name = config.name.clone();
        let netlink = Netlink::open().os("socket")?;
        let before = netlink.find(&name).os("RTM_GETLINK")?;
        let file = TunFile::open().map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Error::NoTun,
            Some(Errno::ACCESS | Errno::PERM) => Error::NotPermitted(name.clone()),
            _ => Error::Os { call: "open /dev/net/tun", source: error },
        })?;
        file.set_interface(&name).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::PERM | Errno::ACCESS) => Error::NotPermitted(name.clone()),
            Some(Errno::BUSY | Errno::EXIST) => Error::NameTaken(name.clone()),
            Some(Errno::INVAL) if before.is_some() => Error::NameTaken(name.clone()),
            _ => Error::Os { call: "TUNSETIFF", source: error },
        })?;
        file.set_carrier(false).os("TUNSETCARRIER")?;
        file.set_header(HEADER).os("TUNSETVNETHDRSZ")?;
        // What the kernel can send it can receive; before Linux 6.2 it knew no segments of UDP.
        let takes = [Features::all(), Features::all().without(Features::USO)]
            .into_iter()
            .find(|features| file.set_offload(offload_bits(*features)).is_ok())
            .unwrap_or(Features::none());
        file.set_offload(0).os("TUNSETOFFLOAD")?;
        let index = netlink.find(&name).os("RTM_GETLINK")?.ok_or_else(|| Error::Removed(name.clone()))?.index;
        let default_mac = config.default_mac.filter(|_| before.is_none());
        if let Some(mac) = config.mac.or(default_mac) {
            netlink.set_mac(index, mac).map_err(|source| Error::Mac { name: name.clone(), mac, source })?;
        }
        let tap = Self { file, netlink, name, index, takes };
        if let Some(mtu) = config.mtu {
            tap.set_mtu(mtu)?;
        }
        if !tap.link()?.up {
            tap.netlink.set_up(index).map_err(|error| match Errno::from_io_error(&error) {
                Some(Errno::PERM) => Error::NotPermitted(tap.name.clone()),
                _ => Error::Os { call: "RTM_NEWLINK", source: error },
            })?;
        }
        Ok(tap)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the kernel can receive from it.
    pub fn takes(&self) -> Features {
        self.takes
    }

    /// What it is like now: its administrator may change that at any time.
    pub fn link(&self) -> Result<Link> {
        self.netlink.link(self.index).map_err(|error| self.failed("RTM_GETLINK", error))
    }

    /// Changes its MTU.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        // Who was given an interface by root may not change it, nor need to.
        if self.link()?.mtu == mtu {
            return Ok(());
        }
        self.netlink.set_mtu(self.index, mtu).map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::NODEV) => Error::Removed(self.name.clone()),
            _ => Error::Mtu { name: self.name.clone(), mtu, source },
        })
    }

    /// Says what its frames may need done by who receives them.
    pub fn set_offload(&self, features: Features) -> Result<()> {
        self.file.set_offload(offload_bits(features)).map_err(|error| self.failed("TUNSETOFFLOAD", error))
    }

    /// Says whether there is somebody at the other end.
    pub fn set_carrier(&self, on: bool) -> Result<()> {
        self.file.set_carrier(on).map_err(|error| self.failed("TUNSETCARRIER", error))
    }

    fn failed(&self, call: &'static str, source: io::Error) -> Error {
        match Errno::from_io_error(&source) {
            // The descriptor has no interface any more.
            Some(Errno::BADFD | Errno::NODEV) => Error::Removed(self.name.clone()),
            _ => Error::Os { call, source },
        }
    }

    /// Reads a header and a frame into the two parts; `None` where there is none. Never blocks.
    pub fn read(&self, first: &mut [u8], second: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::io::readv(&self.file, &mut [IoSliceMut::new(first), IoSliceMut::new(second)]) {
            Ok(len) => Ok(Some(len)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a header and a frame, whose head is private and whose rest the kernel copies from shared memory.
    pub fn write(&self, head: &[u8], rest: [SharedSlice<'_>; 2]) -> io::Result<usize> {
        SharedSlice::write_with_head(&self.file, head, rest)
    }

    /// Throws away what waits to be sent.
    pub fn discard_waiting(&self) -> u64 {
        let mut buffer = [0; 2048];
        // As many as its queue holds at most, so that a flood cannot keep this from ending.
        (0..4096).take_while(|_| matches!(self.read(&mut buffer, &mut []), Ok(Some(_)))).count() as u64
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn offload_bits(features: Features) -> u32 {
    OFFLOADS.iter().filter(|(feature, _)| features.has(*feature)).map(|(_, bits)| bits).sum()
}

fn check_name(name: &str) -> Result<()> {
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

    #[test]
    fn n4_kernel_is_asked_for_what_the_peer_takes() {
        assert_eq!(offload_bits(Features::none()), 0);
        assert_eq!(offload_bits(Features::all()), 0x6f);
        assert_eq!(offload_bits(Features::all().without(Features::USO)), 0x0f);
        assert_eq!(offload_bits(Features::CHECKSUM), 1);
    }
}
