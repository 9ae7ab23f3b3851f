// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Controls a network interface of the kernel module, for `tombolo net`. The interface takes over a channel whose
//! endpoints have exchanged their hellos.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use tombolo_domain::DriverParts;
use tombolo_layout::private::Record;

use crate::{
    sys,
    uapi::{self, NetArgs, NetLinkArgs, NetStat, NetTurn},
};

/// Device through which the module makes interfaces.
const DEVICE: &str = "/dev/net/tombolo";

/// Limits on frames, from both hellos (N-4 to N-6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameLimits {
    /// Feature bits of the peer's hello.
    pub gives: u64,
    /// Longest frame that the peer takes.
    pub gives_most: u32,
    /// Feature bits of the own hello.
    pub takes: u64,
    /// Longest frame that this endpoint takes.
    pub takes_most: u32,
    /// The peer's address.
    pub source: [u8; 6],
    /// Whether frames may come from other addresses than the peer's.
    pub any_source: bool,
}

/// An interface. The kernel removes it when this value and all its [clones](Self::try_clone) are dropped.
#[derive(Debug)]
pub struct Interface(File);

impl Interface {
    /// Opens the module's device, without an interface yet.
    ///
    /// # Errors
    /// `NotFound` if no module with interfaces is loaded.
    pub fn open() -> io::Result<Self> {
        OpenOptions::new().read(true).write(true).open(DEVICE).map(Self)
    }

    /// Makes the interface in this thread's network namespace. Returns the features that it can take (N-4).
    ///
    /// # Errors
    /// The kernel's error, as the module's header states.
    pub fn make(&self, name: &str, address: [u8; 6], mtu: u32) -> io::Result<u64> {
        let mut args = NetArgs { address, mtu, ..NetArgs::default() };
        let room = args.name.get_mut(..name.len()).filter(|room| room.len() < 16);
        room.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(name.as_bytes());
        Ok(sys::net(self.0.as_fd(), args)?.takes)
    }

    /// Lets the interface move the frames of a channel from now on.
    ///
    /// # Errors
    /// As for [`make`](Self::make).
    pub fn take_over(&self, parts: &DriverParts, records: &[Record; 2], limits: &FrameLimits) -> io::Result<()> {
        let [writer, reader] = records;
        let args = NetLinkArgs {
            own_fd: parts.own.as_raw_fd(),
            peer_fd: parts.peer.as_raw_fd(),
            own_segment: parts.own_at,
            peer_segment: parts.peer_at,
            tail: writer.position,
            head_seen: writer.peer_position,
            notified_data: writer.notified,
            head: reader.position,
            tail_seen: reader.peer_position,
            notified_space: reader.notified,
            gives: limits.gives,
            takes: limits.takes,
            gives_most: limits.gives_most,
            takes_most: limits.takes_most,
            state: parts.state,
            over: parts.over.into(),
            source: limits.source,
            flags: if limits.any_source { uapi::NET_ANY_SOURCE } else { 0 },
        };
        Ok(sys::net_link(self.0.as_fd(), args)?)
    }

    /// Takes the channel back. Returns how it ended, and both records in their present state.
    ///
    /// # Errors
    /// `NotConnected` if the interface has no channel: it may have been removed.
    pub fn give_back(&self, records: [Record; 2]) -> io::Result<(NetTurn, [Record; 2])> {
        let turn = sys::net_unlink(self.0.as_fd())?;
        let [writer, reader] = records;
        let writer = Record {
            position: turn.tail,
            peer_position: turn.head_seen,
            bound: turn.head_seen,
            notified: turn.notified_data,
            ..writer
        };
        let reader = Record {
            position: turn.head,
            peer_position: turn.tail_seen,
            bound: turn.head,
            notified: turn.notified_space,
            ..reader
        };
        Ok((turn, [writer, reader]))
    }

    /// Returns the network namespace of the interface and its name there. Both may have changed since it was made.
    ///
    /// # Errors
    /// The interface was removed, or the module is an older one.
    pub fn place(&self) -> io::Result<(OwnedFd, String)> {
        let (namespace, place) = sys::net_place(self.0.as_fd())?;
        let len = place.name.iter().position(|byte| *byte == 0).unwrap_or(place.name.len());
        Ok((namespace, String::from_utf8_lossy(&place.name[..len]).into_owned()))
    }

    /// Returns another value of the same interface, which lasts until the last of them is dropped.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Returns the counters of the interface.
    ///
    /// # Errors
    /// The interface was removed.
    pub fn counted(&self) -> io::Result<NetStat> {
        Ok(sys::net_stat(self.0.as_fd())?)
    }
}

/// The descriptor polls readable once the link has ended without a call of this process, or once the interface was
/// removed.
impl AsFd for Interface {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
