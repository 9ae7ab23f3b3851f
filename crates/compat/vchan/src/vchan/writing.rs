// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The direction that this endpoint writes.

use crate::{
    border::{Fault, Outcome},
    poll_descriptor::PollDescriptor,
    side::Outgoing,
};

#[derive(Debug)]
pub(super) struct Writing {
    to: Option<Box<dyn Outgoing>>,
    /// Bytes written while no peer was there to read them.
    staged: Vec<u8>,
    /// Room that the program knew of when it found too little, or asked how much there is.
    wants: Option<usize>,
    /// Whether the poll descriptor notifies of room.
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

    /// Takes over the half of a new peer, and writes to it all that was staged meanwhile.
    pub(super) fn begin(&mut self, to: Box<dyn Outgoing>) -> Outcome<()> {
        (self.wants, self.heard) = (None, false);
        let staged = std::mem::take(&mut self.staged);
        let to = self.to.insert(to);
        let mut rest = &staged[..];
        while !rest.is_empty() {
            match to.write(rest) {
                Ok(Some(len)) => rest = &rest[len..],
                // The peer went at once: the next call finds that out. A fresh ring has room for what was staged.
                Ok(None) | Err(_) => break,
            }
        }
        Ok(())
    }

    pub(super) fn take_half(&mut self) -> Option<Box<dyn Outgoing>> {
        (self.wants, self.heard) = (None, false);
        self.to.take()
    }

    /// Writes all of `bytes` where that is quick. Returns whether it did; [`put`](Self::put) explains why not.
    #[inline]
    pub(super) fn put_at_once(&mut self, bytes: &[u8]) -> bool {
        let done = self.to.as_mut().is_some_and(|to| to.write_at_once(bytes));
        if done {
            self.wants = None;
        }
        done
    }

    /// Writes what there is room for, or all or nothing. If `polled` and that was not all, arms the poll descriptor for
    /// room.
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

    /// Waits for room. Returns whether there is a peer to wait for.
    pub(super) fn wait_for(&mut self, need: usize) -> Outcome<bool> {
        self.to.as_mut().map_or(Ok(false), |to| to.wait_for(need).map(|()| true))
    }

    /// Returns whether the program must be notified of more room.
    pub(super) fn wants_room(&self) -> bool {
        self.wants.is_some()
    }

    /// Returns whether there is more room than the program knows of. If not, the poll descriptor will notify of it.
    pub(super) fn grew(&mut self, poll_descriptor: &PollDescriptor) -> Outcome<bool> {
        let (Some(to), Some(known)) = (&mut self.to, self.wants) else { return Ok(false) };
        if !self.heard {
            poll_descriptor.follow_descriptor(to.fd()?)?;
            self.heard = true;
        }
        // A ring that is empty has no more room to give.
        Ok(known < to.capacity() && to.room(known + 1)? > known)
    }

    /// Returns for how many bytes there is room, which the program knows of from now on. If `polled`, arms the poll
    /// descriptor for more.
    pub(super) fn writable_bytes(&mut self, polled: Option<&PollDescriptor>) -> Outcome<usize> {
        loop {
            let Some(to) = &mut self.to else { return Ok(self.size - self.staged.len()) };
            let room = to.room(0)?;
            self.wants = (room < to.capacity()).then_some(room);
            match polled {
                // More room came before the poll descriptor was armed for it.
                Some(poll_descriptor) if self.grew(poll_descriptor)? => {}
                _ => return Ok(room),
            }
        }
    }
}
