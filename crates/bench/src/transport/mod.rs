// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is measured: one [`Transport`] for each way of moving bytes.
//!
//! A transport with two ends implements [`Wire`]: how the answering side listens and accepts, how the asking side
//! connects, and an [`End`] that sends and receives. The measuring loops (in `loops`) are generic over the end, so
//! that nothing stands between them and the transport; only the choice of the transport is dynamic.

mod kernel;
mod line;
mod memcpy;
mod raw_copy;
mod tombolo;

pub use memcpy::copy as memcpy;
pub use raw_copy::RawCopy;

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::job::{Cpu, Job, Mode, Report, Role, Test, Wait};
use crate::line::Line;
use crate::link::Link;
use crate::loops;

/// What a transport is and which measurements mean something for it.
#[derive(Debug, Clone, Copy)]
pub struct Card {
    /// Its name on the command line and in the results.
    pub name: &'static str,
    /// Whether it keeps messages apart.
    pub mode: Mode,
    /// The ways to set it up that are all measured and of which the best is reported; `[""]` if there is but one.
    pub variants: &'static [&'static str],
    /// Where the two processes must live.
    pub namespaces: Namespaces,
    /// The tests that it takes part in.
    pub tests: &'static [Test],
    /// The ways of waiting that it knows.
    pub waits: &'static [Wait],
    /// The one size it moves, if it knows no other.
    pub size: Option<usize>,
    /// Whether [`Job::ring`] means something to it.
    pub rings: bool,
}

/// Where the two processes of a measurement live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Namespaces {
    /// Both where the user is.
    Shared,
    /// Each in a network namespace of its own, joined by a veth pair.
    Veth,
    /// Both where the user is, or each on a machine of its own.
    Anywhere,
    /// Each on a machine of its own.
    Apart,
}

impl Namespaces {
    /// Whether the ends can be where they are: on two machines, or on one.
    pub(crate) fn suit(self, apart: bool) -> bool {
        match self {
            Self::Shared | Self::Veth => !apart,
            Self::Anywhere => true,
            Self::Apart => apart,
        }
    }
}

/// Everything a worker has at hand for one measurement.
pub struct Context {
    /// Which of the two processes this is.
    pub role: Role,
    /// What is to be measured.
    pub job: Job,
    /// The cord to the other worker, for setting up.
    pub link: Link,
    /// The cache line shared with the other worker, if both are on one machine.
    pub line: Option<Line>,
    /// What stands before the service in Tombolo's addresses, if the other worker is on another machine.
    pub channels: Option<String>,
    /// The network address under which the right worker is reached.
    pub host: String,
    /// A directory for sockets; it goes away with the workers.
    pub scratch: PathBuf,
}

/// A way of moving bytes that can be measured.
pub trait Transport: Send + Sync {
    /// What it is.
    fn card(&self) -> Card;

    /// Does this worker's half of a measurement.
    ///
    /// # Errors
    /// [`Error::Unsupported`] skips the measurement, any other error fails it.
    fn perform(&self, context: &mut Context) -> Result<Report>;
}

/// A transport between two ends, the left (asking, sending) and the right (answering, receiving).
pub trait Wire: Send + Sync {
    /// What the right side accepts connections from.
    type Host;
    /// One end of a connection.
    type End: End;

    /// What it is.
    fn card(&self) -> Card;

    /// Right: gets ready for connections; says the address that the left needs.
    ///
    /// # Errors
    /// As [`Transport::perform`].
    fn listen(&self, context: &Context) -> Result<(Self::Host, String)>;

    /// Right: takes the next connection. It may use [`Context::link`], which `connect` uses at the same time.
    ///
    /// # Errors
    /// As [`Transport::perform`].
    fn accept(&self, host: &mut Self::Host, context: &Context) -> Result<Self::End>;

    /// Left: connects to the address.
    ///
    /// # Errors
    /// As [`Transport::perform`].
    fn connect(&self, address: &str, context: &Context) -> Result<Self::End>;
}

/// One end of a connection, able to send and to receive. It waits as [`Job::wait`] says.
pub trait End: Send {
    /// Sends all of `message`.
    ///
    /// # Errors
    /// What the transport says.
    fn send(&mut self, message: &[u8]) -> Result<()>;

    /// Receives what is there, at least a byte: in message mode one message, in stream mode up to all of `buffer`. 0 at the end.
    ///
    /// # Errors
    /// What the transport says.
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize>;

    /// Sends nothing more: the other end receives what was sent, then the end.
    ///
    /// # Errors
    /// What the transport says.
    fn finish(&mut self) -> Result<()>;

    /// System calls made through this end so far, if it can say.
    fn syscalls(&self) -> Option<u64> {
        None
    }

    /// Notifications sent through this end so far, for transports that send them only to a sleeper.
    fn notifications(&self) -> Option<u64> {
        None
    }
}

impl<W: Wire> Transport for W {
    fn card(&self) -> Card {
        Wire::card(self)
    }

    fn perform(&self, context: &mut Context) -> Result<Report> {
        loops::perform(self, context)
    }
}

/// Transports that the program brought along.
static ADDED: Mutex<Vec<Arc<dyn Transport>>> = Mutex::new(Vec::new());

/// Makes one more transport known. Call it first in `main`, before [`crate::role_main`]: the workers are the same program
/// and must know what the driver knows.
pub fn add(transport: impl Transport + 'static) {
    ADDED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(transport));
}

/// Every transport there is, in the order in which tables show them.
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
        Arc::new(kernel::Eventfd),
        Arc::new(RawCopy::ONCE),
        Arc::new(memcpy::Memcpy),
    ];
    all.extend(ADDED.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned());
    all
}

/// The transport of that name and mode.
///
/// # Errors
/// [`Error::Usage`] if there is none.
pub fn find(name: &str, mode: Mode) -> Result<Arc<dyn Transport>> {
    let known = all().into_iter().find(|t| t.card().name == name && t.card().mode == mode);
    known.ok_or_else(|| Error::Usage(format!("there is no transport {name:?} in {mode:?} mode")))
}

impl Card {
    /// Whether the transport can be measured so.
    pub fn offers(&self, test: Test, wait: Option<Wait>, cpu: Cpu) -> bool {
        self.tests.contains(&test)
            && wait.is_none_or(|w| self.waits.contains(&w))
            // Spinning on the CPU that the other end needs measures the scheduler's time slice.
            && !(wait == Some(Wait::Spin) && cpu == Cpu::Same)
            // Who sends by the clock spins on it.
            && !(test == Test::Load && cpu == Cpu::Same)
    }
}

/// A number that this process has not used before.
fn serial() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    // ORDER: none needed; each caller only wants a number of its own.
    SERIAL.fetch_add(1, Ordering::Relaxed)
}
