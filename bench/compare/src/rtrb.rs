// SPDX-License-Identifier: Apache-2.0 OR MIT
//! rtrb: a ring of bytes between two threads. A message is its length in eight bytes and the payload, written and read
//! as one chunk, each by one copy or, where the ring ends, two.
//!
//! # Safety
//! A chunk of slots is committed only after all of them were written.
#![allow(unsafe_code)]

use std::hint::spin_loop;
use std::mem::MaybeUninit;

use rtrb::{Consumer, CopyToUninit, Producer, RingBuffer};
use tombolo_bench::job::{Job, Mode, Test, Wait};
use tombolo_bench::transport::{Card, End, Namespaces};
use tombolo_bench::{Error, Result};

use crate::threads::Heap;

const HEADER: usize = size_of::<u64>();
/// Instead of a length: nothing follows.
const LAST: u64 = u64::MAX;

pub(crate) struct Rtrb;

impl Heap for Rtrb {
    type End = Ends;

    fn card(&self) -> Card {
        Card {
            name: "rtrb",
            mode: Mode::Message,
            variants: &["pause", "busy"],
            namespaces: Namespaces::Shared,
            tests: &[Test::Throughput, Test::Rate, Test::Latency],
            waits: &[Wait::Spin],
            size: None,
            rings: true,
        }
    }

    fn ends(&self, job: &Job) -> Result<[Ends; 2]> {
        if job.size + HEADER > job.ring {
            let (size, ring) = (job.size, job.ring);
            return Err(Error::Unsupported(format!("{size} bytes and a length do not fit into {ring}; see --ring")));
        }
        let (there, here) = RingBuffer::new(job.ring);
        let (back, home) = RingBuffer::new(job.ring);
        let pause = job.variant == "pause";
        Ok([Ends { to: there, from: home, pause }, Ends { to: back, from: here, pause }])
    }
}

/// One end: the writing half of one ring, the reading half of the other.
pub(crate) struct Ends {
    to: Producer<u8>,
    from: Consumer<u8>,
    /// Whether to pause between two looks at an index that has not moved.
    pause: bool,
}

impl Ends {
    #[inline]
    fn write(&mut self, header: u64, payload: &[u8]) {
        let len = HEADER + payload.len();
        let mut chunk = loop {
            match self.to.write_chunk_uninit(len) {
                Ok(chunk) => break chunk,
                Err(_) if self.pause => spin_loop(),
                Err(_) => {}
            }
        };
        let header = header.to_le_bytes();
        let (first, second) = chunk.as_mut_slices();
        if let Some((to, rest)) = first.split_at_mut_checked(HEADER) {
            header.copy_to_uninit(to);
            write_over(rest, second, payload);
        } else {
            let (to, rest) = second.split_at_mut(HEADER - first.len());
            write_over(first, to, &header);
            payload.copy_to_uninit(rest);
        }
        // SAFETY: (initialized) the two slices are the chunk, and the header and the payload, as long as they together,
        // were just copied there.
        unsafe { chunk.commit_all() };
    }
}

/// Fills two slices, one after the other, with bytes as many as they have slots.
#[inline]
fn write_over(first: &mut [MaybeUninit<u8>], second: &mut [MaybeUninit<u8>], bytes: &[u8]) {
    let (one, two) = bytes.split_at(first.len());
    one.copy_to_uninit(first);
    if !two.is_empty() {
        two.copy_to_uninit(second);
    }
}

#[inline]
fn read_over(first: &[u8], second: &[u8], bytes: &mut [u8]) {
    let (one, two) = bytes.split_at_mut(first.len());
    one.copy_from_slice(first);
    if !two.is_empty() {
        two.copy_from_slice(second);
    }
}

impl End for Ends {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.write(message.len() as u64, message);
        Ok(())
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let chunk = loop {
            match self.from.read_chunk(HEADER) {
                Ok(chunk) => break chunk,
                Err(_) if self.pause => spin_loop(),
                Err(_) => {}
            }
        };
        let (first, second) = chunk.as_slices();
        let mut header = [0; HEADER];
        match first.try_into() {
            Ok(whole) => header = whole,
            Err(_) => read_over(first, second, &mut header),
        }
        let header = u64::from_le_bytes(header);
        if header == LAST {
            return Ok(0);
        }
        let len = header as usize;
        let Some(buffer) = buffer.get_mut(..len) else { return Err(Error::Spoiled(format!("a length of {len}"))) };
        // A message is published as a whole.
        let chunk = self.from.read_chunk(HEADER + len).map_err(|e| Error::Spoiled(e.to_string()))?;
        let (first, second) = chunk.as_slices();
        match first.get(HEADER..) {
            Some(first) => read_over(first, second, buffer),
            None => buffer.copy_from_slice(&second[HEADER - first.len()..]),
        }
        chunk.commit_all();
        Ok(len)
    }

    fn finish(&mut self) -> Result<()> {
        self.write(LAST, &[]);
        Ok(())
    }
}
