// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes at hand in a stream, and pollers that want at least a stated number.

mod common;

use std::{io::Write, thread};

use common::{SOON, World, eventually};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tombolo_channel::fast::FastRead;
use tombolo_channel::{Deadline, Error, Options, Stream};

fn readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
}

fn worlds() -> [World; 2] {
    [World::local(), World::harsh()]
}

#[test]
fn bytes_at_hand_are_told_and_a_poller_is_woken_only_once_enough_are_there() {
    for world in worlds() {
        let (mut server, mut client) = world.streams();
        let (reader, _) = server.split();
        reader.poll_fd().unwrap();
        assert_eq!(reader.available(8).unwrap(), 0);
        assert!(!readable(reader.poll_fd().unwrap()));
        client.write_all(&[1; 5]).unwrap();
        assert!(!readable(reader.poll_fd().unwrap()), "five of eight");
        assert_eq!(reader.available(8).unwrap(), 5);
        client.write_all(&[1; 3]).unwrap();
        eventually("eight of eight", || readable(reader.poll_fd().unwrap()));
        assert_eq!(reader.available(8).unwrap(), 8);
        assert!(!reader.is_last().unwrap());
        // The end is reason enough.
        assert_eq!(reader.available(9).unwrap(), 8);
        drop(client);
        eventually("the end", || readable(reader.poll_fd().unwrap()));
        assert!(reader.is_last().unwrap());
        assert_eq!(reader.available(9).unwrap(), 8);
    }
}

#[test]
fn wait_ends_with_enough_or_with_what_is_left() {
    for world in worlds() {
        let (mut server, mut client) = world.streams();
        let (reader, _) = server.split();
        client.write_all(&[1; 5]).unwrap();
        assert!(matches!(reader.wait_for(6, Deadline::NOW), Err(Error::TimedOut)));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| reader.wait_for(8, Deadline::after(SOON)).unwrap());
            client.write_all(&[1; 3]).unwrap();
            assert_eq!(waiting.join().unwrap(), 8);
        });
        thread::scope(|scope| {
            let waiting = scope.spawn(|| reader.wait_for(9, Deadline::after(SOON)).unwrap());
            drop(client);
            assert_eq!(waiting.join().unwrap(), 8);
        });
    }
}

#[test]
fn room_is_told_and_a_poller_is_woken_only_once_there_is_enough() {
    for world in worlds() {
        let (mut server, mut client): (Stream, Stream) = world.pair_with(&Options::new().ring_size(4096));
        let (reader, _) = client.split();
        let (_, writer) = server.split();
        writer.poll_fd().unwrap();
        assert_eq!(writer.room(4096).unwrap(), 4096);
        assert_eq!(writer.try_write(&[1; 4000]).unwrap(), Some(4000));
        assert_eq!(writer.room(3000).unwrap(), 96);
        assert!(!readable(writer.poll_fd().unwrap()));
        reader.try_read(&mut [0; 1000]).unwrap();
        reader.release().unwrap();
        assert!(!readable(writer.poll_fd().unwrap()), "1096 of 3000");
        reader.try_read(&mut [0; 2000]).unwrap();
        reader.release().unwrap();
        eventually("3096 of 3000", || readable(writer.poll_fd().unwrap()));
        assert_eq!(writer.room(3000).unwrap(), 3096);
        drop(client);
        assert!(matches!(writer.room(0), Err(Error::Closed | Error::PeerGone)));
    }
}

#[test]
fn h3_room_in_a_smaller_ring_is_told_while_the_larger_one_is_still_read() {
    for world in worlds() {
        let (mut server, mut client): (Stream, Stream) = world.pair_with(&Options::new().ring_size(64 << 10));
        let (reader, _) = client.split();
        let (_, writer) = server.split();
        assert_eq!(writer.try_write(&[1; 40_000]).unwrap(), Some(40_000));
        writer.resize(4096).unwrap();
        eventually("the reader is ready for the smaller ring", || {
            // One byte at a time: nearly all bytes stay in the larger ring.
            reader.available(64 << 10).unwrap();
            writer.room(1).unwrap();
            writer.statistics().ring_size == 4096
        });
        assert_eq!(writer.room(60_000).unwrap(), 4096);
        assert_eq!(writer.try_write(&[2; 5000]).unwrap(), Some(4096));
        assert_eq!(writer.room(1).unwrap(), 0);
        let mut all = vec![0; 44_096];
        for rest in all.chunks_mut(1000) {
            let mut done = 0;
            while done < rest.len() {
                done += reader.try_read(&mut rest[done..]).unwrap().unwrap_or_default();
            }
        }
        reader.release().unwrap();
        assert_eq!(writer.room(1).unwrap(), 4096);
    }
}
