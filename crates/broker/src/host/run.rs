// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the daemon from its start to its end.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Duration,
};

use rustix::net::SocketType;
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    task::JoinHandle,
};

use crate::{
    config::Config,
    discard, fd_passing,
    host::{
        async_fd,
        broker::Broker,
        control_socket,
        descriptor_store::DescriptorStore,
        event::Event,
        paths::{control_socket as control_path, device_socket, program_socket},
        tasks,
    },
    sd_notify::notify,
    startup::{self, open_folder, raise_limit},
    xen::{grant_reaper::ReaperThread, names::XenThread},
};

/// Largest number of events that wait for the broker.
const EVENTS_MAX: usize = 1024;

/// Time after which the next QEMU of the same domain is accepted: for each, a device is created, stored and saved.
const GAP: Duration = Duration::from_millis(10);

/// Serves until a signal ends it. A QEMU is asked again after `ask_again` about what it reports by no event.
///
/// # Errors
/// The daemon cannot start, or something that it depends on is gone.
pub fn run(
    config_path: &Path,
    folder: &Path,
    start_store: bool,
    ask_again: Duration,
) -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::read(config_path)?;
    open_folder(folder)?;
    let _lock = startup::lock_soon(&folder.join("lock"))?;
    raise_limit()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(2).build()?;
    runtime.block_on(serve(folder, config, start_store, ask_again))?;
    Ok(())
}

async fn serve(folder: &Path, config: Config, start_store: bool, ask_again: Duration) -> io::Result<()> {
    let (mut end, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut hangup = signal(SignalKind::hangup())?;
    let store = DescriptorStore::find(folder, start_store)?;
    let (events, mut heard) = mpsc::channel(EVENTS_MAX);
    let (host, group) = (config.host.clone(), config.group);
    let mut broker = Broker::begin(folder, config, store, events.clone(), ask_again)?;
    let mut herald = XenThread::default();
    herald.reconcile(broker.config())?;
    let _keep = ReaperThread::begin(folder)?;
    let mut device_sockets = DeviceSockets::default();
    device_sockets.reconcile_sockets(&broker, folder, &events)?;
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    let control = fd_passing::listen(&control_path(folder), SocketType::SEQPACKET, mode, None, group)?;
    let serves = control_socket::serve(async_fd::watch(control)?, host, events.clone());
    let control = tasks::begin_watched(&events, Event::Broken("what serves tools"), serves);
    // Everybody may connect. The kernel tells who a client is, and the configuration who is served.
    let programs = fd_passing::listen(&program_socket(folder), SocketType::SEQPACKET, 0o666, None, None)?;
    let welcomes = welcome(async_fd::watch(programs)?, events.clone());
    let programs = tasks::begin_watched(&events, Event::Broken("what lets programs in"), welcomes);
    tracing::info!("ready in {}", folder.display());
    notify("READY=1");
    loop {
        let event = tokio::select! {
            event = heard.recv() => event,
            _ = hangup.recv() => Some(Event::Reload),
            _ = end.recv() => None,
            _ = interrupt.recv() => None,
        };
        let Some(event) = event else { break };
        let (mut reload, mut has_consequences) = (false, false);
        // Events that arrived meanwhile are handled first, and the broker reconciles once for all of them.
        let (mut next, mut left) = (Some(event), EVENTS_MAX);
        while let Some(event) = next {
            reload |= matches!(event, Event::Reload);
            has_consequences |= event.has_consequences();
            broker.handle_event(event)?;
            next = if left == 0 { None } else { heard.try_recv().ok() };
            left = left.saturating_sub(1);
        }
        if has_consequences {
            broker.reconcile()?;
        } else {
            broker.reconcile_in_turn()?;
        }
        if reload {
            let met = herald.reconcile(broker.config()).and(device_sockets.reconcile_sockets(&broker, folder, &events));
            if let Err(error) = met {
                tracing::warn!("not all of the configuration can be met, read it again later: {error}");
            }
        }
    }
    notify("STOPPING=1");
    control.abort();
    programs.abort();
    let _ = std::fs::remove_file(program_socket(folder));
    device_sockets.close(folder);
    let _ = std::fs::remove_file(control_path(folder));
    broker.end(start_store);
    Ok(())
}

/// Listening sockets of the domains' devices.
#[derive(Default)]
struct DeviceSockets(BTreeMap<String, (Option<u32>, JoinHandle<()>)>);

impl DeviceSockets {
    /// Has one socket for each configured domain. Returns the last error if a socket cannot be created; the others are
    /// there then.
    fn reconcile_sockets(&mut self, broker: &Broker, folder: &Path, events: &mpsc::Sender<Event>) -> io::Result<()> {
        let domains = &broker.config().domains;
        self.0.retain(|name, (user, task)| {
            let stays = domains.get(name).is_some_and(|domain| domain.user == *user);
            if !stays {
                task.abort();
                let _ = std::fs::remove_file(device_socket(folder, name));
            }
            stays
        });
        let mut done = Ok(());
        for (name, domain) in domains {
            if !self.0.contains_key(name) {
                let path = device_socket(folder, name);
                let listener = fd_passing::listen(&path, SocketType::STREAM, 0o600, domain.user, None);
                match listener.and_then(async_fd::watch) {
                    Ok(listener) => {
                        let task = attend(name.clone(), listener, domain.user, events.clone());
                        let task = tasks::begin_watched(events, Event::Broken("what lets a QEMU in"), task);
                        self.0.insert(name.clone(), (domain.user, task));
                    }
                    Err(error) => done = Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
                }
            }
        }
        done
    }

    fn close(self, folder: &Path) {
        for (name, (_, task)) in self.0 {
            task.abort();
            let _ = std::fs::remove_file(device_socket(folder, &name));
        }
    }
}

/// Accepts programs.
async fn welcome(listener: AsyncFd<OwnedFd>, events: mpsc::Sender<Event>) {
    loop {
        let Ok(client) = async_fd::accept(&listener).await else {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            continue;
        };
        if let Ok(user) = fd_passing::user_of(&client)
            && events.send(Event::ProgramConnected(client, user)).await.is_err()
        {
            return;
        }
    }
}

/// Accepts QEMUs that run as the right user.
async fn attend(name: String, listener: AsyncFd<OwnedFd>, user: Option<u32>, events: mpsc::Sender<Event>) {
    loop {
        let Ok(client) = async_fd::accept(&listener).await else {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            continue;
        };
        let own = rustix::process::geteuid().as_raw();
        match fd_passing::user_of(&client) {
            Ok(who) if who == 0 || who == own || Some(who) == user => {
                if events.send(Event::Joined(name.clone(), client)).await.is_err() {
                    return;
                }
                tokio::time::sleep(GAP).await;
            }
            Ok(who) => {
                tracing::warn!(
                    stranger = format!("user {who}"),
                    "{name}: user {who} is not the one that its QEMU runs as: refused"
                );
                discard::end(client.as_fd());
            }
            Err(_) => discard::end(client.as_fd()),
        }
    }
}
