// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An interface whose frames the kernel's module moves: this process exchanges hellos, and lends the module the
//! channel.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::io::Errno;
use tombolo::{Ending, Messages};
use tombolo_backends::module::{
    interface::{FrameLimits, Interface},
    uapi::{self, NetStat},
};
use tombolo_channel::driver::{Lend, Lent};

use crate::{
    counters::{Dropped, Figures},
    error::{Error, FailedCall, Os, Result},
    features::Features,
    handle::{Finder, Handle, NicConfig, in_namespace},
    hello::Hello,
    mac::Mac,
    pump::End,
};

/// MTU of an interface for which none is configured.
const MTU: u32 = 1500;

/// An interface of the module, which is removed when this value is dropped.
#[derive(Debug)]
pub struct Kernel {
    interface: Interface,
    handle: Handle,
    takes: Features,
}

impl Kernel {
    /// Returns whether the module is there and makes interfaces.
    pub fn is_offered() -> bool {
        Interface::open().is_ok()
    }

    /// Makes the interface, switched on and without a carrier.
    pub fn open(config: &NicConfig) -> Result<Self> {
        in_namespace(&config.name, config.netns.as_deref(), || Self::open_here(config))
    }

    fn open_here(config: &NicConfig) -> Result<Self> {
        let name = config.name.clone();
        let interface = Interface::open().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NoModule,
            io::ErrorKind::PermissionDenied => Error::NotPermitted(name.clone()),
            _ => FailedCall { call: "open /dev/net/tombolo", source: error }.into(),
        })?;
        let mac = match config.mac.or(config.default_mac) {
            Some(mac) => mac,
            None => Mac::local(tombolo_os::random::bytes().os("getrandom")?),
        };
        let takes = interface.make(&name, mac.0, config.mtu.unwrap_or(MTU));
        let takes = takes.map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::PERM) => Error::NotPermitted(name.clone()),
            Some(Errno::EXIST) => Error::NameTaken(name.clone()),
            Some(Errno::INVAL) => Error::Mac { name: name.clone(), mac, source },
            _ => FailedCall { call: "TOMBOLO_IOC_NET", source }.into(),
        })?;
        let handle = Handle::new(&name, Box::new(interface.try_clone().os("dup")?))?;
        handle.begin(None, config)?;
        Ok(Self { interface, handle, takes: Features::from_bits(takes) })
    }

    /// Returns the handle by which the interface is queried and configured.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the features that the kernel can receive through the interface.
    pub fn takes(&self) -> Features {
        self.takes
    }

    /// Lends the channel to the module, which switches the carrier on. Returns the end of the link if it ended before
    /// that.
    pub fn begin(
        &self,
        channel: &mut Messages,
        own: &Hello,
        peer: &Hello,
        any_source: bool,
    ) -> Result<std::result::Result<Lent, End>> {
        let lent = channel.lend().ok_or(Error::NotInModule)?;
        let limits = FrameLimits {
            gives: peer.features.bits(),
            gives_most: peer.frame_most,
            takes: own.features.bits(),
            takes_most: own.frame_most,
            source: peer.mac.0,
            any_source,
        };
        match self.interface.take_over(&lent.parts, &lent.records, &limits) {
            Ok(()) => Ok(Ok(lent)),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NODEV) => Ok(Err(End::Peer(Ending::Revoked))),
                // All but the peer's ring is as for other links.
                Some(Errno::INVAL) => Ok(Err(End::Unfit)),
                _ => Err(self.handle.failed("TOMBOLO_IOC_NET_LINK", error)),
            },
        }
    }

    /// Switches the carrier off and takes the channel back. Returns how the link ended, if it had.
    pub fn finish(&self, channel: &mut Messages, lent: &Lent) -> Result<Option<End>> {
        let failed = |error| self.handle.failed("TOMBOLO_IOC_NET_UNLINK", error);
        let (turn, records) = self.interface.give_back(lent.records).map_err(failed)?;
        if let Err(error) = channel.take_back(&records) {
            return Ok(Some(End::Channel(error)));
        }
        Ok(match turn.ended {
            0 => None,
            uapi::NET_ENDED_CLOSED => Some(End::Peer(Ending::Closed)),
            uapi::NET_ENDED_ABORTED => Some(End::Peer(Ending::Aborted)),
            uapi::NET_ENDED_REVOKED => Some(End::Peer(Ending::Revoked)),
            uapi::NET_ENDED_CORRUPT => Some(End::Corrupt(turn.clause)),
            _ => Some(End::Peer(Ending::ProcessGone)),
        })
    }

    /// Returns the counters since the interface was made: sent and received.
    pub fn figures(&self) -> Option<[Figures; 2]> {
        self.interface.counted().ok().map(|stat| figures(&stat))
    }
}

impl Finder for Interface {
    fn find(&self) -> io::Result<(OwnedFd, String)> {
        self.place()
    }
}

/// Polls readable once the link has ended by itself, or the interface was removed.
impl AsFd for Kernel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.interface.as_fd()
    }
}

/// Names the module's counters (`TOMBOLO_NET_FRAMES` and so on) as this crate does.
fn figures(stat: &NetStat) -> [Figures; 2] {
    [stat.sent, stat.received].map(|of| Figures {
        frames: of[0],
        bytes: of[1],
        segments: of[2],
        full: of[3],
        dropped: Dropped {
            short: of[4],
            long: of[5],
            header: of[6],
            feature: of[7],
            source: of[8],
            stale: of[9],
            refused: of[10],
            down: 0,
            memory: of[11],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n12_counters_of_the_module_have_this_crates_names() {
        let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel/ivshmem/uapi/tombolo_ivshmem.h");
        let header = std::fs::read_to_string(header).expect("the module's header is in the repository");
        let at = |name: &str| {
            let line = header.lines().find_map(|line| line.strip_prefix("#define TOMBOLO_NET_")?.strip_prefix(name));
            let number = line.and_then(|rest| rest.split_whitespace().next()).expect(name);
            number.parse::<usize>().expect("a number")
        };
        let stat = NetStat { sent: std::array::from_fn(|at| at as u64), ..NetStat::default() };
        let [sent, received] = figures(&stat);
        assert_eq!(received, Figures::default());
        let here =
            [("FRAMES\t", sent.frames), ("BYTES\t", sent.bytes), ("SEGMENTS\t", sent.segments), ("FULL\t", sent.full)];
        for (name, value) in here {
            assert_eq!(at(name) as u64, value, "{name}");
        }
        for (name, value) in sent.dropped.named().into_iter().filter(|(name, _)| *name != "down") {
            assert_eq!(at(&format!("{}\t", name.to_uppercase())) as u64, value, "{name}");
        }
    }
}
