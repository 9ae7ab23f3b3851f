// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared state of the two directions of a session: how much has moved, how long to wait, when to stop.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tombolo::{Deadline, Error};

use crate::failure::Failure;

/// Bytes moved so far, and the longest time without any movement.
///
/// The numbers and flags depend on nothing else, so Relaxed is enough for all of them.
#[derive(Debug, Default)]
pub struct Flow {
    pub sent: AtomicU64,
    pub received: AtomicU64,
    /// Bytes sent that the peer had not read when this side last looked.
    pub unread: AtomicU64,
    /// Whether the session ends before its time.
    pub given_up: AtomicBool,
    pub patience: Option<Duration>,
}

impl Flow {
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub fn given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Makes `call`, again after each deadline for as long as anything moves in either direction: a direction that is
    /// silent only because the other is busy does not end the session.
    pub fn patiently<T>(&self, mut call: impl FnMut(Deadline) -> tombolo::Result<T>) -> tombolo::Result<T> {
        let mut silence = self.silence();
        loop {
            match call(silence.next_look().map_or(Deadline::NEVER, Deadline::after)) {
                Err(Error::TimedOut) if !silence.is_too_long() => {}
                done => return done,
            }
        }
    }

    /// Begins to measure how long nothing moves.
    pub fn silence(&self) -> Silence<'_> {
        Silence { flow: self, moved: self.moved(), since: Instant::now() }
    }

    /// Returns numbers of which one changes whenever anything moves.
    fn moved(&self) -> [u64; 3] {
        [&self.sent, &self.received, &self.unread].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    /// Returns why a direction ended: the session was silent for too long, or else the failure that `or` makes of the
    /// error.
    pub fn failure(&self, error: Error, or: impl FnOnce(Error) -> Failure) -> Failure {
        match (error, self.patience) {
            (Error::TimedOut, Some(patience)) => {
                Failure::Silent { seconds: patience.as_secs_f64(), sent: self.sent(), received: self.received() }
            }
            (error, _) => or(error),
        }
    }
}

/// Time for which nothing has moved in a session.
pub struct Silence<'a> {
    flow: &'a Flow,
    moved: [u64; 3],
    since: Instant,
}

impl Silence<'_> {
    /// Returns the time after which to look again whether anything moved; `None` if silence may last for ever.
    pub fn next_look(&self) -> Option<Duration> {
        // Whoever looks often is not long in noticing when a movement was the last.
        self.flow.patience.map(|patience| (patience / 4).min(patience.saturating_sub(self.since.elapsed())))
    }

    /// Returns whether nothing has moved for too long.
    pub fn is_too_long(&mut self) -> bool {
        let moved = self.flow.moved();
        if moved != self.moved {
            (self.moved, self.since) = (moved, Instant::now());
        }
        self.flow.patience.is_some_and(|patience| self.since.elapsed() >= patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_outlasts_a_busy_other_direction_and_ends_with_silence() {
        let flow = Flow { patience: Some(Duration::from_millis(100)), ..Flow::default() };
        let (mut calls, began) = (0, Instant::now());
        let timed_out = |deadline: Deadline| {
            calls += 1;
            while !deadline.expired() {
                std::thread::park_timeout(Duration::from_millis(1));
            }
            // What the peer reads is a movement as well, though this side sends nothing.
            let moving = if calls % 2 == 0 { &flow.sent } else { &flow.unread };
            if calls < 5 {
                moving.fetch_add(1, Ordering::Relaxed);
            }
            Err::<(), _>(Error::TimedOut)
        };
        let error = flow.patiently(timed_out).unwrap_err();
        assert!(calls >= 5 && began.elapsed() >= Duration::from_millis(200), "{calls} calls");
        let failure = flow.failure(error, |_| unreachable!());
        assert_eq!(failure.to_string(), "nothing moved for 0.1 s, after 2 bytes sent and 0 received");
    }
}
