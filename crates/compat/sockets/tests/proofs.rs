// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that an endpoint makes before it trusts another. In each case here one rule alone decides, and all else is in
//! order.

mod victim;

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use sha2::{Digest, Sha256};
use tombolo_domain::{Deadline, Rendezvous};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::sockets::{Claim, Counts, Message, Proof};
use tombolo_sockets::{
    Reason,
    connection::{Connection, Stage},
    proof::{self, History, ProofSide, Secret},
    tuple::Tuple,
};
use victim::{BOTH, Liar, Play, RECEIVED, SENT, SOON, Victim, convince, convince_as, counts, honest};

const NUMBERS: Secret = Some([0x0102_0304, 0xa0b0_c0d0]);
const MIRRORED: Secret = Some([0xa0b0_c0d0, 0x0102_0304]);

/// Returns whether a victim trusts a peer whose claim `lie` has changed, and the reason why the victim stays on TCP.
fn tried(play: Play, secret: Secret, lie: impl Fn(&mut Claim)) -> (bool, Option<Reason>) {
    let victim = Victim::playing(play);
    let joined = convince(&victim, secret, lie);
    (joined, victim.connection.reason())
}

#[test]
fn s5_counts_that_do_not_fit_both_samples_are_refused() {
    let (sent, received) = (SENT.len() as u64, RECEIVED.len() as u64);
    let right = counts(RECEIVED, SENT);
    for waits in BOTH {
        assert!(tried(Play::new(waits), None, |claim| claim.counts = right).0, "canary");
        for wrong in [
            Counts::default(),
            Counts { received: sent - 1, ..right },
            Counts { written: received - 1, acked: 0, ..right },
            Counts { acked: received + 1, written: received + 1, ..right },
            Counts { received: sent + 1, ..right },
        ] {
            let (joined, reason) = tried(Play::new(waits), None, |claim| claim.counts = wrong);
            assert_eq!((joined, reason), (false, Some(Reason::Counts)), "waits: {waits}, {wrong:?}");
        }
    }
}

#[test]
fn s5_counts_from_before_the_peer_spoke_are_compared() {
    // The kernel has counted more by now. The peer must claim at least what was counted when the victim made its claim.
    for (received, joins) in [(SENT.len() as u64 - 1, false), (SENT.len() as u64, true)] {
        let play = Play::new(true);
        let victim = Victim::playing(play.clone());
        victim.call();
        play.counts.lock().unwrap().written += 100;
        assert_eq!(convince(&victim, None, |claim| claim.counts.received = received), joins, "{received}");
    }
}

#[test]
fn s5_other_addresses_are_refused() {
    for waits in BOTH {
        let (joined, _) = tried(Play::new(waits), None, |claim| claim.addresses[1].port += 1);
        assert!(!joined, "waits: {waits}");
        let (joined, _) = tried(Play::new(waits), None, |claim| claim.addresses.swap(0, 1));
        assert!(!joined, "waits: {waits}");
    }
}

#[test]
fn s5_loopback_is_joined_by_the_kernels_word_or_by_sequence_numbers() {
    let own = Some(rustix::process::geteuid().as_raw());
    for waits in BOTH {
        let play = |pid, sequences| Play {
            addresses: ["127.0.0.1:80", "127.0.0.1:4000"],
            peer: Some((own, pid)),
            sequences,
            ..Play::new(waits)
        };
        assert!(tried(play(Some(std::process::id()), None), None, honest).0, "a process of this namespace");
        for pid in [None, Some(0), Some(u32::MAX >> 1)] {
            let (joined, reason) = tried(play(pid, None), None, honest);
            assert_eq!((joined, reason), (false, Some(Reason::LocalAddress)), "waits: {waits}, {pid:?}");
        }
        assert!(tried(play(None, NUMBERS), MIRRORED, honest).0, "by sequence numbers");
    }
}

#[test]
fn s6_sequence_numbers_that_the_kernel_tells_are_asked_for() {
    for waits in BOTH {
        let play = || Play { sequences: NUMBERS, ..Play::new(waits) };
        assert!(tried(play(), MIRRORED, honest).0, "waits: {waits}");
        for wrong in [None, NUMBERS, Some([0xa0b0_c0d0, 0x0102_0305]), Some([0, 0])] {
            let (joined, reason) = tried(play(), wrong, honest);
            assert!(!joined, "waits: {waits}, {wrong:?}, {reason:?}");
        }
        assert!(!tried(Play::new(waits), MIRRORED, honest).0, "the kernel knows of none: nor may the peer");
    }
}

/// The bytes that passed can be guessed, and the victim's own kernel knows nothing of a peer in another kernel.
#[test]
fn s6_end_in_another_kernel_proves_itself_by_sequence_numbers_or_not_at_all() {
    let elsewhere = |waits| Play { elsewhere: true, ..Play::new(waits) };
    for waits in BOTH {
        let (joined, reason) = tried(elsewhere(waits), None, honest);
        assert_eq!((joined, reason), (false, Some(Reason::Sequences)), "waits: {waits}");
        // Sequence numbers prove the connection, but not where its addresses are: these addresses exist in every
        // kernel.
        for addresses in
            [["127.0.0.1:80", "127.0.0.1:4000"], ["169.254.1.1:80", "169.254.1.2:4000"], ["[::1]:80", "[::1]:4000"]]
        {
            let play = Play { sequences: NUMBERS, addresses, ..elsewhere(waits) };
            let (joined, reason) = tried(play, MIRRORED, honest);
            assert_eq!((joined, reason), (false, Some(Reason::LocalAddress)), "waits: {waits}, {addresses:?}");
        }
    }
}

/// Some backends have one doorbell for all connections of a session. It is used where a segment comes without one.
#[test]
fn s18_segment_of_another_kernel_needs_no_doorbell_of_its_own_where_the_session_has_one() {
    for waits in BOTH {
        for shares in BOTH {
            let shared = Arc::new(AtomicU32::new(0));
            let play = Play {
                elsewhere: true,
                sequences: NUMBERS,
                shared: shares.then(|| Arc::clone(&shared)),
                ..Play::new(waits)
            };
            let victim = Victim::playing(play.clone());
            let mut liar = Liar::meet(&victim, waits, true);
            liar.doorbell = None;
            let joined = convince_as(&mut liar, &victim, MIRRORED, honest);
            assert_eq!(joined, shares, "waits: {waits}, {:?}", victim.connection.reason());
            // A message without a segment needs none.
            let [asked, taken] = [&*shared, &play.taken[1]].map(|count| count.load(Ordering::SeqCst));
            liar.send_message(&Message::Refuse { to: 1, reason: 1 }, None, &mut None);
            victim.process.exchange.mark_notified();
            victim.process.before_sleep();
            assert_eq!(play.taken[1].load(Ordering::SeqCst), taken + 1, "waits: {waits}, shares: {shares}");
            assert_eq!(shared.load(Ordering::SeqCst), asked, "waits: {waits}, shares: {shares}");
            assert_eq!(asked > 0, shares, "waits: {waits}");
        }
    }
}

/// Returns the histories and the claims of the proposer and of the answerer of one connection.
fn two_ends() -> ([History; 2], [Claim; 2]) {
    let mut histories = [History::default(), History::default()];
    histories[0].sent(0, SENT);
    histories[0].received(0, RECEIVED);
    histories[1].sent(0, RECEIVED);
    histories[1].received(0, SENT);
    let tuple = Tuple::new("10.0.0.2:4000".parse().unwrap(), "10.0.0.1:80".parse().unwrap());
    let claim = |id: u64, known: [u16; 2]| Claim {
        id,
        cookie: 7,
        addresses: [tuple.own, tuple.peer],
        known,
        counts: Counts::default(),
        nonce: [id as u8; 16],
    };
    let claims = [claim(0x11, histories[0].known()), claim(0x22, histories[1].known())];
    (histories, claims)
}

/// Returns `tag` with the same bit inverted in the bytes `at`.
fn flipped(mut tag: [u8; 32], at: &[usize]) -> [u8; 32] {
    at.iter().for_each(|at| tag[*at] ^= 4);
    tag
}

#[test]
fn s6_confirmation_that_differs_anywhere_is_refused() {
    let ([mine, theirs], [proposal, answer]) = two_ends();
    let claims = [&proposal, &answer];
    let answered = proof::answer(&theirs, None, &proposal, &answer, &answer).unwrap();
    let covered = [answered.proposer, answered.answerer];
    let right = proof::prove(ProofSide::Proposer, &mine, None, claims, covered).unwrap();
    assert_eq!(proof::check(&theirs, None, claims, &answered, &right), Ok(()), "canary");
    for wrong in [
        Proof { proposer: right.proposer - 1, ..right },
        Proof { answerer: right.answerer - 1, ..right },
        Proof { proposer: 0, answerer: 0, ..right },
        Proof { tag: flipped(right.tag, &[0]), ..right },
        // The same bit is inverted twice: one change does not compensate for the other.
        Proof { tag: flipped(right.tag, &[3, 17]), ..right },
    ] {
        assert_eq!(proof::check(&theirs, None, claims, &answered, &wrong), Err(Reason::Hash), "{wrong:?}");
    }
}

/// Two endpoints of this library would agree on any order of the fields; another implementation agrees only on this
/// one.
#[test]
fn s6_tag_is_the_hash_of_what_the_specification_says_in_its_order() {
    let ([mine, theirs], [proposal, answer]) = two_ends();
    let covered = [SENT.len() as u32, RECEIVED.len() as u32];
    let [own, peers]: [u32; 2] = [0x0102_0304, 0xa0b0_c0d0];
    for numbers in [None, Some([own, peers])] {
        for (side, history) in [(ProofSide::Proposer, &mine), (ProofSide::Answerer, &theirs)] {
            let mut text = vec![if side == ProofSide::Proposer { 1 } else { 2 }];
            for claim in [&proposal, &answer] {
                text.extend(claim.nonce);
                text.extend(claim.id.to_le_bytes());
            }
            text.push(u8::from(numbers.is_some()));
            // The proposer's number comes first, whichever side makes the tag. Each endpoint holds its own number
            // first.
            numbers.unwrap_or_default().into_iter().for_each(|number| text.extend(number.to_le_bytes()));
            for bytes in [SENT, RECEIVED] {
                text.extend((bytes.len() as u64).to_le_bytes());
                text.extend(bytes);
            }
            let secret = numbers.map(|[own, peers]| match side {
                ProofSide::Proposer => [own, peers],
                ProofSide::Answerer => [peers, own],
            });
            let proof = proof::prove(side, history, secret, [&proposal, &answer], covered).unwrap();
            assert_eq!(proof.tag[..], Sha256::digest(&text)[..], "{side:?}, {numbers:?}");
        }
    }
}

#[test]
fn s6_folder_may_ask_for_sequence_numbers() {
    for waits in BOTH {
        let play = |sequences| Play { sequences, configuration: "sequence-numbers = required", ..Play::new(waits) };
        assert_eq!(tried(play(None), None, honest), (false, Some(Reason::Sequences)), "waits: {waits}");
        assert!(tried(play(NUMBERS), MIRRORED, honest).0);
    }
}

#[test]
fn s7_ends_whose_addresses_are_translated_meet_by_sequence_numbers_only_where_the_folder_says_so() {
    // Either endpoint may be the one that waits.
    for [own, peer] in [[7, 9], [9, 7]] {
        let numbers = Some([own, peer]);
        let play = |configuration, sequences| Play { configuration, sequences, ..Play::new(true) };
        let met = Tuple::of_sequences([own, peer]);
        let mut victim = Victim::playing(play("translated = yes", numbers));
        victim.tuple = met;
        assert!(convince(&victim, Some([peer, own]), honest), "{own} and {peer}");
        // The claims say that both know the numbers; the numbers still have to be proved.
        let mut victim = Victim::playing(play("translated = yes", numbers));
        victim.tuple = met;
        assert!(!convince(&victim, None, honest), "{own} and {peer}");
        for (configuration, sequences) in [("translated = no", numbers), ("", numbers), ("translated = yes", None)] {
            let mut victim = Victim::playing(play(configuration, sequences));
            victim.call();
            assert!(victim.claim_file("waiting").exists(), "{configuration:?}: by its own addresses");
            victim.tuple = met;
            assert!(!victim.claim_file("waiting").exists(), "{configuration:?}");
        }
    }
}

#[test]
fn s6_proof_over_less_than_was_counted_is_refused() {
    for waits in BOTH {
        for known in [[0, 0], [0, SENT.len() as u16], [RECEIVED.len() as u16, 0], [8, 7]] {
            let (joined, _) = tried(Play::new(waits), None, |claim| claim.known = known);
            assert!(!joined, "waits: {waits}, {known:?}");
        }
    }
}

#[test]
fn s6_end_waits_until_it_has_read_what_its_kernel_received() {
    let late = b"and a line that its program reads later";
    for waits in BOTH {
        let play = Play::new(waits);
        play.counts.lock().unwrap().received += late.len() as u64;
        let victim = Victim::playing(play);
        if waits {
            let mut liar = Liar::meet(&victim, true, true);
            liar.history.sent(RECEIVED.len() as u64, late);
            liar.claim.known = liar.history.known();
            liar.claim.counts.written += late.len() as u64;
            liar.claim.counts.acked += late.len() as u64;
            liar.send_message(&Message::Propose(liar.claim), None, &mut None);
            for _ in 0..20 {
                victim.call();
                assert_eq!(liar.receive_message(), None, "answered over less than it has");
            }
            read(&victim.connection, late);
            victim.call();
            assert!(matches!(liar.receive_message(), Some(Message::Answer { .. })));
        } else {
            let mut listener = LocalDomain::in_folder(victim.folder.path()).listen(victim::SERVICE).unwrap();
            fs::create_dir(victim.folder.path().join("claims")).unwrap();
            fs::write(victim.claim_file("waiting"), victim::SERVICE).unwrap();
            (0..20).for_each(|_| victim.call());
            assert!(listener.accept().unwrap().is_none(), "proposed over less than it has");
            read(&victim.connection, late);
            victim.call();
            assert!(listener.accept().unwrap().is_some());
        }
    }
}

fn read(connection: &Connection, bytes: &[u8]) {
    let direction = tombolo_sockets::connection::Direction::In;
    connection.plain(direction).unwrap().moved(bytes.len(), [bytes].into_iter());
}

#[test]
fn s6_end_vouches_for_what_its_kernel_received_and_its_program_has_not_read() {
    let unread = b"and an answer that its program leaves where it is";
    for (waits, read_meanwhile) in [(true, false), (false, false), (true, true)] {
        let play = Play { read_meanwhile, ..Play::new(waits) };
        play.counts.lock().unwrap().received += unread.len() as u64;
        play.unread.lock().unwrap().extend(unread);
        let victim = Victim::playing(play);
        let mut liar = Liar::meet(&victim, waits, true);
        liar.history.sent(RECEIVED.len() as u64, unread);
        liar.claim.known = liar.history.known();
        liar.claim.counts.written += unread.len() as u64;
        liar.claim.counts.acked += unread.len() as u64;
        let all = (RECEIVED.len() + unread.len()) as u16;
        let claim = if waits {
            liar.send_message(&Message::Propose(liar.claim), None, &mut None);
            victim.call();
            liar.receive_message()
                .map(|heard| if let Message::Answer { claim, .. } = heard { claim } else { panic!("{heard:?}") })
        } else {
            liar.receive_message()
                .map(|heard| if let Message::Propose(claim) = heard { claim } else { panic!("{heard:?}") })
        };
        // If another thread read while the library looked, the position may be further on.
        let known = (!read_meanwhile).then_some(all);
        assert_eq!(claim.map(|claim| claim.known[1]), known, "waits: {waits}, read meanwhile: {read_meanwhile}");
    }
}

#[test]
fn s6_nonces_are_new_for_each_claim() {
    let mut seen = Vec::new();
    for _ in 0..4 {
        let victim = Victim::new(false);
        let mut liar = Liar::meet(&victim, false, true);
        let Some(Message::Propose(claim)) = liar.receive_message() else { panic!("it proposes") };
        seen.push((claim.nonce, claim.id));
        let victim = Victim::new(true);
        let mut liar = Liar::meet(&victim, true, true);
        liar.send_message(&Message::Propose(liar.claim), None, &mut None);
        victim.call();
        let Some(Message::Answer { claim, .. }) = liar.receive_message() else { panic!("it answers") };
        seen.push((claim.nonce, claim.id));
    }
    for at in 0..seen.len() {
        assert!(seen[..at].iter().all(|(nonce, id)| *nonce != seen[at].0 && *id != seen[at].1), "{seen:?}");
        assert_ne!(seen[at].0, [0; 16]);
    }
}

#[test]
fn s6_second_proposal_for_a_connection_has_no_answer() {
    let victim = Victim::new(true);
    let mut first = Liar::meet(&victim, true, false);
    first.send_message(&Message::Propose(first.claim), None, &mut None);
    victim.call();
    assert!(matches!(first.receive_message(), Some(Message::Answer { .. })));
    for _ in 0..3 {
        first.send_message(&Message::Propose(first.claim), None, &mut None);
        victim.call();
        assert!(matches!(first.receive_message(), Some(Message::Refuse { .. })), "another tag to compare with");
    }
}

#[test]
fn s6_second_proposal_before_the_first_has_its_answer_is_refused() {
    let late = b"and a line that its program reads later";
    let play = Play::new(true);
    play.counts.lock().unwrap().received += late.len() as u64;
    let victim = Victim::playing(play);
    let mut liar = Liar::meet(&victim, true, true);
    liar.history.sent(RECEIVED.len() as u64, late);
    liar.claim.known = liar.history.known();
    liar.claim.counts.written += late.len() as u64;
    liar.claim.counts.acked += late.len() as u64;
    liar.send_message(&Message::Propose(liar.claim), None, &mut None);
    victim.call();
    assert_eq!(liar.receive_message(), None, "it has not read all yet");
    let other = Claim { id: 0x5678, nonce: [8; 16], ..liar.claim };
    liar.send_message(&Message::Propose(other), None, &mut None);
    victim.call();
    let ambiguous = Reason::Ambiguous as u16;
    assert_eq!(
        liar.receive_message(),
        Some(Message::Refuse { to: other.id, reason: ambiguous }),
        "there is no second try"
    );
    read(&victim.connection, late);
    victim.call();
    let Some(Message::Answer { to, .. }) = liar.receive_message() else { panic!("the first one is answered") };
    assert_eq!(to, liar.claim.id);
}

#[test]
fn s6_end_that_never_reads_what_its_kernel_received_gives_up() {
    let play = Play::new(true);
    play.counts.lock().unwrap().received += 1;
    let victim = Victim::playing(play);
    let mut liar = Liar::meet(&victim, true, true);
    liar.send_message(&Message::Propose(liar.claim), None, &mut None);
    // Later calls check less and less often.
    let waited = (0..600_000).find(|_| {
        victim.process.advance(&victim.connection);
        victim.connection.reason().is_some()
    });
    assert!(waited.is_some_and(|calls| calls > 10_000), "{waited:?}");
    assert_eq!(victim.connection.reason(), Some(Reason::TooLittle));
    assert_eq!(liar.receive_message(), Some(Message::Refuse { to: liar.claim.id, reason: Reason::TooLittle as u16 }));
}

#[test]
fn s6_answer_over_another_link_is_refused() {
    let victim = Victim::new(false);
    let mut liar = Liar::meet(&victim, false, true);
    let Some(Message::Propose(proposal)) = liar.receive_message() else { panic!("it proposes") };
    let covered = victim::both(liar.claim.known, proposal.known);
    let side = ProofSide::Answerer;
    let proof = proof::prove(side, &liar.history, None, [&proposal, &liar.claim], covered).unwrap();
    let answer = Message::Answer { to: proposal.id, claim: liar.claim, proof };
    let service = fs::read_to_string(victim.claim_file("seeking")).unwrap();
    let mut other = LocalDomain::in_folder(victim.folder.path()).connect(&service, Deadline::after(SOON)).unwrap();
    std::mem::swap(&mut liar.link, &mut other);
    liar.send_message(&answer, Some(victim::header(liar.claim.id)), &mut None);
    victim.call();
    assert_eq!(liar.receive_message(), Some(Message::Refuse { to: liar.claim.id, reason: Reason::Ambiguous as u16 }));
    assert_eq!(victim.connection.stage(), Stage::Candidate, "the right one may come yet");
    std::mem::swap(&mut liar.link, &mut other);
    liar.send_message(&answer, Some(victim::header(liar.claim.id)), &mut None);
    victim.call();
    assert_eq!(victim.connection.stage(), Stage::Joined);
}

#[test]
fn s6_confirmation_over_another_link_is_none() {
    let victim = Victim::new(true);
    let mut liar = Liar::meet(&victim, true, true);
    liar.send_message(&Message::Propose(liar.claim), None, &mut None);
    victim.call();
    let Some(Message::Answer { claim: theirs, proof, .. }) = liar.receive_message() else { panic!("it answers") };
    let covered = [proof.proposer, proof.answerer];
    let (side, claims) = (ProofSide::Proposer, [&liar.claim, &theirs]);
    let proof = proof::prove(side, &liar.history, None, claims, covered).unwrap();
    let service = fs::read_to_string(victim.claim_file("waiting")).unwrap();
    let mut other = LocalDomain::in_folder(victim.folder.path()).connect(&service, Deadline::after(SOON)).unwrap();
    other.send(&Message::Confirm { to: theirs.id, proof }.encode(), None).unwrap();
    victim.call();
    assert_eq!(victim.connection.stage(), Stage::Candidate);
    liar.send_message(&Message::Confirm { to: theirs.id, proof }, Some(victim::header(liar.claim.id)), &mut None);
    victim.call();
    assert_eq!(victim.connection.stage(), Stage::Joined);
}
