// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the broker asks of the machine.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use tombolo_control::Boxes;

use crate::endpoint::{connections::Agreement, host_session::LinkNews};

/// A pair of boxes (B-3), and how their owners ring each other.
pub trait Pages: Boxes {
    /// Rings the other side.
    fn notify(&self);
    /// Forgets rings of before. Never blocks.
    fn drain(&self);
}

/// The devices of this machine.
pub trait Devices {
    /// Boxes in their memory.
    type Pages: Pages;
    /// Memory of a link.
    type Region: Region<Pages = Self::Pages>;

    /// The boxes that are shared with the host.
    fn host(&mut self) -> &mut Self::Pages;

    /// Polls readable once the host rang.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Polls readable when a device came, if anything can tell.
    fn arrivals(&self) -> Option<BorrowedFd<'_>>;

    /// Looks for another device, where the one that is shared with the host was taken away (B-27). None: there is never
    /// another.
    ///
    /// # Errors
    /// `NotFound` and `PermissionDenied` while there is none, or it is not ours yet; what the system says.
    fn renew(&mut self) -> Option<io::Result<()>> {
        None
    }

    /// The memory of a link that the host told of.
    ///
    /// # Errors
    /// `NotFound`, `PermissionDenied` and `ResourceBusy` while its devices are not there, not ours or not free yet; what
    /// the system says.
    fn open(&mut self, news: &LinkNews) -> io::Result<Self::Region>;
}

/// Which of a link's two regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// That which this end writes.
    Own,
    /// The peer's.
    Theirs,
}

/// Memory of a link.
pub trait Region {
    /// Boxes in their memory.
    type Pages: Pages;

    /// The boxes that are shared with the peer's broker.
    fn pages(&mut self) -> &mut Self::Pages;

    /// Polls readable once the peer's broker rang.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The number by which the peer is rung is another one now.
    fn set_doorbell(&mut self, doorbell: u16);

    /// Makes `len` bytes of the own part from `offset` on zero.
    ///
    /// # Errors
    /// The memory cannot be reached.
    fn clear(&mut self, offset: u64, len: u64) -> io::Result<()>;

    /// The same for a connection that is over, while nobody waits: where it costs little to be done twice.
    fn clear_ahead(&mut self, _offset: u64, _len: u64) {}

    /// What a program gets of its own side of a connection, in the order of V-2, without the socket.
    ///
    /// # Errors
    /// What the system says.
    fn own(&mut self, made: &Agreement) -> io::Result<Vec<OwnedFd>>;

    /// The peer's window.
    ///
    /// # Errors
    /// What the system says.
    fn theirs(&mut self, made: &Agreement) -> io::Result<OwnedFd>;

    /// Stores this broker's end of a program's connection socket where a later broker finds it (B-16). It is called
    /// once more when the peer agreed, and does nothing where there is no such place.
    ///
    /// # Errors
    /// What the system says.
    fn store_connection(&mut self, _made: &Agreement, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Sockets of connections that an earlier broker left, by serial. Asked for once.
    fn sockets(&mut self) -> BTreeMap<u32, OwnedFd> {
        BTreeMap::new()
    }

    /// The connections of which programs have windows, as far as the windows say: what is not known is 0.
    ///
    /// # Errors
    /// What the system says.
    fn held(&mut self) -> io::Result<Vec<Agreement>>;

    /// Polls readable when that may have changed since it was asked for, if anything can tell.
    fn departures(&self) -> Option<BorrowedFd<'_>>;

    /// Polls readable when the peer notifies without end, if anything can tell (B-8).
    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether the peer was found to notify without end since this was asked last (B-8).
    fn is_stormed(&mut self) -> bool {
        false
    }

    /// Copies what stands at `offset` of a region, at most to the end of that page (B-20).
    ///
    /// # Errors
    /// The memory cannot be reached, or not from here.
    fn peek(&mut self, _part: Part, _offset: u64, _bytes: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Closes the state of a program that is gone and notifies its peer, where the kernel does not (V-4).
    fn bequeath(&mut self, made: &Agreement);

    /// The peer is gone, or the link is: ends all waits of programs.
    fn hang_up(&mut self);
}
