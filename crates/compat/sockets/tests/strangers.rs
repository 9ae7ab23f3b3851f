// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whom a process talks to and for how long: folders, users, claims, and sessions with strangers, whose number and
//! messages are bounded.

mod victim;

use std::{
    fs,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tombolo_domain::{Deadline, Rendezvous};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::{
    limits::CONTROL_LEN,
    sockets::{Message, RING_MAX},
};
use tombolo_sockets::{Reason, connection::Stage};
use victim::{BOTH, Liar, Play, SOON, Victim, convince, honest};

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
