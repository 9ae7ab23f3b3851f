// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Computes the SHA-256 of the bytes that pass, on a thread of its own where a CPU is left for that.

use std::{
    num::NonZero,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

use sha2::{Digest as _, Sha256};

use crate::failure::{Failure, Os, Result};

/// Busy threads of an endpoint that hashes on another thread: one moves bytes, one hashes them.
const THREADS: usize = 2;
/// Buffers in use at once: one that is filled, one that is hashed, and two so that neither side waits at once.
const BUFFERS: usize = 4;

/// Buffers through which all bytes of a direction pass, and the digest of these bytes.
#[derive(Debug)]
pub enum Digest {
    /// The thread that moves the bytes hashes them too.
    Inline { buffer: Vec<u8>, sha: Sha256 },
    /// Another thread hashes them.
    Aside(Aside),
}

/// Bytes that another thread hashes.
#[derive(Debug)]
pub struct Aside {
    buffers: Vec<Arc<Vec<u8>>>,
    next: usize,
    /// Number of chunks that the hasher has not given back yet.
    lent: usize,
    hasher: Hasher,
}

/// The thread, the chunks sent to it, and a message back for each chunk that is done.
#[derive(Debug)]
struct Hasher {
    chunks: Sender<(Arc<Vec<u8>>, usize)>,
    done: Receiver<()>,
    thread: JoinHandle<Sha256>,
}

impl Digest {
    /// Begins with buffers of `size` bytes. `ends` is the number of the channel's endpoints that share this machine's
    /// CPUs: another thread hashes where there are enough CPUs for all of them.
    pub fn begin(size: usize, ends: usize) -> Result<Self> {
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        if cpus >= ends * THREADS {
            Aside::start(size).map(Self::Aside)
        } else {
            Ok(Self::Inline { buffer: vec![0; size], sha: Sha256::new() })
        }
    }

    /// Returns the buffer to be filled next; blocks until it has been hashed.
    pub fn next_buffer(&mut self) -> Result<&mut [u8]> {
        match self {
            Self::Inline { buffer, .. } => Ok(buffer),
            Self::Aside(aside) => aside.next_buffer(),
        }
    }

    /// Hashes the first `len` bytes of that buffer, here or on the other thread, and returns them.
    pub fn hash_next(&mut self, len: usize) -> Result<&[u8]> {
        match self {
            Self::Inline { buffer, sha } => {
                sha.update(&buffer[..len]);
                Ok(&buffer[..len])
            }
            Self::Aside(aside) => aside.hash_next(len),
        }
    }

    /// Waits for the last chunk. Returns the digest in hexadecimal.
    pub fn finish(self) -> Result<String> {
        let sha = match self {
            Self::Inline { sha, .. } => sha,
            Self::Aside(aside) => aside.finish()?,
        };
        Ok(sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl Aside {
    fn start(size: usize) -> Result<Self> {
        let (chunks, incoming) = channel::<(Arc<Vec<u8>>, usize)>();
        let (ready, done) = channel();
        let work = move || {
            let mut digest = Sha256::new();
            for (chunk, len) in incoming {
                digest.update(&chunk[..len]);
                drop(chunk);
                // Nobody waits for this message once the last chunk has been sent.
                let _ = ready.send(());
            }
            digest
        };
        let thread = thread::Builder::new().spawn(work).os("clone")?;
        let buffers = (0..BUFFERS).map(|_| Arc::new(vec![0; size])).collect();
        Ok(Self { buffers, next: 0, lent: 0, hasher: Hasher { chunks, done, thread } })
    }

    fn next_buffer(&mut self) -> Result<&mut [u8]> {
        if self.lent == BUFFERS {
            self.hasher.done.recv().map_err(|_| hasher_failed())?;
            self.lent -= 1;
        }
        Arc::get_mut(&mut self.buffers[self.next]).map(Vec::as_mut_slice).ok_or_else(hasher_failed)
    }

    fn hash_next(&mut self, len: usize) -> Result<&[u8]> {
        let filled = &self.buffers[self.next];
        self.hasher.chunks.send((Arc::clone(filled), len)).map_err(|_| hasher_failed())?;
        self.next = (self.next + 1) % BUFFERS;
        self.lent += 1;
        Ok(&filled[..len])
    }

    fn finish(self) -> Result<Sha256> {
        let Hasher { chunks, thread, .. } = self.hasher;
        drop(chunks);
        thread.join().map_err(|_| hasher_failed())
    }
}

/// Returns the failure of the hasher. A panic is a bug, and has printed its own message.
fn hasher_failed() -> Failure {
    Failure::Outcome("the thread that computes the SHA-256 has failed".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(digest: &mut Digest, bytes: &[u8]) {
        digest.next_buffer().unwrap()[..bytes.len()].copy_from_slice(bytes);
        assert_eq!(digest.hash_next(bytes.len()).unwrap(), bytes);
    }

    /// Returns a digest that hashes at once, and one that leaves it to a thread.
    fn both(size: usize) -> [Digest; 2] {
        [Digest::begin(size, usize::MAX / THREADS).unwrap(), Digest::begin(size, 0).unwrap()]
    }

    fn text(digest: Sha256) -> String {
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn digest_is_computed_aside_only_where_every_end_has_cpus_for_it() {
        assert!(matches!(both(1), [Digest::Inline { .. }, Digest::Aside(_)]));
    }

    #[test]
    fn digest_of_abc_is_the_published_one() {
        for mut digest in both(4) {
            pass(&mut digest, b"a");
            pass(&mut digest, b"bc");
            let text = digest.finish().unwrap();
            assert_eq!(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        }
    }

    #[test]
    fn digest_of_more_chunks_than_buffers_is_that_of_all_of_them_in_order() {
        let chunks: Vec<Vec<u8>> = (0..100u8).map(|n| vec![n; 1 + usize::from(n) * 37]).collect();
        for mut digest in both(4096) {
            chunks.iter().for_each(|chunk| pass(&mut digest, chunk));
            assert_eq!(digest.finish().unwrap(), text(Sha256::new_with_prefix(chunks.concat())));
        }
    }

    #[test]
    fn buffer_is_not_filled_again_before_its_chunk_was_hashed() {
        let mut expected = Sha256::new();
        (0..40).for_each(|n| expected.update(vec![n; 1 << 20]));
        let expected = text(expected);
        for mut digest in both(1 << 20) {
            for n in 0..40 {
                digest.next_buffer().unwrap().fill(n);
                digest.hash_next(1 << 20).unwrap();
            }
            assert_eq!(digest.finish().unwrap(), expected);
        }
    }
}
