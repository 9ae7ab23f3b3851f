// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a connection looks for its other end.

use std::sync::{
    Mutex,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use crate::{negotiation::NegotiationStage, spare::Spare};

/// How often a connection is proposed anew, after what it was proposed over has ended or is left.
const PROPOSALS: u32 = 3;

/// How far the talk with the other end is, what is made for it ahead, and which call gets on with it.
#[derive(Debug, Default)]
pub(crate) struct Search {
    pub talk: Mutex<NegotiationStage>,
    /// What this end brings to its peer, where that is made ahead.
    pub spare: Mutex<Spare>,
    /// Calls of the program since it looks.
    calls: AtomicU64,
    /// The call that gets on with it.
    next_try: AtomicU64,
    /// Times it was proposed in vain.
    vain: AtomicU32,
}

impl Search {
    /// A call of the program begins. Says how many there were since the other end is looked for, this one included.
    pub fn count_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// It was proposed, and nobody answered or ever will. Says whether that may be tried over another session (S-6, S-19).
    pub fn may_propose_again(&self) -> bool {
        self.vain.fetch_add(1, Ordering::Relaxed) < PROPOSALS
    }

    pub fn is_before_next_try(&self, call: u64) -> bool {
        call < self.next_try.load(Ordering::Relaxed)
    }

    pub fn try_next_at(&self, call: u64) {
        self.next_try.store(call, Ordering::Relaxed);
    }
}
