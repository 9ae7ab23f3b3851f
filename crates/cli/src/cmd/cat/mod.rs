// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo cat`: copies standard input to a channel and the channel to standard output, both at once.

mod args;
mod digest;
mod files;
mod flow;
mod receive;
mod report;
mod send;
mod session;

use std::{os::fd::AsFd, sync::Arc, time::Duration};

use tombolo::{Deadline, Error, Listener, Options, RingBudget, Stream};

use crate::{
    failure::{Failure, Os, Result, print_line},
    signals::{Signals, await_any},
};

pub use args::Args;
use args::{CONNECT_WAIT, Ring};
pub use args::{HANDSHAKE_LEAST, ring, seconds};
use files::{Input, Output};
pub use report::Report;
use session::Session;

/// Longest time that a connecting peer may delay the reaction to a signal.
const CALLERS_TURN: Duration = Duration::from_millis(50);

/// Carries out the command.
pub fn run(args: &Args) -> Result<()> {
    if let Some(parent) = args.parent {
        end_with(parent)?;
    }
    let mut options = Options::new();
    if let Some(most) = args.spin {
        options = options.spin(most);
    }
    match args.ring {
        Some(Ring::Bytes(bytes)) => options = options.ring_size(bytes),
        Some(Ring::Auto) => options = options.ring_growth(RingBudget::of_process()),
        None => {}
    }
    if let Some(most) = args.peer_ring {
        options = options.largest_peer_ring(most);
    }
    let input = Input::open(args.file.as_deref(), args.receive_only)?;
    let output = Arc::new(Output::open(args.output.as_deref())?);
    match (&args.place.listen, &args.place.connect) {
        (Some(address), _) => {
            let signals = Signals::hold()?;
            let address = address.to_string();
            let source = |source| Failure::Listen { address: address.clone(), source };
            let mut listener = tombolo::listen_with::<Stream>(&address, &options).map_err(source)?;
            if args.keep {
                return serve(args, &mut listener, &signals, input, &output);
            }
            let stream = accept(args, &mut listener, &signals)?;
            // No further peer is served: the next one to connect is refused at once.
            drop(listener);
            output.begin()?;
            Session { args, signals: &signals, output: &output }.run(stream, input)
        }
        (None, Some(address)) => {
            let address = address.to_string();
            let wait = args.wait.unwrap_or(CONNECT_WAIT);
            options = options.wait_for_listener(wait).handshake_timeout(wait.max(HANDSHAKE_LEAST));
            let stream = tombolo::connect_with::<Stream>(&address, &options)
                .map_err(|source| Failure::Connect { address, source })?;
            let signals = Signals::hold()?;
            output.begin()?;
            Session { args, signals: &signals, output: &output }.run(stream, input)
        }
        (None, None) => Err(Failure::Usage("either --listen or --connect is needed".into())),
    }
}

/// Serves one peer after another, until a signal ends it. An error of one peer is printed and harms no other.
fn serve(
    args: &Args,
    listener: &mut Listener<Stream>,
    signals: &Signals,
    mut input: Input,
    output: &Arc<Output>,
) -> Result<()> {
    output.begin()?;
    loop {
        let stream = accept(args, listener, signals)?;
        match (Session { args, signals, output }).run(stream, input) {
            Ok(()) => {}
            Err(failure @ (Failure::Interrupted { .. } | Failure::Write { .. })) => return Err(failure),
            Err(failure) => print_line(&format!("tombolo: {}", failure.chain())),
        }
        input = Input::open(args.file.as_deref(), args.receive_only)?;
    }
}

fn accept(args: &Args, listener: &mut Listener<Stream>, signals: &Signals) -> Result<Stream> {
    let address = || args.place.listen.as_ref().map_or(String::new(), ToString::to_string);
    let deadline = args.wait.map_or(Deadline::NEVER, Deadline::after);
    loop {
        await_any(&[listener.as_fd(), signals.fd()], deadline.remaining())?;
        signals.check()?;
        match listener.accept_until(Deadline::after(CALLERS_TURN)) {
            Ok(stream) => return Ok(stream),
            Err(Error::TimedOut) if !deadline.expired() => {}
            Err(Error::TimedOut) => {
                let seconds = args.wait.unwrap_or_default().as_secs_f64();
                return Err(Failure::Nobody { address: address(), seconds });
            }
            Err(source) => return Err(Failure::Listen { address: address(), source }),
        }
    }
}

/// Ends this process when its parent ends.
fn end_with(parent: u32) -> Result<()> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    set_parent_process_death_signal(Some(Signal::TERM)).os("prctl")?;
    // The parent may have ended before.
    if getppid().map(|pid| pid.as_raw_pid().unsigned_abs()) == Some(parent) {
        Ok(())
    } else {
        Err(Failure::Outcome("the process that started this one is gone".into()))
    }
}
