// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How often something may be had.

use std::time::{Duration, Instant};

/// How often a link gets new memory: a guest that begins lives without end makes its peers plug regions as often (B-17).
#[derive(Debug)]
pub(crate) struct Pace {
    left: u32,
    since: Instant,
}

/// New memories that a link may have at once, and how long until it may have one more.
const BURST: u32 = 6;
const STEP: Duration = Duration::from_secs(2);

impl Default for Pace {
    fn default() -> Self {
        Self { left: BURST, since: Instant::now() }
    }
}

impl Pace {
    /// Takes one, or says how long to wait.
    pub(crate) fn take_permit(&mut self, now: Instant) -> Result<(), Duration> {
        let passed = now.saturating_duration_since(self.since);
        let more = u32::try_from(passed.as_millis() / STEP.as_millis()).unwrap_or(u32::MAX);
        if more != 0 {
            (self.left, self.since) =
                (self.left.saturating_add(more).min(BURST), self.since + STEP * more.min(1 << 16));
        }
        if self.left == BURST {
            self.since = now;
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err((self.since + STEP).saturating_duration_since(now)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b17_link_gets_new_memory_a_few_times_at_once_and_then_now_and_then() {
        let mut pace = Pace::default();
        let now = Instant::now();
        let at_once = (0..100).filter(|_| pace.take_permit(now).is_ok()).count();
        assert_eq!(at_once, 6);
        let wait = pace.take_permit(now).unwrap_err();
        assert!(!wait.is_zero() && wait <= STEP, "{wait:?}");
        assert!(pace.take_permit(now + wait).is_ok() && pace.take_permit(now + wait).is_err());
        assert_eq!(pace.take_permit(now + wait + STEP / 2), Err(STEP / 2), "whoever asks early waits no longer for it");
        let steps = now + wait + 3 * STEP;
        assert_eq!((0..100).filter(|_| pace.take_permit(steps).is_ok()).count(), 3);
        assert_eq!(pace.take_permit(steps), Err(STEP), "each step counts once");
        let later = now + Duration::from_secs(3600);
        assert_eq!(
            (0..100).filter(|_| pace.take_permit(later).is_ok()).count(),
            6,
            "what was not used is not saved up"
        );
    }
}
