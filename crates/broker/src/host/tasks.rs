// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tasks that end with whom they are for, and the one that hears a doorbell.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use tokio::{sync::mpsc, task::JoinHandle};

use crate::host::{async_fd, event::Event, eventfd};

/// B-5. A guest that rings more often is heard this often.
const PAUSE: Duration = Duration::from_millis(1);
/// A guest that rings the host more often than this in a second is heard less often for a while.
const LOUD: u64 = 20_000;
const LOUD_PAUSE: Duration = Duration::from_millis(50);

/// Tasks that end with this.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Vec<JoinHandle<()>>);

impl Tasks {
    /// One more; those that are over are forgotten.
    pub fn push(&mut self, task: JoinHandle<()>) {
        self.0.retain(|task| !task.is_finished());
        self.0.push(task);
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

/// Tells whenever a bell rang, at a rate that the broker can bear.
pub(crate) fn listen(
    name: &str,
    process: u64,
    bell: OwnedFd,
    events: &mpsc::Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    let (owner, sender, bell) = (name.to_owned(), events.clone(), async_fd::watch(bell)?);
    Ok(tokio::spawn(async move {
        let (mut since, mut rings) = (Instant::now(), 0u64);
        loop {
            let Ok(mut ready) = bell.readable().await else { return };
            ready.clear_ready();
            if since.elapsed() > Duration::from_secs(1) {
                (since, rings) = (Instant::now(), 0);
            }
            rings = rings.saturating_add(eventfd::drain(&bell));
            let loud = rings > LOUD;
            let what = if loud { Event::Loud } else { Event::Rang };
            if sender.send(what(owner.clone(), process)).await.is_err() {
                return;
            }
            if loud && sender.send(Event::Rang(owner.clone(), process)).await.is_err() {
                return;
            }
            tokio::time::sleep(if loud { LOUD_PAUSE } else { PAUSE }).await;
        }
    }))
}
