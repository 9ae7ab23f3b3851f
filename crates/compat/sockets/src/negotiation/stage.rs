// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a connection knows of the talk about it.

use tombolo_layout::sockets::{Claim, Proof};

use crate::{
    claim::Claimed,
    pipes::{OwnResources, PeerResources},
};

/// How far the talk about one connection is.
#[derive(Debug, Default)]
pub(crate) enum NegotiationStage {
    #[default]
    Silent,
    /// Claimed.
    Claimed(Box<Waiting>),
    /// Proposed over the link with this number.
    Proposed {
        claim: Claim,
        link: u64,
        _claimed: Claimed,
    },
    /// Answered.
    Answered(Box<Answered>),
    /// The answer is right, and there was no room yet to say so.
    Confirming(Box<Confirming>),
    Done,
}

#[derive(Debug)]
pub(crate) struct Waiting {
    /// What the kernel counted before anybody could know of the claim.
    pub(super) before: Claim,
    /// What came first, over the link with this number. Once it was answered there is no second try.
    pub(super) proposal: Option<(Claim, u64)>,
    pub(super) tries: u32,
    pub(super) claimed: Claimed,
}

#[derive(Debug)]
pub(crate) struct Answered {
    pub(super) proposal: Claim,
    pub(super) own: Claim,
    pub(super) proof: Proof,
    /// The link over which it was proposed.
    pub(super) link: u64,
    pub(super) fresh: OwnResources,
    pub(super) _claimed: Claimed,
}

#[derive(Debug)]
pub(crate) struct Confirming {
    /// The end that answered.
    pub(super) peer: u64,
    pub(super) proof: Proof,
    pub(super) brought: PeerResources,
    /// The link over which it answered.
    pub(super) link: u64,
    pub(super) _claimed: Claimed,
}
