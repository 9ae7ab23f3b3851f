// SPDX-License-Identifier: Apache-2.0 OR MIT
//! That two ends are the ends of this very connection, and not merely two sockets with the same addresses (S-5, S-6).

use sha2::{Digest, Sha256};
use tombolo_layout::sockets::{Claim, Proof, SHORT_TAG};

use crate::{Reason, tuple::Tuple};

/// Bytes of each direction that are kept for the hash.
pub const HISTORY: usize = 1024;
/// Fewer bytes than this in both directions prove nothing (S-6).
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
        store_bytes(&mut self.sent, position, bytes)
    }

    /// Keeps the beginning of what was received, likewise. What is kept already may come again.
    pub fn received(&mut self, position: u64, bytes: &[u8]) -> bool {
        store_bytes(&mut self.received, position, bytes)
    }
}

/// Bytes after some that another process moved, or another thread before they were counted, are not kept.
fn store_bytes(kept: &mut Vec<u8>, position: u64, bytes: &[u8]) -> bool {
    let Some(again) = (kept.len() as u64).checked_sub(position) else { return false };
    let new = usize::try_from(again).ok().and_then(|again| bytes.get(again..)).unwrap_or_default();
    let room = HISTORY - kept.len();
    kept.extend_from_slice(&new[..new.len().min(room)]);
    kept.len() < HISTORY
}

/// Which end says it: the two tags differ, so that neither can be sent back as the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProofSide {
    /// The proposing end.
    Proposer = 1,
    /// The answering end.
    Answerer = 2,
}

/// What only the two ends of a connection have, and who stood on its path: its initial sequence numbers, the own one
/// first; none where the kernel does not tell them (S-6). What the peer says changes nothing about which it is.
pub type Secret = Option<[u32; 2]>;

/// What two claims say about each other, before any byte is compared (S-5). `near`: this kernel vouches for it that the
/// peer's socket is not another namespace's with the same addresses.
///
/// # Errors
/// The first reason against it.
pub fn compare(own: &Claim, peer: &Claim, near: bool) -> Result<(), Reason> {
    let tuple = |claim: &Claim| Tuple { own: claim.addresses[0], peer: claim.addresses[1] };
    if tuple(own) != tuple(peer).mirrored() || own.id == peer.id {
        return Err(Reason::NoPeer);
    }
    if !near && tuple(own).is_local() {
        return Err(Reason::LocalAddress);
    }
    Ok(())
}

/// Whether the kernel's counts of two ends fit: `earlier` was sampled before `later` (S-5). What a kernel acknowledged
/// the other has received; what it has received the other has written.
///
/// # Errors
/// [`Reason::Counts`].
pub fn counts_fit(earlier: &Claim, later: &Claim) -> Result<(), Reason> {
    let (early, late) = (earlier.counts, later.counts);
    if early.acked <= late.received && early.received <= late.written { Ok(()) } else { Err(Reason::Counts) }
}

/// Whether both claims name one network namespace (S-5). That is the peer's word: nothing is allowed for it.
#[must_use]
pub fn same_namespace(own: &Claim, peer: &Claim) -> bool {
    own.cookie != 0 && own.cookie == peer.cookie
}

/// Whether this end can vouch for as much as its peer will ask for: all that its kernel received and all that the
/// peer's acknowledged, as far as it is kept, and no less than [`ENOUGH`] (S-6).
#[must_use]
pub fn is_ready(own: &Claim) -> bool {
    let [sent, received] = own.known.map(u64::from);
    let [acked, arrived] = [own.counts.acked, own.counts.received].map(|count| count.min(HISTORY as u64));
    sent >= acked && received >= arrived && sent + received >= u64::from(ENOUGH)
}

/// Whether a proof covers enough by what this end, on this `side`, knew itself before the peer spoke (S-6).
fn covers(proof: &Proof, before: &Claim, side: ProofSide) -> Result<(), Reason> {
    let (own, peers) = match side {
        ProofSide::Proposer => (proof.proposer, proof.answerer),
        ProofSide::Answerer => (proof.answerer, proof.proposer),
    };
    let wants = |count: u64| count.min(HISTORY as u64);
    let enough = u64::from(own) >= wants(before.counts.acked)
        && u64::from(peers) >= wants(before.counts.received)
        && u64::from(own) + u64::from(peers) >= u64::from(ENOUGH);
    if enough { Ok(()) } else { Err(Reason::TooLittle) }
}

/// The answering end's proof: over as much of both directions as both ends have seen, and no less than what its kernel
/// had counted `before` the peer spoke (S-6).
///
/// # Errors
/// [`Reason::TooLittle`].
pub fn answer(
    history: &History,
    secret: Secret,
    proposal: &Claim,
    own: &Claim,
    before: &Claim,
) -> Result<Proof, Reason> {
    let both = |theirs: u16, mine: usize| usize::from(theirs).min(mine) as u32;
    let covered = [both(proposal.known[0], history.received.len()), both(proposal.known[1], history.sent.len())];
    let proof = prove(ProofSide::Answerer, history, secret, [proposal, own], covered).ok_or(Reason::Hash)?;
    covers(&proof, before, ProofSide::Answerer)?;
    Ok(proof)
}

/// The proposing end checks the answer, of which it sees the beginning of the tag, and makes its own proof (S-6).
///
/// # Errors
/// [`Reason::TooLittle`] or [`Reason::Hash`].
pub fn confirm(history: &History, secret: Secret, own: &Claim, answer: &Claim, proof: &Proof) -> Result<Proof, Reason> {
    covers(proof, own, ProofSide::Proposer)?;
    let seen = Seen::of(ProofSide::Proposer, history, [proof.proposer, proof.answerer]).ok_or(Reason::Hash)?;
    let expected = tag(ProofSide::Answerer, &seen, in_order(ProofSide::Proposer, secret), [own, answer]);
    if !is_same(&expected[..SHORT_TAG], &proof.tag[..SHORT_TAG]) {
        return Err(Reason::Hash);
    }
    prove(ProofSide::Proposer, history, secret, [own, answer], [proof.proposer, proof.answerer]).ok_or(Reason::Hash)
}

/// The answering end checks the confirmation of the proof that it gave: the whole tag (S-6).
///
/// # Errors
/// [`Reason::Hash`].
pub fn check(
    history: &History,
    secret: Secret,
    [proposal, own]: [&Claim; 2],
    given: &Proof,
    proof: &Proof,
) -> Result<(), Reason> {
    let seen = Seen::of(ProofSide::Answerer, history, [given.proposer, given.answerer]).ok_or(Reason::Hash)?;
    let expected = tag(ProofSide::Proposer, &seen, in_order(ProofSide::Answerer, secret), [proposal, own]);
    let as_given = proof.proposer == given.proposer && proof.answerer == given.answerer;
    if as_given && is_same(&expected, &proof.tag) { Ok(()) } else { Err(Reason::Hash) }
}

/// The proof of an end on this `side`, over so many bytes of the proposer's direction and of the answerer's, as an end
/// makes it that asks nothing; none where it has not seen so many (S-6).
#[must_use]
pub fn prove(
    side: ProofSide,
    history: &History,
    secret: Secret,
    claims: [&Claim; 2],
    covered: [u32; 2],
) -> Option<Proof> {
    let seen = Seen::of(side, history, covered)?;
    let [proposer, answerer] = covered;
    Some(Proof { proposer, answerer, tag: tag(side, &seen, in_order(side, secret), claims) })
}

/// The two directions as far as a proof covers them: the proposer's, the answerer's.
struct Seen<'a>([&'a [u8]; 2]);

impl<'a> Seen<'a> {
    /// As an end on this `side` has them.
    fn of(side: ProofSide, history: &'a History, [proposer, answerer]: [u32; 2]) -> Option<Self> {
        let [proposers, answerers] = match side {
            ProofSide::Proposer => [&history.sent, &history.received],
            ProofSide::Answerer => [&history.received, &history.sent],
        };
        Some(Self([proposers.get(..proposer as usize)?, answerers.get(..answerer as usize)?]))
    }
}

/// The proposer's number first, from what an end on this `side` knows as its own and the peer's.
fn in_order(side: ProofSide, secret: Secret) -> Secret {
    secret.map(|[own, peer]| if side == ProofSide::Proposer { [own, peer] } else { [peer, own] })
}

/// Everything of variable length comes after its length, so no two inputs have one text.
fn tag(side: ProofSide, seen: &Seen<'_>, numbers: Secret, [proposal, answer]: [&Claim; 2]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update([side as u8]);
    for claim in [proposal, answer] {
        hash.update(claim.nonce);
        hash.update(claim.id.to_le_bytes());
    }
    hash.update([u8::from(numbers.is_some())]);
    for number in numbers.unwrap_or_default() {
        hash.update(number.to_le_bytes());
    }
    for bytes in seen.0 {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.finalize().into()
}

/// Whether two tags are the same, in a time that does not depend on where they differ.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let differ = one.iter().zip(other).fold(0, |differ, (one, other)| std::hint::black_box(differ | (one ^ other)));
    one.len() == other.len() && differ == 0
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

    fn pair() -> (Claim, Claim) {
        let (one, two) = ("10.0.0.1:80", "10.0.0.2:4000");
        (claim(1, 7, two, one), claim(2, 8, one, two))
    }

    fn histories(proposer: &[u8], answerer: &[u8]) -> (History, History) {
        let (mut one, mut two) = (History::default(), History::default());
        one.sent(0, proposer);
        one.received(0, answerer);
        two.received(0, proposer);
        two.sent(0, answerer);
        (one, two)
    }

    const ASKED: &[u8] = b"GET /index.html HTTP/1.1";
    const SAID: &[u8] = b"200 OK";
    const NUMBERS: Secret = Some([0x1111_2222, 0x3333_4444]);
    const MIRRORED: Secret = Some([0x3333_4444, 0x1111_2222]);

    /// Two ends that saw all, and their claims, counted as they are.
    fn ends() -> (History, History, Claim, Claim) {
        let (mine, theirs) = histories(ASKED, SAID);
        let (own, peer) = pair();
        let counted = |claim: Claim, [sent, received]: [&[u8]; 2]| Claim {
            known: [sent.len() as u16, received.len() as u16],
            counts: Counts { written: sent.len() as u64, acked: sent.len() as u64, received: received.len() as u64 },
            ..claim
        };
        (mine, theirs, counted(own, [ASKED, SAID]), counted(peer, [SAID, ASKED]))
    }

    #[test]
    fn s6_only_the_first_1024_bytes_of_a_direction_are_kept() {
        let mut history = History::default();
        assert!(history.sent(0, &[1; 1000]));
        assert!(!history.sent(1000, &[2; 1000]), "there is room for no more");
        assert_eq!(history.known(), [1024, 0]);
        assert!(history.received(0, &[1; 1023]));
        assert!(!history.received(1023, &[2]), "exactly full is full");
        assert!(!history.received(1024, &[3]));
        assert_eq!(history.known(), [1024, 1024]);
    }

    #[test]
    fn s6_bytes_that_come_again_are_kept_once_and_bytes_after_a_gap_not_at_all() {
        let mut history = History::default();
        assert!(history.received(0, b"seen"));
        assert!(history.received(0, b"se"), "all of it came before");
        assert!(history.received(2, b"en and read"));
        assert_eq!(history.received, b"seen and read");
        assert!(!history.received(14, b"later"));
        assert_eq!(history.received, b"seen and read");
        assert!(!history.received(13, &[7; HISTORY]) && !history.received(13, &[7; HISTORY]));
        assert_eq!(history.known(), [0, 1024]);
    }

    #[test]
    fn s6_ends_of_one_connection_convince_each_other() {
        for (secret, mirrored) in [(None, None), (NUMBERS, MIRRORED)] {
            let (mine, theirs, own, peer) = ends();
            let answered = answer(&theirs, mirrored, &own, &peer, &peer).unwrap();
            let confirmed = confirm(&mine, secret, &own, &peer, &answered.shortened()).unwrap();
            assert_eq!(check(&theirs, mirrored, [&own, &peer], &answered, &confirmed), Ok(()));
            let echo = check(&theirs, mirrored, [&own, &peer], &answered, &answered);
            assert_eq!(echo, Err(Reason::Hash), "sent back as it came");
            let short = check(&theirs, mirrored, [&own, &peer], &answered, &confirmed.shortened());
            assert_eq!(short, Err(Reason::Hash), "a confirmation has the whole tag");
        }
    }

    #[test]
    fn s6_ends_that_saw_other_bytes_are_refused() {
        let (mine, _, own, peer) = ends();
        let (_, theirs) = histories(b"GET /other.html HTTP/1.1", SAID);
        let answered = answer(&theirs, None, &own, &peer, &peer).unwrap();
        assert_eq!(confirm(&mine, None, &own, &peer, &answered), Err(Reason::Hash));
    }

    #[test]
    fn s6_end_that_knows_all_bytes_but_not_the_sequence_numbers_is_refused() {
        let (mine, theirs, own, peer) = ends();
        for guess in [None, NUMBERS, Some([0x3333_4444, 0x1111_2223]), Some([0x3333_4445, 0x1111_2222]), Some([0, 0])] {
            let answered = answer(&theirs, guess, &own, &peer, &peer).unwrap();
            assert_eq!(confirm(&mine, NUMBERS, &own, &peer, &answered), Err(Reason::Hash), "{guess:?}");
            let answered = answer(&theirs, MIRRORED, &own, &peer, &peer).unwrap();
            let covered = [answered.proposer, answered.answerer];
            let guess = guess.map(|[own, peer]| [peer, own]);
            let forged = prove(ProofSide::Proposer, &mine, guess, [&own, &peer], covered).unwrap();
            assert_eq!(check(&theirs, MIRRORED, [&own, &peer], &answered, &forged), Err(Reason::Hash), "{guess:?}");
        }
        // Nor does one who says that there are numbers persuade an end whose kernel tells none.
        let answered = answer(&theirs, Some([0, 0]), &own, &peer, &peer).unwrap();
        assert_eq!(confirm(&mine, None, &own, &peer, &answered), Err(Reason::Hash));
    }

    #[test]
    fn s6_nonce_and_number_of_both_ends_are_in_the_tag() {
        let (mine, theirs, own, peer) = ends();
        let answered = answer(&theirs, None, &own, &peer, &peer).unwrap();
        let other = |claim: Claim| [Claim { nonce: [99; 16], ..claim }, Claim { id: 99, ..claim }];
        for changed in other(own) {
            assert_eq!(confirm(&mine, None, &changed, &peer, &answered), Err(Reason::Hash), "{changed:?}");
        }
        for changed in other(peer) {
            assert_eq!(confirm(&mine, None, &own, &changed, &answered), Err(Reason::Hash), "{changed:?}");
        }
    }

    #[test]
    fn s6_proof_over_less_than_an_end_knows_itself_is_refused() {
        let (mine, theirs, own, peer) = ends();
        let (sent, received) = (ASKED.len() as u32, SAID.len() as u32);
        for (covered, fits) in [
            ([0, 0], Err(Reason::TooLittle)),
            ([sent - 1, received], Err(Reason::TooLittle)),
            ([sent, received - 1], Err(Reason::TooLittle)),
            ([sent, received], Ok(())),
            ([5000, received], Err(Reason::Hash)),
            ([sent, 5000], Err(Reason::Hash)),
        ] {
            let tag =
                prove(ProofSide::Answerer, &theirs, None, [&own, &peer], covered).map_or([0; 32], |proof| proof.tag);
            let proof = Proof { proposer: covered[0], answerer: covered[1], tag };
            assert_eq!(confirm(&mine, None, &own, &peer, &proof).map(drop), fits, "{covered:?}");
        }
        // What a proposal says of itself does not lower it either.
        for (known, fits) in
            [([0, 0], false), ([23, 6], false), ([24, 5], false), ([24, 6], true), ([1024, 1024], true)]
        {
            let proposal = Claim { known, ..own };
            assert_eq!(answer(&theirs, None, &proposal, &peer, &peer).is_ok(), fits, "{known:?}");
        }
        // What came since is not asked for.
        let before = Claim { counts: Counts { acked: 5, received: 11, written: 5 }, ..peer };
        assert!(answer(&theirs, None, &Claim { known: [11, 5], ..own }, &peer, &before).is_ok());
        assert_eq!(answer(&theirs, None, &Claim { known: [10, 5], ..own }, &peer, &before), Err(Reason::TooLittle));
    }

    #[test]
    fn s6_sixteen_bytes_are_the_least_and_the_history_the_most() {
        let (mine, theirs) = histories(&[7; 5000], &[8; 5000]);
        let counted = |count, claim: Claim| Claim {
            known: [1024, 1024],
            counts: Counts { written: count, acked: count, received: count },
            ..claim
        };
        let (own, peer) = pair();
        let (own, peer) = (counted(5000, own), counted(5000, peer));
        let answered = answer(&theirs, None, &own, &peer, &peer).unwrap();
        assert_eq!((answered.proposer, answered.answerer), (1024, 1024));
        assert!(confirm(&mine, None, &own, &peer, &answered).is_ok());
        let (own, peer) = (counted(0, own), counted(0, peer));
        for (covered, fits) in [([15, 0], false), ([16, 0], true), ([0, 16], true), ([7, 8], false), ([8, 8], true)] {
            let proof = prove(ProofSide::Answerer, &theirs, None, [&own, &peer], covered).unwrap();
            assert_eq!(confirm(&mine, None, &own, &peer, &proof).is_ok(), fits, "{covered:?}");
        }
    }

    #[test]
    fn s6_end_is_ready_once_it_can_vouch_for_all_that_was_counted() {
        let (_, _, own, _) = ends();
        assert!(is_ready(&own));
        let counts = |acked, received| Claim { counts: Counts { written: 99, acked, received }, ..own };
        assert!(!is_ready(&counts(25, 6)) && !is_ready(&counts(24, 7)) && is_ready(&counts(24, 6)));
        assert!(is_ready(&Claim { known: [1024, 1024], ..counts(1 << 30, 1 << 30) }));
        let little = |known| is_ready(&Claim { known, ..counts(0, 0) });
        assert!(!little([15, 0]) && little([16, 0]) && little([0, 16]));
    }

    #[test]
    fn s5_address_that_every_namespace_has_needs_the_kernels_word() {
        let (one, two) = ("127.0.0.1:80", "127.0.0.1:4000");
        let (own, peer) = (claim(1, 7, two, one), claim(2, 7, one, two));
        assert_eq!(compare(&own, &peer, false), Err(Reason::LocalAddress), "a cookie is the peer's word");
        assert_eq!(compare(&own, &peer, true), Ok(()));
        let (own, peer) = pair();
        assert_eq!(compare(&own, &peer, false), Ok(()));
    }

    #[test]
    fn s5_other_addresses_and_an_end_itself_do_not_fit() {
        let (own, peer) = pair();
        let behind_nat = claim(2, 7, "10.0.0.1:80", "192.168.0.9:4000");
        assert_eq!(compare(&own, &behind_nat, true), Err(Reason::NoPeer));
        assert_eq!(compare(&own, &Claim { addresses: own.addresses, ..peer }, true), Err(Reason::NoPeer));
        assert_eq!(compare(&own, &Claim { id: own.id, ..peer }, true), Err(Reason::NoPeer));
    }

    #[test]
    fn s5_counts_of_another_connection_do_not_fit() {
        let (own, peer) = pair();
        assert_eq!(counts_fit(&own, &peer), Ok(()));
        let more = Claim { counts: Counts { written: 99, acked: 41, received: 40 }, ..own };
        assert_eq!(counts_fit(&more, &peer), Err(Reason::Counts), "acknowledged but not received");
        let more = Claim { counts: Counts { received: 41, ..own.counts }, ..own };
        assert_eq!(counts_fit(&more, &peer), Err(Reason::Counts), "received but not written");
    }

    #[test]
    fn s5_namespaces_are_one_by_a_cookie_that_is_known() {
        let (own, peer) = pair();
        assert!(!same_namespace(&own, &peer));
        assert!(same_namespace(&own, &Claim { cookie: own.cookie, ..peer }));
        assert!(!same_namespace(&Claim { cookie: 0, ..own }, &Claim { cookie: 0, ..peer }));
    }
}
