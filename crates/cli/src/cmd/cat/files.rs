// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opens the source of the bytes to send, and the target of those received.

use std::{
    fs::{File, OpenOptions},
    io::{self, IsTerminal, Read, Seek, Write},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::failure::{Failure, Result};

/// Source of the bytes to send. Not buffered: they are read straight into the ring.
#[derive(Debug)]
pub struct Input {
    file: File,
    name: String,
    /// Bytes left in it, if it is a regular file, whose reads never wait.
    pub size: Option<u64>,
    pub terminal: bool,
}

impl Input {
    /// Opens `path`, or standard input; an empty source if nothing will be read.
    pub fn open(path: Option<&Path>, unused: bool) -> Result<Self> {
        let (opened, name) = match path.filter(|path| *path != Path::new("-")) {
            Some(path) => (File::open(path), path.display().to_string()),
            None if unused => (File::open("/dev/null"), "/dev/null".into()),
            None => (io::stdin().as_fd().try_clone_to_owned().map(File::from), "standard input".into()),
        };
        let fail = |source| Failure::Open { file: name.clone(), source };
        let mut file = opened.map_err(fail)?;
        let about = file.metadata().map_err(fail)?;
        if about.is_dir() {
            return Err(fail(io::ErrorKind::IsADirectory.into()));
        }
        let position = if about.is_file() { file.stream_position().ok() } else { None };
        let size = position.map(|position| about.len().saturating_sub(position));
        Ok(Self { terminal: file.is_terminal(), file, name, size })
    }

    /// Reads what is there; `None` if nothing is there after all.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        match self.file.read(buffer) {
            Ok(len) => Ok(Some(len)),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => Ok(None),
            Err(source) => Err(Failure::Read { file: self.name.clone(), source }),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Target of received bytes. Not buffered.
#[derive(Debug)]
pub struct Output {
    file: File,
    name: String,
    /// Whether it was named on the command line.
    named: bool,
}

impl Output {
    /// Opens `path`, or standard output. The file's content stays until a peer is there and [`begin`](Self::begin) is
    /// called.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let named = path.filter(|path| *path != Path::new("-"));
        let (opened, name) = match named {
            Some(path) => {
                let mut options = OpenOptions::new();
                options.write(true).create(true).truncate(false);
                (options.open(path), path.display().to_string())
            }
            None => (io::stdout().as_fd().try_clone_to_owned().map(File::from), "standard output".into()),
        };
        let file = opened.map_err(|source| Failure::Open { file: name.clone(), source })?;
        Ok(Self { file, name, named: named.is_some() })
    }

    /// Empties the file.
    pub fn begin(&self) -> Result<()> {
        let regular = self.named && self.file.metadata().is_ok_and(|about| about.is_file());
        let emptied = if regular { self.file.set_len(0) } else { Ok(()) };
        emptied.map_err(|source| self.failure(source))
    }

    pub fn is_terminal(&self) -> bool {
        self.file.is_terminal()
    }

    /// Writes all of `bytes`. Returns whether the reader of the output wants more.
    pub fn write(&self, mut bytes: &[u8]) -> Result<bool> {
        while !bytes.is_empty() {
            match (&self.file).write(bytes) {
                Ok(0) => return Err(self.failure(io::ErrorKind::WriteZero.into())),
                Ok(len) => bytes = &bytes[len..],
                Err(error) => match error.kind() {
                    io::ErrorKind::BrokenPipe => return Ok(false),
                    io::ErrorKind::Interrupted => {}
                    // Another process has made this terminal or pipe non-blocking.
                    io::ErrorKind::WouldBlock => drop(poll(&mut [PollFd::new(&self.file, PollFlags::OUT)], None)),
                    _ => return Err(self.failure(error)),
                },
            }
        }
        Ok(true)
    }

    fn failure(&self, source: io::Error) -> Failure {
        Failure::Write { file: self.name.clone(), source }
    }
}
