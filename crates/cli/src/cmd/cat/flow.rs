// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared state of the two directions of a session: how much has moved, how long to wait, when to stop.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
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
        loop {
            let before = (self.sent(), self.received());
            match call(self.patience.map_or(Deadline::NEVER, Deadline::after)) {
                Err(Error::TimedOut) if before != (self.sent(), self.received()) => {}
                done => return done,
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_outlasts_a_busy_other_direction_and_ends_with_silence() {
        let flow = Flow { patience: Some(Duration::from_secs(1)), ..Flow::default() };
        let mut calls = 0;
        let timed_out = |_| {
            calls += 1;
            if calls < 3 {
                flow.sent.fetch_add(1, Ordering::Relaxed);
            }
            Err::<(), _>(Error::TimedOut)
        };
        let error = flow.patiently(timed_out).unwrap_err();
        assert_eq!(calls, 3);
        let failure = flow.failure(error, |_| unreachable!());
        assert_eq!(failure.to_string(), "nothing moved for 1 s, after 2 bytes sent and 0 received");
    }
}
