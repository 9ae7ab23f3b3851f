// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Passes one cache line to and fro between two processes: the least time of every round trip, and the probe of where
//! the host has placed this process's two CPUs.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tombolo_mem::{MappedOwnWord, MappedPeerWord, OwnWord, PeerSegment, PeerWord, create_sealed};

use crate::error::{Error, Os, Result};
use crate::link::ControlPipe;
use crate::stats;

const PAGE: usize = 4096;
/// Bit of the last word that the asking side sends.
const LAST: u64 = 1 << 63;
/// Round trips of a probe: number of blocks, and round trips in each.
const PROBE: (usize, u32) = (60, 200);

/// Distance of the two CPUs, by the round trip of a cache line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Both probes below 70 ns: two threads of one core, which share all caches.
    Core,
    /// Both probes from 70 ns on and below 190 ns: the CPUs share a cache.
    Near,
    /// Both probes from 190 ns on: the CPUs share no cache, or only one that is slow to reach.
    Far,
    /// The host moved a CPU between the probes.
    Mixed,
    /// Both endpoints ran on one CPU.
    Same,
    /// No probe was made.
    Unknown,
}

impl Placement {
    /// Judges the round trips, in nanoseconds, measured before and after a sample.
    pub fn of(before_ns: f64, after_ns: f64) -> Self {
        let class = |ns: f64| match ns {
            ns if ns < 70.0 => Self::Core,
            ns if ns < 190.0 => Self::Near,
            // NaN belongs to no class.
            ns if ns >= 190.0 => Self::Far,
            _ => Self::Mixed,
        };
        let (before, after) = (class(before_ns), class(after_ns));
        if before == after { before } else { Self::Mixed }
    }
}

/// Two words on a page each: one that this process writes, one that the other process writes.
#[derive(Debug)]
pub struct Line {
    mine: MappedOwnWord,
    theirs: MappedPeerWord,
    /// Number of round trips so far.
    turn: u64,
    /// Last word of the other side.
    heard: u64,
    limit: Duration,
}

impl Line {
    /// Shares a page with the other worker, which must call it too. No wait on the line takes longer than `limit`.
    ///
    /// # Errors
    /// [`Error::Os`] if there is no memory, or the other worker is gone.
    pub fn open(link: &ControlPipe, limit: Duration) -> Result<Self> {
        let (own, fd) = create_sealed("tombolo-bench-line", PAGE).os("making a shared page")?;
        link.pass(fd.as_fd())?;
        let peer = PeerSegment::map(link.receive_descriptor()?.as_fd(), PAGE).os("mapping the other worker's page")?;
        let (control, _) = own.split(PAGE);
        Ok(Self { mine: control.word(0), theirs: peer.word(0), turn: 0, heard: 0, limit })
    }

    /// Makes one round trip; the other side is in [`Line::answer`].
    ///
    /// # Errors
    /// [`Error::Timeout`] if the answer does not come.
    #[inline]
    pub fn ask(&mut self) -> Result<()> {
        self.write_word(self.turn + 1)
    }

    /// Ends the other side's [`Line::answer`].
    ///
    /// # Errors
    /// The same as [`Line::ask`].
    pub fn stop(&mut self) -> Result<()> {
        self.write_word(LAST | (self.turn + 1))
    }

    #[inline]
    fn write_word(&mut self, word: u64) -> Result<()> {
        self.turn += 1;
        self.mine.store_release(word);
        self.heard = self.await_change(self.heard)?;
        Ok(())
    }

    /// Answers until the other side calls [`Line::stop`].
    ///
    /// # Errors
    /// [`Error::Timeout`] if the other side falls silent.
    pub fn answer(&mut self) -> Result<()> {
        loop {
            self.heard = self.await_change(self.heard)?;
            self.turn = self.heard & !LAST;
            self.mine.store_release(self.turn);
            if self.heard & LAST != 0 {
                return Ok(());
            }
        }
    }

    /// Returns the median round trip in nanoseconds, over 60 blocks of 200. The other side is in [`Line::answer`].
    ///
    /// # Errors
    /// The same as [`Line::ask`].
    pub fn probe(&mut self) -> Result<f64> {
        let (blocks, rounds) = PROBE;
        let mut times = Vec::with_capacity(blocks);
        for _ in 0..blocks {
            times.push(self.block(rounds)?);
        }
        self.stop()?;
        Ok(stats::median(&mut times).unwrap_or(f64::NAN))
    }

    /// Returns the nanoseconds per round trip over `rounds` of them.
    ///
    /// # Errors
    /// The same as [`Line::ask`].
    pub fn block(&mut self, rounds: u32) -> Result<f64> {
        let start = Instant::now();
        for _ in 0..rounds {
            self.ask()?;
        }
        Ok(start.elapsed().as_nanos() as f64 / f64::from(rounds))
    }

    /// Spins until the other side's word differs from `old`.
    #[inline]
    fn await_change(&self, old: u64) -> Result<u64> {
        for _ in 0..1 << 14 {
            let word = self.theirs.load_acquire().hint();
            if word != old {
                return Ok(word);
            }
            std::hint::spin_loop();
        }
        self.await_change_for_long(old)
    }

    #[cold]
    fn await_change_for_long(&self, old: u64) -> Result<u64> {
        let deadline = Instant::now() + self.limit;
        while Instant::now() < deadline {
            let word = self.theirs.load_acquire().hint();
            if word != old {
                return Ok(word);
            }
            std::hint::spin_loop();
        }
        Err(Error::Timeout { what: "the other end of the cache line".into(), seconds: self.limit.as_secs_f64() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn placement_needs_both_probes_in_one_class() {
        assert_eq!(Placement::of(100.0, 189.0), Placement::Near);
        assert_eq!(Placement::of(301.0, 510.0), Placement::Far);
        assert_eq!(Placement::of(51.0, 55.0), Placement::Core);
        assert_eq!(Placement::of(51.0, 105.0), Placement::Mixed);
        assert_eq!(Placement::of(100.0, 510.0), Placement::Mixed);
        // An Intel CPU with one slow L3 cache has 245 to 370 ns.
        assert_eq!(Placement::of(250.0, 370.0), Placement::Far);
        assert_eq!(Placement::of(189.0, 190.0), Placement::Mixed);
        assert_eq!(Placement::of(f64::NAN, f64::NAN), Placement::Mixed);
    }

    fn lines(limit: Duration) -> (Line, Line) {
        let (a, b) = UnixStream::pair().unwrap();
        let other = std::thread::spawn(move || {
            Line::open(&ControlPipe::new(b, Duration::from_secs(5)).unwrap(), limit).unwrap()
        });
        let line = Line::open(&ControlPipe::new(a, Duration::from_secs(5)).unwrap(), limit).unwrap();
        (line, other.join().unwrap())
    }

    #[test]
    fn line_asked_thrice_in_two_conversations_is_answered() {
        let (mut ask, mut answer) = lines(Duration::from_secs(20));
        let other =
            std::thread::spawn(move || answer.answer().and_then(|()| answer.answer()).map(|()| answer.turn).unwrap());
        for _ in 0..2 {
            for _ in 0..3 {
                ask.ask().unwrap();
            }
            ask.stop().unwrap();
        }
        assert_eq!(other.join().unwrap(), 8);
    }

    #[test]
    fn line_silent_peer_ends_at_the_limit() {
        let (mut ask, _answer) = lines(Duration::from_millis(20));
        assert!(matches!(ask.ask(), Err(Error::Timeout { .. })));
    }
}
