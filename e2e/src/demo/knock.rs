// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long it takes to agree on a channel over a link that is there.

use super::word;
use crate::site::{Site, start};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use tombolo::{Options, Stream};
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::lines::within;

const TIMES: &str = "200";

/// Prints the median of some set-ups from a to b.
pub fn show(site: &mut Site) -> Result<()> {
    let listener = start(&mut site.b, "knock::open", &["vm:b/door", TIMES])?;
    word(&mut site.b, listener, "listening")?;
    let knocker = start(&mut site.a, "knock::knock", &["vm:b/door", TIMES])?;
    let median = word(&mut site.a, knocker, "median")?;
    site.a.wait(knocker, within(60))?.success()?;
    site.b.wait(listener, within(60))?.success()?;
    println!("channel set-up over a link that is there, {TIMES} times: median {median} ms\n");
    Ok(())
}

fn arguments(args: &[String]) -> Result<(&str, usize)> {
    let [address, times] = args else { return Err(Error::new("an address and a number are needed")) };
    Ok((address, times.parse()?))
}

/// Connects again and again, each time with a byte there and back, and prints the median of the connecting.
pub fn knock(args: &[String]) -> Result<()> {
    let (address, count) = arguments(args)?;
    let options = Options::new().ring_size(4096).wait_for_listener(Duration::from_secs(60));
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        let mut stream = tombolo::connect_with::<Stream>(address, &options)?;
        times.push(start.elapsed());
        let mut byte = [7];
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
    }
    times.sort();
    println!("median {:.2}", times[count / 2].as_secs_f64() * 1000.0);
    Ok(())
}

/// Answers a byte on so many connections.
pub fn open(args: &[String]) -> Result<()> {
    let (address, count) = arguments(args)?;
    let mut listener = tombolo::listen_with::<Stream>(address, &Options::new().ring_size(4096))?;
    println!("listening");
    for _ in 0..count {
        let mut stream = listener.accept()?;
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
    }
    Ok(())
}
