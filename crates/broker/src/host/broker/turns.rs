// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When consequences are drawn: at once, in turn, or after a while (B-17).

use std::{
    io,
    time::{Duration, Instant},
};

use crate::host::{broker::Broker, event::Event};

/// Nobody is reminded more precisely than this.
const GRAIN: Duration = Duration::from_millis(1);

impl Broker {
    /// Draws the consequences of all that was heard.
    ///
    /// # Errors
    /// The holder is gone.
    pub fn reconcile(&mut self) -> io::Result<()> {
        let began = Instant::now();
        self.pace.begin();
        let settled = self.settle_all();
        self.pace.finish(began, Instant::now());
        if self.pace.is_due() {
            // Somebody answered meanwhile.
            self.settle_after(self.pace.rest(Instant::now()));
        }
        self.bear(settled)
    }

    /// B-17. Draws those of what guests and QEMUs said, or has that done once it is their turn.
    ///
    /// # Errors
    /// The holder is gone.
    pub fn reconcile_in_turn(&mut self) -> io::Result<()> {
        if !self.pace.is_due() {
            return Ok(());
        }
        let rest = self.pace.rest(Instant::now());
        if rest.is_zero() {
            return self.reconcile();
        }
        self.settle_after(rest);
        Ok(())
    }

    /// Draws consequences again after a while. One reminder at a time: whoever needs a later one asks again then.
    pub(crate) fn settle_after(&mut self, wait: Duration) {
        let (now, at) = (Instant::now(), Instant::now() + wait);
        if self.reminder.is_some_and(|reminder| now < reminder && reminder <= at + GRAIN) {
            return;
        }
        self.reminder = Some(at);
        self.tell_after(wait, Event::Unsettled);
    }

    /// Has the broker hear of something after a while.
    pub(crate) fn tell_after(&self, wait: Duration, event: Event) {
        let events = self.events.clone();
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            let _ = events.send(event).await;
        });
    }
}
