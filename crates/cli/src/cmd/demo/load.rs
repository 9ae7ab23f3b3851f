// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file to be moved, and the place where it arrives. Both live in the folder for temporary files and have no name
//! there, so that nothing is left of them however this program ends.

use std::{
    env,
    fs::File,
    io::{self, Seek, Write},
    path::Path,
};

use crate::{
    failure::{Failure, Result},
    human,
    progress::Progress,
    signals::Signals,
};

/// Bytes that are made at once.
const BLOCK: usize = 1 << 20;
/// Room that stays free beside the demo's files.
const SPARE: u64 = 16 << 20;

/// The two files.
#[derive(Debug)]
pub struct Load {
    pub source: File,
    pub target: File,
    pub size: u64,
}

impl Load {
    /// A file that the user named.
    pub fn open(path: &Path) -> Result<Self> {
        let fail = |source| Failure::Open { file: path.display().to_string(), source };
        let source = File::open(path).map_err(fail)?;
        let about = source.metadata().map_err(fail)?;
        if !about.is_file() {
            return Err(Failure::Usage(format!("{} is no regular file", path.display())));
        }
        check_room(about.len())?;
        Ok(Self { source, target: temporary()?, size: about.len() })
    }

    /// A file of `size` bytes that no compression could make smaller.
    pub fn make(size: u64, signals: &Signals) -> Result<Self> {
        check_room(size.saturating_mul(2))?;
        let (mut source, target) = (temporary()?, temporary()?);
        let mut noise = Noise::new();
        let mut block = vec![0; BLOCK];
        let mut progress = Progress::new(Some(size));
        let mut made = 0;
        while made < size {
            signals.check()?;
            noise.fill(&mut block);
            let len = (size - made).min(BLOCK as u64);
            source.write_all(&block[..len as usize]).map_err(no_room)?;
            made += len;
            progress.show("made", made);
        }
        source.rewind().map_err(no_room)?;
        Ok(Self { source, target, size })
    }
}

fn temporary() -> Result<File> {
    tempfile::tempfile().map_err(|source| Failure::Open { file: place(), source })
}

fn place() -> String {
    format!("a temporary file in {}", env::temp_dir().display())
}

/// What to do about a folder that is too small.
pub fn no_room(source: io::Error) -> Failure {
    let hint = if source.kind() == io::ErrorKind::StorageFull { "; set TMPDIR to a folder with more room" } else { "" };
    Failure::Write { file: format!("{}{hint}", place()), source }
}

fn check_room(needed: u64) -> Result<()> {
    let folder = env::temp_dir();
    let Ok(about) = rustix::fs::statvfs(&folder) else { return Ok(()) };
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    if free >= needed.saturating_add(SPARE) {
        return Ok(());
    }
    let (folder, free, needed) = (folder.display(), human::bytes(free), human::bytes(needed));
    Err(Failure::Usage(format!(
        "{folder} has {free} free and the demo needs {needed}: set TMPDIR to a folder with more room, or move less with --size"
    )))
}

/// Bytes without a pattern, quickly: four generators side by side (splitmix64), which the compiler turns into vectors.
struct Noise([u64; 4]);

impl Noise {
    fn new() -> Self {
        use std::hash::{BuildHasher, RandomState};
        Self([1, 2, 3, 4].map(|n| RandomState::new().hash_one(n)))
    }

    fn fill(&mut self, block: &mut [u8]) {
        for words in block.chunks_exact_mut(32) {
            for (word, state) in words.chunks_exact_mut(8).zip(&mut self.0) {
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = *state;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                word.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn noise_has_no_repetition_and_all_bytes_alike() {
        let mut block = vec![0; BLOCK];
        Noise::new().fill(&mut block);
        let words: HashSet<&[u8]> = block.chunks_exact(8).collect();
        assert_eq!(words.len(), BLOCK / 8);
        let mut counts = [0u32; 256];
        block.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
        assert!(counts.iter().all(|count| (3600..4600).contains(count)), "{counts:?}");
    }

    #[test]
    fn room_that_no_disk_has_is_refused_with_a_remedy() {
        let failure = check_room(1 << 60).unwrap_err();
        assert!(failure.chain().contains("set TMPDIR"), "{failure}");
    }
}
