// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that die while numbered lines flow, and a program in the other domain that outlives all of them.
//!
//! After each call that returned, the sender notes how many bytes it has published: the noted bytes must arrive,
//! whatever happens to the sender. `/agent flow` is one sender. `/agent reap` starts one program after the other and
//! kills each at another moment, and `/agent outlive` is the other endpoint of all of them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use tombolo::{Ending, Options, Stream};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::until;

/// Bytes of a write; a line more may follow.
const CHUNK: usize = 4 << 10;
const WAIT: Duration = Duration::from_secs(60);

/// Lines with the numbers from 1 on.
#[derive(Default)]
struct NumberedLines(u64);

impl NumberedLines {
    /// Returns the next lines.
    fn chunk(&mut self) -> Vec<u8> {
        let mut text = Vec::with_capacity(CHUNK + 24);
        while text.len() < CHUNK {
            self.0 += 1;
            text.extend_from_slice(format!("{}\n", self.0).as_bytes());
        }
        text
    }
}

/// A file in which a program notes its progress.
struct Note(File);

impl Note {
    fn new(path: &str) -> Result<Self> {
        File::create(path).context(path).map(Self)
    }

    fn write_note(&self, bytes: u64) -> Result<()> {
        Ok(self.0.write_all_at(format!("{bytes:020}\n").as_bytes(), 0)?)
    }

    fn read(path: &str) -> Option<u64> {
        fs::read_to_string(path).ok()?.trim().parse().ok()
    }
}

fn connect(address: &str) -> Result<Stream> {
    tombolo::connect_with(address, &Options::new().wait_for_listener(WAIT)).context(address)
}

/// Sends until that fails, and then returns the reason.
fn pour(mut stream: Stream, mut published: impl FnMut(u64) -> Result<()>) -> Result<Error> {
    let (mut lines, mut sent) = (NumberedLines::default(), 0);
    loop {
        let text = lines.chunk();
        if let Err(why) = stream.write_all(&text) {
            return Ok(Error::new(format!("sending stopped after {sent} bytes: {why}")));
        }
        sent += text.len() as u64;
        published(sent)?;
    }
}

/// Receives until the end, checks each byte, and passes the number of bytes so far to `received`. Returns the reason of
/// the end.
fn drain(mut stream: Stream, mut received: impl FnMut(u64) -> Result<()>) -> Result<Error> {
    let (half, _) = stream.split();
    let (mut lines, mut expected, mut all) = (NumberedLines::default(), Vec::new(), 0);
    let mut bytes = vec![0; 16 * CHUNK];
    loop {
        let read = half.read(&mut bytes)?;
        if read == 0 {
            let how = half.ending();
            ensure!(how != Some(Ending::Closed), "a sender that was killed closed in good order");
            return Ok(Error::new(format!("the end after {all} bytes: {how:?}")));
        }
        while expected.len() < read {
            expected.extend(lines.chunk());
        }
        ensure!(bytes[..read] == expected[..read], "other bytes than were sent, after {all}");
        expected.drain(..read);
        all += read as u64;
        received(all)?;
    }
}

/// `flow ADDRESS NOTE`: sends as long as the peer receives.
pub fn send(address: &str, note: &str) -> Result<()> {
    let note = Note::new(note)?;
    Err(pour(connect(address)?, |bytes| note.write_note(bytes))?)
}

/// `sip ADDRESS NOTE`: receives what the peer sends.
pub fn receive_flow(address: &str, note: &str) -> Result<()> {
    let note = Note::new(note)?;
    Err(drain(connect(address)?, |bytes| note.write_note(bytes))?)
}

/// `reap ROLE ADDRESS COUNT`: COUNT times, starts a program, kills it once bytes flow and some more time has passed,
/// and prints what the program noted.
pub fn reap(role: &str, address: &str, count: &str) -> Result<()> {
    let note = "/tmp/reaped";
    for round in 0..count.parse()? {
        _ = fs::remove_file(note);
        let mut child = Command::new("/proc/self/exe").args([role, address, note]).spawn()?;
        let mut ended = None;
        let flows = until(Instant::now() + WAIT, || {
            ended = child.try_wait().ok().flatten();
            ended.is_some() || Note::read(note).is_some()
        });
        ensure!(ended.is_none(), "{role} ended before it was killed: {ended:?}");
        thread::park_timeout(pause_of(round));
        child.kill()?;
        child.wait()?;
        flows.context("nothing flows")?;
        println!("{}", Note::read(note).unwrap_or_default());
    }
    Ok(())
}

/// `outlive ROLE ADDRESS COUNT`: is the other endpoint of COUNT programs. Prints the bytes, and for how many
/// microseconds nothing more had come, or been sent, when it learned of the end.
pub fn outlive(role: &str, address: &str, count: &str) -> Result<()> {
    let mut listener = tombolo::listen(address)?;
    for _ in 0..count.parse()? {
        let stream = listener.accept()?;
        let (mut bytes, mut last) = (0, Instant::now());
        let see = |now| {
            (bytes, last) = (now, Instant::now());
            Ok(())
        };
        let _why = if role == "flow" { drain(stream, see)? } else { pour(stream, see)? };
        println!("{bytes} {}", last.elapsed().as_micros());
    }
    Ok(())
}

/// Returns a pseudo-random pause, the same in each run.
pub fn pause_of(round: u32) -> Duration {
    let mixed = (round + 1).wrapping_mul(2_654_435_761) >> 16;
    Duration::from_millis(u64::from(mixed % 700))
}
