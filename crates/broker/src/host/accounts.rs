// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accounts of the host: domains whose programs run on this kernel and not in a machine.
//!
//! What a guest's broker does for the programs of its machine, a thread does for those of an account, and it is the same
//! code ([`endpoint`](crate::endpoint)): only its devices are others ([`devices`]). It hears from this broker what a guest would,
//! through boxes in memory as a device has them; a link's rings go through [`relay`].

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

use crate::{
    discard,
    endpoint::{
        broker::{Broker, Settings},
        program::ProgramSocket,
    },
    fd_passing,
    host::{
        event::Event,
        eventfd::{event, notify_event},
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
    /// The boxes.
    pub boxes: Mapped,
    /// What its links are made of.
    pub lines: RelayedLinks,
    /// Machines that may not notify it for now, because they did so without end (B-8).
    pub stormed_by: BTreeSet<String>,
    /// Connections that an earlier broker left, as far as they were not taken up.
    pub kept: StoredConnections,
    rings: OwnedFd,
    program_socket: OwnedFd,
    stop: OwnedFd,
    /// It is not served any more, by no broker.
    dismissed: Arc<AtomicBool>,
    _tasks: Tasks,
}

impl Local {
    /// Begins to serve the programs of an account; `window` is what each connection gets, and `kept` those that it has.
    ///
    /// # Errors
    /// Descriptors, memory or threads are used up.
    pub fn start(name: &Name, window: u64, kept: StoredConnections, events: &mpsc::Sender<Event>) -> io::Result<Self> {
        let memory = memory::create("tombolo-account", DEVICE_LEN)?;
        let boxes = Mapped::new(&memory)?;
        let (rings, heard, stop) = (event()?, event()?, event()?);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (program_socket, inside) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let (lines, mut tasks) = (RelayedLinks::default(), Tasks::default());
        tasks.push(listen(name.as_str(), 0, heard.try_clone()?, events)?);
        let (account, teller) = (name.as_str().to_owned(), events.clone());
        let storms = Arc::new(move |link| drop(teller.blocking_send(Event::Stormed(account.clone(), link))));
        let lane = Lane::named(&format!("account/{name}"));
        let (copy, dismissed) = (rings.try_clone()?, Arc::new(AtomicBool::new(false)));
        let devices = HostDevices::new(memory, heard, copy, Arc::clone(&lines), kept.clone(), storms, lane);
        let settings = Settings { boot: guest::boot(), window };
        let guest = Guest::begin(name.clone(), &boxes)?;
        let mut broker = Broker::begin(settings, devices, ProgramSocket::Passed(inside))?.with_addresses();
        let (what, ended) = (format!("programs of {name} are not served"), stop.try_clone()?);
        let (is_dismissed, left) = (Arc::clone(&dismissed), kept.clone());
        std::thread::Builder::new().name("tombolo-account".into()).spawn(move || {
            let is_over = |rest| panics::is_stopped_within(&ended, rest);
            panics::work_until_done(&what, is_over, || broker.serve(ended.as_fd()));
            // ORDER Acquire: with the release of who dismissed it.
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
            rings,
            program_socket,
            stop,
            dismissed,
            _tasks: tasks,
        })
    }

    /// Serves its programs no more, and leaves nothing of them to a later broker: their connections end.
    pub fn dismiss(self) {
        // ORDER Release: with the acquire of its thread, which looks once it is told to end.
        self.dismissed.store(true, Ordering::Release);
    }

    /// Rings the account's broker.
    pub fn notify(&self) {
        notify_event(&self.rings);
    }

    /// Lets a program in; one for whom there is no room is closed.
    pub fn admit(&self, program: &OwnedFd) {
        if !fd_passing::send(&self.program_socket, b"p", &[program.as_fd()]).unwrap_or(false) {
            discard::end(program.as_fd());
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        notify_event(&self.stop);
    }
}
