// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that take no preloaded library: better said than wondered about.

use std::{
    env,
    ffi::OsStr,
    fmt,
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

/// The file that `exec` will take.
pub fn find(name: &OsStr) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return Some(path.to_owned());
    }
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Why the library will not be in a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    Rights,
    Static,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rights => "runs with another user's rights, so no library can be preloaded",
            Self::Static => "is linked statically, so no library can be preloaded",
        })
    }
}

/// What keeps the library out of the program; none if nothing does, as far as can be told.
pub fn obstacle(path: &Path) -> Option<Obstacle> {
    let mode = fs::metadata(path).ok()?.permissions().mode();
    if mode & 0o6000 != 0 {
        return Some(Obstacle::Rights); // It may not be ours to read.
    }
    (is_static(&mut File::open(path).ok()?) == Some(true)).then_some(Obstacle::Static)
}

/// Whether an ELF file of 64 bits names no interpreter; none where it is something else.
fn is_static(file: &mut File) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    let mut head = [0; 64];
    file.read_exact(&mut head).ok()?;
    if head[..6] != *b"\x7fELF\x02\x01" {
        return None;
    }
    let at = u64::from_le_bytes(head[32..40].try_into().ok()?);
    let size = u16::from_le_bytes([head[54], head[55]]);
    let count = u16::from_le_bytes([head[56], head[57]]);
    let mut table = vec![0; usize::from(size) * usize::from(count)];
    file.seek(SeekFrom::Start(at)).ok()?;
    file.read_exact(&mut table).ok()?;
    let mut entries = table.chunks_exact(usize::from(size).max(4));
    Some(!entries.any(|entry| entry[..4] == PT_INTERP.to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_with_an_interpreter_can_be_preloaded_and_text_is_not_judged() {
        assert_eq!(obstacle(&env::current_exe().unwrap()), None);
        assert_eq!(obstacle(Path::new(file!())), None);
    }

    #[test]
    fn program_that_names_no_interpreter_is_static() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("static");
        let mut head = vec![0_u8; 64 + 56];
        head[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (head[32], head[54], head[56]) = (64, 56, 1);
        head[64] = 1; // PT_LOAD
        std::fs::write(&path, &head).unwrap();
        assert_eq!(obstacle(&path), Some(Obstacle::Static));
        head[64] = 3;
        std::fs::write(&path, &head).unwrap();
        assert_eq!(obstacle(&path), None);
    }
}
