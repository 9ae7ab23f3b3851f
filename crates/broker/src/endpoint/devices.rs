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

    /// B-27. The device that is shared with the host was taken away: looks for another one. None: there is never another.
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
    fn open(&mut self, told: &LinkNews) -> io::Result<Self::Region>;
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
    fn set_bell(&mut self, bell: u16);

    /// Makes `len` bytes of the own part from `offset` on zero.
    ///
    /// # Errors
    /// The memory cannot be reached.
    fn clear(&mut self, offset: u64, len: u64) -> io::Result<()>;

    /// The same for a call that is over, while nobody waits: where it costs little to be done twice.
    fn clear_ahead(&mut self, _offset: u64, _len: u64) {}

    /// What a program gets of its own side of a call, in the order of V-2, without the socket.
    ///
    /// # Errors
    /// What the system says.
    fn own(&mut self, made: &Agreement) -> io::Result<Vec<OwnedFd>>;

    /// The peer's slice.
    ///
    /// # Errors
    /// What the system says.
    fn theirs(&mut self, made: &Agreement) -> io::Result<OwnedFd>;

    /// B-16. Puts this broker's end of a program's call socket where a later broker finds it, if there is such a place; once
    /// more when the peer agreed.
    ///
    /// # Errors
    /// What the system says.
    fn store_connection(&mut self, _made: &Agreement, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Sockets of calls that an earlier broker left, by serial. Asked for once.
    fn sockets(&mut self) -> BTreeMap<u32, OwnedFd> {
        BTreeMap::new()
    }

    /// The calls of which programs have slices, as far as the slices say: what is not known is 0.
    ///
    /// # Errors
    /// What the system says.
    fn held(&mut self) -> io::Result<Vec<Agreement>>;

    /// Polls readable when that may have changed since it was asked for, if anything can tell.
    fn departures(&self) -> Option<BorrowedFd<'_>>;

    /// B-8. Polls readable when the peer rings without end, if anything can tell.
    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// B-8. Whether the peer was found to ring without end since this was asked last.
    fn is_stormed(&mut self) -> bool {
        false
    }

    /// B-20. Copies what stands at `offset` of a region, at most to the end of that page.
    ///
    /// # Errors
    /// The memory cannot be reached, or not from here.
    fn peek(&mut self, _part: Part, _offset: u64, _bytes: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// V-4. A program is gone: closes its state and rings the peer, where the kernel does not.
    fn bequeath(&mut self, made: &Agreement);

    /// The peer is gone, or the link is: ends all waits of programs.
    fn hang_up(&mut self);
}
