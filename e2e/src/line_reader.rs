// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads lines from a stream, with a deadline.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The lines of a stream. A thread reads them. It ends with the stream, or at the next line after this value is
/// dropped.
#[derive(Debug)]
pub struct LineReader(Receiver<String>);

/// Reason why there is no line.
#[derive(Debug, PartialEq, Eq)]
pub enum NoLine {
    /// No line came before the deadline.
    TimedOut,
    /// The stream ended.
    Ended,
}

impl LineReader {
    /// Reads lines from `stream`, and replaces invalid UTF-8.
    pub fn of(stream: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut bytes = Vec::new();
            while matches!(stream.read_until(b'\n', &mut bytes), Ok(n) if n > 0) {
                let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
                if sender.send(line).is_err() {
                    return;
                }
                bytes.clear();
            }
        });
        Self(receiver)
    }

    /// Returns the next line.
    ///
    /// # Errors
    /// [`NoLine`] if no line comes before the deadline, or the stream has ended.
    pub fn next_before(&self, deadline: Instant) -> Result<String, NoLine> {
        match self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => Err(NoLine::TimedOut),
            Err(RecvTimeoutError::Disconnected) => Err(NoLine::Ended),
        }
    }

    /// Returns the lines that have already arrived.
    pub fn ready(&self) -> impl Iterator<Item = String> + '_ {
        self.0.try_iter()
    }
}

/// Returns the time in `seconds` seconds from now.
#[must_use]
pub fn within(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}
