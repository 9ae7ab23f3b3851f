// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and writes one ring, from either endpoint (W-5, W-6).

use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
};

use crate::{
    Error, Result,
    ground::Shared,
    layout::{NOTIFY_READ, NOTIFY_WRITE, at},
    sleep::{Sleep, Spin},
};

/// State that both halves of an endpoint share.
#[derive(Debug)]
pub(crate) struct Common {
    pub page: Arc<dyn Shared>,
    pub sleep: Sleep,
    pub server: bool,
    /// Whether the peer's domain is gone, and with it everything that could have reported the end.
    pub lost: AtomicBool,
}

/// Whether the peer is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Live {
    /// The peer closed, or its process is gone.
    Gone,
    /// Both are there.
    Here,
    /// The client has not come yet.
    NotYet,
}

impl Common {
    /// Returns what the peer's byte means; a number that is none of the known ones means that the peer is there (W-5).
    pub(crate) fn live(&self) -> Live {
        if self.lost.load(Ordering::Relaxed) {
            return Live::Gone;
        }
        match self.page.load8(if self.server { at::CLIENT_LIVE } else { at::SERVER_LIVE }) {
            0 => Live::Gone,
            2 if self.server => Live::NotYet,
            _ => Live::Here,
        }
    }

    /// Asks the peer for an event (W-6). The caller checks again afterwards, because the peer may have acted before it
    /// was asked.
    fn ask(&self, bit: u8) {
        self.page.set_bits(if self.server { at::CLIENT_NOTIFY } else { at::SERVER_NOTIFY }, bit);
    }

    /// Sends an event if the peer asked for one (W-6).
    fn notify_peer(&self, bit: u8) {
        // Either a peer that asks after this fence sees what was published before it, or this endpoint sees the request
        // here. The byte is read first, because to write it costs more, and nearly always nobody asked.
        fence(Ordering::SeqCst);
        let asked = if self.server { at::SERVER_NOTIFY } else { at::CLIENT_NOTIFY };
        if self.page.load8(asked) & bit != 0 && self.page.clear_bits(asked, bit) & bit != 0 {
            self.sleep.event.notify();
        }
    }
}

/// Tells whether the peer is there while others use the halves. Keeps this endpoint open.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Common>);

impl Watch {
    /// Returns whether the peer is there.
    #[must_use]
    pub fn live(&self) -> Live {
        self.0.live()
    }

    /// Records that the peer's domain is gone, which the domain could not report: from now on the peer is not there. A
    /// waiter that sleeps finds out at its next check.
    pub fn lost(&self) {
        self.0.lost.store(true, Ordering::Relaxed);
        self.0.sleep.clear_event();
    }

    /// Returns whether the peer's domain was recorded as gone.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }

    /// Clears the event, so that the next one is noticed.
    pub fn clear_event(&self) {
        self.0.sleep.clear_event();
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        self.page.store8(if self.server { at::SERVER_LIVE } else { at::CLIENT_LIVE }, 0);
        self.sleep.event.notify();
    }
}

/// One ring: its memory, and the offsets of its positions in the page.
#[derive(Debug)]
struct Ring {
    memory: Arc<dyn Shared>,
    /// Offset at which the ring begins there.
    base: usize,
    size: u32,
    /// This endpoint's position: private, and only ever written to the page.
    own: u32,
    own_at: usize,
    peer_at: usize,
    /// Position of the peer's first protocol violation; after that nothing more is read from it.
    violation: Option<u32>,
}

impl Ring {
    /// Returns how far the peer is ahead of this endpoint. The peer's position is loaded once; more than a ring is a
    /// protocol violation (W-5).
    fn ahead(&mut self, page: &dyn Shared, behind: u32) -> Result<u32> {
        let corrupt = |found| Error::Corrupt { clause: "W-5", what: "a position beyond the ring", found };
        if let Some(found) = self.violation {
            return Err(corrupt(found));
        }
        let found = page.load32(self.peer_at);
        let ahead = found.wrapping_sub(self.own).wrapping_add(behind);
        if ahead > self.size {
            self.violation = Some(found);
            return Err(corrupt(found));
        }
        Ok(ahead)
    }

    /// Returns offset and length of the first piece of `len` bytes from this end's position. The rest is at the ring's
    /// start.
    fn pieces(&self, len: usize) -> (usize, usize) {
        let start = (self.own & (self.size - 1)) as usize;
        (self.base + start, len.min(self.size as usize - start))
    }
}

/// The half that reads.
#[derive(Debug)]
pub struct Reader {
    common: Arc<Common>,
    ring: Ring,
    spin: Spin,
}

/// The half that writes.
#[derive(Debug)]
pub struct Writer {
    common: Arc<Common>,
    ring: Ring,
    spin: Spin,
}

/// Memory of a ring, the offset at which it begins there, and its order.
pub(crate) type Place = (Arc<dyn Shared>, usize, u32);

pub(crate) fn halves(common: Arc<Common>, left: Place, right: Place) -> (Reader, Writer) {
    let (reads, writes) = if common.server { (left, right) } else { (right, left) };
    let (reader_at, writer_at) = if common.server {
        ((at::LEFT_READ, at::LEFT_WRITTEN), (at::RIGHT_WRITTEN, at::RIGHT_READ))
    } else {
        ((at::RIGHT_READ, at::RIGHT_WRITTEN), (at::LEFT_WRITTEN, at::LEFT_READ))
    };
    let ring = |(memory, base, order): Place, (own_at, peer_at): (usize, usize)| Ring {
        memory,
        base,
        size: 1 << order,
        // A client may come back to a ring that was in use (W-8): it continues at the ring's positions.
        own: common.page.load32(own_at),
        own_at,
        peer_at,
        violation: None,
    };
    let (read, write) = (ring(reads, reader_at), ring(writes, writer_at));
    let reader = Reader { common: Arc::clone(&common), ring: read, spin: Spin::new() };
    (reader, Writer { common, ring: write, spin: Spin::new() })
}

impl Reader {
    /// Returns the bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.ring.size as usize
    }

    /// Returns whether the peer is there.
    #[must_use]
    pub fn live(&self) -> Live {
        self.common.live()
    }

    /// Returns how many bytes are there. If there are fewer than `need`, the peer sends an event when there are more.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn available(&mut self, need: usize) -> Result<usize> {
        let there = self.ring.ahead(&*self.common.page, 0)? as usize;
        if there >= need {
            return Ok(there);
        }
        self.common.ask(NOTIFY_WRITE);
        Ok(self.ring.ahead(&*self.common.page, 0)? as usize)
    }

    /// Reads what is there. Returns the bytes read; 0 while there is nothing.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        let there = self.ring.ahead(&*self.common.page, 0)? as usize;
        Ok(self.copy_out(there, to))
    }

    /// Reads what is there, or with `whole` all of `to` or nothing. Returns the bytes read; [`read`](Self::read)
    /// explains a 0.
    pub fn read_at_once(&mut self, to: &mut [u8], whole: bool) -> usize {
        match self.ring.ahead(&*self.common.page, 0) {
            Ok(there) if !whole || there as usize >= to.len() => self.copy_out(there as usize, to),
            _ => 0,
        }
    }

    #[inline]
    fn copy_out(&mut self, there: usize, to: &mut [u8]) -> usize {
        let len = there.min(to.len());
        if len == 0 {
            return 0;
        }
        let (start, first) = self.ring.pieces(len);
        let (one, two) = to[..len].split_at_mut(first);
        self.ring.memory.copy_out(start, one);
        if !two.is_empty() {
            self.ring.memory.copy_out(self.ring.base, two);
        }
        self.ring.own = self.ring.own.wrapping_add(len as u32);
        self.common.page.store32(self.ring.own_at, self.ring.own);
        self.common.notify_peer(NOTIFY_READ);
        len
    }

    /// Waits until `need` bytes are there or no more will come. Returns how many are there.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::TooLarge`], and any error of the system.
    pub fn wait_for(&mut self, need: usize) -> Result<usize> {
        if need > self.capacity() {
            return Err(Error::TooLarge { len: need, ring: self.capacity() });
        }
        let mut fruitless = 0;
        loop {
            let there = self.wait_a_while(need, fruitless)?;
            if there >= need || self.live() == Live::Gone {
                return self.available(need);
            }
            fruitless += 1;
        }
    }

    /// Waits as [`wait_for`](Self::wait_for), but at most half a second: there may be fewer bytes. `fruitless` counts
    /// the waits in a row that ended so.
    ///
    /// # Errors
    /// The same as there.
    pub fn wait_a_while(&mut self, need: usize, fruitless: u32) -> Result<usize> {
        let (page, ring) = (&*self.common.page, &mut self.ring);
        if self.spin.run(|| Ok::<_, Error>(ring.ahead(page, 0)? as usize >= need))? {
            return self.available(need);
        }
        let since = self.common.sleep.count();
        let live = self.live();
        let there = self.available(need)?;
        // Read before `available`: what the peer wrote before it went is there.
        if there < need && live != Live::Gone {
            self.common.sleep.sleep(since, fruitless)?;
        }
        Ok(there)
    }

    /// Returns the event channel's descriptor, which polls readable until [`Watch::clear_event`].
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.common.sleep.event.fd()
    }

    /// Returns a watch on whether the peer is there.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.common))
    }
}

impl Writer {
    /// Returns the bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.ring.size as usize
    }

    /// Returns whether the peer is there.
    #[must_use]
    pub fn live(&self) -> Live {
        self.common.live()
    }

    /// Returns the same descriptor as [`Reader::fd`], for this half.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.common.sleep.event.fd()
    }

    fn space(&mut self) -> Result<usize> {
        let size = self.ring.size;
        Ok(self.ring.ahead(&*self.common.page, size)? as usize)
    }

    /// Returns for how many bytes there is room. If that is less than `need`, the peer sends an event when there is
    /// more.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn room(&mut self, need: usize) -> Result<usize> {
        let room = self.space()?;
        if room >= need {
            return Ok(room);
        }
        self.common.ask(NOTIFY_READ);
        self.space()
    }

    /// Writes what there is room for. Returns the bytes written; 0 where there is no room. Does not depend on whether
    /// the peer is there: see [`live`](Self::live).
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let room = self.space()?;
        Ok(self.put(room, bytes))
    }

    /// Writes all of `bytes` if the peer is there and there is room. Returns whether it did; [`write`](Self::write) and
    /// [`live`](Self::live) explain why not.
    pub fn write_at_once(&mut self, bytes: &[u8]) -> bool {
        self.live() == Live::Here
            && self.space().is_ok_and(|room| room >= bytes.len() && self.put(room, bytes) == bytes.len())
    }

    #[inline]
    fn put(&mut self, room: usize, bytes: &[u8]) -> usize {
        let len = room.min(bytes.len());
        if len == 0 {
            return 0;
        }
        let (start, first) = self.ring.pieces(len);
        let (one, two) = bytes[..len].split_at(first);
        self.ring.memory.copy_in(start, one);
        if !two.is_empty() {
            self.ring.memory.copy_in(self.ring.base, two);
        }
        self.ring.own = self.ring.own.wrapping_add(len as u32);
        self.common.page.store32(self.ring.own_at, self.ring.own);
        self.common.notify_peer(NOTIFY_WRITE);
        len
    }

    /// Waits until there is room for `need` bytes at once.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Closed`], [`Error::TooLarge`], and any error of the system.
    pub fn wait_for(&mut self, need: usize) -> Result<()> {
        if need > self.capacity() {
            return Err(Error::TooLarge { len: need, ring: self.capacity() });
        }
        let mut fruitless = 0;
        while self.wait_a_while(need, fruitless)? < need {
            fruitless += 1;
        }
        Ok(())
    }

    /// Waits as [`wait_for`](Self::wait_for), but at most half a second: there may be less room. `fruitless` counts the
    /// waits in a row that ended so.
    ///
    /// # Errors
    /// The same as there.
    pub fn wait_a_while(&mut self, need: usize, fruitless: u32) -> Result<usize> {
        // With a little more room than is needed, both endpoints get to copy at the same time. But the reader may
        // itself wait for more than that leaves it, so this endpoint only spins for it and never sleeps.
        let (page, ring) = (&*self.common.page, &mut self.ring);
        let (size, worthwhile) = (ring.size, need.max(ring.size as usize / 4));
        let found = self.spin.run(|| Ok::<_, Error>(ring.ahead(page, size)? as usize >= worthwhile))?;
        if self.live() == Live::Gone {
            return Err(Error::Closed);
        }
        if found {
            return self.space();
        }
        let since = self.common.sleep.count();
        let room = self.room(need)?;
        if room < need {
            self.common.sleep.sleep(since, fruitless)?;
        }
        Ok(room)
    }
}
