// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two cache lines as a transport, in each direction: 64 bytes of data, then a position on a line of its own. No ring
//! that keeps data and position apart can be quicker.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use tombolo_mem::{
    MappedOwnWord, MappedPeerWord, OwnBytes, OwnData, OwnWord, PeerBytes, PeerData, PeerSegment, PeerWord,
    create_sealed,
};

use super::{Card, Context, End, Namespaces, Wire};
use crate::error::{Error, Os, Result};
use crate::job::{Mode, Test, Wait};

/// Bytes of the message: one line.
const LINE: usize = 64;
/// Offset of the data: the page before it holds the position.
const DATA: usize = 4096;
/// Bit of the last position: nothing follows.
const LAST: u64 = 1 << 63;
/// Longest wait for the other side.
const LIMIT: Duration = Duration::from_secs(10);

/// The transport `two-lines`.
pub(super) struct TwoLines;

impl Wire for TwoLines {
    type Host = ();
    type End = Half;

    fn card(&self) -> Card {
        Card {
            name: "two-lines",
            mode: Mode::Message,
            variants: &[""],
            namespaces: Namespaces::Shared,
            tests: &[Test::Latency],
            waits: &[Wait::Spin],
            size: Some(LINE),
            rings: false,
        }
    }

    fn listen(&self, _: &Context) -> Result<((), String)> {
        Ok(((), String::new()))
    }

    fn accept(&self, (): &mut (), context: &Context) -> Result<Half> {
        Half::open(context)
    }

    fn connect(&self, _: &str, context: &Context) -> Result<Half> {
        Half::open(context)
    }
}

/// One side: two lines that it writes, and two that the other side writes.
pub struct Half {
    /// Numbers of messages sent and received.
    sent: u64,
    received: u64,
    mine: MappedOwnWord,
    theirs: MappedPeerWord,
    own: OwnBytes,
    peer: PeerBytes,
}

impl Half {
    fn open(context: &Context) -> Result<Self> {
        let (own, fd) = create_sealed("tombolo-bench-lines", 2 * DATA).os("making two lines")?;
        context.link.pass(fd.as_fd())?;
        let peer = PeerSegment::map(context.link.receive_descriptor()?.as_fd(), 2 * DATA)
            .os("mapping the other worker's lines")?;
        let (control, own) = own.split(DATA);
        let (mine, theirs) = (control.word(0), peer.word(0));
        Ok(Self { sent: 0, received: 0, mine, theirs, own, peer: peer.data(DATA) })
    }

    /// Waits until the other side's position is beyond what was received.
    #[inline]
    fn await_next(&self) -> Result<u64> {
        for _ in 0..1 << 14 {
            let position = self.theirs.load_acquire().hint();
            if position != self.received {
                return Ok(position);
            }
            std::hint::spin_loop();
        }
        self.await_next_for_long()
    }

    #[cold]
    fn await_next_for_long(&self) -> Result<u64> {
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            let position = self.theirs.load_acquire().hint();
            if position != self.received {
                return Ok(position);
            }
            std::hint::spin_loop();
        }
        Err(Error::Timeout { what: "the other end of the two lines".into(), seconds: LIMIT.as_secs_f64() })
    }
}

impl End for Half {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.own.copy_in(0, &message[..LINE]);
        self.sent += 1;
        self.mine.store_release(self.sent);
        Ok(())
    }

    #[inline]
    fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let position = self.await_next()?;
        if position & LAST != 0 {
            return Ok(0);
        }
        self.peer.copy_out(0, &mut buffer[..LINE]);
        self.received = position;
        Ok(LINE)
    }

    fn finish(&mut self) -> Result<()> {
        self.mine.store_release(self.sent | LAST);
        Ok(())
    }
}
