// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interface between the measuring loops and a transport: its card, how its two endpoints meet, and how an endpoint
//! sends and receives.

use std::path::PathBuf;

use crate::error::Result;
use crate::job::{Cpu, Job, Mode, Role, Test, Wait};
use crate::line::Line;
use crate::link::ControlPipe;

/// Properties of a transport, and the measurements that make sense for it.
#[derive(Debug, Clone, Copy)]
pub struct Card {
    /// Name on the command line and in the results.
    pub name: &'static str,
    /// Whether the transport keeps messages apart.
    pub mode: Mode,
    /// Ways to set it up. All of them are measured, and the best is reported; `[""]` if there is only one.
    pub variants: &'static [&'static str],
    /// Places where the two processes must live.
    pub namespaces: Namespaces,
    /// Tests that it takes part in.
    pub tests: &'static [Test],
    /// Ways of waiting that it supports.
    pub waits: &'static [Wait],
    /// The one message size that it supports, if there is only one.
    pub size: Option<usize>,
    /// Whether it uses [`Job::ring`].
    pub rings: bool,
}

/// Places where the two processes of a measurement live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Namespaces {
    /// Both in the user's namespaces.
    Shared,
    /// Each in a network namespace of its own, joined by a veth pair.
    Veth,
    /// Both in the user's namespaces, or each on a machine of its own.
    Anywhere,
    /// Each on a machine of its own.
    Apart,
}

impl Namespaces {
    /// Returns whether this suits the endpoints' places: two machines if `apart`, else one.
    pub(crate) fn suit(self, apart: bool) -> bool {
        match self {
            Self::Shared | Self::Veth => !apart,
            Self::Anywhere => true,
            Self::Apart => apart,
        }
    }
}

impl Card {
    /// Returns whether the transport can be measured in this way.
    pub fn offers(&self, test: Test, wait: Option<Wait>, cpu: Cpu) -> bool {
        self.tests.contains(&test)
            && wait.is_none_or(|w| self.waits.contains(&w))
            // Spinning on the CPU that the other endpoint needs measures the scheduler's time slice.
            && !(wait == Some(Wait::Spin) && cpu == Cpu::Same)
            // A sender under load spins on the clock.
            && !(test == Test::Load && cpu == Cpu::Same)
    }
}

/// Everything that a worker needs for one measurement.
pub struct Context {
    /// Role of this process.
    pub role: Role,
    /// Sample to be taken.
    pub job: Job,
    /// Control pipe to the other worker, for setting up.
    pub link: ControlPipe,
    /// Cache line shared with the other worker, if both are on one machine.
    pub line: Option<Line>,
    /// Prefix of the service in Tombolo's addresses, if the other worker is on another machine.
    pub channels: Option<String>,
    /// Network address under which the right worker is reached.
    pub host: String,
    /// Directory for sockets; it is removed with the workers.
    pub scratch: PathBuf,
}

/// A transport between two endpoints, the left (asking, sending) and the right (answering, receiving).
pub trait Wire: Send + Sync {
    /// Listener from which the right side accepts connections.
    type Host;
    /// One endpoint of a connection.
    type End: End;

    /// Returns the transport's card.
    fn card(&self) -> Card;

    /// Right: gets ready for connections. Returns the address that the left side needs.
    ///
    /// # Errors
    /// The same as [`Transport::perform`](crate::transport::Transport::perform).
    fn listen(&self, context: &Context) -> Result<(Self::Host, String)>;

    /// Right: accepts the next connection. It may use [`Context::link`], which `connect` uses at the same time.
    ///
    /// # Errors
    /// The same as [`Transport::perform`](crate::transport::Transport::perform).
    fn accept(&self, host: &mut Self::Host, context: &Context) -> Result<Self::End>;

    /// Left: connects to the address.
    ///
    /// # Errors
    /// The same as [`Transport::perform`](crate::transport::Transport::perform).
    fn connect(&self, address: &str, context: &Context) -> Result<Self::End>;
}

/// One endpoint of a connection, able to send and to receive. It waits as [`Job::wait`] requires.
pub trait End: Send {
    /// Sends all of `message`.
    ///
    /// # Errors
    /// Any error of the transport.
    fn send(&mut self, message: &[u8]) -> Result<()>;

    /// Receives what is there, at least a byte: in message mode one message, in stream mode up to all of `buffer`.
    /// Returns the bytes received, 0 at the end.
    ///
    /// # Errors
    /// Any error of the transport.
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize>;

    /// Ends sending: the other endpoint receives what was sent, then the end.
    ///
    /// # Errors
    /// Any error of the transport.
    fn finish(&mut self) -> Result<()>;

    /// Returns the system calls made through this endpoint so far, if it counts them.
    fn syscalls(&self) -> Option<u64> {
        None
    }

    /// Returns the notifications sent through this endpoint so far, for transports that send them only to a sleeping
    /// peer.
    fn notifications(&self) -> Option<u64> {
        None
    }
}
