// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creates the file to be moved, and the file where it arrives. Both are temporary and have no name, so that nothing
//! remains of them however this program ends.

use std::{
    env,
    fs::File,
    io::{Seek, Write},
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate};

use crate::{
    failure::{Failure, Result},
    human, memory,
    progress::Progress,
    signals::Signals,
};

/// Bytes that are generated at once.
const BLOCK: usize = 1 << 20;
/// Bytes that stay free beside the demo's files.
const SPARE: u64 = 16 << 20;

/// The two files of a transfer.
#[derive(Debug)]
pub struct Load {
    pub source: File,
    pub target: File,
    pub size: u64,
    /// Folder of the files that this program made.
    pub folder: PathBuf,
}

impl Load {
    /// Opens a file that the user named.
    pub fn open(path: &Path) -> Result<Self> {
        let fail = |source| Failure::Open { file: path.display().to_string(), source };
        let source = File::open(path).map_err(fail)?;
        let about = source.metadata().map_err(fail)?;
        if !about.is_file() {
            return Err(Failure::Usage(format!("{} is no regular file", path.display())));
        }
        let folder = folder(about.len())?;
        let target = target(&folder, about.len())?;
        Ok(Self { source, target, size: about.len(), folder })
    }

    /// Makes a file of `size` bytes that cannot be compressed.
    pub fn make(size: u64, signals: &Signals) -> Result<Self> {
        let folder = folder(size.saturating_mul(2))?;
        let (mut source, target) = (temporary(&folder)?, target(&folder, size)?);
        let full = |source| Failure::Write { file: place(&folder), source };
        let mut noise = Noise::new();
        let mut block = vec![0; BLOCK];
        let mut progress = Progress::new(Some(size));
        let mut made = 0;
        while made < size {
            signals.check()?;
            noise.fill(&mut block);
            let len = (size - made).min(BLOCK as u64);
            source.write_all(&block[..len as usize]).map_err(full)?;
            made += len;
            progress.show("made", made);
        }
        source.rewind().map_err(full)?;
        Ok(Self { source, target, size, folder })
    }
}

fn temporary(folder: &Path) -> Result<File> {
    tempfile::tempfile_in(folder).map_err(|source| Failure::Open { file: place(folder), source })
}

/// Returns the file that bytes arrive in. It is empty, but its room is allocated, so that the transfer does not wait
/// for the kernel to find and clear memory. Where that fails, the writes allocate the room.
fn target(folder: &Path, size: u64) -> Result<File> {
    let target = temporary(folder)?;
    if size != 0 {
        let _ = fallocate(&target, FallocateFlags::KEEP_SIZE, 0, size);
    }
    Ok(target)
}

fn place(folder: &Path) -> String {
    format!("a temporary file in {} (TMPDIR names another folder)", folder.display())
}

/// Returns a folder with room for `needed` bytes: the one that the user named, else memory if there is plenty, else the
/// usual one. Memory is preferred because the demo must not show how slow the disk is.
fn folder(needed: u64) -> Result<PathBuf> {
    let shm = PathBuf::from("/dev/shm");
    if env::var_os("TMPDIR").is_none() && memory::available() / 2 >= needed && check_room(&shm, needed).is_ok() {
        return Ok(shm);
    }
    let folder = env::temp_dir();
    check_room(&folder, needed).map(|()| folder)
}

fn check_room(folder: &Path, needed: u64) -> Result<()> {
    let about = rustix::fs::statvfs(folder)
        .map_err(|error| Failure::Open { file: folder.display().to_string(), source: error.into() })?;
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    if free >= needed.saturating_add(SPARE) {
        return Ok(());
    }
    let (folder, free, needed) = (folder.display(), human::bytes(free), human::bytes(needed));
    Err(Failure::Usage(format!(
        "{folder} has {free} free and the demo needs {needed}: set TMPDIR to a folder with more room, or move less with --size"
    )))
}

/// Generator of bytes without a pattern. It is quick: four generators side by side (splitmix64), which the compiler
/// turns into vectors.
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
    fn target_is_empty_and_has_its_room() {
        let file = target(Path::new("/dev/shm"), 1 << 20).unwrap();
        let about = rustix::fs::fstat(&file).unwrap();
        assert_eq!((about.st_size, about.st_blocks * 512), (0, 1 << 20));
    }

    #[test]
    fn room_that_no_disk_has_is_refused_with_a_remedy() {
        let failure = check_room(&env::temp_dir(), 1 << 60).unwrap_err();
        assert!(failure.chain().contains("set TMPDIR"), "{failure}");
    }
}
