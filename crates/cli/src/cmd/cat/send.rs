// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The direction from the input to the peer.

use std::{
    io::PipeReader,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tombolo::{Deadline, Error, WriteHalf};

use super::{
    files::Input,
    flow::{Digest, Flow},
};
use crate::{
    failure::{Failure, Result},
    signals::await_any,
};

/// Most that is read at once.
const CHUNK_MOST: u64 = 256 << 10;
/// Once the peer has said all it had to, how often it is looked whether it still listens.
const LOOK: Duration = Duration::from_millis(100);

/// Sends until the input ends.
pub struct Sender {
    pub input: Input,
    pub half: WriteHalf,
    pub flow: Arc<Flow>,
    pub digest: Digest,
    /// Hangs up when the peer has said all, or the session is given up.
    pub stop: PipeReader,
}

impl Sender {
    /// Says the digest of what was sent.
    pub fn run(mut self) -> Result<Option<String>> {
        let fail = |flow: &Flow, error| {
            let bytes = flow.sent();
            flow.failure(error, |source| Failure::Sending { bytes, source })
        };
        let flow = Arc::clone(&self.flow);
        match self.send() {
            Ok(true) => {}
            // The peer has said all and listens no more: both ends are done, nothing was lost.
            Ok(false) => return Ok(self.digest.finish()),
            Err(Trouble::Channel(error)) => return Err(fail(&flow, error)),
            Err(Trouble::Here(failure)) => {
                self.half.abort();
                return Err(failure);
            }
        }
        // Done is what the peer has read.
        flow.patiently(|deadline| self.half.drained_until(deadline))
            .or_else(|error| match error {
                // It read everything and left: that may be seen in this order.
                Error::Closed | Error::PeerGone => self.half.drained_until(Deadline::NOW).map_err(|_| error),
                error => Err(error),
            })
            .map_err(|error| fail(&flow, error))?;
        self.half.close();
        Ok(self.digest.finish())
    }

    /// Says whether the peer wants to read the rest.
    fn send(&mut self) -> Result<bool, Trouble> {
        // A quarter of the ring: this end fills one part while the peer empties others.
        let chunk = (self.half.statistics().ring_size / 4).min(CHUNK_MOST) as usize;
        loop {
            match self.await_input()? {
                Next::Read => {}
                Next::Close => return Ok(true),
                Next::Leave => return Ok(false),
            }
            self.flow.patiently(|deadline| self.half.reserve_until(chunk, deadline).map(drop))?;
            let (room, _) = self.half.reserve_until(chunk, Deadline::NOW)?;
            let Some(len) = self.input.read(room)? else { continue };
            if len == 0 {
                return Ok(true);
            }
            self.digest.update(&room[..len]);
            self.half.commit(len)?;
            self.flow.sent.fetch_add(len as u64, Ordering::Relaxed);
        }
    }

    fn await_input(&mut self) -> Result<Next, Trouble> {
        let mut stopped = false;
        loop {
            if self.flow.given_up() {
                return Err(Failure::Outcome("given up".into()).into());
            }
            if self.input.size.is_some() {
                return Ok(Next::Read);
            }
            let ready = if stopped {
                await_any(&[self.input.fd()], Some(LOOK))?
            } else {
                await_any(&[self.input.fd(), self.stop.as_fd()], None)?
            };
            match ready[..] {
                [_, true] => {
                    stopped = true;
                    // Nobody ends a terminal only because the peer is done. One that never said anything may still listen.
                    if self.input.terminal && self.flow.received() > 0 && !self.flow.given_up() {
                        return Ok(Next::Close);
                    }
                }
                [true, ..] => return Ok(Next::Read),
                // Nothing to read, and nobody to send it to?
                _ => match self.half.try_write(&[]) {
                    Err(Error::Closed | Error::PeerGone) => return Ok(Next::Leave),
                    looked => drop(looked?),
                },
            }
        }
    }
}

/// What to do next.
enum Next {
    Read,
    /// The input is not wanted any more; what there is, is all.
    Close,
    /// Nobody reads.
    Leave,
}

/// Who is to blame.
enum Trouble {
    Channel(Error),
    Here(Failure),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Channel(error)
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self::Here(failure)
    }
}
