// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A memory control group that shrinks under load (ADR 0065): rings are given up, nothing is lost, no process is
//! killed, and the rings grow once there is memory again. The test needs root, and a control group to make groups in;
//! otherwise it reports that it was skipped.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use common::{World, noise};
use tombolo_channel::{Options, RingBudget, RingReason, Stream};

const MIB: u64 = 1 << 20;
/// Limit of the group at first.
const AMPLE: u64 = 512 * MIB;
/// Bytes of memory that the program has besides its rings.
const BALLAST: usize = 128 << 20;
const RING: u64 = MIB;
/// Environment variable that names the child's control group.
const GROUP: &str = "TOMBOLO_TEST_GROUP";
/// The program has to notice, look twice and wait until others are idle, which takes longer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn group_that_shrinks_under_load_takes_rings_and_loses_nothing() {
    if let Some(group) = std::env::var_os(GROUP) {
        load(Path::new(&group));
        return;
    }
    let Some(group) = Group::make() else {
        let name = "group_that_shrinks_under_load_takes_rings_and_loses_nothing";
        let skip = format!("SKIP {name} (needs memory-cgroup): none can be made here\n");
        std::io::stderr().write_all(skip.as_bytes()).unwrap();
        return;
    };
    group.set_limit(AMPLE);
    let mut loaded = Loaded::start(&group);
    loaded.expect("large");
    // So little is left that memory is scarce, but enough for the small rings.
    let used = group.used() - group.droppable();
    group.set_limit(used + used / 128);
    loaded.expect("small");
    assert_eq!(group.kills().unwrap_or_default(), 0, "the kernel killed somebody");
    group.set_limit(AMPLE);
    loaded.expect("large");
    loaded.finish();
}

/// A memory control group of this test, removed at the end.
struct Group {
    path: PathBuf,
    limit: &'static str,
    usage: &'static str,
}

impl Group {
    fn make() -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let below = |mount: &str, path: &str| PathBuf::from(mount).join(path.trim_start_matches('/'));
        let first = own.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|name| name == "memory").then(|| below("/sys/fs/cgroup/memory", path))
        });
        let second = own.lines().find_map(|line| line.strip_prefix("0::")).map(|path| below("/sys/fs/cgroup", path));
        let made = |parent: PathBuf, limit, usage| {
            let path = parent.join(format!("tombolo-test-{}", std::process::id()));
            fs::create_dir(&path).ok()?;
            let group = Self { path, limit, usage };
            // Where the controller is not delegated there are no such files.
            (group.path.join(limit).exists() && group.path.join(usage).exists()).then_some(group)
        };
        first
            .and_then(|parent| made(parent, "memory.limit_in_bytes", "memory.usage_in_bytes"))
            .or_else(|| second.and_then(|parent| made(parent, "memory.max", "memory.current")))
    }

    /// The kernel drops file pages for that, and may need several attempts.
    fn set_limit(&self, bytes: u64) {
        common::eventually("the group gets its limit", || {
            fs::write(self.path.join(self.limit), bytes.to_string()).is_ok()
        });
    }

    /// Returns the bytes of file pages, which the kernel can drop.
    fn droppable(&self) -> u64 {
        let text = fs::read_to_string(self.path.join("memory.stat")).unwrap();
        let of = |name| text.lines().find_map(|line| line.strip_prefix(name)).map_or(0, |n| n.trim().parse().unwrap());
        of("inactive_file ") + of("active_file ")
    }

    fn used(&self) -> u64 {
        fs::read_to_string(self.path.join(self.usage)).unwrap().trim().parse().unwrap()
    }

    /// Returns how many processes the kernel killed in the group, where it counts that.
    fn kills(&self) -> Option<u64> {
        let text = ["memory.oom_control", "memory.events"]
            .iter()
            .find_map(|name| fs::read_to_string(self.path.join(name)).ok())?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that ended may stay in it for a moment.
        let until = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.path).is_err() && Instant::now() < until {
            std::thread::yield_now();
        }
    }
}

/// A process with busy streams in a group.
struct Loaded {
    child: Child,
    _orders: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Loaded {
    fn start(group: &Group) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "group_that_shrinks_under_load_takes_rings_and_loses_nothing", "--nocapture"]);
        command.env(GROUP, &group.path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (orders, lines) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, _orders: orders, lines }
    }

    fn expect(&mut self, what: &str) {
        let mut line = String::new();
        while line.trim_end() != what {
            line.clear();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                panic!("it ended before its rings were {what}: {:?}", self.child.wait());
            }
        }
    }

    fn finish(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the child: its streams are busy all the time, and it reports when all rings are large, small and large again.
fn load(group: &Path) {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let ballast = noise(BALLAST, 3);
    let options = Options::new().ring_size(RING).ring_growth(&RingBudget::new(64 * MIB));
    let worlds: Vec<World> = (0..4).map(|_| World::local()).collect();
    let mut pairs: Vec<Pair> = worlds.iter().map(|world| Pair::new(world.pair_with(&options))).collect();
    let large = |(size, reason)| (size, reason) == (RING, RingReason::Bulk);
    let small = |(size, reason)| size < RING && reason == RingReason::Pressure;
    let data = &ballast[..3 * MIB as usize];
    for (what, holds) in [("large", &large as &dyn Fn(_) -> bool), ("small", &small), ("large", &large)] {
        let until = Instant::now() + PATIENCE;
        while !pairs.iter().all(|pair| holds(pair.ring())) {
            assert!(Instant::now() < until, "never {what}: {:?}", pairs.iter().map(Pair::ring).collect::<Vec<_>>());
            pairs.iter_mut().for_each(|pair| pair.turn(data));
        }
        println!("\n{what}");
        std::io::stdout().flush().unwrap();
    }
}

/// Both endpoints of a stream whose bytes are checked.
struct Pair {
    ends: (Stream, Stream),
    wrote: usize,
    read: usize,
    buffer: Vec<u8>,
}

impl Pair {
    fn new(ends: (Stream, Stream)) -> Self {
        Self { ends, wrote: 0, read: 0, buffer: vec![0; 64 << 10] }
    }

    fn ring(&self) -> (u64, RingReason) {
        let sent = self.ends.0.statistics().sent;
        (sent.ring_size, sent.ring_growth.unwrap().reason)
    }

    fn turn(&mut self, data: &[u8]) {
        let (from, to) = (&mut self.ends.0, &mut self.ends.1);
        while let Some(wrote) = from.split().1.try_write(&data[self.wrote % data.len()..]).unwrap() {
            self.wrote += wrote;
        }
        while let Some(read) = to.split().0.try_read(&mut self.buffer).unwrap() {
            for part in self.buffer[..read].chunks(4096) {
                let at = self.read % data.len();
                let straight = part.len().min(data.len() - at);
                assert!(
                    part[..straight] == data[at..at + straight] && part[straight..] == data[..part.len() - straight]
                );
                self.read += part.len();
            }
        }
        assert_eq!(self.wrote, self.read, "nothing is lost");
    }
}
