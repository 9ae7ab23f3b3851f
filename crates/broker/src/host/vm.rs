// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Starts the tasks that watch over a QEMU and its guest's notifications, and report to the broker.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, watch};

use crate::{
    config::Config,
    host::{
        accounts::relay::STORM_PAUSE,
        event::Event,
        guard::Process,
        guest::Guest,
        ivshmem::{Device, Message, Outbound},
        paths::{device_socket, qmp_socket},
        qemu::{self, News, Wanted},
        state::Machine,
        tasks::{self, Tasks, listen},
    },
};

/// A connected QEMU, beyond what the broker's state has of it.
#[derive(Debug)]
pub(crate) struct Vm {
    pub device: Device,
    pub outbound: Outbound,
    pub guest: Guest,
    /// Whether the guest's processors run; none if QEMU has not reported yet.
    pub running: Option<bool>,
    /// Whether the QEMU process itself is stopped, so that it reports nothing.
    pub is_stopped: bool,
    /// Its regions and their places, and the number of free slots.
    pub has: Option<(BTreeMap<String, String>, u16)>,
    pub trouble: Option<String>,
    /// The QEMU process, once QEMU has reported on it.
    pub process: Option<Process>,
    pub wanted: watch::Sender<Wanted>,
    /// User that may listen at its control socket, besides root and the broker's own user.
    pub user: watch::Sender<Option<u32>>,
    /// Peers that may not notify it for now (B-8).
    pub stormed_by: BTreeSet<String>,
    /// Time at which it last notified the host more often than makes sense.
    pub loud: Option<Instant>,
    /// Time at which its guest last said Hello in another boot than before.
    pub booted: Option<Instant>,
    pub tasks: Tasks,
}

impl Vm {
    /// Sends what waits for the QEMU, now and once it reads again.
    pub fn flush_messages(&mut self, name: &str, machine: &mut Machine, events: &mpsc::Sender<Event>) {
        match self.outbound.flush(&self.device.socket) {
            Ok(true) => {
                machine.greeted = true;
                machine.doorbells.values_mut().for_each(|doorbell| doorbell.given = true);
            }
            Ok(false) => {
                let (name, process) = (name.to_owned(), machine.process);
                let (events, socket) = (events.clone(), self.device.socket.try_clone());
                self.tasks.push(tokio::spawn(async move {
                    let Ok(socket) = socket.and_then(crate::host::async_fd::watch) else { return };
                    let _ = socket.writable().await;
                    let _ = events.send(Event::Room(name, process)).await;
                }));
            }
            // The task that reads from the socket reports that QEMU is gone.
            Err(_) => {}
        }
    }

    /// Sends the QEMU a message after those that wait for it.
    pub fn send_message(&mut self, message: Message) {
        if !self.outbound.push(vec![message]) {
            // The messages stay: a QEMU that goes on without them would have a wrong picture of its peers.
            self.trouble = Some("its QEMU does not read from the doorbell socket".into());
        }
    }

    /// Logs that the guest notifies the host without end. The guest keeps that doorbell: without it, nobody would learn
    /// of its links.
    pub fn report_loud(&mut self, name: &str) {
        let now = Instant::now();
        if self.loud.replace(now).is_none_or(|last| now.duration_since(last) > STORM_PAUSE) {
            tracing::warn!(stranger = name, "{name}: it rings the host without end, and is heard less often");
        }
    }
}

/// Starts to watch over a QEMU.
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
    let guest = Guest::begin(crate::config::checked_name(name), &device.boxes)?;
    // A guest that is there already learns that the broker started anew.
    device.notify();
    let (wanted, watched) = watch::channel(Wanted::default());
    let mut tasks = Tasks::default();

    let loss = || Event::Faulty(name.to_owned(), process);
    let (owner, sender, socket) =
        (name.to_owned(), events.clone(), crate::host::async_fd::watch(device.socket.try_clone()?)?);
    tasks.push(tasks::begin_watched(events, loss(), async move {
        // QEMU has nothing to say here: whatever it sends ends its connection.
        let _ = socket.readable().await;
        let _ = sender.send(Event::Left(owner, process)).await;
    }));

    tasks.push(listen(name, process, device.host.try_clone()?, events)?);

    let (owner, sender) = (name.to_owned(), events.clone());
    let (user, users) = watch::channel(config.domains[name].user);
    let machine_type = config.domains[name].machine;
    let (path, socket) = (qmp_socket(folder, config, name), device_socket(folder, name));
    let pid = crate::fd_passing::process_of(&device.socket);
    let target = qemu::Target { path, device: socket, process: pid, machine_type, user: users, ask_again };
    let supervised = qemu::supervise(target, watched, async move |news| {
        let _ = sender.send(Event::Qemu(owner.clone(), process, news)).await;
    });
    tasks.push(tasks::begin_watched(events, loss(), supervised));

    if let Some(pid) = pid {
        let (owner, sender) = (name.to_owned(), events.clone());
        let watched = qemu::watch_process(pid, async move |is_stopped| {
            let _ = sender.send(Event::Qemu(owner.clone(), process, News::Stopped(is_stopped))).await;
        });
        tasks.push(tasks::begin_watched(events, loss(), watched));
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
