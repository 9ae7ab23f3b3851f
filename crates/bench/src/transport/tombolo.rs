// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures Tombolo itself, as a stream and as messages, through its public interface.

use std::marker::PhantomData;
use std::time::Duration;

use tombolo::{Channel, Deadline, Listener, Messages, Options, RingBudget, Statistics, Stream};

use super::{Card, Context, End, Namespaces, Wire};
use crate::error::{Error, Result};
use crate::job::{Job, Mode, Rings, Test, Wait};

const CARD: Card = Card {
    name: "tombolo",
    mode: Mode::Stream,
    variants: &[""],
    namespaces: Namespaces::Anywhere,
    tests: &[
        Test::Throughput,
        Test::Rate,
        Test::Latency,
        Test::Load,
        Test::Switches,
        Test::Setup,
        Test::Channels,
        Test::Cpu,
        Test::Memory,
    ],
    waits: &[Wait::Spin, Wait::Sleep],
    size: None,
    rings: true,
};

/// Transport of channels of kind `C`.
pub(super) struct Tombolo<C>(pub PhantomData<fn() -> C>);

/// Channel that can be measured.
pub(super) trait Measured: Channel + Send + 'static {
    const MODE: Mode;

    fn send(&mut self, message: &[u8]) -> tombolo::Result<()>;
    fn recv(&mut self, buffer: &mut [u8]) -> tombolo::Result<usize>;
    fn close(&mut self);
    fn statistics(&self) -> Statistics;
}

impl Measured for Stream {
    const MODE: Mode = Mode::Stream;

    #[inline]
    fn send(&mut self, message: &[u8]) -> tombolo::Result<()> {
        self.split().1.write_all_until(message, Deadline::NEVER)
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> tombolo::Result<usize> {
        self.split().0.read_until(buffer, Deadline::NEVER)
    }

    fn close(&mut self) {
        self.split().1.close();
    }

    fn statistics(&self) -> Statistics {
        Stream::statistics(self)
    }
}

impl Measured for Messages {
    const MODE: Mode = Mode::Message;

    #[inline]
    fn send(&mut self, message: &[u8]) -> tombolo::Result<()> {
        Messages::send(self, message)
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> tombolo::Result<usize> {
        Messages::recv(self, buffer).map(Option::unwrap_or_default)
    }

    fn close(&mut self) {
        self.split().0.close();
    }

    fn statistics(&self) -> Statistics {
        Messages::statistics(self)
    }
}

impl<C: Measured> End for C {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        Measured::send(self, message).map_err(failed)
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        Measured::recv(self, buffer).map_err(failed)
    }

    fn finish(&mut self) -> Result<()> {
        self.close();
        Ok(())
    }

    /// Returns an upper bound: a notification is one call, a sleep three (drain, barrier, wait).
    fn syscalls(&self) -> Option<u64> {
        let Statistics { sent, received, .. } = self.statistics();
        let calls = |c: tombolo::Counters| c.notifications_sent + 3 * c.sleeps;
        Some(calls(sent.counters) + calls(received.counters))
    }

    fn notifications(&self) -> Option<u64> {
        let Statistics { sent, received, .. } = self.statistics();
        Some(sent.counters.notifications_sent + received.counters.notifications_sent)
    }
}

impl<C: Measured> Wire for Tombolo<C> {
    type Host = Listener<C>;
    type End = C;

    fn card(&self) -> Card {
        Card { mode: C::MODE, ..CARD }
    }

    fn listen(&self, context: &Context) -> Result<(Listener<C>, String)> {
        let serial = super::serial();
        let (address, said) = match &context.channels {
            // Each machine has a name of its own for the other.
            Some(_) => (elsewhere(&format!("bench-{serial}"), context)?, format!("bench-{serial}")),
            None => {
                let address = format!("local:{}/tombolo-{serial}.sock", context.scratch.display());
                (address.clone(), address)
            }
        };
        let listener = tombolo::listen_with(&address, &options(&context.job)).map_err(failed)?;
        Ok((listener, said))
    }

    fn accept(&self, host: &mut Listener<C>, _: &Context) -> Result<C> {
        host.accept().map_err(failed)
    }

    fn connect(&self, address: &str, context: &Context) -> Result<C> {
        let address = if context.channels.is_some() { elsewhere(address, context)? } else { address.into() };
        tombolo::connect_with(&address, &options(&context.job)).map_err(failed)
    }
}

/// Returns the address of a service between two machines, as seen from this one.
fn elsewhere(service: &str, context: &Context) -> Result<String> {
    match context.channels.as_deref() {
        None | Some("") => Err(Error::Unsupported("no channels between the machines: see --via".into())),
        Some(before) => Ok(format!("{before}/{service}")),
    }
}

/// Returns the options of a job: always spin, always sleep, or the defaults that users get.
fn options(job: &Job) -> Options {
    let options = match job.rings {
        Rings::Default => Options::new(),
        Rings::Fixed => Options::new().ring_size(job.ring as u64),
        Rings::Growing => Options::new().ring_size(job.ring as u64).ring_growth(RingBudget::of_process()),
    };
    match job.wait {
        Some(Wait::Spin) => options.spin(Duration::MAX),
        Some(Wait::Sleep) => options.spin(Duration::ZERO),
        None => options,
    }
}

fn failed(error: tombolo::Error) -> Error {
    match error {
        tombolo::Error::TooLarge { len, max } => {
            Error::Unsupported(format!("a message of {len} bytes is longer than the ring takes ({max}); see --ring"))
        }
        other => Error::Tombolo(other),
    }
}
