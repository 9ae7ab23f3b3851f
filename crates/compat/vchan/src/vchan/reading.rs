// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The direction that this endpoint reads.

use std::collections::VecDeque;

use crate::{
    border::{Fault, Outcome},
    poll_descriptor::PollDescriptor,
    side::Incoming,
};

#[derive(Debug)]
pub(super) struct Reading {
    from: Option<Box<dyn Incoming>>,
    /// Bytes that clients before this one left unread.
    left: VecDeque<u8>,
    /// Number of bytes that the program knows of.
    seen: usize,
    size: usize,
}

/// Result of a read.
#[derive(Debug)]
pub(super) enum Took {
    Bytes(usize),
    /// Too few bytes are there yet.
    Wait,
    /// There is no peer.
    Nobody,
    /// Nothing more will come, for this reason.
    End(Fault),
}

impl Reading {
    pub(super) fn new(size: usize) -> Self {
        Self { from: None, left: VecDeque::new(), seen: 0, size }
    }

    pub(super) fn size(&self) -> usize {
        self.from.as_ref().map_or(self.size, |from| from.capacity())
    }

    /// Takes over the half of a new peer. Keeps what the last peer sent.
    pub(super) fn begin(&mut self, from: Box<dyn Incoming>) {
        if let Some(mut last) = self.take_half() {
            let mut part = [0; 4096];
            while let Ok(Some(len @ 1..)) = last.read(&mut part) {
                self.left.extend(&part[..len]);
            }
        }
        self.from = Some(from);
        self.seen = self.left.len();
    }

    /// Notes that the poll descriptor was raised and has been cleared.
    pub(super) fn note_readable(&mut self) {
        if let Some(from) = &mut self.from {
            from.note_readable();
        }
    }

    pub(super) fn take_half(&mut self) -> Option<Box<dyn Incoming>> {
        self.from.take()
    }

    /// Makes the poll descriptor notify of what comes from now on.
    pub(super) fn arm_poll_descriptor(&mut self, poll_descriptor: &PollDescriptor) -> Outcome<()> {
        let Some(from) = &mut self.from else { return Ok(()) };
        poll_descriptor.follow_descriptor(from.fd()?)?;
        if from.available(1)? > 0 {
            poll_descriptor.notify();
        }
        Ok(())
    }

    /// Reads what is there, or all or nothing, where that is quick. Returns the number of bytes;
    /// [`read_into`](Self::read_into) explains a 0.
    #[inline]
    pub(super) fn take_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        match &mut self.from {
            Some(from) if self.left.is_empty() => {
                self.seen = 0;
                from.read_at_once(to, whole)
            }
            _ => 0,
        }
    }

    /// Reads. If `polled` and this was all, arms the poll descriptor for more.
    pub(super) fn read_into(&mut self, to: &mut [u8], whole: bool, polled: bool) -> Outcome<Took> {
        if !self.left.is_empty() {
            return self.take_left(to, whole);
        }
        let Some(from) = &mut self.from else { return Ok(Took::Nobody) };
        self.seen = 0;
        if whole {
            let there = from.available(to.len())?;
            if there < to.len() {
                self.seen = there;
                return self.too_little(to.len());
            }
        }
        match from.read(to)? {
            None => Ok(Took::Wait),
            Some(0) => Ok(Took::End(from.end())),
            Some(mut len) => {
                // Bytes that come before the poll descriptor is armed notify nobody, so they are taken as well.
                while polled && len < to.len() && from.available_while_quiet(1)? > 0 {
                    match from.read(&mut to[len..])? {
                        Some(more @ 1..) => len += more,
                        _ => break,
                    }
                }
                Ok(Took::Bytes(len))
            }
        }
    }

    fn too_little(&mut self, need: usize) -> Outcome<Took> {
        let Some(from) = &mut self.from else { return Ok(Took::Nobody) };
        if need > from.capacity() {
            let text = format!("{need} bytes at once, where the ring has {}", from.capacity());
            return Err(Fault::with(libc::EMSGSIZE, text));
        }
        Ok(if from.is_last()? && from.available(need)? < need { Took::End(from.end()) } else { Took::Wait })
    }

    #[cold]
    fn take_left(&mut self, to: &mut [u8], whole: bool) -> Outcome<Took> {
        let old = to.len().min(self.left.len());
        let more = to.len() - old;
        if whole && more > 0 {
            let Some(from) = &mut self.from else { return Ok(Took::Nobody) };
            if from.available(more)? < more {
                return self.too_little(more);
            }
            from.read(&mut to[old..])?;
        }
        for (byte, left) in to.iter_mut().zip(self.left.drain(..old)) {
            *byte = left;
        }
        self.seen = 0;
        Ok(Took::Bytes(if whole { to.len() } else { old }))
    }

    /// Waits until `need` bytes are there or no more will come.
    pub(super) fn wait_for(&mut self, need: usize) -> Outcome<()> {
        let need = need.saturating_sub(self.left.len());
        self.from.as_mut().map_or(Ok(()), |from| from.wait_for(need).map(drop))
    }

    /// Returns whether more bytes may come than the program knows of.
    pub(super) fn can_grow(&self) -> bool {
        self.from.as_ref().is_some_and(|from| self.unread() < from.capacity())
    }

    /// Returns the number of bytes in the ring that the program knows of.
    fn unread(&self) -> usize {
        self.seen.saturating_sub(self.left.len())
    }

    /// Waits until there is more than the program knows of.
    pub(super) fn wait_for_more(&mut self) -> Outcome<()> {
        let need = self.unread() + 1;
        self.from.as_mut().map_or(Ok(()), |from| from.wait_for(need).map(drop))
    }

    /// Returns whether there is more than the program knows of. If not, the poll descriptor will notify of it.
    pub(super) fn grew(&mut self) -> Outcome<bool> {
        let unread = self.unread();
        self.from.as_mut().map_or(Ok(false), |from| Ok(from.available_while_quiet(unread + 1)? > unread))
    }

    /// Returns how many bytes can be read, which the program knows of from now on. If `polled`, arms the poll
    /// descriptor for more.
    pub(super) fn readable_bytes(&mut self, polled: bool) -> Outcome<usize> {
        let mut unread = self.unread();
        if let Some(from) = &mut self.from {
            let mut there = from.available_while_quiet(unread + 1)?;
            while polled && there > unread && there < from.capacity() {
                unread = there;
                there = from.available_while_quiet(unread + 1)?;
            }
            unread = there;
        }
        self.seen = self.left.len() + unread;
        Ok(self.seen)
    }

    /// Returns why nothing more will come, or `None` if more may come.
    pub(super) fn ended(&mut self) -> Outcome<Option<Fault>> {
        match &mut self.from {
            Some(from) => Ok(from.is_last()?.then(|| from.end())),
            None => Ok(None),
        }
    }
}
