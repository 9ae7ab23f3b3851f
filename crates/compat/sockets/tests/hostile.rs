// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hostile member of the folder: it alters every field of every message, their order, the segments that come with
//! them, and every word after it was joined. The victim never panics or waits, and no peer that does not know its bytes
//! joins it; a hostile peer spoils only its own connection.

mod victim;

use std::{
    fs,
    io::{IoSlice, IoSliceMut},
    os::fd::{OwnedFd, RawFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_setfl},
    io::Errno,
    process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open},
};
use tombolo_domain::Rendezvous;
use tombolo_domain_local::LocalDomain;
use tombolo_layout::{
    Features, SegmentHeader,
    sockets::{BOUNDARY, FOLLOWED, Followed, MOVES, Message},
    words,
};
use tombolo_mem::OwnWord;
use tombolo_sockets::{
    Instances, Read, Reason,
    connection::{Direction, ReturnStage, Stage},
    switch::Transport,
    switched,
};
use victim::{Liar, Play, RECEIVED, RING, Random, SENT, SOON, Victim, counts, go_on, talk};

fn runs(short: u64, long: u64) -> u64 {
    if std::env::var_os("TOMBOLO_LONG").is_some() { long } else { short }
}

#[test]
fn s4_s6_end_that_tells_the_truth_is_joined() {
    for waits in [true, false] {
        let victim = Victim::new(waits);
        assert!(talk(&victim, waits, true, None).1, "waits: {waits}");
    }
}

/// The peer takes the proposal and closes the session, four times and once more.
#[test]
fn s6_end_whose_sessions_end_before_an_answer_proposes_a_few_times_and_no_more() {
    let victim = Victim::new(false);
    for times in 0..4 {
        let mut liar = Liar::meet(&victim, false, true);
        assert!(matches!(liar.receive_message(), Some(Message::Propose(_))), "after {times}");
        drop(liar);
        victim.call();
    }
    assert_eq!(victim.connection.reason(), Some(Reason::PeerGone));
    // A peer that answers the last proposal is joined.
    let victim = Victim::new(false);
    for _ in 0..3 {
        assert!(Liar::meet(&victim, false, true).receive_message().is_some());
    }
    assert!(talk(&victim, false, true, None).1);
}

/// A peer that proposes, and closes its session before the answer, does not keep others from the connection.
#[test]
fn s6_end_that_waits_is_joined_by_the_next_where_a_session_ends_before_its_answer() {
    let play = Play::new(true);
    // The victim's program has not yet read everything that its kernel received.
    play.counts.lock().unwrap().received += 1;
    let victim = Victim::playing(play);
    let propose = || {
        let mut liar = Liar::meet(&victim, true, true);
        liar.history.sent(RECEIVED.len() as u64, b"!");
        liar.claim.known = liar.history.known();
        liar.claim.counts = counts(&[RECEIVED, b"!"].concat(), SENT);
        liar
    };
    let mut first = propose();
    first.send_message(&Message::Propose(first.claim), None, &mut None);
    victim.call();
    assert!(first.receive_message().is_none(), "it has nothing to answer with");
    drop(first);
    victim.call();
    victim.connection.plain(Direction::In).unwrap().moved(1, [b"!".as_slice()].into_iter());
    assert!(go_on(&victim, propose(), true, None).1);
}

#[test]
fn s13_endpoint_that_brings_no_doorbell_is_not_joined() {
    for waits in [true, false] {
        let victim = Victim::new(waits);
        let mut liar = Liar::meet(&victim, waits, true);
        liar.doorbell = None;
        assert!(!go_on(&victim, liar, waits, None).1, "waits: {waits}");
    }
}

/// A segment of another endpoint is not joined, the victim's own neither.
#[test]
fn c11_s4_segment_with_another_number_than_its_end_is_not_joined() {
    for waits in [true, false] {
        for (epoch, fits) in [(0x1234, true), (0x1235, false), (1, false)] {
            let victim = Victim::new(waits);
            let mut liar = Liar::meet(&victim, waits, true);
            liar.epoch = Some(epoch);
            assert_eq!(go_on(&victim, liar, waits, None).1, fits, "waits: {waits}, {epoch:#x}");
            let reason = victim.connection.reason();
            assert!(fits || reason == Some(Reason::Corrupt), "waits: {waits}, {epoch:#x}: {reason:?}");
        }
    }
}

#[test]
fn s4_message_that_brings_what_its_kind_does_not_carry_ends_the_link() {
    for waits in [true, false] {
        for (is_refusal, with_segment, with_doorbell) in
            [(false, true, false), (false, false, true), (false, true, true), (true, true, true), (true, false, true)]
        {
            let victim = Victim::new(waits);
            let mut liar = Liar::meet(&victim, waits, true);
            let message = if is_refusal { Message::Refuse { to: 1, reason: 1 } } else { Message::Propose(liar.claim) };
            let kept = with_segment.then(|| liar.link.allocate(8192).unwrap());
            let offer = kept.as_ref().map(|(_, offer)| offer);
            match liar.doorbell.as_ref().filter(|_| with_doorbell) {
                Some(doorbell) => liar.link.send_with_doorbell(&message.encode(), offer, doorbell).unwrap(),
                None => liar.link.send(&message.encode(), offer).unwrap(),
            }
            victim.call();
            victim.call();
            while liar.receive_message().is_some() {}
            let told = liar.link.recv(1 << 20);
            let what = format!("waits: {waits}, a refusal: {is_refusal}, {with_segment}, {with_doorbell}");
            assert!(matches!(told, Err(tombolo_domain::Error::PeerGone)), "{what}: {told:?}");
            assert_ne!(victim.connection.stage(), Stage::Joined, "{what}");
        }
    }
}

/// In the copy that a fork makes, no thread is left to release a lock of the backend.
#[test]
fn r26_backend_is_held_still_while_the_process_forks() {
    let victim = Victim::new(true);
    let all = [Arc::clone(&victim.connection)];
    let instances = Instances::list();
    let forking = victim.process.before_fork(&all, &instances).unwrap();
    let (done, waits) = std::sync::mpsc::channel();
    let other = std::thread::spawn(move || {
        let held = LocalDomain::new().hold_for_fork();
        done.send(()).unwrap();
        drop(held);
    });
    assert!(waits.recv_timeout(Duration::from_millis(100)).is_err(), "it is held");
    forking.parent(None);
    waits.recv_timeout(SOON).unwrap();
    other.join().unwrap();
}

/// A fork withdraws a claim. The process may be switched off by the time the connection belongs to one process again.
#[test]
fn s7_process_that_is_off_claims_nothing_after_a_fork_either() {
    for off in [false, true] {
        let victim = Victim::new(true);
        let claims = || fs::read_dir(victim.folder.path().join("claims")).unwrap().count();
        victim.call();
        assert_eq!(claims(), 1, "it claims");
        let all = [Arc::clone(&victim.connection)];
        let instances = Instances::list();
        victim.process.before_fork(&all, &instances).unwrap().parent(None);
        drop(instances);
        assert_eq!(claims(), 0, "it was taken back");
        if off {
            let (name, _) = switched::Name::of(std::process::id()).unwrap();
            switched::put_file(fs::File::open(victim.folder.path()).unwrap(), &name).unwrap();
        }
        (0..200).for_each(|_| victim.call());
        assert_eq!(claims(), usize::from(!off), "off: {off}");
        assert_eq!(victim.connection.reason(), off.then_some(Reason::Off));
    }
}

#[test]
fn s6_end_that_does_not_know_the_bytes_is_not_joined_whatever_it_says() {
    for seed in 0..runs(2_000, 1_000_000) {
        let waits = seed % 2 == 0;
        let victim = Victim::new(waits);
        let (_, joined) = talk(&victim, waits, false, (seed > 1).then_some(Random(seed)));
        assert!(!joined, "seed {seed}");
    }
}

#[test]
fn s4_messages_that_are_changed_anywhere_neither_panic_nor_block_the_victim() {
    let mut joined = 0;
    for seed in 0..runs(2_000, 1_000_000) {
        let waits = seed % 2 == 0;
        let victim = Victim::new(waits);
        let (_, believed) = talk(&victim, waits, true, Some(Random(seed)));
        joined += u64::from(believed);
        assert_ne!(victim.connection.stage() == Stage::Joined, !believed);
    }
    assert!(joined > 0, "the changes left nothing to believe");
}

#[test]
fn s2_s3_words_that_lie_after_joining_end_the_stream_and_nothing_else() {
    let (mut bytes, mut errors, mut kept, mut left) = (0_u64, 0_u64, 0, 0);
    for seed in 0..runs(500, 200_000) {
        let waits = seed % 2 == 0;
        let victim = Victim::new(waits);
        let (liar, joined) = talk(&victim, waits, true, None);
        assert!(joined);
        let (control, mut random) = (liar.control.as_ref().unwrap(), Random(seed));
        let at = [
            words::TAIL,
            words::HEAD,
            words::WANT_DATA,
            words::READER_STATE,
            words::WANT_SPACE,
            words::WRITER_STATE,
            MOVES,
            BOUNDARY,
            FOLLOWED,
        ];
        for _ in 0..60 {
            let word = control.word(at[random.below(at.len())]);
            word.store_release(if random.below(3) == 0 { random.below(8) as u64 } else { random.word() });
            if random.below(4) == 0
                && let Some(doorbell) = &liar.notifier
            {
                doorbell.notify();
            }
            let since = Instant::now();
            let mut room = [0; 9000];
            let connection = &victim.connection;
            let call = connection.for_call(&victim.process, -1);
            // Half of the victims return to TCP at some time, after which little is left to violate.
            let got = match random.below(if seed % 4 < 2 { 7 } else { 11 }) {
                0 => call.recv(&mut [IoSliceMut::new(&mut room)], Read::Take),
                1 => call.recv(&mut [IoSliceMut::new(&mut room)], Read::Peek),
                2 => call.send(&[IoSlice::new(&room)]),
                3 => {
                    call.arm(true, true);
                    victim.process.before_sleep();
                    Ok(connection.unread() as usize)
                }
                4 => Ok(usize::from(call.is_readable())),
                5 => Ok(usize::from(call.turn_back())),
                6 => Ok(usize::from(call.send_recalled())),
                7 => Ok(usize::from(call.retreat(Reason::Usage) == ReturnStage::Done)),
                8 => Ok(usize::from(call.turn_back_and_see())),
                9 => {
                    kept += u32::from(call.keep_unread([ReturnStage::Long, ReturnStage::Lost][random.below(2)]));
                    Ok(0)
                }
                _ => {
                    left += u32::from(victim.process.lets_go(connection, false));
                    Ok(0)
                }
            };
            assert!(since.elapsed() < SOON, "seed {seed}: a call waited for a liar");
            match got {
                Ok(n) => bytes += n as u64,
                Err(errno) => {
                    assert!([Errno::AGAIN, Errno::CONNRESET].contains(&errno), "seed {seed}: {errno:?}");
                    errors += u64::from(errno == Errno::CONNRESET);
                }
            }
        }
        victim.connection.finish(victim.process.kernel(), -1);
    }
    let reached = bytes > 0 && errors > 0 && kept > 0 && left > 0;
    assert!(
        reached,
        "{bytes} bytes, {errors} streams ended, {kept} kept, {left} left: the lies did not reach anything"
    );
}

#[test]
fn s3_end_turns_back_alone_and_not_before_its_peer_has_followed_whatever_that_says_else() {
    let victim = Victim::new(true);
    let (liar, joined) = talk(&victim, true, true, None);
    assert!(joined);
    let control = liar.control.as_ref().unwrap();
    let say = |moves, ready, leave| control.word(FOLLOWED).store_release(Followed { moves, ready, leave }.encode());
    let turns_back = || {
        let since = Instant::now();
        let done = victim.connection.for_call(&victim.process, -1).turn_back();
        assert!(since.elapsed() < SOON, "a call waited for a liar");
        (done, victim.connection.transports()[0])
    };
    say(0, true, false);
    let sent = victim.connection.for_call(&victim.process, -1).send(&[IoSlice::new(b"into the pipe")]);
    assert_eq!((sent, victim.connection.transports()[0]), (Ok(13), Transport::Pipe));
    // A peer that sends nothing more, and one that asks for TCP and reports fewer moves than it has followed.
    assert_eq!(turns_back(), (false, Transport::Pipe));
    say(0, false, true);
    assert_eq!(turns_back(), (false, Transport::Pipe));
    // A peer that reports moves that never happened.
    say(7, false, true);
    assert_eq!(turns_back(), (false, Transport::Pipe));
    say(1, false, false);
    assert_eq!(turns_back(), (true, Transport::Tcp));
}

#[test]
fn s20_rings_that_lie_end_the_stream_and_nothing_else() {
    let (mut grown, mut followed, mut errors) = (0_u32, 0_u32, 0_u32);
    for seed in 0..runs(300, 100_000) {
        let mut play = Play::new(seed % 2 == 0);
        play.grows_to = Some(64 << 10);
        let waits = play.waits;
        let victim = Victim::playing(play);
        let (mut liar, joined) = talk(&victim, waits, true, None);
        assert!(joined);
        let (connection, mut random) = (&victim.connection, Random(seed));
        // Mostly the words of an honest peer, because the test gets further with them.
        let lies = [5, 80, 80, 1000][seed as usize / 2 % 4];
        let (mut ready, mut sent, mut offered) = (0_u64, 0_u64, 0_u64);
        for _ in 0..150 {
            while let Some(heard) = liar.receive_message() {
                if let Message::Ring { generation, .. } = heard {
                    offered = generation.into();
                }
            }
            let control = liar.control.as_ref().unwrap();
            let near = |random: &mut Random, value: u64| if random.below(lies) == 0 { random.word() } else { value };
            match random.below(8) {
                0 => {
                    let generation = near(&mut random, ready + 1) as u16;
                    let capacity = 4096 << random.below(3);
                    let mut header = SegmentHeader::new(capacity, generation, 0, Features::HANDOVER, liar.claim.id);
                    if random.below(5) == 0 {
                        header.epoch = random.next().max(1);
                    }
                    let to = near(&mut random, liar.to);
                    let message = Message::Ring { to, generation: near(&mut random, ready + 1) as u16 };
                    let mut lie = (random.below(6) == 0).then(|| Random(random.next()));
                    let doorbell = liar.doorbell.take_if(|_| random.below(9) > 0);
                    liar.send_message(&message, Some(header), &mut lie);
                    liar.doorbell = doorbell.or(liar.doorbell.take());
                }
                1 => {
                    ready += u64::from(random.below(2) == 0);
                    control.word(words::WRITER_STATE).store_release(near(&mut random, 1 | ready << 16));
                }
                2 => control.word(words::WRITER_STATE).store_release(near(&mut random, 1 | ready << 16 | ready << 32)),
                3 => control.word(words::READER_STATE).store_release(near(&mut random, 1 | offered << 16)),
                4 => control.word(words::HEAD).store_release(near(&mut random, sent)),
                5 => {
                    let state = [1, 4][random.below(2)];
                    control.word(FOLLOWED).store_release(near(&mut random, state));
                }
                _ => {}
            }
            let since = Instant::now();
            let mut room = vec![0; 40 << 10];
            let got = match random.below(4) {
                0 => connection
                    .for_call(&victim.process, -1)
                    .recv(&mut [IoSliceMut::new(&mut room)], Read::Take)
                    .map(|_| 0),
                1..=2 => connection.for_call(&victim.process, -1).send(&[IoSlice::new(&room)]),
                _ => {
                    victim.process.before_sleep();
                    connection.for_call(&victim.process, -1).arm(true, true);
                    Ok(0)
                }
            };
            assert!(since.elapsed() < SOON, "seed {seed}: a call waited for a liar");
            match got {
                Ok(n) => sent += n as u64,
                Err(errno) => {
                    assert!([Errno::AGAIN, Errno::CONNRESET].contains(&errno), "seed {seed}: {errno:?}");
                    errors += u32::from(errno == Errno::CONNRESET);
                }
            }
            let [sends, reads] = connection.ring_sizes().unwrap();
            grown += u32::from(sends != 16 << 10);
            followed += u32::from(reads != RING);
        }
        connection.finish(victim.process.kernel(), -1);
    }
    assert!(
        grown > 0 && followed > 0 && errors > 0,
        "{grown} grown, {followed} followed, {errors} ended: nothing was reached"
    );
}

/// Returns a joined victim whose rings grow, and its peer, which knows the victim's number.
fn joined_with_rings() -> (Victim, Liar) {
    let mut play = Play::new(true);
    play.grows_to = Some(64 << 10);
    let victim = Victim::playing(play);
    let (liar, joined) = talk(&victim, true, true, None);
    assert!(joined);
    (victim, liar)
}

/// Sends a segment of `len` bytes as a ring for `to`. Returns false if the control path has no room or is closed.
fn offer_ring(liar: &mut Liar, to: u64, len: usize) -> bool {
    let (segment, offer) = liar.link.allocate(len).unwrap();
    let sent = liar.link.send(&Message::Ring { to, generation: 1 }.encode(), Some(&offer)).is_ok();
    liar.link.retire(Some(segment), offer);
    sent
}

/// Returns whether the victim has ended the session.
fn is_ended(liar: &mut Liar) -> bool {
    loop {
        match liar.link.recv(1 << 20) {
            Ok(Some(_)) => {}
            Ok(None) => return false,
            Err(_) => return true,
        }
    }
}

/// Lets the victim take the messages that have arrived.
fn listen(victim: &Victim) {
    victim.process.exchange.mark_notified();
    victim.process.before_sleep();
}

#[test]
fn h2_s20_ring_that_comes_before_it_is_announced_is_followed_once_it_is() {
    let (victim, mut liar) = joined_with_rings();
    let generation = 1;
    // A ring arrives without a doorbell.
    liar.doorbell = None;
    let header = SegmentHeader::new(8192, generation, 0, Features::HANDOVER, liar.claim.id);
    let message = Message::Ring { to: liar.to, generation };
    liar.send_message(&message, Some(header), &mut None);
    let control = liar.control.as_ref().unwrap();
    for [ready, current] in [[0, 0], [1, 0], [1, 1]] {
        control.word(words::WRITER_STATE).store_release(1 | ready << 16 | current << 32);
        for _ in 0..3 {
            listen(&victim);
            let read =
                victim.connection.for_call(&victim.process, -1).recv(&mut [IoSliceMut::new(&mut [0; 100])], Read::Take);
            assert_eq!(read, Err(Errno::AGAIN), "{ready} {current}");
            victim.connection.for_call(&victim.process, -1).arm(true, false);
        }
    }
    assert_eq!(victim.connection.ring_sizes().unwrap()[1], 8192);
}

#[test]
fn h5_s20_ring_that_is_offered_beside_another_ends_the_link() {
    let (victim, mut liar) = joined_with_rings();
    let to = liar.to;
    assert!(offer_ring(&mut liar, to, 8192));
    listen(&victim);
    assert!(!is_ended(&mut liar), "one may be offered");
    assert!(offer_ring(&mut liar, to, 8192));
    listen(&victim);
    assert!(is_ended(&mut liar));
}

#[test]
fn s20_segments_that_nobody_wants_end_the_link_unless_one_between_them_was_wanted() {
    let (victim, mut liar) = joined_with_rings();
    let to = liar.to;
    let unwanted = |liar: &mut Liar, count: u32| {
        for _ in 0..count {
            if !offer_ring(liar, to.wrapping_add(1), 4096) {
                return;
            }
            listen(&victim);
        }
    };
    unwanted(&mut liar, 512);
    assert!(!is_ended(&mut liar), "connections may go meanwhile");
    assert!(offer_ring(&mut liar, to, 8192));
    listen(&victim);
    unwanted(&mut liar, 512);
    assert!(!is_ended(&mut liar), "one was wanted");
    unwanted(&mut liar, 1);
    assert!(is_ended(&mut liar));
}

#[test]
fn s20_one_call_maps_no_more_of_a_peer_than_64_mib() {
    let (victim, mut liar) = joined_with_rings();
    let to = liar.to.wrapping_add(1);
    assert!((0..8).all(|_| offer_ring(&mut liar, to, 32 << 20)), "there is room for all");
    // This message ends the session once it is read, which shows that everything before it was read.
    let (segment, offer) = liar.link.allocate(8192).unwrap();
    liar.link.send(&Message::Refuse { to: 1, reason: 1 }.encode(), Some(&offer)).unwrap();
    liar.link.retire(Some(segment), offer);
    victim.process.exchange.mark_notified();
    for call in 1..=5 {
        assert!(!is_ended(&mut liar), "call {call} mapped more than two of 32 MiB");
        victim.process.before_sleep();
    }
    assert!(is_ended(&mut liar), "who heard a part looks again before it sleeps");
}

/// Returns copies, in this process, of the doorbells that another process holds as well.
fn shared_doorbells() -> Vec<OwnedFd> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let all =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let shared = all.filter(|fd: &RawFd| {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
        info.lines().any(|line| line.starts_with("eventfd-semaphore:") && line.ends_with('1'))
    });
    shared.filter_map(|fd| pidfd_getfd(&own, fd, PidfdGetfdFlags::empty()).ok()).collect()
}

/// Leaves a doorbell as a hostile peer would: full or not, and blocking for a careless caller.
fn spoil(doorbell: &OwnedFd, random: &mut Random) {
    // The flags set here apply to all holders of the descriptor.
    fcntl_setfl(doorbell, OFlags::NONBLOCK).unwrap();
    for _ in 0..random.below(4) {
        let value = [u64::MAX - 1, 1, 0, random.next()][random.below(4)];
        let _ = rustix::io::write(doorbell, &value.to_ne_bytes());
        let _ = rustix::io::read(doorbell, &mut [0; 8]);
    }
    fcntl_setfl(doorbell, OFlags::empty()).unwrap();
}

#[test]
fn bells_that_a_liar_fills_and_empties_block_nobody_and_silence_no_other() {
    let mut victim = Victim::new(true);
    let (_liar, joined) = talk(&victim, true, true, None);
    assert!(joined);
    let first = Arc::clone(&victim.connection);
    let spoilt = shared_doorbells();
    assert!(spoilt.len() >= 4, "{} doorbells", spoilt.len());
    victim.next();
    let (honest, joined) = talk(&victim, true, true, None);
    assert!(joined);
    let doorbell = honest.notifier.as_ref().unwrap();
    let limit = |time: Duration| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: 0 };
    let mut random = Random(7);
    for turn in 0..300 {
        spoilt.iter().for_each(|doorbell| spoil(doorbell, &mut random));
        let since = Instant::now();
        let waiter = victim.process.waiters.find_waiter([&first, &victim.connection].into_iter()).unwrap();
        for one in [&first, &victim.connection] {
            one.for_call(&victim.process, -1).arm(true, true);
            let _ = one.for_call(&victim.process, -1).send(&[IoSlice::new(&[0; 100])]);
        }
        let notified = |patience| {
            let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
            let instance = pidfd_getfd(own, waiter.fd(), PidfdGetfdFlags::empty()).unwrap();
            let mut one = [PollFd::new(&instance, PollFlags::IN)];
            poll(&mut one, Some(&limit(patience))) == Ok(1)
        };
        // The hostile peer's notifications are taken, and forgotten.
        while notified(Duration::ZERO) {
            waiter.forget(&victim.process.exchange);
            victim.process.before_sleep();
        }
        assert!(since.elapsed() < SOON, "turn {turn}: a call waited");
        doorbell.notify();
        assert!(notified(SOON), "turn {turn}: an honest ring was not heard");
        waiter.forget(&victim.process.exchange);
    }
}
