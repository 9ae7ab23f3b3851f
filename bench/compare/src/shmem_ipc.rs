// SPDX-License-Identifier: Apache-2.0 OR MIT
//! shmem-ipc: rings of bytes in memory that two processes share, an eventfd that wakes each side. A
//! message is its length in eight bytes and the payload, given to the ring at once where it goes in at once.
//!
//! # Safety
//! Closures that the library calls with a place in the ring and a length touch no more than that many bytes there.
#![allow(unsafe_code)]

use std::fmt::Display;
use std::fs::File;
use std::hint::spin_loop;
use std::os::fd::AsFd;
use std::ptr::copy_nonoverlapping;

use shmem_ipc::sharedring::{Receiver, Sender};
use tombolo_bench::job::{Mode, Test, Wait};
use tombolo_bench::transport::{Card, Context, End, Namespaces, Wire};
use tombolo_bench::{Error, Result};

const HEADER: usize = size_of::<u64>();
/// Instead of a length: nothing follows.
const LAST: u64 = u64::MAX;

pub(crate) struct ShmemIpc;

impl Wire for ShmemIpc {
    type Host = ();
    type End = Ends;

    fn card(&self) -> Card {
        Card {
            name: "shmem-ipc",
            mode: Mode::Message,
            variants: &[""],
            namespaces: Namespaces::Shared,
            tests: &[Test::Throughput, Test::Rate, Test::Latency, Test::Load, Test::Cpu],
            waits: &[Wait::Spin, Wait::Sleep],
            size: None,
            rings: true,
        }
    }

    fn listen(&self, _: &Context) -> Result<((), String)> {
        Ok(((), String::new()))
    }

    fn accept(&self, (): &mut (), context: &Context) -> Result<Ends> {
        let to = Sender::new(context.job.ring).map_err(failed)?;
        let from = Receiver::new(context.job.ring).map_err(failed)?;
        for file in [to.memfd().as_file(), to.empty_signal(), to.full_signal()] {
            context.link.pass(file.as_fd())?;
        }
        for file in [from.memfd().as_file(), from.empty_signal(), from.full_signal()] {
            context.link.pass(file.as_fd())?;
        }
        Ok(Ends { to, from, sleeps: sleeps(context) })
    }

    fn connect(&self, _: &str, context: &Context) -> Result<Ends> {
        let ring = context.job.ring;
        let take = || Ok::<_, Error>(File::from(context.link.receive_descriptor()?));
        let from = Receiver::open(ring, take()?, take()?, take()?).map_err(failed)?;
        let to = Sender::open(ring, take()?, take()?, take()?).map_err(failed)?;
        Ok(Ends { to, from, sleeps: sleeps(context) })
    }
}

/// Returns whether both ends block in the library's own way. They spin in throughput tests, as the other rivals do,
/// unless the job asks for sleeping, measures the cost in CPU time, or sends at a fixed rate.
fn sleeps(context: &Context) -> bool {
    match context.job.wait {
        Some(wait) => wait == Wait::Sleep,
        None => matches!(context.job.test, Test::Load | Test::Cpu),
    }
}

/// One end: the sender of one ring, the receiver of the other.
pub(crate) struct Ends {
    to: Sender<u8>,
    from: Receiver<u8>,
    /// Whether to block and to wake the other end, or neither.
    sleeps: bool,
}

impl Ends {
    #[inline]
    fn write(&mut self, header: u64, payload: &[u8]) -> Result<()> {
        let header = header.to_le_bytes();
        let mut done = 0;
        while done < HEADER + payload.len() {
            let before = done;
            let put = |place: *mut u8, room: usize| {
                let start = &header[done.min(HEADER)..];
                let (start, room) = (&start[..start.len().min(room)], room - start.len().min(room));
                let rest = &payload[done.saturating_sub(HEADER)..];
                let rest = &rest[..rest.len().min(room)];
                // SAFETY: (in bounds) `start` and `rest` together are no longer than the room; (apart) they are
                // borrowed and the ring is not.
                unsafe { copy_nonoverlapping(start.as_ptr(), place, start.len()) };
                // SAFETY: (in bounds) as above.
                let after = unsafe { place.add(start.len()) };
                // SAFETY: (in bounds), (apart) as above.
                unsafe { copy_nonoverlapping(rest.as_ptr(), after, rest.len()) };
                let put = start.len() + rest.len();
                done += put;
                put
            };
            if self.sleeps {
                self.to.send_raw(put).map_err(failed)?;
            } else {
                self.to.sender_mut().send(put).map_err(failed)?;
            }
            if done == before {
                if self.sleeps {
                    self.to.block_until_writable().map_err(failed)?;
                } else {
                    spin_loop();
                }
            }
        }
        Ok(())
    }

    /// Lets `get` take from what is there, at least once there is something.
    #[inline]
    fn read_with(&mut self, mut get: impl FnMut(*const u8, usize) -> usize) -> Result<()> {
        loop {
            let mut seen = false;
            let get = |place: *const u8, ready: usize| {
                seen = true;
                get(place, ready)
            };
            if self.sleeps {
                self.from.receive_raw(get).map_err(failed)?;
            } else {
                self.from.receiver_mut().recv(get).map_err(failed)?;
            }
            if seen {
                return Ok(());
            }
            if self.sleeps {
                self.from.block_until_readable().map_err(failed)?;
            } else {
                spin_loop();
            }
        }
    }

    /// Fills `buffer`, in as many parts as it comes.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let rest = &mut buffer[done..];
            self.read_with(|place, ready| {
                let len = rest.len().min(ready);
                // SAFETY: (in bounds) no more than is ready, and than the buffer has left; (apart) the buffer is
                // borrowed and the ring is not.
                unsafe { copy_nonoverlapping(place, rest.as_mut_ptr(), len) };
                done += len;
                len
            })?;
        }
        Ok(())
    }
}

impl End for Ends {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.write(message.len() as u64, message)
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        // A message that lies there in one piece is taken in one step.
        let mut whole = None;
        self.read_with(|place, ready| {
            if ready < HEADER {
                return 0;
            }
            // SAFETY: (in bounds) at least a header is ready; (unaligned) read as such.
            let len = u64::from_le(unsafe { place.cast::<u64>().read_unaligned() });
            if len > buffer.len() as u64 || ready - HEADER < len as usize {
                return 0;
            }
            // SAFETY: (in bounds) header and payload are ready.
            let payload = unsafe { place.add(HEADER) };
            // SAFETY: (in bounds) `len` bytes are ready and fit into the buffer; (apart) it is borrowed and the ring is
            // not.
            unsafe { copy_nonoverlapping(payload, buffer.as_mut_ptr(), len as usize) };
            whole = Some(len as usize);
            HEADER + len as usize
        })?;
        if let Some(len) = whole {
            return Ok(len);
        }
        let mut header = [0; HEADER];
        self.fill(&mut header)?;
        let header = u64::from_le_bytes(header);
        if header == LAST {
            return Ok(0);
        }
        let len = header as usize;
        let Some(buffer) = buffer.get_mut(..len) else { return Err(Error::Spoiled(format!("a length of {len}"))) };
        self.fill(buffer)?;
        Ok(len)
    }

    fn finish(&mut self) -> Result<()> {
        self.write(LAST, &[])
    }
}

#[cold]
fn failed(error: impl Display) -> Error {
    Error::Worker(format!("shmem-ipc: {error}"))
}
