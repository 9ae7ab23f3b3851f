// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What watches over a QEMU, and over whoever rings: tasks that tell the broker.

use std::{
    collections::BTreeSet,
    io,
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

use crate::{
    broker::{Event, Vm, qmp_socket},
    config::Config,
    guest::Guest,
    ivshmem::{Device, Outbound},
    local::relay,
    machine::{self, News, Wanted},
    state::Machine,
};

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

/// Begins to watch over a QEMU.
pub(crate) fn start(
    name: &str,
    machine: &Machine,
    mut device: Device,
    config: &Config,
    folder: &Path,
    events: &mpsc::Sender<Event>,
    ask_again: Duration,
) -> io::Result<Vm> {
    let process = machine.process;
    let guest = Guest::begin(crate::broker::name(name), &device.boxes)?;
    // A guest that is there already learns that the broker began anew.
    device.notify();
    let (wanted, watched) = watch::channel(Wanted::default());
    let mut tasks = Tasks::default();

    let (owner, sender, socket) = (name.to_owned(), events.clone(), crate::socket::watch(device.socket.try_clone()?)?);
    tasks.push(tokio::spawn(async move {
        // QEMU has nothing to say: whatever comes ends it.
        let _ = socket.readable().await;
        let _ = sender.send(Event::Left(owner, process)).await;
    }));

    tasks.push(listen(name, process, device.host.try_clone()?, events)?);

    let (owner, sender) = (name.to_owned(), events.clone());
    let (user, users) = watch::channel(config.domains[name].user);
    let board = config.domains[name].machine;
    let target = machine::Target { path: qmp_socket(folder, config, name), board, user: users, ask_again };
    tasks.push(tokio::spawn(machine::supervise(target, watched, async move |news| {
        let _ = sender.send(Event::Told(owner.clone(), process, news)).await;
    })));

    if let Some(pid) = crate::passing::process_of(&device.socket) {
        let (owner, sender) = (name.to_owned(), events.clone());
        tasks.push(tokio::spawn(machine::watch_process(pid, async move |is_stopped| {
            let _ = sender.send(Event::Told(owner.clone(), process, News::Stopped(is_stopped))).await;
        })));
    }

    let (running, is_stopped, has, trouble, stormed_by, loud, booted) =
        (None, false, None, None, BTreeSet::new(), None, None);
    let outbound = Outbound::default();
    Ok(Vm {
        device,
        outbound,
        guest,
        running,
        is_stopped,
        has,
        process: None,
        trouble,
        wanted,
        user,
        stormed_by,
        loud,
        booted,
        tasks,
    })
}

/// Tells whenever a bell rang, at a rate that the broker can bear.
pub(crate) fn listen(
    name: &str,
    process: u64,
    bell: OwnedFd,
    events: &mpsc::Sender<Event>,
) -> io::Result<JoinHandle<()>> {
    let (owner, sender, bell) = (name.to_owned(), events.clone(), crate::socket::watch(bell)?);
    Ok(tokio::spawn(async move {
        let (mut since, mut rings) = (Instant::now(), 0u64);
        loop {
            let Ok(mut ready) = bell.readable().await else { return };
            ready.clear_ready();
            if since.elapsed() > Duration::from_secs(1) {
                (since, rings) = (Instant::now(), 0);
            }
            rings = rings.saturating_add(relay::drain(&bell));
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
