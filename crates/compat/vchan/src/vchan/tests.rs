// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults of the original, tested on the harsh double: each test has domains of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec};
use tombolo::{Options, ReadHalf, Stream, WriteHalf};

use super::*;
use crate::{
    acceptor,
    backends::{self, harsh},
    client, hello,
    place::VchanAddress,
};

const WAYS: CallMode = CallMode { blocking: false, persist: false };
const BLOCKING: CallMode = CallMode { blocking: true, persist: false };
const SOON: Duration = Duration::from_secs(20);

/// Returns an address in domains that no other test has.
fn address() -> (String, String) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let (server, client) = (format!("server{number}"), format!("client{number}"));
    (format!("harsh:{server}/test"), client)
}

/// Returns the options that a client of this library asks for.
fn options() -> Options {
    Options::new().ring_size(acceptor::CLIENTS_RING)
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < until, "waited in vain: {what}");
        thread::yield_now();
    }
}

/// Returns a server that has looked, and then its client, whose halves the test holds.
fn arrive(read: usize, write: usize) -> (Arc<harsh::Pair>, Vchan, ReadHalf, WriteHalf) {
    let (address, client) = address();
    let pair = harsh::pair(&address, &client);
    let server = acceptor::serve(&VchanAddress::Channel(address.clone()), read, write).unwrap();
    assert_eq!(server.0.is_open(WAYS), WAITING);
    let stream = backends::connect::<Stream>(&address, &options()).unwrap();
    let (mut reader, mut writer) = stream.into_split();
    assert_eq!(hello::receive_hello(&mut reader).unwrap(), read.max(4096).next_power_of_two() as u64);
    hello::send_hello(&mut writer, 0).unwrap();
    (pair, server, reader, writer)
}

/// As `arrive`, once the server knows of its client.
fn pair(read: usize, write: usize) -> (Arc<harsh::Pair>, Vchan, ReadHalf, WriteHalf) {
    let pair = arrive(read, write);
    eventually("the client is let in", || pair.1.0.is_open(WAYS) == OPEN);
    pair
}

/// Forges the word at `offset` of each segment of a domain, as its peers see it.
fn lie(pair: &harsh::Pair, offset: usize, word: u64) {
    for forger in pair.hypervisor.forgers(&pair.client).unwrap() {
        forger.store(offset, word);
    }
}

#[test]
fn lie_of_the_peers_is_an_error_and_not_a_vchan_that_stops() {
    let (pair, server, _reader, mut writer) = pair(4096, 4096);
    writer.try_write(b"truth").unwrap();
    eventually("it came", || server.0.data_ready().unwrap() == 5);
    // The position of its writer, far beyond the ring (M-5).
    lie(&pair, 0x080, 1 << 40);
    let mut bytes = [0; 64];
    let told = thread::scope(|scope| {
        let reading = scope.spawn(|| {
            loop {
                if let Err(fault) = server.0.read(&mut bytes, true, BLOCKING) {
                    break fault;
                }
            }
        });
        reading.join().unwrap()
    });
    assert_eq!(told.errno, libc::EPROTO, "{}", told.text);
    assert!(told.text.contains("R-7"), "{}", told.text);
    assert_eq!(server.0.is_open(WAYS), CLOSED);
    assert_eq!(server.0.read(&mut bytes, false, BLOCKING).unwrap_err(), told, "and the reason stays");
}

/// The server looks, the library's thread lets its client in, and the server then waits: both sides wait for each
/// other's first words.
#[test]
fn wait_tells_of_a_client_that_was_let_in_after_the_last_look() {
    let (_pair, server, _reader, mut writer) = arrive(4096, 4096);
    eventually("it is let in", || server.0.peer.state.load(Ordering::Acquire) == OPEN);
    let (done, is_done) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            server.0.wait().unwrap();
            done.send(()).unwrap();
        });
        let told = is_done.recv_timeout(SOON);
        // Ends a wait that is not notified.
        writer.try_write(b"first words").unwrap();
        told.expect("the wait goes on although the client is there");
    });
    assert_eq!(server.0.is_open(WAYS), OPEN);
}

#[test]
fn wait_does_not_block_where_the_descriptor_is_readable() {
    let (_pair, server, _reader, mut writer) = pair(4096, 4096);
    server.0.fd().unwrap();
    let readable = || {
        let poll_descriptor = server.0.poll_descriptor.fd();
        rustix::event::poll(&mut [PollFd::new(&poll_descriptor, PollFlags::IN)], Some(&Timespec::default())).unwrap()
            > 0
    };
    for round in 0..200 {
        let (done, is_done) = mpsc::channel();
        thread::scope(|scope| {
            // A read that may wait takes notifications, and then the descriptor needs a look.
            let reading = scope.spawn(|| server.0.read(&mut [0; 4], false, BLOCKING).unwrap());
            writer.try_write(b"news").unwrap();
            assert_eq!(reading.join().unwrap(), 4);
            let is_readable = readable();
            let waiting = is_readable.then(|| {
                scope.spawn(|| {
                    server.0.wait().unwrap();
                    done.send(()).unwrap();
                })
            });
            if waiting.is_some() {
                let waited = is_done.recv_timeout(SOON);
                if waited.is_err() {
                    server.0.poll_descriptor.notify();
                }
                assert!(waited.is_ok(), "round {round}: it was readable, and wait blocks");
                assert_eq!(server.0.data_ready().unwrap(), 0);
            }
        });
    }
}

/// A look that finds what was asked for before asks for nothing again: the notification promised then must still come,
/// also after notifications about something else.
#[test]
fn descriptor_tells_of_bytes_after_looks_in_vain_and_rings_for_room() {
    let (_pair, server, mut reader, mut writer) = pair(4096, 4096);
    server.0.fd().unwrap();
    let readable = || {
        let poll_descriptor = server.0.poll_descriptor.fd();
        rustix::event::poll(&mut [PollFd::new(&poll_descriptor, PollFlags::IN)], Some(&Timespec::default())).unwrap()
            > 0
    };
    let in_vain = || {
        while readable() {
            server.0.wait().unwrap();
        }
        for _ in 0..3 {
            assert_eq!((server.0.data_ready().unwrap(), server.0.is_open(WAYS)), (0, OPEN));
        }
    };
    let mut bytes = [7; 4096];
    for round in 0..300 {
        in_vain();
        assert_eq!(server.0.write(&bytes, false, WAYS).unwrap(), 4096, "round {round}");
        assert_eq!(server.0.write(&bytes, false, WAYS).unwrap(), 0);
        in_vain();
        assert_eq!(reader.try_read(&mut bytes).unwrap(), Some(4096));
        reader.release().unwrap();
        eventually("there is room", readable);
        in_vain();
        writer.try_write(b"news").unwrap();
        eventually("bytes came", readable);
        server.0.wait().unwrap();
        let len = if round % 2 == 0 { 4 } else { 4096 };
        assert_eq!(server.0.read(&mut bytes[..len], round % 2 == 0, WAYS).unwrap(), 4);
    }
}

#[test]
fn domain_that_dies_is_noticed_at_once_by_one_who_waits() {
    let (pair, server, _reader, _writer) = pair(4096, 4096);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            while server.0.is_open(WAYS) == OPEN {
                server.0.wait().unwrap();
            }
            Instant::now()
        });
        let killed = Instant::now();
        pair.hypervisor.kill_domain(&pair.client);
        // Callers of the original look every ten seconds.
        let noticed = waiting.join().unwrap().duration_since(killed);
        assert!(noticed < Duration::from_secs(2), "{noticed:?}");
    });
    let why = server.0.read(&mut [0; 4], false, BLOCKING).unwrap_err();
    assert_eq!((why.errno, &*why.text), (libc::ECONNRESET, "the other end's domain is gone"));
}

#[test]
fn limit_that_was_hit_is_named() {
    let (address, client) = address();
    let pair = harsh::pair(&address, &client);
    let _server = acceptor::serve(&VchanAddress::Channel(address.clone()), 4096, 4096).unwrap();
    pair.hypervisor.limit_memory(&pair.client, 16 << 10);
    let fault = client::join(&VchanAddress::Channel(address.clone())).map(drop).unwrap_err();
    assert_eq!(fault.errno, libc::ENOMEM, "{}", fault.text);
    assert!(fault.text.contains("memory"), "{}", fault.text);
    pair.hypervisor.limit_memory(&pair.client, 1 << 30);
    client::join(&VchanAddress::Channel(address.clone())).unwrap();
}

#[test]
fn asking_how_much_there_is_asks_for_no_event() {
    let (_pair, server, mut reader, mut writer) = pair(65_536, 65_536);
    let sent = |writer: &WriteHalf| writer.statistics().counters.notifications_sent;
    let before = sent(&writer);
    for round in 1..=100 {
        writer.try_write(&[7; 64]).unwrap();
        assert_eq!((server.0.data_ready().unwrap(), server.0.buffer_space().unwrap()), (64 * round, 65_536));
    }
    assert_eq!(sent(&writer), before, "nobody slept");
    let before = reader.statistics().counters.notifications_sent;
    server.0.write(&[7; 6400], false, WAYS).unwrap();
    for _ in 0..100 {
        assert_eq!(reader.try_read(&mut [0; 64]).unwrap(), Some(64));
        reader.release().unwrap();
        server.0.buffer_space().unwrap();
    }
    assert_eq!(reader.statistics().counters.notifications_sent, before, "nobody slept");
    // A program that polls is notified once for each time that it looked.
    server.0.fd().unwrap();
    let before = sent(&writer);
    server.0.read(&mut [0; 65_536], false, WAYS).unwrap();
    assert_eq!(server.0.data_ready().unwrap(), 0);
    for _ in 0..100 {
        writer.try_write(&[7; 64]).unwrap();
    }
    assert_eq!(sent(&writer), before + 1);
}

#[test]
fn client_that_says_nothing_or_nonsense_keeps_the_next_one_waiting_no_longer_than_it_stays() {
    let (address, client) = address();
    let _pair = harsh::pair(&address, &client);
    let server = acceptor::serve(&VchanAddress::Channel(address.clone()), 4096, 4096).unwrap();
    let mut nonsense = backends::connect::<Stream>(&address, &options()).unwrap();
    nonsense.split().1.try_write(&[9; 16]).unwrap();
    let silent = thread::spawn({
        let address = address.clone();
        move || drop(backends::connect::<Stream>(&address, &options()).unwrap())
    });
    silent.join().unwrap();
    assert_eq!(server.0.is_open(WAYS), WAITING);
    let joined = client::join(&VchanAddress::Channel(address.clone())).unwrap();
    eventually("the third is let in", || server.0.is_open(WAYS) == OPEN);
    drop(joined);
}

#[test]
fn storm_of_rings_does_not_keep_bytes_from_arriving() {
    let (pair, server, _reader, mut writer) = pair(4096, 4096);
    let storm = pair.hypervisor.storm(&pair.server);
    let mut bytes = [0; 1024];
    for _ in 0..20 {
        writer.try_write(&[7; 1024]).unwrap();
        assert_eq!(server.0.read(&mut bytes, true, BLOCKING).unwrap(), 1024);
    }
    drop(storm);
}

#[test]
fn w7_server_is_told_of_a_clients_domain_that_goes_before_it_came() {
    use crate::{domains, original::world::XEN};
    let server = acceptor::serve(&VchanAddress::Original(7, "data/vchan/7/1".into()), 4096, 4096).unwrap();
    // A client that is not there yet may come.
    let _domain = XEN.domain(7);
    eventually("it was asked for", || domains::was_seen(7));
    assert_eq!(server.0.is_open(WAYS), WAITING);
    XEN.destroy(7);
    eventually("the end of the domain is told", || server.0.is_open(WAYS) == CLOSED);
    let refused = server.0.read(&mut [0; 4], true, BLOCKING).unwrap_err();
    assert!(refused.errno == libc::ECONNRESET && refused.text.contains("domain is gone"), "{}", refused.text);
    assert_eq!(server.0.wait().unwrap_err().errno, libc::ECONNRESET, "nobody waits for ever");
}
