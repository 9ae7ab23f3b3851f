// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines from a stream, under a deadline.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The lines of a stream. A thread reads them; it ends with the stream or when nobody wants more.
#[derive(Debug)]
pub struct LineReader(Receiver<String>);

/// Why there is no line.
#[derive(Debug, PartialEq, Eq)]
pub enum NoLine {
    /// Not before the deadline.
    TimedOut,
    /// The stream ended.
    Ended,
}

impl LineReader {
    /// Reads lines from `stream`, replacing what is no UTF-8.
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

    /// The next line.
    ///
    /// # Errors
    /// [`NoLine`] if there is none before the deadline, or none any more.
    pub fn next_before(&self, deadline: Instant) -> Result<String, NoLine> {
        match self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => Err(NoLine::TimedOut),
            Err(RecvTimeoutError::Disconnected) => Err(NoLine::Ended),
        }
    }

    /// The lines that are there already.
    pub fn ready(&self) -> impl Iterator<Item = String> + '_ {
        self.0.try_iter()
    }
}

/// A moment from now.
#[must_use]
pub fn within(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}
