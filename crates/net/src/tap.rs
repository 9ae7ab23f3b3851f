// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A TAP interface, from which frames are read and to which they are written.

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::io::Errno;
use tombolo::SharedSlice;

use crate::{
    error::{Error, FailedCall, Os, Result},
    features::Features,
    frame::HEADER,
    handle::{Finder, Handle, NicConfig, in_namespace},
    netlink::Netlink,
    sys::TunFile,
};

/// Kernel's flags (`TUN_F_…`) for what may come from the interface, by the feature that allows it.
const OFFLOADS: [(Features, u32); 5] = [
    (Features::CHECKSUM, 0x01),
    (Features::TSO4, 0x02),
    (Features::TSO6, 0x04),
    (Features::ECN, 0x08),
    // Over IPv4 and IPv6.
    (Features::USO, 0x60),
];

/// A TAP interface, which is removed when this value is dropped, unless it was made persistent.
#[derive(Debug)]
pub struct Tap {
    file: TunFile,
    handle: Handle,
    takes: Features,
}

impl Tap {
    /// Makes the interface, switched on and without a carrier.
    pub fn open(config: &NicConfig) -> Result<Self> {
        in_namespace(&config.name, config.netns.as_deref(), || Self::open_here(config))
    }

    fn open_here(config: &NicConfig) -> Result<Self> {
        let name = config.name.clone();
        let before = Netlink::open().os("socket")?.find(&name).os("RTM_GETLINK")?;
        let file = TunFile::open().map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::NODEV | Errno::NXIO) => Error::NoTun,
            Some(Errno::ACCESS | Errno::PERM) => Error::NotPermitted(name.clone()),
            _ => FailedCall { call: "open /dev/net/tun", source: error }.into(),
        })?;
        file.set_interface(&name).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::PERM | Errno::ACCESS) => Error::NotPermitted(name.clone()),
            Some(Errno::BUSY | Errno::EXIST) => Error::NameTaken(name.clone()),
            Some(Errno::INVAL) if before.is_some() => Error::NameTaken(name.clone()),
            _ => FailedCall { call: "TUNSETIFF", source: error }.into(),
        })?;
        file.set_carrier(false).os("TUNSETCARRIER")?;
        file.set_header(HEADER).os("TUNSETVNETHDRSZ")?;
        // The kernel can receive what it can send; before Linux 6.2 it knew no segments of UDP.
        let takes = [Features::all(), Features::all().without(Features::USO)]
            .into_iter()
            .find(|features| file.set_offload(offload_bits(*features)).is_ok())
            .unwrap_or(Features::none());
        file.set_offload(0).os("TUNSETOFFLOAD")?;
        let handle = Handle::new(&name, Box::new(file.try_clone().os("dup")?))?;
        let default_mac = config.default_mac.filter(|_| before.is_none());
        if let Some(mac) = config.mac.or(default_mac) {
            handle.set_mac(mac)?;
        }
        handle.begin(config.mtu, config)?;
        Ok(Self { file, handle, takes })
    }

    /// Returns the handle by which the interface is queried and configured.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the features that the kernel can receive through the interface.
    pub fn takes(&self) -> Features {
        self.takes
    }

    /// Sets the work on frames that may be left to their receiver. Features that this kernel lacks are left out,
    /// because the peer's kernel may be newer.
    pub fn set_offload(&self, features: Features) -> Result<()> {
        self.file
            .set_offload(offload_bits(features.among(self.takes)))
            .map_err(|error| self.handle.failed("TUNSETOFFLOAD", error))
    }

    /// Sets the carrier, that is, whether there is a peer.
    pub fn set_carrier(&self, on: bool) -> Result<()> {
        self.file.set_carrier(on).map_err(|error| self.handle.failed("TUNSETCARRIER", error))
    }

    /// Reads a header and a frame into the two parts. Returns `None` if there is none. Never blocks.
    pub fn read(&self, first: &mut [u8], second: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::io::readv(&self.file, &mut [IoSliceMut::new(first), IoSliceMut::new(second)]) {
            Ok(len) => Ok(Some(len)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a header and a frame. `head` is private memory; the kernel copies the rest from shared memory.
    pub fn write(&self, head: &[u8], rest: [SharedSlice<'_>; 2]) -> io::Result<usize> {
        SharedSlice::write_with_head(&self.file, head, rest)
    }

    /// Discards the frames that wait to be sent. Returns their number.
    pub fn discard_waiting(&self) -> u64 {
        let mut buffer = [0; 2048];
        // Not more than the interface's queue holds, so that a flood of frames cannot keep this from ending.
        (0..4096).take_while(|_| matches!(self.read(&mut buffer, &mut []), Ok(Some(_)))).count() as u64
    }
}

impl Finder for TunFile {
    fn find(&self) -> io::Result<(OwnedFd, String)> {
        Ok((self.namespace()?, self.name()?))
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn offload_bits(features: Features) -> u32 {
    // The kernel refuses ECN without a kind of segments to which it could apply.
    let is_tcp = features.has(Features::TSO4) || features.has(Features::TSO6);
    let features = if is_tcp { features } else { features.without(Features::ECN) };
    OFFLOADS.iter().filter(|(feature, _)| features.has(*feature)).map(|(_, bits)| bits).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n4_kernel_is_asked_for_what_the_peer_takes() {
        assert_eq!(offload_bits(Features::none()), 0);
        assert_eq!(offload_bits(Features::all()), 0x6f);
        assert_eq!(offload_bits(Features::all().without(Features::USO)), 0x0f);
        assert_eq!(offload_bits(Features::CHECKSUM), 1);
        assert_eq!(offload_bits(Features::from_bits(0x09)), 1);
        assert_eq!(offload_bits(Features::from_bits(0x0d)), 0x0d);
        assert_eq!(offload_bits(Features::all().among(Features::from_bits(0x19))), 0x61);
    }
}
