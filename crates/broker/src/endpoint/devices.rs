// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines what the broker needs of the machine's devices.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use tombolo_control::Boxes;

use crate::endpoint::{connections::Agreement, host_session::LinkNews};

/// A pair of boxes (B-3), and the doorbells by which their owners notify each other.
pub trait Pages: Boxes {
    /// Notifies the other side.
    fn notify(&self);
    /// Discards earlier notifications. Never blocks.
    fn drain(&self);
}

/// The devices of this machine.
pub trait Devices {
    /// Boxes in the devices' memory.
    type Pages: Pages;
    /// Memory of a link.
    type Region: Region<Pages = Self::Pages>;

    /// Returns the boxes shared with the host.
    fn host(&mut self) -> &mut Self::Pages;

    /// Returns a descriptor that polls readable once the host has notified this machine.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Returns a descriptor that polls readable when a device arrived, if anything reports that.
    fn arrivals(&self) -> Option<BorrowedFd<'_>>;

    /// Looks for another device after the one shared with the host was taken away (B-27). Returns `None` if there will
    /// never be another.
    ///
    /// # Errors
    /// `NotFound` and `PermissionDenied` while there is none, or this user may not open it yet; other errors of the
    /// system.
    fn renew(&mut self) -> Option<io::Result<()>> {
        None
    }

    /// Opens the memory of a link that the host announced.
    ///
    /// # Errors
    /// `NotFound`, `PermissionDenied` and `ResourceBusy` while its devices are not there, may not be opened by this
    /// user or are not free yet; other errors of the system.
    fn open(&mut self, news: &LinkNews) -> io::Result<Self::Region>;
}

/// One of a link's two regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The region that this side writes.
    Own,
    /// The peer's region.
    Theirs,
}

/// Memory of a link.
pub trait Region {
    /// Boxes in the region's memory.
    type Pages: Pages;

    /// Returns the boxes shared with the peer's broker.
    fn pages(&mut self) -> &mut Self::Pages;

    /// Returns a descriptor that polls readable once the peer's broker has notified this one.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Changes the number of the peer's doorbell.
    fn set_doorbell(&mut self, doorbell: u16);

    /// Zeroes `len` bytes of the own region from `offset` on.
    ///
    /// # Errors
    /// The memory cannot be reached.
    fn clear(&mut self, offset: u64, len: u64) -> io::Result<()>;

    /// Zeroes, while nobody waits, the memory of a connection that is over, if doing so twice costs little.
    fn clear_ahead(&mut self, _offset: u64, _len: u64) {}

    /// Returns the descriptors of a program's own side of a connection, in the order of V-2, without the socket.
    ///
    /// # Errors
    /// Errors of the system.
    fn own(&mut self, made: &Agreement) -> io::Result<Vec<OwnedFd>>;

    /// Returns the peer's window of a connection.
    ///
    /// # Errors
    /// Errors of the system.
    fn theirs(&mut self, made: &Agreement) -> io::Result<OwnedFd>;

    /// Stores this broker's end of a program's connection socket where a later broker finds it (B-16). Called once more
    /// when the peer has agreed. Does nothing where there is no such place.
    ///
    /// # Errors
    /// Errors of the system.
    fn store_connection(&mut self, _made: &Agreement, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Returns the sockets of connections that an earlier broker left, by serial. Called once.
    fn sockets(&mut self) -> BTreeMap<u32, OwnedFd> {
        BTreeMap::new()
    }

    /// Returns the connections of which programs have windows, as far as the windows tell; unknown numbers are 0.
    ///
    /// # Errors
    /// Errors of the system.
    fn held(&mut self) -> io::Result<Vec<Agreement>>;

    /// Returns a descriptor that polls readable when [`held`](Self::held) may have changed, if anything reports that.
    fn departures(&self) -> Option<BorrowedFd<'_>>;

    /// Returns a descriptor that polls readable when the peer notifies without end, if anything reports that (B-8).
    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns whether the peer was found to notify without end since the last call (B-8).
    fn is_stormed(&mut self) -> bool {
        false
    }

    /// Copies bytes at `offset` of a region, at most to the end of that page (B-20).
    ///
    /// # Errors
    /// The memory cannot be reached, or not from here.
    fn peek(&mut self, _part: Part, _offset: u64, _bytes: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Closes the state of a program that is gone and notifies its peer, where the kernel does not (V-4).
    fn close_orphaned(&mut self, made: &Agreement);

    /// Ends all waits of programs, because the peer or the link is gone.
    fn hang_up(&mut self);
}
