// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The measuring loops, generic over the transport's endpoint: the compiler can inline the transport, and a message of
//! 64 bytes that takes 4 ns is not measured through a pointer.
//!
//! The left worker sends chunks of messages and reads the clock once a chunk. All messages of a chunk carry its number,
//! so the loop between two clock reads only sends. The right worker checks that number in the first and the last
//! message of a chunk, or in the first message of each gulp. At the end the driver compares the byte counts of both.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::job::{Mode, Report, Role, Test};
use crate::load;
use crate::meter::{Meter, chunk, pattern, receive_message, stamp};
use crate::stopwatch::Stopwatch;
use crate::usage::{self, Usage};
use crate::wire::{Context, End, Wire};

/// First bytes of the requests: two that alternate, and the one of the last request.
const STAMPS: [u8; 2] = [1, 2];
const LAST: u8 = 0xff;

/// Performs one worker's half of any test.
pub(crate) fn perform<W: Wire>(wire: &W, context: &Context) -> Result<Report> {
    let test = context.job.test;
    match context.role {
        Role::Left => {
            let address = context.link.receive_line()?;
            let connect = || wire.connect(&address, context);
            match test {
                Test::Setup => call(connect, context),
                Test::Memory => hold(connect, context),
                Test::Channels => crowd(connect, context, |end, start| send(end, context, start)),
                Test::Latency => measured(connect()?, context, |end| ask(end, context)),
                Test::Load => measured(connect()?, context, |end| load::offer(end, &context.job)),
                Test::Throughput | Test::Rate | Test::Switches | Test::Cpu => {
                    measured(connect()?, context, |end| send(end, context, Instant::now()))
                }
            }
        }
        Role::Right => {
            let (mut host, address) = wire.listen(context)?;
            context.link.send_line(&address)?;
            let mut accept = || wire.accept(&mut host, context);
            match test {
                Test::Setup => answer_calls(accept, context),
                Test::Memory => hold(accept, context),
                Test::Channels => crowd(accept, context, |end, start| receive(end, context, start)),
                Test::Latency => measured(accept()?, context, |end| answer(end, context)),
                Test::Load => measured(accept()?, context, |end| load::observe(end, &context.job)),
                Test::Throughput | Test::Rate | Test::Switches | Test::Cpu => {
                    measured(accept()?, context, |end| receive(end, context, Instant::now()))
                }
            }
        }
    }
}

/// Runs `work` between two barriers of the workers and adds what it used.
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

/// Right: receives until the end. What arrives in the first tenth of the time (at most 10 ms) does not count.
fn receive<E: End>(end: &mut E, context: &Context, start: Instant) -> Result<Report> {
    let job = &context.job;
    let warm = match job.test {
        Test::Switches => Duration::ZERO,
        _ => Duration::from_secs_f64(job.seconds / 10.0).min(Duration::from_millis(10)),
    };
    let one_by_one = job.test == Test::Rate || job.mode == Mode::Message;
    let mut meter = Meter::new(job.size, start, warm);
    if one_by_one {
        meter.messages(end)?
    } else {
        meter.gulps(end)?
    }
    Ok(meter.report())
}

/// Left: sends requests and waits for each answer, until the time is over.
fn ask<E: End>(end: &mut E, context: &Context) -> Result<Report> {
    let job = &context.job;
    let mut requests = STAMPS.map(|stamp| request(job.size, stamp));
    let mut answer = vec![0; job.size];
    let mut turn = 0;
    let watch = Stopwatch::run(Instant::now(), Duration::from_secs_f64(job.seconds), || {
        turn ^= 1;
        think(job.think_ns);
        exchange(end, &requests[turn], &mut answer)
    })?;
    requests[0][0] = LAST;
    exchange(end, &requests[0], &mut answer)?;
    Ok(watch.report(2.0 * f64::from(job.think_ns)))
}

/// Spins for `ns` nanoseconds.
#[inline]
fn think(ns: u32) {
    if ns > 0 {
        let (start, time) = (Instant::now(), Duration::from_nanos(ns.into()));
        while start.elapsed() < time {
            std::hint::spin_loop();
        }
    }
}

/// Returns a message that begins with `stamp`.
fn request(size: usize, stamp: u8) -> Vec<u8> {
    // An eventfd carries a number, which has to be small.
    let mut message = if size == 8 { vec![0; 8] } else { pattern(size) };
    message[0] = stamp;
    message
}

#[inline]
fn exchange<E: End>(end: &mut E, request: &[u8], answer: &mut [u8]) -> Result<()> {
    end.send(request)?;
    if !receive_message(end, answer)? {
        return Err(Error::Closed { got: 0, size: request.len() });
    }
    if answer[0] != request[0] {
        return Err(Error::Spoiled(format!("asked {}, was answered {}", request[0], answer[0])));
    }
    Ok(())
}

/// Right: sends every request back, including the last one.
fn answer<E: End>(end: &mut E, context: &Context) -> Result<Report> {
    let mut buffer = vec![0; context.job.size];
    while receive_message(end, &mut buffer)? {
        think(context.job.think_ns);
        end.send(&buffer)?;
        if buffer[0] == LAST {
            break;
        }
    }
    Ok(Report::default())
}

/// Left: connects, sends a byte, receives it back, closes; again and again.
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

/// Right: answers one byte on every connection, including the last one.
fn answer_calls<E: End>(mut accept: impl FnMut() -> Result<E>, context: &Context) -> Result<Report> {
    context.link.meet()?;
    let before = Usage::now()?;
    let mut byte = [0];
    while byte[0] != LAST {
        let mut end = accept()?;
        if receive_message(&mut end, &mut byte)? {
            end.send(&byte)?;
        }
    }
    let report = Report { usage: Usage::now()? - before, ..Report::default() };
    context.link.meet()?;
    Ok(report)
}

/// Either side: opens channels, after a first one that takes the shared costs, and measures their memory.
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

/// Either side: opens many channels and uses all of them at once, with a thread for each.
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
    // The windows of the threads may lie one after another; only the time of all threads together gives the sum.
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
