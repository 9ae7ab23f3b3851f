// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Schedules when the broker reconciles: at once, in turn, or after a while (B-17).

use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::{event::Event, share::ReconcilePace};

/// Time after which something that could not be done is tried again.
pub(crate) const RETRY: Duration = Duration::from_secs(1);
/// Precision of reminders.
const GRAIN: Duration = Duration::from_millis(1);

/// Reminders of the broker, and the channel for its events.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Decides when the broker reconciles because of what guests and QEMUs say.
    pub pace: ReconcilePace,
    /// Time at which the broker reconciles even if nothing happens.
    reminder: Option<Instant>,
    /// Channel through which the broker receives all events.
    pub events: mpsc::Sender<Event>,
}

impl Schedule {
    pub fn new(events: mpsc::Sender<Event>) -> Self {
        Self { pace: ReconcilePace::default(), reminder: None, events }
    }

    /// Has the broker reconcile again after `wait`. There is one reminder at a time: a step that needs a later one asks
    /// again then.
    pub fn remind_after(&mut self, wait: Duration) {
        let (now, at) = (Instant::now(), Instant::now() + wait);
        if self.reminder.is_some_and(|reminder| now < reminder && reminder <= at + GRAIN) {
            return;
        }
        self.reminder = Some(at);
        self.send_after(wait, Event::Unsettled);
    }

    /// Sends the broker an event after `wait`.
    pub fn send_after(&self, wait: Duration, event: Event) {
        let events = self.events.clone();
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            let _ = events.send(event).await;
        });
    }
}
