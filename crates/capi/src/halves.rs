// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two halves behind a handle, and the operations that do not depend on what the channel carries.

use std::{os::fd::AsRawFd, time::Duration};

use libc::c_int;
use tombolo::{Deadline, Error, Mode, ReadHalf, Reserved, RingReason, Rx, StreamMode, Tx, Watch};

use crate::{
    border::{Fault, Outcome, deadline},
    half::{Half, Inside},
    options::{duration, flush_policy},
    structs::{Peer, Statistics, ending, life},
};

/// Choice of a half: the one that reads or receives.
pub const TOMBOLO_READ: c_int = 1;
/// Choice of a half: the one that writes or sends.
pub const TOMBOLO_WRITE: c_int = 2;
/// Choice of a half: both.
pub const TOMBOLO_BOTH: c_int = 3;

/// A place in a ring: address and length of its two parts, the second of which is empty unless the ring wraps there.
pub type Region = [(*const u8, usize); 2];

/// The halves of a channel that carries bytes or messages.
#[derive(Debug)]
pub struct Halves<M: Mode> {
    pub reader: Half<Rx<M>>,
    pub writer: Half<Tx<M>>,
    watch: Watch,
    /// Whether the ring of the writing half follows its load, or did at first.
    follows_load: bool,
}

fn no_such_half() -> Fault {
    Fault::new(libc::EINVAL, c"no such half: TOMBOLO_READ or TOMBOLO_WRITE")
}

fn region((first, second): Reserved<'_>) -> Region {
    [(first.as_mut_ptr().cast_const(), first.len()), (second.as_mut_ptr().cast_const(), second.len())]
}

impl<M: Mode> Inside<Rx<M>> {
    /// Returns the bytes that can be read now.
    fn peek_region(&mut self) -> Outcome<Option<Region>> {
        let there = self.half.peek()?;
        Ok(there.map(|(first, second)| [(first.as_ptr(), first.len()), (second.as_ptr(), second.len())]))
    }
}

impl Halves<StreamMode> {
    /// Waits with `read` until `deadline`. Before that it flushes what the peer may be waiting for. Meanwhile the ring
    /// of the writing half follows its load. Both require that no other thread uses that half.
    pub fn wait_to_read(
        &self,
        reader: &mut ReadHalf,
        deadline: Deadline,
        mut read: impl FnMut(&mut ReadHalf, Deadline) -> tombolo::Result<usize>,
    ) -> tombolo::Result<usize> {
        self.flush_first();
        let mut look = if self.follows_load && self.may_shrink() { self.follow_load() } else { None };
        loop {
            let until = look.map_or(deadline, |time| deadline.min(Deadline::after(time)));
            match read(reader, until) {
                Err(Error::TimedOut) if look.is_some() && !deadline.expired() => look = self.follow_load(),
                done => return done,
            }
        }
    }

    /// Returns whether the ring of the writing half may be larger than an idle one.
    fn may_shrink(&self) -> bool {
        let reason = self.writer.help().and_then(|writer| writer.half.statistics().ring_growth).map(|it| it.reason);
        !matches!(reason, None | Some(RingReason::First | RingReason::Idle))
    }

    fn follow_load(&self) -> Option<Duration> {
        let mut writer = self.writer.help()?;
        // The next write reports an error of the writing half.
        writer.half.follow_load().unwrap_or_default()
    }
}

impl<M: Mode> Halves<M> {
    pub fn new(reader: Rx<M>, writer: Tx<M>, watch: Watch) -> Self {
        let follows_load = writer.statistics().ring_growth.is_some();
        Self { reader: Half::new(reader), writer: Half::new(writer), watch, follows_load }
    }

    /// Flushes before the reading half waits, because the peer may be waiting for these bytes. Does nothing while
    /// another thread uses the writing half.
    pub fn flush_first(&self) {
        if let Some(mut writer) = self.writer.help() {
            // If flushing fails, the peer is gone. Reading reports that, after everything that is still to be read.
            let _ = writer.half.flush();
        }
    }

    /// Returns the room of what was read before the writing half waits, in the same way.
    pub fn release_first(&self) {
        if let Some(mut reader) = self.reader.help() {
            let _ = reader.half.release();
        }
    }

    /// Reserves room for `len` bytes, which the caller holds from now on.
    pub fn reserve(&self, len: usize, timeout_ns: i64) -> Outcome<Region> {
        let mut writer = self.writer.begin()?;
        let room = match writer.half.try_reserve(len)?.map(region) {
            Some(room) => room,
            None => {
                let deadline = deadline(timeout_ns)?;
                self.release_first();
                region(writer.half.reserve_until(len, deadline)?)
            }
        };
        writer.held = Some(len);
        Ok(room)
    }

    /// Publishes `len` bytes of the room that the caller holds.
    pub fn commit(&self, len: usize) -> Outcome<()> {
        let mut writer = self.writer.enter()?;
        writer.end_hold(len)?;
        Ok(writer.half.commit(len)?)
    }

    /// Returns the available bytes, which the caller holds from now on, or `None` at the end.
    pub fn peek(&self, timeout_ns: i64) -> Outcome<Option<Region>> {
        let mut reader = self.reader.begin()?;
        let mut there = reader.peek_region()?;
        if there.is_none() && reader.half.ending().is_none() {
            let deadline = deadline(timeout_ns)?;
            self.flush_first();
            if reader.half.wait_until(deadline)? {
                there = reader.peek_region()?;
            }
        }
        reader.held = there.map(|[(_, first), (_, second)]| first + second);
        Ok(there)
    }

    pub fn flush(&self) -> Outcome<()> {
        Ok(self.writer.enter()?.half.flush()?)
    }

    pub fn drain(&self, timeout_ns: i64) -> Outcome<()> {
        let mut writer = self.writer.enter()?;
        self.release_first();
        match (writer.half.drained_until(deadline(timeout_ns).unwrap_or(Deadline::NOW)), timeout_ns) {
            (Err(Error::TimedOut), 0) => Err(Fault::WOULD_BLOCK),
            (drained, _) => Ok(drained?),
        }
    }

    pub fn abort(&self) -> Outcome<()> {
        self.writer.begin()?.half.abort();
        Ok(())
    }

    pub fn shutdown(&self, which: c_int) -> Outcome<()> {
        if !(TOMBOLO_READ..=TOMBOLO_BOTH).contains(&which) {
            return Err(Fault::new(libc::EINVAL, c"no such half: TOMBOLO_READ, TOMBOLO_WRITE or TOMBOLO_BOTH"));
        }
        // Takes both halves before it closes either, so that it closes both or neither.
        let writer = (which & TOMBOLO_WRITE != 0).then(|| self.writer.enter()).transpose()?;
        let reader = (which & TOMBOLO_READ != 0).then(|| self.reader.enter()).transpose()?;
        if let Some(mut writer) = writer {
            writer.half.close();
        }
        if let Some(mut reader) = reader {
            reader.half.close();
        }
        Ok(())
    }

    /// Begins to move the direction that this endpoint writes to a ring of `bytes` bytes.
    pub fn resize(&self, bytes: u64) -> Outcome<()> {
        Ok(self.writer.begin()?.half.resize(bytes)?)
    }

    pub fn is_moving(&self) -> Outcome<c_int> {
        Ok(self.writer.enter()?.half.is_moving().into())
    }

    pub fn set_flush(&self, bytes: u64, ns: u64) -> Outcome<()> {
        let mut writer = self.writer.enter()?;
        // The new policy does not know what the old one held back.
        writer.half.flush()?;
        writer.half.set_flush_policy(flush_policy(bytes, ns));
        Ok(())
    }

    pub fn set_spin(&self, which: c_int, ns: i64) -> Outcome<()> {
        match which {
            TOMBOLO_READ => self.reader.enter()?.half.set_spin(duration(ns)),
            TOMBOLO_WRITE => self.writer.enter()?.half.set_spin(duration(ns)),
            _ => return Err(no_such_half()),
        }
        Ok(())
    }

    pub fn ending(&self) -> Outcome<c_int> {
        Ok(ending(self.reader.enter()?.half.ending()))
    }

    pub fn life(&self) -> c_int {
        life(self.watch.liveness())
    }

    pub fn peer(&self) -> Peer {
        self.watch.peer().into()
    }

    pub fn statistics(&self, which: c_int) -> Outcome<Statistics> {
        Ok(match which {
            TOMBOLO_READ => self.reader.enter()?.half.statistics(),
            TOMBOLO_WRITE => self.writer.enter()?.half.statistics(),
            _ => return Err(no_such_half()),
        }
        .into())
    }

    pub fn poll_fd(&self, which: c_int) -> Outcome<c_int> {
        Ok(match which {
            TOMBOLO_READ => self.reader.enter()?.half.poll_fd()?.as_raw_fd(),
            TOMBOLO_WRITE => self.writer.enter()?.half.poll_fd()?.as_raw_fd(),
            _ => return Err(no_such_half()),
        })
    }
}
