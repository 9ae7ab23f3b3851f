// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of a connection's search for its peer.

use std::sync::{
    Mutex,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use crate::{negotiation::NegotiationStage, spare::Spare};

/// Number of times that a connection is proposed again, after the session over which it was proposed has ended or is
/// left.
const PROPOSALS: u32 = 3;

/// How far the negotiation is, the resources made ahead for it, and the next call that continues it.
#[derive(Debug, Default)]
pub(crate) struct Search {
    pub talk: Mutex<NegotiationStage>,
    /// Resources that this endpoint brings to its peer, where these are made ahead.
    pub spare: Mutex<Spare>,
    /// Number of calls of the program since the search began.
    calls: AtomicU64,
    /// Number of the call that continues the search.
    next_try: AtomicU64,
    /// Number of times it was proposed in vain.
    vain: AtomicU32,
}

impl Search {
    /// Counts a call of the program. Returns the number of calls since the search began, this one included.
    pub fn count_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Counts a proposal that nobody answered or ever will. Returns whether it may be tried over another session (S-6,
    /// S-19).
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
