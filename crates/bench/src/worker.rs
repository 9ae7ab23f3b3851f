// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a worker: a process that takes samples by order, and exits when its driver is gone.

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
use crate::job::{Cpu, Order, Reply, Report, Role, Test};
use crate::line::Line;
use crate::link::ControlPipe;
use crate::transport::{self, Context};

/// First argument of a worker's command line. The second is its role, the third its scratch directory. The fourth
/// exists if the other worker is on another machine: the prefix of the service in Tombolo's addresses, which may be
/// empty.
pub(crate) const ARGUMENT: &str = "__bench-worker";
/// Longest wait of a worker for the other, whatever the driver does; the driver's own limits are shorter.
const LINK_LIMIT: Duration = Duration::from_secs(120);
const LINE_LIMIT: Duration = Duration::from_secs(5);

/// Works, if this process was started as a worker, and returns its exit code. Call it first in `main`, before any
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
    let channels = arguments.next().map(|words| words.to_string_lossy().into_owned());
    Some(match work(&Place { role, scratch, channels }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench worker: {}", chain(&e));
            ExitCode::from(2)
        }
    })
}

/// Role and places of a worker.
struct Place {
    role: Role,
    scratch: PathBuf,
    channels: Option<String>,
}

/// Obeys the driver's orders. Standard input is the socket to the driver, standard output the one to the other worker.
/// The sockets' family makes no difference here.
fn work(place: &Place) -> Result<()> {
    let socket = |fd: io::Result<_>| fd.map(UnixStream::from).os("taking over a socket");
    let control = socket(io::stdin().as_fd().try_clone_to_owned())?;
    let mut link = Some(ControlPipe::new(socket(io::stdout().as_fd().try_clone_to_owned())?, LINK_LIMIT)?);
    let mut replies = control.try_clone().os("duplicating a socket")?;

    // A thread of its own waits for orders, so that the end of the driver is noticed in the middle of a sample.
    let (orders, inbox) = mpsc::channel();
    let scratch = place.scratch.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(control).lines().map_while(std::result::Result::ok) {
            // Fails only when this process is ending and the receiver is gone.
            let _ = orders.send(line);
        }
        // The driver is gone and cannot clean up. The other worker may have removed the directory first.
        let _ = fs::remove_dir_all(&scratch);
        std::process::exit(0);
    });

    let mut context = None;
    for line in inbox {
        let order = serde_json::from_str(&line).map_err(|e| Error::Worker(format!("no order: {e}")))?;
        let reply = match carry_out(order, place, &mut link, &mut context) {
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

/// Carries out an order of the driver. Returns the report, if the order asks for one.
fn carry_out(
    order: Order,
    place: &Place,
    link: &mut Option<ControlPipe>,
    context: &mut Option<Context>,
) -> Result<Option<Report>> {
    match order {
        Order::Hello => Ok(None),
        // Over a network anyone may be the driver.
        Order::Run(_) if place.channels.is_some() => Err(Error::Worker("no commands from another machine".into())),
        Order::Run(command) => run(&command).map(|()| None),
        Order::Sample { job, host } => {
            if let Some(link) = link.take() {
                let Place { role, scratch, channels } = place;
                let line = if channels.is_none() { Some(Line::open(&link, LINE_LIMIT)?) } else { None };
                let (scratch, channels) = (scratch.clone(), channels.clone());
                let (job, host) = (job.clone(), host.clone());
                *context = Some(Context { role: *role, job, link, line, host, scratch, channels });
            }
            let context = context.as_mut().ok_or_else(|| Error::Worker("the line was lost earlier".into()))?;
            (context.job, context.host) = (job, host);
            sample(context).map(Some)
        }
    }
}

/// Takes one sample, between two probes of how far apart the CPUs are.
fn sample(context: &mut Context) -> Result<Report> {
    let transport = transport::find(&context.job.transport, context.job.mode)?;
    pin(context, false)?;
    let before = probe(context)?;
    pin(context, context.job.test == Test::Channels && context.job.channels > 1)?;
    let neighbour = context.job.neighbour.then(CpuHog::start);
    let performed = transport.perform(context);
    drop(neighbour);
    let mut report = performed?;
    pin(context, false)?;
    report.probes = before.zip(probe(context)?).map(|(before, after)| [before, after]);
    Ok(report)
}

/// Returns the round trip of a cache line in ns, which only the left worker measures.
fn probe(context: &mut Context) -> Result<Option<f64>> {
    let Some(line) = &mut context.line else { return Ok(None) };
    if context.job.cpu == Cpu::Same || context.job.cpus[0] == context.job.cpus[1] {
        return Ok(None);
    }
    context.link.meet()?;
    match context.role {
        Role::Left => line.probe().map(Some),
        Role::Right => line.answer().map(|()| None),
    }
}

/// A thread that always uses the CPU of the thread that starts it. Dropping this ends it.
struct CpuHog {
    enough: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl CpuHog {
    fn start() -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(&enough);
        let thread = std::thread::spawn(move || {
            // ORDER: none needed; the store only has to become visible some time.
            while !heard.load(Ordering::Relaxed) {
                std::hint::black_box(std::array::from_fn::<u64, 64, _>(|i| i as u64));
            }
        });
        Self { enough, thread: Some(thread) }
    }
}

impl Drop for CpuHog {
    fn drop(&mut self) {
        // ORDER: none needed; the thread only has to see it some time.
        self.enough.store(true, Ordering::Relaxed);
        // The thread cannot have failed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Ties this thread, and those that it starts, to the role's CPU, or to both if it is `free`. Does nothing between
/// machines, because the driver knows only its own machine's CPUs.
fn pin(context: &Context, free: bool) -> Result<()> {
    if context.channels.is_some() {
        return Ok(());
    }
    let job = &context.job;
    let [left, right] = job.cpus;
    let mine = if context.role == Role::Left || job.cpu == Cpu::Same { left } else { right };
    let mut set = CpuSet::new();
    for cpu in if free { vec![left, right] } else { vec![mine] } {
        set.set(cpu);
    }
    Ok(sched_setaffinity(None, &set).os("sched_setaffinity")?)
}

fn run(command: &[String]) -> Result<()> {
    let text = command.join(" ");
    let unable = |why: String| Error::Unsupported(format!("{text}: {why}"));
    let [program, arguments @ ..] = command else { return Ok(()) };
    let done =
        Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|e| unable(e.to_string()))?;
    if done.status.success() { Ok(()) } else { Err(unable(String::from_utf8_lossy(&done.stderr).trim().into())) }
}

/// Returns an error and its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
