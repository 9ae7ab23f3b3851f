// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guarantees of a channel, on every backend.

mod common;

use std::{
    io::{ErrorKind, IoSlice, Read, Write},
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use common::{SOON, eventually, let_pass, noise};
use tombolo_channel::fast::{FastRead, FastWrite};
use tombolo_channel::{Deadline, Ending, Error, FlushPolicy, Messages, Options, Stream};

on_every_backend! {
    fn r33_writer_is_told_that_all_was_read_also_by_one_who_closed_since(world) {
        let (mut server, mut client) = world.streams();
        let write = server.split().1;
        write.write_all_until(&[7; 100], Deadline::after(SOON)).unwrap();
        // The peer reads exactly the bytes there are, and never checks for more.
        client.split().0.read_until(&mut [0; 100], Deadline::after(SOON)).unwrap();
        drop(client);
        write.drained_until(Deadline::after(SOON)).unwrap();
    }

    fn r33_writer_that_knows_that_its_peer_is_gone_is_told_that_all_was_read(world) {
        let (mut server, mut client) = world.streams();
        let write = server.split().1;
        write.write_all_until(&[7; 100], Deadline::after(SOON)).unwrap();
        client.split().0.read_until(&mut [0; 100], Deadline::after(SOON)).unwrap();
        drop(client);
        let until = Deadline::after(SOON);
        while write.flush().is_ok() {
            assert!(!until.expired(), "one who only tries never hears of it");
        }
        write.drained_until(Deadline::after(SOON)).unwrap();
    }

    fn r33_writer_is_told_where_not_all_was_read_by_one_who_closed(world) {
        let (mut server, mut client) = world.streams();
        let write = server.split().1;
        write.write_all_until(&[7; 100], Deadline::after(SOON)).unwrap();
        client.split().0.read_until(&mut [0; 99], Deadline::after(SOON)).unwrap();
        client.split().0.close();
        assert!(matches!(write.drained_until(Deadline::after(SOON)), Err(Error::Closed)));
    }

    fn c3_stream_carries_bytes_both_ways_at_once(world) {
        let (server, client) = world.streams();
        let data = noise(8 << 20, 7);
        let pump = |stream: Stream, data: &[u8]| {
            let (mut read, mut write) = stream.into_split();
            thread::scope(|scope| {
                scope.spawn(move || { write.write_all(data).unwrap(); write.close(); });
                let mut got = Vec::new();
                read.read_to_end(&mut got).unwrap();
                assert_eq!(read.ending(), Some(Ending::Closed));
                got
            })
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| pump(server, &data));
            assert!(pump(client, &data) == data);
            assert!(other.join().unwrap() == data);
        });
    }

    fn r15_sender_of_messages_gives_up_in_the_middle(world) {
        let (server, client): (Messages, Messages) = world.pair();
        let ((mut sender, _keep), (_keep2, mut receiver)) = (server.into_split(), client.into_split());
        sender.send(b"last").unwrap();
        sender.abort();
        let mut buffer = [0; 8];
        assert_eq!(receiver.recv_until(&mut buffer, Deadline::after(SOON)).unwrap(), Some(4));
        assert_eq!(receiver.recv_until(&mut buffer, Deadline::after(SOON)).unwrap(), None);
        assert_eq!(receiver.ending(), Some(Ending::Aborted));
        assert!(matches!(sender.send(b"more"), Err(Error::Closed)));
    }

    fn shortest_way_and_the_long_one_make_one_stream(world) {
        let (server, client) = world.streams();
        let ((mut read, _keep), (_keep2, mut write)) = (server.into_split(), client.into_split());
        let data = noise(1 << 20, 3);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut at_once = 0;
                for piece in data.chunks(97) {
                    if write.write_at_once(piece) {
                        at_once += 1;
                    } else {
                        write.write_all(piece).unwrap();
                    }
                }
                assert!(at_once > 0, "the shortest way is never taken");
                write.close();
            });
            let (mut got, mut buffer) = (Vec::new(), [0; 60]);
            loop {
                let whole = got.len() % 2 == 0;
                let len = match read.read_at_once(&mut buffer, whole) {
                    0 => read.read(&mut buffer).unwrap(),
                    len => { assert!(!whole || len == 60); len }
                };
                if len == 0 {
                    break;
                }
                got.extend_from_slice(&buffer[..len]);
            }
            assert!(got == data);
        });
        assert_eq!((read.read_at_once(&mut [0; 9], false), read.ending()), (0, Some(Ending::Closed)));
    }

    fn r22_messages_arrive_whole_apart_and_in_order(world) {
        let (server, client) = world.pair_with::<Messages>(&Options::new().ring_size(64 << 10));
        let (mut sender, _keep) = client.into_split();
        let (_keep2, mut receiver) = server.into_split();
        let sizes = [0usize, 1, 7, 8, 9, 63, 64, 65, 1000, 4096, 30_000, (64 << 10) - 8];
        thread::scope(move |scope| {
            scope.spawn(move || {
                for round in 0..200 {
                    for size in sizes {
                        sender.send(&noise(size, (round * 100_000 + size) as u64)).unwrap();
                    }
                }
            });
            let mut buffer = vec![0; 64 << 10];
            for round in 0..200 {
                for size in sizes {
                    assert_eq!(receiver.recv(&mut buffer).unwrap(), Some(size));
                    assert!(buffer[..size] == noise(size, (round * 100_000 + size) as u64));
                }
            }
            assert_eq!(receiver.recv(&mut buffer).unwrap(), None);
            assert_eq!(receiver.ending(), Some(Ending::Closed));
        });
    }

    fn r21_message_larger_than_the_ring_is_refused_and_does_no_harm(world) {
        let (mut server, mut client) = world.pair_with::<Messages>(&Options::new().ring_size(4096));
        let max = client.split().0.message_max();
        assert_eq!(max, 4088);
        let error = client.send(&vec![0; 4089]).unwrap_err();
        assert!(matches!(error, Error::TooLarge { len: 4089, max: 4088 }), "{error}");
        client.send(&vec![1; 4088]).unwrap();
        let mut small = [0; 10];
        let error = server.recv(&mut small).unwrap_err();
        assert!(matches!(error, Error::BufferTooSmall { len: 4088, buffer: 10 }), "{error}");
        assert_eq!(server.recv(&mut vec![0; 4088]).unwrap(), Some(4088));
    }

    fn c4_stream_and_messages_do_not_mix(world) {
        let mut listener = world.listen::<Messages>();
        thread::scope(|scope| {
            scope.spawn(|| {
                let refused = world.connecting.connect::<Stream>(&world.address, &Options::new()).unwrap_err();
                assert!(matches!(&refused, Error::Refused { reason, .. } if reason.contains("expects messages")));
            });
            let none = listener.accept_until(Deadline::after(Duration::from_millis(300)));
            assert!(matches!(none, Err(Error::TimedOut)));
        });
        drop(listener);
        let mut listener = world.listen::<Stream>();
        thread::scope(|scope| {
            scope.spawn(|| {
                let refused = world.connecting.connect::<Messages>(&world.address, &Options::new()).unwrap_err();
                assert!(matches!(&refused, Error::Refused { reason, .. } if reason.contains("expects a stream")));
            });
            let none = listener.accept_until(Deadline::after(Duration::from_millis(300)));
            assert!(matches!(none, Err(Error::TimedOut)));
        });
    }

    fn c5_ring_larger_than_the_peer_maps_is_refused_with_both_sizes(world) {
        let mut listener = world.listening.listen::<Stream>(&world.address, &Options::new().ring_size(1 << 20)).unwrap();
        thread::scope(|scope| {
            let client = scope.spawn(|| {
                let options = Options::new().ring_size(4096).largest_peer_ring(64 << 10);
                world.connecting.connect::<Stream>(&world.address, &options).unwrap_err()
            });
            let none = listener.accept_until(Deadline::after(Duration::from_millis(300)));
            assert!(matches!(none, Err(Error::TimedOut)));
            let error = client.join().unwrap().to_string();
            assert!(error.contains("1052672") && error.contains("69632"), "{error}");
        });
    }

    fn c1_connect_before_listen_waits_as_long_as_it_was_told(world) {
        let missing = world.connecting.connect::<Stream>(&world.address, &Options::new()).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let patient = Options::new().wait_for_listener(SOON);
        thread::scope(|scope| {
            let client = scope.spawn(|| world.connecting.connect::<Stream>(&world.address, &patient));
            let_pass(Duration::from_millis(50));
            let mut listener = world.listen::<Stream>();
            let _server = listener.accept_until(Deadline::after(SOON)).unwrap();
            client.join().unwrap().unwrap();
        });
    }

    fn c7_deadline_ends_every_wait(world) {
        let (mut server, mut client) = world.pair_with::<Stream>(&Options::new().ring_size(4096));
        let since = Instant::now();
        let wait = Duration::from_millis(30);
        let error = server.split().0.read_until(&mut [0; 8], Deadline::after(wait)).unwrap_err();
        assert!(matches!(error, Error::TimedOut) && since.elapsed() >= wait && since.elapsed() < SOON / 2);
        let (_, write) = client.split();
        assert_eq!(write.write_until(&[1; 8192], Deadline::after(wait)).unwrap(), 4096);
        let error = write.write_until(&[1; 1], Deadline::after(wait)).unwrap_err();
        assert!(matches!(error, Error::TimedOut));
        assert!(matches!(write.drained_until(Deadline::after(wait)), Err(Error::TimedOut)));
    }

    fn c9_words_of_an_end_that_is_accepted_and_goes_at_once_arrive(world) {
        for _ in 0..50 {
            let mut listener = world.listen::<Stream>();
            let (read, ending) = thread::scope(|scope| {
                let client = scope.spawn(|| {
                    let (mut read, _write) = world.connect::<Stream>().into_split();
                    let mut words = String::new();
                    read.read_to_string(&mut words).unwrap();
                    (words, read.ending())
                });
                let mut server = listener.accept_until(Deadline::after(SOON)).unwrap();
                server.write_all(b"hello and goodbye").unwrap();
                drop(server);
                client.join().unwrap()
            });
            assert_eq!((read.as_str(), ending), ("hello and goodbye", Some(Ending::Closed)));
        }
    }

    fn c9_closed_writer_is_drained_then_ends_and_the_other_direction_goes_on(world) {
        let (mut server, client) = world.streams();
        let (mut read, mut write) = client.into_split();
        write.write_all(b"last words").unwrap();
        write.close();
        assert_eq!(write.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        let mut words = Vec::new();
        server.read_to_end(&mut words).unwrap();
        assert_eq!(words, b"last words");
        server.write_all(b"answer").unwrap();
        let mut answer = [0; 6];
        read.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"answer");
    }

    fn r18_writer_learns_that_the_reader_closed_also_while_it_waits(world) {
        let (server, client) = world.pair_with::<Stream>(&Options::new().ring_size(4096));
        let (_read, mut write) = client.into_split();
        let (mut read, _write) = server.into_split();
        thread::scope(move |scope| {
            let writer = scope.spawn(move || loop {
                if let Err(error) = write.write(&[0; 1000]) {
                    return error.kind();
                }
            });
            read.read_exact(&mut [0; 100]).unwrap();
            read.close();
            assert_eq!(writer.join().unwrap(), ErrorKind::BrokenPipe);
        });
    }

    fn r19_aborted_writer_is_told_apart(world) {
        let (mut server, mut client) = world.streams();
        client.write_all(b"half").unwrap();
        client.split().1.abort();
        let mut half = Vec::new();
        server.read_to_end(&mut half).unwrap();
        assert_eq!((half.as_slice(), server.split().0.ending()), (b"half".as_slice(), Some(Ending::Aborted)));
    }

    fn c10_dropped_peer_ends_reads_and_fails_writes(world) {
        let (mut server, client) = world.streams();
        drop(client);
        assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);
        assert_eq!(server.split().0.ending(), Some(Ending::Closed));
        assert_eq!(server.write(&[0; 8]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }

    fn h4_stream_moves_between_rings_under_load_without_a_scratch(world) {
        let (server, client) = world.pair_with::<Stream>(&Options::new().ring_size(16 << 10));
        let (_read, mut write) = client.into_split();
        let (mut read, _write) = server.into_split();
        let data = &noise(24 << 20, 3)[..];
        thread::scope(move |scope| {
            let sent = data;
            let writer = scope.spawn(move || {
                let sizes = [4096, 1 << 20, 8192, 256 << 10, 16 << 10];
                let (mut moves, mut rest) = (0, sent);
                while !rest.is_empty() {
                    let written = write.write(&rest[..rest.len().min(10_007)]).unwrap();
                    rest = &rest[written..];
                    if !write.is_moving() {
                        write.resize(sizes[moves % sizes.len()]).unwrap();
                        moves += 1;
                    }
                }
                moves
            });
            let (mut got, mut buffer) = (0, vec![0; 50_000]);
            loop {
                let n = read.read(&mut buffer).unwrap();
                if n == 0 {
                    break;
                }
                assert!(buffer[..n] == data[got..got + n], "byte {got}");
                got += n;
            }
            assert_eq!(got, data.len());
            let moves = writer.join().unwrap();
            assert!(moves > 3, "only {moves} moves");
        });
    }

    fn h4_messages_move_between_rings_under_load(world) {
        let (server, client) = world.pair_with::<Messages>(&Options::new().ring_size(4096));
        let (mut sender, _a) = client.into_split();
        let (_b, mut receiver) = server.into_split();
        thread::scope(move |scope| {
            scope.spawn(move || {
                for index in 0..40_000u32 {
                    sender.send(&index.to_le_bytes().repeat(index as usize % 90)).unwrap();
                    if !sender.is_moving() {
                        sender.resize(4096 << (index % 5)).unwrap();
                    }
                }
            });
            let mut buffer = [0; 400];
            for index in 0..40_000u32 {
                let len = receiver.recv(&mut buffer).unwrap().unwrap();
                assert_eq!(buffer[..len], index.to_le_bytes().repeat(index as usize % 90));
            }
            assert_eq!(receiver.recv(&mut buffer).unwrap(), None);
        });
    }

    fn r24_batched_writes_are_seen_by_a_sleeping_reader_once_flushed(world) {
        let (mut server, mut client) = world.pair::<Messages>();
        let (sender, _) = client.split();
        sender.set_flush_policy(FlushPolicy::Batch { bytes: 1 << 20, time: SOON });
        thread::scope(|scope| {
            let reader = scope.spawn(|| server.split().1.recv_until(&mut [0; 8], Deadline::after(SOON)).unwrap());
            let_pass(Duration::from_millis(50));
            sender.send(b"one").unwrap();
            sender.flush().unwrap();
            assert_eq!(reader.join().unwrap(), Some(3));
        });
    }

    fn r12_idle_reader_sleeps_and_a_busy_pair_notifies_seldom(world) {
        let (server, client) = world.streams();
        let (mut read, _w) = server.into_split();
        let (_r, mut write) = client.into_split();
        thread::scope(move |scope| {
            scope.spawn(move || { for _ in 0..20_000 { write.write_all(&[7; 1024]).unwrap(); } });
            let (mut total, mut buffer) = (0, vec![0; 16 << 10]);
            while total < 20_000 * 1024 {
                total += read.read(&mut buffer).unwrap();
            }
        });
    }

    fn r5_reserve_and_peek_work_in_place(world) {
        let (mut server, mut client) = world.pair_with::<Messages>(&Options::new().ring_size(4096));
        for round in 0..100u8 {
            let (first, second) = client.split().0.reserve_until(100, Deadline::after(SOON)).unwrap();
            first.fill(round);
            second.fill(round);
            client.split().0.commit(90).unwrap();
            assert!(server.split().1.wait_until(Deadline::after(SOON)).unwrap());
            let (first, second) = server.split().1.peek().unwrap().unwrap();
            let mut copy = [0; 90];
            first.copy_to(&mut copy[..first.len()]);
            second.copy_to(&mut copy[first.len()..]);
            assert_eq!(copy, [round; 90]);
            server.split().1.consume().unwrap();
        }
    }

    fn r5_vectored_writes_and_reads_keep_their_order(world) {
        let (mut server, mut client) = world.streams();
        let written = client.write_vectored(&[IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"two")]).unwrap();
        assert_eq!(written, 7);
        let mut all = [0; 7];
        server.read_exact(&mut all).unwrap();
        assert_eq!(&all, b"one two");
    }

    fn r12_nonblocking_calls_say_would_block_and_then_do(world) {
        let (mut server, mut client) = world.pair_with::<Messages>(&Options::new().ring_size(4096));
        assert_eq!(server.split().1.try_recv(&mut [0; 8]).unwrap(), Poll::Pending);
        let mut sent = 0;
        while client.split().0.try_send(&[9; 1000]).unwrap().is_some() {
            sent += 1;
        }
        assert_eq!(sent, 4);
        let mut buffer = [0; 1000];
        eventually("the records arrive", || {
            while let Poll::Ready(Some(len)) = server.split().1.try_recv(&mut buffer).unwrap() {
                assert_eq!(len, 1000);
                sent -= 1;
            }
            sent == 0
        });
        assert!(client.split().0.try_send(&[9; 1000]).unwrap().is_some());
    }
}
