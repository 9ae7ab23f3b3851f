// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The shape of libxenvchan's rings, written anew from what is known of it, not a line of it copied. Two rings of bytes
//! whose four indices lie, with the bits by which a sleeper asks to be woken, on one cache line that both sides write.
//! No side remembers an index of the other. After each write and each read a full fence and an atomic operation take
//! the other's bit back. There is no event channel, for nobody sleeps here.
//!
//! # Safety
//! A ring's bytes from `consumed` to `produced` belong to its reader, all others to its writer. Either index is moved
//! by its owner alone, by release after the bytes were copied, and read by the other with acquire before it copies.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};

use tombolo_bench::job::{Job, Mode, Test, Wait};
use tombolo_bench::transport::{Card, End, Namespaces};
use tombolo_bench::{Error, Result};

use crate::threads::Heap;

/// Bits of the request to be woken: when there are bytes, when there is room.
const BYTES: u8 = 1;
const ROOM: u8 = 2;

pub(crate) struct Shape;

impl Heap for Shape {
    type End = Side;

    fn card(&self) -> Card {
        Card {
            name: "libxenvchan-shape",
            mode: Mode::Stream,
            variants: &[""],
            namespaces: Namespaces::Shared,
            tests: &[Test::Throughput, Test::Rate, Test::Latency],
            waits: &[Wait::Spin],
            size: None,
            rings: true,
        }
    }

    fn ends(&self, job: &Job) -> Result<[Side; 2]> {
        if !job.ring.is_power_of_two() || job.ring > 1 << 30 {
            return Err(Error::Unsupported(format!("a ring of {} bytes is no power of two up to 1 GiB", job.ring)));
        }
        let shared = Arc::new(Shared {
            control: Control::default(),
            data: [0; 2].map(|_| (0..job.ring).map(|_| UnsafeCell::new(0)).collect()),
        });
        Ok([Side { shared: Arc::clone(&shared), mine: 0 }, Side { shared, mine: 1 }])
    }
}

/// All that both sides write besides data: one cache line.
#[derive(Default)]
#[repr(align(64))]
struct Control {
    rings: [Indices; 2],
    /// Who writes nothing more.
    ended: [AtomicBool; 2],
    /// Who wants to be woken, and when.
    notify: [AtomicU8; 2],
}

#[derive(Default)]
struct Indices {
    consumed: AtomicU32,
    produced: AtomicU32,
}

struct Shared {
    control: Control,
    data: [Box<[UnsafeCell<u8>]>; 2],
}

// SAFETY: (no data race) who may touch which byte is settled by the indices, see the head of this file.
unsafe impl Sync for Shared {}

/// One of the two sides; it writes the ring of its own number and reads the other.
pub(crate) struct Side {
    shared: Arc<Shared>,
    mine: usize,
}

impl Side {
    /// Takes back the other side's wish to be woken, as is done after each move of an index.
    #[inline]
    fn wake(&self, bit: u8) {
        // ORDER: the index before the look at the wish, as the other side wishes before it looks at the index again.
        fence(Ordering::SeqCst);
        let before = self.shared.control.notify[1 - self.mine].fetch_and(!bit, Ordering::SeqCst);
        debug_assert_eq!(before & bit, 0, "nobody sleeps");
    }

    /// Where a ring's byte of that index is, and how many follow until the ring's end.
    #[inline]
    fn place(data: &[UnsafeCell<u8>], index: u32) -> (*mut u8, usize) {
        let at = index as usize & (data.len() - 1);
        (UnsafeCell::raw_get(&raw const data[at]), data.len() - at)
    }
}

impl End for Side {
    #[inline]
    fn send(&mut self, mut message: &[u8]) -> Result<()> {
        let (ring, data) = (&self.shared.control.rings[self.mine], &self.shared.data[self.mine]);
        while !message.is_empty() {
            let produced = ring.produced.load(Ordering::Relaxed);
            let room = data.len() - produced.wrapping_sub(ring.consumed.load(Ordering::Acquire)) as usize;
            if room == 0 {
                spin_loop();
                continue;
            }
            let (now, later) = message.split_at(room.min(message.len()));
            let (at, until_end) = Self::place(data, produced);
            let first = now.len().min(until_end);
            // SAFETY: (in bounds) `first` bytes fit before the ring's end; (ours) they are part of the room; (apart)
            // the message is borrowed and the ring is not.
            unsafe { at.copy_from_nonoverlapping(now.as_ptr(), first) };
            if first < now.len() {
                let (start, _) = Self::place(data, 0);
                let rest = &now[first..];
                // SAFETY: (in bounds) the room is at most the ring, so what is left fits; (ours), (apart) as above.
                unsafe { start.copy_from_nonoverlapping(rest.as_ptr(), rest.len()) };
            }
            ring.produced.store(produced.wrapping_add(now.len() as u32), Ordering::Release);
            self.wake(BYTES);
            message = later;
        }
        Ok(())
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let theirs = 1 - self.mine;
        let (control, data) = (&self.shared.control, &self.shared.data[theirs]);
        let ring = &control.rings[theirs];
        let consumed = ring.consumed.load(Ordering::Relaxed);
        let ready = loop {
            let ready = ring.produced.load(Ordering::Acquire).wrapping_sub(consumed) as usize;
            if ready > 0 {
                break ready;
            }
            if control.ended[theirs].load(Ordering::Acquire) && ring.produced.load(Ordering::Acquire) == consumed {
                return Ok(0);
            }
            spin_loop();
        };
        let len = ready.min(buffer.len());
        let (at, until_end) = Self::place(data, consumed);
        let (first, rest) = buffer[..len].split_at_mut(len.min(until_end));
        // SAFETY: (in bounds) the first part ends with the ring at the latest; (ours) the bytes are ready; (apart) the
        // buffer is borrowed and the ring is not.
        unsafe { at.copy_to_nonoverlapping(first.as_mut_ptr(), first.len()) };
        if !rest.is_empty() {
            let (start, _) = Self::place(data, 0);
            // SAFETY: (in bounds) no more is ready than the ring has, so the rest fits; (ours), (apart) as above.
            unsafe { start.copy_to_nonoverlapping(rest.as_mut_ptr(), rest.len()) };
        }
        ring.consumed.store(consumed.wrapping_add(len as u32), Ordering::Release);
        self.wake(ROOM);
        Ok(len)
    }

    fn finish(&mut self) -> Result<()> {
        self.shared.control.ended[self.mine].store(true, Ordering::Release);
        Ok(())
    }
}
