// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures latency under a fixed load, by an open loop: the due time of each message is fixed before the first one is
//! sent.
//!
//! A loop that waits for an answer before its next request asks less often while the other endpoint is slow. It thus
//! omits just the bad moments from its figures (*coordinated omission*). Here a message that could not be sent in time
//! is sent late, and its delay counts from the moment when it was due. So the cause of a delay shows in its figure, and
//! in those of all messages that queued behind it.

use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result};
use crate::job::{Job, Report, Times};
use crate::meter::{pattern, receive_message};
use crate::stats;
use crate::wire::End;

/// Bytes of a message that carry its due time.
const STAMP: usize = 8;
const SECOND: f64 = 1e9;
/// Number of delays that are kept, the latest ones.
const KEPT: usize = 1 << 22;
/// Multiple of the sample's time after which an overloaded sender is given up.
const PATIENCE: f64 = 2.0;

/// Returns nanoseconds of the clock that all processes of a host share.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the nanoseconds after the first message at which message `number` is due.
fn due(number: u64, rate: u32) -> u64 {
    (u128::from(number) * 1_000_000_000 / u128::from(rate)) as u64
}

/// Left: sends each message when it is due, or as soon after that as the transport takes it.
pub(crate) fn offer<E: End>(end: &mut E, job: &Job) -> Result<Report> {
    let size = stamped(job)?;
    let mut message = pattern(size);
    let start = now();
    let messages = schedule(job, now, |due| {
        message[..STAMP].copy_from_slice(&due.to_le_bytes());
        end.send(&message)
    })?;
    end.finish()?;
    let seconds = (now() - start) as f64 / SECOND;
    Ok(Report { messages, total: messages * size as u64, seconds, ..Report::default() })
}

/// Calls `send` with the due time of each message, once that time has come. Returns how many messages were sent.
fn schedule(job: &Job, now: impl Fn() -> u64, mut send: impl FnMut(u64) -> Result<()>) -> Result<u64> {
    let count = ((f64::from(job.rate) * job.seconds) as u64).max(1);
    let start = now();
    let end = start + (job.seconds * PATIENCE * SECOND) as u64;
    for number in 0..count {
        let due = start + due(number, job.rate);
        let mut at = now();
        while at < due {
            std::hint::spin_loop();
            at = now();
        }
        if at > end {
            return Ok(number);
        }
        send(due)?;
    }
    Ok(count)
}

/// Right: records each message's delay since it was due. The first tenth of the time (at most 10 ms) does not count.
pub(crate) fn observe<E: End>(end: &mut E, job: &Job) -> Result<Report> {
    let size = stamped(job)?;
    let mut buffer = vec![0; size];
    let warm = (job.seconds * SECOND / 10.0).min(1e7) as u64;
    let mut report = Report::default();
    // Filled in advance: a page that is first touched during the measurement would be a delay of the receiver's own.
    let mut delays = vec![f64::NAN; ((f64::from(job.rate) * job.seconds) as usize).clamp(1, KEPT)];
    let (mut first, mut counted) = (None, 0);
    while receive_message(end, &mut buffer)? {
        let at = now();
        let mut stamp = [0; STAMP];
        stamp.copy_from_slice(&buffer[..STAMP]);
        let stamp = u64::from_le_bytes(stamp);
        let first = *first.get_or_insert(stamp);
        let after = due(report.messages, job.rate);
        if stamp != first + after {
            return Err(Error::Spoiled(format!("message {} says it was due at {stamp}", report.messages)));
        }
        if after >= warm || delays.len() == 1 {
            let slot = counted % delays.len();
            delays[slot] = at.saturating_sub(stamp) as f64;
            counted += 1;
        }
        report.messages += 1;
        report.total += size as u64;
        report.seconds = (at - first) as f64 / SECOND;
    }
    delays.truncate(counted);
    report.bytes = report.total;
    report.times = times(delays);
    Ok(report)
}

fn times(mut delays: Vec<f64>) -> Option<Times> {
    delays.sort_by(f64::total_cmp);
    let at = |percent| stats::percentile(&delays, percent);
    Some(Times { median: at(50.0)?, p50: at(50.0)?, p90: at(90.0)?, p99: at(99.0)?, p999: at(99.9)? })
}

fn stamped(job: &Job) -> Result<usize> {
    if job.size < STAMP {
        let size = job.size;
        return Err(Error::Unsupported(format!("a message of {size} bytes cannot say when it was due: that takes 8")));
    }
    Ok(job.size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn job(rate: u32, seconds: f64) -> Job {
        Job { rate, seconds, size: 64, ..crate::job::tests::job() }
    }

    /// Sends on a clock that advances by itself, 100 ns a look; `cost` is the time that the given message takes to
    /// send. Returns for each message how late it was sent.
    fn delays(job: &Job, cost: impl Fn(u64) -> u64) -> Vec<f64> {
        let clock = Cell::new(0);
        let tick = |ns| {
            clock.set(clock.get() + ns);
            clock.get()
        };
        let mut delays = Vec::new();
        let send = |due| {
            tick(cost(delays.len() as u64));
            delays.push((clock.get() - due) as f64);
            Ok(())
        };
        schedule(job, || tick(100), send).unwrap();
        delays
    }

    #[test]
    fn schedule_without_a_stall_is_kept() {
        let delays = delays(&job(10_000, 0.1), |_| 1_000);
        assert_eq!(delays.len(), 1000);
        assert!(delays.iter().all(|&ns| ns < 1_500.0), "{delays:?}");
    }

    #[test]
    fn schedule_canary_a_stall_is_in_the_figures_of_all_that_queue_behind_it() {
        // One stall of ten milliseconds: of 1000 messages 100 μs apart, a hundred were due meanwhile. A schedule that
        // sends a message only after its predecessor, and counts from then, would hide all but one.
        let delays = delays(&job(10_000, 0.1), |number| if number == 500 { 10_000_000 } else { 1_000 });
        let late = delays.iter().filter(|&&ns| ns > 50_000.0).count();
        assert!((98..=103).contains(&late), "{late}");
        let times = times(delays).unwrap();
        assert!(times.p50 < 1_500.0 && times.p99 > 8e6 && times.p999 > 9.8e6, "{times:?}");
    }

    #[test]
    fn schedule_that_cannot_be_kept_is_given_up() {
        let delays = delays(&job(1_000_000, 0.01), |_| 1_000_000);
        assert!((19..=21).contains(&delays.len()), "{}", delays.len());
    }

    /// Holds the sent messages until they are received.
    struct Queue(std::collections::VecDeque<Vec<u8>>);

    impl End for Queue {
        fn send(&mut self, message: &[u8]) -> Result<()> {
            self.0.push_back(message.into());
            Ok(())
        }

        fn recv(&mut self, buffer: &mut [u8]) -> Result<usize> {
            let Some(message) = self.0.pop_front() else { return Ok(0) };
            buffer[..message.len()].copy_from_slice(&message);
            Ok(message.len())
        }

        fn finish(&mut self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn messages_are_counted_from_when_they_were_due_and_one_that_is_lost_is_noticed() {
        let job = job(100_000, 0.01);
        let mut queue = Queue(std::collections::VecDeque::new());
        let sent = offer(&mut queue, &job).unwrap();
        let mut lossy = Queue(queue.0.clone());
        let seen = observe(&mut queue, &job).unwrap();
        assert_eq!((sent.messages, seen.messages, seen.total), (1000, 1000, 64_000));
        // They were received one after another when all had been sent, so the first of them had waited longest.
        let times = seen.times.unwrap();
        assert!(times.p50 > 1e6 && times.p50 <= times.p99, "{times:?}");
        lossy.0.remove(500);
        assert!(matches!(observe(&mut lossy, &job), Err(Error::Spoiled(_))));
    }

    #[test]
    fn due_of_any_rate_is_even_and_does_not_drift() {
        assert_eq!((due(0, 3), due(1, 3), due(3, 3)), (0, 333_333_333, 1_000_000_000));
        assert_eq!(due(u64::from(u32::MAX) * 3600, u32::MAX), 3_600_000_000_000);
    }
}
