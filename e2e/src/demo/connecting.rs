// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures how long the set-up of a channel takes over an existing link.

use super::goals::{Goal, Goals};
use super::word;
use crate::site::{Site, start};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use tombolo::{Options, Stream};
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::guest::pass;
use tombolo_e2e::line_reader::within;

const TIMES: &str = "200";
/// Goal in milliseconds.
const GOAL: Goal = Goal::Most(2.0);
/// Bytes of a ring, milliseconds of rest before each time, and a description. The rings are the smallest ones; those
/// that a program gets if it asks for none; and these without a rest, while both sides still clean up the previous
/// channel.
const SERIES: [(&str, &str, &str); 3] = [
    ("4096", "20", "rings of 4 KiB"),
    ("1048576", "20", "rings of 1 MiB"),
    ("1048576", "0", "rings of 1 MiB, without a rest in between"),
];

/// Prints the medians of some set-ups from a to b.
pub fn show(site: &mut Site, goals: &mut Goals) -> Result<()> {
    for (ring, rest, named) in SERIES {
        let listener = start(&mut site.b, "connecting::open", &["vm:b/door", TIMES, ring, rest])?;
        word(&mut site.b, listener, "listening")?;
        let client = start(&mut site.a, "connecting::connect", &["vm:b/door", TIMES, ring, rest])?;
        let median = word(&mut site.a, client, "median")?;
        site.a.wait(client, within(60))?.success()?;
        site.b.wait(listener, within(60))?.success()?;
        let what = format!("channel set-up over a link that is there, {named}, ms");
        let goal = goals.beside(&what, median.parse()?, Some(GOAL));
        println!("{what}, {TIMES} times: median {median} ({goal})");
    }
    println!();
    Ok(())
}

struct Connects<'a> {
    address: &'a str,
    count: usize,
    options: Options,
    rest: Duration,
}

impl<'a> Connects<'a> {
    fn of(args: &'a [String]) -> Result<Self> {
        let [address, count, ring, rest] = args else {
            return Err(Error::new("an address and three numbers are needed"));
        };
        let (options, rest) = (Options::new().ring_size(ring.parse()?), Duration::from_millis(rest.parse()?));
        Ok(Self { address, count: count.parse()?, options, rest })
    }
}

/// Connects again and again, each time with a byte there and back, and prints the median time to connect.
pub fn connect(args: &[String]) -> Result<()> {
    let Connects { address, count, options, rest } = Connects::of(args)?;
    let options = options.wait_for_listener(Duration::from_secs(60));
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        pass(rest);
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

/// Answers one byte on each of `count` connections.
pub fn open(args: &[String]) -> Result<()> {
    let Connects { address, count, options, .. } = Connects::of(args)?;
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
