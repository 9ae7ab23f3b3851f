// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creates a directory for the sockets of one pair of workers.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Os, Result};

/// Directory that only this user can enter, and that is removed when this is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn new() -> Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        // ORDER: none needed; each caller only wants a number of its own.
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tombolo-bench-{}-{serial}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).os("making a directory for sockets")?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that cannot be removed stays; there is no remedy.
        let _ = fs::remove_dir_all(&self.0);
    }
}
