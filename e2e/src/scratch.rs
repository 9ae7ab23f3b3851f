// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A folder for a while.

use crate::error::{Context, Result};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder that only this user may enter; it goes with its value.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new one, whose name tells what it is for.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn new(what: &str) -> Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        // ORDER: none needed; each caller only wants a number of its own.
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tombolo-{what}-{}-{serial}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).context(path.display())?;
        Ok(Self(path))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}
