// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QMP connection to QEMU itself.

use crate::error::{Context, Error, Result};
use crate::line_reader::{LineReader, NoLine, within};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Seconds that an answer may take on a loaded machine.
const PATIENCE: u64 = 60;

/// A QMP connection.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    lines: LineReader,
    events: Vec<Value>,
}

impl Qmp {
    /// Opens a connection to the QEMU at the other end of `stream`.
    ///
    /// # Errors
    /// QEMU is missing, or does not answer.
    pub fn open(stream: UnixStream) -> Result<Self> {
        let lines = LineReader::of(stream.try_clone()?);
        let mut qmp = Self { stream, lines, events: Vec::new() };
        let greeting = qmp.receive_message(within(PATIENCE)).context("waiting for QEMU's greeting")?;
        if greeting.get("QMP").is_none() {
            return Err(Error::new(format!("no greeting: {greeting}")));
        }
        qmp.run("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns what it returns.
    ///
    /// # Errors
    /// QEMU refuses it, or does not answer.
    pub fn run(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.write_all(line.as_bytes()).context(command)?;
        self.answer(command)
    }

    /// Runs a command that passes a descriptor to QEMU.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with(&mut self, fd: BorrowedFd<'_>, command: &str, arguments: &Value) -> Result<Value> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&self.stream, &[IoSlice::new(line.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL)
            .context(command)?;
        self.answer(command)
    }

    /// Waits for an event, and drops the events before it.
    ///
    /// # Errors
    /// The event does not come before the deadline.
    pub fn event(&mut self, wanted: impl Fn(&Value) -> bool, deadline: Instant) -> Result<Value> {
        loop {
            if let Some(at) = self.events.iter().position(&wanted) {
                return self.events.drain(..=at).next_back().ok_or_else(|| Error::new("no event"));
            }
            let event = self.receive_message(deadline).context("waiting for an event")?;
            self.events.push(event);
        }
    }

    fn answer(&mut self, command: &str) -> Result<Value> {
        let deadline = within(PATIENCE);
        loop {
            let mut answer = self.receive_message(deadline).context(command)?;
            if let Some(error) = answer.get("error") {
                return Err(Error::new(format!("{command}: {error}")));
            }
            match answer.get_mut("return") {
                Some(value) => return Ok(value.take()),
                None => self.events.push(answer),
            }
        }
    }

    fn receive_message(&mut self, deadline: Instant) -> Result<Value> {
        match self.lines.next_before(deadline) {
            Ok(line) => serde_json::from_str(&line).context(format!("QEMU said `{line}`")),
            Err(NoLine::TimedOut) => Err(Error::new("QEMU did not answer before the deadline")),
            Err(NoLine::Ended) => Err(Error::new("QEMU is gone")),
        }
    }
}
