// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The worker's side: a process that takes samples as it is told, and goes away when nobody tells it any more.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::error::{Error, Os, Result};
use crate::job::{Cpu, Job, Order, Reply, Report, Role, Test};
use crate::line::Line;
use crate::link::Link;
use crate::transport::{self, Context};

/// The first argument of a worker's command line; the second is its role, the third its scratch directory.
pub(crate) const ARGUMENT: &str = "__bench-worker";
/// No wait of a worker for the other takes longer, whatever the driver does; its own limits are shorter.
const LINK_LIMIT: Duration = Duration::from_secs(120);
const LINE_LIMIT: Duration = Duration::from_secs(5);

/// Works, if this process was started as a worker: then it says how to exit. Call it first in `main`, before any
/// argument is parsed; `None` means that this is an ordinary start.
///
/// # Blocking
/// As a worker, for as long as the driver lives.
///
/// # Examples
/// ```
/// use std::process::ExitCode;
///
/// fn main() -> ExitCode {
///     tombolo_bench::role_main().unwrap_or_else(|| {
///         // Parse arguments, and go on as usual.
///         ExitCode::SUCCESS
///     })
/// }
/// ```
pub fn role_main() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let role = match arguments.next()?.to_str() {
        Some("left") => Role::Left,
        Some("right") => Role::Right,
        _ => return Some(ExitCode::from(2)),
    };
    let scratch = PathBuf::from(arguments.next()?);
    Some(match work(role, scratch) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench worker: {}", chain(&e));
            ExitCode::from(2)
        }
    })
}

/// Standard input is the socket to the driver, standard output the one to the other worker.
fn work(role: Role, scratch: PathBuf) -> Result<()> {
    let socket = |fd: io::Result<_>| fd.map(UnixStream::from).os("taking over a socket");
    let control = socket(io::stdin().as_fd().try_clone_to_owned())?;
    let mut link = Some(Link::new(socket(io::stdout().as_fd().try_clone_to_owned())?, LINK_LIMIT)?);
    let mut replies = control.try_clone().os("duplicating a socket")?;

    // A thread of its own waits for orders, so that the driver's end is noticed in the middle of a sample.
    let (orders, inbox) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(control).lines().map_while(std::result::Result::ok) {
            // The receiver is gone only when this process ends.
            let _ = orders.send(line);
        }
        // The driver is gone, and cleans up no more. The other worker may have been quicker.
        let _ = fs::remove_dir_all(&scratch);
        std::process::exit(0);
    });

    let mut context = None;
    for line in inbox {
        let order = serde_json::from_str(&line).map_err(|e| Error::Worker(format!("no order: {e}")))?;
        let reply = match obey(order, role, &mut link, &mut context) {
            Ok(None) => Reply::Done,
            Ok(Some(report)) => Reply::Sampled(Box::new(report)),
            Err(Error::Unsupported(why)) => Reply::Unsupported(why),
            Err(e) => Reply::Failed(chain(&e)),
        };
        let text = serde_json::to_string(&reply).map_err(|e| Error::Worker(e.to_string()))?;
        writeln!(replies, "{text}").os("replying to the driver")?;
    }
    Ok(())
}

fn obey(order: Order, role: Role, link: &mut Option<Link>, context: &mut Option<Context>) -> Result<Option<Report>> {
    match order {
        Order::Hello => Ok(None),
        Order::Run(command) => run(&command).map(|()| None),
        Order::Sample { job, host, scratch } => {
            if let Some(link) = link.take() {
                let line = Line::open(&link, LINE_LIMIT)?;
                *context =
                    Some(Context { role, job: job.clone(), link, line, host: host.clone(), scratch: scratch.clone() });
            }
            let context = context.as_mut().ok_or_else(|| Error::Worker("the line was lost earlier".into()))?;
            (context.job, context.host, context.scratch) = (job, host, scratch);
            sample(context).map(Some)
        }
    }
}

/// Takes one sample, between two probes of how far apart the CPUs are.
fn sample(context: &mut Context) -> Result<Report> {
    let transport = transport::find(&context.job.transport, context.job.mode)?;
    pin(&context.job, context.role, false)?;
    let before = probe(context)?;
    pin(&context.job, context.role, context.job.test == Test::Channels && context.job.channels > 1)?;
    let neighbour = context.job.neighbour.then(Neighbour::start);
    let performed = transport.perform(context);
    drop(neighbour);
    let mut report = performed?;
    pin(&context.job, context.role, false)?;
    report.probes = before.zip(probe(context)?).map(|(before, after)| [before, after]);
    Ok(report)
}

/// The round trip of a cache line in ns, as the left worker sees it.
fn probe(context: &mut Context) -> Result<Option<f64>> {
    if context.job.cpu == Cpu::Same || context.job.cpus[0] == context.job.cpus[1] {
        return Ok(None);
    }
    context.link.meet()?;
    match context.role {
        Role::Left => context.line.probe().map(Some),
        Role::Right => context.line.answer().map(|()| None),
    }
}

/// A thread that wants the CPU all the time, on the CPU of the thread that starts it. Dropping it ends it.
struct Neighbour {
    enough: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Neighbour {
    fn start() -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(&enough);
        let thread = std::thread::spawn(move || {
            // ORDER: none needed; it is only to be seen some time.
            while !heard.load(Ordering::Relaxed) {
                std::hint::black_box(std::array::from_fn::<u64, 64, _>(|i| i as u64));
            }
        });
        Self { enough, thread: Some(thread) }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // ORDER: none needed; the thread only has to see it some time.
        self.enough.store(true, Ordering::Relaxed);
        // It cannot have failed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Ties this thread, and those it will start, to the role's CPU, or to both if it is `free`.
fn pin(job: &Job, role: Role, free: bool) -> Result<()> {
    let [left, right] = job.cpus;
    let mine = if role == Role::Left || job.cpu == Cpu::Same { left } else { right };
    let mut set = CpuSet::new();
    for cpu in if free { vec![left, right] } else { vec![mine] } {
        set.set(cpu);
    }
    sched_setaffinity(None, &set).os("sched_setaffinity")
}

fn run(command: &[String]) -> Result<()> {
    let text = command.join(" ");
    let unable = |why: String| Error::Unsupported(format!("{text}: {why}"));
    let [program, arguments @ ..] = command else { return Ok(()) };
    let done =
        Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|e| unable(e.to_string()))?;
    if done.status.success() { Ok(()) } else { Err(unable(String::from_utf8_lossy(&done.stderr).trim().into())) }
}

/// An error and what caused it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
