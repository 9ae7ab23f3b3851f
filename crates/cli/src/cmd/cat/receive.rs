// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves bytes from the peer to the output.

use std::{
    io::PipeReader,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
};

use tombolo::{Ending, Error, ReadHalf};

use super::{digest::Digest, files::Output, flow::Flow};
use crate::{
    failure::{Failure, Result},
    signals::await_any,
};

/// Most bytes that are read at once: few enough to be still in the cache when they are hashed and written.
pub const BUFFER: usize = 256 << 10;

/// Receives until the peer ends.
pub struct Receiver {
    pub half: ReadHalf,
    /// `None` if no bytes are wanted.
    pub output: Option<Arc<Output>>,
    pub flow: Arc<Flow>,
    /// Digest, where one is wanted; all bytes pass through its buffers then.
    pub digest: Option<Digest>,
    /// Hangs up when this side has sent everything, if it only sends.
    pub quit: PipeReader,
}

/// Kind of a successful end.
pub enum Received {
    /// The peer sent everything; holds the digest of it.
    All(Option<String>),
    /// The reader of the output wants no more.
    Enough,
}

impl Receiver {
    pub fn run(mut self) -> Result<Received> {
        let flow = Arc::clone(&self.flow);
        let fail = |error| {
            let bytes = flow.received();
            flow.failure(error, |source| Failure::Receiving { bytes, source })
        };
        let Some(output) = self.output.take() else {
            self.refuse(fail)?;
            return match self.half.ending() {
                None | Some(Ending::Closed) => Ok(Received::All(None)),
                Some(_) => Err(Failure::Sending { bytes: flow.sent(), source: Error::PeerGone }),
            };
        };
        let mut plain = vec![0; if self.digest.is_some() { 0 } else { BUFFER }];
        loop {
            let buffer = match &mut self.digest {
                Some(digest) => digest.next_buffer()?,
                None => &mut plain[..],
            };
            let len = flow.patiently(|deadline| self.half.read_until(buffer, deadline)).map_err(fail)?;
            if len == 0 {
                return self.end();
            }
            flow.received.fetch_add(len as u64, Ordering::Relaxed);
            // The bytes are hashed while they are written.
            let bytes = match &mut self.digest {
                Some(digest) => digest.hash_next(len)?,
                None => &plain[..len],
            };
            if !output.write(bytes)? {
                return Ok(Received::Enough);
            }
        }
    }

    /// Waits for the peer's end. If the peer sends something, or this side is done, tells the peer that its bytes are
    /// not read.
    fn refuse(&mut self, fail: impl Fn(Error) -> Failure) -> Result<()> {
        let flow = Arc::clone(&self.flow);
        let mut silence = flow.silence();
        loop {
            // Once the descriptor was asked for, a read that finds nothing makes it quiet until there is something.
            self.half.poll_fd().map_err(&fail)?;
            match self.half.try_read(&mut [0]).map_err(&fail)? {
                Some(0) => return Ok(()),
                Some(_) => break,
                None => {}
            }
            let ready = await_any(&[self.half.as_fd(), self.quit.as_fd()], silence.next_look())?;
            if ready[1] {
                break;
            }
            if !ready[0] && silence.is_too_long() {
                return Err(fail(Error::TimedOut));
            }
        }
        self.half.close();
        Ok(())
    }

    fn end(self) -> Result<Received> {
        match self.half.ending() {
            None | Some(Ending::Closed) => self.digest.map(Digest::finish).transpose().map(Received::All),
            Some(ending) => Err(Failure::Truncated { bytes: self.flow.received(), ending }),
        }
    }
}
