// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How far a connection is on its way into shared memory, and on its way back.

use std::sync::atomic::{AtomicU32, Ordering};

pub use tombolo_layout::connection_table::Stage;

use crate::Reason;

/// How far a connection is on its way back to TCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReturnStage {
    /// It is back on TCP.
    Done,
    /// The peer has to act first.
    Long,
    /// Bytes are in shared memory that TCP will not carry, as the peer has ended its sending, or were taken out of
    /// there. Only this library can read them.
    Lost,
}

/// Stage of a connection, whether it is to leave shared memory, and why it is on TCP: one word, so that all of it
/// changes at once.
///
/// | it is | event | it becomes | reason |
/// |---|---|---|---|
/// | candidate | [`join`](Self::join) | joined | as it was |
/// | candidate | [`stay_plain`](Self::stay_plain) | plain | the one given |
/// | any of the three, and not leaving | [`begin_to_leave`](Self::begin_to_leave) | the same, and leaving | the one given |
/// | leaving, for a reason that [may pass](Reason::may_pass) | the same, for one that does not | the same | the one given |
///
/// No other event changes any state. So a connection is decided upon once, one that is plain gets no pipes, and one
/// that is joined retreats instead of becoming plain. Of several reasons to leave the first one counts, but a permanent
/// one replaces one that may pass. A connection that is joined anew (S-22) is another one, of which nothing is decided.
#[derive(Debug, Default)]
pub(crate) struct StageWord(AtomicU32);

/// Bits of the word that hold the [`Stage`].
const STAGE: u32 = 3;
/// Bit that is set once the connection is to leave.
const LEAVING: u32 = 4;
/// Number of bits below the reason.
const REASON: u32 = 16;

const fn with_reason(word: u32, reason: Reason) -> u32 {
    word & (STAGE | LEAVING) | (reason as u32) << REASON
}

impl StageWord {
    /// Returns the stage.
    #[inline]
    pub fn stage(&self) -> Stage {
        // ORDER SeqCst: with `PlainCalls::inside`; see `PlainCalls::enter_call`.
        stage_of(self.0.load(Ordering::SeqCst))
    }

    /// Returns whether it is to leave.
    #[inline]
    pub fn is_leaving(&self) -> bool {
        self.0.load(Ordering::Relaxed) & LEAVING != 0
    }

    /// Returns the reason that was given last.
    pub fn reason(&self) -> Reason {
        reason_of(self.0.load(Ordering::Relaxed))
    }

    /// Notes that it has pipes. Returns whether it was a candidate.
    pub fn join(&self) -> bool {
        self.change(|word| is_candidate(word).then_some(word | Stage::Joined as u32))
    }

    /// Keeps it on TCP. Returns whether it was a candidate.
    pub fn stay_plain(&self, reason: Reason) -> bool {
        self.change(|word| is_candidate(word).then(|| with_reason(word | Stage::Plain as u32, reason)))
    }

    /// Makes it leave shared memory. Returns whether this is news.
    pub fn begin_to_leave(&self, reason: Reason) -> bool {
        let stays = |word| !reason.may_pass() && reason_of(word).may_pass();
        self.change(|word| (word & LEAVING == 0 || stays(word)).then(|| with_reason(word | LEAVING, reason)))
    }

    fn change(&self, next: impl FnMut(u32) -> Option<u32>) -> bool {
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok()
    }
}

#[inline]
fn stage_of(word: u32) -> Stage {
    match word & STAGE {
        0 => Stage::Candidate,
        1 => Stage::Joined,
        _ => Stage::Plain,
    }
}

fn reason_of(word: u32) -> Reason {
    Reason::from_number((word >> REASON) as u16)
}

fn is_candidate(word: u32) -> bool {
    stage_of(word) == Stage::Candidate
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what can be read from a word.
    fn seen(word: &StageWord) -> (Stage, bool, Reason) {
        (word.stage(), word.is_leaving(), word.reason())
    }

    /// Goes through all states that a connection can have, by each order of events that leads there.
    #[test]
    fn each_event_in_each_state_does_what_the_table_says() {
        use Reason::{Bypassed, NoPeer, TakenAway, Unknown};
        let mut states = vec![(0, (Stage::Candidate, false, Unknown))];
        let mut next = 0;
        while let Some((word, before)) = states.get(next).copied() {
            next += 1;
            let (stage, leaving, reason) = before;
            let candidate = stage == Stage::Candidate;
            for (event, expected, news) in [
                (0, (Stage::Joined, leaving, reason), candidate),
                (1, (Stage::Plain, leaving, NoPeer), candidate),
                (2, (stage, true, Bypassed), !leaving || reason.may_pass()),
                (3, (stage, true, TakenAway), !leaving),
            ] {
                let after = StageWord(AtomicU32::new(word));
                let said = match event {
                    0 => after.join(),
                    1 => after.stay_plain(NoPeer),
                    2 => after.begin_to_leave(Bypassed),
                    _ => after.begin_to_leave(TakenAway),
                };
                assert_eq!((said, seen(&after)), (news, if news { expected } else { before }), "{before:?}, {event}");
                let state = (after.0.into_inner(), if news { expected } else { before });
                if !states.contains(&state) {
                    states.push(state);
                }
            }
        }
        assert_eq!(states.len(), 10, "{states:?}");
    }
}
