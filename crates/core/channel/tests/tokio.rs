// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Channels on a tokio runtime of one thread.
#![cfg(feature = "tokio")]

mod common;

use std::{future::Future, thread, time::Duration};

use ::tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy, copy_bidirectional, duplex},
    runtime::Builder,
    select, spawn,
    time::{sleep, timeout},
};
use common::{SOON, noise};
use tombolo_channel::{
    Ending, FlushPolicy, Messages, Options, Stream,
    tokio::{AsyncListener, AsyncMessages, AsyncStream},
};

/// Runs `job` on a runtime of this thread; a test that waits in vain fails here.
fn run<T>(job: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(SOON * 3, job).await.expect("something was lost") })
}

fn small() -> Options {
    Options::new().ring_size(16 << 10)
}

on_every_backend! {
    fn r12_64_mib_come_back_through_copy(world) {
        let (server, client) = world.streams();
        let data = noise(64 << 20, 31);
        run(async {
            spawn(async move {
                let (mut read, mut write) = AsyncStream::new(server).unwrap().into_split();
                copy(&mut read, &mut write).await.unwrap();
                write.shutdown().await.unwrap();
            });
            let (mut read, mut write) = AsyncStream::new(client).unwrap().into_split();
            let sent = data.clone();
            let sender = spawn(async move {
                write.write_all(&sent).await.unwrap();
                write.shutdown().await.unwrap();
                write
            });
            let mut echo = Vec::new();
            read.read_to_end(&mut echo).await.unwrap();
            assert!(echo == data);
            assert_eq!(read.get_ref().ending(), Some(Ending::Closed));
            sender.await.unwrap();
        });
    }

    fn r12_bidirectional_copy_joins_a_channel_and_something_else(world) {
        let (server, client) = world.pair_with::<Stream>(&small());
        let data = &noise(1 << 20, 32)[..];
        run(async {
            let (mut near, mut far) = duplex(1000);
            let mut server = AsyncStream::new(server).unwrap();
            spawn(async move { copy_bidirectional(&mut server, &mut far).await.unwrap() });
            let (mut read, mut write) = AsyncStream::new(client).unwrap().into_split();
            let (there, back) = (vec![0; data.len()], vec![0; data.len()]);
            let (mut near_read, mut near_write) = ::tokio::io::split(&mut near);
            let (mut there, mut back) = (there, back);
            ::tokio::try_join!(
                write.write_all(data),
                near_write.write_all(data),
                near_read.read_exact(&mut there),
                read.read_exact(&mut back),
            )
            .unwrap();
            assert!(there == data && back == data);
        });
    }

    fn r12_many_channels_share_one_thread(world) {
        run(async {
            let mut tasks = Vec::new();
            for number in 0..50u64 {
                let (server, client) = world.pair_with::<Messages>(&small());
                tasks.push(spawn(async move {
                    let mut server = AsyncMessages::new(server).unwrap();
                    let mut buffer = [0; 4000];
                    while let Some(len) = server.recv(&mut buffer).await.unwrap() {
                        server.send(&buffer[..len]).await.unwrap();
                    }
                }));
                tasks.push(spawn(async move {
                    let (mut sender, mut receiver) = AsyncMessages::new(client).unwrap().into_split();
                    let message = move |round: u64| noise((round * 37 % 4000) as usize, number * 1000 + round);
                    let writer = spawn(async move {
                        for round in 0..200 {
                            sender.send(&message(round)).await.unwrap();
                        }
                        sender
                    });
                    let mut buffer = [0; 4000];
                    for round in 0..200 {
                        let len = receiver.recv(&mut buffer).await.unwrap().unwrap();
                        assert!(buffer[..len] == message(round));
                    }
                    drop(writer.await.unwrap());
                }));
            }
            for task in tasks {
                task.await.unwrap();
            }
        });
    }

    fn r24_question_held_back_by_its_policy_goes_out_before_the_answer_is_awaited(world) {
        let options = small().flush_policy(FlushPolicy::Batch { bytes: 1 << 20, time: Duration::MAX });
        let (server, client) = world.pair_with::<Messages>(&options);
        run(async {
            spawn(async move {
                let (mut server, mut buffer) = (AsyncMessages::new(server).unwrap(), [0; 8]);
                while let Some(len) = server.recv(&mut buffer).await.unwrap() {
                    server.send(&buffer[..len]).await.unwrap();
                }
            });
            let (mut client, mut buffer) = (AsyncMessages::new(client).unwrap(), [0; 8]);
            for _ in 0..100 {
                client.send(b"question").await.unwrap();
                // The other task is asleep by now.
                ::tokio::task::yield_now().await;
                assert_eq!(client.recv(&mut buffer).await.unwrap(), Some(8));
            }
        });
    }

    fn r3_what_was_received_is_handed_back_before_a_send_waits(world) {
        let (server, client) = world.pair_with::<Messages>(&small());
        run(async {
            let whole = vec![7; (16 << 10) - 8];
            let (mut client, mut server) = (AsyncMessages::new(client).unwrap(), AsyncMessages::new(server).unwrap());
            client.send(b"first").await.unwrap();
            assert_eq!(server.recv(&mut [0; 8]).await.unwrap(), Some(5));
            // Each sends before it receives, as a bidirectional program may: the client waits for the room of its whole
            // ring.
            server.send(&whole).await.unwrap();
            let sent = spawn(async move {
                client.send(&whole).await.unwrap();
                client.recv(&mut vec![0; 16 << 10]).await.unwrap();
                client
            });
            server.send(b"second").await.unwrap();
            drop(sent.await.unwrap());
        });
    }

    fn r22_dropped_futures_lose_and_repeat_nothing(world) {
        let (server, client) = world.pair_with::<Messages>(&small());
        run(async {
            let (mut sender, _r) = AsyncMessages::new(client).unwrap().into_split();
            let (_s, mut receiver) = AsyncMessages::new(server).unwrap().into_split();
            let writer = spawn(async move {
                let mut given_up = 0;
                for number in 0..3000u64 {
                    let message = number.to_le_bytes().repeat(1 + number as usize % 300);
                    loop {
                        select! {
                            biased;
                            sent = sender.send(&message) => { sent.unwrap(); break }
                            () = ::tokio::task::yield_now() => given_up += 1,
                        }
                    }
                }
                (given_up, sender)
            });
            let (mut buffer, mut given_up) = ([0; 3000], 0);
            for number in 0..3000u64 {
                let len = loop {
                    select! {
                        biased;
                        received = receiver.recv(&mut buffer) => break received.unwrap().unwrap(),
                        () = ::tokio::task::yield_now() => given_up += 1,
                    }
                };
                assert!(buffer[..len] == number.to_le_bytes().repeat(1 + number as usize % 300));
            }
            let (writer_gave_up, _sender) = writer.await.unwrap();
            assert!(given_up > 0 && writer_gave_up > 0, "{given_up}, {writer_gave_up}: nothing was tried");
        });
    }

    fn c7_select_with_a_timeout_ends_and_the_stream_goes_on(world) {
        let (server, client) = world.streams();
        run(async {
            let (mut server, mut client) = (AsyncStream::new(server).unwrap(), AsyncStream::new(client).unwrap());
            let mut buffer = [0; 8];
            for _ in 0..3 {
                select! {
                    read = server.read(&mut buffer) => panic!("nothing was written: {read:?}"),
                    () = sleep(Duration::from_millis(20)) => {}
                }
            }
            client.write_all(b"go on").await.unwrap();
            server.read_exact(&mut buffer[..5]).await.unwrap();
            assert_eq!(&buffer[..5], b"go on");
        });
    }

    fn c10_peer_that_goes_wakes_pending_reads_and_writes(world) {
        let (server, client) = world.pair_with::<Stream>(&small());
        run(async {
            let (mut read, mut write) = AsyncStream::new(server).unwrap().into_split();
            let reader = spawn(async move { read.read(&mut [0; 8]).await.unwrap() });
            let writer = spawn(async move { write.write_all(&vec![0; 1 << 20]).await.unwrap_err().kind() });
            sleep(Duration::from_millis(20)).await;
            assert!(!reader.is_finished() && !writer.is_finished());
            drop(client);
            assert_eq!(reader.await.unwrap(), 0);
            assert_eq!(writer.await.unwrap(), std::io::ErrorKind::BrokenPipe);
        });
    }

    fn c7_listener_serves_many_and_a_silent_crowd_keeps_nobody_waiting(world) {
        let listener = world.listen::<Stream>();
        let (crowd, more) = if world.hypervisor.is_some() { (10, 2) } else { (200, 100) };
        let mut silent: Vec<_> = (0..crowd).map(|_| world.connect_raw()).collect();
        thread::scope(|scope| {
            let clients = scope.spawn(|| {
                let mut streams: Vec<Stream> = Vec::new();
                for _ in 0..30 {
                    streams.push(world.connecting.connect(&world.address, &small()).unwrap());
                    silent.extend((0..more / 30).map(|_| world.connect_raw()));
                }
                streams
            });
            run(async {
                let mut listener = AsyncListener::new(listener).unwrap();
                let mut served = Vec::new();
                for _ in 0..30 {
                    served.push(listener.accept().await.unwrap());
                }
                let none = timeout(Duration::from_millis(50), listener.accept()).await;
                assert!(none.is_err(), "nobody else connected");
                served
            });
            clients.join().unwrap();
        });
    }
}
