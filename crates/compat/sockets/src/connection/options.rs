// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Remembers which options the program has set on its socket, while no other process can change them unseen.
//!
//! Each change that goes through the front begins a new version, and answers from older versions no longer count. The
//! kernel is asked each time where another process has the socket too, or the connection is leaving.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Connection;

/// Version of all sockets, for changes where it is not known which socket they concern.
static ALL: AtomicU64 = AtomicU64::new(1);

/// An option that is set or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Set {
    /// `O_NONBLOCK`.
    Nonblocking = 0,
    /// `SO_RCVTIMEO` is finite.
    ReceiveLimit = 1,
    /// `SO_SNDTIMEO` is finite.
    SendLimit = 2,
    /// `SO_TIMESTAMP` or `SO_TIMESTAMPNS`.
    Arrival = 3,
    /// `TCP_INQ`.
    Rest = 4,
}

/// Answers, each with the version in which it was given.
#[derive(Debug, Default)]
pub struct Options {
    version: AtomicU64,
    known: [AtomicU64; 5],
}

impl Options {
    fn version(&self) -> u64 {
        // ORDER SeqCst: a change is made, then counted, then its call returns. A call that begins after that sees the
        // count.
        self.version.load(Ordering::SeqCst).wrapping_add(ALL.load(Ordering::SeqCst))
    }

    /// Notes that the program has changed an option of it.
    pub fn set_anew(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether `what` is set. `ask` finds that out if it may have changed since the last answer.
    fn has_set(&self, what: Set, ask: impl FnOnce() -> bool) -> bool {
        let known = &self.known[what as usize];
        // Before `ask` is called, so that a change that comes meanwhile makes the answer old.
        let version = self.version();
        let before = known.load(Ordering::Relaxed);
        if before >> 1 == version {
            return before & 1 != 0;
        }
        let answer = ask();
        known.store(version << 1 | u64::from(answer), Ordering::Relaxed);
        answer
    }
}

impl Connection {
    /// Returns whether `what` is set, which `ask` finds out.
    pub fn has_set(&self, what: Set, ask: impl FnOnce() -> bool) -> bool {
        if !self.members.is_alone() || self.leaves() {
            return ask();
        }
        self.options.has_set(what, ask)
    }
}

/// Notes that the program has changed an option of an unknown socket. Takes no lock.
pub fn set_anew() {
    ALL.fetch_add(1, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_learnt_counts_until_something_is_changed() {
        let connection = Connection::new(true, -1);
        let asked = |answer: bool| {
            let mut asked = false;
            let said = connection.has_set(Set::Nonblocking, || {
                asked = true;
                answer
            });
            (said, asked)
        };
        assert_eq!(asked(true), (true, true));
        assert_eq!(asked(false), (true, false));
        connection.options.set_anew();
        assert_eq!(asked(false), (false, true));
        assert_eq!(asked(true), (false, false));
        set_anew();
        assert_eq!(asked(true), (true, true));
        // Each option by itself.
        assert!(!connection.has_set(Set::SendLimit, || false));
        // A change that comes during the question.
        connection.options.set_anew();
        connection.has_set(Set::Nonblocking, || {
            connection.options.set_anew();
            true
        });
        assert_eq!(asked(false), (false, true));
    }

    #[test]
    fn socket_that_another_process_has_is_asked_each_time() {
        let connection = Connection::new(true, -1);
        assert!(connection.has_set(Set::Nonblocking, || true));
        let group = connection.members.found_group(|| false).unwrap();
        let _place = group.reserve_slot();
        assert!(!connection.has_set(Set::Nonblocking, || false));
    }
}
