// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves bytes from the input to the peer.

use std::{
    io::PipeReader,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tombolo::{Deadline, Error, Liveness, Watch, WriteHalf};

use super::{digest::Digest, files::Input, flow::Flow};
use crate::{
    failure::{Failure, Result},
    signals::await_any,
};

/// Most bytes that are read at once.
pub const CHUNK_MOST: u64 = 256 << 10;
/// Time between two checks that the peer still reads, once it has sent everything.
const LOOK: Duration = Duration::from_millis(100);

/// Sends until the input ends.
pub struct Sender {
    pub input: Input,
    pub half: WriteHalf,
    pub watch: Watch,
    pub flow: Arc<Flow>,
    /// Digest, where one is wanted; all bytes pass through its buffers then.
    pub digest: Option<Digest>,
    /// Hangs up when the peer has sent everything, or the session is given up.
    pub stop: PipeReader,
}

impl Sender {
    /// Sends until the input ends. Returns the digest of what was sent.
    pub fn run(mut self) -> Result<Option<String>> {
        let fail = |flow: &Flow, error| {
            let bytes = flow.sent();
            flow.failure(error, |source| Failure::Sending { bytes, source })
        };
        let flow = Arc::clone(&self.flow);
        match self.send() {
            Ok(true) => {}
            // The peer has sent everything and reads no more: both endpoints are done, and nothing was lost.
            Ok(false) => return self.digest.map(Digest::finish).transpose(),
            Err(Trouble::Channel(error)) => return Err(fail(&flow, error)),
            Err(Trouble::Here(failure)) => {
                self.half.abort();
                return Err(failure);
            }
        }
        // Only what the peer has read counts as done.
        flow.patiently(|deadline| self.call(|half| half.drained_until(deadline)))
            .or_else(|error| match error {
                // The peer read everything and left; this endpoint may see these two in any order.
                Error::Closed | Error::PeerGone => self.half.drained_until(Deadline::NOW).map_err(|_| error),
                error => Err(error),
            })
            .map_err(|error| fail(&flow, error))?;
        self.half.close();
        self.digest.map(Digest::finish).transpose()
    }

    /// Makes `call`, and notes how much the peer has not read.
    fn call<T>(&mut self, call: impl FnOnce(&mut WriteHalf) -> tombolo::Result<T>) -> tombolo::Result<T> {
        let done = call(&mut self.half);
        self.flow.unread.store(self.half.statistics().in_flight, Ordering::Relaxed);
        done
    }

    /// Returns whether the peer wants to read the rest.
    fn send(&mut self) -> Result<bool, Trouble> {
        loop {
            match self.await_input()? {
                Next::Read => {}
                Next::Close => return Ok(true),
                Next::Leave => return Ok(false),
            }
            // A quarter of the ring, whose size may follow its load: this side fills one part while the peer empties
            // others.
            let chunk = (self.half.statistics().ring_size / 4).min(CHUNK_MOST) as usize;
            let sent = if self.digest.is_some() { self.send_hashed(chunk) } else { self.send_in_place(chunk) };
            match sent {
                Ok(true) => {}
                // The ring became a smaller one meanwhile. Nothing was read yet.
                Err(Trouble::Channel(Error::TooLarge { .. })) => {}
                Ok(false) => return Ok(true),
                Err(trouble) => return Err(trouble),
            }
        }
    }

    /// Reads straight into the ring. Returns whether there may be more.
    fn send_in_place(&mut self, chunk: usize) -> Result<bool, Trouble> {
        let flow = Arc::clone(&self.flow);
        flow.patiently(|deadline| self.call(|half| half.reserve_until(chunk, deadline).map(drop)))?;
        let (room, _) = self.half.reserve_until(chunk, Deadline::NOW)?;
        let Some(len) = self.input.read(room)? else { return Ok(true) };
        if len != 0 {
            self.half.commit(len)?;
            self.flow.sent.fetch_add(len as u64, Ordering::Relaxed);
        }
        Ok(len != 0)
    }

    /// Reads into a buffer that is hashed while it is sent. Returns whether there may be more.
    fn send_hashed(&mut self, chunk: usize) -> Result<bool, Trouble> {
        let Some(digest) = &mut self.digest else { return Ok(true) };
        let buffer = digest.next_buffer()?;
        let most = chunk.min(buffer.len());
        let Some(len) = self.input.read(&mut buffer[..most])? else { return Ok(true) };
        if len == 0 {
            return Ok(false);
        }
        let mut bytes = digest.hash_next(len)?;
        while !bytes.is_empty() {
            let (half, flow) = (&mut self.half, &self.flow);
            let written = flow.patiently(|deadline| {
                let written = half.write_until(bytes, deadline);
                flow.unread.store(half.statistics().in_flight, Ordering::Relaxed);
                written
            })?;
            self.flow.sent.fetch_add(written as u64, Ordering::Relaxed);
            bytes = &bytes[written..];
        }
        Ok(true)
    }

    fn await_input(&mut self) -> Result<Next, Trouble> {
        let flow = Arc::clone(&self.flow);
        let (mut stopped, mut silence) = (false, flow.silence());
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
                    // A user does not end a terminal's input only because the peer is done. A peer that sent nothing
                    // may still read.
                    if self.input.terminal && self.flow.received() > 0 && !self.flow.given_up() {
                        return Ok(Next::Close);
                    }
                }
                [true, ..] => return Ok(Next::Read),
                // Nothing to read. The peer has ended its direction, so nobody else notices when it goes.
                _ => {
                    if self.is_left()? {
                        return Ok(Next::Leave);
                    }
                    if silence.is_too_long() {
                        return Err(Error::TimedOut.into());
                    }
                }
            }
        }
    }

    /// Returns whether the peer reads no more, having read everything. Fails if it has not read everything, or died.
    fn is_left(&mut self) -> tombolo::Result<bool> {
        // This comes first: a peer that ends in order says so before it goes.
        let gone = matches!(self.watch.liveness(), Liveness::ProcessGone | Liveness::DomainGone | Liveness::Revoked);
        match self.half.try_write(&[]) {
            Err(error @ (Error::Closed | Error::PeerGone)) => {
                self.half.drained_until(Deadline::NOW).map(|()| true).map_err(|_| error)
            }
            Err(error) => Err(error),
            Ok(_) if gone => Err(Error::PeerGone),
            Ok(_) => match self.call(|half| half.drained_until(Deadline::NOW)) {
                // It may close just now; then the next look finds that.
                Ok(()) | Err(Error::TimedOut | Error::Closed | Error::PeerGone) => Ok(false),
                Err(error) => Err(error),
            },
        }
    }
}

/// Next step.
enum Next {
    Read,
    /// No more input is wanted; what was read is everything.
    Close,
    /// The peer reads no more.
    Leave,
}

/// Cause of a failure: the channel, or this side.
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
