// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When consequences are drawn: at once, in turn, or after a while (B-17).

use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::{event::Event, share::ReconcilePace};

/// How long something that could not be done waits before it is tried again.
pub(crate) const RETRY: Duration = Duration::from_secs(1);
/// Nobody is reminded more precisely than this.
const GRAIN: Duration = Duration::from_millis(1);

/// What the broker is reminded of, and by which events.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// When consequences are drawn of what guests and QEMUs say.
    pub pace: ReconcilePace,
    /// When they are drawn again though nothing happens.
    reminder: Option<Instant>,
    /// Where the broker hears of everything.
    pub events: mpsc::Sender<Event>,
}

impl Schedule {
    pub fn new(events: mpsc::Sender<Event>) -> Self {
        Self { pace: ReconcilePace::default(), reminder: None, events }
    }

    /// Has consequences drawn again after a while. One reminder at a time: whoever needs a later one asks again then.
    pub fn remind_after(&mut self, wait: Duration) {
        let (now, at) = (Instant::now(), Instant::now() + wait);
        if self.reminder.is_some_and(|reminder| now < reminder && reminder <= at + GRAIN) {
            return;
        }
        self.reminder = Some(at);
        self.send_after(wait, Event::Unsettled);
    }

    /// Sends the broker an event after a while.
    pub fn send_after(&self, wait: Duration, event: Event) {
        let events = self.events.clone();
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            let _ = events.send(event).await;
        });
    }
}
