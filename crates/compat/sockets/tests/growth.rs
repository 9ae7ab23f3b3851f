// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ring of a connection follows its load. Meanwhile no byte is lost, duplicated or reordered (S-20).

mod pair;

use std::time::{Duration, Instant};

use pair::{End, FIRST, SOON, joined};
use tombolo_growth::RingChoice;
use tombolo_sockets::Read;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// Returns the byte at `position` of a stream that repeats itself only after a long time.
fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8
}

/// One direction of a stream: the numbers of bytes sent and received.
#[derive(Default)]
struct Flow {
    sent: u64,
    received: u64,
}

impl Flow {
    fn send(&mut self, by: &End, most: usize) -> usize {
        let bytes: Vec<u8> = (0..most as u64).map(|at| byte(self.sent + at)).collect();
        let n = by.send(&bytes);
        self.sent += n as u64;
        n
    }

    fn receive(&mut self, by: &End, most: usize, read: Read) -> usize {
        let mut to = vec![0; most];
        let n = by.receive(&mut to, read);
        for (at, found) in to[..n].iter().enumerate() {
            assert_eq!(*found, byte(self.received + at as u64), "byte {} of the stream", self.received + at as u64);
        }
        if read == Read::Take {
            self.received += n as u64;
        }
        n
    }
}

/// Sends in bulk until the sender's ring has `size` bytes.
fn be_busy(ends: &[End; 2], flow: &mut Flow, size: u64) {
    let deadline = Instant::now() + SOON;
    while ends[0].sends_by() != size || ends[1].connection.ring_sizes().unwrap()[1] != size {
        flow.send(&ends[0], 64 << 10);
        while flow.receive(&ends[1], 64 << 10, Read::Take) > 0 {}
        assert!(Instant::now() < deadline, "{:?}", ends.each_ref().map(|end| end.connection.ring_sizes()));
    }
}

#[test]
fn s20_ring_begins_small_grows_for_bulk_and_shrinks_once_idle() {
    let (ends, _folder) = joined(|_| {});
    assert_eq!(ends[0].connection.ring_sizes(), Some([FIRST; 2]));
    let mut flow = Flow::default();
    be_busy(&ends, &mut flow, 1 << 20);
    assert_eq!(ends[1].sends_by(), FIRST, "the other direction has nothing to carry");
    // An endpoint that sleeps checks for idle rings, and the peer follows in its own calls.
    let (idle, deadline) = (Instant::now(), Instant::now() + SOON);
    while ends.each_ref().map(|end| end.connection.ring_sizes()) != [Some([FIRST; 2]); 2] {
        ends.iter().for_each(|end| end.prepare_sleep(true, false));
        assert!(Instant::now() < deadline, "{:?}", ends.each_ref().map(|end| end.connection.ring_sizes()));
        std::thread::yield_now();
    }
    assert!(idle.elapsed() >= Duration::from_millis(1500), "after {:?}", idle.elapsed());
    // Once more.
    be_busy(&ends, &mut flow, 1 << 20);
}

/// A stream in one direction, as fast as this build allows. Its bytes repeat after a prime number of them.
struct Bulk {
    bytes: Vec<u8>,
    to: Vec<u8>,
    sent: usize,
    received: usize,
}

impl Bulk {
    const PERIOD: usize = 1_048_583;

    fn new() -> Self {
        let bytes = (0..2 * Self::PERIOD).map(|at| byte((at % Self::PERIOD) as u64)).collect();
        Self { bytes, to: vec![0; Self::PERIOD], sent: 0, received: 0 }
    }

    /// Fills the ring, and empties it.
    fn go_round(&mut self, ends: &[End; 2]) {
        // TCP takes everything that is sent.
        for _ in 0..16 {
            let from = self.sent % Self::PERIOD;
            let n = ends[0].send(&self.bytes[from..from + Self::PERIOD]);
            self.sent += n;
            if n < Self::PERIOD {
                break;
            }
        }
        // Reads to the end, and once more in vain: a reader that finds nothing looks for another ring.
        loop {
            let n = ends[1].receive(&mut self.to, Read::Take);
            let from = self.received % Self::PERIOD;
            assert!(self.to[..n] == self.bytes[from..from + n], "after {} bytes", self.received);
            self.received += n;
            if n == 0 {
                break;
            }
        }
        assert_eq!(self.received, self.sent, "nothing is on its way");
    }

    /// Sends until the sender's ring has `size` bytes. Each round is followed by a pause of `slower` times its own
    /// duration.
    fn be_busy_until(&mut self, ends: &[End; 2], size: u64, slower: u32) {
        let deadline = Instant::now() + SOON;
        while ends[0].sends_by() != size {
            let begun = Instant::now();
            self.go_round(ends);
            let until = Instant::now() + begun.elapsed() * slower;
            while Instant::now() < until {}
            assert!(Instant::now() < deadline, "{size}: {:?}", ends[0].connection.ring_sizes());
        }
    }
}

#[test]
fn s20_busy_end_tries_a_larger_ring_and_goes_back_where_that_is_slower() {
    let (ends, _folder) = joined(|settings| settings.tries_larger = true);
    let (mut bulk, tried) = (Bulk::new(), RingChoice::of_this_machine().tried());
    be_busy(&ends, &mut Flow::default(), 1 << 20);
    if tried > 1 << 20 {
        bulk.be_busy_until(&ends, tried, 0);
        bulk.be_busy_until(&ends, 1 << 20, 1);
        // It tries again after a while, and keeps the larger ring.
        bulk.be_busy_until(&ends, tried, 1);
    } else {
        let line = "SKIP s20_busy_end_tries_a_larger_ring_and_goes_back_where_that_is_slower (needs caches): their sizes are hidden\n";
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    }
    let (size, until) = (ends[0].sends_by(), Instant::now() + Duration::from_secs(1));
    while Instant::now() < until {
        bulk.go_round(&ends);
    }
    assert_eq!(ends[0].sends_by(), size, "nothing was slower");
    // Once idle, it has its first ring again.
    let deadline = Instant::now() + SOON;
    while ends[0].sends_by() != FIRST {
        ends.iter().for_each(|end| end.prepare_sleep(true, false));
        assert!(Instant::now() < deadline, "{:?}", ends[0].connection.ring_sizes());
        std::thread::yield_now();
    }
    bulk.go_round(&ends);
}

#[test]
fn s20_end_that_was_given_a_ring_tries_no_larger_one() {
    let (ends, _folder) = joined(|_| {});
    be_busy(&ends, &mut Flow::default(), 1 << 20);
    let (mut bulk, until) = (Bulk::new(), Instant::now() + Duration::from_secs(1));
    while Instant::now() < until {
        bulk.go_round(&ends);
        assert!(ends[0].sends_by() <= 1 << 20);
    }
    assert_eq!(ends[0].sends_by(), 1 << 20);
}

#[test]
fn s20_who_polls_and_never_sleeps_hears_of_the_first_bytes_in_another_ring() {
    let (ends, _folder) = joined(|_| {});
    let mut flow = Flow::default();
    let deadline = Instant::now() + SOON;
    while ends[1].connection.ring_sizes().unwrap()[1] != 1 << 20 {
        flow.send(&ends[0], 64 << 10);
        // Reads to the end, and once more in vain: from now on only the hint is looked at.
        while flow.receive(&ends[1], 64 << 10, Read::Take) > 0 {}
        assert_eq!(flow.receive(&ends[1], 1, Read::Look), 0);
        assert!(!ends[1].connection.pipes.has_unread());
        assert_eq!(flow.send(&ends[0], 9), 9);
        assert!(ends[1].connection.pipes.has_unread(), "{:?}", ends.each_ref().map(|end| end.connection.ring_sizes()));
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn s20_nothing_grows_where_it_is_switched_off_or_too_little() {
    let (ends, _folder) = joined(|settings| settings.first_ring = 1 << 20);
    assert_eq!(ends[0].connection.ring_sizes(), Some([1 << 20; 2]));
    let (ends, _folder) = joined(|settings| settings.ring = FIRST);
    let mut flow = Flow::default();
    for _ in 0..1000 {
        flow.send(&ends[0], 64 << 10);
        flow.receive(&ends[1], 64 << 10, Read::Take);
    }
    assert_eq!(ends[0].connection.ring_sizes(), Some([FIRST; 2]));
}

#[test]
fn s20_quota_without_room_for_a_large_ring_leaves_the_small_one() {
    // Memory for the first rings and their pages, and a little more.
    let (ends, _folder) = joined(|settings| settings.memory = 100 << 10);
    let mut flow = Flow::default();
    for _ in 0..1000 {
        flow.send(&ends[0], 64 << 10);
        flow.receive(&ends[1], 64 << 10, Read::Take);
    }
    assert_eq!(ends[0].sends_by(), FIRST);
    flow.send(&ends[0], 99);
    while flow.received < flow.sent {
        flow.receive(&ends[1], 1 << 10, Read::Take);
    }
}

/// Both endpoints make calls in any order, with moves to TCP and back between them.
#[test]
fn s20_every_byte_arrives_in_order_whatever_both_do_meanwhile() {
    for seed in 0..if std::env::var_os("TOMBOLO_LONG").is_some() { 400 } else { 12 } {
        let mut random = Random(seed);
        let flips = seed % 3 == 0;
        let (ends, _folder) = joined(|settings| settings.flip = flips.then_some(Duration::from_micros(300)));
        let mut flows = [Flow::default(), Flow::default()];
        let largest = [1 << 10, 30 << 10, 300 << 10][seed as usize % 3];
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(120) {
            let at = random.below(2);
            let (own, peer) = (&ends[at], 1 - at);
            match random.below(6) {
                0..=1 => drop(flows[at].send(own, 1 + random.below(largest))),
                2..=3 => drop(flows[peer].receive(own, 1 + random.below(2 * largest), Read::Take)),
                4 => drop(flows[peer].receive(own, 1 + random.below(largest), Read::Peek)),
                _ => own.prepare_sleep(random.below(2) == 0, random.below(2) == 0),
            }
        }
        let deadline = Instant::now() + SOON;
        while flows.iter().any(|flow| flow.received < flow.sent) {
            for at in 0..2 {
                flows[1 - at].receive(&ends[at], 64 << 10, Read::Take);
                // Recalled bytes are sent by calls of their sender.
                ends[at].connection.for_call(&ends[at].process, -1).send_recalled();
            }
            assert!(Instant::now() < deadline, "seed {seed}: bytes are missing");
        }
    }
}

/// Both send much before either reads. An endpoint that waits for room takes the ring that it is offered.
#[test]
fn s20_ends_that_both_wait_for_room_get_it() {
    let (ends, _folder) = joined(|_| {});
    let mut flows = [Flow::default(), Flow::default()];
    for (end, at) in [(1, 1), (0, 0)] {
        // Until both directions are in the pipe.
        let deadline = Instant::now() + SOON;
        let before = flows[at].sent;
        while ends[end].connection.transports()[0] != tombolo_sockets::switch::Transport::Pipe {
            flows[at].send(&ends[end], 1);
            flows[at].receive(&ends[1 - end], 1, Read::Take);
            assert!(Instant::now() < deadline && flows[at].sent < before + 10_000);
        }
    }
    let deadline = Instant::now() + SOON;
    let begun = flows.each_ref().map(|flow| flow.sent);
    while (0..2).any(|at| flows[at].sent - begun[at] < 200 << 10) {
        for at in 0..2 {
            flows[at].send(&ends[at], 8 << 10);
            ends[at].prepare_sleep(false, true);
        }
        assert!(Instant::now() < deadline, "{:?}", ends.each_ref().map(|end| end.connection.ring_sizes()));
    }
}
