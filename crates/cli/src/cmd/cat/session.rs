// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves one peer: two threads for the two directions, and this one, which handles signals and shows the progress.

use std::{
    io::{self, IsTerminal, PipeReader},
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tombolo::Stream;

use super::{
    args::Args,
    digest::Digest,
    files::{Input, Output},
    flow::Flow,
    receive::{BUFFER, Received, Receiver},
    report::{Direction, Report},
    send::{CHUNK_MOST, Sender},
};
use crate::{
    failure::{Failure, Os, Result},
    progress::{self, Progress, When},
    signals::{Signals, await_any},
};

/// Time that the sending thread has to tell the peer that the session is given up.
const FAREWELL: Duration = Duration::from_millis(200);

pub struct Session<'a> {
    pub args: &'a Args,
    pub signals: &'a Signals,
    pub output: &'a Arc<Output>,
}

impl Session<'_> {
    /// Moves all bytes in both directions. A direction that fails does not keep the peer's last bytes from arriving.
    pub fn run(&self, stream: Stream, input: Input) -> Result<()> {
        let Self { args, signals, output } = *self;
        let began = Instant::now();
        let flow = Arc::new(Flow { patience: args.timeout, ..Flow::default() });
        let mut progress = self.progress(&input);
        let watch = stream.watch();
        let (read, write) = stream.into_split();
        let (stop, stopper) = io::pipe().os("pipe")?;
        let mut stopper = Some(stopper);

        let ends = args.place.ends_here();
        let mut sender = None;
        if !args.receive_only {
            let digest = args.checksum.then(|| Digest::begin(CHUNK_MOST as usize, ends)).transpose()?;
            let flow = Arc::clone(&flow);
            let work = Sender { input, half: write, watch, flow, digest, stop };
            sender = Some(Worker::start(move || work.run())?);
        }
        let output = (!args.send_only).then(|| Arc::clone(output));
        let hashed = args.checksum && !args.send_only;
        let digest = hashed.then(|| Digest::begin(BUFFER, ends)).transpose()?;
        let (quit, quitter) = io::pipe().os("pipe")?;
        let mut quitter = Some(quitter);
        let work = Receiver { half: read, output, flow: Arc::clone(&flow), digest, quit };
        let mut receiver = Some(Worker::start(move || work.run())?);

        let report =
            |direction, bytes, sha256| Report { direction, bytes, seconds: began.elapsed().as_secs_f64(), sha256 };
        let (mut reports, mut failed) = (Vec::new(), None);
        while sender.is_some() || receiver.is_some() {
            let mut fds = vec![signals.fd()];
            fds.extend(sender.as_ref().map(Worker::over));
            fds.extend(receiver.as_ref().map(Worker::over));
            await_any(&fds, progress.as_ref().map(|_| progress::INTERVAL))?;
            if let Some(progress) = &mut progress {
                let (sent, received) = (flow.sent(), flow.received());
                if sent >= received { progress.show("sent", sent) } else { progress.show("received", received) }
            }
            let ended = if let Some(signal) = signals.caught() {
                let after = format!(" after {} bytes sent and {} received", flow.sent(), flow.received());
                Some(Err(Failure::Interrupted { signal, after }))
            } else {
                match Worker::join_if_over(&mut receiver)? {
                    Some(Ok(Received::All(digest))) => {
                        if !args.send_only {
                            reports.push(report(Direction::Received, flow.received(), digest));
                        }
                        stopper = None;
                        None
                    }
                    Some(Ok(Received::Enough)) => Some(Ok(())),
                    Some(Err(failure)) => Some(Err(failure)),
                    None => None,
                }
            };
            if let Some(ended) = ended {
                flow.given_up.store(true, Ordering::Relaxed);
                drop(stopper);
                if let Some(sender) = &sender {
                    await_any(&[sender.over()], Some(FAREWELL))?;
                }
                return ended;
            }
            match Worker::join_if_over(&mut sender)? {
                Some(Ok(digest)) => reports.insert(0, report(Direction::Sent, flow.sent(), digest)),
                Some(Err(failure)) if failure.is_protocol_violation() => {
                    // Nothing that the peer sends is worth receiving any more; the other half is told.
                    flow.given_up.store(true, Ordering::Relaxed);
                    if let Some(receiver) = &receiver {
                        await_any(&[receiver.over()], Some(FAREWELL))?;
                    }
                    return Err(failure);
                }
                Some(Err(failure)) => failed = Some(failure),
                None => continue,
            }
            if args.send_only {
                drop(quitter.take());
            }
        }
        drop(progress);
        if args.checksum || args.json {
            reports.iter().for_each(|report| report.print_report(args.json));
        }
        failed.map_or(Ok(()), Err)
    }

    fn progress(&self, input: &Input) -> Option<Progress> {
        let quiet = || !input.terminal && (!self.output.is_terminal() || self.args.send_only);
        let wanted = match self.args.progress {
            When::Always => true,
            When::Auto => io::stderr().is_terminal() && quiet(),
            When::Never => false,
        };
        let total = input.size.filter(|_| !self.args.receive_only);
        wanted.then(|| Progress::new(total))
    }
}

/// A thread, and a pipe that hangs up when the thread is over.
struct Worker<T> {
    thread: JoinHandle<T>,
    over: PipeReader,
}

impl<T: Send + 'static> Worker<T> {
    fn start(work: impl FnOnce() -> T + Send + 'static) -> Result<Self> {
        let (over, guard) = io::pipe().os("pipe")?;
        let thread = thread::Builder::new().spawn(move || {
            let _guard = guard;
            work()
        });
        Ok(Self { thread: thread.os("clone")?, over })
    }

    fn over(&self) -> std::os::fd::BorrowedFd<'_> {
        self.over.as_fd()
    }

    /// Returns the result of the thread, if it is over.
    fn join_if_over(worker: &mut Option<Self>) -> Result<Option<T>> {
        match worker {
            Some(running) if await_any(&[running.over()], Some(Duration::ZERO))?[0] => {}
            _ => return Ok(None),
        }
        let joined = worker.take().map(|worker| worker.thread.join());
        // A panic is a bug, and has printed its own message.
        joined.transpose().map_err(|_| Failure::Outcome("a thread of this program has failed".into()))
    }
}
