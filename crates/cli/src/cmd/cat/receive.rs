// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The direction from the peer to the output.

use std::sync::{Arc, atomic::Ordering};

use tombolo::{Ending, ReadHalf};

use super::{
    files::Output,
    flow::{Digest, Flow},
};
use crate::failure::{Failure, Result};

/// Read at once: small enough to be still in the cache when it is hashed and written.
const BUFFER: usize = 256 << 10;

/// Receives until the peer ends.
pub struct Receiver {
    pub half: ReadHalf,
    /// `None` if nothing is wanted.
    pub output: Option<Arc<Output>>,
    pub flow: Arc<Flow>,
    pub digest: Digest,
}

/// How it ended well.
pub enum Received {
    /// The peer said all it had to say; the digest of it.
    All(Option<String>),
    /// Whoever reads the output wants no more.
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
            if flow.patiently(|deadline| self.half.wait_until(deadline)).map_err(fail)? {
                self.half.close();
                return Ok(Received::All(None));
            }
            return self.end();
        };
        let mut buffer = vec![0; BUFFER];
        loop {
            let len = flow.patiently(|deadline| self.half.read_until(&mut buffer, deadline)).map_err(fail)?;
            if len == 0 {
                return self.end();
            }
            flow.received.fetch_add(len as u64, Ordering::Relaxed);
            let bytes = &buffer[..len];
            self.digest.update(bytes);
            if !output.write(bytes)? {
                return Ok(Received::Enough);
            }
        }
    }

    fn end(self) -> Result<Received> {
        match self.half.ending() {
            None | Some(Ending::Closed) => Ok(Received::All(self.digest.finish())),
            Some(ending) => Err(Failure::Truncated { bytes: self.flow.received(), ending }),
        }
    }
}
