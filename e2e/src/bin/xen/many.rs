// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many channels between two domUs at once, from one program to another: measures how fast they open and close, and
//! checks that all of them work together.

use crate::rig::Pair;
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use tombolo::{Options, Stream};
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::line_reader::within;

/// Ring size of a channel where many are needed.
const RING: u64 = 16 << 10;
/// Time that one channel may need on a loaded machine.
const WAIT: Duration = Duration::from_secs(60);
/// Seconds for all channels.
const ALL: u64 = 600;

/// Opens `count` channels from A to B. Returns A's output.
pub fn show(pair: &mut Pair, count: usize) -> Result<String> {
    pair.grant_more()?;
    let [a, b] = ["A", "B"].map(|name| pair.number(name));
    let agent = "ulimit -n 65536; exec /agent";
    let listener = pair.start("B", &format!("{agent} hold xen:{a}/many {count}"))?;
    let caller = pair.start("A", &format!("{agent} open xen:{b}/many {count}"))?;
    let said = pair.at("A")?.wait(caller, within(ALL))?.success().context("who opens them")?;
    pair.at("B")?.wait(listener, within(ALL))?.success().context("who holds them")?;
    Ok(said)
}

fn options() -> Options {
    Options::new().ring_size(RING).wait_for_listener(WAIT).handshake_timeout(WAIT)
}

/// Runs A's half.
pub fn open(address: &str, count: &str) -> Result<()> {
    let count: u16 = count.parse()?;
    let start = Instant::now();
    let streams: tombolo::Result<Vec<Stream>> =
        (0..count).map(|_| tombolo::connect_with(address, &options())).collect();
    let (mut streams, opened) = (streams?, start.elapsed());
    for (stream, number) in streams.iter_mut().zip(0..count) {
        stream.write_all(&number.to_le_bytes())?;
    }
    for (stream, number) in streams.iter_mut().zip(0..count) {
        let mut echo = [0; 2];
        stream.read_exact(&mut echo)?;
        tombolo_e2e::ensure!(echo == number.to_le_bytes(), "channel {number} says {echo:?}");
    }
    let start = Instant::now();
    drop(streams);
    let rate = f64::from(count) / opened.as_secs_f64();
    let closed = start.elapsed();
    println!(
        "{count} channels, rings of {RING} bytes: {rate:.1} opened a second, all in use at once, closed in {closed:.1?}"
    );
    Ok(())
}

/// Runs B's half.
pub fn hold(address: &str, count: &str) -> Result<()> {
    let mut listener = tombolo::listen_with::<Stream>(address, &options())?;
    let mut streams = (0..count.parse()?).map(|_| listener.accept()).collect::<tombolo::Result<Vec<Stream>>>()?;
    for stream in &mut streams {
        let mut number = [0; 2];
        stream.read_exact(&mut number)?;
        stream.write_all(&number)?;
    }
    // A closes the channels.
    for mut stream in streams {
        let _end = stream.read(&mut [0; 1])?;
    }
    Ok(())
}
