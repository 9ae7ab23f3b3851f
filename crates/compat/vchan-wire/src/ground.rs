// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What this layout needs of the world: memory that both ends write, an event channel, and a place to meet.

use std::{fmt::Debug, io, os::fd::BorrowedFd, sync::Arc, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};

/// Memory that both ends map, and that the peer may change at any time. Offsets beyond its end are faults of the caller.
///
/// All is little-endian. Each call loads or stores once.
pub trait Shared: Send + Sync + Debug {
    /// Bytes of it.
    fn len(&self) -> usize;
    /// Never: there is a page at least.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The byte at an offset.
    fn load8(&self, at: usize) -> u8;
    /// Stores a byte, and with it all that was written before.
    fn store8(&self, at: usize, value: u8);
    /// Sets bits of a byte with a full fence on both sides; what it was before.
    fn set_bits(&self, at: usize, bits: u8) -> u8;
    /// Clears bits of a byte, likewise.
    fn clear_bits(&self, at: usize, bits: u8) -> u8;
    /// The word at a multiple of four, and with it all that was written before it.
    fn load32(&self, at: usize) -> u32;
    /// Stores a word at a multiple of four, and with it all that was written before.
    fn store32(&self, at: usize, value: u32);
    /// Copies bytes to an offset.
    fn copy_in(&self, at: usize, from: &[u8]);
    /// Copies what stands at an offset now. The peer may be writing there: the bytes are what they are.
    fn copy_out(&self, at: usize, to: &mut [u8]);
}

/// This end of an event channel.
pub trait Event: Send + Sync + Debug {
    /// Its number in this domain.
    fn port(&self) -> u32;
    /// Sends an event. Never blocks; to nobody it does nothing.
    fn notify(&self);
    /// Polls readable while an event is there that was not cleared; and tells edge-triggered epoll of each.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Forgets the event, so that the next one is heard.
    fn clear(&self);
    /// Waits for an event, `limit` at most, and forgets it. May come back early.
    ///
    /// # Errors
    /// What the system says.
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

/// One domain's way to another.
pub trait Ground: Send + Sync + Debug {
    /// Zeroed pages that the peer may map and write: their references, and this end's mapping. The byte at `clear`, if
    /// there is one, becomes zero and `port` is notified when this end's process is gone.
    ///
    /// # Errors
    /// What the system says; limits by name.
    fn share(&self, pages: usize, when_gone: Option<(usize, u32)>) -> io::Result<(Vec<u32>, Arc<dyn Shared>)>;

    /// Maps pages of the peer, likewise.
    ///
    /// # Errors
    /// What the system says; `NotFound` where there are no such pages.
    fn map(&self, references: &[u32], write: bool, when_gone: Option<(usize, u32)>) -> io::Result<Arc<dyn Shared>>;

    /// An event channel that the peer may bind to.
    ///
    /// # Errors
    /// What the system says.
    fn offer(&self) -> io::Result<Arc<dyn Event>>;

    /// An event channel bound to one that the peer offers.
    ///
    /// # Errors
    /// What the system says.
    fn bind(&self, port: u32) -> io::Result<Arc<dyn Event>>;

    /// Lets the peer read `nodes` in the folder `path`, in this order.
    ///
    /// # Errors
    /// What the system says.
    fn publish(&self, path: &str, nodes: &[(&str, String)]) -> io::Result<()>;

    /// Takes the folder away.
    fn withdraw(&self, path: &str);

    /// What a node says, if there is one.
    ///
    /// # Errors
    /// What the system says.
    fn look_up(&self, path: &str, node: &str) -> io::Result<Option<String>>;
}
