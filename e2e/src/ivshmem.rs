// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared regions, and the doorbells between guests, in the form that QEMU's ivshmem devices expect.
//!
//! [`Switchboard`] takes the place of the host's broker: it speaks the ivshmem server's protocol over socket pairs, one
//! for each guest. It writes everything that a guest learns when a peer joins, so it needs no thread.

use crate::error::{Context, Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::time::Timespec;
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Version of the protocol.
const VERSION: i64 = 0;
/// Message that announces the shared memory.
const MEMORY: i64 = -1;

/// Memory that the host shares with guests. The host reads and writes it as a file.
#[derive(Debug)]
pub struct Region {
    file: File,
    /// Size in bytes, a power of two.
    pub size: u64,
}

impl Region {
    /// Makes new memory of zeros whose size is sealed.
    ///
    /// # Errors
    /// The kernel has no memory left.
    pub fn new(size: u64) -> Result<Self> {
        let fd = memfd_create("tombolo-region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, size)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file: fd.into(), size })
    }

    /// Returns another handle to the same memory.
    ///
    /// # Errors
    /// This process has no descriptor left.
    pub fn share(&self) -> Result<Self> {
        Ok(Self { file: self.file.try_clone()?, size: self.size })
    }

    /// Reads `len` bytes at `offset`.
    ///
    /// # Errors
    /// The range is not within the region.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// Writes at `offset`.
    ///
    /// # Errors
    /// The bytes do not fit.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.file.write_all_at(bytes, offset)?)
    }
}

impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// One guest, or the host, which can notify and be notified.
#[derive(Debug)]
struct Peer {
    id: u16,
    /// Socket to a guest's QEMU; the host has none.
    line: Option<UnixStream>,
    doorbells: Vec<OwnedFd>,
}

/// Connects guests and the host by doorbells. Ids are never reused.
#[derive(Debug)]
pub struct Switchboard {
    vectors: usize,
    peers: Vec<Peer>,
}

impl Switchboard {
    /// Returns a switchboard without peers. Each peer that joins gets `vectors` doorbells.
    #[must_use]
    pub const fn new(vectors: usize) -> Self {
        Self { vectors, peers: Vec::new() }
    }

    /// Adds a guest with memory of its own. Returns its id and the descriptor for its QEMU.
    ///
    /// # Errors
    /// No descriptor or memory is left, or a guest that joined earlier has ended.
    pub fn join(&mut self, memory: &Region) -> Result<(u16, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        let peer = self.admit(Some(ours))?;
        let line = peer.line.as_ref().ok_or_else(|| Error::new("no line"))?;
        send(line, VERSION, None)?;
        send(line, i64::from(peer.id), None)?;
        send(line, MEMORY, Some(memory.as_fd()))?;
        for other in &self.peers {
            peer.announce_to(other)?;
            other.announce_to(&peer)?;
        }
        peer.announce_to(&peer)?;
        let id = peer.id;
        self.peers.push(peer);
        Ok((id, theirs.into()))
    }

    /// Adds the host. Returns its id.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_host(&mut self) -> Result<u16> {
        let peer = self.admit(None)?;
        for other in &self.peers {
            peer.announce_to(other)?;
        }
        let id = peer.id;
        self.peers.push(peer);
        Ok(id)
    }

    /// Notifies a peer, as the host.
    ///
    /// # Errors
    /// No peer has that id and vector.
    pub fn notify(&self, id: u16, vector: usize) -> Result<()> {
        rustix::io::write(self.doorbell(id, vector)?, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    /// Waits until the host is notified, and consumes the notification.
    ///
    /// # Errors
    /// The host is not notified before the deadline.
    pub fn wait(&self, id: u16, vector: usize, deadline: Instant) -> Result<()> {
        let doorbell = self.doorbell(id, vector)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let mut polled = [PollFd::new(doorbell, PollFlags::IN)];
        if poll(&mut polled, Some(&Timespec::try_from(left)?))? == 0 {
            return Err(Error::new(format!("peer {id} was not rung at vector {vector} before the deadline")));
        }
        rustix::io::read(doorbell, &mut [0_u8; 8])?;
        Ok(())
    }

    fn admit(&self, line: Option<UnixStream>) -> Result<Peer> {
        let id = u16::try_from(self.peers.len()).context("too many peers")?;
        let doorbell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let doorbells = (0..self.vectors).map(|_| doorbell()).collect::<rustix::io::Result<_>>()?;
        Ok(Peer { id, line, doorbells })
    }

    fn doorbell(&self, id: u16, vector: usize) -> Result<&OwnedFd> {
        let doorbell = self.peers.get(usize::from(id)).and_then(|peer| peer.doorbells.get(vector));
        doorbell.ok_or_else(|| Error::new(format!("no peer {id} with a vector {vector}")))
    }
}

impl Peer {
    fn announce_to(&self, other: &Self) -> Result<()> {
        let Some(line) = &other.line else { return Ok(()) };
        self.doorbells.iter().try_for_each(|doorbell| send(line, i64::from(self.id), Some(doorbell.as_fd())))
    }
}

fn send(line: &UnixStream, value: i64, fd: Option<BorrowedFd<'_>>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.into_iter().collect();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    sendmsg(line, &[IoSlice::new(&value.to_le_bytes())], &mut ancillary, SendFlags::NOSIGNAL)
        .context("the guest's QEMU is gone")?;
    Ok(())
}
