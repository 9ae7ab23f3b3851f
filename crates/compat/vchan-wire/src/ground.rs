// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traits for what this layout needs: memory that both endpoints write, an event channel, and a place to meet.

use std::{fmt::Debug, io, os::fd::BorrowedFd, sync::Arc, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};

/// Memory that both endpoints map, and that the peer may change at any time. Offsets beyond its end are faults of the
/// caller.
///
/// All values are little-endian. Each call loads or stores once.
pub trait Shared: Send + Sync + Debug {
    /// Returns the number of bytes.
    fn len(&self) -> usize;
    /// Returns `false`: there is at least a page.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the byte at an offset.
    fn load8(&self, at: usize) -> u8;
    /// Stores a byte, after all that was written before (release).
    fn store8(&self, at: usize, value: u8);
    /// Sets bits of a byte with a full fence on both sides. Returns the byte as it was before.
    fn set_bits(&self, at: usize, bits: u8) -> u8;
    /// Clears bits of a byte, likewise.
    fn clear_bits(&self, at: usize, bits: u8) -> u8;
    /// Loads the word at a multiple of four, and makes visible all that was written before it (acquire).
    fn load32(&self, at: usize) -> u32;
    /// Stores a word at a multiple of four, after all that was written before (release).
    fn store32(&self, at: usize, value: u32);
    /// Copies bytes to an offset.
    fn copy_in(&self, at: usize, from: &[u8]);
    /// Copies the bytes at an offset out. The peer may be writing there at the same time, so the bytes may be of any
    /// mix.
    fn copy_out(&self, at: usize, to: &mut [u8]);
}

/// This endpoint's side of an event channel.
pub trait Event: Send + Sync + Debug {
    /// Returns the channel's number in this domain.
    fn port(&self) -> u32;
    /// Sends an event. Never blocks; without a peer it does nothing.
    fn notify(&self);
    /// Returns the descriptor, which polls readable while an event is not cleared, and notifies edge-triggered epoll of
    /// each event.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Clears the event, so that the next one is noticed.
    fn clear(&self);
    /// Waits for an event, at most `limit`, and clears it. May return early.
    ///
    /// # Errors
    /// Any error of the system.
    fn wait(&self, limit: Duration) -> io::Result<()> {
        let limit = Timespec::try_from(limit).ok();
        let fd = self.fd();
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], limit.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => self.clear(),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// Access of one domain to another.
pub trait Ground: Send + Sync + Debug {
    /// Shares zeroed pages that the peer may map and write. Returns their references, and this endpoint's mapping.
    /// `when_gone`, if given, is an offset and a port. Once this endpoint's process is gone, the byte there becomes
    /// zero and the port is notified.
    ///
    /// # Errors
    /// Any error of the system; a limit that is reached is named.
    fn share(&self, pages: usize, when_gone: Option<(usize, u32)>) -> io::Result<(Vec<u32>, Arc<dyn Shared>)>;

    /// Maps pages of the peer, likewise.
    ///
    /// # Errors
    /// Any error of the system; `NotFound` where there are no such pages.
    fn map(&self, references: &[u32], write: bool, when_gone: Option<(usize, u32)>) -> io::Result<Arc<dyn Shared>>;

    /// Returns an event channel that the peer may bind to.
    ///
    /// # Errors
    /// Any error of the system.
    fn offer(&self) -> io::Result<Arc<dyn Event>>;

    /// Returns an event channel bound to one that the peer offers.
    ///
    /// # Errors
    /// Any error of the system.
    fn bind(&self, port: u32) -> io::Result<Arc<dyn Event>>;

    /// Lets the peer read `nodes` in the folder `path`, in this order.
    ///
    /// # Errors
    /// Any error of the system.
    fn publish(&self, path: &str, nodes: &[(&str, String)]) -> io::Result<()>;

    /// Removes the folder.
    fn withdraw(&self, path: &str);

    /// Returns the value of a node, if the node exists.
    ///
    /// # Errors
    /// Any error of the system.
    fn look_up(&self, path: &str, node: &str) -> io::Result<Option<String>>;
}
