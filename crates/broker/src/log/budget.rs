// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How many lines a log gets: strangers cause most of them, and each of these has a share of its own.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Lines at once, and how long until there may be one more: of the broker itself, and of each stranger.
const OWN: Rate = Rate { burst: 200, step: Duration::from_millis(500) };
const STRANGER: Rate = Rate { burst: 20, step: Duration::from_secs(2) };
/// Most strangers that are told apart. Others have a share between them.
const STRANGERS: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    step: Duration,
}

/// What may still be written.
#[derive(Debug)]
pub(crate) struct LineBudget {
    own: Pace,
    strangers: BTreeMap<String, Pace>,
    others: Pace,
}

impl LineBudget {
    pub(crate) fn new(now: Instant) -> Self {
        Self { own: Pace::new(OWN, now), strangers: BTreeMap::new(), others: Pace::new(STRANGER, now) }
    }

    /// Whether one more line may be written, of the broker itself or of a stranger, and then how many were left out before it.
    pub(crate) fn take_permit(&mut self, whose: Option<&str>, now: Instant) -> Option<u64> {
        let Some(whose) = whose else { return self.own.take_permit(now) };
        if let Some(pace) = self.strangers.get_mut(whose) {
            return pace.take_permit(now);
        }
        if self.strangers.len() >= STRANGERS {
            // Who may write as much as a new one is forgotten for one.
            self.strangers.retain(|_, pace| !pace.is_full(now));
        }
        if self.strangers.len() >= STRANGERS {
            return self.others.take_permit(now);
        }
        self.strangers.entry(whose.into()).or_insert_with(|| Pace::new(STRANGER, now)).take_permit(now)
    }
}

#[derive(Debug)]
struct Pace {
    rate: Rate,
    left: u32,
    since: Instant,
    left_out: u64,
}

impl Pace {
    fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, left: rate.burst, since: now, left_out: 0 }
    }

    fn fill(&mut self, now: Instant) {
        let Rate { burst, step } = self.rate;
        let steps = now.saturating_duration_since(self.since).as_millis() / step.as_millis();
        let steps = u32::try_from(steps).unwrap_or(u32::MAX).min(burst);
        if steps != 0 {
            self.left = (self.left + steps).min(burst);
            self.since = if self.left == burst { now } else { self.since + step * steps };
        }
    }

    fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.left == self.rate.burst
    }

    fn take_permit(&mut self, now: Instant) -> Option<u64> {
        self.fill(now);
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return Some(std::mem::take(&mut self.left_out));
        }
        self.left_out = self.left_out.saturating_add(1);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_that_is_full_gets_so_many_lines_in_a_time_and_says_what_it_left_out() {
        let now = Instant::now();
        let mut lines = LineBudget::new(now);
        assert_eq!((0..1000).filter(|_| lines.take_permit(None, now).is_some()).count(), 200);
        assert_eq!(lines.take_permit(None, now + OWN.step), Some(800));
        assert_eq!(lines.take_permit(None, now + OWN.step), None);
        let later = now + Duration::from_secs(3600);
        assert_eq!(lines.take_permit(None, later), Some(1));
        assert_eq!((0..1000).filter(|_| lines.take_permit(None, later).is_some()).count(), 199);
    }

    #[test]
    fn stranger_that_fills_the_log_takes_no_line_of_anybody_else() {
        let now = Instant::now();
        let mut lines = LineBudget::new(now);
        assert_eq!((0..1000).filter(|_| lines.take_permit(Some("user 7"), now).is_some()).count(), 20);
        assert_eq!((lines.take_permit(Some("a"), now), lines.take_permit(None, now)), (Some(0), Some(0)));
        assert_eq!(lines.take_permit(Some("user 7"), now + STRANGER.step), Some(980));
    }

    #[test]
    fn strangers_without_number_fill_a_bounded_table_and_what_they_share() {
        let now = Instant::now();
        let mut lines = LineBudget::new(now);
        let written =
            (0..10_000).filter(|user| lines.take_permit(Some(&format!("user {user}")), now).is_some()).count();
        assert_eq!((lines.strangers.len(), written), (STRANGERS, STRANGERS + 20));
        assert_eq!(lines.take_permit(None, now), Some(0));
        // Those that were quiet for long make room.
        let later = now + Duration::from_secs(3600);
        assert_eq!(lines.take_permit(Some("another"), later), Some(0));
        assert_eq!(lines.strangers.len(), 1);
    }
}
