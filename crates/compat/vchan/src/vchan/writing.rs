// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The direction that is written.

use crate::{
    border::{Fault, Outcome},
    poll_descriptor::PollDescriptor,
    side::Outgoing,
};

#[derive(Debug)]
pub(super) struct Writing {
    to: Option<Box<dyn Outgoing>>,
    /// What was written while nobody was there to read it.
    staged: Vec<u8>,
    /// The program found too little room, or asked how much there is, and knew of this much.
    wants: Option<usize>,
    /// The poll_descriptor rings for room.
    heard: bool,
    size: usize,
}

impl Writing {
    pub(super) fn new(size: usize) -> Self {
        Self { to: None, staged: Vec::new(), wants: None, heard: false, size }
    }

    pub(super) fn size(&self) -> usize {
        self.to.as_ref().map_or(self.size, |to| to.capacity())
    }

    /// A peer came, whom all that was written meanwhile is for.
    pub(super) fn begin(&mut self, to: Box<dyn Outgoing>) -> Outcome<()> {
        (self.wants, self.heard) = (None, false);
        let staged = std::mem::take(&mut self.staged);
        let to = self.to.insert(to);
        let mut rest = &staged[..];
        while !rest.is_empty() {
            match to.write(rest) {
                Ok(Some(len)) => rest = &rest[len..],
                // It went at once: the next call finds that out. A fresh ring has room for what was staged.
                Ok(None) | Err(_) => break,
            }
        }
        Ok(())
    }

    pub(super) fn take_half(&mut self) -> Option<Box<dyn Outgoing>> {
        (self.wants, self.heard) = (None, false);
        self.to.take()
    }

    /// Writes all of `bytes` where that is short work: says whether. If not, [`put`](Self::put) knows more.
    #[inline]
    pub(super) fn put_at_once(&mut self, bytes: &[u8]) -> bool {
        let done = self.to.as_mut().is_some_and(|to| to.write_at_once(bytes));
        if done {
            self.wants = None;
        }
        done
    }

    /// Writes what there is room for, or all or nothing. Where somebody polls and that was not all, the poll_descriptor rings for room.
    pub(super) fn put(&mut self, bytes: &[u8], whole: bool, polled: Option<&PollDescriptor>) -> Outcome<usize> {
        if whole && bytes.len() > self.size() {
            let text = format!("{} bytes at once, where the ring has {}", bytes.len(), self.size());
            return Err(Fault::with(libc::EMSGSIZE, text));
        }
        let Some(to) = &mut self.to else { return Ok(self.stage(bytes, whole)) };
        let fits = !whole || to.fits(bytes.len())?;
        let done = if fits { to.write(bytes)?.unwrap_or(0) } else { 0 };
        if done == bytes.len() {
            self.wants = None;
        } else {
            self.wants = Some(if whole { bytes.len() - 1 } else { 0 });
            if let Some(poll_descriptor) = polled
                && self.grew(poll_descriptor)?
            {
                poll_descriptor.notify();
            }
        }
        Ok(done)
    }

    fn stage(&mut self, bytes: &[u8], whole: bool) -> usize {
        let room = self.size - self.staged.len();
        let len = if whole && bytes.len() > room { 0 } else { bytes.len().min(room) };
        self.staged.extend_from_slice(&bytes[..len]);
        len
    }

    /// Waits for room; says whether there is anybody to wait for.
    pub(super) fn wait_for(&mut self, need: usize) -> Outcome<bool> {
        self.to.as_mut().map_or(Ok(false), |to| to.wait_for(need).map(|()| true))
    }

    /// Whether the program is to be told of more room.
    pub(super) fn wants_room(&self) -> bool {
        self.wants.is_some()
    }

    /// Whether there is more room than the program knows of. If not, the poll_descriptor will ring for it.
    pub(super) fn grew(&mut self, poll_descriptor: &PollDescriptor) -> Outcome<bool> {
        let (Some(to), Some(known)) = (&mut self.to, self.wants) else { return Ok(false) };
        if !self.heard {
            poll_descriptor.follow_descriptor(to.fd()?)?;
            self.heard = true;
        }
        // A ring that is empty has no more room to give.
        Ok(known < to.capacity() && to.room(known + 1)? > known)
    }

    /// For how many bytes there is room: the program knows of it from now on. Where somebody polls, the poll_descriptor rings for more.
    pub(super) fn writable_bytes(&mut self, polled: Option<&PollDescriptor>) -> Outcome<usize> {
        loop {
            let Some(to) = &mut self.to else { return Ok(self.size - self.staged.len()) };
            let room = to.room(0)?;
            self.wants = (room < to.capacity()).then_some(room);
            match polled {
                // More came before the poll_descriptor was armed for it.
                Some(poll_descriptor) if self.grew(poll_descriptor)? => {}
                _ => return Ok(room),
            }
        }
    }
}
