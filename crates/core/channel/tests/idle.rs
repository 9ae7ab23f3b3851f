// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cost of many idle channels, with both endpoints and both directions, after each direction was busy (ADR 0055).
//! The test is alone in its program because it counts the memory of whole processes; the long form has 10,000 channels
//! at once.

mod common;

use std::{
    collections::HashSet,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::MetadataExt,
    process::{Child, Command, Stdio},
    time::Duration,
};

use common::{World, eventually};
use tombolo_channel::{Options, RingBudget, RingReason, Stream};

/// Largest number of bytes that one idle channel may hold.
const MOST: u64 = 48 << 10;
/// Environment variable that makes this program a child, and gives its number of channels.
const CHANNELS: &str = "TOMBOLO_TEST_IDLE_CHANNELS";

#[test]
fn idle_channels_hold_at_most_48_kib_each_for_both_directions() {
    if let Ok(channels) = std::env::var(CHANNELS) {
        hold(channels.parse().unwrap());
        return;
    }
    let long = std::env::var_os("TOMBOLO_LONG").is_some();
    let (children, channels) = if long { (100, 100) } else { (2, 100) };
    let mut holders: Vec<Holder> = (0..children).map(|_| Holder::start(channels)).collect();
    // All of them at once: no child ends before all have reported.
    let (mut fresh, mut idle) = (0, 0);
    for holder in &mut holders {
        fresh += holder.told("fresh ");
        idle += holder.told("idle ");
    }
    let all = children * channels;
    println!(
        "{all} channels: {} KiB each when new, {} once each direction was busy",
        kib(fresh / all),
        kib(idle / all)
    );
    assert!(idle / all <= MOST, "{} bytes each", idle / all);
    assert!(fresh / all >= 24 << 10, "the four control pages and rings are not counted: {}", fresh / all);
}

fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}

/// A process with both endpoints of many channels.
struct Holder {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Holder {
    fn start(channels: u64) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "idle_channels_hold_at_most_48_kib_each_for_both_directions", "--nocapture"]);
        let mut child =
            command.env(CHANNELS, channels.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Returns the number in the next line that contains `what`.
    fn told(&mut self, what: &str) -> u64 {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it ended before it told {what}");
            // The harness may have begun the line.
            if let Some((_, number)) = line.trim_end().split_once(what) {
                return number.parse().unwrap();
            }
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Makes channels, prints what they cost when new, and once all were busy and became idle, and holds them.
fn hold(channels: u64) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, most).unwrap();
    let world = World::local();
    let budget = RingBudget::unwatched(1 << 30);
    let idle_time = Duration::from_millis(20);
    let options = Options::new().ring_size(64 << 10).ring_growth(&budget).ring_idle_time(idle_time);
    let mut buffers = [vec![7; 64 << 10], vec![0; 64 << 10]];
    // Costs that the first channel of a process causes once are not counted.
    let mut warm = world.pair_with::<Stream>(&options);
    use_both_ways(&mut warm, &mut buffers);
    let before = memory();
    let mut all: Vec<_> = (0..channels).map(|_| world.pair_with::<Stream>(&options)).collect();
    println!("\nfresh {}", memory() - before);
    for pair in &mut all {
        use_both_ways(pair, &mut buffers);
    }
    assert_eq!(budget.used(), 0);
    println!("\nidle {}", memory() - before);
    let _ = std::io::stdin().read(&mut [0]);
    drop(all);
}

fn use_both_ways((a, b): &mut (Stream, Stream), buffers: &mut [Vec<u8>; 2]) {
    let [piece, buffer] = buffers;
    let mut one_way = |from: &mut Stream, to: &mut Stream| {
        let reason = |stream: &Stream| stream.statistics().sent.ring_growth.unwrap().reason;
        eventually("the ring grows", || {
            while from.split().1.try_write(piece).unwrap().is_some() {}
            while to.split().0.try_read(buffer).unwrap().is_some() {}
            reason(from) == RingReason::Bulk
        });
        eventually("the ring shrinks", || {
            from.split().1.follow_load().unwrap();
            assert_eq!(to.split().0.try_read(buffer).unwrap(), None);
            reason(from) == RingReason::Idle
        });
        // The reader releases the last ring at its next read.
        from.write_all(b"x").unwrap();
        to.read_exact(&mut buffer[..1]).unwrap();
        assert_eq!(to.split().0.try_read(buffer).unwrap(), None);
    };
    one_way(a, b);
    one_way(b, a);
}

/// Returns the bytes of this process's own memory, and of all memory that it shares, each piece once, mapped or not.
fn memory() -> u64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let anonymous = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    let anonymous: u64 = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
    let mut seen = HashSet::new();
    let shared = |fd: fs::DirEntry| {
        let target = fs::read_link(fd.path()).ok()?;
        let file = fs::metadata(fd.path()).ok()?;
        (target.to_string_lossy().starts_with("/memfd:") && seen.insert(file.ino())).then(|| file.blocks() * 512)
    };
    let shared: u64 = fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(shared).sum();
    anonymous * 1024 + shared
}
