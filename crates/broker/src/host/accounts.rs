// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accounts of the host: domains whose programs run on this kernel and not in a machine.
//!
//! A thread does for the programs of an account what a guest's broker does for those of its machine. The thread runs
//! the same code ([`endpoint`](crate::endpoint)) with other devices ([`devices`]). It receives from this broker what a
//! guest would, through outboxes in memory like those of a device. A link's notifications go through [`relay`].

pub mod devices;
pub mod relay;
pub mod stored;

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::sync::mpsc;
use tombolo_control::{DEVICE_LEN, Name};
use tombolo_os::event::{eventfd, raise};

use crate::{
    discard,
    endpoint::{
        broker::{Broker, Settings},
        program::ProgramSocket,
    },
    fd_passing,
    host::{
        event::Event,
        guest::{self, Guest},
        mapped::Mapped,
        memory,
        notifier::Lane,
        tasks::{Tasks, listen},
    },
    panics,
};
use devices::{HostDevices, RelayedLinks};
use stored::StoredConnections;

/// An account whose programs are served.
#[derive(Debug)]
pub(crate) struct Local {
    pub guest: Guest,
    /// Outboxes shared with the account's broker.
    pub boxes: Mapped,
    /// Memory and eventfds of the account's links.
    pub lines: RelayedLinks,
    /// Machines that may not notify the account for now, because they did so without end (B-8).
    pub stormed_by: BTreeSet<String>,
    /// Connections that an earlier broker left and that are not taken up yet.
    pub kept: StoredConnections,
    /// Eventfd that notifies the account's broker.
    outgoing: OwnedFd,
    program_socket: OwnedFd,
    stop: OwnedFd,
    /// Whether no broker serves the account any more.
    dismissed: Arc<AtomicBool>,
    _tasks: Tasks,
}

impl Local {
    /// Begins to serve the programs of an account. `window` is the size of each connection's window, and `kept` are the
    /// connections that there are.
    ///
    /// # Errors
    /// No descriptor, memory or thread is available.
    pub fn start(name: &Name, window: u64, kept: StoredConnections, events: &mpsc::Sender<Event>) -> io::Result<Self> {
        let memory = memory::create("tombolo-account", DEVICE_LEN)?;
        let boxes = Mapped::new(&memory)?;
        let (outgoing, incoming, stop) = (eventfd(0)?, eventfd(0)?, eventfd(0)?);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (program_socket, inside) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let (lines, mut tasks) = (RelayedLinks::default(), Tasks::default());
        tasks.push(listen(name.as_str(), 0, incoming.try_clone()?, events)?);
        let (account, teller) = (name.as_str().to_owned(), events.clone());
        let storms = Arc::new(move |link| drop(teller.blocking_send(Event::Stormed(account.clone(), link))));
        let lane = Lane::named(&format!("account/{name}"));
        let (copy, dismissed) = (outgoing.try_clone()?, Arc::new(AtomicBool::new(false)));
        let devices = HostDevices::new(memory, incoming, copy, Arc::clone(&lines), kept.clone(), storms, lane);
        let settings = Settings { boot: guest::boot(), window };
        let guest = Guest::begin(name.clone(), &boxes)?;
        let mut broker = Broker::begin(settings, devices, ProgramSocket::Passed(inside))?.with_addresses();
        let (what, ended) = (format!("programs of {name} are not served"), stop.try_clone()?);
        let (is_dismissed, left) = (Arc::clone(&dismissed), kept.clone());
        std::thread::Builder::new().name("tombolo-account".into()).spawn(move || {
            let is_over = |rest| panics::is_stopped_within(&ended, rest);
            panics::work_until_done(&what, is_over, || broker.serve(ended.as_fd()));
            // ORDER Acquire: with the release of `dismiss`.
            if is_dismissed.load(Ordering::Acquire) {
                broker.dismiss();
                left.end_all();
            }
        })?;
        Ok(Self {
            guest,
            boxes,
            lines,
            stormed_by: BTreeSet::new(),
            kept,
            outgoing,
            program_socket,
            stop,
            dismissed,
            _tasks: tasks,
        })
    }

    /// Stops serving the account's programs. Leaves nothing of them to a later broker: their connections end.
    pub fn dismiss(self) {
        // ORDER Release: with the acquire of the account's thread, which reads it once it is told to end.
        self.dismissed.store(true, Ordering::Release);
    }

    /// Notifies the account's broker.
    pub fn notify(&self) {
        raise(&self.outgoing);
    }

    /// Admits a program. Closes the connection of one for which there is no room.
    pub fn admit(&self, program: &OwnedFd) {
        if !fd_passing::send(&self.program_socket, b"p", &[program.as_fd()]).unwrap_or(false) {
            discard::end(program.as_fd());
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        raise(&self.stop);
    }
}
