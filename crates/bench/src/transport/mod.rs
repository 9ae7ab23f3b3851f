// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Transports that are measured: one [`Transport`] for each way of moving bytes.
//!
//! A transport with two endpoints implements [`Wire`]: how the answering side listens and accepts, how the asking side
//! connects, and an [`End`] that sends and receives. The measuring loops (in `loops`) are generic over the endpoint, so
//! that nothing stands between them and the transport; only the choice of the transport is dynamic.

mod kernel;
mod line;
mod memcpy;
mod raw_copy;
mod tombolo;
mod two_lines;

pub use memcpy::copy as memcpy;
pub use raw_copy::RawCopy;

pub use crate::wire::{Card, Context, End, Namespaces, Wire};

use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use tombolo_os::lock::lock;

use crate::error::{Error, Result};
use crate::job::{Mode, Report};
use crate::loops;

/// Way of moving bytes that can be measured.
pub trait Transport: Send + Sync {
    /// Returns the transport's card.
    fn card(&self) -> Card;

    /// Performs this worker's half of a measurement.
    ///
    /// # Errors
    /// [`Error::Unsupported`] skips the measurement, any other error fails it.
    fn perform(&self, context: &mut Context) -> Result<Report>;
}

impl<W: Wire> Transport for W {
    fn card(&self) -> Card {
        Wire::card(self)
    }

    fn perform(&self, context: &mut Context) -> Result<Report> {
        loops::perform(self, context)
    }
}

/// Transports that the program added.
static ADDED: Mutex<Vec<Arc<dyn Transport>>> = Mutex::new(Vec::new());

/// Adds a transport. Call it first in `main`, before [`crate::role_main`]: the workers are the same program and must
/// know the transports that the driver knows.
pub fn add(transport: impl Transport + 'static) {
    lock(&ADDED).push(Arc::new(transport));
}

/// Returns all transports, in the order in which tables show them.
pub fn all() -> Vec<Arc<dyn Transport>> {
    let mut all: Vec<Arc<dyn Transport>> = vec![
        Arc::new(tombolo::Tombolo::<::tombolo::Stream>(PhantomData)),
        Arc::new(tombolo::Tombolo::<::tombolo::Messages>(PhantomData)),
        Arc::new(kernel::Tcp { veth: false }),
        Arc::new(kernel::Tcp { veth: true }),
        Arc::new(kernel::Unix { messages: false }),
        Arc::new(kernel::Unix { messages: true }),
        Arc::new(kernel::Pipe),
        Arc::new(line::RawLine),
        Arc::new(two_lines::TwoLines),
        Arc::new(kernel::Eventfd),
        Arc::new(RawCopy::ONCE),
        Arc::new(memcpy::Memcpy),
    ];
    all.extend(lock(&ADDED).iter().cloned());
    all
}

/// Returns the transport of that name and mode.
///
/// # Errors
/// [`Error::Usage`] if there is none.
pub fn find(name: &str, mode: Mode) -> Result<Arc<dyn Transport>> {
    let known = all().into_iter().find(|t| t.card().name == name && t.card().mode == mode);
    known.ok_or_else(|| Error::Usage(format!("there is no transport {name:?} in {mode:?} mode")))
}

/// Returns a number that this process has not used before.
fn serial() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    // ORDER: none needed; each caller only wants a number of its own.
    SERIAL.fetch_add(1, Ordering::Relaxed)
}
