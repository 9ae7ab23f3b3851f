// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stamps what is sent, and counts and checks what is received.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::job::Report;
use crate::wire::End;

/// Most bytes that a receiver of a stream takes at once, unless a message is longer.
const GULP: usize = 64 << 10;
/// Returns the number of messages, a power of two, between two clock reads: up to 64 KiB or 1024 messages.
pub(crate) fn chunk(size: usize) -> u64 {
    let most = (GULP / size).clamp(1, 1024);
    1 << most.ilog2()
}

/// Returns the bytes of a message that carry the number of its chunk, and how many of them fit.
pub(crate) fn stamp(size: usize, chunk: u64) -> ([u8; 8], usize) {
    (chunk.to_le_bytes(), size.min(8))
}

/// Counter and checker of what arrives.
pub(crate) struct Meter {
    size: usize,
    start: Instant,
    warm: Duration,
    /// Number of all bytes so far.
    total: u64,
    /// Time when the window opened, and bytes that had come by then.
    opened: Option<(Instant, u64)>,
    /// The same for the latest clock read.
    latest: (Instant, u64),
}

impl Meter {
    pub(crate) fn new(size: usize, start: Instant, warm: Duration) -> Self {
        Self { size, start, warm, total: 0, opened: None, latest: (start, 0) }
    }

    /// Receives whole messages, a chunk between two clock reads.
    pub(crate) fn messages<E: End>(&mut self, end: &mut E) -> Result<()> {
        let per_chunk = chunk(self.size);
        let mut buffer = vec![0; self.size];
        for number in 0.. {
            for i in 0..per_chunk {
                if !receive_message(end, &mut buffer)? {
                    self.read_clock();
                    return Ok(());
                }
                self.total += self.size as u64;
                if i == 0 {
                    self.check(&buffer, number)?;
                }
            }
            self.check(&buffer, number)?;
            self.read_clock();
        }
        Ok(())
    }

    /// Receives whatever is there.
    pub(crate) fn gulps<E: End>(&mut self, end: &mut E) -> Result<()> {
        let mut buffer = vec![0; self.size.max(GULP)];
        let (size, per_chunk) = (self.size as u64, chunk(self.size));
        let often = per_chunk * size;
        // The first message whose beginning has not been seen, and the position at which to read the clock next.
        let (mut message, mut due) = (0, often);
        loop {
            let got = end.recv(&mut buffer)?;
            if got == 0 {
                self.read_clock();
                return Ok(());
            }
            let begin = message * size - self.total;
            self.total += got as u64;
            if message * size < self.total {
                // The end of the gulp may cut the stamp off; then it is not checked.
                if let Some(text) = buffer[..got].get(begin as usize..).filter(|t| t.len() >= self.size.min(8)) {
                    self.check(text, message / per_chunk)?;
                }
                message = self.total.div_ceil(size);
            }
            if self.total >= due {
                self.read_clock();
                due = self.total + often;
            }
        }
    }

    #[inline]
    fn check(&self, message: &[u8], chunk: u64) -> Result<()> {
        let (bytes, len) = stamp(self.size, chunk);
        if message[..len] == bytes[..len] {
            return Ok(());
        }
        let (got, total) = (&message[..len], self.total);
        Err(Error::Spoiled(format!("stamp {got:?} instead of that of chunk {chunk} before byte {total}")))
    }

    fn read_clock(&mut self) {
        let now = Instant::now();
        self.latest = (now, self.total);
        if self.opened.is_none() && now - self.start >= self.warm {
            self.opened = Some(self.latest);
        }
    }

    pub(crate) fn report(&self) -> Report {
        // Everything counts if there is no warm-up, or if the bytes came not steadily but at once in the end.
        let (end, _) = self.latest;
        let (opened, before) = match self.opened {
            Some((at, before)) if !self.warm.is_zero() && end - at > (end - self.start) / 2 => (at, before),
            _ => (self.start, 0),
        };
        let bytes = self.latest.1 - before;
        Report {
            bytes,
            messages: bytes / self.size as u64,
            seconds: (end - opened).as_secs_f64(),
            total: self.total,
            ..Report::default()
        }
    }
}

/// Fills `buffer` with one message. Returns `false` at the end.
#[inline]
pub(crate) fn receive_message<E: End>(end: &mut E, buffer: &mut [u8]) -> Result<bool> {
    let mut got = end.recv(buffer)?;
    while got != 0 && got < buffer.len() {
        match end.recv(&mut buffer[got..])? {
            0 => return Err(Error::Closed { got, size: buffer.len() }),
            more => got += more,
        }
    }
    Ok(got != 0)
}

/// Returns bytes that differ from those beside them, so that the moved data is not all zeroes.
pub(crate) fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i % 251) as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// An end that returns the bytes put into it, at most `gulp` bytes at once.
    struct Queue {
        bytes: VecDeque<u8>,
        gulp: usize,
    }

    impl End for Queue {
        fn send(&mut self, message: &[u8]) -> Result<()> {
            self.bytes.extend(message);
            Ok(())
        }

        fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
            let n = buffer.len().min(self.gulp).min(self.bytes.len());
            buffer.iter_mut().zip(self.bytes.drain(..n)).for_each(|(to, from)| *to = from);
            Ok(n)
        }

        fn finish(&mut self) -> Result<()> {
            Ok(())
        }
    }

    fn stream(size: usize, chunks: u64, gulp: usize) -> Queue {
        let mut queue = Queue { bytes: VecDeque::new(), gulp };
        for number in 0..chunks {
            let mut message = pattern(size);
            let (bytes, len) = stamp(size, number);
            message[..len].copy_from_slice(&bytes[..len]);
            (0..chunk(size)).for_each(|_| queue.send(&message).unwrap());
        }
        queue
    }

    fn meter(size: usize) -> Meter {
        Meter::new(size, Instant::now(), Duration::ZERO)
    }

    #[test]
    fn meter_true_data_is_counted_whatever_the_gulps() {
        for (size, gulp) in [(1, 7), (3, 1000), (8, 8), (64, 100), (64, 65536), (100, 1), (5000, 4096), (70000, 65536)]
        {
            let sent = stream(size, 3, gulp).bytes.len() as u64;
            let mut gulps = meter(size);
            gulps.gulps(&mut stream(size, 3, gulp)).unwrap();
            let mut messages = meter(size);
            messages.messages(&mut stream(size, 3, gulp)).unwrap();
            assert_eq!((gulps.total, messages.total), (sent, sent), "size {size}, gulp {gulp}");
            assert_eq!(gulps.report().bytes, sent);
        }
    }

    #[test]
    fn meter_lost_repeated_or_cut_data_is_refused() {
        let mut lost = stream(64, 4, 64);
        lost.bytes.drain(..64);
        assert!(matches!(meter(64).messages(&mut lost), Err(Error::Spoiled(_))));
        for gulp in [64, 4096] {
            let mut repeated = stream(64, 4, gulp);
            (0..64).for_each(|byte| repeated.bytes.push_front(byte));
            let spoiled = if gulp == 64 { meter(64).messages(&mut repeated) } else { meter(64).gulps(&mut repeated) };
            assert!(matches!(spoiled, Err(Error::Spoiled(_))), "gulp {gulp}");
        }
        let mut cut = stream(64, 1, 64);
        cut.bytes.pop_back();
        assert!(matches!(meter(64).messages(&mut cut), Err(Error::Closed { got: 63, size: 64 })));
    }

    #[test]
    fn meter_of_bytes_that_come_at_once_in_the_end_counts_the_waiting() {
        let start = Instant::now();
        let at = |ms, bytes| (start + Duration::from_millis(ms), bytes);
        let warm = Duration::from_millis(10);
        let sudden =
            Meter { total: 1000, opened: Some(at(99, 10)), latest: at(100, 1000), ..Meter::new(1, start, warm) };
        let steady = Meter { opened: Some(at(20, 200)), ..sudden };
        assert_eq!((sudden.report().bytes, sudden.report().seconds), (1000, 0.1));
        assert_eq!((steady.report().bytes, steady.report().seconds), (800, 0.08));
    }

    #[test]
    fn chunk_of_any_size_is_a_power_of_two_of_at_most_64_kib() {
        for size in [1, 8, 63, 64, 1000, 65536, 1 << 22] {
            let n = chunk(size);
            assert!(n.is_power_of_two() && n <= 1024 && (n == 1 || n as usize * size <= GULP), "{size}: {n}");
        }
    }
}
