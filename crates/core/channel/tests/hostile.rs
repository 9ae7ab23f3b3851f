// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that breaks every rule costs a bounded time, a typed error and its own channel: nothing else.

mod common;

use std::{
    io::{ErrorKind, Read, Write},
    thread,
    time::{Duration, Instant},
};

use common::{SOON, World, eventually, noise, raw};
use rustix::time::{ClockId, clock_gettime};
use tombolo_channel::{Deadline, Ending, Error, Listener, Liveness, Messages, Options, Stream};
use tombolo_domain::{Endpoint, Error as DomainError};
use tombolo_layout::{
    Features, SegmentHeader, VERSION,
    handshake::{Greeting, Message, Refusal},
    header::LEN,
    state::{Phase, State},
    words,
};
use tombolo_mem::{OwnWord, PeerWord};

/// Returns the answer of `listener` to `message`, sent with a segment of `len` bytes that begins with `header`.
fn answer_with(
    world: &World,
    listener: &mut Listener<Stream>,
    message: &[u8],
    segment: Option<(usize, [u8; LEN])>,
) -> Result<Message, DomainError> {
    let mut link = world.connect_raw();
    let kept = segment.map(|(len, header)| raw::segment(&mut *link, len, &header));
    link.send(message, kept.as_ref().map(|(_, offer)| offer)).unwrap();
    let mut answer = None;
    eventually("the listener answers", || {
        assert!(listener.try_accept().unwrap().is_none(), "the listener agreed to what it must not");
        answer = link.recv(1 << 31).transpose();
        answer.is_some()
    });
    answer.unwrap().map(|received| Message::decode(&received.message).unwrap())
}

fn honest() -> Option<(usize, [u8; LEN])> {
    Some((8192, raw::header(0).encode()))
}

fn code(answer: Result<Message, DomainError>) -> Refusal {
    match answer {
        Ok(Message::Refuse(code, _)) => code,
        other => panic!("no refusal but {other:?}"),
    }
}

/// Checks that an honest peer is served.
fn meet(world: &World, listener: &mut Listener<Stream>) {
    thread::scope(|scope| {
        let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &Options::new()).unwrap());
        let server = listener.accept_until(Deadline::after(SOON)).unwrap();
        drop((client.join().unwrap(), server));
    });
}

/// Returns the error of a connecting endpoint whose peer answers its greeting as `answer` does. The value that `answer`
/// returns is kept until then.
fn connect_to<K>(world: &World, answer: impl FnOnce(&mut dyn Endpoint, Greeting) -> K) -> Error {
    let mut listener = world.domain_listener();
    let options = Options::new().handshake_timeout(Duration::from_millis(500)).largest_peer_ring(1 << 20);
    thread::scope(|scope| {
        let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &options).unwrap_err());
        let mut link = raw::open(&mut *listener);
        let Message::Hello(hello) = raw::receive_message(&mut *link).unwrap() else { panic!("no greeting") };
        let _kept = answer(&mut *link, hello);
        client.join().unwrap()
    })
}

/// Returns a channel whose peer the test plays: the listener's stream, the connection, and the words of its one
/// segment.
fn half_raw(world: &World) -> (Stream, Box<dyn Endpoint>, tombolo_mem::OwnControl) {
    let mut listener = world.listen::<Stream>();
    let mut link = world.connect_raw();
    let (control, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(raw::greeting()).encode(), 0);
    let stream = listener.accept_until(Deadline::after(SOON)).unwrap();
    assert!(matches!(raw::receive_message(&mut *link), Ok(Message::Welcome(_))));
    (stream, link, control)
}

fn set_writer_state(control: &tombolo_mem::OwnControl, ready: u16, current: u16) {
    control.word(words::WRITER_STATE).store_release(State { phase: Phase::Open, ready, current }.encode());
}

fn read(stream: &mut Stream) -> Result<usize, Error> {
    stream.split().0.read_until(&mut [0; 64], Deadline::after(Duration::from_millis(300)))
}

fn clause(error: &Error) -> &'static str {
    match error {
        Error::Corrupt(corrupt) => corrupt.clause,
        Error::Malformed { clause, .. } => clause,
        other => panic!("not the peer's fault: {other}"),
    }
}

/// Returns the CPU time of this process so far.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

on_every_backend! {
    fn c6_listener_refuses_another_version_and_the_refusal_names_its_own(world) {
        let mut listener = world.listen::<Stream>();
        let greeting = Greeting { version_min: VERSION + 1, version_max: VERSION + 2, ..raw::greeting() };
        let answer = answer_with(&world, &mut listener, &Message::Hello(greeting).encode(), honest()).unwrap();
        assert_eq!(answer, Message::Refuse(Refusal::Version, "1-1".into()));
    }

    fn c6_segment_and_greeting_of_the_next_version_are_refused_as_such_though_this_one_is_spoken_too(world) {
        let mut listener = world.listen::<Stream>();
        let mut next = raw::header(0).encode();
        next[8] = 2;
        for (min, max, header) in [
            (1, 2, next),
            (2, 2, next),
            (1, 2, raw::header(0).encode()),
            (1, u16::MAX, raw::header(0).encode()),
            (0, 0, raw::header(0).encode()),
            (2, 1, raw::header(0).encode()),
        ] {
            let greeting = Greeting { version_min: min, version_max: max, ..raw::greeting() };
            let hello = Message::Hello(greeting).encode();
            let answer = answer_with(&world, &mut listener, &hello, Some((8192, header))).unwrap();
            assert_eq!(answer, Message::Refuse(Refusal::Version, "1-1".into()), "{min} to {max}");
        }
        let hello = Message::Hello(raw::greeting()).encode();
        let other = answer_with(&world, &mut listener, &hello, Some((8192, next)));
        assert_eq!(code(other), Refusal::Segment, "a greeting of this version with a segment of the next");
        meet(&world, &mut listener);
    }

    fn c6_c3_version_is_refused_before_features_and_the_message_before_both(world) {
        let mut listener = world.listen::<Stream>();
        let required = Features::MESSAGES;
        let both = Greeting { version_max: 2, offered: required, required, ..raw::greeting() };
        let both = Message::Hello(both).encode();
        assert_eq!(code(answer_with(&world, &mut listener, &both, honest())), Refusal::Version);
        assert_eq!(code(answer_with(&world, &mut listener, &both, None)), Refusal::Malformed);
        let feature = Greeting { offered: required, required, ..raw::greeting() };
        let broken = Some((8192, [0; LEN]));
        let feature = answer_with(&world, &mut listener, &Message::Hello(feature).encode(), broken);
        assert_eq!(code(feature), Refusal::Feature, "before the segment");
        let stale = Greeting { epoch: 9, ..raw::greeting() };
        let stale = answer_with(&world, &mut listener, &Message::Hello(stale).encode(), broken);
        assert_eq!(code(stale), Refusal::Segment, "before the epoch");
    }

    fn c7_first_ring_of_a_caller_is_mapped_up_to_a_small_bound(world) {
        let hello = Message::Hello(raw::greeting()).encode();
        let of = |capacity| SegmentHeader::new(capacity, 0, 0, Features::HANDOVER, raw::EPOCH);
        let with = |header: SegmentHeader| Some((header.segment_len as usize, header.encode()));
        let mut listener = world.listen::<Stream>();
        let answer = answer_with(&world, &mut listener, &hello, with(of(32 << 20)));
        assert_eq!(code(answer), Refusal::Segment);
        let options = Options::new().ring_size(16 << 20);
        let reached = thread::scope(|scope| {
            let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &options));
            let server = listener.accept_until(Deadline::after(SOON)).unwrap();
            (client.join().unwrap().is_ok(), server)
        });
        assert!(reached.0, "canary: what is within the bound is mapped");
        drop((reached, listener));
        let larger = Options::new().largest_peer_ring(32 << 20);
        let mut listener = world.listening.listen::<Stream>(&world.address, &larger).unwrap();
        let mut link = world.connect_raw();
        let header = of(32 << 20);
        let (_control, offer) = raw::segment(&mut *link, header.segment_len as usize, &header.encode());
        link.send(&hello, Some(&offer)).unwrap();
        listener.accept_until(Deadline::after(SOON)).unwrap();
    }

    fn c2_refusal_that_carries_a_segment_is_refused(world) {
        let error = connect_to(&world, |link, _| {
            raw::send_with_segment(link, &Message::Refuse(Refusal::Denied, "no".into()).encode(), 0)
        });
        assert_eq!(clause(&error), "C-2", "{error}");
    }

    fn c6_version_mismatch_names_both_versions(world) {
        let refused = connect_to(&world, |link, _| {
            let mut refusal = Message::Refuse(Refusal::Version, "what is said here is for people".into()).encode();
            (refusal[0x0a], refusal[0x0c]) = (7, 9);
            link.send(&refusal, None).unwrap();
        });
        assert!(matches!(refused, Error::VersionMismatch { ours: VERSION, theirs_min: 7, theirs_max: 9 }));
        assert!(refused.to_string().contains("speaks 1") && refused.to_string().contains("7 to 9"), "{refused}");
        let welcomed = connect_to(&world, |link, _| {
            let theirs = Greeting { version_min: 2, version_max: 3, ..raw::greeting() };
            raw::send_with_segment(link, &Message::Welcome(theirs).encode(), 0)
        });
        assert!(matches!(welcomed, Error::VersionMismatch { ours: VERSION, theirs_min: 2, theirs_max: 3 }));
    }

    fn c4_feature_that_is_required_and_not_offered_is_refused_by_both_sides(world) {
        let mut listener = world.listening.listen::<Stream>(&world.address, &Options::new().membarrier(false)).unwrap();
        for bit in [Features::MESSAGES, Features::MEMBARRIER, Features::MULTICAST, Features(1 << 40)] {
            let greeting = Greeting { offered: bit, required: bit, ..raw::greeting() };
            let answer = answer_with(&world, &mut listener, &Message::Hello(greeting).encode(), honest());
            assert_eq!(code(answer), Refusal::Feature, "{bit:?}");
        }
        drop(listener);
        for bit in [Features::MESSAGES, Features(1 << 40)] {
            let error = connect_to(&world, |link, _| {
                let greeting = Greeting { offered: bit, required: bit, ..raw::greeting() };
                raw::send_with_segment(link, &Message::Welcome(greeting).encode(), 0)
            });
            assert_eq!(clause(&error), "C-4", "{bit:?}");
        }
    }

    fn c4_offered_bits_that_nobody_knows_are_ignored(world) {
        let mut listener = world.listen::<Stream>();
        let mut link = world.connect_raw();
        let greeting = Greeting { offered: Features(!1), ..raw::greeting() };
        let _kept = raw::send_with_segment(&mut *link, &Message::Hello(greeting).encode(), 0);
        let _stream = listener.accept_until(Deadline::after(SOON)).unwrap();
        let Ok(Message::Welcome(theirs)) = raw::receive_message(&mut *link) else { panic!("no welcome") };
        assert!(theirs.offered.without(Features::KNOWN).is_empty());
        assert!(theirs.epoch != 0 && theirs.epoch != raw::EPOCH);
    }

    fn c2_message_that_is_none_is_refused_and_the_next_peer_is_served(world) {
        let mut listener = world.listen::<Stream>();
        let hello = Message::Hello(raw::greeting()).encode();
        let changed = |at: usize, to: u8| { let mut bytes = hello.clone(); bytes[at] = to; bytes };
        let longer = [&hello[..], &[0]].concat();
        let cases = [hello[..63].to_vec(), longer, changed(0, 0), changed(8, 0x77), changed(0x3f, 1), vec![7; 256]];
        for case in cases {
            assert_eq!(code(answer_with(&world, &mut listener, &case, honest())), Refusal::Malformed);
        }
        let none = code(answer_with(&world, &mut listener, &hello, None));
        assert_eq!(none, Refusal::Malformed, "a greeting without a segment");
        meet(&world, &mut listener);
    }

    fn c3_first_message_of_another_kind_is_refused(world) {
        let mut listener = world.listen::<Stream>();
        let messages = [Message::Welcome(raw::greeting()), Message::Ring { generation: 1, epoch: raw::EPOCH }];
        for message in messages {
            assert_eq!(code(answer_with(&world, &mut listener, &message.encode(), honest())), Refusal::Malformed);
        }
        drop(listener);
        let error = connect_to(&world, |link, hello| {
            raw::send_with_segment(link, &Message::Hello(Greeting { epoch: 1, ..hello }).encode(), 0)
        });
        assert_eq!(clause(&error), "C-3");
        let error = connect_to(&world, |link, _| {
            link.send(&Message::Welcome(raw::greeting()).encode(), None).unwrap();
        });
        assert_eq!(clause(&error), "C-2", "a welcome without a segment");
    }

    fn c5_segment_that_is_broken_or_too_large_is_refused_before_anything_else(world) {
        let options = Options::new().largest_peer_ring(64 << 10);
        let mut listener = world.listening.listen::<Stream>(&world.address, &options).unwrap();
        let hello = Message::Hello(raw::greeting()).encode();
        let good = raw::header(0);
        let large = SegmentHeader::new(128 << 10, 0, 0, good.features, good.epoch);
        let code_of = |listener: &mut _, len: u64, header: SegmentHeader| {
            code(answer_with(&world, listener, &hello, Some((len as usize, header.encode()))))
        };
        assert_eq!(code_of(&mut listener, large.segment_len, large), Refusal::Segment, "too large");
        let broken = [
            SegmentHeader { segment_len: 4096, ..good },
            SegmentHeader { capacity: 4095, ..good },
            SegmentHeader { data_offset: 0, ..good },
            SegmentHeader { generation: 1, ..good },
        ];
        for header in broken {
            assert_eq!(code_of(&mut listener, 8192, header), Refusal::Segment, "{header:?}");
        }
        let zeros = answer_with(&world, &mut listener, &hello, Some((8192, [0; LEN])));
        assert_eq!(code(zeros), Refusal::Segment);
        let small = answer_with(&world, &mut listener, &hello, Some((4096, good.encode())));
        assert_eq!(code(small), Refusal::Segment);
    }

    fn c5_connecting_end_that_does_not_agree_says_so(world) {
        let mut said = None;
        let error = connect_to(&world, |link, _| {
            let greeting = Greeting { epoch: 77, ..raw::greeting() };
            let _kept = raw::send_with_segment(link, &Message::Welcome(greeting).encode(), 0);
            said = Some(raw::receive_message(link));
        });
        assert_eq!(clause(&error), "C-11");
        assert!(matches!(said, Some(Ok(Message::Refuse(Refusal::Malformed, _)))), "{said:?}");
    }

    fn c5_connecting_end_refuses_a_welcome_with_the_code_of_what_is_wrong(world) {
        let honest = raw::greeting();
        let version = VERSION + 1;
        let (bit, epoch) = (Features(1 << 40), honest.epoch + 1);
        let cases = [
            (Greeting { version_min: version, version_max: version, ..honest }, 0, Refusal::Version),
            (Greeting { offered: bit, required: bit, ..honest }, 0, Refusal::Feature),
            (honest, 1, Refusal::Segment),
            (Greeting { epoch, ..honest }, 0, Refusal::Malformed),
        ];
        for (greeting, generation, code) in cases {
            let mut said = None;
            connect_to(&world, |link, _| {
                let _kept = raw::send_with_segment(link, &Message::Welcome(greeting).encode(), generation);
                said = Some(raw::receive_message(link));
            });
            let Some(Ok(Message::Refuse(refused, _))) = said else { panic!("{said:?} instead of {code:?}") };
            assert_eq!(refused, code);
        }
    }

    fn c5_listening_end_whose_welcome_is_refused_tells_its_program_why(world) {
        let soon = || Deadline::after(SOON);
        for code in [Refusal::Segment, Refusal::Version, Refusal::Unknown] {
            let (mut stream, mut link, _control) = half_raw(&world);
            link.send(&Message::Refuse(code, "no\nroom".into()).encode(), None).unwrap();
            drop(link);
            let is_why = |error: Error| match error {
                Error::VersionMismatch { theirs_min, theirs_max, .. } => {
                    code == Refusal::Version && (theirs_min, theirs_max) == (VERSION, VERSION)
                }
                Error::Refused { code: said, reason } => said == code && reason == "no?room",
                other => panic!("{other}"),
            };
            let (read, write) = stream.split();
            for _ in 0..2 {
                assert!(is_why(read.read_until(&mut [0; 64], soon()).unwrap_err()));
            }
            let error = loop {
                match write.write_until(&[0; 4096], soon()) {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert!(is_why(error));
            assert!(is_why(write.drained_until(soon()).unwrap_err()));
        }
    }

    fn c5_refusal_of_one_who_joined_before_takes_nothing_away_that_it_wrote(world) {
        let (mut stream, mut link, control) = half_raw(&world);
        control.word(words::TAIL).store_release(7);
        control.word(words::WRITER_STATE).store_release(State { phase: Phase::Closed, ready: 0, current: 0 }.encode());
        link.send(&Message::Refuse(Refusal::Quota, "no room".into()).encode(), None).unwrap();
        drop(link);
        assert_eq!(read(&mut stream).unwrap(), 7);
        assert_eq!(read(&mut stream).unwrap(), 0, "it closed in order");
    }

    fn c5_reason_that_would_forge_lines_or_drive_a_terminal_is_shown_without_that(world) {
        let error = connect_to(&world, |link, _| {
            let reason = "no\x1b[2J\r\nkernel: all is well\u{9b}1m";
            link.send(&Message::Refuse(Refusal::Denied, reason.into()).encode(), None).unwrap();
        });
        assert_eq!(error.to_string(), "the peer refused the channel: no?[2J??kernel: all is well?1m");
    }

    fn c5_code_that_nobody_knows_is_a_refusal_all_the_same(world) {
        let error = connect_to(&world, |link, _| {
            let mut refusal = Message::Refuse(Refusal::Quota, "come back tomorrow".into()).encode();
            refusal[0x0e] = 99;
            link.send(&refusal, None).unwrap();
        });
        assert!(matches!(&error, Error::Refused { code: Refusal::Unknown, reason } if reason == "come back tomorrow"));
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }

    fn c11_epoch_of_another_channel_is_refused(world) {
        let mut listener = world.listen::<Stream>();
        let other = Greeting { epoch: raw::EPOCH + 1, ..raw::greeting() };
        let answer = answer_with(&world, &mut listener, &Message::Hello(other).encode(), honest());
        assert_eq!(code(answer), Refusal::Malformed);
        drop(listener);
        let error = connect_to(&world, |link, hello| {
            let header = SegmentHeader { epoch: hello.epoch, ..raw::header(0) };
            let (control, offer) = raw::segment(link, 8192, &header.encode());
            let mirror = Greeting { epoch: hello.epoch, ..raw::greeting() };
            link.send(&Message::Welcome(mirror).encode(), Some(&offer)).unwrap();
            (control, offer)
        });
        assert_eq!(clause(&error), "C-11", "its own epoch came back");
    }

    fn c11_each_channel_has_epochs_of_its_own(world) {
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..20 {
            connect_to(&world, |_, hello| assert!(hello.epoch != 0 && seen.insert(hello.epoch)));
        }
    }

    fn c7_listener_that_never_answers_costs_the_handshakes_time(world) {
        let _listener = world.domain_listener();
        let options = Options::new().handshake_timeout(Duration::from_millis(100));
        let since = Instant::now();
        let error = world.connecting.connect::<Stream>(&world.address, &options).unwrap_err();
        assert!(matches!(error, Error::TimedOut), "{error}");
        assert!((Duration::from_millis(100)..SOON / 2).contains(&since.elapsed()));
    }

    fn c7_listener_that_hangs_up_is_gone_at_once(world) {
        let since = Instant::now();
        // The connection is dropped when the closure returns.
        let mut listener = world.domain_listener();
        let error = thread::scope(|scope| {
            let client =
                scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &Options::new()).unwrap_err());
            drop(raw::open(&mut *listener));
            client.join().unwrap()
        });
        assert!(matches!(error, Error::PeerGone), "{error}");
        assert!(since.elapsed() < Duration::from_secs(2));
    }

    fn c7_silent_peers_keep_nobody_waiting(world) {
        let mut listener = world.listen::<Stream>();
        let mut silent: Vec<_> = Vec::new();
        for _ in 0..200 {
            silent.push(world.connect_raw());
            assert!(listener.try_accept().unwrap().is_none());
        }
        let since = Instant::now();
        meet(&world, &mut listener);
        assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
        // The caller that came first was dropped first; the latest may still send.
        assert!(matches!(silent[0].recv(0), Err(DomainError::PeerGone)));
        assert!(matches!(silent[199].recv(0), Ok(None)));
    }

    fn c7_silent_peer_is_dropped_after_its_time(world) {
        let options = Options::new().handshake_timeout(Duration::from_millis(50));
        let mut listener = world.listening.listen::<Stream>(&world.address, &options).unwrap();
        let mut silent = world.connect_raw();
        let none = listener.accept_until(Deadline::after(Duration::from_millis(300)));
        assert!(matches!(none, Err(Error::TimedOut)));
        assert!(matches!(silent.recv(0), Err(DomainError::PeerGone)));
    }

    fn h1_ring_is_not_followed_where_hand_over_is_not_in_force(world) {
        let mut listener = world.listen::<Stream>();
        let mut link = world.connect_raw();
        let plain = Greeting { offered: Features::NONE, ..raw::greeting() };
        let (control, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(plain).encode(), 0);
        let mut stream = listener.accept_until(Deadline::after(SOON)).unwrap();
        let ring = Message::Ring { generation: 1, epoch: raw::EPOCH }.encode();
        let _kept = raw::send_with_segment(&mut *link, &ring, 1);
        set_writer_state(&control, 1, 0);
        assert_eq!(clause(&read(&mut stream).unwrap_err()), "H-1");
    }

    fn r19_half_that_catches_its_peer_ends_both_and_says_aborted_in_both_words(world) {
        for forged in [words::HEAD, words::TAIL] {
            let mut listener = world.listen::<Stream>();
            let mut link = world.connect_raw();
            let (control, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(raw::greeting()).encode(), 0);
            let stream = listener.accept_until(Deadline::after(SOON)).unwrap();
            let welcome = link.recv(1 << 31).unwrap().expect("it was sent before the listener agreed");
            let theirs = welcome.segment.unwrap();
            let said = |word| theirs.word(word).load_acquire().check(Ok::<_, ()>).unwrap() & 0xff;
            assert_eq!((said(words::WRITER_STATE), said(words::READER_STATE)), (1, 1));
            let (mut reads, mut writes) = stream.into_split();
            control.word(forged).store_release(1 << 40);
            let soon = || Deadline::after(Duration::from_millis(300));
            let caught = if forged == words::HEAD {
                loop {
                    if let Err(error) = writes.write_until(&[0; 4096], soon()) {
                        break error;
                    }
                }
            } else {
                reads.read_until(&mut [0; 64], soon()).unwrap_err()
            };
            assert_eq!(clause(&caught), if forged == words::HEAD { "R-8" } else { "R-7" });
            let other = if forged == words::HEAD {
                reads.read_until(&mut [0; 64], soon()).unwrap_err()
            } else {
                writes.drained_until(soon()).unwrap_err()
            };
            assert_eq!(clause(&other), clause(&caught), "the other half says the same");
            assert_eq!((said(words::WRITER_STATE), said(words::READER_STATE)), (3, 3));
        }
    }

    fn r19_half_that_catches_its_peer_wakes_the_other_which_says_the_same(world) {
        for forged in [words::HEAD, words::TAIL] {
            let mut listener = world.listen::<Stream>();
            let mut link = world.connect_raw();
            let (control, _offer) = raw::send_with_segment(&mut *link, &Message::Hello(raw::greeting()).encode(), 0);
            let stream = listener.accept_until(Deadline::after(SOON)).unwrap();
            let theirs = link.recv(1 << 31).unwrap().and_then(|welcome| welcome.segment).unwrap();
            let asleep_at = if forged == words::HEAD { words::WANT_DATA } else { words::WANT_SPACE };
            let is_armed = || theirs.word(asleep_at).load_acquire().check(Ok::<_, ()>).unwrap() != words::AWAKE;
            let (mut reads, mut writes) = stream.into_split();
            let waits = Deadline::after(SOON);
            let (caught, woken) = if forged == words::HEAD {
                let other = thread::spawn(move || reads.read_until(&mut [0; 64], waits).unwrap_err());
                eventually("the reader sleeps", is_armed);
                control.word(forged).store_release(1 << 40);
                // The writer reads the head only when it needs to.
                let caught = std::iter::repeat_with(|| writes.write_until(&[0; 4096], waits)).find_map(Result::err);
                (caught.unwrap(), other.join().unwrap())
            } else {
                writes.write_until(&[0; 64], waits).unwrap();
                let other = thread::spawn(move || writes.drained_until(waits).unwrap_err());
                eventually("the writer sleeps", is_armed);
                control.word(forged).store_release(1 << 40);
                (reads.read_until(&mut [0; 64], waits).unwrap_err(), other.join().unwrap())
            };
            assert_eq!(clause(&caught), if forged == words::HEAD { "R-8" } else { "R-7" });
            assert_eq!(clause(&woken), clause(&caught), "the half that slept");
        }
    }

    fn h1_announced_ring_that_was_not_offered_ends_the_channel(world) {
        let (mut stream, _link, control) = half_raw(&world);
        set_writer_state(&control, 1, 0);
        assert_eq!(clause(&read(&mut stream).unwrap_err()), "H-1");
        assert!(read(&mut stream).is_err(), "it is of no more use");
    }

    fn h1_offered_ring_that_is_not_the_one_announced_ends_the_channel(world) {
        let ring = |generation, epoch| Message::Ring { generation, epoch }.encode();
        let offers: [(Vec<u8>, u16); 5] = [
            (ring(2, raw::EPOCH), 2),
            (ring(1, raw::EPOCH), 2),
            (ring(1, 1), 1),
            (Message::Hello(raw::greeting()).encode(), 0),
            (vec![0; 64], 1),
        ];
        for (message, generation) in offers {
            let (mut stream, mut link, control) = half_raw(&world);
            let _kept = raw::send_with_segment(&mut *link, &message, generation);
            set_writer_state(&control, 1, 0);
            assert!(["H-1", "C-2", "C-11"].contains(&clause(&read(&mut stream).unwrap_err())));
        }
        let (mut stream, mut link, control) = half_raw(&world);
        link.send(&ring(1, raw::EPOCH), None).unwrap();
        set_writer_state(&control, 1, 0);
        assert_eq!(clause(&read(&mut stream).unwrap_err()), "H-1", "without its segment");
    }

    fn h5_state_out_of_turn_ends_the_channel(world) {
        for (ready, current) in [(2, 0), (1, 1), (0, 1), (0xffff, 0), (2, 1)] {
            let (mut stream, _link, control) = half_raw(&world);
            set_writer_state(&control, ready, current);
            assert_eq!(clause(&read(&mut stream).unwrap_err()), "H-5", "{ready} {current}");
        }
    }

    fn r7_r15_lying_words_end_the_channel_with_the_clause(world) {
        for (word, value, broken) in [
            (words::TAIL, 4097, "R-7"),
            (words::TAIL, u64::MAX, "R-7"),
            (words::WRITER_STATE, 9, "R-15"),
            (words::WRITER_STATE, 1 << 60, "R-15"),
        ] {
            let (mut stream, _link, control) = half_raw(&world);
            control.word(word).store_release(value);
            let error = read(&mut stream).unwrap_err();
            assert_eq!((clause(&error), error.kind()), (broken, ErrorKind::InvalidData));
        }
        let (mut stream, _link, control) = half_raw(&world);
        control.word(words::HEAD).store_release(1 << 40);
        let (_, write) = stream.split();
        let error = loop {
            if let Err(error) = write.write_until(&[0; 4096], Deadline::after(Duration::from_millis(300))) {
                break error;
            }
        };
        assert_eq!(clause(&error), "R-8");
    }

    fn r12_peer_that_never_notifies_costs_the_deadline(world) {
        let (mut stream, _link, _control) = half_raw(&world);
        assert!(matches!(read(&mut stream), Err(Error::TimedOut)));
        assert_eq!(stream.liveness(), Liveness::Running);
    }
}

fn harsh_pair(options: &Options) -> (World, Stream, Stream) {
    let world = World::harsh();
    let (server, client) = world.pair_with::<Stream>(options);
    (world, server, client)
}

#[test]
fn r25_storm_of_notifications_costs_a_waiting_reader_little_and_no_data() {
    let (world, mut server, mut client) = harsh_pair(&Options::new());
    let (hypervisor, a, _) = world.hypervisor.as_ref().unwrap();
    let storm = hypervisor.storm(a);
    let (_, write) = client.split();
    let data = noise(1 << 20, 5);
    thread::scope(|scope| {
        scope.spawn(|| data.chunks(1000).for_each(|chunk| write.write_all(chunk).unwrap()));
        let mut got = vec![0; data.len()];
        server.read_exact(&mut got).unwrap();
        assert!(got == data);
    });
    // Only the waiter's own time counts: it reads the clock of its thread.
    let own = |id| {
        let time = clock_gettime(id);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let (before, wait) = (own(ClockId::ThreadCPUTime), Duration::from_secs(1));
    assert!(matches!(server.split().0.read_until(&mut [0; 8], Deadline::after(wait)), Err(Error::TimedOut)));
    let spent = own(ClockId::ThreadCPUTime) - before;
    eprintln!("{} notifications; a second of waiting cost {spent:?} of CPU", storm.notifications());
    assert!(spent < wait / 20, "{spent:?} of CPU in {wait:?}");
}

#[test]
fn c8_paused_peer_costs_the_deadline_and_loses_nothing() {
    let (world, mut server, mut client) = harsh_pair(&Options::new());
    let (hypervisor, _, b) = world.hypervisor.as_ref().unwrap();
    client.write_all(b"before").unwrap();
    hypervisor.pause(b);
    assert_eq!(server.liveness(), Liveness::Paused);
    server.read_exact(&mut [0; 6]).unwrap();
    assert!(matches!(read(&mut server), Err(Error::TimedOut)));
    assert_eq!((server.liveness(), server.split().0.ending()), (Liveness::Paused, None));
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut after = [0; 5];
            server.read_exact(&mut after).unwrap();
            (server.liveness(), after)
        });
        hypervisor.resume(b);
        client.write_all(b"after").unwrap();
        assert_eq!(reader.join().unwrap(), (Liveness::Running, *b"after"));
    });
}

#[test]
fn c10_destroyed_domain_is_drained_then_told() {
    let (world, mut server, mut client) = harsh_pair(&Options::new());
    let (hypervisor, _, b) = world.hypervisor.as_ref().unwrap();
    client.write_all(b"last words").unwrap();
    hypervisor.kill_domain(b);
    let mut words = Vec::new();
    server.read_to_end(&mut words).unwrap();
    assert_eq!((words.as_slice(), server.split().0.ending()), (&b"last words"[..], Some(Ending::DomainGone)));
    assert_eq!(server.liveness(), Liveness::DomainGone);
    let broken = loop {
        if let Err(error) = server.write(&[0; 512 << 10]) {
            break error;
        }
    };
    assert_eq!(broken.kind(), ErrorKind::BrokenPipe);
}

#[test]
fn c10_write_that_finds_the_peer_gone_wrote_nothing() {
    let (world, mut server, client) = harsh_pair(&Options::new());
    let (hypervisor, _, b) = world.hypervisor.as_ref().unwrap();
    hypervisor.kill_process(b);
    let mut written = 0;
    let broken = loop {
        match server.write(&[7; 8]) {
            Ok(count) => written += count as u64,
            Err(error) => break error,
        }
    };
    assert_eq!((broken.kind(), server.statistics().sent.counters.bytes), (ErrorKind::BrokenPipe, written));
    drop(client);
}

#[test]
fn c10_revoked_memory_ends_the_channel_cleanly() {
    let (world, mut server, mut client) = harsh_pair(&Options::new());
    let (hypervisor, a, b) = world.hypervisor.as_ref().unwrap();
    client.write_all(b"last words").unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut words = Vec::new();
            server.read_to_end(&mut words).unwrap();
            (words, server.split().0.ending(), server.liveness())
        });
        hypervisor.revoke(b, a);
        assert_eq!(reader.join().unwrap(), (b"last words".to_vec(), Some(Ending::Revoked), Liveness::Revoked));
    });
    assert_eq!(server.write_all(&vec![0; 4 << 20]).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

/// Runs a pair of endpoints. `forge` gets the number of each round and forges the client's words meanwhile. Returns how
/// they ended.
fn among_forged_words(
    limit: Duration,
    rounds: u64,
    mut forge: impl FnMut(&tombolo_testing::harsh::Forger, u64),
) -> [Result<usize, Error>; 2] {
    let (world, server, client) = harsh_pair(&Options::new().ring_size(16 << 10));
    let (hypervisor, _, b) = world.hypervisor.as_ref().unwrap();
    let forger = hypervisor.forgers(b).unwrap().remove(0);
    let data = &noise(1 << 20, 9)[..];
    let over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        // The hostile side's own halves may find anything; the victim's two halves must end.
        let (mut liar_reads, mut liar_writes) = client.into_split();
        let (mut reads, mut writes) = server.into_split();
        let short = || Deadline::after(Duration::from_millis(5));
        let over = &over;
        let is_over = move || over.load(std::sync::atomic::Ordering::Relaxed);
        scope.spawn(move || {
            let mut rest = data;
            while !rest.is_empty() && !is_over() {
                match liar_writes.write_until(&rest[..rest.len().min(3000)], short()) {
                    Ok(n) => rest = &rest[n..],
                    Err(Error::TimedOut) => {}
                    Err(_) => return,
                }
            }
        });
        scope.spawn(move || {
            while !is_over() && !matches!(liar_reads.read_until(&mut [0; 3000], short()), Ok(0) | Err(Error::Closed)) {}
        });
        let reader = scope.spawn(move || {
            let (mut got, mut buffer) = (0, [0; 2000]);
            let until = Deadline::after(limit);
            while !until.expired() {
                match reads.read_until(&mut buffer, short()) {
                    Ok(0) => return Ok(got),
                    Ok(n) => {
                        let right = data.get(got..got + n).is_some_and(|sent| *sent == buffer[..n]);
                        got = if right { got + n } else { usize::MAX };
                        if !right {
                            return Ok(got);
                        }
                    }
                    Err(Error::TimedOut) => {}
                    Err(error) => return Err(error),
                }
            }
            Err(Error::TimedOut)
        });
        let writer = scope.spawn(move || {
            let (mut sent, until) = (0, Deadline::after(limit));
            while sent < data.len() && !until.expired() {
                match writes.write_until(&data[sent..(sent + 2500).min(data.len())], short()) {
                    Ok(n) => sent += n,
                    Err(Error::TimedOut) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(sent)
        });
        for round in 0..rounds {
            forge(&forger, round);
        }
        let ends = [reader.join().unwrap(), writer.join().unwrap()];
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        ends
    })
}

#[test]
fn r12_r14_forged_words_of_sleep_and_cpu_spoil_no_data() {
    let mut state = 0x1234_5678u64;
    let ends = among_forged_words(SOON, 20_000, |forger, _| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let word = [words::WANT_DATA, words::WANT_SPACE, words::CPU][(state >> 33) as usize % 3];
        forger.store(word, state);
    });
    assert!(matches!(ends, [Ok(got), Ok(sent)] if got == 1 << 20 && sent == 1 << 20), "{ends:?}");
}

#[test]
fn r7_r8_mutated_words_under_load_end_in_a_typed_error_and_never_in_a_hang() {
    let long = std::env::var_os("TOMBOLO_LONG").is_some();
    let mut ended = 0;
    for seed in 0..if long { 500 } else { 30u64 } {
        let mut state = seed + 1;
        let since = Instant::now();
        let ends = among_forged_words(Duration::from_millis(300), 300, |forger, _| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let word = words::TAIL + (state >> 40) as usize % ((words::RESERVED - words::TAIL) / 8) * 8;
            let mut before = [0; 8];
            forger.read(word, &mut before);
            let near = u64::from_le_bytes(before).wrapping_add(state >> 60);
            forger.store(word, if state & 1 == 0 { near } else { state });
        });
        assert!(since.elapsed() < SOON, "seed {seed} took {:?}", since.elapsed());
        for end in ends {
            match end {
                Ok(_) => {}
                Err(Error::Corrupt(_) | Error::Malformed { .. } | Error::Closed | Error::PeerGone) => ended += 1,
                Err(Error::TimedOut) => {}
                Err(other) => panic!("seed {seed}: {other:?}"),
            }
        }
    }
    assert!(ended > 0, "no forged word was ever noticed");
}

#[test]
fn c7_broken_handshakes_leave_no_descriptor_and_no_memory() {
    let world = World::local();
    let mut listener = world.listen::<Stream>();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let bad = Message::Hello(Greeting { version_min: 9, version_max: 9, ..raw::greeting() }).encode();
    let _ = answer_with(&world, &mut listener, &bad, honest());
    let (before, used) = (descriptors(), cpu());
    for _ in 0..200 {
        let _ = answer_with(&world, &mut listener, &bad, honest());
        let _ = answer_with(&world, &mut listener, &bad[..10], honest());
        let _ = answer_with(&world, &mut listener, &Message::Hello(raw::greeting()).encode(), Some((8192, [1; LEN])));
    }
    // Other tests of this process open and close descriptors; a leak would be of hundreds.
    eventually("descriptors are closed", || descriptors() < before + 150);
    eprintln!("600 broken handshakes cost {:?}", cpu() - used);
}

#[test]
fn c4_messages_and_streams_are_told_apart_by_a_peer_that_agrees_and_then_does_not() {
    let world = World::local();
    let mut listener = world.domain_listener();
    let error = thread::scope(|scope| {
        let client = scope.spawn(|| world.connecting.connect::<Messages>(&world.address, &Options::new()).unwrap_err());
        let mut link = raw::open(&mut *listener);
        raw::receive_message(&mut *link).unwrap();
        let _kept = raw::send_with_segment(&mut *link, &Message::Welcome(raw::greeting()).encode(), 0);
        client.join().unwrap()
    });
    assert_eq!(clause(&error), "C-4");
}
