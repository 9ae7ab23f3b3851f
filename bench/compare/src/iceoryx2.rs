// SPDX-License-Identifier: Apache-2.0 OR MIT
//! iceoryx2: publish and subscribe of slices between two processes, one service for each direction, and polling.
//!
//! # Safety
//! Ports belong to the thread that made them, and samples are sent only when all their bytes are initialized.
#![allow(unsafe_code)]

use std::fmt::Display;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};

use iceoryx2::port::BackpressureAction;
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::port::update_connections::UpdateConnections;
use iceoryx2::prelude::*;
use tombolo_bench::job::{Mode, Test, Wait};
use tombolo_bench::transport::{Card, Context, End, Namespaces, Wire};
use tombolo_bench::{Error, Result};

/// Samples that wait for the subscriber at most.
const BUFFER: usize = 64;
/// Bytes of a sample that are written and read even if the payload is not touched: the harness's stamp.
const STAMP: usize = 8;

/// With the payload copied in and out, or not touched.
pub(crate) struct Iceoryx2 {
    pub touched: bool,
}

impl Wire for Iceoryx2 {
    /// The address.
    type Host = String;
    type End = Ports;

    fn card(&self) -> Card {
        Card {
            name: if self.touched { "iceoryx2" } else { "iceoryx2-untouched" },
            mode: Mode::Message,
            variants: &[""],
            namespaces: Namespaces::Shared,
            // Bytes that nobody touches are no throughput.
            tests: if self.touched {
                &[Test::Throughput, Test::Rate, Test::Latency]
            } else {
                &[Test::Rate, Test::Latency]
            },
            waits: &[Wait::Spin],
            size: None,
            rings: false,
        }
    }

    fn listen(&self, context: &Context) -> Result<(String, String)> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        // ORDER: none needed; each call only wants a number of its own.
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let place = context.scratch.file_name().unwrap_or_default().to_string_lossy();
        let address = format!("{place}-{serial}");
        Ok((address.clone(), address))
    }

    fn accept(&self, address: &mut String, context: &Context) -> Result<Ports> {
        self.open([&format!("{address}/back"), &format!("{address}/there")], context)
    }

    fn connect(&self, address: &str, context: &Context) -> Result<Ports> {
        self.open([&format!("{address}/there"), &format!("{address}/back")], context)
    }
}

impl Iceoryx2 {
    /// Opens a publisher of the first service and a subscriber of the second; returns when the other side has, too.
    fn open(&self, [to, from]: [&str; 2], context: &Context) -> Result<Ports> {
        // It warns of having no file of settings.
        set_log_level(LogLevel::Error);
        let size = context.job.size;
        let node = NodeBuilder::new().signal_handling_mode(SignalHandlingMode::Disabled);
        let node = node.create::<ipc::Service>().map_err(failed)?;
        let service = |name: &str| {
            let service = node.service_builder(&name.try_into().map_err(failed)?).publish_subscribe::<[u8]>();
            let service = service.enable_safe_overflow(false).history_size(0).subscriber_max_buffer_size(BUFFER);
            service.max_publishers(1).max_subscribers(1).max_nodes(2).open_or_create().map_err(failed)
        };
        let (to, from) = (service(to)?, service(from)?);
        // A full buffer is tried again at once: its own way of waiting sleeps.
        let publisher = to.publisher_builder().initial_max_slice_len(size);
        let publisher = publisher.set_backpressure_handler(|_| BackpressureAction::Retry).create().map_err(failed)?;
        let subscriber = from.subscriber_builder().buffer_size(BUFFER).create().map_err(failed)?;
        let ports =
            Ports { publisher, subscriber, touched: if self.touched { usize::MAX } else { STAMP }, _node: node };
        // Whoever publishes to a subscriber that has not looked yet publishes to nobody.
        context.link.meet()?;
        ports.publisher.update_connections().map_err(failed)?;
        context.link.meet()?;
        ports.subscriber.update_connections().map_err(failed)?;
        context.link.meet()?;
        Ok(ports)
    }
}

/// One end: a publisher of one service, a subscriber of the other.
pub(crate) struct Ports {
    publisher: Publisher<ipc::Service, [u8], ()>,
    subscriber: Subscriber<ipc::Service, [u8], ()>,
    /// How many bytes of a message are copied, at most.
    touched: usize,
    _node: Node<ipc::Service>,
}

// SAFETY: (one thread) the harness moves ends between threads in the test of many channels only, in which this
// transport takes no part; everywhere else the thread that opened an end uses and drops it.
unsafe impl Send for Ports {}

impl End for Ports {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        let mut sample = self.publisher.loan_slice_uninit(message.len()).map_err(failed)?;
        let sample = if message.len() <= self.touched {
            sample.write_from_slice(message)
        } else {
            for (to, from) in sample.payload_mut().iter_mut().zip(&message[..self.touched]) {
                to.write(*from);
            }
            // SAFETY: (initialized) bytes of shared memory: the operating system filled it with zeroes, and later
            // senders with their stamps.
            unsafe { sample.assume_init() }
        };
        match sample.send().map_err(failed)? {
            0 => Err(failed("a message was delivered to nobody")),
            _ => Ok(()),
        }
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            let Some(sample) = self.subscriber.receive().map_err(failed)? else {
                spin_loop();
                continue;
            };
            let len = sample.len().min(self.touched);
            buffer[..len].copy_from_slice(&sample[..len]);
            return Ok(sample.len());
        }
    }

    /// An empty message is the end.
    fn finish(&mut self) -> Result<()> {
        self.send(&[])
    }
}

#[cold]
fn failed(error: impl Display) -> Error {
    Error::Worker(format!("iceoryx2: {error}"))
}
