// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Properties that must hold in every interleaving.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use loom::thread;
use tombolo_layout::state::Phase;
use tombolo_ring::{Error, OwnRing, Reader, Writer};

use crate::{
    check, check_large,
    doorbell::Doorbells,
    is_long,
    memory::Sound,
    pipe::{
        BATCH, Kind, Pipe, messages, next_ring, notify_if_owed, read, read_two_and_close, recv, send, sleep_until,
        stream, write_all, write_and_drain,
    },
};

/// Runs one writer and one reader, each on a thread of its own.
fn one_way(
    kind: Kind,
    write: impl FnOnce(&mut Writer<Sound>, &mut Doorbells) + 'static,
    read: impl FnOnce(&mut Reader<Sound>, &mut Doorbells),
) {
    let pipe = Pipe::new(kind);
    let (mut writer, mut reader) = (pipe.writer(), pipe.reader());
    let (mut writers, mut readers) = Doorbells::pair();
    let other = thread::spawn(move || write(&mut writer, &mut writers));
    read(&mut reader, &mut readers);
    other.join().unwrap();
}

/// Checks that records arrive in order, and that no endpoint notifies more often than the other published a wait word.
fn records_through(kind: Kind, records: u8) {
    let pipe = Pipe::new(kind);
    let asked = [pipe.want_data.own.clone(), pipe.want_space.own.clone()];
    let (mut writer, mut reader) = (pipe.writer::<true>(), pipe.reader::<true>());
    let (mut writers, mut readers) = Doorbells::pair();
    let other = thread::spawn(move || {
        (0..records).for_each(|i| send(&mut writer, &mut writers, &[i; 3]).unwrap());
        writer.counters().notifications_sent
    });
    (0..records).for_each(|i| assert_eq!(recv(&mut reader, &mut readers), Ok(Ok(vec![i; 3]))));
    let sent = [other.join().unwrap(), reader.counters().notifications_sent];
    for (sent, asked) in sent.iter().zip(&asked) {
        assert!(*sent <= asked.stores(), "{sent} notifications for {} wait words", asked.stores());
    }
}

#[test]
fn r12_two_records_through_a_ring_of_one_arrive_in_order() {
    check("two records", 3, || records_through(messages(16), 2));
}

/// The proofs would be worth little if no endpoint ever slept in them.
#[test]
fn r12_both_ends_sleep_in_some_interleavings() {
    let sleeps: Arc<[AtomicUsize; 2]> = Arc::default();
    let seen = Arc::clone(&sleeps);
    check("sleeps", 2, move || {
        let (of_writer, of_reader) = (Arc::clone(&seen), Arc::clone(&seen));
        one_way(
            messages(16),
            move |writer, doorbells| {
                (0..2).for_each(|i| send(writer, doorbells, &[i; 3]).unwrap());
                of_writer[0].fetch_add(writer.counters().sleeps as usize, Ordering::Relaxed);
            },
            move |reader, doorbells| {
                (0..2).for_each(|i| assert_eq!(recv(reader, doorbells), Ok(Ok(vec![i; 3]))));
                of_reader[1].fetch_add(reader.counters().sleeps as usize, Ordering::Relaxed);
            },
        );
    });
    eprintln!("sleeps of writer and reader: {sleeps:?}");
    assert!(sleeps.iter().all(|count| count.load(Ordering::Relaxed) > 0));
}

#[test]
fn r12_three_records_through_a_ring_of_one_arrive_in_order() {
    check_large("three records", 3, || records_through(messages(16), 3));
}

#[test]
fn r12_three_records_through_a_ring_of_two_arrive_in_order() {
    check_large("three records, ring of two", 3, || records_through(messages(32), 3));
}

#[test]
fn r11_records_across_the_wrap_of_positions_arrive_in_order() {
    for start in [(1 << 63) - 16, u64::MAX - 15] {
        check("records across the wrap", 3, move || records_through(Kind { start, ..messages(16) }, 2));
    }
}

#[test]
fn r12_stream_through_eight_bytes_arrives_in_order() {
    check_large("stream", 3, || {
        one_way(
            stream(8),
            |writer, doorbells| write_all(writer, doorbells, b"tombolo, no").unwrap(),
            |reader, doorbells| assert_eq!(read(reader, doorbells, 5, 11), Ok((b"tombolo, no".to_vec(), None))),
        );
    });
}

#[test]
fn r24_batch_is_flushed_before_the_writer_waits_or_closes() {
    check_large("batch", 3, || {
        one_way(
            messages(16),
            |writer, doorbells| {
                writer.set_flush_policy(BATCH);
                (0..2).for_each(|i| send(writer, doorbells, &[i; 3]).unwrap());
                writer.close();
                notify_if_owed(writer, doorbells);
            },
            |reader, doorbells| {
                (0..2).for_each(|i| assert_eq!(recv(reader, doorbells), Ok(Ok(vec![i; 3]))));
                assert_eq!(recv(reader, doorbells), Ok(Err(Phase::Closed)));
            },
        );
    });
}

#[test]
fn r17_writer_that_ends_loses_nothing() {
    for (phase, most) in [(Phase::Closed, 2), (Phase::Aborted, 1)] {
        for records in 0..=most {
            check(&format!("writer: {phase:?} after {records} records"), 3, move || {
                one_way(
                    messages(16),
                    move |writer, doorbells| {
                        (0..records).for_each(|i| send(writer, doorbells, &[i; 3]).unwrap());
                        if phase == Phase::Closed {
                            writer.close()
                        } else {
                            writer.abort()
                        }
                        notify_if_owed(writer, doorbells);
                    },
                    move |reader, doorbells| {
                        (0..records).for_each(|i| assert_eq!(recv(reader, doorbells), Ok(Ok(vec![i; 3]))));
                        assert_eq!(recv(reader, doorbells), Ok(Err(phase)));
                    },
                );
            });
        }
    }
}

#[test]
fn r17_stream_that_ends_loses_nothing() {
    check_large("end of a stream", 3, || {
        one_way(
            stream(8),
            |writer, doorbells| {
                write_all(writer, doorbells, b"tombolo!!").unwrap();
                writer.close();
                notify_if_owed(writer, doorbells);
            },
            |reader, doorbells| {
                let all = read(reader, doorbells, 8, usize::MAX);
                assert_eq!(all, Ok((b"tombolo!!".to_vec(), Some(Phase::Closed))));
            },
        );
    });
}

#[test]
fn r18_reader_that_ends_frees_a_writer_that_waits_for_it() {
    for (abort, name, most) in [(false, "close", 2), (true, "abort", 1)] {
        for records in 0..=most {
            // With three switches it has as many interleavings as most models together.
            let switches = if records == 2 { 2 } else { 3 };
            check(&format!("reader: {name} after {records} records"), switches, move || {
                one_way(
                    messages(16),
                    |writer, doorbells| {
                        let ended = (0..).find_map(|i| send(writer, doorbells, &[i; 3]).err());
                        assert_eq!(ended, Some(Error::Closed));
                    },
                    move |reader, doorbells| {
                        (0..records).for_each(|i| assert_eq!(recv(reader, doorbells), Ok(Ok(vec![i; 3]))));
                        if abort {
                            reader.abort()
                        } else {
                            reader.close()
                        }
                        notify_if_owed(reader, doorbells);
                    },
                );
            });
        }
    }
}

#[test]
fn r33_writer_learns_that_everything_was_read_by_a_reader_that_closed() {
    check("drained", 3, || one_way(messages(32), write_and_drain, read_two_and_close));
}

#[test]
fn r16_both_ends_may_close_at_once() {
    check("both close", 3, || {
        one_way(
            messages(16),
            |writer, doorbells| {
                let sent = send(writer, doorbells, &[0; 3]);
                assert!(matches!(sent, Ok(()) | Err(Error::Closed)));
                writer.close();
                notify_if_owed(writer, doorbells);
            },
            |reader, doorbells| {
                reader.close();
                notify_if_owed(reader, doorbells);
            },
        );
    });
}

/// A request and its answer at each endpoint; both pipes notify the same two doorbells.
#[test]
fn r12_both_directions_at_once_over_one_pair_of_bells() {
    fn talk(mut writer: Writer<Sound>, mut reader: Reader<Sound>, mut doorbells: Doorbells, records: u8) {
        for i in 0..records {
            send(&mut writer, &mut doorbells, &[i; 3]).unwrap();
            assert_eq!(recv(&mut reader, &mut doorbells), Ok(Ok(vec![i; 3])));
        }
    }
    for records in 1..3 {
        check_large(&format!("both directions, {records} records each"), 3, move || {
            let (there, back) = (Pipe::new(messages(16)), Pipe::new(messages(16)));
            let (a, b) = Doorbells::pair();
            let (writer, reader) = (back.writer(), there.reader());
            let other = thread::spawn(move || talk(writer, reader, b, records));
            talk(there.writer(), back.reader(), a, records);
            other.join().unwrap();
        });
    }
}

/// Moves through `rings` as soon as the reader is ready for the next, with records before, between and behind. Returns
/// in how many interleavings it got how far.
fn moving<const RINGS: usize>(name: &str, rings: [usize; RINGS], records: u8, switches: usize) -> Vec<usize> {
    let reached: Arc<Vec<AtomicUsize>> = Arc::new((0..=RINGS).map(|_| AtomicUsize::new(0)).collect());
    let seen = Arc::clone(&reached);
    check_large(name, switches, move || {
        let (mut offers, mut follows): (Vec<_>, Vec<_>) = rings.iter().rev().map(|len| next_ring(*len)).unzip();
        let seen = Arc::clone(&seen);
        one_way(
            messages(16),
            move |writer, doorbells| {
                send(writer, doorbells, &[0; 3]).unwrap();
                for i in 1..records {
                    if !offers.is_empty() && writer.handover().can_offer().unwrap() {
                        writer.handover().announce();
                        notify_if_owed(writer, doorbells);
                    }
                    loop {
                        if writer.handover().reader_ready().unwrap() {
                            writer.handover().switch_to(offers.pop().unwrap());
                            notify_if_owed(writer, doorbells);
                        }
                        let sent = writer.send(&[i; 3]).unwrap();
                        notify_if_owed(writer, doorbells);
                        if sent.is_some() {
                            break;
                        }
                        sleep_until(writer, doorbells, 16).unwrap();
                    }
                }
                seen[RINGS - offers.len()].fetch_add(1, Ordering::Relaxed);
                writer.close();
                notify_if_owed(writer, doorbells);
            },
            move |reader, doorbells| {
                let (mut record, mut got) = ([0; 24], Vec::new());
                loop {
                    if let Some(generation) = reader.handover().announced().unwrap() {
                        reader.handover().prepare(generation, follows.pop().unwrap()).unwrap();
                        notify_if_owed(reader, doorbells);
                    }
                    let received = reader.recv(&mut record).unwrap();
                    notify_if_owed(reader, doorbells);
                    if let Some(len) = received {
                        got.push(record[..len].to_vec());
                    } else if let Some(phase) = reader.finished().unwrap() {
                        assert_eq!(phase, Phase::Closed);
                        break;
                    } else {
                        sleep_until(reader, doorbells, 1).unwrap();
                    }
                }
                assert_eq!(got, (0..records).map(|i| vec![i; 3]).collect::<Vec<_>>());
            },
        );
    });
    let reached = reached.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    eprintln!("{name}: ended in its first ring, in the one after, ...: {reached:?}");
    reached
}

#[test]
fn h4_pipe_that_moves_under_load_loses_and_swaps_nothing() {
    let reached = moving("move", [32], 3, 2);
    // It takes two switches that the writer ends before the reader is ready.
    assert!(reached[1] > 0 && (reached[0] > 0 || !is_long()));
}

#[test]
fn h5_pipe_that_moves_twice_under_load_loses_and_swaps_nothing() {
    let reached = moving("two moves, the second to a smaller ring", [32, 16], 4, 1);
    assert!(reached[2] > 0);
}

/// Returns a writer that goes ahead to a ring of 32 bytes as soon as its own is full, and writes `len` bytes in all.
fn ahead(len: u8, next: OwnRing<Sound>) -> impl FnOnce(&mut Writer<Sound>, &mut Doorbells) {
    move |writer, doorbells| {
        let (bytes, mut next) = ((0..len).collect::<Vec<_>>(), Some(next));
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match writer.write(rest).unwrap() {
                Some(n) => rest = &rest[n..],
                None => writer.handover().go_ahead(next.take().expect("all the rest goes there")),
            }
            notify_if_owed(writer, doorbells);
        }
        writer.close();
        notify_if_owed(writer, doorbells);
    }
}

#[test]
fn h9_writer_that_goes_ahead_loses_and_swaps_nothing() {
    check("ahead", 2, || {
        let (own, seen) = next_ring(32);
        let mut seen = Some(seen);
        one_way(stream(8), ahead(20, own), move |reader, doorbells| {
            reader.handover().allow_ahead();
            let (mut piece, mut got) = ([0; 5], Vec::new());
            loop {
                let read = reader.read(&mut piece).unwrap();
                notify_if_owed(reader, doorbells);
                if let Some(n) = read {
                    got.extend_from_slice(&piece[..n]);
                } else if let Some(phase) = reader.finished().unwrap() {
                    assert_eq!(phase, Phase::Closed);
                    break;
                } else if let Some(generation) = reader.handover().announced().unwrap() {
                    reader.handover().prepare(generation, seen.take().unwrap()).unwrap();
                    notify_if_owed(reader, doorbells);
                } else {
                    sleep_until(reader, doorbells, 1).unwrap();
                }
            }
            assert_eq!(got, (0..20).collect::<Vec<_>>());
        });
    });
}

#[test]
fn h9_reader_that_waits_for_more_than_its_ring_holds_is_woken_by_what_is_in_the_next() {
    check_large("ahead, and so many bytes waited for", 3, || {
        let (own, seen) = next_ring(32);
        let mut seen = Some(seen);
        one_way(stream(8), ahead(20, own), move |reader, doorbells| {
            reader.handover().allow_ahead();
            while reader.handover().find_unread().unwrap() < 20 {
                if let Some(generation) = reader.handover().announced().unwrap() {
                    reader.handover().prepare(generation, seen.take().unwrap()).unwrap();
                    notify_if_owed(reader, doorbells);
                } else {
                    sleep_until(reader, doorbells, 20).unwrap();
                }
            }
            let mut got = [0; 20];
            assert_eq!(reader.read(&mut got), Ok(Some(20)));
            assert_eq!(got[..], (0..20).collect::<Vec<_>>()[..]);
        });
    });
}
