// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Control paths that are full and sessions that are established late. A call waits for neither, and no connection
//! stays on TCP because of them (S-4).

mod victim;

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use tombolo_layout::sockets::Message;
use tombolo_sockets::connection::{Direction, Stage};
use victim::{Liar, Play, SERVICE, SOON, Victim};

/// Returns the victim's next message to the peer; the victim makes calls until it comes.
fn hear_soon(victim: &Victim, liar: &mut Liar) -> Message {
    let deadline = Instant::now() + SOON;
    loop {
        victim.call();
        if let Some(heard) = liar.receive_message() {
            return heard;
        }
        assert!(
            Instant::now() < deadline,
            "nothing is said any more: {:?}, {:?}",
            victim.connection.stage(),
            victim.connection.reason()
        );
    }
}

/// Makes calls until the victim found no room for a message or has joined.
fn call_until_refused(victim: &Victim, refused: &AtomicU32) {
    let (before, deadline) = (refused.load(Ordering::SeqCst), Instant::now() + SOON);
    while victim.connection.stage() == Stage::Candidate && refused.load(Ordering::SeqCst) == before {
        victim.call();
        assert!(Instant::now() < deadline, "it has nothing to say");
    }
}

/// The control path is full each time that the victim has a message to send.
#[test]
fn s4_path_that_is_full_means_later_in_each_step() {
    for waits in [true, false] {
        let play = Play::new(waits);
        let (full, refused) = (Arc::clone(&play.full), Arc::clone(&play.refused));
        let victim = Victim::playing(play);
        full.store(true, Ordering::SeqCst);
        let mut liar = Liar::meet(&victim, waits, true);
        let mut say = waits.then_some(Message::Propose(liar.claim));
        let mut steps = 0;
        loop {
            full.store(true, Ordering::SeqCst);
            if let Some(message) = say {
                liar.send_message(&message, liar.brings(&message), &mut None);
            }
            call_until_refused(&victim, &refused);
            if victim.connection.stage() == Stage::Joined {
                break;
            }
            assert_eq!(victim.connection.stage(), Stage::Candidate, "waits: {waits}, step {steps}");
            assert!(liar.receive_message().is_none(), "waits: {waits}, step {steps}: it was full");
            full.store(false, Ordering::SeqCst);
            let heard = hear_soon(&victim, &mut liar);
            assert!(!matches!(heard, Message::Refuse { .. }), "waits: {waits}, step {steps}: {heard:?}");
            say = liar.reply(&heard);
            steps += 1;
        }
        // A victim that waits sends its answer, and joins when that is confirmed. A victim that seeks sends a proposal,
        // and a confirmation before it joins.
        assert_eq!(steps, if waits { 1 } else { 2 }, "waits: {waits}");
    }
}

/// Returns a number of messages that exceeds the room of a session's control path: the kernel counts more bytes than
/// this for each.
fn burst() -> usize {
    let room = fs::read_to_string("/proc/sys/net/core/wmem_default").unwrap().trim().parse::<usize>().unwrap();
    (room / 512 + 100).min(20_000)
}

/// A peer that makes no calls for a while is sent messages about more connections than its control path has room for.
#[test]
fn s4_burst_beyond_the_room_of_a_path_arrives_whole_once_the_peer_reads() {
    let connections = burst();
    let mut victim = Victim::new(false);
    let mut liar = Liar::meet(&victim, false, true);
    let mut all = vec![Arc::clone(&victim.connection)];
    while all.len() < connections {
        victim.next();
        fs::write(victim.claim_file("waiting"), SERVICE).unwrap();
        victim.call();
        all.push(Arc::clone(&victim.connection));
    }
    let mut heard = 0;
    let mut hear_all = |liar: &mut Liar| {
        while let Some(message) = liar.receive_message() {
            assert!(matches!(message, Message::Propose(_)), "{message:?}");
            heard += 1;
        }
        heard
    };
    let fitted = hear_all(&mut liar);
    assert!((1..connections).contains(&fitted), "{fitted} of {connections} fit: it was no burst");
    let deadline = Instant::now() + SOON;
    while hear_all(&mut liar) < connections {
        assert!(Instant::now() < deadline, "the rest is not said");
        all.iter().for_each(|connection| victim.process.advance(connection));
    }
    assert!(all.iter().all(|connection| connection.stage() == Stage::Candidate), "one stays on TCP for good");
}

#[test]
fn s4_link_that_takes_its_time_is_asked_for_in_later_calls_and_made_once() {
    let play = Play::new(false);
    let slow = Arc::clone(&play.slow);
    slow.store(20, Ordering::SeqCst);
    let victim = Victim::playing(play);
    let mut liar = Liar::meet(&victim, false, true);
    let proposal = hear_soon(&victim, &mut liar);
    assert_eq!(slow.load(Ordering::SeqCst), 0, "it was there before");
    let reply = liar.reply(&proposal).expect("a proposal");
    liar.send_message(&reply, liar.brings(&reply), &mut None);
    assert!(matches!(hear_soon(&victim, &mut liar), Message::Confirm { .. }));
    assert_eq!(victim.connection.stage(), Stage::Joined);
    assert!(liar.is_called_once(), "a second link was made");
}

/// Where threads contend, no thread allocates memory while it holds the state that all share. A thread that is alone
/// puts nothing off.
#[test]
fn s4_memory_is_made_apart_where_other_threads_begin_too() {
    for (waits, crowded) in [(true, true), (false, true), (true, false), (false, false)] {
        let play = Play::new(waits);
        let (crowd, made) = (Arc::clone(&play.crowd), Arc::clone(&play.made));
        let victim = Victim::playing(play);
        let mut liar = Liar::meet(&victim, waits, true);
        if crowded {
            let other = Victim::begun(&victim.process, !waits, -3);
            crowd.set((Arc::downgrade(&victim.process), other)).unwrap();
        }
        if waits {
            liar.send_message(&Message::Propose(liar.claim), None, &mut None);
        }
        let heard = hear_soon(&victim, &mut liar);
        let reply = liar.reply(&heard).expect("a proposal or an answer");
        liar.send_message(&reply, liar.brings(&reply), &mut None);
        let deadline = Instant::now() + SOON;
        while victim.connection.stage() == Stage::Candidate {
            victim.call();
            assert!(Instant::now() < deadline, "waits: {waits}, crowded: {crowded}: it does not join");
        }
        assert_eq!(victim.connection.stage(), Stage::Joined, "waits: {waits}, crowded: {crowded}");
        let made = [0, 1].map(|how| made[how].load(Ordering::SeqCst));
        assert_eq!(made, if crowded { [0, 1] } else { [1, 0] }, "waits: {waits}, crowded: {crowded}");
    }
}

const TOGETHER: usize = 40;

/// Begins connections of a process one after the other, and returns how many of them are claimed in their first calls.
/// The others are in later ones.
fn count_claimed_at_once(by_rule: bool, is_stopped: bool) -> usize {
    let mut play = Play::new(true);
    play.by_rule = by_rule;
    play.stopped.store(is_stopped, Ordering::SeqCst);
    let enough = vec![7; 64 << 10];
    play.counts.lock().unwrap().written += enough.len() as u64;
    let mut victim = Victim::playing(play);
    let mut all = Vec::new();
    let mut claimed = 0;
    for _ in 0..TOGETHER {
        victim.connection.plain(Direction::Out).unwrap().moved(enough.len(), [&enough[..]].into_iter());
        (0..4).for_each(|_| victim.call());
        claimed += usize::from(victim.claim_file("waiting").exists());
        all.push((Arc::clone(&victim.connection), victim.claim_file("waiting")));
        victim.next();
    }
    let deadline = Instant::now() + SOON;
    while let Some((connection, _)) = all.iter().find(|(_, claim)| !claim.exists()) {
        victim.process.advance(connection);
        assert!(Instant::now() < deadline, "one is put off for good");
    }
    claimed
}

/// A process that other programs stop while it joins gets on with its requests, over TCP. Where it is not stopped, or
/// the user said when to join, nothing is put off (ADR 0100).
#[test]
fn s4_connections_that_begin_together_are_claimed_in_turn_once_a_step_was_stopped() {
    assert!(count_claimed_at_once(true, true) < TOGETHER);
    assert_eq!(count_claimed_at_once(false, true), TOGETHER);
    // Other tests may stop this one.
    assert!((0..10).any(|_| count_claimed_at_once(true, false) == TOGETHER), "nothing stopped it");
}
