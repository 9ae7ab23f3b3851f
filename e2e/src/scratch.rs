// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A temporary folder.

use crate::error::{Context, Error, Result};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::fs::{self, DirBuilder};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Time for which an unlocked folder is not removed, because its creator may be about to lock it.
const YOUNG: Duration = Duration::from_secs(60);

/// A folder that only this user may enter. It is removed when its value is dropped. If its process was killed, the next
/// process that makes one removes it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    /// Lock on the folder, held as long as the folder is in use.
    _lock: OwnedFd,
}

impl Scratch {
    /// Makes a new folder, whose name contains its purpose.
    ///
    /// # Errors
    /// There is no room for the folder.
    pub fn new(what: &str) -> Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        static SWEPT: Once = Once::new();
        let all = std::env::temp_dir();
        SWEPT.call_once(|| remove_left(&all, YOUNG));
        // ORDER: none needed; each caller only wants a number of its own.
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = all.join(format!("tombolo-{what}-{}-{serial}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).context(path.display())?;
        let lock = lock_folder(&path).ok_or_else(|| Error::new(format!("{}: cannot be locked", path.display())))?;
        Ok(Self { path, _lock: lock })
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.path);
    }
}

/// Locks a folder. Returns nothing if another process has the lock.
fn lock_folder(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    flock(&folder, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(folder)
}

/// Returns whether a name has this form: a purpose, a process number and a serial number.
fn is_ours(name: &str) -> bool {
    let mut parts = name.rsplitn(3, '-');
    let mut is_number = || parts.next().is_some_and(|part| part.parse::<u32>().is_ok());
    is_number() && is_number() && parts.next().is_some_and(|rest| rest.starts_with("tombolo-"))
}

/// Removes folders that killed processes left: this user's, older than `young`, and not locked.
fn remove_left(all: &Path, young: Duration) {
    let Ok(entries) = fs::read_dir(all) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_ours)) {
        let Ok(metadata) = entry.metadata() else { continue };
        let is_old = metadata.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= young));
        let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
        if metadata.is_dir() && is_own && is_old && lock_folder(&entry.path()).is_some() {
            _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_of_a_process_that_was_killed_goes_and_others_stay() {
        let all = Scratch::new("all").unwrap();
        let made = ["tombolo-broker-1-0", "tombolo-broker-1-1", "tombolo-mine", "other-1-0", "tombolo-vm-x-1"];
        for name in made {
            fs::create_dir(all.path().join(name)).unwrap();
            fs::write(all.path().join(name).join("file"), "").unwrap();
        }
        let kept = lock_folder(&all.path().join("tombolo-broker-1-1")).unwrap();
        let there = || made.map(|name| all.path().join(name).exists());
        remove_left(all.path(), YOUNG);
        assert_eq!(there(), [true; 5], "all are young");
        remove_left(all.path(), Duration::ZERO);
        assert_eq!(there(), [false, true, true, true, true]);
        drop(kept);
        remove_left(all.path(), Duration::ZERO);
        assert_eq!(there(), [false, false, true, true, true]);
    }
}
