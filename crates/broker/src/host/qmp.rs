// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client of QEMU's machine protocol. It sends one command at a time, each under a deadline, and keeps events that
//! arrive meanwhile.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::net::RecvFlags;
use serde_json::{Value, json};
use tokio::{io::Interest, net::UnixStream, time::timeout};

use crate::{
    discard::{self, Look},
    fd_passing,
};

/// Time that QEMU may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest length of a line that is read, in bytes.
const LINE_MAX: usize = 4 << 20;
/// Largest number of events that are kept.
const EVENTS_MAX: usize = 1024;

/// Failure of a command.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection is unusable.
    #[error("QEMU's control socket: {0}")]
    Lost(#[from] io::Error),
    /// QEMU refuses the command.
    #[error("QEMU refuses {command}: {why}")]
    Refused {
        /// Command that QEMU was asked to carry out.
        command: &'static str,
        /// Reason that QEMU gives.
        why: String,
    },
}

/// Largest length of the name of an event that is kept; QEMU's names are half as long.
const NAME_MAX: usize = 64;

/// An event that QEMU reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Name of the event.
    pub name: String,
    /// Time at which it happened; it may be read late.
    pub at: Instant,
}

/// A connection with QEMU's control socket.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    /// Number of bytes in `buffer` that are known to contain no end of a line.
    seen: usize,
    events: VecDeque<Event>,
    asked: u64,
    user: u32,
}

impl Qmp {
    /// Connects, and waits for QEMU's greeting. The process that listens has to run as root, this process's user, or
    /// `user`.
    ///
    /// # Errors
    /// No process listens, one of another user does, or it does not speak QMP.
    pub async fn connect(path: &Path, user: Option<u32>) -> Result<Self, Error> {
        let stream = UnixStream::connect(path).await?;
        let who = fd_passing::user_of(&stream)?;
        let mut qmp = Self { stream, buffer: Vec::new(), seen: 0, events: VecDeque::new(), asked: 0, user: who };
        qmp.check_user(user)?;
        let greeting = timeout(PATIENCE, qmp.line()).await.map_err(late)??;
        if !greeting["QMP"].is_object() {
            return Err(io::Error::other("no greeting").into());
        }
        qmp.execute("qmp_capabilities", json!({}), None).await?;
        Ok(qmp)
    }

    /// Checks that the process that listened runs as root, this process's user, or `user`.
    ///
    /// # Errors
    /// It runs as another user.
    pub fn check_user(&self, user: Option<u32>) -> Result<(), Error> {
        let (own, who) = (rustix::process::geteuid().as_raw(), self.user);
        if who == 0 || who == own || Some(who) == user {
            return Ok(());
        }
        let why = format!("user {who} listens there, and not the one that this QEMU runs as: see `user` of the domain");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why).into())
    }

    /// Returns the user of the process that listened.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// Sends QEMU a command, with a descriptor if the command takes one. Returns QEMU's answer.
    ///
    /// # Errors
    /// QEMU refuses, is gone, or does not answer in time.
    pub async fn execute(
        &mut self,
        command: &'static str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Value, Error> {
        self.asked += 1;
        let line = json!({ "execute": command, "arguments": arguments, "id": self.asked }).to_string() + "\n";
        let descriptor: Vec<_> = descriptor.into_iter().collect();
        let sent = self.stream.async_io(Interest::WRITABLE, || {
            match fd_passing::send(&self.stream, line.as_bytes(), &descriptor)? {
                true => Ok(()),
                false => Err(io::ErrorKind::WouldBlock.into()),
            }
        });
        timeout(PATIENCE, sent).await.map_err(late)??;
        timeout(PATIENCE, self.answer(command)).await.map_err(late)?
    }

    async fn answer(&mut self, command: &'static str) -> Result<Value, Error> {
        loop {
            let mut line = self.line().await?;
            if line["id"] == self.asked {
                return match line["error"]["desc"].as_str() {
                    Some(why) => Err(Error::Refused { command, why: why.into() }),
                    None => Ok(line["return"].take()),
                };
            }
            self.store_event(line)?;
        }
    }

    /// Returns the next event. The future may be dropped while it waits.
    ///
    /// # Errors
    /// QEMU is gone.
    pub async fn event(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            let line = self.line().await?;
            self.store_event(line)?;
        }
    }

    /// Keeps an event. Drops an answer that nobody waits for any more.
    fn store_event(&mut self, line: Value) -> io::Result<()> {
        if let Some(name) = line["event"].as_str().filter(|name| name.len() <= NAME_MAX) {
            if self.events.len() >= EVENTS_MAX {
                return Err(io::Error::other("more events than can be kept"));
            }
            self.events.push_back(Event { name: name.into(), at: happened(&line["timestamp"]) });
        }
        Ok(())
    }

    /// Returns the next line. What was read of the line is kept if the future is dropped.
    async fn line(&mut self) -> io::Result<Value> {
        loop {
            if let Some(end) = self.buffer[self.seen..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=self.seen + end).collect();
                self.seen = 0;
                return serde_json::from_slice(&line).map_err(io::Error::other);
            }
            self.seen = self.buffer.len();
            if self.seen > LINE_MAX {
                return Err(io::Error::other(format!("a line of more than {LINE_MAX} bytes")));
            }
            let read = self.stream.async_io(Interest::READABLE, || receive(&self.stream)).await?;
            if read.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.buffer.extend(read);
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        discard::end(self.stream.as_fd());
    }
}

/// Receives bytes from QEMU, which has no reason to send descriptors: nothing more is read from one that does.
fn receive(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut bytes = [0; 4096];
    let Look::Bytes(seen) = discard::peek_message(stream.as_fd(), &mut bytes)? else {
        return Err(io::Error::other("descriptors came, which nobody asked for"));
    };
    // No byte beyond those that were seen is read. A read from a stream continues into data that arrived meanwhile, and
    // closes the descriptors that came with it.
    let (len, _) = rustix::net::recv(stream, &mut bytes[..seen], RecvFlags::DONTWAIT)?;
    Ok(bytes[..len].to_vec())
}

/// Returns when an event happened, according to its timestamp on the host's clock. A time in the future counts as now.
fn happened(timestamp: &Value) -> Instant {
    let (now, by_clock) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
    let part = |name: &str| timestamp[name].as_u64();
    let at = part("seconds").map(|seconds| {
        Duration::from_secs(seconds).saturating_add(Duration::from_micros(part("microseconds").unwrap_or_default()))
    });
    let ago = at.and_then(|at| by_clock.checked_sub(at)).unwrap_or_default();
    now.checked_sub(ago).unwrap_or(now)
}

fn late(_: tokio::time::error::Elapsed) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", PATIENCE.as_secs()))
}
