// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Transports that live in the heap of one process: both ends run in the left worker, in two threads that are tied to
//! the CPUs of the two workers. The right worker sleeps until all is over, and reports what the right thread saw.

use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use tombolo_bench::error::Os;
use tombolo_bench::job::{Job, Report, Role};
use tombolo_bench::line::Line;
use tombolo_bench::link::ControlPipe;
use tombolo_bench::transport::{Card, Context, End, Transport, Wire};
use tombolo_bench::{Error, Result};

/// No thread waits longer for the other, outside of a measurement.
const LIMIT: Duration = Duration::from_secs(10);

/// A transport between two threads.
pub(crate) trait Heap: Send + Sync {
    type End: End;

    fn card(&self) -> Card;

    /// The left end and the right.
    fn ends(&self, job: &Job) -> Result<[Self::End; 2]>;
}

/// Measures a transport between two threads as if they were two processes.
pub(crate) struct Threads<H>(pub H);

impl<H: Heap> Transport for Threads<H> {
    fn card(&self) -> Card {
        self.0.card()
    }

    fn perform(&self, context: &mut Context) -> Result<Report> {
        match context.role {
            Role::Left => {
                let ends = self.0.ends(&context.job)?.map(|end| Mutex::new(Some(end)));
                let [left, right] = both(&Joined { card: self.card(), ends }, context)?;
                context.link.send_line(&serde_json::to_string(&right).map_err(worker)?)?;
                Ok(left)
            }
            Role::Right => serde_json::from_str(&context.link.receive_line()?).map_err(worker),
        }
    }
}

/// Runs the right half in a thread of its own, and the left half in this one, which is on the left CPU already.
fn both<E: End>(wire: &Joined<E>, context: &Context) -> Result<[Report; 2]> {
    let (left, right) = UnixStream::pair().os("socketpair")?;
    let half = |role, socket| {
        let link = ControlPipe::new(socket, LIMIT)?;
        let line = Line::open(&link, LIMIT)?;
        let (job, host, scratch) = (context.job.clone(), context.host.clone(), context.scratch.clone());
        wire.perform(&mut Context { role, job, link, line: Some(line), channels: None, host, scratch })
    };
    std::thread::scope(|scope| {
        let right = scope.spawn(|| {
            tie(context.job.cpus[1])?;
            half(Role::Right, right)
        });
        let left = half(Role::Left, left);
        let right = right.join().unwrap_or_else(|_| Err(Error::Worker("a thread panicked".into())));
        Ok([left?, right?])
    })
}

/// Ties this thread to a CPU.
fn tie(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set).os("sched_setaffinity")?)
}

fn worker(error: serde_json::Error) -> Error {
    Error::Worker(error.to_string())
}

/// Two ends that are there already, as a transport that connects them.
struct Joined<E> {
    card: Card,
    ends: [Mutex<Option<E>>; 2],
}

impl<E> Joined<E> {
    fn end(&self, role: Role) -> Result<E> {
        let end = self.ends[role as usize].lock().unwrap_or_else(PoisonError::into_inner).take();
        end.ok_or_else(|| Error::Unsupported("there is but one connection".into()))
    }
}

impl<E: End> Wire for Joined<E> {
    type Host = ();
    type End = E;

    fn card(&self) -> Card {
        self.card
    }

    fn listen(&self, _: &Context) -> Result<((), String)> {
        Ok(((), String::new()))
    }

    fn accept(&self, (): &mut (), _: &Context) -> Result<E> {
        self.end(Role::Right)
    }

    fn connect(&self, _: &str, _: &Context) -> Result<E> {
        self.end(Role::Left)
    }
}
