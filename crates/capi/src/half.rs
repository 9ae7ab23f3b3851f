// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A handle is two halves that two threads may use at once; each half belongs to one call at a time.

use std::{
    io::Write,
    os::fd::BorrowedFd,
    sync::{Mutex, MutexGuard, TryLockError},
    time::Duration,
};

use tombolo::{Deadline, Ending, MessageReceiver, MessageSender, PipeStatistics, ReadHalf, WriteHalf};

use crate::border::{Fault, Outcome};

/// As a time: wait for as long as it takes.
pub const TOMBOLO_FOREVER: i64 = -1;

/// When a call that was given `timeout_ns` and must wait gives up. It must not wait at all: the fault that says so.
pub fn deadline(timeout_ns: i64) -> Outcome<Deadline> {
    match timeout_ns {
        ..=TOMBOLO_FOREVER => Ok(Deadline::NEVER),
        0 => Err(Fault::WOULD_BLOCK),
        ns => Ok(Deadline::after(Duration::from_nanos(ns.unsigned_abs()))),
    }
}

/// One half. Two calls at once on it are a mistake of the caller, told apart from a data race.
#[derive(Debug)]
pub struct Half<T>(Mutex<Inside<T>>);

/// What a half is, and how much of its ring the caller holds: what it reserved, or peeked at.
#[derive(Debug)]
pub struct Inside<T> {
    pub half: T,
    pub held: Option<usize>,
}

impl<T> Half<T> {
    pub fn new(half: T) -> Self {
        Self(Mutex::new(Inside { half, held: None }))
    }

    /// The half, for a call that moves data: what the caller held ends here.
    pub fn begin(&self) -> Outcome<MutexGuard<'_, Inside<T>>> {
        let mut inside = self.enter()?;
        inside.held = None;
        Ok(inside)
    }

    /// The half, for one call.
    pub fn enter(&self) -> Outcome<MutexGuard<'_, Inside<T>>> {
        self.0.try_lock().map_err(|why| match why {
            TryLockError::WouldBlock => Fault::new(libc::EBUSY, c"another thread is in a call on this half"),
            TryLockError::Poisoned(_) => {
                Fault::new(libc::ENOTRECOVERABLE, c"a fault in Tombolo broke this half: close the handle")
            }
        })
    }
}

impl<T> Inside<T> {
    /// Ends what the caller holds, of which `len` bytes are to be acted on.
    pub fn end_hold(&mut self, len: usize) -> Outcome<()> {
        match self.held.take() {
            Some(held) if len <= held => Ok(()),
            Some(held) => Err(Fault::with(libc::EINVAL, &format!("{len} bytes where {held} are held"))),
            None => Err(Fault::new(libc::EINVAL, c"nothing is held: reserve before a commit, peek before a consume")),
        }
    }
}

/// What every half can do.
pub trait Common {
    fn close(&mut self);
    fn statistics(&self) -> PipeStatistics;
    fn poll_fd(&self) -> tombolo::Result<BorrowedFd<'_>>;
}

/// What both kinds of reading halves can do.
pub trait Reads: Common {
    fn release(&mut self) -> tombolo::Result<()>;
    fn ending(&self) -> Option<Ending>;
}

/// What both kinds of writing halves can do.
pub trait Writes: Common {
    fn flush_held(&mut self) -> Outcome<()>;
    fn drained_until(&mut self, deadline: Deadline) -> tombolo::Result<()>;
}

macro_rules! common {
    ($($half:ident),*) => {$(
        impl Common for $half {
            fn close(&mut self) {
                $half::close(self);
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
        }
    )*};
}

common!(ReadHalf, MessageReceiver, WriteHalf, MessageSender);
reads!(ReadHalf, MessageReceiver);
writes!(WriteHalf, MessageSender);
