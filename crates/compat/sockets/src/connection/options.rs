// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the program has set on its socket, remembered while nobody can change it unseen.
//!
//! Each change that comes by the front begins a new version, and what was learnt in an older one counts no more. It is asked
//! anew each time where another process has the socket too, or the connection is on its way to one.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Connection;

/// Versions of all sockets: where it is not known of which one something was changed.
static ALL: AtomicU64 = AtomicU64::new(1);

/// Something that is set or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Set {
    /// `O_NONBLOCK`.
    Nonblocking = 0,
    /// `SO_RCVTIMEO` is not "for ever".
    ReceiveLimit = 1,
    /// The same of `SO_SNDTIMEO`.
    SendLimit = 2,
    /// `SO_TIMESTAMP` or `SO_TIMESTAMPNS`.
    Arrival = 3,
    /// `TCP_INQ`.
    Rest = 4,
}

/// The answers, each with the version in which it was given.
#[derive(Debug, Default)]
pub struct Options {
    version: AtomicU64,
    known: [AtomicU64; 5],
}

impl Options {
    fn version(&self) -> u64 {
        // ORDER SeqCst: a change is made, then counted, then its call returns. Who begins after that sees the count.
        self.version.load(Ordering::SeqCst).wrapping_add(ALL.load(Ordering::SeqCst))
    }

    /// The program has changed something of it.
    pub fn set_anew(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether `what` is set, which `ask` finds out if it may have changed since that was last asked.
    fn has_set(&self, what: Set, ask: impl FnOnce() -> bool) -> bool {
        let known = &self.known[what as usize];
        // Before it is asked: a change that comes meanwhile makes the answer old.
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
    /// Whether `what` is set, which `ask` finds out.
    pub fn has_set(&self, what: Set, ask: impl FnOnce() -> bool) -> bool {
        if !self.members.is_alone() || self.leaves() {
            return ask();
        }
        self.options.has_set(what, ask)
    }
}

/// The program has changed something of a socket, and which one is not known. Takes no lock.
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
        // Each by itself.
        assert!(!connection.has_set(Set::SendLimit, || false));
        // A change that comes while it is asked.
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
