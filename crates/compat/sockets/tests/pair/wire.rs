// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A kernel that carries the bytes of one connection without losing any.

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    os::fd::RawFd,
    sync::{Arc, Mutex},
};

use rustix::{event::PollFlags, io::Errno};
use tombolo_layout::sockets::Counts;
use tombolo_sockets::{
    kernel::{Kernel, Sample},
    tuple::Tuple,
};

/// One direction of the kernel's connection.
#[derive(Debug, Default)]
pub struct Carried {
    written: u64,
    /// Whether there is no room for more bytes.
    pub is_full: bool,
    /// Whether no more bytes will come.
    pub is_over: bool,
    under_way: VecDeque<u8>,
}

/// The kernel as one endpoint sees it: the bytes that it sends and those that it receives.
pub struct Wire {
    pub tuple: Tuple,
    pub out: Arc<Mutex<Carried>>,
    pub inward: Arc<Mutex<Carried>>,
}

impl Kernel for Wire {
    fn tuple(&self, _: RawFd) -> Option<Tuple> {
        Some(self.tuple)
    }
    fn cookie(&self, _: RawFd) -> u64 {
        7
    }
    fn counts(&self, _: RawFd, _: bool) -> Option<Sample> {
        let (out, inward) = (self.out.lock().unwrap(), self.inward.lock().unwrap());
        // A kernel may acknowledge late.
        let acked = out.written - out.under_way.len() as u64;
        let counts = Counts { written: out.written, acked, received: inward.written };
        Some(Sample { counts, unread: inward.under_way.len() as u64 })
    }
    fn push(&self, _: RawFd) {}
    fn recv(&self, _: RawFd, to: &mut [IoSliceMut<'_>], peek: bool) -> Result<usize, Errno> {
        let mut inward = self.inward.lock().unwrap();
        if inward.under_way.is_empty() {
            return if inward.is_over { Ok(0) } else { Err(Errno::AGAIN) };
        }
        let mut done = 0;
        for part in to {
            let n = part.len().min(inward.under_way.len() - done);
            inward.under_way.iter().skip(done).zip(part.iter_mut()).for_each(|(byte, to)| *to = *byte);
            done += n;
        }
        if !peek {
            inward.under_way.drain(..done);
        }
        Ok(done)
    }
    fn send(&self, _: RawFd, from: &[IoSlice<'_>]) -> Result<usize, Errno> {
        let mut out = self.out.lock().unwrap();
        if out.is_full {
            return Err(Errno::AGAIN);
        }
        from.iter().for_each(|part| out.under_way.extend(part.iter()));
        let n: usize = from.iter().map(|part| part.len()).sum();
        out.written += n as u64;
        Ok(n)
    }
    fn poll(&self, _: RawFd, events: i16) -> i16 {
        let (out, inward) = (self.out.lock().unwrap(), self.inward.lock().unwrap());
        let mut said = PollFlags::empty();
        said.set(PollFlags::IN, inward.is_over || !inward.under_way.is_empty());
        said.set(PollFlags::RDHUP, inward.is_over);
        let over = if out.is_over && inward.is_over { PollFlags::HUP } else { PollFlags::empty() };
        (said & PollFlags::from_bits_retain(events as _) | over).bits() as i16
    }
    fn reset(&self, _: RawFd) {}
}
