// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state words: what an endpoint says of itself, in its own memory (R-15, H-2).
//!
//! ```text
//! bits  0..8    phase
//! bits  8..16   zero
//! bits 16..32   writer: newest ring offered       reader: newest ring it is ready to follow to
//! bits 32..48   writer: ring it publishes into    reader: zero
//! bits 48..64   zero
//! ```

/// What an endpoint says of itself in one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Phase {
    /// The segment was made and nothing said yet.
    Fresh = 0,
    /// In use.
    Open = 1,
    /// The writer will publish no more; the reader wants no more.
    Closed = 2,
    /// The end gave up in the middle (its process died, or it caught its peer lying).
    Aborted = 3,
}

impl Phase {
    /// Whether an endpoint that said `self` may say `next` now: phases do not go back, and the last two are
    /// final (R-15).
    #[must_use]
    pub const fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Fresh, _)
                | (Self::Open, Self::Open | Self::Closed | Self::Aborted)
                | (Self::Closed, Self::Closed)
                | (Self::Aborted, Self::Aborted)
        )
    }
}

/// A state word taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct State {
    /// What the end does.
    pub phase: Phase,
    /// Writer: newest ring offered. Reader: newest ring it is ready for.
    pub ready: u16,
    /// Writer: the ring it publishes into.
    pub current: u16,
}

impl State {
    /// An open end on its first ring.
    pub const OPEN: Self = Self { phase: Phase::Open, ready: 0, current: 0 };

    /// The word.
    #[must_use]
    pub const fn encode(self) -> u64 {
        self.phase as u64 | (self.ready as u64) << 16 | (self.current as u64) << 32
    }

    /// The word taken apart, or `None` where a reserved bit is set or the phase is unknown.
    #[must_use]
    pub const fn decode(word: u64) -> Option<Self> {
        if word & 0xffff_0000_0000_ff00 != 0 {
            return None;
        }
        let phase = match word as u8 {
            0 => Phase::Fresh,
            1 => Phase::Open,
            2 => Phase::Closed,
            3 => Phase::Aborted,
            _ => return None,
        };
        Some(Self { phase, ready: (word >> 16) as u16, current: (word >> 32) as u16 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r15_state_word_comes_back_and_reserved_bits_are_refused() {
        let state = State { phase: Phase::Closed, ready: 0xfffe, current: 0x1234 };
        assert_eq!(State::decode(state.encode()), Some(state));
        assert_eq!(State::decode(4), None);
        for bit in (8..16).chain(48..64) {
            assert_eq!(State::decode(1 | 1 << bit), None, "bit {bit}");
        }
    }

    #[test]
    fn r15_phases_do_not_go_back_and_the_last_two_are_final() {
        let phases = [Phase::Fresh, Phase::Open, Phase::Closed, Phase::Aborted];
        let allowed = [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1]];
        for (from, row) in phases.into_iter().zip(allowed) {
            assert_eq!(phases.map(|to| u8::from(from.may_become(to))), row, "{from:?}");
        }
    }
}
