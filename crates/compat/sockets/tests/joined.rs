// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An endpoint that was joined with a peer that the test plays: words that decide between shared memory and TCP, and
//! whom each step notifies.

mod victim;

use std::{
    io::{IoSlice, IoSliceMut},
    sync::Arc,
};

use rustix::event::epoll;
use tombolo_layout::{
    sockets::{BOUNDARY, FOLLOWED, Followed, MOVES},
    state::State,
    words::{HEAD, READER_STATE},
};
use tombolo_mem::OwnWord;
use tombolo_sockets::{Read, Reason, connection::ReturnStage, switch::Transport};
use victim::{Liar, Play, RECEIVED, Victim, talk};

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

/// A sender sends over TCP what lies behind the peer's head, and so must know that this is one.
#[test]
fn r8_peer_that_recalls_from_an_impossible_position_breaks_the_connection() {
    const SENT_THERE: &[u8] = b"twelve bytes";
    for head in [0, 12, 13, u64::MAX] {
        let (victim, liar, _) = joined();
        let control = liar.control.as_ref().unwrap();
        let say_followed = |moves, leave| {
            control.word(FOLLOWED).store_release(Followed { moves, ready: true, leave }.encode());
        };
        let send = || victim.connection.for_call(&victim.process, -1).send(&[IoSlice::new(SENT_THERE)]);
        say_followed(0, false);
        assert_eq!((send(), victim.connection.transports()[0]), (Ok(SENT_THERE.len()), Transport::Pipe));
        control.word(HEAD).store_release(head);
        control.word(READER_STATE).store_release(State::OPEN.encode());
        say_followed(1, true);
        let is_possible = head <= SENT_THERE.len() as u64;
        // TCP has no room for any byte.
        let wanted = if is_possible { rustix::io::Errno::AGAIN } else { rustix::io::Errno::CONNRESET };
        assert_eq!(send(), Err(wanted), "{head}");
        assert_eq!(victim.connection.transports()[0] == Transport::Tcp, is_possible, "{head}");
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
