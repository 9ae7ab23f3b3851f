// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the measuring loops know of a transport: its card, how its two ends meet, and how an end sends and receives.

use std::path::PathBuf;

use crate::error::Result;
use crate::job::{Cpu, Job, Mode, Role, Test, Wait};
use crate::line::Line;
use crate::link::ControlPipe;

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

/// Everything a worker has at hand for one measurement.
pub struct Context {
    /// Which of the two processes this is.
    pub role: Role,
    /// What is to be measured.
    pub job: Job,
    /// The cord to the other worker, for setting up.
    pub link: ControlPipe,
    /// The cache line shared with the other worker, if both are on one machine.
    pub line: Option<Line>,
    /// What stands before the service in Tombolo's addresses, if the other worker is on another machine.
    pub channels: Option<String>,
    /// The network address under which the right worker is reached.
    pub host: String,
    /// A directory for sockets; it goes away with the workers.
    pub scratch: PathBuf,
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
    /// As [`Transport::perform`](crate::transport::Transport::perform).
    fn listen(&self, context: &Context) -> Result<(Self::Host, String)>;

    /// Right: takes the next connection. It may use [`Context::link`], which `connect` uses at the same time.
    ///
    /// # Errors
    /// As [`Transport::perform`](crate::transport::Transport::perform).
    fn accept(&self, host: &mut Self::Host, context: &Context) -> Result<Self::End>;

    /// Left: connects to the address.
    ///
    /// # Errors
    /// As [`Transport::perform`](crate::transport::Transport::perform).
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
