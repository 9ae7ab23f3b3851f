// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Drives a pair of workers: starts them, gives them orders, limits their time, cleans up.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::apart::Peer;
use crate::error::{Error, Os, Result};
use crate::job::{Job, Order, Reply, Report, Test};
use crate::scratch::Scratch;
use crate::wire::Namespaces;
use crate::worker::ARGUMENT;

/// Interfaces and addresses of the two sides of the veth pair: in namespaces of their own they cannot collide with
/// others.
const VETH: [(&str, &str); 2] = [("tombolo0", "10.83.11.1"), ("tombolo1", "10.83.11.2")];
/// Time that starting a worker may take.
const START: Duration = Duration::from_secs(10);

/// Two workers. Dropping this ends them; so does the end of this process, in whatever way.
pub(crate) struct Pair {
    workers: [Worker; 2],
    host: String,
    apart: bool,
    _scratch: Scratch,
}

impl Pair {
    /// Starts two workers, under real-time priority and in network namespaces of their own if requested.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if this machine does not allow the namespaces or the priority.
    pub(crate) fn start(namespaces: Namespaces, fifo: bool) -> Result<Self> {
        Self::start_here(namespaces, fifo).map_err(|e| match e {
            // The program that was refused them has printed the reason on standard error, and ended.
            Error::Worker(_) if fifo => Error::Unsupported("no real-time priority, or no namespaces, to be had".into()),
            Error::Worker(_) if namespaces == Namespaces::Veth => {
                Error::Unsupported("no user and network namespaces to be had".into())
            }
            e => e,
        })
    }

    fn start_here(namespaces: Namespaces, fifo: bool) -> Result<Self> {
        let scratch = Scratch::new()?;
        let (left_link, right_link) = UnixStream::pair().os("socketpair")?;
        let (left_link, right_link) = (OwnedFd::from(left_link), OwnedFd::from(right_link));
        let program = std::env::current_exe().os("finding this program")?.to_string_lossy().into_owned();
        match namespaces {
            Namespaces::Shared | Namespaces::Anywhere => {
                let start = |role, link| Worker::start(command(fifo, &[&program]), role, link, &scratch);
                let mut workers = [start("left", left_link)?, start("right", right_link)?];
                for worker in &mut workers {
                    worker.ask(&Order::Hello)?;
                }
                Ok(Self { workers, host: "127.0.0.1".into(), apart: false, _scratch: scratch })
            }
            Namespaces::Veth => {
                // The left worker lives in a new user namespace, where it needs no privilege for what follows. The
                // right worker lives in the same one, but with a network of its own. The namespaces have no names: they
                // end with the workers.
                let unshare = command(fifo, &["unshare", "--user", "--map-root-user", "--net", "--", &program]);
                let mut left = Worker::start(unshare, "left", left_link, &scratch)?;
                left.ask(&Order::Hello)?;
                let target = left.process().to_string();
                let enter = ["nsenter", "--preserve-credentials", "--user", "--target", &target, "--"];
                let nsenter = command(fifo, &[&enter[..], &["unshare", "--net", "--", &program]].concat());
                let mut right = Worker::start(nsenter, "right", right_link, &scratch)?;
                right.ask(&Order::Hello)?;

                let [(here, _), (there, host)] = VETH;
                let target = right.process();
                left.run(&format!("ip link add name {here} type veth peer name {there} netns {target}"))?;
                for (worker, (name, address)) in [(&mut left, VETH[0]), (&mut right, VETH[1])] {
                    worker.run(&format!("ip address add {address}/30 dev {name}"))?;
                    worker.run(&format!("ip link set {name} up"))?;
                }
                Ok(Self { workers: [left, right], host: host.into(), apart: false, _scratch: scratch })
            }
            Namespaces::Apart => Err(Error::Unsupported("it joins two machines: see --peer".into())),
        }
    }

    /// Starts one worker here and one on another machine.
    ///
    /// # Errors
    /// The other machine cannot be reached, or does not serve.
    pub(crate) fn start_apart(peer: &Peer) -> Result<Self> {
        let scratch = Scratch::new()?;
        let program = std::env::current_exe().os("finding this program")?.to_string_lossy().into_owned();
        let [orders, cord] = peer.reach()?;
        let mut left = command(false, &[&program]);
        left.args([ARGUMENT, "left"]).arg(scratch.path()).arg(peer.channels.as_deref().unwrap_or_default());
        let left = Worker::spawn(left, cord)?;
        let mut workers = [left, Worker { child: None, control: orders.into(), heard: Vec::new() }];
        for worker in &mut workers {
            worker.ask(&Order::Hello)?;
        }
        Ok(Self { workers, host: peer.address.ip().to_string(), apart: true, _scratch: scratch })
    }

    /// Takes one sample. Returns the report of the left worker, then that of the right one.
    ///
    /// # Errors
    /// The error that a worker reports, or [`Error::Timeout`]. The pair is unusable after an error.
    ///
    /// # Blocking
    /// For the sample's time and its set-up; never much longer than the limit that the job implies.
    pub(crate) fn sample(&mut self, job: &Job) -> Result<[Report; 2]> {
        let order = Order::Sample { job: job.clone(), host: self.host.clone() };
        for worker in &mut self.workers {
            worker.send_order(&order)?;
        }
        let limit = limit(job, self.apart);
        let deadline = Instant::now() + limit;
        let mut reports = [None, None];
        while let Some(waiting) = reports.iter().position(Option::is_none) {
            let what = format!("{} {:?} of {} bytes", job.transport, job.test, job.size);
            let ready = match reports {
                [None, None] => first_to_speak(&self.workers, deadline),
                _ => Some(waiting),
            };
            let reply = ready.and_then(|i| Some((i, self.workers[i].reply(deadline).transpose()?)));
            match reply {
                Some((i, reply)) => reports[i] = Some(report(reply?)?),
                None => return Err(Error::Timeout { what, seconds: limit.as_secs_f64() }),
            }
        }
        Ok(reports.map(Option::unwrap_or_default))
    }
}

/// Returns a command line, under real-time priority if requested.
fn command(fifo: bool, words: &[&str]) -> Command {
    let chrt: &[&str] = if fifo { &["chrt", "--fifo", "10"] } else { &[] };
    let mut words = chrt.iter().chain(words);
    let mut command = Command::new(words.next().unwrap_or(&""));
    command.args(words);
    command
}

/// Returns the time after which a sample's workers are given up. That is four times the intended time, or the time for
/// its volume at 16 MiB/s; for the set-up five seconds and a quarter for each channel. On a busy machine the set-up may
/// take as many time slices as a handshake has steps. Between machines, which may be emulated, everything but the
/// measured time may take six times as long.
fn limit(job: &Job, apart: bool) -> Duration {
    let volume = if job.test == Test::Switches { job.volume as f64 / (16 << 20) as f64 } else { 0.0 };
    let patience = if apart { 6.0 } else { 1.0 };
    Duration::from_secs_f64(patience * (5.0 + 0.25 * job.channels as f64 + volume) + 4.0 * job.seconds)
}

fn report(reply: Reply) -> Result<Report> {
    match reply {
        Reply::Sampled(report) => Ok(*report),
        Reply::Done => Err(Error::Worker("done, but with no report".into())),
        Reply::Unsupported(why) => Err(Error::Unsupported(why)),
        Reply::Failed(why) => Err(Error::Worker(why)),
    }
}

/// Returns the worker whose reply can be read first, or `None` at the deadline.
fn first_to_speak(workers: &[Worker; 2], deadline: Instant) -> Option<usize> {
    let mut fds = workers.each_ref().map(|w| PollFd::new(&w.control, PollFlags::IN));
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    poll(&mut fds, Some(&left)).ok()?;
    fds.iter().position(|fd| !fd.revents().is_empty())
}

/// A worker process and the socket to it.
struct Worker {
    /// `None` for a worker on another machine, which ends with the connection.
    child: Option<Child>,
    control: UnixStream,
    heard: Vec<u8>,
}

impl Worker {
    fn start(mut command: Command, role: &str, link: OwnedFd, scratch: &Scratch) -> Result<Self> {
        command.args([ARGUMENT, role]).arg(scratch.path());
        Self::spawn(command, link)
    }

    fn spawn(mut command: Command, link: OwnedFd) -> Result<Self> {
        let (control, theirs) = UnixStream::pair().os("socketpair")?;
        command.stdin(OwnedFd::from(theirs)).stdout(link).stderr(Stdio::inherit());
        // Ctrl-C ends only the driver; the workers notice its end and clean up.
        let program = command.get_program().to_string_lossy().into_owned();
        let child =
            command.process_group(0).spawn().map_err(|e| Error::Unsupported(format!("cannot start {program}: {e}")))?;
        Ok(Self { child: Some(child), control, heard: Vec::new() })
    }

    fn send_order(&mut self, order: &Order) -> Result<()> {
        let text = serde_json::to_string(order).map_err(|e| Error::Worker(e.to_string()))?;
        Ok(writeln!(self.control, "{text}").os("writing to a worker")?)
    }

    /// Returns the next reply, or `None` at the deadline.
    fn reply(&mut self, deadline: Instant) -> Result<Option<Reply>> {
        loop {
            if let Some(end) = self.heard.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(|e| Error::Worker(format!("no reply: {e}")));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.control.set_read_timeout(Some(left)).os("setting a time limit")?;
            let mut buffer = [0; 4096];
            match self.control.read(&mut buffer) {
                Ok(0) => return Err(Error::Worker("it ended before it replied".into())),
                Ok(n) => self.heard.extend(&buffer[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Ok(Err(e).os("reading from a worker")?),
            }
        }
    }

    /// Gives an order that is carried out at once.
    fn ask(&mut self, order: &Order) -> Result<()> {
        self.send_order(order)?;
        match self.reply(Instant::now() + START)? {
            Some(Reply::Done) => Ok(()),
            Some(other) => report(other).map(drop),
            None => Err(Error::Timeout { what: "starting a worker".into(), seconds: START.as_secs_f64() }),
        }
    }

    /// Returns the number of the worker's process, or 0 if that is on another machine.
    fn process(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    fn run(&mut self, command: &str) -> Result<()> {
        self.ask(&Order::Run(command.split(' ').map(String::from).collect()))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Neither can fail for a child that was not waited for.
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
