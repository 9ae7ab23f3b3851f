// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accounts of the host: domains whose programs run on this kernel and not in a machine.
//!
//! What a guest's broker does for the programs of its machine, a thread does for those of an account, and it is the same
//! code (`tombolo-broker-guest`): only its devices are others ([`devices`]). It hears from this broker what a guest would,
//! through boxes in memory as a device has them; a link's rings go through [`relay`].

pub mod devices;
pub mod kept;
pub mod relay;

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::sync::mpsc;
use tombolo_broker_guest::{
    broker::{Broker, Settings},
    discard,
    program::ProgramSocket,
};
use tombolo_control::{DEVICE_LEN, Name};

use crate::{
    broker::Event,
    guest::{self, Guest, GuestRequest},
    lane::Lane,
    mapped::Mapped,
    memory, passing,
    watch::{Tasks, listen},
};
use devices::{HostDevices, RelayedLinks};
use kept::{Key, StoredConnections};
use relay::{event, notify_event};

/// An account whose programs are served.
#[derive(Debug)]
pub(crate) struct Local {
    pub guest: Guest,
    /// The boxes.
    pub boxes: Mapped,
    /// What its links are made of.
    pub lines: RelayedLinks,
    /// B-8. Machines that may not ring it for now.
    pub stormed_by: BTreeSet<String>,
    rings: OwnedFd,
    door: OwnedFd,
    stop: OwnedFd,
    _tasks: Tasks,
}

impl Local {
    /// Begins to serve the programs of an account; `slice` is what each call gets, and `kept` those that it has.
    ///
    /// # Errors
    /// Descriptors, memory or threads are used up.
    pub fn start(name: &Name, slice: u64, kept: StoredConnections, events: &mpsc::Sender<Event>) -> io::Result<Self> {
        let memory = memory::create("tombolo-account", DEVICE_LEN)?;
        let boxes = Mapped::new(&memory)?;
        let (rings, heard, stop) = (event()?, event()?, event()?);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (door, inside) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let (lines, mut tasks) = (RelayedLinks::default(), Tasks::default());
        tasks.push(listen(name.as_str(), 0, heard.try_clone()?, events)?);
        let (account, teller) = (name.as_str().to_owned(), events.clone());
        let storms = Arc::new(move |link| drop(teller.blocking_send(Event::Stormed(account.clone(), link))));
        let lane = Lane::named(&format!("account/{name}"));
        let devices = HostDevices::new(memory, heard, rings.try_clone()?, Arc::clone(&lines), kept, storms, lane);
        let settings = Settings { boot: guest::boot(), slice };
        let guest = Guest::begin(name.clone(), &boxes)?;
        let broker = Broker::begin(settings, devices, ProgramSocket::Passed(inside))?;
        let (account, ended) = (name.clone(), stop.try_clone()?);
        std::thread::Builder::new().name("tombolo-account".into()).spawn(move || {
            if let Err(error) = broker.run(ended.as_fd()) {
                crate::log(&format!("programs of {account} are not served any more: {error}"));
            }
        })?;
        Ok(Self { guest, boxes, lines, stormed_by: BTreeSet::new(), rings, door, stop, _tasks: tasks })
    }

    /// Rings the account's broker.
    pub fn notify(&self) {
        notify_event(&self.rings);
    }

    /// Lets a program in; one for whom there is no room is closed.
    pub fn admit(&self, program: &OwnedFd) {
        if !passing::send(&self.door, b"p", &[program.as_fd()]).unwrap_or(false) {
            discard::end(program.as_fd());
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        notify_event(&self.stop);
    }
}

impl crate::broker::Broker {
    /// Serves the accounts that are configured, and no others.
    pub(crate) fn settle_accounts(&mut self) -> io::Result<()> {
        let gone = self.locals.extract_if(.., |name, _| !self.config.is_local(name));
        for (name, _) in gone.collect::<Vec<_>>() {
            // Nobody would say that its programs let go. What they map is theirs.
            self.book.quarantine.iter_mut().for_each(|old| _ = old.held_by.remove(&name));
        }
        for name in self.config.accounts.keys().map(String::as_str).chain([self.config.host.as_str()]) {
            if !self.locals.contains_key(name) {
                let mine = |key: &Key| self.book.links.get(&key.0).is_some_and(|link| link.side(name).is_some());
                let kept = StoredConnections::new(
                    Arc::clone(&self.holder),
                    self.calls.extract_if(.., |key, _| mine(key)).collect(),
                );
                let local = Local::start(&crate::broker::name(name), self.config.slice, kept, &self.events)?;
                self.locals.insert(name.into(), local);
            }
        }
        Ok(())
    }

    /// The same as [`converse`](Self::converse) with the broker of an account. It is this process, so it is believed.
    pub(crate) fn converse_with_account(&mut self, name: &str, limit: usize) -> bool {
        let Some(local) = self.locals.get_mut(name) else { return false };
        let heard = match local.guest.turn(&local.boxes, &self.config.host, limit) {
            Ok((heard, ring)) => {
                if ring {
                    local.notify();
                }
                heard
            }
            Err(error) => {
                crate::log_of(name, &format!("{name}: its boxes cannot be reached: {error}"));
                return false;
            }
        };
        let any = !heard.is_empty();
        for heard in heard {
            match heard {
                GuestRequest::Storm(link) => self.storm(name, link),
                GuestRequest::Released(link, generation) => self.released(name, link, generation),
                GuestRequest::Hello(_) => {}
            }
        }
        any
    }

    /// B-20. An administrator sees what the broker of an account tells.
    pub(crate) fn entered(&self, client: OwnedFd, account: &Name) {
        match self.locals.get(account.as_str()) {
            Some(local) => local.admit(&client),
            None => {
                let why = format!("{account} is no account of this host");
                crate::socket::turn_away(client, tombolo_control::code::NOT_FOUND, why);
            }
        }
    }

    /// B-15. Whoever comes in is passed on to the broker of its account.
    pub(crate) fn knocked(&self, program: OwnedFd, user: u32) {
        match self.config.account_of(user, rustix::process::geteuid().as_raw()).and_then(|name| self.locals.get(name)) {
            Some(local) => local.admit(&program),
            None => {
                let path = self.config_path.display();
                let why = format!("user {user} is no domain: {path} needs an [account.NAME] with user = {user}");
                crate::socket::turn_away(program, tombolo_control::code::DENIED, why);
            }
        }
    }
}
