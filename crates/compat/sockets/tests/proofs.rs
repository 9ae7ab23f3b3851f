// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that an endpoint makes before it trusts another. In each case here one rule alone decides, and all else is in
//! order.

mod victim;

use std::{
    fs,
    io::{IoSlice, IoSliceMut},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::event::epoll;
use sha2::{Digest, Sha256};
use tombolo_domain::{Deadline, Rendezvous};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::{
    limits::CONTROL_LEN,
    sockets::{BOUNDARY, Claim, Counts, FOLLOWED, Followed, MOVES, Message, Proof, RING_MAX},
};
use tombolo_mem::OwnWord;
use tombolo_sockets::{
    Read, Reason,
    connection::{Connection, ReturnStage, Stage},
    proof::{self, History, ProofSide, Secret},
    switch::Transport,
    tuple::Tuple,
};
use victim::{Liar, Play, RECEIVED, SENT, SOON, Victim, convince, convince_as, counts, talk};

const BOTH: [bool; 2] = [true, false];
const NUMBERS: Secret = Some([0x0102_0304, 0xa0b0_c0d0]);
const MIRRORED: Secret = Some([0xa0b0_c0d0, 0x0102_0304]);

fn honest(_: &mut Claim) {}

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

/// Sends a message over a link on which nothing is joined. Returns whether the victim then ended the link.
fn is_ended_by(victim: &Victim, liar: &mut Liar, message: &Message, segment: Option<usize>) -> bool {
    let kept = segment.map(|len| liar.link.allocate(len).unwrap());
    liar.link.send(&message.encode(), kept.as_ref().map(|(_, offer)| offer)).unwrap();
    victim.process.exchange.mark_notified();
    victim.process.before_sleep();
    matches!(liar.link.recv(1 << 20), Err(tombolo_domain::Error::PeerGone))
}

#[test]
fn s7_link_over_which_nothing_was_joined_ends_with_the_257th_message_that_leads_to_nothing() {
    let victim = Victim::new(true);
    let mut liar = Liar::meet(&victim, true, true);
    for count in 1..=257 {
        let is_ended = is_ended_by(&victim, &mut liar, &Message::Refuse { to: 1, reason: 1 }, None);
        assert_eq!(is_ended, count == 257, "{count} messages");
    }
}

#[test]
fn s20_segment_larger_than_the_largest_ring_ends_the_link() {
    let largest = (CONTROL_LEN + RING_MAX) as usize;
    for (len, ends) in [(largest, false), (largest + 4096, true)] {
        let victim = Victim::new(true);
        let mut liar = Liar::meet(&victim, true, true);
        let ring = Message::Ring { to: 1, generation: 1 };
        assert_eq!(is_ended_by(&victim, &mut liar, &ring, Some(len)), ends, "{len} bytes");
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
fn s4_connections_that_wait_for_their_peers_are_all_found() {
    let mut victim = Victim::new(true);
    let mut waiting = Vec::new();
    for _ in 0..30 {
        victim.call();
        waiting.push((victim.tuple, Arc::clone(&victim.connection)));
        victim.next();
    }
    for (tuple, connection) in waiting {
        (victim.tuple, victim.connection) = (tuple, connection);
        assert!(convince(&victim, None, honest), "{tuple:?}");
    }
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

#[test]
fn s7_peer_of_another_user_is_not_talked_to() {
    let own = rustix::process::geteuid().as_raw();
    let process = Some(std::process::id());
    for waits in BOTH {
        for (user, configuration, joins) in [
            (Some(own), "", true),
            (Some(own + 1), "", false),
            (None, "", false),
            (Some(own + 1), "users = 4000000000", false),
            (Some(4_000_000_000), "users = 4000000000", true),
            (Some(own + 1), "users = any", true),
        ] {
            let play = Play { peer: Some((user, process)), configuration, ..Play::new(waits) };
            let victim = Victim::playing(play);
            if joins {
                assert!(convince(&victim, None, honest), "waits: {waits}, {user:?}, {configuration}");
                continue;
            }
            let mut liar = Liar::meet(&victim, waits, true);
            liar.send_message(&Message::Propose(liar.claim), None, &mut None);
            (0..3).for_each(|_| victim.call());
            assert_eq!(liar.receive_message(), None, "waits: {waits}, {user:?}, {configuration}");
            assert_ne!(victim.connection.stage(), Stage::Joined);
        }
    }
}

#[test]
fn s7_folder_that_is_not_there_is_told_from_one_that_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let victim = Victim::new(true);
    let hidden = victim.folder.path().with_extension("elsewhere");
    fs::rename(victim.folder.path(), &hidden).unwrap();
    victim.call();
    fs::rename(hidden, victim.folder.path()).unwrap();
    assert_eq!(victim.connection.reason(), Some(Reason::Unreachable));
    let victim = Victim::new(true);
    fs::set_permissions(victim.folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    victim.call();
    assert_eq!(victim.connection.reason(), Some(Reason::Folder));
}

#[test]
fn s7_folder_that_others_may_write_to_by_now_is_refused_to_the_next_connection() {
    use std::os::unix::fs::PermissionsExt;
    let mut victim = Victim::new(true);
    victim.call();
    assert!(victim.claim_file("waiting").exists());
    fs::set_permissions(victim.folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    victim.next();
    victim.call();
    assert_eq!(victim.connection.reason(), Some(Reason::Folder));
    assert!(!victim.claim_file("waiting").exists());
}

#[test]
fn s7_process_that_becomes_another_user_is_asked_anew_whether_the_folder_is_its_own() {
    use std::{io::Write, os::unix::fs::PermissionsExt};
    if !rustix::process::geteuid().is_root() {
        let test = "s7_process_that_becomes_another_user_is_asked_anew_whether_the_folder_is_its_own";
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let mut victim = Victim::new(true);
    fs::set_permissions(victim.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    victim.call();
    fs::set_permissions(victim.folder.path().join("claims"), fs::Permissions::from_mode(0o755)).unwrap();
    victim.next();
    victim.call();
    assert_eq!(victim.connection.reason(), None, "canary");
    victim.next();
    // Changes the user of this thread alone, and permanently: the thread ends with the test.
    let [root, nobody] = [0, 65534].map(rustix::fs::Uid::from_raw);
    rustix::thread::set_thread_res_uid(root, nobody, root).unwrap();
    victim.call();
    rustix::thread::set_thread_res_uid(root, root, root).unwrap();
    assert_eq!(victim.connection.reason(), Some(Reason::Folder));
}

#[test]
fn s7_contested_connection_is_nobodys() {
    let victim = Victim::new(false);
    let mut listener = LocalDomain::in_folder(victim.folder.path()).listen(victim::SERVICE).unwrap();
    fs::create_dir(victim.folder.path().join("claims")).unwrap();
    fs::write(victim.claim_file("waiting"), victim::SERVICE).unwrap();
    fs::write(victim.claim_file("contested"), "").unwrap();
    victim.call();
    assert!(listener.accept().unwrap().is_none());
    assert_eq!(victim.connection.reason(), Some(Reason::Ambiguous));
    let victim = Victim::new(true);
    victim.call();
    fs::write(victim.claim_file("contested"), "").unwrap();
    assert!(!convince(&victim, None, honest));
    assert_eq!(victim.connection.reason(), Some(Reason::Ambiguous));
    // An endpoint that finds the claim of a live process contests it.
    let victim = Victim::new(true);
    let _lives = LocalDomain::in_folder(victim.folder.path()).listen(victim::SERVICE).unwrap();
    fs::create_dir(victim.folder.path().join("claims")).unwrap();
    fs::write(victim.claim_file("waiting"), victim::SERVICE).unwrap();
    victim.call();
    assert_eq!(victim.connection.reason(), Some(Reason::Ambiguous));
    assert!(victim.claim_file("contested").exists());
}

#[test]
fn s4_each_process_is_proposed_to_over_a_session_of_its_own() {
    let mut victim = Victim::new(false);
    let domain = LocalDomain::in_folder(victim.folder.path());
    fs::create_dir(victim.folder.path().join("claims")).unwrap();
    let mut sessions = Vec::new();
    for service in [victim::SERVICE, "sockets-fedcba9876543210"] {
        let mut listener = domain.listen(service).unwrap();
        fs::write(victim.claim_file("waiting"), service).unwrap();
        let session = (0..1000).find_map(|_| {
            victim.call();
            listener.accept().unwrap()
        });
        sessions.push((session.unwrap_or_else(|| panic!("{service} is not called")), listener));
        victim.next();
    }
}

#[test]
fn s7_claim_of_the_dead_is_taken_over() {
    let victim = Victim::new(true);
    fs::create_dir(victim.folder.path().join("claims")).unwrap();
    fs::write(victim.claim_file("waiting"), victim::SERVICE).unwrap();
    victim.call();
    assert_eq!(victim.connection.reason(), None);
    assert_ne!(fs::read_to_string(victim.claim_file("waiting")).unwrap(), victim::SERVICE);
    assert!(!victim.claim_file("contested").exists());
    let victim = Victim::new(false);
    fs::create_dir(victim.folder.path().join("claims")).unwrap();
    fs::write(victim.claim_file("waiting"), victim::SERVICE).unwrap();
    victim.call();
    assert!(!victim.claim_file("waiting").exists(), "one that nobody stands behind is taken away");
    assert_eq!(victim.connection.reason(), None);
}

#[test]
fn s7_knocks_and_messages_without_end_cost_a_bounded_time_and_number() {
    let mut victim = Victim::new(true);
    victim.call();
    let service = fs::read_to_string(victim.claim_file("waiting")).unwrap();
    let domain = LocalDomain::in_folder(victim.folder.path());
    let files = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = files();
    // The callers' sides are descriptors of this process as well. They are closed at once, or kept by the victim.
    for _ in 0..600 {
        drop(domain.connect(&service, Deadline::after(SOON)));
    }
    // Few calls, because a connection that has made many calls checks less often.
    (0..20).for_each(|_| victim.call());
    // Other tests of this process open and close descriptors meanwhile.
    let deadline = Instant::now() + Duration::from_secs(20);
    while files() >= before + 20 {
        assert!(Instant::now() < deadline, "who has gone is kept");
        std::thread::yield_now();
    }
    let mut callers = Vec::new();
    for _ in 0..400 {
        callers.push(domain.connect(&service, Deadline::after(SOON)).unwrap());
        if callers.len() % 50 == 0 {
            victim.call();
        }
    }
    (0..10).for_each(|_| victim.call());
    let gone = callers.iter().filter(|link| link.liveness() == tombolo_domain::Liveness::ProcessGone).count();
    assert!((100..400).contains(&gone), "{gone} of 400 who say nothing had to go");
    // The victim reads a limited number of messages per call from a peer that sends without end, and later drops it.
    let mut liar = callers.pop().unwrap();
    let nothing = Message::Refuse { to: 7, reason: 1 }.encode();
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut sent = 0;
    while liar.liveness() != tombolo_domain::Liveness::ProcessGone {
        assert!(Instant::now() < deadline, "it is heard for ever: {sent}");
        sent += u32::from(liar.send(&nothing, None).is_ok());
        if sent % 10 == 0 {
            victim.call();
        }
    }
    assert!(sent < 2000, "{sent}");
    // An honest peer is joined all the same.
    victim.next();
    assert!(convince(&victim, None, honest));
}

/// No call of a connection that is joined, or on TCP permanently, notices such strangers.
#[test]
fn s7_strangers_that_have_gone_are_forgotten_by_a_program_that_only_waits() {
    let victim = Victim::new(true);
    victim.call();
    let service = fs::read_to_string(victim.claim_file("waiting")).unwrap();
    let domain = LocalDomain::in_folder(victim.folder.path());
    let callers: Vec<_> = (0..20).map(|_| domain.connect(&service, Deadline::after(SOON)).unwrap()).collect();
    victim.call();
    let kept = || callers.iter().filter(|link| link.liveness() != tombolo_domain::Liveness::ProcessGone).count();
    // They close only their sending direction.
    callers.iter().for_each(|link| rustix::net::shutdown(link.fd(), rustix::net::Shutdown::Write).unwrap());
    assert_eq!(kept(), 20);
    let deadline = Instant::now() + SOON;
    while kept() > 0 {
        assert!(Instant::now() < deadline, "{} of those who have gone are kept", kept());
        victim.process.before_sleep();
        std::thread::yield_now();
    }
}

#[test]
fn s7_one_call_takes_64_knocks_and_64_messages_and_the_rest_comes_in_later_ones() {
    let play = Play::new(true);
    let victim = Victim::playing(play.clone());
    victim.call();
    let service = fs::read_to_string(victim.claim_file("waiting")).unwrap();
    let domain = LocalDomain::in_folder(victim.folder.path());
    // Returns how much each call took, until the sum reaches `all`.
    let calls_until = |kind: usize, all: u32| {
        let (mut each, deadline) = (Vec::new(), Instant::now() + SOON);
        while each.iter().sum::<u32>() < all {
            assert!(Instant::now() < deadline, "{each:?} of {all}");
            play.taken[kind].store(0, Ordering::SeqCst);
            victim.call();
            each.push(play.taken[kind].load(Ordering::SeqCst));
        }
        each
    };
    let callers: Vec<_> = (0..150).map(|_| domain.connect(&service, Deadline::after(SOON)).unwrap()).collect();
    let each = calls_until(0, 150);
    assert!(each.len() > 2 && each.iter().all(|taken| *taken <= 64), "{each:?}");
    let mut liar = callers.into_iter().next().unwrap();
    let nothing = Message::Refuse { to: 7, reason: 1 }.encode();
    (0..150).for_each(|nth| liar.send(&nothing, None).unwrap_or_else(|error| panic!("{nth}: {error}")));
    let each = calls_until(1, 150);
    assert!(each.len() > 2 && each.iter().all(|taken| *taken <= 64), "{each:?}");
}

#[test]
fn s7_lock_that_a_member_holds_stops_nobody() {
    let victim = Victim::new(true);
    let folder = fs::File::open(victim.folder.path()).unwrap();
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let since = Instant::now();
    victim.call();
    assert!(since.elapsed() < Duration::from_secs(1));
    assert!(victim.claim_file("waiting").exists());
}

/// Returns a victim whose socket is shared with another process, as after a fork, and that process.
fn shared() -> (Victim, std::process::Child) {
    let victim = Victim::new(true);
    let other = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let all = [Arc::clone(&victim.connection)];
    let instances = tombolo_sockets::Instances::list();
    victim.process.before_fork(&all, &instances).unwrap().parent(Some(other.id()));
    (victim, other)
}

fn kill(mut child: std::process::Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn r26_connection_whose_other_process_was_killed_is_claimed_by_the_one_that_is_left() {
    let (victim, other) = shared();
    let calls = |count: u32| (0..count).for_each(|_| victim.call());
    kill(other);
    calls(40);
    assert!(!victim.claim_file("waiting").exists(), "not each call looks for the dead");
    calls(40);
    assert!(victim.claim_file("waiting").exists());
    // However late the other process dies.
    for before in [80, 100, 2000] {
        let (victim, other) = shared();
        (0..before).for_each(|_| victim.call());
        assert!(!victim.claim_file("waiting").exists(), "canary: both live");
        kill(other);
        (0..200).for_each(|_| victim.call());
        assert!(victim.claim_file("waiting").exists(), "killed after {before} calls");
    }
}

// ---- joined

/// Returns a victim that is joined, its peer, and the play that both follow.
fn joined() -> (Victim, Liar, Play) {
    let play = Play::new(true);
    let victim = Victim::playing(play.clone());
    let (liar, joined) = talk(&victim, true, true, None);
    assert!(joined);
    (victim, liar, play)
}

#[test]
fn s5_bytes_that_went_past_the_library_keep_both_directions_on_tcp() {
    let receive = |victim: &Victim| {
        let _ = victim.connection.for_call(&victim.process, -1).recv(&mut [IoSliceMut::new(&mut [0; 9])], Read::Take);
    };
    // Receiving: the library has counted fewer bytes than the kernel handed out.
    for (more, ready) in [(0, true), (1, false)] {
        let (victim, _liar, play) = joined();
        play.counts.lock().unwrap().received += more;
        receive(&victim);
        let left = victim.connection.reason() == Some(Reason::Bypassed);
        assert_eq!(!left, ready, "{more}");
    }
    // Sending: the peer is ready, and the library has counted fewer bytes than the kernel took.
    for (more, moves) in [(0, true), (1, false)] {
        let (victim, liar, play) = joined();
        play.counts.lock().unwrap().written += more;
        let followed = Followed { moves: 0, ready: true, leave: false }.encode();
        liar.control.as_ref().unwrap().word(tombolo_layout::sockets::FOLLOWED).store_release(followed);
        let _ = victim.connection.for_call(&victim.process, -1).send(&[IoSlice::new(b"into the pipe")]);
        let left = victim.connection.reason() == Some(Reason::Bypassed);
        assert_eq!(!left, moves, "{more}");
        let transport = victim.connection.transports()[0];
        assert_eq!(transport == tombolo_sockets::switch::Transport::Pipe, moves);
    }
}

#[test]
fn s3_boundary_behind_what_was_read_ends_the_stream() {
    let read = RECEIVED.len() as u64;
    for (boundary, fits) in [(0, false), (read - 1, false), (read, true)] {
        let (victim, liar, _) = joined();
        let receive =
            || victim.connection.for_call(&victim.process, -1).recv(&mut [IoSliceMut::new(&mut [0; 9])], Read::Take);
        assert_eq!(receive(), Err(rustix::io::Errno::AGAIN));
        let control = liar.control.as_ref().unwrap();
        control.word(BOUNDARY).store_release(boundary);
        control.word(MOVES).store_release(1);
        let wanted = if fits { rustix::io::Errno::AGAIN } else { rustix::io::Errno::CONNRESET };
        assert_eq!(receive(), Err(wanted), "{boundary}");
    }
}

/// Bytes that follow in the pipe would be sent a second time, over TCP.
#[test]
fn s2_sender_of_whom_bytes_were_recalled_never_goes_back_to_the_pipe() {
    for recalls in [false, true] {
        let (victim, liar, _) = joined();
        // TCP has no room for any byte.
        let send_after = |moves, ready, leave| {
            let word = Followed { moves, ready, leave }.encode();
            liar.control.as_ref().unwrap().word(FOLLOWED).store_release(word);
            let _ = victim.connection.for_call(&victim.process, -1).send(&[IoSlice::new(b"twelve bytes")]);
            victim.connection.transports()[0]
        };
        assert_eq!(send_after(0, true, false), Transport::Pipe);
        assert_eq!(send_after(1, recalls, true), Transport::Tcp);
        assert_eq!(send_after(2, true, false), if recalls { Transport::Tcp } else { Transport::Pipe });
    }
}

/// Returns a function that reports whether `liar`'s doorbell was notified since the function was last called.
fn watch_doorbell(liar: &Liar) -> impl Fn() -> bool {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let edges = epoll::EventFlags::OUT | epoll::EventFlags::ET;
    epoll::add(&epoll, liar.doorbell.as_ref().unwrap(), epoll::EventData::new_u64(0), edges).unwrap();
    let was_notified = move || {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        !epoll::wait(&epoll, &mut [const { std::mem::MaybeUninit::uninit() }; 2], Some(&now)).unwrap().0.is_empty()
    };
    was_notified();
    was_notified
}

/// A waiter of the peer process for this connection wakes, looks again and moves.
#[test]
fn s2_s13_receiver_that_asks_for_tcp_in_a_read_notifies_its_peer_once() {
    let (victim, liar, _) = joined();
    let was_notified = watch_doorbell(&liar);
    let read_and_check = || {
        let call = victim.connection.for_call(&victim.process, -1);
        assert_eq!(call.recv(&mut [IoSliceMut::new(&mut [0; 9])], Read::Take), Err(rustix::io::Errno::AGAIN));
        was_notified()
    };
    assert!(!read_and_check());
    victim.connection.leave(Reason::Usage);
    assert!(read_and_check());
    assert!(!read_and_check(), "it was asked for");
}

/// Returns a victim that has both directions in pipes. Its peer has then moved its sending direction to TCP, at the end
/// of all that it sent.
fn left_in_pipes() -> (Victim, Liar) {
    let (victim, liar, _) = joined();
    let control = liar.control.as_ref().unwrap();
    let call = || victim.connection.for_call(&victim.process, -1);
    let receive = || call().recv(&mut [IoSliceMut::new(&mut [0; 9])], Read::Take);
    control.word(FOLLOWED).store_release(Followed { moves: 0, ready: true, leave: false }.encode());
    assert_eq!(receive(), Err(rustix::io::Errno::AGAIN));
    assert_eq!(call().send(&[IoSlice::new(b"twelve bytes")]), Ok(12));
    control.word(FOLLOWED).store_release(Followed { moves: 1, ready: false, leave: false }.encode());
    for (moves, boundary) in [(1, RECEIVED.len() as u64), (2, 0)] {
        control.word(BOUNDARY).store_release(boundary);
        control.word(MOVES).store_release(moves);
        if moves == 1 {
            assert_eq!(receive(), Err(rustix::io::Errno::AGAIN));
            assert_eq!(victim.connection.transports(), [Transport::Pipe; 2]);
        }
    }
    (victim, liar)
}

/// An endpoint that wakes with nothing to read or send follows its peer all the same, because the peer may wait for
/// that.
#[test]
fn s19_end_that_wakes_follows_its_peer_out_of_the_pipe() {
    let (victim, _liar) = left_in_pipes();
    assert!(!victim.connection.for_call(&victim.process, -1).send_recalled());
    assert_eq!(victim.connection.transports(), [Transport::Pipe, Transport::Tcp]);
}

/// A waiter of the peer follows then. The victim sends no further notification once it has followed the peer itself.
#[test]
fn s19_end_that_leaves_after_its_peer_notifies_it_of_its_move_once() {
    let (victim, liar) = left_in_pipes();
    let was_notified = watch_doorbell(&liar);
    let retreat_and_check = || {
        let stage = victim.connection.for_call(&victim.process, -1).retreat(Reason::TakenAway);
        assert_eq!((stage, victim.connection.transports()), (ReturnStage::Done, [Transport::Tcp; 2]));
        was_notified()
    };
    assert!(retreat_and_check());
    assert!(!retreat_and_check(), "it has moved");
}
