// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One ring of a pipe: its data and its tail. A pipe moves from ring to ring (H-1 to H-6); the rest of it stays.

use tombolo_mem::{Mem, OwnData, PeerData, Untrusted};

/// The writer's view of a ring.
#[derive(Debug)]
pub struct OwnRing<M: Mem> {
    pub(crate) tail: M::OwnWord,
    pub(crate) data: M::OwnData,
    pub(crate) capacity: u64,
}

/// The reader's view of a ring.
#[derive(Debug)]
pub struct PeerRing<M: Mem> {
    pub(crate) tail: M::PeerWord,
    pub(crate) data: M::PeerData,
    pub(crate) capacity: u64,
}

impl<M: Mem> OwnRing<M> {
    /// Makes a ring over all of `data`.
    ///
    /// # Panics
    /// If its length is no power of two.
    pub fn new(tail: M::OwnWord, data: M::OwnData) -> Self {
        let capacity = data.len() as u64;
        assert!(capacity.is_power_of_two(), "a ring of {capacity} bytes");
        Self { tail, data, capacity }
    }

    /// Returns the offset of `position` in the data.
    #[inline]
    pub(crate) fn offset(&self, position: u64) -> usize {
        (position & (self.capacity - 1)) as usize
    }

    #[inline]
    pub(crate) fn put_word(&mut self, position: u64, word: u64) {
        self.data.put_word(self.offset(position), word);
    }

    #[inline(always)]
    pub(crate) fn copy_in(&mut self, position: u64, bytes: &[u8]) {
        let offset = self.offset(position);
        if bytes.len() <= self.capacity as usize - offset {
            self.data.copy_in(offset, bytes);
        } else {
            self.copy_in_around(offset, bytes);
        }
    }

    /// Prefetches the lines that the next write of `len` bytes at `position` will use.
    #[inline]
    pub(crate) fn prepare(&self, position: u64, len: u64) {
        let mut ahead = 0;
        while ahead < len {
            ahead += 64;
            self.data.prepare(self.offset(position.wrapping_add(ahead)));
        }
    }

    /// Copies a long piece in past the caches.
    #[inline(never)]
    pub(crate) fn copy_in_past_caches(&mut self, position: u64, bytes: &[u8]) {
        let offset = self.offset(position);
        let (first, second) = bytes.split_at(bytes.len().min(self.capacity as usize - offset));
        self.data.copy_in_past_caches(offset, first);
        self.data.copy_in_past_caches(0, second);
    }

    #[cold]
    fn copy_in_around(&mut self, offset: usize, bytes: &[u8]) {
        let (first, second) = bytes.split_at(self.capacity as usize - offset);
        self.data.copy_in(offset, first);
        self.data.copy_in(0, second);
    }

    pub(crate) fn copy_back(&self, position: u64, to: &mut [u8]) {
        let offset = self.offset(position);
        let room = (self.capacity as usize - offset).min(to.len());
        let (first, second) = to.split_at_mut(room);
        self.data.copy_back(offset, first);
        self.data.copy_back(0, second);
    }

    /// Returns whether bytes copied back may be zeros, because the memory was taken away (D-3).
    pub(crate) fn is_lost(&self) -> bool {
        self.data.is_lost()
    }
}

impl<M: Mem> PeerRing<M> {
    /// Makes a ring over all of `data`.
    ///
    /// # Panics
    /// If its length is no power of two.
    pub fn new(tail: M::PeerWord, data: M::PeerData) -> Self {
        let capacity = data.len() as u64;
        assert!(capacity.is_power_of_two(), "a ring of {capacity} bytes");
        Self { tail, data, capacity }
    }

    /// Returns the offset of `position` in the data.
    #[inline]
    pub(crate) fn offset(&self, position: u64) -> usize {
        (position & (self.capacity - 1)) as usize
    }

    /// Returns whether bytes copied so far may be zeros, because the memory was taken away (D-3).
    #[inline(always)]
    pub(crate) fn is_lost(&self) -> bool {
        self.data.is_lost()
    }

    #[inline]
    pub(crate) fn word(&self, position: u64) -> Untrusted<u64> {
        self.data.word(self.offset(position))
    }

    #[inline(always)]
    pub(crate) fn copy_out(&self, position: u64, to: &mut [u8]) {
        let offset = self.offset(position);
        if to.len() <= self.capacity as usize - offset {
            self.data.copy_out(offset, to);
        } else {
            self.copy_out_around(offset, to);
        }
    }

    #[cold]
    fn copy_out_around(&self, offset: usize, to: &mut [u8]) {
        let (first, second) = to.split_at_mut(self.capacity as usize - offset);
        self.data.copy_out(offset, first);
        self.data.copy_out(0, second);
    }

    /// Prefetches all lines of a short record at once, which breaks the chain of loads header -> length -> last lines.
    #[inline]
    pub(crate) fn prefetch(&self, position: u64, len: u64) {
        let offset = self.offset(position);
        let len = (len as usize).min(self.capacity as usize - offset);
        if len > 64 {
            self.data.prefetch(offset + 64, len - 64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use tombolo_layout::{limits::CONTROL_LEN, words};
    use tombolo_mem::{Mapped, PeerSegment, create_sealed};

    #[test]
    fn r5_bytes_past_the_caches_stand_where_others_do_wherever_they_begin() {
        const CAPACITY: usize = 4096;
        let len = CONTROL_LEN as usize + CAPACITY;
        let (own, memory) = create_sealed("tombolo-test", len).unwrap();
        let peer = PeerSegment::map(memory.as_fd(), len).unwrap();
        let (control, data) = own.split(CONTROL_LEN as usize);
        let mut ring = OwnRing::<Mapped>::new(control.word(words::TAIL), data);
        let seen = PeerRing::<Mapped>::new(peer.word(words::TAIL), peer.data(CONTROL_LEN as usize));
        let bytes: Vec<u8> = (0..CAPACITY as u32).map(|at| ((at * 31) >> 3) as u8 | 1).collect();
        let mut read = vec![0; CAPACITY];
        // Around cache lines, and around the end of the ring, in its second and its last round.
        let starts = [0, 1, 63, 64, 2047, 4032, 4095]
            .into_iter()
            .flat_map(|at| [CAPACITY as u64, 0_u64.wrapping_sub(CAPACITY as u64)].map(|lap| lap + at));
        for start in starts {
            for len in [1, 63, 64, 65, 2048, 4031, 4095, 4096] {
                ring.data.copy_in(0, &[0; CAPACITY]);
                ring.copy_in_past_caches(start, &bytes[..len]);
                Mapped::fence();
                seen.copy_out(start, &mut read);
                assert!(read[..len] == bytes[..len], "{len} bytes at {start}");
                assert!(read[len..].iter().all(|byte| *byte == 0), "{len} bytes at {start}: more was written");
            }
        }
    }
}
