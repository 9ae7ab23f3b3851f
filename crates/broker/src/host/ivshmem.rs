// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves the ivshmem protocol on a connection with QEMU (B-8, B-9).
//!
//! ```text
//! each message is a little-endian i64, with at most one descriptor
//! 0                    protocol version
//! 1                    the domain's number, the same in every QEMU: it names doorbells, not domains
//! -1      + memory     the device's memory
//! 0       + eventfd    × 1: the host's doorbell
//! 1       + eventfd    × vectors: the domain's own, QEMU listens to them
//! later:  N + eventfd  × 1: a peer's doorbell; N without a descriptor: it is no more
//! ```

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use rustix::event::EventfdFlags;
use tombolo_control::{HOST_DOORBELL, OWN_DOORBELL, SEQUENCE_AT, vector_of};

use crate::{
    fd_passing,
    host::{mapped::Mapped, memory, notifier::Lane},
};

const PROTOCOL: i64 = 0;
const MEMORY: i64 = -1;
/// Most messages that may wait for a QEMU that does not read.
const QUEUE_MAX: usize = 4096;

/// Parts of a domain's device. The descriptor store keeps them in the order of [`descriptors`](Self::descriptors).
#[derive(Debug)]
pub struct Device {
    /// Connection with QEMU, non-blocking.
    pub socket: OwnedFd,
    /// Memory of the doorbell device, with the outboxes (B-3).
    pub memory: OwnedFd,
    /// The same memory, mapped for the broker: QEMU can make a write to the file block.
    pub boxes: Mapped,
    /// Eventfd through which the domain notifies the host.
    pub host: OwnedFd,
    /// Eventfds through which the host and peers notify the domain.
    pub own: Vec<Arc<OwnedFd>>,
    /// Lanes that write to these eventfds.
    lanes: Vec<Lane>,
    /// Number of times that the domain was notified.
    sequence: u32,
    /// Whether the domain is not notified any more, because its device is about to be removed (B-26).
    is_muted: bool,
}

impl Device {
    /// Creates all parts but the connection, for the domain `name`.
    ///
    /// # Errors
    /// No memory or no descriptor is available.
    pub fn new(name: &str, socket: OwnedFd, vectors: u16) -> io::Result<Self> {
        let doorbell = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let own = (0..vectors).map(|_| doorbell().map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
        let (lanes, memory) = (lanes(name, own.len()), memory::create_device("tombolo-device")?);
        let boxes = Mapped::new(&memory)?;
        Ok(Self { socket, memory, boxes, host: doorbell()?, own, lanes, sequence: 0, is_muted: false })
    }

    /// Restores a device from what the descriptor store kept; none if something is missing.
    ///
    /// # Errors
    /// The memory cannot be mapped.
    pub fn from_descriptors(name: &str, descriptors: Vec<OwnedFd>) -> io::Result<Option<Self>> {
        let mut all = descriptors.into_iter();
        let (Some(socket), Some(memory), Some(host)) = (all.next(), all.next(), all.next()) else { return Ok(None) };
        let own: Vec<_> = all.map(Arc::new).collect();
        // The guest's driver looks for a sequence word that has changed, so the count continues where an earlier broker
        // stopped. A guest that has changed the word meanwhile harms itself alone.
        let mut sequence = [0; 4];
        let boxes = Mapped::new(&memory)?;
        boxes.load(SEQUENCE_AT as u64, &mut sequence)?;
        let sequence = u32::from_le_bytes(sequence);
        let lanes = lanes(name, own.len());
        let is_muted = false;
        Ok((!own.is_empty()).then_some(Self { socket, memory, boxes, host, own, lanes, sequence, is_muted }))
    }

    /// Returns the descriptors for the descriptor store.
    #[must_use]
    pub fn descriptors(&self) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let own = self.own.iter().map(|own| own.as_fd());
        [&self.socket, &self.memory, &self.host].into_iter().map(AsFd::as_fd).chain(own).collect()
    }

    /// Returns the first messages for QEMU.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn greeting(&self) -> io::Result<Vec<Message>> {
        let mut all = vec![(PROTOCOL, None), (OWN_DOORBELL.into(), None), (MEMORY, Some(self.memory.try_clone()?))];
        all.push((HOST_DOORBELL.into(), Some(self.host.try_clone()?)));
        for own in &self.own {
            all.push((OWN_DOORBELL.into(), Some(own.try_clone()?)));
        }
        Ok(all)
    }

    /// Returns the vector at which the domain waits for the peer on `link` (B-8).
    #[must_use]
    pub fn vector(&self, link: u32) -> u16 {
        vector_of(link, self.own.len() as u16)
    }

    /// Returns the doorbell of this device for the peer on `link`, which can notify no other vector of the device
    /// (B-8).
    #[must_use]
    pub fn doorbell(&self, link: u32) -> &Arc<OwnedFd> {
        &self.own[usize::from(self.vector(link))]
    }

    /// Returns the lane that writes to [`doorbell`](Self::doorbell).
    #[must_use]
    pub fn lane(&self, link: u32) -> &Lane {
        &self.lanes[usize::from(self.vector(link))]
    }

    /// Notifies the domain's broker: increments the sequence word of channel 0, then raises the first vector (B-3).
    pub fn notify(&mut self) {
        if self.is_muted {
            return;
        }
        self.sequence = self.sequence.wrapping_add(1);
        let _ = self.boxes.store(SEQUENCE_AT as u64, &self.sequence.to_le_bytes());
        self.lanes[0].notify_event(&self.own[0]);
    }

    /// Stops notifying the domain, or resumes (B-26). QEMU may have seen an eventfd as readable and not handled it yet.
    /// If the device is removed in between, QEMU calls it nevertheless.
    pub fn mute(&mut self, is_muted: bool) {
        let is_heard_again = std::mem::replace(&mut self.is_muted, is_muted) && !is_muted;
        if is_heard_again {
            self.notify();
        }
    }

    /// Returns whether QEMU has closed the connection.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().intersects(PollFlags::HUP | PollFlags::RDHUP)
    }
}

/// Returns a lane for each vector, so that a process that blocks one does not block the others. The lanes belong to the
/// domain, whichever QEMU it has.
fn lanes(name: &str, vectors: usize) -> Vec<Lane> {
    (0..vectors).map(|vector| Lane::named(&format!("machine/{name}/{vector}"))).collect()
}

/// A number, and the descriptor that comes with it.
pub type Message = (i64, Option<OwnedFd>);

/// Messages that wait to be sent to QEMU.
#[derive(Debug, Default)]
pub struct Outbound(VecDeque<Message>);

impl Outbound {
    /// Appends messages. Returns false if too many wait because QEMU does not read.
    pub fn push(&mut self, messages: impl IntoIterator<Item = Message>) -> bool {
        self.0.extend(messages);
        self.0.len() <= QUEUE_MAX
    }

    /// Sends what there is room for. Returns whether no message is left.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn flush(&mut self, socket: impl AsFd) -> io::Result<bool> {
        while let Some((number, descriptor)) = self.0.front() {
            let descriptor: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
            if !fd_passing::send(&socket, &number.to_le_bytes(), &descriptor)? {
                return Ok(false);
            }
            self.0.pop_front();
        }
        Ok(true)
    }
}
