// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs every measurement of a plan, sampled in turns so that a drift of the machine affects all of them alike.

use std::collections::HashMap;
use std::sync::Arc;

use crate::apart::Peer;
use crate::args::Plan;
use crate::error::{Error, Result};
use crate::job::{Cpu, Job, Mode, Report, Rings, Test, Times, Wait};
use crate::line::Placement;
use crate::pair::Pair;
use crate::result::{Measurement, Skip};
use crate::stats;
use crate::transport::{Namespaces, Transport};
use crate::worker::chain;

/// Number of times that a sample is repeated because the host moved a CPU meanwhile.
const REPEATS: usize = 2;
/// Number of further rounds for measurements without a sample in the placement of the others.
const EXTRA_ROUNDS: usize = 3;
const GIB: f64 = (1u64 << 30) as f64;

/// Event of a run.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Progress: `done` of `total` samples are taken.
    Progress {
        /// Samples taken.
        done: usize,
        /// Samples in all.
        total: usize,
    },
    /// A measurement is complete.
    Measured(&'a Measurement),
    /// A measurement is skipped.
    Skipped(&'a Skip),
}

/// Result of a run.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Measurements, test by test.
    pub measurements: Vec<Measurement>,
    /// Measurements that were skipped.
    pub skips: Vec<Skip>,
}

impl Outcome {
    /// Records a skipped measurement; something that this machine lacks is reported only once.
    fn skip(&mut self, skip: Skip, listen: &mut impl FnMut(Event<'_>)) {
        if !self.skips.contains(&skip) {
            listen(Event::Skipped(&skip));
            self.skips.push(skip);
        }
    }
}

/// Measures everything in the plan, and reports events to `listen` meanwhile.
///
/// # Blocking
/// For about samples × (seconds + 20 ms). A stuck sample is given up after 5 s and four times its own time, and fails.
///
/// # Errors
/// Only errors that prevent the run as a whole; the failure of a single measurement is a [`Skip`].
pub fn run(plan: &Plan, mut listen: impl FnMut(Event<'_>)) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut pairs = Pairs { fifo: plan.fifo, peer: plan.peer.clone(), ..Pairs::default() };
    let mut tests: Vec<Vec<Cell>> = plan.tests.iter().map(|&test| cells(plan, test)).collect();
    let total = tests.iter().flatten().map(|cell| cell.variants.len() * plan.runs).sum();
    let mut done = 0;
    for (cells, &test) in tests.iter_mut().zip(&plan.tests) {
        if cells.is_empty() {
            let transport = plan.transports.iter().map(|t| t.card().name).collect::<Vec<_>>().join(", ");
            let reason = "means nothing for these transports, asked so".into();
            outcome.skip(Skip { test, transport, size: None, reason, failed: false }, &mut listen);
        }
        for _ in 0..plan.runs {
            for cell in cells.iter_mut() {
                cell.round(plan, &mut pairs, &mut outcome, &mut listen);
                done += cell.variants.len();
                listen(Event::Progress { done, total });
            }
        }
        let placement = majority(cells.iter().filter(|c| c.cpu == Cpu::Cross).flat_map(Cell::samples));
        for _ in 0..EXTRA_ROUNDS {
            for cell in cells.iter_mut().filter(|c| c.lacks(placement)) {
                cell.round(plan, &mut pairs, &mut outcome, &mut listen);
            }
        }
        for measurement in cells.iter().filter_map(|cell| cell.sum_up(plan, placement)) {
            listen(Event::Measured(&measurement));
            outcome.measurements.push(measurement);
        }
    }
    Ok(outcome)
}

/// One measurement in progress.
struct Cell {
    test: Test,
    transport: Arc<dyn Transport>,
    size: usize,
    channels: usize,
    rate: u32,
    wait: Option<Wait>,
    cpu: Cpu,
    variants: Vec<(&'static str, Vec<Sample>)>,
    /// Whether it was skipped.
    dead: bool,
}

/// Returns all measurements of a test: size by size, so that those next to each other in time are in one row of a
/// table.
fn cells(plan: &Plan, test: Test) -> Vec<Cell> {
    let sizeless = matches!(test, Test::Setup | Test::Memory);
    let sizes = if plan.sizes.is_empty() || sizeless { test.default_sizes() } else { &plan.sizes };
    let waits: Vec<_> = if test == Test::Latency { plan.waits.iter().copied().map(Some).collect() } else { vec![None] };
    // Each test varies at most one thing besides the size.
    let loads: Vec<(usize, u32)> = match test {
        Test::Channels => plan.channels.iter().map(|&channels| (channels, 0)).collect(),
        Test::Load => plan.rates.iter().map(|&rate| (1, rate)).collect(),
        Test::Memory => vec![(64, 0)],
        _ => vec![(1, 0)],
    };
    let mut cells = Vec::new();
    for (&cpu, &wait) in plan.cpus.iter().flat_map(|cpu| waits.iter().map(move |wait| (cpu, wait))) {
        for (&size, &(channels, rate)) in sizes.iter().flat_map(|size| loads.iter().map(move |load| (size, load))) {
            for transport in &plan.transports {
                let card = transport.card();
                // A transport of one size is measured once, in the first row.
                let size = match card.size {
                    Some(only) if size == sizes[0] => only,
                    Some(_) => continue,
                    None => size,
                };
                // The test under load compares times of one clock, and two machines have two clocks.
                let apart = plan.peer.is_some();
                if !card.namespaces.suit(apart) || (apart && test == Test::Load) {
                    continue;
                }
                // The competing thread's CPU time would count as that of the endpoints.
                if card.offers(test, wait, cpu) && !(plan.neighbour && test == Test::Cpu) {
                    let variants = card.variants.iter().map(|v| (*v, Vec::new())).collect();
                    let transport = Arc::clone(transport);
                    cells.push(Cell { test, transport, size, channels, rate, wait, cpu, variants, dead: false });
                }
            }
        }
    }
    cells
}

impl Cell {
    /// Takes one sample of each variant. A measurement that fails is reported, and skipped from then on.
    fn round(&mut self, plan: &Plan, pairs: &mut Pairs, outcome: &mut Outcome, listen: &mut impl FnMut(Event<'_>)) {
        for i in 0..self.variants.len() {
            if self.dead {
                return;
            }
            let card = self.transport.card();
            match self.sample(plan, pairs, self.variants[i].0) {
                Ok(sample) => self.variants[i].1.push(sample),
                Err(e) => {
                    self.dead = true;
                    let lost = pairs.refused.contains_key(&card.namespaces);
                    let skip = Skip {
                        test: self.test,
                        transport: card.name.into(),
                        size: (!lost).then_some(self.size),
                        failed: !matches!(e, Error::Unsupported(_)),
                        reason: chain(&e),
                    };
                    outcome.skip(skip, listen);
                }
            }
        }
    }

    fn sample(&self, plan: &Plan, pairs: &mut Pairs, variant: &str) -> Result<Sample> {
        let card = self.transport.card();
        let mut job = Job {
            test: self.test,
            transport: card.name.into(),
            mode: card.mode,
            variant: variant.into(),
            size: self.size,
            channels: self.channels,
            ring: self.ring(plan),
            rings: if self.follows_load(plan) { plan.rings } else { Rings::Fixed },
            rate: self.rate,
            seconds: plan.seconds,
            volume: plan.volume,
            wait: self.wait,
            think_ns: plan.think_ns,
            neighbour: plan.neighbour,
            cpu: self.cpu,
            cpus: plan.pinned,
        };
        let mut repeats = 0;
        loop {
            let reports = pairs.sample(card.namespaces, &job)?;
            match Sample::of(&job, &reports) {
                // The machine did something else all the time.
                Err(Error::Empty) if repeats < REPEATS => job.seconds *= 2.0,
                Ok(sample) if sample.placement == Placement::Mixed && repeats < REPEATS => {}
                taken => return taken,
            }
            repeats += 1;
        }
    }

    /// Returns the bytes of the ring. A ring that keeps messages apart must hold several of them.
    fn ring(&self, plan: &Plan) -> usize {
        let tight = self.transport.card().mode == Mode::Message && plan.ring / 2 < self.size;
        if tight { (4 * self.size).next_power_of_two() } else { plan.ring }
    }

    /// Returns whether the rings follow their load, which only Tombolo's do. A ring that bounds the length of messages
    /// grows only by trial, where the messages are short.
    fn follows_load(&self, plan: &Plan) -> bool {
        let card = self.transport.card();
        let may = match plan.rings {
            Rings::Fixed => false,
            Rings::Growing => card.mode == Mode::Stream,
            Rings::Default => self.ring(plan) == plan.ring,
        };
        may && card.name == "tombolo"
    }

    fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.variants.iter().flat_map(|(_, samples)| samples)
    }

    fn lacks(&self, placement: Placement) -> bool {
        !self.dead
            && self.cpu == Cpu::Cross
            && self.variants.iter().any(|(_, samples)| samples.iter().all(|s| s.placement != placement))
    }

    /// Returns the measurement: the best variant, from the samples in the most frequent placement.
    fn sum_up(&self, plan: &Plan, placement: Placement) -> Option<Measurement> {
        if self.dead {
            return None;
        }
        let all = self.variants.iter().filter_map(|(variant, samples)| {
            let most = if samples.iter().any(|s| s.placement == placement) { placement } else { majority(samples) };
            let same = |s: &&Sample| s.placement == most || most == Placement::Mixed;
            let used: Vec<_> = samples.iter().filter(same).collect();
            Some((*variant, most, stats::median(&mut values(&used, |s| Some(s.value)))?, used))
        });
        let better = |value: f64| if self.test.more_is_better() { value } else { -value };
        let (variant, placement, median, used) = all.max_by(|a, b| {
            (a.1 == placement, better(a.2))
                .partial_cmp(&(b.1 == placement, better(b.2)))
                .unwrap_or(std::cmp::Ordering::Equal)
        })?;
        let card = self.transport.card();
        let values_of = values(&used, |s| Some(s.value));
        let middle = |of: fn(&Sample) -> Option<f64>| stats::median(&mut values(&used, of)).map(tidy);
        Some(Measurement {
            test: self.test,
            transport: card.name.into(),
            mode: card.mode,
            size: self.size,
            channels: self.channels,
            unit: self.test.unit().into(),
            median: tidy(median),
            min: tidy(values_of.iter().copied().fold(f64::INFINITY, f64::min)),
            max: tidy(values_of.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
            p50: middle(|s| Some(s.times?.p50)),
            p90: middle(|s| Some(s.times?.p90)),
            p99: middle(|s| Some(s.times?.p99)),
            p999: middle(|s| Some(s.times?.p999)),
            runs: used.len(),
            placement,
            wait: self.wait,
            think_ns: (self.test == Test::Latency && plan.think_ns > 0).then_some(plan.think_ns),
            neighbour: plan.neighbour.then_some(true),
            cpu: self.cpu,
            variant: (card.variants.len() > 1).then(|| variant.into()),
            ring: (card.rings && !self.follows_load(plan)).then(|| self.ring(plan)),
            rate: (self.test == Test::Load).then_some(self.rate),
            voluntary: middle(|s| s.voluntary),
            involuntary: middle(|s| s.involuntary),
            syscalls: middle(|s| s.syscalls),
            notifications: middle(|s| s.notifications),
            share_min: middle(|s| Some(s.shares?.0)),
            share_max: middle(|s| Some(s.shares?.1)),
        })
    }
}

/// Rounds a number to the six digits that mean something.
fn tidy(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

fn values(samples: &[&Sample], of: impl Fn(&Sample) -> Option<f64>) -> Vec<f64> {
    samples.iter().filter_map(|s| of(s)).collect()
}

/// Returns the placement of most samples; `Mixed` only if no sample had a clear one.
fn majority<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> Placement {
    let mut counts = HashMap::new();
    for sample in samples {
        *counts.entry(sample.placement).or_insert(0usize) += 1;
    }
    let clear = [Placement::Near, Placement::Core, Placement::Far, Placement::Same, Placement::Unknown];
    let most = clear.into_iter().rev().max_by_key(|p| counts.get(p).copied().unwrap_or(0));
    most.filter(|p| counts.contains_key(p)).unwrap_or(Placement::Mixed)
}

/// One sample of a measurement.
struct Sample {
    value: f64,
    placement: Placement,
    times: Option<Times>,
    voluntary: Option<f64>,
    involuntary: Option<f64>,
    syscalls: Option<f64>,
    notifications: Option<f64>,
    shares: Option<(f64, f64)>,
}

impl Sample {
    /// Combines the reports of the two workers.
    fn of(job: &Job, [left, right]: &[Report; 2]) -> Result<Self> {
        let asks = matches!(job.test, Test::Latency | Test::Setup | Test::Memory);
        if !asks && left.total != right.total {
            return Err(Error::Spoiled(format!("{} bytes were sent and {} arrived", left.total, right.total)));
        }
        let per_gib = |n: u64| n as f64 / (left.total as f64 / GIB);
        let both = |of: fn(&Report) -> Option<u64>| {
            let sum = of(left)? + of(right)?;
            match job.test {
                Test::Switches => Some(per_gib(sum)),
                Test::Latency | Test::Load => Some(sum as f64 / left.messages as f64),
                _ => None,
            }
        };
        let voluntary = both(|r| Some(r.usage.voluntary));
        let value = match job.test {
            Test::Throughput | Test::Channels => right.bytes as f64 / right.seconds,
            Test::Rate => right.messages as f64 / right.seconds,
            Test::Latency => left.times.map_or(f64::NAN, |times| times.median),
            Test::Load => right.times.map_or(f64::NAN, |times| times.median),
            Test::Switches => voluntary.unwrap_or(f64::NAN),
            Test::Setup => left.messages as f64 / left.seconds,
            Test::Cpu => per_gib(left.usage.cpu_ns + right.usage.cpu_ns) / 1e9,
            Test::Memory => (left.memory + right.memory) as f64 / job.channels as f64,
        };
        if !value.is_finite() {
            return Err(Error::Empty);
        }
        let fair = right.total as f64 / right.shares.len() as f64;
        let share = |bytes: Option<&u64>| bytes.map(|&b| b as f64 / fair);
        Ok(Self {
            value,
            placement: left.placement(job.cpu),
            times: left.times.or(right.times),
            voluntary,
            involuntary: both(|r| Some(r.usage.involuntary)),
            syscalls: both(|r| r.syscalls),
            notifications: both(|r| r.notifications),
            shares: share(right.shares.iter().min()).zip(share(right.shares.iter().max())),
        })
    }
}

/// Pairs of workers, started when first needed and again after an error.
#[derive(Default)]
struct Pairs {
    fifo: bool,
    peer: Option<Peer>,
    running: HashMap<Namespaces, Pair>,
    refused: HashMap<Namespaces, String>,
}

impl Pairs {
    fn sample(&mut self, namespaces: Namespaces, job: &Job) -> Result<[Report; 2]> {
        let namespaces = match (&self.peer, namespaces) {
            (Some(_), _) => Namespaces::Apart,
            (None, Namespaces::Anywhere) => Namespaces::Shared,
            (None, other) => other,
        };
        if let Some(why) = self.refused.get(&namespaces) {
            return Err(Error::Unsupported(why.clone()));
        }
        let mut pair = match self.running.remove(&namespaces) {
            Some(pair) => pair,
            None => match &self.peer {
                Some(peer) => Pair::start_apart(peer),
                None => Pair::start(namespaces, self.fifo),
            }
            .inspect_err(|e| {
                self.refused.insert(namespaces, chain(e));
            })?,
        };
        let reports = pair.sample(job)?;
        self.running.insert(namespaces, pair);
        Ok(reports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(value: f64, placement: Placement) -> Sample {
        Sample {
            value,
            placement,
            times: None,
            voluntary: None,
            involuntary: None,
            syscalls: None,
            notifications: None,
            shares: None,
        }
    }

    fn cell(samples: Vec<Vec<Sample>>) -> Cell {
        let transport = crate::transport::find("tcp", crate::job::Mode::Stream).unwrap();
        let variants = transport.card().variants.iter().copied().zip(samples).collect();
        Cell {
            test: Test::Throughput,
            transport,
            size: 64,
            channels: 1,
            rate: 1,
            wait: None,
            cpu: Cpu::Cross,
            variants,
            dead: false,
        }
    }

    fn plan() -> Plan {
        Plan::try_from(&crate::BenchArgs::default()).unwrap()
    }

    #[test]
    fn majority_of_samples_ignores_mixed_unless_alone() {
        use Placement::{Far, Mixed, Near};
        let of = |placements: &[Placement]| majority(&placements.iter().map(|&p| sample(1.0, p)).collect::<Vec<_>>());
        assert_eq!(of(&[Near, Far, Far, Mixed, Mixed, Mixed]), Far);
        assert_eq!(of(&[Near, Far]), Near);
        assert_eq!(of(&[Mixed, Mixed]), Mixed);
    }

    #[test]
    fn cell_summed_up_has_the_best_variant_in_the_common_placement_only() {
        let nagle = vec![sample(10.0, Placement::Near), sample(30.0, Placement::Near), sample(99.0, Placement::Far)];
        let nodelay = vec![sample(15.0, Placement::Near), sample(1.0, Placement::Far)];
        let m = cell(vec![nagle, nodelay]).sum_up(&plan(), Placement::Near).unwrap();
        assert_eq!((m.variant.as_deref(), m.median, m.min, m.max, m.runs), (Some("nagle"), 20.0, 10.0, 30.0, 2));
        assert_eq!(m.placement, Placement::Near);
    }

    #[test]
    fn cell_without_a_sample_in_the_common_placement_says_its_own() {
        let far = || vec![sample(5.0, Placement::Far)];
        let cell = cell(vec![far(), far()]);
        assert!(cell.lacks(Placement::Near));
        assert_eq!(cell.sum_up(&plan(), Placement::Near).unwrap().placement, Placement::Far);
    }

    #[test]
    fn sample_with_bytes_missing_is_refused() {
        let job = crate::job::tests::job();
        let sent = Report { total: 128, ..Report::default() };
        let arrived = Report { total: 64, bytes: 64, seconds: 1.0, ..Report::default() };
        assert!(matches!(Sample::of(&job, &[sent.clone(), arrived]), Err(Error::Spoiled(_))));
        let arrived = Report { bytes: 64, seconds: 0.5, ..sent.clone() };
        assert_eq!(Sample::of(&job, &[sent, arrived]).unwrap().value, 128.0);
    }
}
