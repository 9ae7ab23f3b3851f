// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements the brokers' own part of a link: a box in the first page of each region half, and event channel 0 (B-3).

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::fs::OFlags;
use tombolo_control::{BOX_LEN, Boxes};
use tombolo_mem::{OwnBytes, OwnControl, OwnData, OwnWord, PeerData, PeerSegment, PeerWord};
use tombolo_os::reserved::ReservedFd;

use crate::{
    module::ModuleLink,
    sys::OwnMemory,
    uapi::{WINDOW_PEER, WindowArgs},
};

const PAGE: u64 = 4096;
/// Offset of the message in a box. Below it are words, each of which is stored atomically.
const WORDS: usize = 0x100;

/// The brokers' part of a link: both boxes and event channel 0.
#[derive(Debug)]
pub struct ModuleBoxes {
    part: OwnMemory,
    own: OwnControl,
    message: OwnBytes,
    peer: PeerSegment,
}

impl ModuleBoxes {
    /// Takes the brokers' part of a link.
    ///
    /// # Errors
    /// Another broker has the link's part, or the kernel's error.
    pub fn open(link: &ModuleLink) -> io::Result<Self> {
        let taken = |error: io::Error| match error.kind() {
            io::ErrorKind::ResourceBusy => io::Error::new(error.kind(), "another broker serves this machine"),
            _ => error,
        };
        let own = link.window(WindowArgs { length: PAGE, channels: 1, ..WindowArgs::default() }).map_err(taken)?;
        rustix::fs::fcntl_setfl(&own, OFlags::NONBLOCK)?;
        let theirs = link.window(WindowArgs { length: PAGE, flags: WINDOW_PEER, ..WindowArgs::default() })?;
        let peer = PeerSegment::map_revocable(theirs.as_fd(), 0, PAGE as usize, ())?;
        let part = OwnMemory::new(ReservedFd::new(own)?, 0, PAGE);
        let (own, message) = part.map(0, PAGE as usize)?.split(WORDS);
        Ok(Self { part, own, message, peer })
    }

    /// Returns a descriptor that polls readable once the other broker has notified, and as hung up at the end of the
    /// link.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.part.fd()
    }

    /// Notifies the other broker.
    pub fn notify(&self) {
        let _ = rustix::io::write(self.part.fd(), &1u64.to_ne_bytes());
    }

    /// Clears earlier notifications.
    pub fn drain(&self) {
        let _ = rustix::io::read(self.part.fd(), &mut [0; 8]);
    }
}

fn present(lost: bool) -> io::Result<()> {
    if lost { Err(io::Error::new(io::ErrorKind::BrokenPipe, "the device was unplugged")) } else { Ok(()) }
}

impl Boxes for ModuleBoxes {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        if offset + bytes.len() > BOX_LEN {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match <&mut [u8; 8]>::try_from(&mut *bytes) {
            // ORDER Acquire: with the store of the other side's word; a reader that sees the word sees what was stored
            // before it.
            Ok(word) if offset % 8 == 0 => *word = self.peer.word(offset).load_acquire().hint().to_le_bytes(),
            _ => self.peer.data(offset).copy_out(0, bytes),
        }
        present(self.peer.is_lost())
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        match <[u8; 8]>::try_from(bytes) {
            // ORDER Release: with the load of the other side.
            Ok(word) if offset % 8 == 0 && offset < WORDS => {
                self.own.word(offset).store_release(u64::from_le_bytes(word));
            }
            _ if offset >= WORDS && offset + bytes.len() <= BOX_LEN => self.message.copy_in(offset - WORDS, bytes),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        present(self.own.is_lost())
    }
}
