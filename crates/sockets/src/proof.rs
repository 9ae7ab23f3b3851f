// SPDX-License-Identifier: Apache-2.0 OR MIT
//! S-5, S-6. That two ends are the ends of this very connection, and not merely neighbours with the same addresses.

use sha2::{Digest, Sha256};
use tombolo_layout::sockets::{Claim, Proof};

use crate::{Reason, tuple::Tuple};

/// Bytes of each direction that are kept for the hash.
pub const HISTORY: usize = 1024;
/// S-6. Between two network namespaces fewer bytes than this in both directions prove nothing.
pub const ENOUGH: u32 = 16;

/// The first bytes of both directions, as this end's program sent and received them.
#[derive(Debug, Default)]
pub struct History {
    sent: Vec<u8>,
    received: Vec<u8>,
}

impl History {
    /// How much of what was sent and received is kept.
    #[must_use]
    pub fn known(&self) -> [u16; 2] {
        [self.sent.len() as u16, self.received.len() as u16]
    }

    /// Keeps the beginning of what was sent, of which these bytes stand at `position`; says whether more is wanted.
    pub fn sent(&mut self, position: u64, bytes: &[u8]) -> bool {
        keep(&mut self.sent, position, bytes)
    }

    /// Keeps the beginning of what was received, likewise.
    pub fn received(&mut self, position: u64, bytes: &[u8]) -> bool {
        keep(&mut self.received, position, bytes)
    }
}

/// Bytes after some that another process moved, or another thread before they were counted, are not kept.
fn keep(kept: &mut Vec<u8>, position: u64, bytes: &[u8]) -> bool {
    if position != kept.len() as u64 {
        return false;
    }
    let room = HISTORY - kept.len();
    kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
    kept.len() < HISTORY
}

/// Which end says it: the two hashes differ, so that neither can be sent back as the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The proposing end.
    Proposer = 1,
    /// The answering end.
    Answerer = 2,
}

/// S-5. What two claims say about each other, before any byte is compared.
///
/// # Errors
/// The first reason against it.
pub fn compare(own: &Claim, peer: &Claim) -> Result<(), Reason> {
    let tuple = |claim: &Claim| Tuple { own: claim.addresses[0], peer: claim.addresses[1] };
    if tuple(own) != tuple(peer).mirrored() || own.id == peer.id {
        return Err(Reason::NoPeer);
    }
    if !same_namespace(own, peer) && tuple(own).is_local() {
        return Err(Reason::LocalAddress);
    }
    Ok(())
}

/// S-5. Whether the kernel's counts of two ends fit: `earlier` was sampled before `later`. What a kernel acknowledged
/// the other has received; what it has received the other has written.
///
/// # Errors
/// [`Reason::Counts`].
pub fn counts_fit(earlier: &Claim, later: &Claim) -> Result<(), Reason> {
    let (early, late) = (earlier.counts, later.counts);
    if early.acked <= late.received && early.received <= late.written { Ok(()) } else { Err(Reason::Counts) }
}

/// Whether both ends stand in one network namespace, where addresses are unique.
#[must_use]
pub fn same_namespace(own: &Claim, peer: &Claim) -> bool {
    own.cookie != 0 && own.cookie == peer.cookie
}

/// S-6. The answering end's proof: over as much of both directions as both ends have seen.
#[must_use]
pub fn answer(history: &History, proposal: &Claim, own: &Claim) -> Proof {
    let both = |theirs: u16, mine: usize| usize::from(theirs).min(mine) as u32;
    let proposer = both(proposal.known[0], history.received.len());
    let answerer = both(proposal.known[1], history.sent.len());
    let hash = hash(
        Side::Answerer,
        [proposal, own],
        &history.received[..proposer as usize],
        &history.sent[..answerer as usize],
    );
    Proof { proposer, answerer, hash }
}

/// S-6. The proposing end checks the answer and makes its own proof.
///
/// # Errors
/// [`Reason::TooLittle`] or [`Reason::Hash`].
pub fn confirm(history: &History, own: &Claim, answer: &Claim, proof: &Proof) -> Result<Proof, Reason> {
    let sent = history.sent.get(..proof.proposer as usize).ok_or(Reason::Hash)?;
    let received = history.received.get(..proof.answerer as usize).ok_or(Reason::Hash)?;
    if !same_namespace(own, answer) && proof.proposer + proof.answerer < ENOUGH {
        return Err(Reason::TooLittle);
    }
    if hash(Side::Answerer, [own, answer], sent, received) != proof.hash {
        return Err(Reason::Hash);
    }
    Ok(Proof { hash: hash(Side::Proposer, [own, answer], sent, received), ..*proof })
}

/// S-6. The answering end checks the confirmation of the proof that it gave.
///
/// # Errors
/// [`Reason::Hash`].
pub fn check(history: &History, proposal: &Claim, own: &Claim, given: &Proof, proof: &Proof) -> Result<(), Reason> {
    let received = history.received.get(..given.proposer as usize).ok_or(Reason::Hash)?;
    let sent = history.sent.get(..given.answerer as usize).ok_or(Reason::Hash)?;
    let expected = Proof { hash: hash(Side::Proposer, [proposal, own], received, sent), ..*given };
    if *proof == expected { Ok(()) } else { Err(Reason::Hash) }
}

/// Everything of variable length comes after its length, so no two inputs have one text.
fn hash(side: Side, [proposal, answer]: [&Claim; 2], proposer: &[u8], answerer: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update([side as u8]);
    for claim in [proposal, answer] {
        hash.update(claim.nonce);
        hash.update(claim.id.to_le_bytes());
    }
    for bytes in [proposer, answerer] {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_layout::sockets::Counts;

    fn claim(id: u64, cookie: u64, own: &str, peer: &str) -> Claim {
        let tuple = Tuple::new(own.parse().unwrap(), peer.parse().unwrap());
        let counts = Counts { written: 40, acked: 40, received: 40 };
        Claim { id, cookie, addresses: [tuple.own, tuple.peer], known: [24, 6], counts, nonce: [id as u8; 16] }
    }

    fn pair(cookies: [u64; 2]) -> (Claim, Claim) {
        let (one, two) = ("10.0.0.1:80", "10.0.0.2:4000");
        (claim(1, cookies[0], two, one), claim(2, cookies[1], one, two))
    }

    fn histories(proposer: &[u8], answerer: &[u8]) -> (History, History) {
        let (mut one, mut two) = (History::default(), History::default());
        one.sent(0, proposer);
        one.received(0, answerer);
        two.received(0, proposer);
        two.sent(0, answerer);
        (one, two)
    }

    #[test]
    fn s6_ends_of_one_connection_convince_each_other() {
        let (own, peer) = pair([7, 8]);
        let (mine, theirs) = histories(b"GET /index.html HTTP/1.1", b"200 OK");
        let answered = answer(&theirs, &own, &peer);
        let confirmed = confirm(&mine, &own, &peer, &answered).unwrap();
        assert_eq!(check(&theirs, &own, &peer, &answered, &confirmed), Ok(()));
        assert_eq!(check(&theirs, &own, &peer, &answered, &answered), Err(Reason::Hash), "sent back as it came");
    }

    #[test]
    fn s6_ends_that_saw_other_bytes_are_refused() {
        let (own, peer) = pair([7, 8]);
        let (mine, _) = histories(b"GET /index.html HTTP/1.1", b"200 OK");
        let (_, theirs) = histories(b"GET /other.html HTTP/1.1", b"200 OK");
        let answered = answer(&theirs, &own, &peer);
        assert_eq!(confirm(&mine, &own, &peer, &answered), Err(Reason::Hash));
    }

    #[test]
    fn s6_lying_claimer_who_knows_the_nonces_but_not_the_bytes_is_refused() {
        let (own, peer) = pair([7, 8]);
        let (mine, _) = histories(b"GET /index.html HTTP/1.1", b"200 OK");
        let guess = answer(&History::default(), &own, &peer);
        assert_eq!(confirm(&mine, &own, &peer, &guess), Err(Reason::TooLittle), "a proof over nothing");
        let long = Proof { proposer: 5000, ..guess };
        assert_eq!(confirm(&mine, &own, &peer, &long), Err(Reason::Hash), "over more than there is");
        let forged = Proof { proposer: 20, answerer: 6, hash: [0; 32] };
        assert_eq!(confirm(&mine, &own, &peer, &forged), Err(Reason::Hash));
    }

    #[test]
    fn s5_address_that_every_namespace_has_needs_one_namespace() {
        let (one, two) = ("127.0.0.1:80", "127.0.0.1:4000");
        let (own, peer) = (claim(1, 7, two, one), claim(2, 8, one, two));
        assert_eq!(compare(&own, &peer), Err(Reason::LocalAddress));
        assert_eq!(compare(&own, &Claim { cookie: 7, ..peer }), Ok(()));
        assert_eq!(compare(&Claim { cookie: 0, ..own }, &Claim { cookie: 0, ..peer }), Err(Reason::LocalAddress));
    }

    #[test]
    fn s5_translated_addresses_do_not_fit() {
        let (own, _) = pair([7, 7]);
        let behind_nat = claim(2, 7, "10.0.0.1:80", "192.168.0.9:4000");
        assert_eq!(compare(&own, &behind_nat), Err(Reason::NoPeer));
    }

    #[test]
    fn s5_counts_of_another_connection_do_not_fit() {
        let (own, peer) = pair([7, 8]);
        assert_eq!(counts_fit(&own, &peer), Ok(()));
        let more = Claim { counts: Counts { written: 99, acked: 41, received: 40 }, ..own };
        assert_eq!(counts_fit(&more, &peer), Err(Reason::Counts), "acknowledged but not received");
        let more = Claim { counts: Counts { received: 41, ..own.counts }, ..own };
        assert_eq!(counts_fit(&more, &peer), Err(Reason::Counts), "received but not written");
    }
}
