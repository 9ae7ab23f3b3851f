// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Removes the doorbell device of a running QEMU before it migrates, and plugs one where it arrives (B-26, B-27).
//!
//! A QEMU that emulates interrupts for a doorbell leaves something behind when it removes the doorbell. Up to the
//! newest version that was examined (of 2026), it goes on polling the numbers of the eventfds that it has closed. Its
//! main loop never rests again. The first readable descriptor that gets such a number ends QEMU, because the device to
//! be notified is gone. So each of these numbers is given to an eventfd that nobody ever writes.

use std::{collections::BTreeSet, os::fd::AsFd, path::PathBuf};

use rustix::event::EventfdFlags;
use serde_json::{Value, json};
use tokio::{sync::watch, time::sleep};

use super::{Error, News, Session};
use crate::{config::MachineType, host::qmp::Qmp};

/// QEMU's name for the type of a doorbell device.
const TYPE: &str = "ivshmem-doorbell";
/// Name of a doorbell that is plugged at run time, and of its chardev.
const NAME: &str = "tombolo";
/// Name of the object that marks a QEMU, for as long as it lives, as made ready to migrate.
const LEFT: &str = "tombolo-left";
/// Name of the object that marks a QEMU that polls no closed number any more.
const FILLED: &str = "tombolo-filled";
/// Most descriptors that are passed to fill numbers, however many QEMU is known to have closed.
const FILLERS_MAX: usize = 256;
/// Number of descriptors that are passed if it is unknown which numbers were closed.
const FILLERS_BLIND: usize = 64;
/// Interval at which the broker looks for a QEMU without a doorbell.
const LOOK: std::time::Duration = std::time::Duration::from_millis(500);

/// Progress of a doorbell's removal (B-26).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Doorbell {
    /// No doorbell is left.
    Gone,
    /// The guest has yet to release it.
    Going,
    /// QEMU refuses to remove it.
    Stays,
}

/// State of a QEMU that has no connection with the broker, as its control socket shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Alone {
    /// No QEMU is there, or nothing is to be done.
    Unseen,
    /// QEMU was made ready to migrate, and may or may not get devices again (B-26).
    Left {
        /// Whether nothing is left in QEMU that a new device could wake.
        is_filled: bool,
    },
    /// QEMU got a doorbell, which connects to the broker (B-27).
    Plugged,
    /// QEMU cannot get a doorbell, for this reason (B-27).
    Trouble(String),
}

/// Where to look for such a QEMU, and for what purpose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Watched {
    /// Whether QEMU is connected, so that other tasks look after it.
    pub is_served: bool,
    /// Whether QEMU is to get its devices again, though it was made ready to migrate (B-26).
    pub is_restored: bool,
    /// Path of its control socket.
    pub path: PathBuf,
    /// Path of the socket to which its doorbell is to connect.
    pub device: PathBuf,
    /// Type of the machine that QEMU emulates.
    pub machine_type: MachineType,
    /// User that may listen at the control socket, besides root and the broker's own user.
    pub user: Option<u32>,
    /// Number of vectors of its doorbell.
    pub vectors: u16,
}

/// Looks for a QEMU without a doorbell, such as one into which a machine has migrated, and plugs one (B-27).
pub(crate) async fn watch_alone(mut watched: watch::Receiver<Watched>, tell: impl AsyncFn(Alone)) {
    let mut said = Alone::Unseen;
    loop {
        let now = watched.borrow_and_update().clone();
        if now.is_served {
            said = Alone::Unseen;
            if watched.changed().await.is_err() {
                return;
            }
            continue;
        }
        if !now.is_restored {
            tokio::select! {
                () = sleep(LOOK) => {}
                changed = watched.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
            }
        }
        let seen = match inspect_qemu(&now).await {
            Ok(seen) => seen,
            Err(Error::Lost(error)) if error.kind() != std::io::ErrorKind::PermissionDenied => Alone::Unseen,
            Err(error) => Alone::Trouble(error.to_string()),
        };
        if seen != said || now.is_restored {
            said = seen.clone();
            tell(seen).await;
        }
        if now.is_restored && watched.changed().await.is_err() {
            return;
        }
    }
}

/// Looks at QEMU once, and does what is to be done.
async fn inspect_qemu(at: &Watched) -> Result<Alone, Error> {
    let qmp = Qmp::connect(&at.path, at.user).await?;
    let mut session = Session::new(qmp, at.device.clone(), None, at.machine_type, super::ASK_AGAIN);
    let is_left = session.look_for_mark().await?;
    let is_filled = session.has_object(FILLED).await?;
    if is_left && !(is_filled && at.is_restored) {
        return Ok(Alone::Left { is_filled });
    }
    if !session.doorbells().await?.is_empty() {
        return Ok(Alone::Unseen);
    }
    let status = session.qmp.execute("query-status", json!({}), None).await?;
    match status["status"].as_str().unwrap_or_default() {
        "running" | "paused" | "prelaunch" => {}
        status if at.is_restored => return Ok(Alone::Trouble(format!("its QEMU is in the state {status}"))),
        _ => return Ok(Alone::Unseen),
    }
    session.plug_doorbell(at.vectors).await?;
    for mark in [LEFT, FILLED].into_iter().filter(|_| is_left) {
        session.qmp.execute("object-del", json!({ "id": mark }), None).await?;
    }
    Ok(Alone::Plugged)
}

impl Session {
    /// Returns whether QEMU is marked as one that gets no device any more.
    pub(super) async fn look_for_mark(&mut self) -> Result<bool, Error> {
        self.is_marked = self.has_object(LEFT).await?;
        Ok(self.is_marked)
    }

    async fn has_object(&mut self, name: &str) -> Result<bool, Error> {
        Ok(self.names("/objects", name).await?.contains(""))
    }

    async fn mark(&mut self, name: &'static str) -> Result<Value, Error> {
        let object = json!({ "qom-type": "secret", "id": name, "data": "tombolo" });
        self.qmp.execute("object-add", object, None).await
    }

    /// Removes the doorbell, as far as possible now (B-26). QEMU has no other device of the broker any more.
    pub(super) async fn give_up_doorbell(&mut self, tell: &impl AsyncFn(News)) -> Result<Doorbell, Error> {
        let doorbells = self.doorbells().await?;
        if doorbells.is_empty() && self.is_marked {
            let is_filled = self.fill_numbers().await?;
            tell(News::Bare { is_filled }).await;
            self.drop_chardevs().await?;
            return Ok(Doorbell::Gone);
        }
        if doorbells.is_empty() {
            tell(News::KeepsDoorbell("it has no doorbell that connects to this broker".into())).await;
            return Ok(Doorbell::Stays);
        }
        if self.open_before.is_none() {
            self.open_before = self.process.and_then(numbers);
        }
        let is_first = !self.is_marked;
        if is_first {
            if let Err(error @ Error::Refused { .. }) = self.mark(LEFT).await {
                tell(News::KeepsDoorbell(error.to_string())).await;
                return Ok(Doorbell::Stays);
            }
            self.is_marked = true;
            tell(News::Marked).await;
        }
        for doorbell in &doorbells {
            let path = format!("/machine/peripheral/{doorbell}");
            match self.qmp.execute("device_del", json!({ "id": path }), None).await {
                Err(error @ Error::Refused { .. }) if is_first => {
                    self.qmp.execute("object-del", json!({ "id": LEFT }), None).await?;
                    self.is_marked = false;
                    tell(News::KeepsDoorbell(error.to_string())).await;
                    return Ok(Doorbell::Stays);
                }
                // QEMU was asked before, and its guest has not answered yet.
                Err(Error::Refused { .. }) => {}
                done => drop(done?),
            }
        }
        Ok(Doorbell::Going)
    }

    /// Returns the doorbell devices that connect to this broker: one, as a rule.
    async fn doorbells(&mut self) -> Result<Vec<String>, Error> {
        let list = self.qmp.execute("qom-list", json!({ "path": "/machine/peripheral" }), None).await?;
        let ours = self.chardevs().await?;
        let mut found = Vec::new();
        for entry in list.as_array().into_iter().flatten().filter(|entry| entry["type"] == format!("child<{TYPE}>")) {
            let name = entry["name"].as_str().unwrap_or_default().to_owned();
            let at = json!({ "path": format!("/machine/peripheral/{name}"), "property": "chardev" });
            let chardev = self.allowed("qom-get", at).await?;
            if chardev.as_str().is_some_and(|chardev| ours.contains(chardev)) {
                found.push(name);
            }
        }
        Ok(found)
    }

    /// Returns the chardevs that connect to this broker.
    async fn chardevs(&mut self) -> Result<BTreeSet<String>, Error> {
        let list = self.allowed("qom-list", json!({ "path": "/chardevs" })).await?;
        let is_socket = |entry: &&Value| entry["type"] == "child<chardev-socket>";
        let mut ours = BTreeSet::new();
        for entry in list.as_array().into_iter().flatten().filter(is_socket) {
            let name = entry["name"].as_str().unwrap_or_default();
            let at = json!({ "path": format!("/chardevs/{name}"), "property": "addr" });
            let address = self.allowed("qom-get", at).await?;
            if address["path"].as_str().is_some_and(|path| self.device.as_os_str() == path) {
                ours.insert(name.to_owned());
            }
        }
        Ok(ours)
    }

    /// Removes the broker's chardevs, which nothing uses any more.
    async fn drop_chardevs(&mut self) -> Result<(), Error> {
        for name in self.chardevs().await? {
            self.qmp.execute("chardev-remove", json!({ "id": name }), None).await?;
        }
        Ok(())
    }

    /// Gives all numbers that QEMU closed with the doorbell to descriptors that are never readable. Returns false if
    /// the broker cannot see whether that was done.
    async fn fill_numbers(&mut self) -> Result<bool, Error> {
        let before = self.open_before.take();
        let closed: Option<BTreeSet<u32>> = before.zip(self.process.and_then(numbers)).map(|(then, now)| &then - &now);
        let serial = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        for nth in 0..FILLERS_MAX {
            let is_done = match &closed {
                Some(closed) => self.process.and_then(numbers).is_some_and(|open| closed.is_subset(&open)),
                None => nth >= FILLERS_BLIND,
            };
            if is_done {
                break;
            }
            let filler = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
            // Descriptors passed by `getfd` stay after this QMP session has ended; those passed by `add-fd` may go
            // then.
            let name = json!({ "fdname": format!("tombolo-{serial:x}-{nth}") });
            match self.qmp.execute("getfd", name, Some(filler.as_fd())).await {
                Err(Error::Refused { .. }) => break,
                done => drop(done?),
            }
        }
        let (Some(closed), Some(process)) = (closed, self.process) else { return Ok(false) };
        let is_filler = |number: &u32| {
            let what = std::fs::read_link(format!("/proc/{process}/fd/{number}"));
            what.is_ok_and(|what| what.as_os_str() == "anon_inode:[eventfd]")
        };
        let is_filled = !closed.is_empty() && closed.iter().all(is_filler);
        if is_filled && !self.has_object(FILLED).await? {
            self.mark(FILLED).await?;
        }
        Ok(is_filled)
    }

    /// Plugs a doorbell where the guest finds it (B-27).
    async fn plug_doorbell(&mut self, vectors: u16) -> Result<(), Error> {
        self.drop_chardevs().await?;
        self.look_for_slots().await?;
        let Some((bus, address)) = self.free.first().cloned() else {
            return Err(Error::Refused { command: "device_add", why: "no slot is free for the doorbell".into() });
        };
        let path = self.device.display().to_string();
        let address_of = json!({ "type": "unix", "data": { "path": path } });
        let backend = json!({ "type": "socket", "data": { "addr": address_of, "server": false } });
        self.qmp.execute("chardev-add", json!({ "id": NAME, "backend": backend }), None).await?;
        let device = json!({
            "driver": TYPE, "id": NAME, "chardev": NAME, "vectors": vectors, "bus": bus, "addr": address,
        });
        if let Err(error) = self.qmp.execute("device_add", device, None).await {
            if matches!(error, Error::Refused { .. }) {
                self.qmp.execute("chardev-remove", json!({ "id": NAME }), None).await?;
            }
            return Err(error);
        }
        Ok(())
    }
}

/// Returns the numbers of the descriptors that a process has open, if the broker can see them.
fn numbers(process: u32) -> Option<BTreeSet<u32>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?;
    entries.map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b26_numbers_of_a_process_are_those_that_are_open() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file).cast_unsigned();
        assert!(numbers(std::process::id()).unwrap().contains(&number));
        assert_eq!(numbers(0), None);
    }
}
