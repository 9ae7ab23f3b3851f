// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that writes arbitrary values into the page, at any time. It spoils its own stream and nothing else: no panic,
//! no access out of bounds (the memory of the tests asserts this), no call that does not return.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Instant,
};

use common::{Cells, Domain, SOON, World, original::Original};
use proptest::prelude::*;
use tombolo_vchan_wire::{Error, Server, client, ground::Shared};

const PATH: &str = "data/vchan/2/42";

/// Number of vchans that are attacked. Each takes until both halves found a violation: a violation is remembered.
fn vchans() -> u64 {
    if std::env::var_os("TOMBOLO_LONG").is_some() { 50_000 } else { 300 }
}

/// Ends the other threads of a test, also if this one fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Changes a word or a byte of the head of the page: often a little, sometimes to anything.
fn mutate(page: &Cells, state: &mut u64) {
    let chance = random(state);
    let at = (random(state) % 1024) as usize * 4 % if chance % 8 == 0 { 4096 } else { 24 };
    match chance % 4 {
        0 => page.store32(at, random(state) as u32),
        1 => page.store32(at, page.load32(at).wrapping_add(random(state) as u32 % 5000)),
        2 => page.store8(at, random(state) as u8),
        _ => page.store32(at, page.load32(at).wrapping_sub(random(state) as u32 % 64)),
    }
}

#[test]
fn w5_peer_that_changes_everything_at_any_time_harms_nobody() {
    let (rounds, lies) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut state = 0x9e37_79b9_7f4a_7c15;
    let started = Instant::now();
    let mut done = 0u64;
    for _ in 0..vchans() {
        let world = World::new();
        let (over, domain) = (AtomicBool::new(false), Domain(Arc::clone(&world)));
        let (server, (mut reader, mut writer)) = Server::new(Arc::new(domain), PATH, 4096, 65_536).unwrap();
        let page = world.page(PATH);
        page.store8(20, 1);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    mutate(&page, &mut state);
                    done += 1;
                }
            });
            let _ended = Over(&over);
            let (mut to, from, begun) = ([0; 5000], [7; 5000], Instant::now());
            let (mut reads, mut writes) = (true, true);
            for call in 0.. {
                let read = match call % 3 {
                    0 => reader.read(&mut to),
                    1 => reader.available(call % 6000),
                    _ => Ok(usize::from(reader.live() == tombolo_vchan_wire::Live::Here)),
                };
                let wrote = match call % 2 {
                    0 => writer.write(&from),
                    _ => writer.room(call % 70_000),
                };
                for (result, goes_on, most) in [(read, &mut reads, 4096), (wrote, &mut writes, 65_536)] {
                    match result {
                        Ok(len) => assert!(len <= most, "{len} of {most}"),
                        Err(Error::Corrupt { .. }) => {
                            lies.fetch_add(u64::from(*goes_on), SeqCst);
                            *goes_on = false;
                        }
                        Err(Error::Closed) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                rounds.fetch_add(1, SeqCst);
                if !reads && !writes {
                    break;
                }
                assert!(begun.elapsed() < SOON, "nobody lied for so long: the mutating thread does nothing");
                thread::yield_now();
            }
        });
        drop(server);
    }
    let (rounds, lies) = (rounds.into_inner(), lies.into_inner());
    eprintln!("{done} changes, {rounds} rounds of calls, {lies} lies caught, {:?}", started.elapsed());
    assert_eq!(lies, 2 * vchans());
}

#[test]
fn w5_w7_one_who_waits_is_told_of_a_lie_instead_of_waiting_for_ever() {
    let world = World::new();
    let (server, (mut reader, mut writer)) = Server::new(Arc::new(Domain(Arc::clone(&world))), PATH, 0, 0).unwrap();
    let peer = Original::join(&world, PATH);
    let page = world.page(PATH);
    assert_eq!(writer.write(&[1; 3000]).unwrap(), 2048);
    thread::scope(|scope| {
        let reading = scope.spawn(|| reader.wait_for(1));
        let writing = scope.spawn(|| writer.wait_for(1));
        page.store32(4, 5000);
        page.store32(8, 5000);
        tombolo_vchan_wire::ground::Event::notify(&*peer.channel);
        for told in [reading.join().unwrap().map(drop), writing.join().unwrap()] {
            assert!(matches!(told, Err(Error::Corrupt { clause: "W-5", found: 5000, .. })), "{told:?}");
        }
    });
    // The original would report for ever that there is nothing.
    page.store32(4, 1);
    assert!(matches!(reader.read(&mut [0; 4]), Err(Error::Corrupt { .. })), "who lied once is not listened to again");
    drop(server);
}

#[test]
fn w7_storm_of_events_wakes_nobody_all_the_time() {
    let world = World::new();
    let (_server, (mut reader, _writer)) = Server::new(Arc::new(Domain(Arc::clone(&world))), PATH, 0, 0).unwrap();
    let peer = &Original::join(&world, PATH);
    let over = &AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(move || {
            while !over.load(SeqCst) {
                tombolo_vchan_wire::ground::Event::notify(&*peer.channel);
            }
        });
        let _ended = Over(over);
        let reading = scope.spawn(|| reader.wait_for(4));
        let until = Instant::now() + std::time::Duration::from_millis(300);
        while Instant::now() < until {
            thread::yield_now();
        }
        assert!(peer.write(b"data"));
        assert_eq!(reading.join().unwrap().unwrap(), 4);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// A client of a server with arbitrary contents: it joins rings that are at permitted places, or is refused.
    #[test]
    fn w4_client_takes_any_page_without_harm(head in prop::collection::vec(any::<u32>(), 32), orders in 8u32..24, more in 8u32..24) {
        let world = World::new();
        let _peer = Original::serve(&world, PATH, 13, 14);
        let page = world.page(PATH);
        for (index, word) in head.iter().enumerate() {
            // References that exist are the interesting ones.
            page.store32(4 * index, if index < 6 { *word } else { *word % 16 });
        }
        page.store32(16, orders | more << 16);
        if let Ok((mut reader, mut writer)) = client(&Domain(Arc::clone(&world)), PATH) {
            let mut bytes = vec![0; 1 << 21];
            let read = reader.read(&mut bytes);
            prop_assert!(read.is_err() || read.unwrap() <= 1 << more);
            let wrote = writer.write(&bytes);
            prop_assert!(wrote.is_err() || wrote.unwrap() <= 1 << orders);
        }
    }
}
