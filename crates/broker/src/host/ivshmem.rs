// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ivshmem server's side of a connection with QEMU (B-8, B-9).
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
use tombolo_control::{HOST_DOORBELL, MARKS_AT, OWN_DOORBELL, vector_of};

use crate::{
    fd_passing,
    host::{mapped::Mapped, memory, notifier::Lane},
};

const PROTOCOL: i64 = 0;
const MEMORY: i64 = -1;
/// Most messages that wait for a QEMU that does not read.
const QUEUE_MAX: usize = 4096;

/// What a domain's device is made of. The order of [`descriptors`](Self::descriptors) is that of the safe keeping.
#[derive(Debug)]
pub struct Device {
    /// The connection with QEMU; it does not block.
    pub socket: OwnedFd,
    /// The memory of the doorbell device, with the mailboxes (B-3).
    pub memory: OwnedFd,
    /// The same, for the broker: the QEMU can keep who writes to the file waiting.
    pub boxes: Mapped,
    /// Rung by the domain, heard by the host.
    pub host: OwnedFd,
    /// Rung by the host and by peers, heard by the domain.
    pub own: Vec<Arc<OwnedFd>>,
    /// What rings each of these.
    lanes: Vec<Lane>,
    /// How often the domain was rung.
    mark: u32,
    /// The domain is not notified any more, as its device is about to go (B-26).
    is_muted: bool,
}

impl Device {
    /// Makes all but the connection, for the domain `name`.
    ///
    /// # Errors
    /// Memory or descriptors are used up.
    pub fn new(name: &str, socket: OwnedFd, vectors: u16) -> io::Result<Self> {
        let doorbell = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let own = (0..vectors).map(|_| doorbell().map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
        let (lanes, memory) = (lanes(name, own.len()), memory::create_device("tombolo-device")?);
        let boxes = Mapped::new(&memory)?;
        Ok(Self { socket, memory, boxes, host: doorbell()?, own, lanes, mark: 0, is_muted: false })
    }

    /// From safe keeping; none if something is missing.
    ///
    /// # Errors
    /// The memory cannot be mapped.
    pub fn from_descriptors(name: &str, descriptors: Vec<OwnedFd>) -> io::Result<Option<Self>> {
        let mut all = descriptors.into_iter();
        let (Some(socket), Some(memory), Some(host)) = (all.next(), all.next(), all.next()) else { return Ok(None) };
        let own: Vec<_> = all.map(Arc::new).collect();
        // The guest's driver looks for a mark that changed, so it goes on where an earlier broker stopped. What the guest
        // made of it meanwhile is its own loss.
        let mut mark = [0; 4];
        let boxes = Mapped::new(&memory)?;
        boxes.load(MARKS_AT as u64, &mut mark)?;
        let mark = u32::from_le_bytes(mark);
        let lanes = lanes(name, own.len());
        let is_muted = false;
        Ok((!own.is_empty()).then_some(Self { socket, memory, boxes, host, own, lanes, mark, is_muted }))
    }

    /// For safe keeping.
    #[must_use]
    pub fn descriptors(&self) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let own = self.own.iter().map(|own| own.as_fd());
        [&self.socket, &self.memory, &self.host].into_iter().map(AsFd::as_fd).chain(own).collect()
    }

    /// What QEMU is told first.
    ///
    /// # Errors
    /// Descriptors are used up.
    pub fn greeting(&self) -> io::Result<Vec<Message>> {
        let mut all = vec![(PROTOCOL, None), (OWN_DOORBELL.into(), None), (MEMORY, Some(self.memory.try_clone()?))];
        all.push((HOST_DOORBELL.into(), Some(self.host.try_clone()?)));
        for own in &self.own {
            all.push((OWN_DOORBELL.into(), Some(own.try_clone()?)));
        }
        Ok(all)
    }

    /// The vector at which the domain waits for the peer on `link` (B-8).
    #[must_use]
    pub fn vector(&self, link: u32) -> u16 {
        vector_of(link, self.own.len() as u16)
    }

    /// The doorbell of this device for the peer on `link`, who can notify no other of its vectors (B-8).
    #[must_use]
    pub fn doorbell(&self, link: u32) -> &Arc<OwnedFd> {
        &self.own[usize::from(self.vector(link))]
    }

    /// What rings [`doorbell`](Self::doorbell).
    #[must_use]
    pub fn lane(&self, link: u32) -> &Lane {
        &self.lanes[usize::from(self.vector(link))]
    }

    /// Notifies the domain's broker: counts the sequence word of channel 0, then raises the first vector (B-3).
    pub fn notify(&mut self) {
        if self.is_muted {
            return;
        }
        self.mark = self.mark.wrapping_add(1);
        let _ = self.boxes.store(MARKS_AT as u64, &self.mark.to_le_bytes());
        self.lanes[0].notify_event(&self.own[0]);
    }

    /// Stops notifying the domain, or resumes (B-26). QEMU may have seen an eventfd readable and not looked at it yet;
    /// if the device goes in between, QEMU calls it all the same.
    pub fn mute(&mut self, is_muted: bool) {
        let is_heard_again = std::mem::replace(&mut self.is_muted, is_muted) && !is_muted;
        if is_heard_again {
            self.notify();
        }
    }

    /// Whether QEMU closed the connection.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().intersects(PollFlags::HUP | PollFlags::RDHUP)
    }
}

/// A lane for each vector: who holds one does not hold the others. They are the domain's, whichever QEMU it has.
fn lanes(name: &str, vectors: usize) -> Vec<Lane> {
    (0..vectors).map(|vector| Lane::named(&format!("machine/{name}/{vector}"))).collect()
}

/// A number, and what comes with it.
pub type Message = (i64, Option<OwnedFd>);

/// Messages on their way to QEMU.
#[derive(Debug, Default)]
pub struct Outbound(VecDeque<Message>);

impl Outbound {
    /// Puts messages behind those that wait; false if QEMU reads nothing and there are too many.
    pub fn push(&mut self, messages: impl IntoIterator<Item = Message>) -> bool {
        self.0.extend(messages);
        self.0.len() <= QUEUE_MAX
    }

    /// Sends what there is room for; true if nothing is left.
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
