// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs tasks that end with their owner, among them the one that waits at a doorbell.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use tokio::{
    runtime::Handle,
    sync::mpsc::{self, error::TrySendError},
    task::JoinHandle,
};

use crate::host::{async_fd, event::Event};

/// Shortest interval at which a guest's notifications are reported, however often it notifies (B-5).
const PAUSE: Duration = Duration::from_millis(1);
/// Number of notifications of the host in one second above which they are reported less often for a while.
const LOUD: u64 = 20_000;
const LOUD_PAUSE: Duration = Duration::from_millis(50);

/// Tasks that are aborted when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Tasks(Vec<JoinHandle<()>>);

impl Tasks {
    /// Adds a task, and forgets those that are over.
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

/// Starts a task on which others depend. If it panics, the broker receives `loss`, because nobody does its work any
/// more.
pub(crate) fn begin_watched(
    events: &mpsc::Sender<Event>,
    loss: Event,
    work: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    let alarm = Alarm { events: events.clone(), loss: Some(loss) };
    tokio::spawn(async move {
        let _alarm = alarm;
        work.await;
    })
}

/// Reports a loss if it is dropped because of a panic.
struct Alarm {
    events: mpsc::Sender<Event>,
    loss: Option<Event>,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        let Some(loss) = self.loss.take().filter(|_| std::thread::panicking()) else { return };
        if let Err(TrySendError::Full(loss)) = self.events.try_send(loss)
            && let Ok(runtime) = Handle::try_current()
        {
            let events = self.events.clone();
            runtime.spawn(async move { events.send(loss).await });
        }
    }
}

/// Starts a task that reports notifications through a doorbell, at a rate that the broker can bear.
pub(crate) fn listen(
    name: &str,
    process: u64,
    doorbell: OwnedFd,
    events: &mpsc::Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    let (owner, sender, doorbell) = (name.to_owned(), events.clone(), async_fd::watch(doorbell)?);
    let loss = Event::Faulty(owner.clone(), process);
    Ok(begin_watched(events, loss, async move {
        let (mut since, mut count) = (Instant::now(), 0u64);
        loop {
            let Ok(mut ready) = doorbell.readable().await else { return };
            ready.clear_ready();
            if since.elapsed() > Duration::from_secs(1) {
                (since, count) = (Instant::now(), 0);
            }
            count = count.saturating_add(tombolo_os::event::drain(&doorbell));
            let loud = count > LOUD;
            let what = if loud { Event::Loud } else { Event::Notified };
            if sender.send(what(owner.clone(), process)).await.is_err() {
                return;
            }
            if loud && sender.send(Event::Notified(owner.clone(), process)).await.is_err() {
                return;
            }
            tokio::time::sleep(if loud { LOUD_PAUSE } else { PAUSE }).await;
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b16_task_that_panics_is_missed_though_many_events_wait_and_one_that_ends_is_not() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (events, mut heard) = mpsc::channel(1);
            events.send(Event::Unsettled).await.unwrap();
            begin_watched(&events, Event::Broken("what ends"), async {}).await.unwrap();
            let ended = begin_watched(&events, Event::Broken("what is ended"), std::future::pending());
            ended.abort();
            assert!(ended.await.unwrap_err().is_cancelled());
            for nth in 0..2 {
                let loss = Event::Broken("what panics");
                assert!(
                    begin_watched(&events, loss, async { panic!("as it is to") }).await.unwrap_err().is_panic(),
                    "{nth}"
                );
            }
            assert!(matches!(heard.recv().await, Some(Event::Unsettled)));
            for nth in 0..2 {
                let said = tokio::time::timeout(Duration::from_secs(20), heard.recv()).await;
                assert!(matches!(said, Ok(Some(Event::Broken("what panics")))), "{nth}");
            }
            assert!(heard.try_recv().is_err());
        });
    }
}
