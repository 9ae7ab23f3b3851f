// SPDX-License-Identifier: Apache-2.0 OR MIT
//! ipmpsc: a file that processes map, with a mutex and a condition variable in it; messages are serialized into it and
//! borrowed from it.

use std::fmt::Display;
use std::hint::spin_loop;
use std::path::PathBuf;

use ipmpsc::{Receiver, Sender, SharedRingBuffer};
use serde_bytes::Bytes;
use tombolo_bench::job::{Mode, Test, Wait};
use tombolo_bench::transport::{Card, Context, End, Namespaces, Wire};
use tombolo_bench::{Error, Result};

pub(crate) struct Ipmpsc;

impl Wire for Ipmpsc {
    type Host = ();
    type End = Ends;

    fn card(&self) -> Card {
        Card {
            name: "ipmpsc",
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
        open("there", "back", context)
    }

    fn connect(&self, _: &str, context: &Context) -> Result<Ends> {
        open("back", "there", context)
    }
}

/// Makes the ring from which this side reads, and opens the other once it is there; then neither needs a name any more.
fn open(from: &str, to: &str, context: &Context) -> Result<Ends> {
    let path = |name: &str| -> PathBuf { context.scratch.join(format!("ipmpsc-{name}")) };
    let text = |name: &str| path(name).display().to_string();
    let size = u32::try_from(context.job.ring).map_err(failed)?;
    let from_ring = SharedRingBuffer::create(&text(from), size).map_err(failed)?;
    context.link.meet()?;
    let to_ring = SharedRingBuffer::open(&text(to)).map_err(failed)?;
    context.link.meet()?;
    std::fs::remove_file(path(from)).map_err(failed)?;
    let spins = context.job.wait.map_or(!matches!(context.job.test, Test::Load | Test::Cpu), |wait| wait == Wait::Spin);
    Ok(Ends { from: Receiver::new(from_ring), to: Sender::new(to_ring), spins })
}

/// One end: the sender of one ring, the receiver of the other.
pub(crate) struct Ends {
    from: Receiver,
    to: Sender,
    spins: bool,
}

impl End for Ends {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.to.send(&Bytes::new(message)).map_err(failed)
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            let mut context = self.from.zero_copy_context();
            let message: Option<&[u8]> =
                if self.spins { context.try_recv().map_err(failed)? } else { Some(context.recv().map_err(failed)?) };
            let Some(message) = message else {
                spin_loop();
                continue;
            };
            let len = message.len();
            let Some(buffer) = buffer.get_mut(..len) else { return Err(Error::Spoiled(format!("a length of {len}"))) };
            buffer.copy_from_slice(message);
            return Ok(len);
        }
    }

    /// An empty message is the end.
    fn finish(&mut self) -> Result<()> {
        self.send(&[])
    }
}

#[cold]
fn failed(error: impl Display) -> Error {
    Error::Worker(format!("ipmpsc: {error}"))
}
