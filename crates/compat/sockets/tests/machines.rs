// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections between two machines: how many the memory of their link has room for, whose rings grow there, and which
//! memory comes back once they are idle (S-18, S-19, S-20). The backend is that of virtual machines; its broker and
//! devices are test doubles.

mod machine_pair;

use std::{
    io::IoSliceMut,
    sync::Arc,
    time::{Duration, Instant},
};

use machine_pair::{support::Windows, *};
use rustix::io::Errno;
use tombolo_control::WINDOWS_AT;
use tombolo_sockets::{
    Reason,
    connection::{Connection, Stage},
    kernel::Kernel,
    tuple::key_of_sequences,
};

#[test]
fn s20_ring_between_machines_begins_small_grows_for_bulk_and_gives_the_memory_back() {
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.join(0).unwrap();
    assert_eq!(ends.rings(), [FIRST; 2]);
    // More rounds than the link has memory for, if any memory stayed in use.
    for round in 0..4 {
        assert_eq!(ends.be_busy(1), MOST, "round {round}");
        assert_eq!(ends.rings()[0], FIRST, "the other direction has nothing to carry");
        ends.be_idle();
    }
}

#[test]
fn s20_what_grows_leaves_room_for_first_rings_and_what_finds_none_stays_small() {
    let programs = Programs::new(of(WINDOW));
    let mut all: Vec<_> = (0..3).map(|number| programs.join(number).unwrap()).collect();
    let sizes: Vec<_> = all.iter_mut().map(|ends| ends.be_busy(1)).collect();
    assert_eq!(sizes, [MOST, MOST / 2, MOST / 4], "each has what is left");
    let rest: Vec<_> = (3..11).map(|number| programs.join(number).unwrap()).collect();
    assert!(rest.iter().all(|ends| ends.rings() == [FIRST; 2]));
    // An idle connection makes room.
    all[0].be_idle();
    let deadline = Instant::now() + SOON;
    while all[2].be_busy(1) <= MOST / 4 {
        assert!(Instant::now() < deadline, "{:?}", all[2].rings());
    }
}

/// Returns the windows of a region of 16 MiB (V-8).
fn region() -> Windows {
    let mut left = (16 << 20) - PAGE;
    Box::new(move || {
        let window = (left / 8 / PAGE * PAGE).clamp(72 << 10, WINDOW);
        left = left.checked_sub(window)?;
        Some(window)
    })
}

#[test]
fn s18_a_thousand_connections_have_room_in_a_link_of_32_mib_and_what_has_none_says_so() {
    let programs = Programs::new(region());
    let mut all = Vec::new();
    let why = loop {
        match programs.join(all.len() as u16) {
            Ok(ends) => all.push(ends),
            Err(why) => break why,
        }
        assert!(all.len() < 2000, "the memory has no end");
    };
    assert!(all.len() >= 1000, "{} connections over {} sessions", all.len(), programs.world.calls());
    assert_eq!(why, Reason::Resources);
    assert!(programs.log().contains("no memory or descriptors left"), "{}", programs.log());
    // All of them work, the last one as well, and one that is gone makes room for another.
    for ends in &mut all {
        assert!(ends.send(0, 1000) > 0 && ends.receive(0, 1000) > 0);
    }
    all.swap_remove(0);
    programs.join(3000).unwrap();
}

#[test]
fn s19_connection_leaves_a_ring_that_grew_and_one_that_was_offered_with_every_byte() {
    for takes in [true, false] {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(0).unwrap();
        // Once the ring has grown; and once a ring was offered that nobody has taken.
        let deadline = Instant::now() + SOON;
        while ends.rings()[1] == FIRST && (takes || ends.sent[1] < 64 * FIRST) {
            ends.send(1, 64 << 10);
            ends.receive(1, 8 << 10);
            // A reader that finds bytes each time takes no other ring.
            while takes && ends.receive(1, 8 << 10) > 0 {}
            assert!(Instant::now() < deadline);
        }
        ends.send(1, 64 << 10);
        assert!(ends.sent[1] > ends.received[1]);
        programs.world.leave();
        let deadline = Instant::now() + SOON;
        // An endpoint that notices its peer's end first takes that for the reason.
        let is_left = |end: &Arc<Connection>| matches!(end.reason(), Some(Reason::TakenAway | Reason::PeerGone));
        while ends.received[1] < ends.sent[1] || !ends.ends.iter().all(is_left) {
            ends.advance();
            ends.receive(1, 64 << 10);
            ends.call(1).send_recalled();
            assert!(
                Instant::now() < deadline,
                "{} of {} bytes, {:?}",
                ends.received[1],
                ends.sent[1],
                ends.ends.each_ref().map(|end| end.reason())
            );
        }
        // And it continues over TCP.
        assert!(ends.send(1, 100_000) == 100_000 && ends.receive(1, 200_000) == 100_000);
    }
}

/// The endpoint that seeks gets the message first, or the one that waits. Neither has another connection in memory that
/// will be taken away.
#[test]
fn s19_connection_that_begins_after_a_session_is_left_is_joined_over_another() {
    for told in ["b", "a"] {
        let programs = Programs::new(of(WINDOW));
        // The peer makes no call, so the first connection cannot leave, and the session stays.
        let mut first = programs.join(0).unwrap();
        first.move_into_memory();
        programs.world.leave_in(told);
        let mut second = programs.connect(1);
        let (told, deadline) = (usize::from(told == "b"), Instant::now() + SOON);
        while first.ends[told].reason() != Some(Reason::TakenAway) {
            programs.processes[told].advance(&first.ends[told]);
            assert!(Instant::now() < deadline, "nobody heard");
        }
        while second.ends.iter().any(|end| end.stage() != Stage::Joined) {
            second.advance();
            let now = second.ends.each_ref().map(|end| (end.stage(), end.reason()));
            assert!(Instant::now() < deadline && now.iter().all(|(_, reason)| reason.is_none()), "{told}: {now:?}");
        }
        assert_eq!(programs.world.calls(), 2, "{told}: over another session");
        assert!(second.send(0, 1000) == 1000 && second.receive(0, 1000) == 1000);
        assert_eq!(second.ends.each_ref().map(|end| end.reason()), [None; 2]);
    }
}

/// The session ends before an answer was sent.
#[test]
fn s6_connection_whose_session_ends_before_an_answer_is_joined_over_another() {
    let programs = Programs::new(of(WINDOW));
    let ends = programs.connect(0);
    programs.processes[0].advance(&ends.ends[0]);
    let deadline = Instant::now() + SOON;
    while programs.world.calls() == 0 {
        programs.processes[1].advance(&ends.ends[1]);
        assert!(Instant::now() < deadline, "it proposes nothing");
    }
    programs.world.lose_broker();
    while ends.ends.iter().any(|end| end.stage() != Stage::Joined) {
        ends.advance();
        let now = ends.ends.each_ref().map(|end| (end.stage(), end.reason()));
        assert!(Instant::now() < deadline && now.iter().all(|(_, reason)| reason.is_none()), "{now:?}");
    }
}

/// Returns the number of messages that the endpoint in `a` has put into its mailbox (V-4).
fn count_messages(programs: &Programs) -> u64 {
    let mut word = [0; 8];
    rustix::io::pread(&programs.world.memories()[1], &mut word, WINDOWS_AT + 0x100).unwrap();
    u64::from_le_bytes(word)
}

/// The receiver's program makes no call, so the connection cannot leave.
#[test]
fn s19_large_ring_that_is_idle_is_not_made_smaller_once_its_session_is_left() {
    for leaves in [false, true] {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(0).unwrap();
        assert_eq!(ends.be_busy(0), MOST);
        let deadline = Instant::now() + SOON;
        if leaves {
            programs.world.leave_in("a");
            while ends.ends[0].reason() != Some(Reason::TakenAway) {
                programs.processes[0].advance(&ends.ends[0]);
                assert!(Instant::now() < deadline, "nobody heard");
            }
        }
        let (before, began) = (count_messages(&programs), Instant::now());
        while began.elapsed() < Duration::from_secs(6) && count_messages(&programs) == before {
            for at in 0..=usize::from(!leaves) {
                programs.processes[at].before_sleep();
                ends.call(at).arm(true, false);
            }
            std::thread::yield_now();
        }
        assert_eq!(count_messages(&programs) - before, u64::from(!leaves), "leaves: {leaves}");
    }
}

/// The ring was offered before the receiver learnt that the session is left, and it was not taken.
#[test]
fn s19_ring_that_was_offered_is_not_taken_once_its_session_is_left() {
    for leaves in [false, true] {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(0).unwrap();
        let deadline = Instant::now() + SOON;
        while ends.sent[1] < 64 * FIRST {
            ends.send(1, 64 << 10);
            ends.receive(1, 8 << 10);
            assert!(Instant::now() < deadline);
        }
        if leaves {
            programs.world.leave_in("a");
            while ends.ends[0].reason() != Some(Reason::TakenAway) {
                programs.processes[0].advance(&ends.ends[0]);
                assert!(Instant::now() < deadline, "nobody heard");
            }
        }
        // The sender's program makes no call meanwhile, so a ring that was taken would not be used.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(500) {
            ends.receive(1, 64 << 10);
            programs.processes[0].before_sleep();
            ends.call(0).arm(true, false);
        }
        assert_eq!(has_let_go(&programs), leaves, "leaves: {leaves}");
    }
}

/// Returns whether the endpoint in `a` has released a segment of its peer (V-6).
fn has_let_go(programs: &Programs) -> bool {
    let mut words = [0; 64 * 8];
    rustix::io::pread(&programs.world.memories()[1], &mut words, WINDOWS_AT + 0x200).unwrap();
    words != [0; 64 * 8]
}

#[test]
fn d3_what_was_recalled_from_a_ring_whose_memory_went_is_not_sent() {
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.join(0).unwrap();
    assert_eq!(ends.be_busy(1), MOST);
    assert!(ends.send(1, 600_000) == 600_000);
    let wire = programs.kernels[1].of(ends.fd);
    wire.out.lock().unwrap().is_full = true;
    programs.world.leave();
    let deadline = Instant::now() + SOON;
    while !ends.call(1).send_recalled() {
        ends.advance();
        assert!(Instant::now() < deadline, "nothing was recalled");
    }
    // The bytes in the second ring are gone; nothing else has been looked at since.
    rustix::fs::ftruncate(&programs.world.memories()[0], 0).unwrap();
    wire.out.lock().unwrap().is_full = false;
    for _ in 0..10 {
        ends.call(1).send_recalled();
        ends.advance();
    }
    let mut to = [0; 1000];
    let read = [IoSliceMut::new(&mut to)];
    let came = Kernel::recv(&programs.kernels[0], ends.fd, &mut { read }, false);
    assert_eq!(came, Err(Errno::AGAIN), "zeros went to the peer");
}

/// Every kernel has these addresses, so they name no peer in another.
#[test]
fn s18_addresses_that_each_kernel_has_are_looked_for_at_no_broker() {
    for (number, hosts) in
        [["127.0.0.1", "127.0.0.2"], ["::1", "::1"], ["169.254.1.1", "169.254.1.2"], ["fe80::1", "fe80::2"]]
            .into_iter()
            .enumerate()
    {
        let programs = Programs::new(of(WINDOW));
        let ends = programs.connect_between(hosts, number as u16);
        (0..200).for_each(|_| ends.advance());
        let asked = programs.asked.addresses.lock().unwrap().clone();
        assert_eq!((asked, programs.keys.lock().unwrap().len()), (vec![], 0), "{hosts:?}");
        assert_eq!(programs.world.calls(), 0, "{hosts:?}");
    }
}

#[test]
fn s18_service_where_nobody_listens_is_asked_for_anew() {
    let programs = Programs::new(of(WINDOW));
    let ends = programs.connect(7);
    let number = 2 * ends.fd.unsigned_abs();
    let key = key_of_sequences([number, number + 1]).unwrap();
    programs.keys.lock().unwrap().insert(key, "a/sockets-00000000000000de".into());
    let deadline = Instant::now() + SOON;
    while !programs.asked.forgotten.lock().unwrap().contains(&key) {
        programs.processes[1].advance(&ends.ends[1]);
        assert!(Instant::now() < deadline, "what the broker said is believed on: {:?}", ends.ends[1].reason());
    }
    // Once the other endpoint waits, and its peer has found it, both are joined.
    let deadline = Instant::now() + SOON;
    while ends.ends.iter().any(|end| end.stage() != Stage::Joined) {
        ends.advance();
        assert!(Instant::now() < deadline, "{:?}", ends.ends.each_ref().map(|end| (end.stage(), end.reason())));
    }
}
