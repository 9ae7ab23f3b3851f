// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options of `tombolo bench`, and the plan made from them.

use std::path::PathBuf;
use std::sync::Arc;

use clap::ValueEnum;
use clap::builder::ArgPredicate;
use rustix::thread::sched_getaffinity;

use crate::apart::Peer;
use crate::error::{Error, Os, Result};
use crate::job::{Cpu, Rings, Test, Wait};
use crate::size;
use crate::transport::{self, Transport};

/// Options of a benchmark; a list is separated by commas.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchArgs {
    /// What to measure, or "all"
    #[arg(long = "test", value_name = "TEST", value_delimiter = ',', default_value = "throughput,latency")]
    pub tests: Vec<String>,
    /// Transports to measure [default: all]
    #[arg(long = "transport", value_name = "NAME", value_delimiter = ',')]
    pub transports: Vec<String>,
    /// Message sizes, such as 64 or 4KiB [default: depends on the test]
    #[arg(long = "size", value_name = "SIZE", value_delimiter = ',', value_parser = message_size)]
    pub sizes: Vec<usize>,
    /// Messages a second, in the test under load
    #[arg(long = "rate", value_name = "N", value_delimiter = ',', default_value = "10000,100000", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub rates: Vec<u32>,
    /// How the ends wait in round trips
    #[arg(long = "wait", value_delimiter = ',', default_value = "spin,sleep")]
    pub waits: Vec<Wait>,
    /// Microseconds that either end is busy before each ask and answer, so that the other surely sleeps; not counted
    #[arg(long, value_name = "US", default_value = "0", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub think: u32,
    /// Beside each end a thread that only computes wants the same CPU, as other programs do
    #[arg(long, conflicts_with = "fifo")]
    pub neighbour: bool,
    /// Whether the two ends run on two CPUs or share one
    #[arg(long = "cpu", value_delimiter = ',', default_value = "cross")]
    pub cpus: Vec<Cpu>,
    /// Numbers of channels at once, in the test of that name
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,4,16,64", value_parser = channels)]
    pub channels: Vec<usize>,
    /// Seconds of a sample
    #[arg(long, value_name = "S", default_value = "0.2", value_parser = seconds)]
    #[arg(default_value_if("quick", "true", "0.02"), default_value_if("report", ArgPredicate::IsPresent, "0.25"))]
    pub seconds: f64,
    /// Samples of each measurement, of which the median is reported
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u16).range(1..=1000))]
    #[arg(default_value_if("quick", "true", "2"), default_value_if("report", ArgPredicate::IsPresent, "7"))]
    pub runs: u16,
    /// Bytes of a ring, a power of two, and of memcpy's buffers; at least four of the messages that are kept apart in
    /// it. By default 1MiB, and for Tombolo what programs get, which may become more
    #[arg(long, value_name = "SIZE", value_parser = ring_size)]
    pub ring: Option<usize>,
    /// Rings of the size that suits a bulk stream on this machine, by its caches; says which
    #[arg(long, conflicts_with_all = ["ring", "from"])]
    pub ring_by_caches: bool,
    /// Rings of Tombolo's streams begin with 8KiB and follow their load, up to the size of a ring
    #[arg(long, conflicts_with_all = ["from", "serve", "peer"])]
    pub ring_growth: bool,
    /// Bytes that cross in the test of context switches
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = volume)]
    pub volume: usize,
    /// Run the two ends under real-time priority, so that other programs do not disturb them (needs CAP_SYS_NICE)
    #[arg(long)]
    pub fifo: bool,
    /// Also show how many times better each is than this transport
    #[arg(long, value_name = "NAME")]
    pub against: Option<String>,
    /// Print one line of JSON for each measurement instead of tables
    #[arg(long)]
    pub json: bool,
    /// Run the whole suite, some 20 minutes, and write lines of JSON, a text, charts and a page to this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["tests", "sizes", "waits", "think", "neighbour", "cpus", "channels", "rates", "volume", "against", "json"])]
    pub report: Option<PathBuf>,
    /// The report of a short form of the suite, about a minute: for a look, not for conclusions
    #[arg(long, requires = "report")]
    pub quick: bool,
    /// Be the right end for a driver on another machine, and listen for it there; for a network of one's own
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["peer", "report", "json", "transports", "tests"])]
    pub serve: Option<String>,
    /// Measure to the machine that serves there
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["report", "cpus", "fifo", "neighbour"])]
    pub peer: Option<String>,
    /// With --serve or --peer: what stands before the service in Tombolo's addresses on this machine, such as xen:2
    #[arg(long, value_name = "ADDRESS")]
    pub via: Option<String>,
    /// Make the report of these results, recorded with --json or --report, instead of measuring; may be repeated
    #[arg(long, value_name = "FILE", requires = "report", conflicts_with_all = ["quick", "transports", "seconds", "runs", "ring", "fifo"])]
    pub from: Vec<PathBuf>,
}

/// Bytes of a ring by default.
const RING: usize = 1 << 20;

impl Default for BenchArgs {
    /// Returns the meaning of the command line without options.
    fn default() -> Self {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: BenchArgs,
        }
        <Line as clap::Parser>::parse_from(["bench"]).args
    }
}

impl BenchArgs {
    /// Returns how the rings are sized. Between machines there may be less memory to share than the default, so the
    /// size is fixed there.
    fn rings(&self) -> Rings {
        match self.ring {
            _ if self.ring_growth => Rings::Growing,
            None if !self.ring_by_caches && self.peer.is_none() => Rings::Default,
            _ => Rings::Fixed,
        }
    }

    /// Returns the bytes of a ring.
    fn ring(&self) -> usize {
        // Some MiB at most.
        if self.ring_by_caches {
            tombolo::RingChoice::of_this_machine().bytes() as usize
        } else {
            self.ring.unwrap_or(RING)
        }
    }
}

fn within(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match size::parse(text)? {
        n if n < least => Err(format!("the least is {}", size::show(least))),
        n if n > most => Err(format!("the most is {}", size::show(most))),
        n => Ok(n),
    }
}

fn message_size(text: &str) -> Result<usize, String> {
    within(text, 1, 256 << 20)
}

fn ring_size(text: &str) -> Result<usize, String> {
    let size = within(text, 4 << 10, 1 << 30)?;
    if size.is_power_of_two() { Ok(size) } else { Err("a ring is a power of two".into()) }
}

fn volume(text: &str) -> Result<usize, String> {
    within(text, 1, 1 << 40)
}

fn channels(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=1024) => Ok(n),
        _ => Err(format!("{text:?} is not a number of channels from 1 to 1024")),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(s) if (0.001..=3600.0).contains(&s) => Ok(s),
        _ => Err(format!("{text:?} is not a number of seconds from 0.001 to 3600")),
    }
}

/// Plan of measurements.
#[derive(Clone)]
pub struct Plan {
    /// Tests, in order.
    pub tests: Vec<Test>,
    /// Transports, in order.
    pub transports: Vec<Arc<dyn Transport>>,
    /// Message sizes; empty for those that suit the test.
    pub sizes: Vec<usize>,
    /// Ways to wait in round trips.
    pub waits: Vec<Wait>,
    /// Nanoseconds that either endpoint is busy before it asks or answers.
    pub think_ns: u32,
    /// Whether each endpoint shares its CPU with a thread that only computes.
    pub neighbour: bool,
    /// CPUs that the endpoints run on.
    pub cpus: Vec<Cpu>,
    /// Numbers of channels at once.
    pub channels: Vec<usize>,
    /// Messages a second in [`Test::Load`].
    pub rates: Vec<u32>,
    /// Seconds of a sample.
    pub seconds: f64,
    /// Samples of each measurement.
    pub runs: usize,
    /// Bytes of a ring.
    pub ring: usize,
    /// Sizing of Tombolo's rings.
    pub rings: Rings,
    /// Bytes that cross in [`Test::Switches`].
    pub volume: u64,
    /// Whether the endpoints run under real-time priority.
    pub fifo: bool,
    /// Machine with the right endpoint, if that is not this one.
    pub peer: Option<Peer>,
    /// CPUs to which the two endpoints are tied; the same one twice if there is only one.
    pub pinned: [usize; 2],
}

impl TryFrom<&BenchArgs> for Plan {
    type Error = Error;

    fn try_from(args: &BenchArgs) -> Result<Self> {
        let tests = if args.tests.iter().any(|t| t == "all") {
            Test::value_variants().to_vec()
        } else {
            let unknown = |t: &String| Error::Usage(format!("there is no test {t:?}; there are {}, all", names()));
            args.tests.iter().map(|t| Test::from_str(t, false).map_err(|_| unknown(t))).collect::<Result<_>>()?
        };
        let mut transports = transport::all();
        let known = |name: &String| {
            let mut known: Vec<_> = transport::all().iter().map(|t| t.card().name).collect();
            known.dedup();
            if known.contains(&name.as_str()) {
                Ok(())
            } else {
                Err(Error::Usage(format!("there is no transport {name:?}; there are {}", known.join(", "))))
            }
        };
        args.transports.iter().chain(&args.against).try_for_each(known)?;
        if !args.transports.is_empty() {
            transports.retain(|t| args.transports.iter().chain(&args.against).any(|name| name == t.card().name));
        }
        let ring = args.ring();
        fits(args, ring, &tests)?;
        Ok(Self {
            tests,
            transports,
            sizes: args.sizes.clone(),
            waits: args.waits.clone(),
            think_ns: args.think * 1000,
            neighbour: args.neighbour,
            cpus: args.cpus.clone(),
            channels: args.channels.clone(),
            rates: args.rates.clone(),
            seconds: args.seconds,
            runs: args.runs.into(),
            ring,
            rings: args.rings(),
            volume: args.volume as u64,
            fifo: args.fifo,
            peer: args.peer.as_ref().map(|host| Peer::new(host, args.via.clone())).transpose()?,
            pinned: two_cpus()?,
        })
    }
}

/// Refuses options that would take more memory than a benchmark should.
fn fits(args: &BenchArgs, ring: usize, tests: &[Test]) -> Result<()> {
    const MOST: usize = 4 << 30;
    let size = args.sizes.iter().copied().max().unwrap_or(0);
    let channels = |test: &Test| match test {
        Test::Channels => args.channels.iter().copied().max().unwrap_or(1),
        Test::Memory => 64,
        _ => 1,
    };
    let most = tests.iter().map(channels).max().unwrap_or(1);
    match most.saturating_mul(2 * (ring + size)) {
        need if need > MOST => Err(Error::Usage(format!(
            "{most} channels with rings of {} and messages of {} take {} MiB; the most is {}",
            size::show(ring),
            size::show(size),
            need >> 20,
            size::show(MOST)
        ))),
        _ => Ok(()),
    }
}

fn names() -> String {
    let names: Vec<_> = Test::value_variants().iter().map(|t| t.name()).collect();
    names.join(", ")
}

/// Returns the first two CPUs that this process may use.
fn two_cpus() -> Result<[usize; 2]> {
    let set = sched_getaffinity(None).os("sched_getaffinity")?;
    let mut allowed = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    let first = allowed.next().unwrap_or(0);
    Ok([first, allowed.next().unwrap_or(first)])
}

impl Test {
    /// Returns the name of the test on the command line and in the results.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
    }

    /// Returns the message sizes that show what the test is about.
    pub fn default_sizes(self) -> &'static [usize] {
        const KI: usize = 1 << 10;
        const MI: usize = 1 << 20;
        match self {
            Self::Throughput => &[8, 64, 256, KI, 4 * KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI],
            Self::Rate => &[8, 64, 256, KI],
            Self::Load => &[64],
            Self::Latency => &[1, 64, 256, KI, 4 * KI, 16 * KI, 64 * KI],
            Self::Switches | Self::Cpu => &[32 * KI],
            Self::Channels => &[16 * KI],
            Self::Setup | Self::Memory => &[1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(change: impl FnOnce(&mut BenchArgs)) -> Result<Plan> {
        let mut args = BenchArgs::default();
        change(&mut args);
        Plan::try_from(&args)
    }

    #[test]
    fn plan_of_the_defaults_is_throughput_and_latency_of_all() {
        let plan = plan(|_| ()).unwrap();
        assert_eq!(plan.tests, [Test::Throughput, Test::Latency]);
        assert_eq!((plan.transports.len(), plan.runs, plan.ring), (transport::all().len(), 5, 1 << 20));
    }

    #[test]
    fn plan_with_rings_by_caches_has_those() {
        let by_caches = plan(|a| a.ring_by_caches = true).unwrap().ring as u64;
        assert_eq!(by_caches, tombolo::RingChoice::of_this_machine().bytes());
    }

    #[test]
    fn plan_with_names_has_those_and_the_yardstick() {
        let plan = plan(|a| (a.transports, a.against) = (vec!["pipe".into()], Some("tcp".into()))).unwrap();
        let names: Vec<_> = plan.transports.iter().map(|t| t.card().name).collect();
        assert_eq!(names, ["tcp", "pipe"]);
    }

    #[test]
    fn plan_that_takes_more_memory_than_it_should_is_refused() {
        let many = |ring, channels| {
            plan(|a| (a.tests, a.ring, a.channels) = (vec!["channels".into()], Some(ring), vec![1, channels]))
                .map(|_| ())
        };
        assert!(many(1 << 20, 64).is_ok() && many(1 << 30, 1).is_ok());
        let refused = many(1 << 30, 64).unwrap_err().to_string();
        assert!(refused.contains("64 channels with rings of 1GiB") && refused.contains("131072 MiB"), "{refused}");
    }

    #[test]
    fn plan_with_unknown_names_is_refused_and_says_the_known() {
        let transport = plan(|a| a.transports = vec!["carrier-pigeon".into()]).err().unwrap().to_string();
        assert!(transport.contains("carrier-pigeon") && transport.contains("unix-stream"), "{transport}");
        let test = plan(|a| a.tests = vec!["speed".into()]).err().unwrap().to_string();
        assert!(test.contains("speed") && test.contains("throughput"), "{test}");
    }
}
