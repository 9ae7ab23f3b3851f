// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A stream of bytes over TCP that is checked, for programs under `tombolo run`, and the counts of such programs.

use crate::ensure;
use crate::error::{Context, Error, Result};
use crate::line_reader::within;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Pseudo-random bytes, the same each time.
struct Stream(u64);

impl Stream {
    fn fill(&mut self, room: &mut [u8]) {
        for chunk in room.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            chunk.copy_from_slice(&self.0.to_le_bytes()[..chunk.len()]);
        }
    }
}

const SEED: u64 = 88_172_645_463_325_252;
const CHUNK: usize = 32 << 10;

/// Pause between two chunks while little is sent.
const REST: Duration = Duration::from_millis(50);
/// Seconds within which the two ends must find each other.
const FOUND: u64 = 90;

/// Sends little until the log of `tombolo run`, if one is given, reports that the connection is joined. Then it sends
/// all it can for so many milliseconds, or with 0 until a file exists that is named like the log plus `.over`. At last
/// it reads how many bytes came.
///
/// # Errors
/// The connection breaks, or other bytes came than were sent, or it is not joined.
pub fn send(args: &[String]) -> Result<()> {
    let (address, millis, log) = match args {
        [address, millis] => (address, millis, None),
        [address, millis, log] => (address, millis, Some(log)),
        _ => return Err(Error::new("ADDRESS MILLISECONDS [LOG]")),
    };
    let fast = Duration::from_millis(millis.parse()?);
    let mut stream = TcpStream::connect((address.as_str(), 9))?;
    stream.set_write_timeout(Some(Duration::from_secs(60)))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let (mut bytes, mut sent, mut room) = (Stream(SEED), 0_u64, vec![0; CHUNK]);
    let mut send = |stream: &mut TcpStream| {
        bytes.fill(&mut room);
        sent += CHUNK as u64;
        stream.write_all(&room)
    };
    if let Some(log) = log {
        let deadline = within(FOUND);
        while !fs::read_to_string(log).is_ok_and(|text| text.contains("joined")) {
            ensure!(Instant::now() < deadline, "it was not joined within {FOUND} s");
            send(&mut stream)?;
            thread::park_timeout(REST);
        }
    }
    let (until, over) = (Instant::now() + fast, log.map(|log| format!("{log}.over")));
    while if fast.is_zero() { !over.as_ref().is_some_and(|it| Path::new(it).exists()) } else { Instant::now() < until }
    {
        send(&mut stream)?;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut came = [0; 8];
    stream.read_exact(&mut came)?;
    ensure!(u64::from_le_bytes(came) == sent, "{} of {sent} bytes came", u64::from_le_bytes(came));
    println!("sent {sent}");
    Ok(())
}

/// Receives one stream, checks it, and sends back the number of its bytes.
///
/// # Errors
/// The connection breaks, or wrong bytes come.
pub fn receive() -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", 9))?;
    println!("listens");
    let mut stream = listener.accept()?.0;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let (mut bytes, mut came, mut wanted, mut room) = (Stream(SEED), 0_u64, vec![0; CHUNK], vec![0; CHUNK]);
    loop {
        let mut filled = 0;
        while filled < CHUNK {
            match stream.read(&mut room[filled..])? {
                0 => break,
                n => filled += n,
            }
        }
        came += filled as u64;
        if filled < CHUNK {
            break;
        }
        bytes.fill(&mut wanted);
        ensure!(room == wanted, "other bytes came, up to {came}");
    }
    Ok(stream.write_all(&came.to_le_bytes())?)
}

/// Returns the bytes over TCP and through memory in reports of `tombolo run --report`, one on each line.
///
/// # Errors
/// A line is not a report.
pub fn sum_reports(reports: &str) -> Result<[u64; 2]> {
    let mut all = [0; 2];
    for report in reports.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let report: Value = serde_json::from_str(report).context(report)?;
        let count = |key: &str| report[key].as_u64().unwrap_or_default();
        all[0] += count("sent_tcp") + count("received_tcp");
        all[1] += count("sent_shared") + count("received_shared");
    }
    Ok(all)
}
