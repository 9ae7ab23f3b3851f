// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Queues lines for standard error, so that no thread of the broker waits for whoever reads them.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::SigSet;
use tombolo_os::lock::lock;

/// Largest number of bytes of waiting lines.
const WAITING_MAX: usize = 256 << 10;

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<Vec<u8>>,
    /// Bytes of all waiting lines.
    bytes: usize,
    /// Number of lines that found no room and were not reported yet.
    left_out: u64,
    /// Whether a line is being written.
    is_writing: bool,
}

impl State {
    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.left_out == 0 && !self.is_writing
    }
}

/// Lines that a separate thread writes in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct LineQueue(Arc<(Mutex<State>, Condvar)>);

impl LineQueue {
    /// Starts a queue whose lines are written to `to`, which may block for any time.
    ///
    /// # Errors
    /// No thread is available.
    pub(crate) fn start(mut to: impl Write + Send + 'static) -> io::Result<Self> {
        let queue = Self::default();
        let own = queue.clone();
        thread::Builder::new().name("log".into()).spawn(move || {
            // Signals are for the threads that wait for them. One taken here would end the process without its cleanup.
            let _ = SigSet::all().thread_block();
            loop {
                let line = own.take_line();
                // An error is ignored: there is nobody to whom it could be reported.
                let _ = to.write_all(&line).and_then(|()| to.flush());
            }
        })?;
        Ok(queue)
    }

    /// Appends a line, or counts it as omitted if there is no room.
    pub(crate) fn push(&self, line: &[u8]) {
        let mut state = self.state();
        if state.bytes + line.len() > WAITING_MAX {
            state.left_out = state.left_out.saturating_add(1);
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line.to_vec());
        self.0.1.notify_all();
    }

    /// Records that the last line was written, and returns the next one once there is one.
    fn take_line(&self) -> Vec<u8> {
        let mut state = self.state();
        state.is_writing = false;
        self.0.1.notify_all();
        loop {
            let line = state.lines.pop_front().or_else(|| {
                let left_out = std::mem::take(&mut state.left_out);
                let said = || format!("tombolod: {left_out} lines were left out, as nobody read what was written\n");
                (left_out != 0).then(|| said().into_bytes())
            });
            if let Some(line) = line {
                state.bytes = state.bytes.saturating_sub(line.len());
                state.is_writing = true;
                return line;
            }
            state = self.0.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until all lines are written, for at most `patience`.
    pub(crate) fn finish(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let mut state = self.state();
        while !state.is_idle() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.0.1.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.0)
    }
}

/// Takes each write as one whole line.
impl Write for LineQueue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Writes a line whenever the test takes one.
    struct Reader(mpsc::SyncSender<Vec<u8>>);

    impl Write for Reader {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.send(line.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_nobody_reads_keep_nobody_waiting_take_bounded_room_and_come_in_order_once_somebody_reads() {
        let (reader, reads) = mpsc::sync_channel(0);
        let queue = LineQueue::start(Reader(reader)).unwrap();
        let line = |nth: usize| format!("{nth:01023}\n").into_bytes();
        (0..1000).for_each(|nth| queue.push(&line(nth)));
        let room = WAITING_MAX >> 10;
        assert!(queue.state().bytes <= WAITING_MAX);
        queue.finish(Duration::ZERO); // This does not wait either.
        let next = || reads.recv_timeout(Duration::from_secs(20)).unwrap();
        let (mut came, mut last) = (0, None);
        let left_out = loop {
            let text = String::from_utf8(next()).unwrap();
            let Ok(nth) = text.trim_end().parse::<usize>() else { break text };
            assert!(last.is_none_or(|last| last < nth), "{nth} after {last:?}");
            (came, last) = (came + 1, Some(nth));
        };
        // The thread may have taken a line, which made room for another.
        assert!((room..=room + 1).contains(&came), "{came}");
        assert!(left_out.starts_with(&format!("tombolod: {} lines were left out", 1000 - came)), "{left_out}");
        queue.push(b"once more\n");
        assert_eq!(next(), b"once more\n");
        queue.finish(Duration::from_secs(20));
        assert!(queue.state().is_idle());
    }
}
