// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State of a connection's negotiation.

use tombolo_layout::sockets::{Claim, Proof};

use crate::{
    claim::Claimed,
    pipes::{OwnResources, PeerResources},
};

/// How far the negotiation of one connection is.
#[derive(Debug, Default)]
pub(crate) enum NegotiationStage {
    #[default]
    Silent,
    /// It is claimed.
    Claimed(Box<Waiting>),
    /// It was proposed over the session with this number.
    Proposed {
        claim: Claim,
        link: u64,
        _claimed: Claimed,
    },
    /// A proposal was answered.
    Answered(Box<Answered>),
    /// The answer is right, and there was no room yet to confirm it.
    Confirming(Box<Confirming>),
    Done,
}

#[derive(Debug)]
pub(crate) struct Waiting {
    /// The kernel's counts from before any peer could know of the claim.
    pub(super) before: Claim,
    /// Proposal that came first, and the number of its session. Once it was answered there is no second try.
    pub(super) proposal: Option<(Claim, u64)>,
    pub(super) tries: u32,
    pub(super) claimed: Claimed,
}

#[derive(Debug)]
pub(crate) struct Answered {
    pub(super) proposal: Claim,
    pub(super) own: Claim,
    pub(super) proof: Proof,
    /// Number of the session over which it was proposed.
    pub(super) link: u64,
    pub(super) fresh: OwnResources,
    pub(super) _claimed: Claimed,
}

#[derive(Debug)]
pub(crate) struct Confirming {
    /// Number of the endpoint that answered.
    pub(super) peer: u64,
    pub(super) proof: Proof,
    pub(super) brought: PeerResources,
    /// Number of the session over which it answered.
    pub(super) link: u64,
    pub(super) _claimed: Claimed,
}
