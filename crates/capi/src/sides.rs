// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What halves can do, whether they carry bytes or messages.

use std::{io::Write, os::fd::BorrowedFd, time::Duration};

use tombolo::{
    Deadline, Ending, FlushPolicy, MessageReceiver, MessageSender, PipeStatistics, ReadHalf, Reserved, WriteHalf,
};

use crate::border::Outcome;

/// A place in a ring: address and length of its two parts, the second of which is empty unless the ring wraps there.
pub type Region = [(*const u8, usize); 2];

/// What every half can do.
pub trait Common {
    fn close(&mut self);
    fn set_spin(&mut self, most: Duration);
    fn statistics(&self) -> PipeStatistics;
    fn poll_fd(&self) -> tombolo::Result<BorrowedFd<'_>>;
}

/// What both kinds of reading halves can do.
pub trait Reads: Common {
    fn release(&mut self) -> tombolo::Result<()>;
    fn ending(&self) -> Option<Ending>;
    fn peek_region(&mut self) -> tombolo::Result<Option<Region>>;
    fn wait_until(&mut self, deadline: Deadline) -> tombolo::Result<bool>;
}

/// What both kinds of writing halves can do.
pub trait Writes: Common {
    fn flush_held(&mut self) -> Outcome<()>;
    fn drained_until(&mut self, deadline: Deadline) -> tombolo::Result<()>;
    fn room(&mut self, len: usize) -> tombolo::Result<Option<Region>>;
    fn room_until(&mut self, len: usize, deadline: Deadline) -> tombolo::Result<Region>;
    fn commit(&mut self, len: usize) -> tombolo::Result<()>;
    fn resize(&mut self, bytes: u64) -> tombolo::Result<()>;
    fn is_moving(&self) -> bool;
    fn set_flush_policy(&mut self, policy: FlushPolicy);
}

macro_rules! common {
    ($($half:ident),*) => {$(
        impl Common for $half {
            fn close(&mut self) {
                $half::close(self);
            }
            fn set_spin(&mut self, most: Duration) {
                $half::set_spin(self, most);
            }
            fn statistics(&self) -> PipeStatistics {
                $half::statistics(self)
            }
            fn poll_fd(&self) -> tombolo::Result<BorrowedFd<'_>> {
                $half::poll_fd(self)
            }
        }
    )*};
}

macro_rules! reads {
    ($($half:ident),*) => {$(
        impl Reads for $half {
            fn release(&mut self) -> tombolo::Result<()> {
                $half::release(self)
            }
            fn ending(&self) -> Option<Ending> {
                $half::ending(self)
            }
            fn peek_region(&mut self) -> tombolo::Result<Option<Region>> {
                let there = self.peek()?;
                Ok(there.map(|(first, second)| [(first.as_ptr(), first.len()), (second.as_ptr(), second.len())]))
            }
            fn wait_until(&mut self, deadline: Deadline) -> tombolo::Result<bool> {
                $half::wait_until(self, deadline)
            }
        }
    )*};
}

macro_rules! writes {
    ($($half:ident),*) => {$(
        impl Writes for $half {
            fn flush_held(&mut self) -> Outcome<()> {
                Ok(self.flush()?)
            }
            fn drained_until(&mut self, deadline: Deadline) -> tombolo::Result<()> {
                $half::drained_until(self, deadline)
            }
            fn room(&mut self, len: usize) -> tombolo::Result<Option<Region>> {
                Ok(self.try_reserve(len)?.map(place))
            }
            fn room_until(&mut self, len: usize, deadline: Deadline) -> tombolo::Result<Region> {
                self.reserve_until(len, deadline).map(place)
            }
            fn commit(&mut self, len: usize) -> tombolo::Result<()> {
                $half::commit(self, len)
            }
            fn resize(&mut self, bytes: u64) -> tombolo::Result<()> {
                $half::resize(self, bytes)
            }
            fn is_moving(&self) -> bool {
                $half::is_moving(self)
            }
            fn set_flush_policy(&mut self, policy: FlushPolicy) {
                $half::set_flush_policy(self, policy);
            }
        }
    )*};
}

fn place((first, second): Reserved<'_>) -> Region {
    [(first.as_mut_ptr().cast_const(), first.len()), (second.as_mut_ptr().cast_const(), second.len())]
}

common!(ReadHalf, MessageReceiver, WriteHalf, MessageSender);
reads!(ReadHalf, MessageReceiver);
writes!(WriteHalf, MessageSender);
