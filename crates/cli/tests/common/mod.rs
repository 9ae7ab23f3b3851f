// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program under test, in a folder of its own.
#![allow(dead_code, reason = "each test program uses its part of this")]

pub mod broker;

use std::{
    fs,
    io::{Read, Write},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(30);

/// A folder with an address in it.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn address(&self) -> String {
        format!("local:{}", self.path("socket").display())
    }

    /// A file of `len` bytes without a pattern.
    pub fn file(&self, name: &str, len: usize) -> (PathBuf, Vec<u8>) {
        let bytes = noise(len);
        let path = self.path(name);
        fs::write(&path, &bytes).unwrap();
        (path, bytes)
    }

    pub fn socket_is_there(&self) -> bool {
        self.path("socket").exists()
    }

    /// Starts `tombolo cat --listen`, and returns once it listens.
    pub fn listen(&self, options: &str) -> Running {
        let running = self.cat("--listen", options);
        wait_until("the listener is there", || self.socket_is_there());
        running
    }

    pub fn connect(&self, options: &str) -> Running {
        self.cat("--connect", options)
    }

    pub fn cat(&self, place: &str, options: &str) -> Running {
        let mut words = vec!["cat".to_owned(), place.to_owned(), self.address()];
        words.extend(options.split_whitespace().map(String::from));
        Running::start(&words, |_| {})
    }
}

/// Bytes without a pattern.
pub fn noise(len: usize) -> Vec<u8> {
    let mut state = len as u64 | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(len).collect()
}

/// Polls until a condition holds.
pub fn wait_until(what: &str, mut there: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !there() {
        assert!(Instant::now() < deadline, "{what}: not within {LIMIT:?}");
        thread::yield_now();
    }
}

/// The program, with pipes to all three of its streams. It is killed when dropped.
pub struct Running {
    pub child: Child,
    gathered: Option<[JoinHandle<Vec<u8>>; 2]>,
}

impl Running {
    pub fn start<S: AsRef<str>>(words: &[S], change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(words.iter().map(AsRef::as_ref));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        change(&mut command);
        Self { child: command.spawn().unwrap(), gathered: None }
    }

    /// Writes to its standard input from another thread, then closes it.
    pub fn feed(mut self, bytes: Vec<u8>) -> Self {
        let mut input = self.child.stdin.take().unwrap();
        // The program may close its input early.
        thread::spawn(move || drop(input.write_all(&bytes)));
        self
    }

    /// Closes its standard input.
    pub fn hush(mut self) -> Self {
        drop(self.child.stdin.take());
        self
    }

    /// Reads the program's output on a thread from now on, so that a full pipe never stops it.
    pub fn heard(mut self) -> Self {
        let gather = |pipe: Option<Box<dyn Read + Send>>| {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                pipe.map(|mut pipe| pipe.read_to_end(&mut bytes).unwrap());
                bytes
            })
        };
        if self.gathered.is_none() {
            let out = self.child.stdout.take().map(|pipe| Box::new(pipe) as _);
            let err = self.child.stderr.take().map(|pipe| Box::new(pipe) as _);
            self.gathered = Some([gather(out), gather(err)]);
        }
        self
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Closes its standard input and waits for its end.
    pub fn end(self) -> Ended {
        self.hush().end_with_open_input()
    }

    /// Waits for the program's end, with its standard input left open if it was.
    pub fn end_with_open_input(self) -> Ended {
        let mut running = self.heard();
        let mut status = None;
        wait_until("the program ends", || {
            status = running.child.try_wait().unwrap();
            status.is_some()
        });
        let [out, said] = running.gathered.take().unwrap().map(|thread| thread.join().unwrap());
        Ended { status: status.unwrap(), out, said: String::from_utf8(said).unwrap() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Result of a program that has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub out: Vec<u8>,
    pub said: String,
}

impl Ended {
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.status.code(), Some(code), "{}", self.said);
        self
    }

    /// Asserts that the program failed, with one line that has all of these words.
    #[track_caller]
    pub fn expect_failure(self, code: i32, words: &[&str]) -> Self {
        let ended = self.expect(code);
        let lines: Vec<_> = ended.said.lines().filter(|line| line.starts_with("tombolo: ")).collect();
        assert!(lines.len() == 1 && words.iter().all(|word| lines[0].contains(word)), "{words:?}: {}", ended.said);
        ended
    }
}
