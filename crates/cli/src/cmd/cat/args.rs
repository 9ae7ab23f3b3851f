// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options of `tombolo cat`.

use std::{path::PathBuf, time::Duration};

use tombolo::Address;
use tombolo_bench::size;

use crate::progress::When;

/// Time that a connecting side waits for the listening one, unless told otherwise.
pub const CONNECT_WAIT: Duration = Duration::from_secs(10);
/// Least time that a listener has to answer, however short the wait for a listener is.
pub const HANDSHAKE_LEAST: Duration = Duration::from_secs(1);

/// Join standard input and output to a channel, both ways at once
///
/// What standard input (or FILE) says goes to the peer, what the peer says goes to standard output, until both have
/// come to their end. The end of standard input ends that direction only. If standard input is a terminal, the end of
/// what the peer had to say ends both.
///
/// Exit codes: 0 if all went well. 1 if the peer gave up or died in the middle, nobody was there, or a file could not
/// be read or written to its end. 2 if the options make no sense or something cannot be opened.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub place: Place,
    /// Send this file instead of standard input (which is "-")
    #[arg(value_name = "FILE", conflicts_with = "receive_only")]
    pub file: Option<PathBuf>,
    /// Write what is received to this file instead of standard output (which is "-")
    #[arg(short, long, value_name = "FILE", conflicts_with = "send_only")]
    pub output: Option<PathBuf>,
    /// Only send; a peer that sends as well is told that nobody reads it
    #[arg(long, conflicts_with = "receive_only")]
    pub send_only: bool,
    /// Only receive; standard input is left alone
    #[arg(long)]
    pub receive_only: bool,
    /// Listen for one peer after another, until interrupted
    #[arg(short, long, conflicts_with = "connect")]
    pub keep: bool,
    /// Seconds to wait for the other side to come [default: 10 when connecting, for ever when listening]
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub wait: Option<Duration>,
    /// Give up when nothing has moved in either direction for so many seconds [default: never]
    #[arg(short, long, value_name = "SECONDS", value_parser = some_seconds)]
    pub timeout: Option<Duration>,
    /// Bytes of the ring this side writes into, 4KiB to 1GiB, rounded up to a power of two; or "auto": 8KiB that follow
    /// the load [default: 1MiB, less where memory to share is scarce; while busy more, unless slower]
    #[arg(long, value_name = "SIZE", value_parser = ring_or_auto)]
    pub ring: Option<Ring>,
    /// Largest ring of the peer that this side maps, 4KiB to 1GiB [default: 16MiB of one who connects, or four times
    /// --ring]
    #[arg(long, value_name = "SIZE", value_parser = ring)]
    pub peer_ring: Option<u64>,
    /// Microseconds to spin, at most, before sleeping while the peer is busy; 0 never spins [default: what a wake-up
    /// costs, 50 or so]
    #[arg(long, value_name = "US", value_parser = micros)]
    pub spin: Option<Duration>,
    /// Say the SHA-256 of what was sent and of what was received, on standard error
    #[arg(short, long)]
    pub checksum: bool,
    /// When to show how far it has come, on standard error
    #[arg(long, value_name = "WHEN", default_value = "auto", default_missing_value = "always", num_args = 0..=1, require_equals = true)]
    pub progress: When,
    /// Report as lines of JSON, one for each direction, on standard error
    #[arg(long)]
    pub json: bool,
    /// End when the process of this number, which started this one, ends
    #[arg(long, value_name = "PID", hide = true)]
    pub parent: Option<u32>,
}

/// Size of the ring that this side writes into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ring {
    /// A fixed number of bytes.
    Bytes(u64),
    /// As large as the load asks for.
    Auto,
}

/// Where the two sides meet.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct Place {
    /// Wait for a peer at this address: local:NAME or local:/path/to/socket
    #[arg(short, long, value_name = "ADDRESS")]
    pub listen: Option<Address>,
    /// Connect to whoever listens at this address
    #[arg(short = 'C', long, value_name = "ADDRESS")]
    pub connect: Option<Address>,
}

impl Place {
    /// Returns how many endpoints of the channel use the CPUs of this machine.
    pub fn ends_here(&self) -> usize {
        let one_kernel = |address: &Address| address.scheme() == "local";
        if self.listen.iter().chain(&self.connect).any(one_kernel) { 2 } else { 1 }
    }
}

pub fn seconds(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a number of seconds such as 10 or 0.5");
    let seconds: f64 = text.parse().map_err(|_| bad())?;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| time.as_secs() < 1 << 30).ok_or_else(bad)
}

fn some_seconds(text: &str) -> Result<Duration, String> {
    seconds(text).and_then(|time| if time.is_zero() { Err("it has to be more than 0".into()) } else { Ok(time) })
}

fn micros(text: &str) -> Result<Duration, String> {
    let number: u32 = text.parse().map_err(|_| format!("{text:?} is not a number of microseconds"))?;
    Ok(Duration::from_micros(number.into()))
}

fn ring_or_auto(text: &str) -> Result<Ring, String> {
    if text == "auto" { Ok(Ring::Auto) } else { ring(text).map(Ring::Bytes) }
}

pub fn ring(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        bytes @ 0x1000..=0x4000_0000 => Ok(bytes as u64),
        _ => Err("a ring has 4KiB to 1GiB".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_in_bounds_are_taken_and_others_refused() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(ring("4KiB"), Ok(4096));
        assert_eq!((ring_or_auto("auto"), ring_or_auto("4KiB")), (Ok(Ring::Auto), Ok(Ring::Bytes(4096))));
        assert!(ring_or_auto("automatic").is_err());
        assert_eq!(micros("0"), Ok(Duration::ZERO));
        for bad in ["", "-1", "x", "nan", "inf", "1e300"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
        assert!(some_seconds("0").is_err() && ring("4095").is_err() && ring("2GiB").is_err() && micros("1.5").is_err());
    }
}
