// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections between two machines that have left their memory (S-19) and are joined again (S-22).

mod machine_pair;

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    process::{Command, Stdio},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use machine_pair::*;
use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};
use tombolo_sockets::{
    Instances, Reason,
    connection::{Direction, Stage},
    switch::Transport,
};

/// Sends in both directions, and does what the programs' calls begin with.
fn go_on(ends: &mut Ends<'_>, most: usize) {
    for from in 0..2 {
        ends.renew(from);
        ends.carry(from, most);
        ends.renew(1 - from);
        ends.take_bytes(from, 2 * most);
    }
}

/// Continues until `there` is true of both endpoints.
fn until(ends: &mut Ends<'_>, most: usize, what: &str, there: impl Fn(&Ends<'_>, usize) -> bool) {
    let deadline = Instant::now() + SOON;
    while !(0..2).all(|at| there(ends, at)) {
        go_on(ends, most);
        let now = ends.ends.each_ref().map(|end| (end.stage(), end.reason(), end.transports()));
        assert!(Instant::now() < deadline, "not {what}: {now:?}");
        std::thread::yield_now();
    }
}

fn is_in_memory(ends: &Ends<'_>, at: usize) -> bool {
    let end = &ends.ends[at];
    end.stage() == Stage::Joined
        && !ends.programs.processes[at].may_return(end)
        && end.transports() == [Transport::Pipe; 2]
}

/// Returns a connection that was joined and is back on TCP: the state before a new connection takes its place.
fn left(programs: &Programs) -> Ends<'_> {
    let mut ends = programs.join(0).unwrap();
    leave(&mut ends);
    ends
}

/// Both endpoints move into memory, and back to TCP when the memory is taken away.
fn leave(ends: &mut Ends<'_>) {
    until(ends, 1000, "in memory", is_in_memory);
    ends.programs.world.leave();
    let deadline = Instant::now() + SOON;
    while !ends.ends.iter().all(|end| end.is_back_on_tcp()) {
        (0..2).for_each(|from| _ = ends.carry(from, 100));
        (0..2).for_each(|from| _ = ends.take_bytes(from, 100_000));
        assert!(Instant::now() < deadline, "it does not leave");
    }
}

/// Continues for longer than the first pause.
fn go_on_for_a_while(ends: &mut Ends<'_>, renew: &[usize]) {
    let begun = Instant::now();
    let before = ends.received;
    while begun.elapsed() < Duration::from_millis(1500) {
        for from in 0..2 {
            renew.iter().for_each(|at| _ = ends.renew(*at));
            ends.carry(from, 100);
            ends.take_bytes(from, 1000);
        }
        std::thread::yield_now();
    }
    assert!((0..2).all(|from| ends.received[from] > before[from]), "bytes go on, over TCP");
}

/// Checks that every byte that was sent arrives, and nothing after it.
fn read_out(ends: &mut Ends<'_>) {
    let deadline = Instant::now() + SOON;
    while ends.received != ends.sent {
        (0..2).for_each(|from| _ = ends.take_bytes(from, 64 << 10));
        (0..2).for_each(|at| _ = ends.call(at).send_recalled());
        assert!(Instant::now() < deadline, "{:?} of {:?}", ends.received, ends.sent);
    }
}

/// Watches what wakes a program that sleeps for these connections: their doorbells, and the control paths to their
/// peers.
fn watch_notifications(all: &[Ends<'_>], at: usize) -> OwnedFd {
    use epoll::{EventData, EventFlags};
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    for ends in all {
        let pipes = &ends.ends[at].pipes;
        let (doorbell, path) = (pipes.doorbell().unwrap(), pipes.path().unwrap());
        let notified = if doorbell.is_shared() { EventFlags::IN } else { EventFlags::OUT };
        epoll::add(&set, doorbell, EventData::new_u64(0), notified | EventFlags::ET).unwrap();
        match epoll::add(&set, path.as_fd(), EventData::new_u64(1), EventFlags::IN | EventFlags::ET) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => panic!("{errno}"),
        }
    }
    set
}

/// No program sends anything or makes a call: each is asleep until it is notified.
#[test]
fn s19_idle_connections_leave_where_each_end_acts_only_when_it_is_notified() {
    for first in 0..2 {
        let programs = Programs::new(of(WINDOW));
        let mut all: Vec<_> = (0..3).map(|number| programs.join(number).unwrap()).collect();
        for ends in &mut all {
            until(ends, 1000, "in memory", is_in_memory);
            read_out(ends);
        }
        let sets = [0, 1].map(|at| watch_notifications(&all, at));
        let is_notified = |at: usize| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut room = [const { MaybeUninit::uninit() }; 8];
            let (notified, _) = epoll::wait(&sets[at], &mut room, Some(&now)).unwrap();
            if notified.iter().any(|event| event.data.u64() == 1) {
                programs.processes[at].exchange.mark_notified();
            }
            !notified.is_empty()
        };
        (0..2).for_each(|at| while is_notified(at) {});
        programs.world.leave();
        let deadline = Instant::now() + Duration::from_secs(5);
        let have_left = |at: usize| all.iter().all(|ends| ends.ends[at].is_back_on_tcp());
        while !(have_left(0) && have_left(1)) {
            for at in [first, 1 - first] {
                if is_notified(at) {
                    programs.processes[at].before_sleep();
                    all.iter().for_each(|ends| ends.call(at).arm(true, false));
                    all.iter().for_each(|ends| _ = ends.call(at).send_recalled());
                }
            }
            assert!(Instant::now() < deadline, "{:?}", [have_left(0), have_left(1)]);
        }
    }
}

/// Many bytes come over TCP before their sender moves to the pipe, and the receiver's program is busy with something
/// else and reads none of them.
#[test]
fn s3_s19_end_whose_program_does_not_read_leaves_before_it_has_read_what_came_over_tcp() {
    for (ends_sending, forks) in [(false, false), (true, false), (false, true), (true, true)] {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(0).unwrap();
        let is_in_pipe = |ends: &Ends<'_>| ends.ends[0].transports()[Direction::Out as usize] == Transport::Pipe;
        let deadline = Instant::now() + SOON;
        while !is_in_pipe(&ends) {
            ends.send(0, 10_000);
            assert!(Instant::now() < deadline, "it stays on TCP");
            if !is_in_pipe(&ends) {
                assert_eq!(ends.receive(0, 1), 1);
            }
        }
        ends.send(0, 10_000);
        let reads = ends.ends[1].transports()[Direction::In as usize];
        assert_eq!(reads, Transport::Tcp, "much is left to read there");
        if ends_sending {
            // Then its sender moves no more, and the pipe is read in time, or never.
            ends.ends[0].end_sending();
        }
        programs.world.leave();
        // Another process of the endpoint knows only of the words in memory.
        let mut other = forks.then(|| {
            ends.advance();
            let other = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            let (all, instances) = ([Arc::clone(&ends.ends[1])], Instances::list());
            programs.processes[1].before_fork(&all, &instances).unwrap().parent(Some(other.id()));
            other
        });
        let deadline = Instant::now() + SOON;
        while !ends_sending && !ends.ends.iter().all(|end| end.is_back_on_tcp()) {
            ends.advance();
            (0..2).for_each(|at| _ = ends.call(at).send_recalled());
            assert!(Instant::now() < deadline, "it waits for its program to read");
        }
        read_out(&mut ends);
        other.iter_mut().for_each(|other| _ = (other.kill().unwrap(), other.wait().unwrap()));
    }
}

#[test]
fn s22_connection_that_has_left_is_joined_again_and_each_byte_arrives_once() {
    // With fewer and with more bytes than a proof covers before it is joined for the first time.
    for before in [0, 3000] {
        let programs = Programs::new(of(WINDOW));
        let mut ends = programs.join(before);
        let ends = ends.as_mut().unwrap();
        for round in 0..3 {
            until(ends, 1 + usize::from(before), "in memory", is_in_memory);
            ends.send(1, 64 << 10);
            programs.world.leave();
            until(ends, 1000, "back on TCP", |ends, at| {
                ends.ends[at].stage() == Stage::Candidate || ends.ends[at].is_back_on_tcp()
            });
            read_out(ends);
            assert_eq!(programs.log().matches("joined again").count(), round);
        }
        until(ends, 1000, "joined again", is_in_memory);
        assert_eq!(programs.log().matches("joined again").count(), 3, "{}", programs.log());
        read_out(ends);
    }
}

#[test]
fn s22_end_whose_peer_does_not_come_back_stays_on_tcp_until_it_does() {
    for one in 0..2 {
        let programs = Programs::new(of(WINDOW));
        let mut ends = left(&programs);
        go_on_for_a_while(&mut ends, &[one]);
        assert_eq!(ends.ends[one].stage(), Stage::Candidate, "it looks for its peer");
        assert_eq!(ends.ends[1 - one].stage(), Stage::Joined, "an older library does not");
        until(&mut ends, 1000, "joined again", is_in_memory);
        read_out(&mut ends);
    }
}

#[test]
fn s22_connection_whose_program_needs_the_kernel_since_it_left_is_not_joined_again() {
    let programs = Programs::new(of(WINDOW));
    let mut ends = left(&programs);
    programs.processes[0].leaves(&ends.ends[0], Reason::Usage);
    assert_eq!(ends.ends[0].reason(), Some(Reason::Usage));
    go_on_for_a_while(&mut ends, &[0, 1]);
    assert_eq!(ends.ends[0].stage(), Stage::Joined, "nothing takes its place");
    // Nor does one that is about to end.
    let mut ends = left(&programs);
    ends.ends[0].end_sending();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1500) {
        assert!(!ends.renew(0));
    }
}

/// The endpoint that seeks first may find its peer's previous claim. Its proposal to that claim is older than the claim
/// that the peer makes later, and must not use that one up: its counts would not fit, and that is final.
#[test]
fn s22_proposal_that_is_older_than_the_claim_is_refused_with_no_peer_and_the_end_goes_on_waiting() {
    const WAITS: usize = 0;
    const SEEKS: usize = 1;
    let programs = Programs::new(of(WINDOW));
    let mut ends = programs.connect(0);
    let deadline = Instant::now() + SOON;
    while programs.keys.lock().unwrap().is_empty() {
        programs.processes[WAITS].advance(&ends.ends[WAITS]);
        assert!(Instant::now() < deadline, "it does not claim");
    }
    let claims = programs.keys.lock().unwrap().clone();
    leave(&mut ends);
    let _beside = programs.join(1).unwrap();
    *programs.keys.lock().unwrap() = claims;
    // It finds that claim, and proposes over the existing session. The other program makes no call meanwhile.
    let deadline = Instant::now() + SOON;
    while !ends.renew(SEEKS) {
        assert!(Instant::now() < deadline, "it may not return");
        std::thread::yield_now();
    }
    (0..10).for_each(|_| programs.processes[SEEKS].advance(&ends.ends[SEEKS]));
    // More bytes have passed by the time at which the other endpoint makes its new claim.
    assert_eq!(ends.carry(SEEKS, 100), 100);
    while !ends.renew(WAITS) {
        assert!(Instant::now() < deadline, "it may not return");
        std::thread::yield_now();
    }
    (0..10).for_each(|_| programs.processes[WAITS].advance(&ends.ends[WAITS]));
    assert_eq!((ends.ends[WAITS].stage(), ends.ends[WAITS].reason()), (Stage::Candidate, None), "it waits");
    until(&mut ends, 1000, "joined again", is_in_memory);
    read_out(&mut ends);
}

#[test]
fn s22_nothing_is_tried_while_the_peer_is_no_neighbour() {
    let programs = Programs::new(of(WINDOW));
    let mut ends = left(&programs);
    programs.asked.is_far.store(true, Ordering::SeqCst);
    go_on_for_a_while(&mut ends, &[0, 1]);
    assert!(ends.ends.iter().all(|end| end.stage() == Stage::Joined), "nothing takes their places");
    programs.asked.is_far.store(false, Ordering::SeqCst);
    until(&mut ends, 1000, "joined again", is_in_memory);
    read_out(&mut ends);
}

/// Bytes that a call sends over TCP are remembered for another join, and a fork locks both.
#[test]
fn s22_who_forks_waits_for_nobody_who_sends_over_tcp() {
    // Threads that deadlock keep these for ever, so they are leaked.
    let programs: &'static Programs = Box::leak(Box::new(Programs::new(of(WINDOW))));
    for number in 0..20 {
        let ends: &'static Ends<'static> = Box::leak(Box::new(programs.join(number).unwrap()));
        let sends = std::thread::spawn(|| {
            for _ in 0..900 {
                assert_eq!(ends.call(0).send(&[IoSlice::new(b"a")]), Ok(1));
            }
        });
        let forks = std::thread::spawn(move || {
            let (instances, all) = (Instances::list(), [Arc::clone(&ends.ends[0])]);
            while !sends.is_finished() {
                programs.processes[0].before_fork(&all, &instances).unwrap().parent(None);
            }
        });
        let deadline = Instant::now() + SOON;
        while !forks.is_finished() {
            assert!(Instant::now() < deadline, "connection {number}: they wait for each other");
            std::thread::yield_now();
        }
        forks.join().unwrap();
        assert_eq!(ends.ends[0].transports(), [Transport::Tcp; 2]);
    }
}
