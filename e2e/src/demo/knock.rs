// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long it takes to agree on a channel over a link that is there.

use super::goals::{Goal, Goals};
use super::word;
use crate::site::{Site, start};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use tombolo::{Options, Stream};
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::lines::within;

const TIMES: &str = "200";
/// In milliseconds.
const GOAL: Goal = Goal::Most(2.0);
/// The smallest rings there are, and those that one gets who asks for none.
const RINGS: [(&str, &str); 2] = [("4096", "rings of 4 KiB"), ("1048576", "rings of 1 MiB")];

/// Prints the medians of some set-ups from a to b.
pub fn show(site: &mut Site, goals: &mut Goals) -> Result<()> {
    for (ring, named) in RINGS {
        let listener = start(&mut site.b, "knock::open", &["vm:b/door", TIMES, ring])?;
        word(&mut site.b, listener, "listening")?;
        let knocker = start(&mut site.a, "knock::knock", &["vm:b/door", TIMES, ring])?;
        let median = word(&mut site.a, knocker, "median")?;
        site.a.wait(knocker, within(60))?.success()?;
        site.b.wait(listener, within(60))?.success()?;
        let what = format!("channel set-up over a link that is there, {named}, ms");
        let goal = goals.beside(&what, median.parse()?, Some(GOAL));
        println!("{what}, {TIMES} times: median {median} ({goal})");
    }
    println!();
    Ok(())
}

fn arguments(args: &[String]) -> Result<(&str, usize, Options)> {
    let [address, times, ring] = args else { return Err(Error::new("an address and two numbers are needed")) };
    Ok((address, times.parse()?, Options::new().ring_size(ring.parse()?)))
}

/// Connects again and again, each time with a byte there and back, and prints the median of the connecting.
pub fn knock(args: &[String]) -> Result<()> {
    let (address, count, options) = arguments(args)?;
    let options = options.wait_for_listener(Duration::from_secs(60));
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
    let (address, count, options) = arguments(args)?;
    let mut listener = tombolo::listen_with::<Stream>(address, &options)?;
    println!("listening");
    for _ in 0..count {
        let mut stream = listener.accept()?;
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        stream.write_all(&byte)?;
    }
    Ok(())
}
