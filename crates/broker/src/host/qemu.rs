// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Brings a running QEMU to the devices that it should have, and reports the guest's liveness.
//!
//! No record of earlier steps is needed: each time the broker asks QEMU what is there, and corrects the difference. So
//! it does not matter where an earlier broker stopped.

mod doorbell;

pub use doorbell::Alone;
pub(crate) use doorbell::{Watched, watch_alone};

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout_at},
};
use tombolo_os::process::Stat;

use crate::{
    config::{MachineType, PC_SLOTS},
    host::{
        guard::Process,
        qmp::{Error, Event, Qmp},
    },
};

use self::doorbell::Doorbell;

const PC_FIRST: u64 = 4;
/// Prefixes of the names of the broker's objects in QEMU: devices, and the memory behind them.
const DEVICE: &str = "tombolo-d-";
const MEMORY: &str = "tombolo-m-";
/// Prefix of the name of a root port; a number follows.
pub const PORT: &str = "tombolo-p-";
/// Time after which QEMU is asked again about what it reports by no event: devices that the guest is to release,
/// failures, vhost-user backends.
pub const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Time until the next attempt to reach a QEMU: the first time, and the longest.
const TRY_AGAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// A region that a guest should have.
#[derive(Clone, Debug)]
pub struct Plug {
    /// Name of the region in QEMU; other memory has another name.
    pub name: String,
    /// The memory.
    pub memory: Arc<OwnedFd>,
    /// Size in bytes.
    pub size: u64,
    /// Whether the guest can only read it.
    pub readonly: bool,
}

/// What a guest should have. The version grows with each change.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Version of this list; 0: none yet.
    pub version: u64,
    /// The regions.
    pub plugs: Arc<[Plug]>,
    /// Whether the doorbell is to be removed as well, once nothing else is left (B-26).
    pub bare: bool,
}

/// A report on a QEMU.
#[derive(Debug)]
pub enum News {
    /// Whether the guest runs.
    Running(bool),
    /// Whether QEMU's own process is stopped.
    Stopped(bool),
    /// The guest was reset, shut down or panicked, which ended its incarnation at this time.
    Ended(std::time::Instant),
    /// The devices and memory that QEMU has now.
    Has {
        /// Version of the wanted list that QEMU was to meet.
        version: u64,
        /// Places of the regions in the guest, by name.
        places: BTreeMap<String, String>,
        /// Names of all devices of the broker, and of the memory behind them, that QEMU still has.
        holds: BTreeSet<String>,
        /// Number of free slots.
        free: u16,
        /// Why something is missing.
        trouble: Option<String>,
        /// The QEMU process: its user, and who shares the guest's memory.
        process: Process,
    },
    /// QEMU gets no device of the broker from now on. It is marked so, and is asked to remove the doorbell (B-26).
    Marked,
    /// QEMU refuses to remove its doorbell, for this reason (B-26).
    KeepsDoorbell(String),
    /// QEMU has no device of the broker any more (B-26).
    Bare {
        /// Whether it may get devices again.
        is_filled: bool,
    },
    /// QEMU cannot be reached.
    Lost(String),
}

/// A QEMU, and how to reach it.
#[derive(Clone, Debug)]
pub struct Target {
    /// Path of its control socket.
    pub path: PathBuf,
    /// Path of the socket to which its doorbell connects.
    pub device: PathBuf,
    /// Process identifier, if known.
    pub process: Option<u32>,
    /// Type of the machine that QEMU emulates.
    pub machine_type: MachineType,
    /// User that QEMU may run as, besides root and the broker's own user, in the current configuration. Nobody else
    /// gets memory of links.
    pub user: watch::Receiver<Option<u32>>,
    /// Time after which QEMU is asked again if something is missing: [`ASK_AGAIN`].
    pub ask_again: Duration,
}

/// Interval at which the broker checks whether a QEMU's process is stopped.
const LOOK: Duration = Duration::from_secs(1);

/// Calls `tell` whenever the process of a QEMU stops or continues (B-12). While it is stopped, QEMU reports nothing of
/// its guest, and its earlier reports mean nothing.
pub async fn watch_process(pid: u32, tell: impl AsyncFn(bool)) {
    let mut was_stopped = false;
    loop {
        let is_stopped = Stat::of(pid).is_some_and(|stat| stat.is_stopped());
        if is_stopped != was_stopped {
            was_stopped = is_stopped;
            tell(is_stopped).await;
        }
        sleep(LOOK).await;
    }
}

/// Keeps a QEMU's devices as wanted until `wanted` is dropped.
pub async fn supervise(target: Target, mut wanted: watch::Receiver<Wanted>, tell: impl AsyncFn(News)) {
    let (mut pause, mut plugged, mut free) = (TRY_AGAIN[0], BTreeSet::new(), Vec::new());
    let Target { path, device, process, machine_type, mut user, ask_again } = target;
    loop {
        let now = *user.borrow_and_update();
        let error = match Qmp::connect(&path, now).await {
            Ok(qmp) => {
                pause = TRY_AGAIN[0];
                let mut session =
                    Session { plugged, free, ..Session::new(qmp, device.clone(), process, machine_type, ask_again) };
                let ran = session.run(&mut wanted, &mut user, &tell).await;
                (plugged, free) = (session.plugged, session.free);
                match ran {
                    Ok(()) => return,
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        tell(News::Lost(format!("{error} ({})", path.display()))).await;
        if wanted.has_changed().is_err() {
            return;
        }
        tokio::select! {
            () = sleep(pause) => {}
            // A process of the user that is configured now may already listen there.
            changed = user.changed() => if changed.is_err() { return },
        }
        pause = TRY_AGAIN[1].min(2 * pause);
    }
}

struct Session {
    qmp: Qmp,
    machine_type: MachineType,
    ask_again: Duration,
    /// Devices that the guest was asked to release, and when.
    asked: BTreeMap<String, Instant>,
    /// Regions that are wanted and have been plugged, into this QEMU or one before it.
    plugged: BTreeSet<String>,
    /// Slots in which a device could go, in the order in which they became free.
    free: Vec<Slot>,
    /// Path of the socket to which its doorbell connects.
    device: PathBuf,
    /// Process identifier, if known.
    process: Option<u32>,
    /// Whether QEMU gets no device of the broker any more (B-26).
    is_marked: bool,
    /// Numbers of the descriptors that QEMU had open before it was asked to remove its doorbell (B-26).
    open_before: Option<BTreeSet<u32>>,
}

/// The bus and the slot, in the form that `device_add` takes.
type Slot = (String, String);

impl Session {
    fn new(qmp: Qmp, device: PathBuf, process: Option<u32>, machine_type: MachineType, ask_again: Duration) -> Self {
        let (asked, plugged, free) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
        let (is_marked, open_before) = (false, None);
        Self { qmp, machine_type, ask_again, asked, plugged, free, device, process, is_marked, open_before }
    }

    /// Runs until `wanted` is dropped, or until QEMU has no device of the broker and gets none any more.
    async fn run(
        &mut self,
        wanted: &mut watch::Receiver<Wanted>,
        user: &mut watch::Receiver<Option<u32>>,
        tell: &impl AsyncFn(News),
    ) -> Result<(), Error> {
        let status = self.qmp.execute("query-status", json!({}), None).await?;
        for news in status_means(&status) {
            tell(news).await;
        }
        if self.look_for_mark().await? {
            tell(News::Marked).await;
        }
        let mut keeps = false;
        loop {
            self.qmp.check_user(*user.borrow_and_update())?;
            let mut now = wanted.borrow_and_update().clone();
            if self.is_marked {
                // The next device would end this QEMU, so it gets none, whatever is wanted.
                now = Wanted { version: now.version.max(1), plugs: Arc::default(), bare: true };
            }
            // QEMU keeps what it has until the broker has said what it should have.
            let again = match now.version {
                0 => false,
                _ => {
                    let (news, mut again) = self.meet(&now).await?;
                    let is_empty = matches!(&news, News::Has { holds, .. } if holds.is_empty());
                    tell(news).await;
                    keeps &= now.bare;
                    if now.bare && is_empty && !keeps {
                        match self.give_up_doorbell(tell).await? {
                            Doorbell::Gone => return Ok(()),
                            Doorbell::Going => again = true,
                            Doorbell::Stays => keeps = true,
                        }
                    }
                    again
                }
            };
            let deadline = Instant::now() + if again { self.ask_again } else { Duration::from_secs(3600) };
            loop {
                tokio::select! {
                    changed = wanted.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return Ok(()),
                    },
                    changed = user.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return Ok(()),
                    },
                    event = timeout_at(deadline, self.qmp.event()) => match event {
                        Err(_) => break,
                        Ok(event) => {
                            let event = event?;
                            if let Some(news) = event_means(&event) {
                                tell(news).await;
                            }
                            if event.name == "DEVICE_DELETED" || event.name == "RESET" {
                                break;
                            }
                        }
                    },
                }
            }
        }
    }

    /// Brings QEMU to what is wanted, as far as possible now. Returns a report, and whether to try again later.
    async fn meet(&mut self, wanted: &Wanted) -> Result<(News, bool), Error> {
        let mut trouble = None;
        let devices = self.names("/machine/peripheral", DEVICE).await?;
        let memories = self.names("/objects", MEMORY).await?;
        let names: BTreeSet<&str> = wanted.plugs.iter().map(|plug| plug.name.as_str()).collect();
        for device in devices.iter().filter(|name| !names.contains(name.as_str())) {
            let due = self.asked.get(device).is_none_or(|asked| asked.elapsed() >= self.ask_again);
            if due {
                self.asked.insert(device.clone(), Instant::now());
                record_trouble(
                    &mut trouble,
                    self.qmp.execute("device_del", json!({ "id": format!("{DEVICE}{device}") }), None).await,
                )?;
            }
        }
        self.asked.retain(|device, _| devices.contains(device));
        for memory in memories.iter().filter(|name| !names.contains(name.as_str()) && !devices.contains(*name)) {
            record_trouble(&mut trouble, self.drop_memory(memory).await)?;
        }
        self.plugged.extend(devices.iter().cloned());
        self.plugged.retain(|name| names.contains(name.as_str()));
        for plug in wanted.plugs.iter().filter(|plug| !devices.contains(&plug.name)) {
            // QEMU 7.2 ends itself if memory whose first device the guest never used gets a second device (an assertion
            // in `qemu_ram_set_idstr`). The memory cannot be created anew, because it is sealed. It is not sealed yet
            // if an earlier broker died before it plugged the memory.
            if self.plugged.contains(&plug.name) && memories.contains(&plug.name) {
                trouble = Some("its guest has ejected a region: remove the link and add it again".into());
                continue;
            }
            self.look_for_slots().await?;
            let Some(place) = self.free.first().cloned() else {
                trouble = Some("no slot is free for a region".into());
                break;
            };
            if memories.contains(&plug.name) {
                record_trouble(&mut trouble, self.drop_memory(&plug.name).await)?;
            }
            if record_trouble(&mut trouble, self.add_memory(plug).await)?.is_none() {
                continue;
            }
            let device = json!({
                "driver": "ivshmem-plain", "id": format!("{DEVICE}{}", plug.name),
                "memdev": format!("{MEMORY}{}", plug.name), "bus": place.0, "addr": place.1,
            });
            match record_trouble(&mut trouble, self.qmp.execute("device_add", device, None).await)? {
                Some(_) => _ = self.plugged.insert(plug.name.clone()),
                None => _ = record_trouble(&mut trouble, self.drop_memory(&plug.name).await)?,
            }
        }
        let mut places = BTreeMap::new();
        for device in self.names("/machine/peripheral", DEVICE).await? {
            match self.place(&device).await {
                Ok(place) => _ = places.insert(device, place),
                // The guest has ejected the device meanwhile, which an event reports too.
                Err(Error::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.look_for_slots().await?;
        let free = self.free.len() as u16;
        let mut holds = self.names("/objects", MEMORY).await?;
        holds.extend(places.keys().cloned());
        let process = self.guest_memory().await?;
        // QEMU sends no event when a network card's vhost-user backend is removed.
        let again = trouble.is_some() || holds.len() != wanted.plugs.len() || process.backend.is_some();
        Ok((News::Has { version: wanted.version, places, holds, free, trouble, process }, again))
    }

    /// Returns QEMU's user, and whether other processes have, or may have, the guest's memory.
    async fn guest_memory(&mut self) -> Result<Process, Error> {
        let user = self.qmp.user();
        let memories = self.allowed("query-memdev", json!({})).await?;
        let other = |memory: &&Value| !memory["id"].as_str().is_some_and(|id| id.starts_with(MEMORY));
        let is_shared = memories.as_array().into_iter().flatten().filter(other).any(|it| it["share"] == true);
        if !is_shared {
            return Ok(Process { user, is_shared, backend: None });
        }
        for place in ["/machine/peripheral", "/machine/peripheral-anon", "/objects"] {
            let list = self.allowed("qom-list", json!({ "path": place })).await?;
            let mut entries = list.as_array().into_iter().flatten();
            let is_backend = |entry: &&Value| entry["type"].as_str().is_some_and(|it| it.contains("vhost-user"));
            if let Some(entry) = entries.find(is_backend) {
                let backend = entry["name"].as_str().map(String::from);
                return Ok(Process { user, is_shared, backend });
            }
        }
        // The backend of a network card is not in QEMU's object tree.
        let networks = self.allowed("human-monitor-command", json!({ "command-line": "info network" })).await?;
        let is_backend = networks.as_str().is_some_and(|text| text.contains("vhost-user"));
        Ok(Process { user, is_shared, backend: is_backend.then(|| "a network card".into()) })
    }

    /// Returns QEMU's answer, or null if QEMU does not know the command.
    async fn allowed(&mut self, command: &'static str, arguments: Value) -> Result<Value, Error> {
        match self.qmp.execute(command, arguments, None).await {
            Err(Error::Refused { .. }) => Ok(Value::Null),
            answer => answer,
        }
    }

    /// Returns the names of the broker's objects at a place of QEMU's object tree, without `prefix`.
    async fn names(&mut self, path: &str, prefix: &str) -> Result<BTreeSet<String>, Error> {
        let list = self.qmp.execute("qom-list", json!({ "path": path }), None).await?;
        let names = list.as_array().into_iter().flatten().filter_map(|entry| entry["name"].as_str());
        Ok(names.filter_map(|name| name.strip_prefix(prefix)).map(String::from).collect())
    }

    async fn drop_memory(&mut self, name: &str) -> Result<Value, Error> {
        self.qmp.execute("object-del", json!({ "id": format!("{MEMORY}{name}") }), None).await
    }

    async fn add_memory(&mut self, plug: &Plug) -> Result<Value, Error> {
        let added = self.qmp.execute("add-fd", json!({}), Some(plug.memory.as_fd())).await?;
        let (set, fd) = (&added["fdset-id"], &added["fd"]);
        let object = json!({
            "qom-type": "memory-backend-file", "id": format!("{MEMORY}{}", plug.name),
            "mem-path": format!("/proc/self/fd/{fd}"), "size": plug.size, "share": true, "readonly": plug.readonly,
        });
        let made = self.qmp.execute("object-add", object, None).await;
        // QEMU has opened the file once more, and does not need the descriptor that was passed.
        self.qmp.execute("remove-fd", json!({ "fdset-id": set }), None).await?;
        made
    }

    /// Updates the list of free slots, in the order in which they became free. A region goes to the slot that has been
    /// free for longest. Whenever a guest is told to release a device, it is told again of all other devices that it
    /// has yet to release. So it may eject what is in a slot that became free a moment ago.
    async fn look_for_slots(&mut self) -> Result<(), Error> {
        let now = self.free_slots().await?;
        self.free.retain(|slot| now.contains(slot));
        let new: Vec<_> = now.into_iter().filter(|slot| !self.free.contains(slot)).collect();
        self.free.extend(new);
        Ok(())
    }

    /// Returns the slots in which a device could go.
    async fn free_slots(&mut self) -> Result<Vec<Slot>, Error> {
        match self.machine_type {
            MachineType::Pc => {
                let buses = self.qmp.execute("query-pci", json!({}), None).await?;
                let root = buses.as_array().into_iter().flatten().find(|bus| bus["bus"] == 0);
                let devices = root.and_then(|bus| bus["devices"].as_array()).into_iter().flatten();
                let taken: BTreeSet<u64> = devices.filter_map(|device| device["slot"].as_u64()).collect();
                let all = PC_FIRST..PC_FIRST + u64::from(PC_SLOTS);
                Ok(all
                    .rev()
                    .filter(|slot| !taken.contains(slot))
                    .map(|slot| ("pci.0".into(), format!("{slot:#x}")))
                    .collect())
            }
            MachineType::Q35 => {
                let ports = self.names("/machine/peripheral", PORT).await?;
                let mut taken = BTreeSet::new();
                for device in self.names("/machine/peripheral", DEVICE).await? {
                    taken.extend(self.port_of(&device).await?);
                }
                let free = ports.into_iter().filter(|port| !taken.contains(port));
                Ok(free.map(|port| (format!("{PORT}{port}"), "0".into())).collect())
            }
        }
    }

    /// Returns the broker's root port in which a device is.
    async fn port_of(&mut self, device: &str) -> Result<Option<String>, Error> {
        let path = format!("/machine/peripheral/{DEVICE}{device}");
        let bus = self.qmp.execute("qom-get", json!({ "path": path, "property": "parent_bus" }), None).await?;
        let bus = bus.as_str().unwrap_or_default();
        Ok(bus.rsplit('/').find_map(|part| part.strip_prefix(PORT)).map(String::from))
    }

    /// Returns the place at which the guest finds a device (B-2).
    async fn place(&mut self, device: &str) -> Result<String, Error> {
        let own = self.address(&format!("{DEVICE}{device}")).await?;
        Ok(match self.machine_type {
            MachineType::Pc => own,
            MachineType::Q35 => match self.port_of(device).await? {
                Some(port) => format!("{}/{own}", self.address(&format!("{PORT}{port}")).await?),
                None => own,
            },
        })
    }

    async fn address(&mut self, name: &str) -> Result<String, Error> {
        let path = format!("/machine/peripheral/{name}");
        let at = self.qmp.execute("qom-get", json!({ "path": path, "property": "addr" }), None).await?;
        Ok(at.as_u64().map(|at| format!("{:02x}.{:x}", at >> 3, at & 7)).unwrap_or_default())
    }
}

/// Records a refusal of QEMU as trouble. That QEMU is gone is an error.
fn record_trouble(trouble: &mut Option<String>, result: Result<Value, Error>) -> Result<Option<Value>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error @ Error::Refused { .. }) => {
            *trouble = Some(error.to_string());
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Translates a status of QEMU into the guest's liveness (B-12).
fn status_means(status: &Value) -> Vec<News> {
    match status["status"].as_str() {
        Some("running") => vec![News::Running(true)],
        Some("shutdown" | "guest-panicked") => vec![News::Running(false), News::Ended(std::time::Instant::now())],
        _ => vec![News::Running(false)],
    }
}

/// Translates an event of QEMU into the guest's liveness (B-12).
fn event_means(event: &Event) -> Option<News> {
    match event.name.as_str() {
        "STOP" => Some(News::Running(false)),
        "RESUME" => Some(News::Running(true)),
        "RESET" | "SHUTDOWN" | "GUEST_PANICKED" => Some(News::Ended(event.at)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b12_events_mean_the_lives_that_the_clause_names() {
        let at = std::time::Instant::now();
        let means = |name: &str| event_means(&Event { name: name.into(), at });
        assert!(matches!(means("STOP"), Some(News::Running(false))));
        assert!(matches!(means("RESUME"), Some(News::Running(true))));
        for over in ["RESET", "SHUTDOWN", "GUEST_PANICKED"] {
            assert!(matches!(means(over), Some(News::Ended(then)) if then == at), "{over}");
        }
        assert!(means("RTC_CHANGE").is_none());
        assert!(matches!(status_means(&json!({ "status": "prelaunch" }))[..], [News::Running(false)]));
        assert!(matches!(status_means(&json!({ "status": "shutdown" }))[..], [News::Running(false), News::Ended(_)]));
    }
}
