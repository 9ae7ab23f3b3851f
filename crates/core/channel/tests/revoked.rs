// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Revoked memory is reported as such, and not as a protocol violation of the peer: zeros take its place, which break
//! half of the specification (D-3).

mod common;
#[path = "../../../backends/ivshmem/tests/support/mod.rs"]
mod machines;

use std::{os::fd::OwnedFd, thread, time::Duration};

use common::{SOON, World};
use tombolo_channel::fast::FastRead;
use tombolo_channel::{
    Address, Backends, Channel, Deadline, Ending, Error, Listener, Liveness, Messages, Options, Stream,
};
use tombolo_domain::Error as DomainError;
use tombolo_layout::words;

/// A channel between two machines whose memory can be taken away: the listener's endpoint, the caller's, and their
/// memories, the caller's first.
struct Machines {
    _world: machines::World,
    memories: [OwnedFd; 2],
}

impl Machines {
    fn pair<C: Channel + Send>() -> (C, C, Self) {
        let world = machines::World::new();
        let address: Address = format!("vm:{}", world.service()).parse().unwrap();
        let backends = [&world.a, &world.b].map(|domain| Backends::new().with(domain.clone()));
        let mut listener: Listener<C> = backends[0].listen(&address, &Options::new()).unwrap();
        let (server, client) = thread::scope(|scope| {
            let client = scope.spawn(|| backends[1].connect::<C>(&address, &Options::new()).unwrap());
            (listener.accept_until(Deadline::after(SOON)).unwrap(), client.join().unwrap())
        });
        let memories = world.memories();
        (server, client, Self { _world: world, memories })
    }

    /// Takes all memory from both endpoints, without a message.
    fn take_memory(&self) {
        self.memories.iter().for_each(|memory| rustix::fs::ftruncate(memory, 0).unwrap());
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(5))
}

#[test]
fn d3_reader_of_memory_taken_away_is_told_so_and_gets_no_zeros() {
    for unread in [0, 1, 100, 100_000] {
        let (mut server, mut client, machines) = Machines::pair::<Stream>();
        let mut buffer = vec![1; 200_000];
        client.split().1.write_all_until(&vec![7; 10 + unread], soon()).unwrap();
        assert_eq!(server.split().0.read_until(&mut buffer[..10], soon()).unwrap(), 10);
        machines.take_memory();
        let read = server.split().0.read_until(&mut buffer, soon());
        assert!(matches!(read, Ok(0)), "{unread} unread: {read:?}");
        assert_eq!(server.split().0.ending(), Some(Ending::Revoked), "{unread} unread");
        assert_eq!(server.liveness(), Liveness::Revoked);
        assert!(matches!(server.split().0.try_read(&mut buffer), Ok(Some(0))), "and stays so");
    }
}

#[test]
fn d3_writer_to_memory_taken_away_is_told_that_the_peer_is_gone() {
    let (mut server, _client, machines) = Machines::pair::<Stream>();
    let write = server.split().1;
    write.write_all_until(&[7; 100], soon()).unwrap();
    machines.take_memory();
    // Both checks of the peer's words: its position, and whether it still reads.
    let drained = write.drained_until(soon());
    assert!(matches!(drained, Err(Error::PeerGone)), "{drained:?}");
    let written = write.write_until(&[7; 100], soon());
    assert!(matches!(written, Err(Error::PeerGone)), "{written:?}");
    assert_eq!(server.liveness(), Liveness::Revoked);
}

#[test]
fn d3_receiver_of_memory_taken_away_gets_no_empty_message() {
    for unread in [0, 1, 3] {
        let (mut server, mut client, machines) = Machines::pair::<Messages>();
        for _ in 0..=unread {
            client.send(&[7; 100]).unwrap();
        }
        assert_eq!(server.recv(&mut [0; 100]).unwrap(), Some(100));
        machines.take_memory();
        let (_, mut receiver) = server.into_split();
        let received = receiver.recv_until(&mut [0; 100], soon());
        assert!(matches!(received, Ok(None)), "{unread} unread: {received:?}");
        assert_eq!(receiver.ending(), Some(Ending::Revoked));
    }
}

#[test]
fn d3_bytes_peeked_at_that_were_taken_away_are_not_consumed_in_silence() {
    let (mut server, mut client, machines) = Machines::pair::<Stream>();
    client.split().1.write_all_until(&[7; 100], soon()).unwrap();
    let read = server.split().0;
    assert!(read.wait_until(soon()).unwrap());
    let mut seen = [1; 100];
    let (bytes, _) = read.peek().unwrap().unwrap();
    machines.take_memory();
    bytes.copy_to(&mut seen);
    assert_eq!(seen, [0; 100]);
    assert!(matches!(read.consume(100), Err(Error::Domain(DomainError::Revoked))), "what was seen were zeros");
    assert_eq!(read.ending(), Some(Ending::Revoked), "at once");
    assert!(matches!(read.try_read(&mut seen), Ok(Some(0))));
    assert_eq!(read.ending(), Some(Ending::Revoked));
}

#[test]
fn d3_polls_for_so_many_bytes_end_where_memory_is_taken_away() {
    let (mut server, mut client, machines) = Machines::pair::<Stream>();
    client.split().1.write_all_until(&[7; 100], soon()).unwrap();
    let read = server.split().0;
    assert_eq!(read.wait_for(100, soon()).unwrap(), 100);
    machines.take_memory();
    assert_eq!(read.wait_for(200, soon()).unwrap(), 0);
    assert_eq!(read.available(200).unwrap(), 0);
    assert!(read.is_last().unwrap());
    assert_eq!(read.ending(), Some(Ending::Revoked));
}

/// The backend knows of the revocation, although the memory is still there: its contents do not count.
#[test]
fn d3_lie_in_memory_that_was_revoked_is_no_lie() {
    let world = World::harsh();
    let (mut server, mut client) = world.streams();
    let (hypervisor, a, b) = world.hypervisor.as_ref().unwrap();
    client.split().1.write_all_until(&[7; 100], soon()).unwrap();
    server.split().0.read_until(&mut [0; 10], soon()).unwrap();
    server.split().1.write_all_until(&[7; 100], soon()).unwrap();
    hypervisor.revoke(b, a);
    hypervisor.mutate(b, |memory| memory.fill(0)).unwrap();
    let read = server.split().0;
    assert_eq!(read.wait_for(200, soon()).unwrap(), 0);
    assert_eq!(read.ending(), Some(Ending::Revoked));
    let drained = server.split().1.drained_until(soon());
    assert!(matches!(drained, Err(Error::PeerGone)), "{drained:?}");
}

/// Where nothing was taken away, a violation is reported as one, even if the peer goes right after it.
#[test]
fn canary_d3_lie_of_a_peer_that_goes_is_still_a_lie() {
    let world = World::harsh();
    let (mut server, client) = world.streams();
    let (hypervisor, _, b) = world.hypervisor.as_ref().unwrap();
    for forger in hypervisor.forgers(b).unwrap() {
        forger.store(words::TAIL, 1 << 40);
    }
    hypervisor.kill_domain(b);
    let read = server.split().0.read_until(&mut [0; 10], soon());
    assert!(matches!(&read, Err(Error::Corrupt(corrupt)) if corrupt.clause == "R-7"), "{read:?}");
    drop(client);
}
