// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hostile process that holds the lock of a file which it shares with the broker, or with a peer. It is a separate
//! process, and a kill ends it.

use std::{
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    sync::OnceLock,
};

/// Holds a file's lock until it is dropped.
pub struct Hold(Child);

impl Hold {
    /// Starts a process that writes to `file` without end.
    pub fn lock_file(file: &OwnedFd) -> Self {
        let mut child = spawn(file);
        let mut said = [0; 5];
        child.stdout.as_mut().unwrap().read_exact(&mut said).expect("it holds the lock");
        assert_eq!(&said, b"held\n");
        Self(child)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(file: &OwnedFd) -> Child {
    static PROGRAM: OnceLock<(tempfile::TempDir, std::path::PathBuf)> = OnceLock::new();
    let (_, program) = PROGRAM.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let (program, source) = (folder.path().join("hold"), folder.path().join("hold.c"));
        std::fs::write(&source, include_str!("hold.c")).unwrap();
        let made = Command::new("cc").arg(source).args(["-pthread", "-o"]).arg(&program).status().unwrap();
        assert!(made.success(), "cc: {made}");
        (folder, program)
    });
    Command::new(program).stdin(file.try_clone().unwrap()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Returns whether a test must be skipped, and reports the skip.
pub fn is_missing(test: &str) -> bool {
    let file = rustix::fs::memfd_create("hold", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut child = spawn(&file);
    let held = child.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).is_ok();
    let _ = child.kill();
    let _ = child.wait();
    if !held {
        let _ =
            writeln!(std::io::stderr(), "SKIP {test} (needs root): only root may keep the kernel waiting for a page");
    }
    !held
}
