// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies from one core to the other with next to no protocol, which limits any ring of that size on this machine.
//!
//! The left process copies into memory that the right one maps read-only; the right process copies out. Each publishes
//! its own position once for every [`BATCH`] bytes and spins on the other's. Neither checks a position, sleeps or
//! notifies.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use tombolo_mem::{
    CopyMethod, MappedOwnWord, MappedPeerWord, OwnBytes, OwnWord, PeerBytes, PeerSegment, PeerWord, create_sealed,
};

use super::{Card, Context, End, Namespaces, Wire};
use crate::error::{Error, Os, Result};
use crate::job::{Mode, Role, Test};

/// Bytes between two published positions.
const BATCH: usize = 16 << 10;
/// Offset of the data: the page before it holds the position.
const DATA: usize = 4096;
/// Bit of the writer's position that is set once nothing follows.
const LAST: u64 = 1 << 63;
/// Longest wait for the other side.
const LIMIT: Duration = Duration::from_secs(10);

/// The transport `raw-copy`. Its variants are the instructions with which the writer and the reader copy; the best one
/// counts.
pub struct RawCopy {
    name: &'static str,
    variants: &'static [&'static str],
    /// Number of times that each batch is copied.
    times: u32,
}

impl RawCopy {
    pub(super) const ONCE: Self = Self { name: "raw-copy", variants: VARIANTS, times: 1 };

    /// Canaries `raw-copy-once` and `raw-copy-slowed`, with vectors only. The second copies each batch 64 times, on
    /// both sides, and a run must show it to be slower. From the second time on a batch is in the core's own cache.
    /// Those copies outlast even the slowest known transfer of lines, 2 GB/s between cores that share no cache.
    pub const CANARIES: [Self; 2] = [
        Self { name: "raw-copy-once", variants: VECTORS, times: 1 },
        Self { name: "raw-copy-slowed", variants: VECTORS, times: 64 },
    ];
}

const METHODS: [(&str, CopyMethod, CopyMethod); 3] = [
    ("vectors", CopyMethod::Vectors, CopyMethod::Vectors),
    ("rep-movsb", CopyMethod::RepMovsb, CopyMethod::RepMovsb),
    ("non-temporal", CopyMethod::NonTemporal, CopyMethod::Vectors),
];

const VARIANTS: &[&str] = &[METHODS[0].0, METHODS[1].0, METHODS[2].0];
const VECTORS: &[&str] = &[METHODS[0].0];

impl Wire for RawCopy {
    type Host = ();
    type End = Half;

    fn card(&self) -> Card {
        Card {
            name: self.name,
            mode: Mode::Stream,
            variants: self.variants,
            namespaces: Namespaces::Shared,
            tests: &[Test::Throughput],
            waits: &[],
            size: None,
            rings: true,
        }
    }

    fn listen(&self, _: &Context) -> Result<((), String)> {
        Ok(((), String::new()))
    }

    fn accept(&self, (): &mut (), context: &Context) -> Result<Half> {
        Half::open(context, self.times)
    }

    fn connect(&self, _: &str, context: &Context) -> Result<Half> {
        Half::open(context, self.times)
    }
}

/// One side: the left one sends, the right one receives.
pub struct Half {
    method: CopyMethod,
    times: u32,
    /// Bytes of the ring, a power of two.
    ring: u64,
    /// Bytes that this side copied, and the position that it last published to the other side.
    position: u64,
    published: u64,
    /// The other side's position as last loaded.
    seen: u64,
    mine: MappedOwnWord,
    theirs: MappedPeerWord,
    /// Memory that the left side fills.
    own: OwnBytes,
    /// Memory that the right side empties.
    peer: PeerBytes,
}

impl Half {
    fn open(context: &Context, times: u32) -> Result<Self> {
        let job = &context.job;
        let (_, writer, reader) = METHODS
            .into_iter()
            .find(|(name, ..)| *name == job.variant)
            .ok_or_else(|| Error::Usage(format!("raw-copy has no variant {:?}", job.variant)))?;
        let (own, fd) = create_sealed("tombolo-bench-raw", DATA + job.ring).os("making a ring")?;
        context.link.pass(fd.as_fd())?;
        let peer = PeerSegment::map(context.link.receive_descriptor()?.as_fd(), DATA + job.ring)
            .os("mapping the other worker's ring")?;
        let (control, own) = own.split(DATA);
        Ok(Self {
            method: if context.role == Role::Left { writer } else { reader },
            times,
            ring: job.ring as u64,
            position: 0,
            published: 0,
            seen: 0,
            mine: control.word(0),
            theirs: peer.word(0),
            own,
            peer: peer.data(DATA),
        })
    }

    fn batch(&self) -> u64 {
        (BATCH as u64).min(self.ring / 4)
    }

    /// Waits until the other side's position differs from the one last seen.
    fn await_change(&mut self) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            for _ in 0..1 << 14 {
                let position = self.theirs.load_acquire().hint();
                if position != self.seen {
                    self.seen = position;
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if Instant::now() > deadline {
                return Err(Error::Timeout { what: "the other end of the ring".into(), seconds: LIMIT.as_secs_f64() });
            }
        }
    }

    #[inline]
    fn advance(&mut self, len: usize) {
        self.position += len as u64;
        if self.position - self.published >= self.batch() {
            self.publish(0);
        }
    }

    fn publish(&mut self, mark: u64) {
        self.published = self.position;
        self.mine.store_release(self.position | mark);
    }

    /// Returns the offset of the position in the ring, and the bytes left to the ring's end.
    fn place(&self) -> (usize, usize) {
        let at = self.position & (self.ring - 1);
        (at as usize, (self.ring - at) as usize)
    }
}

impl End for Half {
    fn send(&mut self, mut message: &[u8]) -> Result<()> {
        while !message.is_empty() {
            let room = self.ring - (self.position - self.seen);
            if room == 0 {
                self.publish(0);
                self.await_change()?;
                continue;
            }
            let (at, straight) = self.place();
            let len = message.len().min(straight).min(BATCH).min(room as usize);
            for _ in 0..self.times {
                self.own.copy_in_by(self.method, at, &message[..len]);
            }
            message = &message[len..];
            self.advance(len);
        }
        Ok(())
    }

    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        while self.seen & !LAST == self.position {
            if self.seen & LAST != 0 {
                return Ok(0);
            }
            self.publish(0);
            self.await_change()?;
        }
        // The whole buffer is used, as with every other transport: the same 16 KiB each time would stay in the nearest
        // cache.
        let mut done = 0;
        while done < buffer.len() {
            let there = (self.seen & !LAST) - self.position;
            if there == 0 {
                let seen = self.theirs.load_acquire().hint();
                if seen == self.seen {
                    break;
                }
                self.seen = seen;
                continue;
            }
            let (at, straight) = self.place();
            let len = (buffer.len() - done).min(straight).min(BATCH).min(there as usize);
            for _ in 0..self.times {
                self.peer.copy_out_by(self.method, at, &mut buffer[done..done + len]);
            }
            self.advance(len);
            done += len;
        }
        Ok(done)
    }

    fn finish(&mut self) -> Result<()> {
        self.publish(LAST);
        Ok(())
    }
}
