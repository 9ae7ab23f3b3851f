// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The measuring loops, generic over the transport's end: the compiler sees through to the transport, and a message of
//! 64 bytes that takes 4 ns is not measured through a pointer.
//!
//! The left sends chunks of messages and reads the clock once a chunk; all messages of a chunk carry its number, so
//! the loop between two clock reads does nothing but send. The right checks that number in the first and the last
//! message of a chunk, or in the first of each gulp, and at the end the driver compares the bytes of both.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::job::{Mode, Report, Role, RoundTrip, Test};
use crate::stats;
use crate::transport::{Context, End, Wire};
use crate::usage::{self, Usage};

/// A receiver of a stream takes up to this much at once, or a message if that is more.
const GULP: usize = 64 << 10;
/// A block of round trips, between two clock reads, takes about this long, or has this many.
const BLOCK: (f64, f64) = (2000.0, 16.0);
/// First bytes of the requests: two that alternate, and the last.
const STAMPS: [u8; 2] = [1, 2];
const LAST: u8 = 0xff;

/// Does one worker's half of any test.
pub(crate) fn perform<W: Wire>(wire: &W, context: &Context) -> Result<Report> {
    let test = context.job.test;
    match context.role {
        Role::Left => {
            let address = context.link.hear()?;
            let connect = || wire.connect(&address, context);
            match test {
                Test::Setup => call(connect, context),
                Test::Memory => hold(connect, context),
                Test::Channels => crowd(connect, context, |end, start| send(end, context, start)),
                Test::Latency => measured(connect()?, context, |end| ask(end, context)),
                Test::Throughput | Test::Rate | Test::Switches | Test::Cpu => {
                    measured(connect()?, context, |end| send(end, context, Instant::now()))
                }
            }
        }
        Role::Right => {
            let (mut host, address) = wire.listen(context)?;
            context.link.say(&address)?;
            let mut accept = || wire.accept(&mut host, context);
            match test {
                Test::Setup => answer_calls(accept, context),
                Test::Memory => hold(accept, context),
                Test::Channels => crowd(accept, context, |end, start| receive(end, context, start)),
                Test::Latency => measured(accept()?, context, |end| answer(end, context)),
                Test::Throughput | Test::Rate | Test::Switches | Test::Cpu => {
                    measured(accept()?, context, |end| receive(end, context, Instant::now()))
                }
            }
        }
    }
}

/// Runs `work` between two meetings of the workers and adds what it used.
fn measured<E: End>(mut end: E, context: &Context, work: impl FnOnce(&mut E) -> Result<Report>) -> Result<Report> {
    context.link.meet()?;
    let (before, calls, notes) = (Usage::now()?, end.syscalls(), end.notifications());
    let mut report = work(&mut end)?;
    report.usage = Usage::now()? - before;
    report.syscalls = end.syscalls().zip(calls).map(|(after, before)| after - before);
    report.notifications = end.notifications().zip(notes).map(|(after, before)| after - before);
    context.link.meet()?;
    Ok(report)
}

/// How many messages, a power of two, go between two clock reads: up to 64 KiB or 1024 messages.
fn chunk(size: usize) -> u64 {
    let most = (GULP / size).clamp(1, 1024);
    1 << most.ilog2()
}

/// Bytes of a message that carry the number of its chunk.
fn stamp(size: usize, chunk: u64) -> ([u8; 8], usize) {
    (chunk.to_le_bytes(), size.min(8))
}

/// Left: sends messages until the time or the volume is reached.
fn send<E: End>(end: &mut E, context: &Context, start: Instant) -> Result<Report> {
    let job = &context.job;
    let (per_chunk, time) = (chunk(job.size), Duration::from_secs_f64(job.seconds));
    let mut message = pattern(job.size);
    let mut report = Report::default();
    for number in 0.. {
        let (bytes, len) = stamp(job.size, number);
        message[..len].copy_from_slice(&bytes[..len]);
        for _ in 0..per_chunk {
            end.send(&message)?;
        }
        report.messages += per_chunk;
        let done = match job.test {
            Test::Switches => report.messages * job.size as u64 >= job.volume,
            _ => start.elapsed() >= time,
        };
        if done {
            break;
        }
    }
    end.finish()?;
    report.total = report.messages * job.size as u64;
    report.seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// Right: receives until the end. What arrives in the first tenth (at most 10 ms) does not count.
fn receive<E: End>(end: &mut E, context: &Context, start: Instant) -> Result<Report> {
    let job = &context.job;
    let warm = match job.test {
        Test::Switches => Duration::ZERO,
        _ => Duration::from_secs_f64(job.seconds / 10.0).min(Duration::from_millis(10)),
    };
    let one_by_one = job.test == Test::Rate || job.mode == Mode::Message;
    let mut meter = Meter { size: job.size, ..Meter::new(start, warm) };
    if one_by_one {
        meter.messages(end)?
    } else {
        meter.gulps(end)?
    }
    Ok(meter.report())
}

/// Counts and checks what arrives.
struct Meter {
    size: usize,
    start: Instant,
    warm: Duration,
    /// All bytes so far.
    total: u64,
    /// When the window opened, and how many bytes had come by then.
    opened: Option<(Instant, u64)>,
    /// The same of the latest clock read.
    latest: (Instant, u64),
}

impl Meter {
    fn new(start: Instant, warm: Duration) -> Self {
        Self { size: 0, start, warm, total: 0, opened: None, latest: (start, 0) }
    }

    /// Receives whole messages, a chunk between two clock reads.
    fn messages<E: End>(&mut self, end: &mut E) -> Result<()> {
        let per_chunk = chunk(self.size);
        let mut buffer = vec![0; self.size];
        for number in 0.. {
            for i in 0..per_chunk {
                if !take(end, &mut buffer)? {
                    self.read_clock();
                    return Ok(());
                }
                self.total += self.size as u64;
                if i == 0 {
                    self.check(&buffer, number)?;
                }
            }
            self.check(&buffer, number)?;
            self.read_clock();
        }
        Ok(())
    }

    /// Receives whatever is there.
    fn gulps<E: End>(&mut self, end: &mut E) -> Result<()> {
        let mut buffer = vec![0; self.size.max(GULP)];
        let (size, per_chunk) = (self.size as u64, chunk(self.size));
        let often = per_chunk * size;
        // The first message whose beginning has not been seen, and where the clock is to be read next.
        let (mut message, mut due) = (0, often);
        loop {
            let got = end.recv(&mut buffer)?;
            if got == 0 {
                self.read_clock();
                return Ok(());
            }
            let begin = message * size - self.total;
            self.total += got as u64;
            if message * size < self.total {
                // The stamp may be cut off by the end of the gulp; then it goes unchecked.
                if let Some(text) = buffer[..got].get(begin as usize..).filter(|t| t.len() >= self.size.min(8)) {
                    self.check(text, message / per_chunk)?;
                }
                message = self.total.div_ceil(size);
            }
            if self.total >= due {
                self.read_clock();
                due = self.total + often;
            }
        }
    }

    #[inline]
    fn check(&self, message: &[u8], chunk: u64) -> Result<()> {
        let (bytes, len) = stamp(self.size, chunk);
        if message[..len] == bytes[..len] {
            return Ok(());
        }
        let (got, total) = (&message[..len], self.total);
        Err(Error::Spoiled(format!("stamp {got:?} instead of that of chunk {chunk} before byte {total}")))
    }

    fn read_clock(&mut self) {
        let now = Instant::now();
        self.latest = (now, self.total);
        if self.opened.is_none() && now - self.start >= self.warm {
            self.opened = Some(self.latest);
        }
    }

    fn report(&self) -> Report {
        // Without a warm-up, or if what came did not come steadily but at once in the end, everything counts.
        let (end, _) = self.latest;
        let (opened, before) = match self.opened {
            Some((at, before)) if !self.warm.is_zero() && end - at > (end - self.start) / 2 => (at, before),
            _ => (self.start, 0),
        };
        let bytes = self.latest.1 - before;
        Report {
            bytes,
            messages: bytes / self.size as u64,
            seconds: (end - opened).as_secs_f64(),
            total: self.total,
            ..Report::default()
        }
    }
}

/// Fills `buffer` with one message; false at the end.
#[inline]
fn take<E: End>(end: &mut E, buffer: &mut [u8]) -> Result<bool> {
    let mut got = end.recv(buffer)?;
    while got != 0 && got < buffer.len() {
        match end.recv(&mut buffer[got..])? {
            0 => return Err(Error::Closed { got, size: buffer.len() }),
            more => got += more,
        }
    }
    Ok(got != 0)
}

/// Left: asks and waits for the answer, until the time is over.
fn ask<E: End>(end: &mut E, context: &Context) -> Result<Report> {
    let job = &context.job;
    let mut requests = STAMPS.map(|stamp| request(job.size, stamp));
    let mut answer = vec![0; job.size];
    let mut turn = 0;
    let watch = Stopwatch::run(Instant::now(), Duration::from_secs_f64(job.seconds), || {
        turn ^= 1;
        exchange(end, &requests[turn], &mut answer)
    })?;
    requests[0][0] = LAST;
    exchange(end, &requests[0], &mut answer)?;
    Ok(watch.report())
}

/// A message that begins with `stamp`.
fn request(size: usize, stamp: u8) -> Vec<u8> {
    // An eventfd carries a number and wants it small.
    let mut message = if size == 8 { vec![0; 8] } else { pattern(size) };
    message[0] = stamp;
    message
}

#[inline]
fn exchange<E: End>(end: &mut E, request: &[u8], answer: &mut [u8]) -> Result<()> {
    end.send(request)?;
    if !take(end, answer)? {
        return Err(Error::Closed { got: 0, size: request.len() });
    }
    if answer[0] != request[0] {
        return Err(Error::Spoiled(format!("asked {}, was answered {}", request[0], answer[0])));
    }
    Ok(())
}

/// Right: sends every request back, until the last.
fn answer<E: End>(end: &mut E, context: &Context) -> Result<Report> {
    let mut buffer = vec![0; context.job.size];
    while take(end, &mut buffer)? {
        end.send(&buffer)?;
        if buffer[0] == LAST {
            break;
        }
    }
    Ok(Report::default())
}

/// Times round trips: half of the time in blocks, for a median that no clock read disturbs, and half one by one, for
/// the tail.
pub(crate) struct Stopwatch {
    /// Round trips in a block.
    rounds: u32,
    /// Nanoseconds of a round trip, block by block.
    blocks: Vec<f64>,
    /// Nanoseconds of single round trips, the latest ones.
    singles: Vec<u32>,
}

impl Stopwatch {
    /// Single round trips that are kept; a power of two.
    const SINGLES: usize = 1 << 18;

    /// Calls `round` again and again for `time` from `start` on, a twentieth of it to warm up.
    pub(crate) fn run(start: Instant, time: Duration, mut round: impl FnMut() -> Result<()>) -> Result<Self> {
        // Filled, for a page that is first touched in the middle of a round trip is a blot on the tail.
        let mut singles = vec![u32::MAX; Self::SINGLES];
        let mut warm = 0;
        let mut now = start;
        while warm == 0 || now - start < time / 20 {
            round()?;
            warm += 1;
            now = Instant::now();
        }
        let (long, many) = BLOCK;
        let rounds = (long * f64::from(warm) / (now - start).as_nanos().max(1) as f64).clamp(1.0, many) as u32;
        let mut blocks = Vec::new();
        while blocks.is_empty() || now - start < time / 2 {
            for _ in 0..rounds {
                round()?;
            }
            let before = std::mem::replace(&mut now, Instant::now());
            blocks.push((now - before).as_nanos() as f64 / f64::from(rounds));
        }
        let mut count = 0;
        while count == 0 || now - start < time {
            round()?;
            let before = std::mem::replace(&mut now, Instant::now());
            singles[count % Self::SINGLES] = u32::try_from((now - before).as_nanos()).unwrap_or(u32::MAX);
            count += 1;
        }
        singles.truncate(count);
        Ok(Self { rounds, blocks, singles })
    }

    /// Sums up, less what reading the clock takes.
    pub(crate) fn report(mut self) -> Report {
        let clock = clock_cost();
        let mut singles: Vec<f64> = self.singles.iter().map(|&ns| (f64::from(ns) - clock).max(0.0)).collect();
        singles.sort_by(f64::total_cmp);
        let single = |percent| stats::percentile(&singles, percent).unwrap_or(f64::NAN);
        let round_trip = RoundTrip {
            p50: single(50.0),
            p99: single(99.0),
            p999: single(99.9),
            median: stats::median(&mut self.blocks).map_or(f64::NAN, |ns| ns - clock / f64::from(self.rounds)),
        };
        Report { round_trip: Some(round_trip), ..Report::default() }
    }
}

/// Nanoseconds that it takes to read the clock.
fn clock_cost() -> f64 {
    const READS: u32 = 1000;
    let start = Instant::now();
    for _ in 1..READS {
        std::hint::black_box(Instant::now());
    }
    start.elapsed().as_nanos() as f64 / f64::from(READS)
}

/// Left: connects, sends a byte, awaits it back, closes; again and again.
fn call<E: End>(connect: impl Fn() -> Result<E>, context: &Context) -> Result<Report> {
    context.link.meet()?;
    let before = Usage::now()?;
    let (start, time) = (Instant::now(), Duration::from_secs_f64(context.job.seconds));
    let mut report = Report::default();
    while start.elapsed() < time {
        exchange(&mut connect()?, &STAMPS[..1], &mut [0])?;
        report.messages += 1;
    }
    report.seconds = start.elapsed().as_secs_f64();
    exchange(&mut connect()?, &[LAST], &mut [0])?;
    report.usage = Usage::now()? - before;
    context.link.meet()?;
    Ok(report)
}

/// Right: answers one byte on every connection, until the last.
fn answer_calls<E: End>(mut accept: impl FnMut() -> Result<E>, context: &Context) -> Result<Report> {
    context.link.meet()?;
    let before = Usage::now()?;
    let mut byte = [0];
    while byte[0] != LAST {
        let mut end = accept()?;
        if take(&mut end, &mut byte)? {
            end.send(&byte)?;
        }
    }
    let report = Report { usage: Usage::now()? - before, ..Report::default() };
    context.link.meet()?;
    Ok(report)
}

/// Either side: opens channels, after a first one that pays for what is shared, and weighs them.
fn hold<E: End>(mut open: impl FnMut() -> Result<E>, context: &Context) -> Result<Report> {
    let mut ends = Vec::with_capacity(context.job.channels + 1);
    ends.push(open()?);
    context.link.meet()?;
    let before = usage::memory()?;
    context.link.meet()?;
    for _ in 0..context.job.channels {
        ends.push(open()?);
    }
    context.link.meet()?;
    let memory = usage::memory()?.saturating_sub(before);
    context.link.meet()?;
    Ok(Report { memory, ..Report::default() })
}

/// Either side: opens many channels and works all of them at once, a thread each.
fn crowd<E: End>(
    mut open: impl FnMut() -> Result<E>,
    context: &Context,
    work: impl Fn(&mut E, Instant) -> Result<Report> + Sync,
) -> Result<Report> {
    let mut ends = (0..context.job.channels).map(|_| open()).collect::<Result<Vec<_>>>()?;
    context.link.meet()?;
    let before = Usage::now()?;
    let gate = Barrier::new(ends.len());
    let start = Instant::now();
    let reports: Vec<Result<Report>> = std::thread::scope(|scope| {
        let each = |end| {
            let (gate, work) = (&gate, &work);
            scope.spawn(move || {
                gate.wait();
                work(end, Instant::now())
            })
        };
        let threads: Vec<_> = ends.iter_mut().map(each).collect();
        let failed = |_| Err(Error::Worker("a thread panicked".into()));
        threads.into_iter().map(|t| t.join().unwrap_or_else(failed)).collect()
    });
    // The threads' own windows may lie one after another; only the time of all of them together tells the sum.
    let seconds = start.elapsed().as_secs_f64();
    let mut sum = Report { seconds, usage: Usage::now()? - before, ..Report::default() };
    for report in reports {
        let bytes = report?.total;
        sum.shares.push(bytes);
        sum.total += bytes;
    }
    sum.bytes = sum.total;
    context.link.meet()?;
    Ok(sum)
}

/// Bytes that differ from their neighbours, so that what is moved is not all zeroes.
fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i % 251) as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// An end that hands out what was put into it, at most `gulp` bytes at once.
    struct Queue {
        bytes: VecDeque<u8>,
        gulp: usize,
    }

    impl End for Queue {
        fn send(&mut self, message: &[u8]) -> Result<()> {
            self.bytes.extend(message);
            Ok(())
        }

        fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
            let n = buffer.len().min(self.gulp).min(self.bytes.len());
            buffer.iter_mut().zip(self.bytes.drain(..n)).for_each(|(to, from)| *to = from);
            Ok(n)
        }

        fn finish(&mut self) -> Result<()> {
            Ok(())
        }
    }

    fn stream(size: usize, chunks: u64, gulp: usize) -> Queue {
        let mut queue = Queue { bytes: VecDeque::new(), gulp };
        for number in 0..chunks {
            let mut message = pattern(size);
            let (bytes, len) = stamp(size, number);
            message[..len].copy_from_slice(&bytes[..len]);
            (0..chunk(size)).for_each(|_| queue.send(&message).unwrap());
        }
        queue
    }

    fn meter(size: usize) -> Meter {
        Meter { size, ..Meter::new(Instant::now(), Duration::ZERO) }
    }

    #[test]
    fn meter_true_data_is_counted_whatever_the_gulps() {
        for (size, gulp) in [(1, 7), (3, 1000), (8, 8), (64, 100), (64, 65536), (100, 1), (5000, 4096), (70000, 65536)]
        {
            let sent = stream(size, 3, gulp).bytes.len() as u64;
            let mut gulps = meter(size);
            gulps.gulps(&mut stream(size, 3, gulp)).unwrap();
            let mut messages = meter(size);
            messages.messages(&mut stream(size, 3, gulp)).unwrap();
            assert_eq!((gulps.total, messages.total), (sent, sent), "size {size}, gulp {gulp}");
            assert_eq!(gulps.report().bytes, sent);
        }
    }

    #[test]
    fn meter_lost_repeated_or_cut_data_is_refused() {
        let mut lost = stream(64, 4, 64);
        lost.bytes.drain(..64);
        assert!(matches!(meter(64).messages(&mut lost), Err(Error::Spoiled(_))));
        for gulp in [64, 4096] {
            let mut repeated = stream(64, 4, gulp);
            (0..64).for_each(|byte| repeated.bytes.push_front(byte));
            let spoiled = if gulp == 64 { meter(64).messages(&mut repeated) } else { meter(64).gulps(&mut repeated) };
            assert!(matches!(spoiled, Err(Error::Spoiled(_))), "gulp {gulp}");
        }
        let mut cut = stream(64, 1, 64);
        cut.bytes.pop_back();
        assert!(matches!(meter(64).messages(&mut cut), Err(Error::Closed { got: 63, size: 64 })));
    }

    #[test]
    fn meter_of_bytes_that_come_at_once_in_the_end_counts_the_waiting() {
        let start = Instant::now();
        let at = |ms, bytes| (start + Duration::from_millis(ms), bytes);
        let warm = Duration::from_millis(10);
        let sudden = Meter { total: 1000, opened: Some(at(99, 10)), latest: at(100, 1000), ..Meter::new(start, warm) };
        let steady = Meter { opened: Some(at(20, 200)), ..sudden };
        let rate = |meter: &Meter| Meter { size: 1, ..*meter }.report();
        assert_eq!((rate(&sudden).bytes, rate(&sudden).seconds), (1000, 0.1));
        assert_eq!((rate(&steady).bytes, rate(&steady).seconds), (800, 0.08));
    }

    #[test]
    fn chunk_of_any_size_is_a_power_of_two_of_at_most_64_kib() {
        for size in [1, 8, 63, 64, 1000, 65536, 1 << 22] {
            let n = chunk(size);
            assert!(n.is_power_of_two() && n <= 1024 && (n == 1 || n as usize * size <= GULP), "{size}: {n}");
        }
    }

    #[test]
    fn stopwatch_of_instant_rounds_reports_in_order() {
        let report = Stopwatch::run(Instant::now(), Duration::from_millis(20), || Ok(())).unwrap().report();
        let rtt = report.round_trip.unwrap();
        assert!(rtt.p50 <= rtt.p99 && rtt.p99 <= rtt.p999 && rtt.median < 1000.0, "{rtt:?}");
    }
}
