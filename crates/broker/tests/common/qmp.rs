// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A simulated control socket of QEMU: it has devices and memories, and sends events.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::fs::SealFlags;
use serde_json::{Value, json};
use tombolo_broker::fd_passing;

/// State of the simulated QEMU. Tests may change all of it.
#[derive(Default)]
pub struct State {
    /// Devices by name: memory, slot.
    pub devices: BTreeMap<String, (String, String)>,
    /// Memories by name.
    pub memories: BTreeMap<String, Memory>,
    passed: BTreeMap<u64, OwnedFd>,
    /// Answer to `query-status`.
    pub status: &'static str,
    /// Whether the guest releases no devices.
    pub stubborn: bool,
    /// Whether its own regions stay writable to all: this process has no mapping from before the seal that it could
    /// lend.
    pub unsealed: bool,
    /// Whether its guest's memory is shared with other processes.
    pub shared: bool,
    /// Whether a network card has a vhost-user backend.
    pub backend: bool,
    /// Slots that other devices have.
    pub foreign: Vec<u64>,
    /// A device that the guest ejects when its place is queried.
    pub shy: Option<String>,
    /// Memories that got a second device, at which QEMU 7.2 would have ended itself.
    pub plugged_twice: Vec<String>,
    had: BTreeSet<String>,
    /// Its doorbell, and the doorbell's chardev.
    pub doorbell: Option<(String, String)>,
    /// Chardevs, and where they connect to.
    pub chardevs: BTreeMap<String, String>,
    /// Connection of a doorbell that was plugged at run time, until a machine takes it.
    pub connected: Option<OwnedFd>,
    /// Descriptors that go with the doorbell.
    pub of_doorbell: Vec<OwnedFd>,
    /// Descriptors that were passed to fill the numbers which the doorbell left.
    pub fillers: Vec<OwnedFd>,
    /// Whether it takes no descriptor that fills a number.
    pub takes_no_fillers: bool,
    /// Reason for which it does not take its doorbell away.
    pub keeps_doorbell: Option<&'static str>,
    /// Reason for which it takes no doorbell at run time.
    pub refuses_doorbell: Option<&'static str>,
    /// Marks and similar objects.
    pub marks: BTreeSet<String>,
    /// Commands that it got, except queries.
    pub done: Vec<String>,
    /// Number of conversations that clients began.
    pub conversations: u64,
    /// Last command that it answered.
    pub last: String,
    /// Run on its own regions once it has them and before it reports them.
    pub on_own: Option<OnOwn>,
    client: Option<UnixStream>,
    count: u64,
}

/// Action on a QEMU's own region.
type OnOwn = Box<dyn FnMut(&OwnedFd) + Send>;

pub struct Memory {
    pub fd: OwnedFd,
    pub readonly: bool,
    /// Seals that the memory had when it was mapped.
    pub seals: SealFlags,
}

#[derive(Clone)]
pub struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub fn start(path: &Path) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let doorbell = "tombolo".to_owned();
        let chardevs = BTreeMap::from([(doorbell.clone(), path.with_extension("ivshmem").display().to_string())]);
        let doorbell = Some((doorbell.clone(), doorbell));
        let fake = Self(Arc::new(Mutex::new(State { status: "running", doorbell, chardevs, ..State::default() })));
        let weak = Arc::downgrade(&fake.0);
        // The thread ends with the listener's last client; the listener itself belongs to the test's process.
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Some(state)) = (client, weak.upgrade()) else { return };
                let _ = Self(state).serve(&client);
            }
        });
        fake
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Drops the connection of a broker that is gone and has not come again.
    pub fn forget_client(&self) {
        self.state().client = None;
    }

    /// Breaks off the conversation, as when QEMU is too slow to answer.
    pub fn hang_up(state: &mut State) {
        if let Some(client) = state.client.take() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }

    /// Returns whether a client is connected that gets events.
    pub fn is_asked(&self) -> bool {
        self.state().client.is_some()
    }

    /// Sends an event.
    pub fn event(&self, name: &str) {
        self.event_of(name, Duration::ZERO);
    }

    /// Sends an event that happened a while ago.
    pub fn event_of(&self, name: &str, ago: Duration) {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() - ago;
        let timestamp = json!({ "seconds": at.as_secs(), "microseconds": at.subsec_micros() });
        let event = json!({ "event": name, "data": {}, "timestamp": timestamp });
        let state = self.state();
        let Some(mut client) = state.client.as_ref() else { return };
        let _ = client.write_all(format!("{event}\r\n").as_bytes());
    }

    /// The guest releases a device.
    pub fn delete(state: &mut State, id: &str) {
        state.devices.remove(id);
        if state.doorbell.as_ref().is_some_and(|(name, _)| name == id) {
            state.doorbell = None;
            state.of_doorbell.clear();
        }
        if let Some(mut client) = state.client.as_ref() {
            let event = json!({ "event": "DEVICE_DELETED", "data": { "device": id } });
            let _ = client.write_all(format!("{event}\r\n").as_bytes());
        }
    }

    fn serve(&self, client: &UnixStream) -> io::Result<()> {
        let greeting = json!({ "QMP": { "version": {}, "capabilities": [] } });
        (&*client).write_all(format!("{greeting}\r\n").as_bytes())?;
        let mut state = self.state();
        state.client = Some(client.try_clone()?);
        state.conversations += 1;
        drop(state);
        let mut buffer = Vec::new();
        let mut passed: Vec<OwnedFd> = Vec::new();
        loop {
            while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = buffer.drain(..=end).collect();
                let command: Value = serde_json::from_slice(&line)?;
                let mut state = self.state();
                let answer = match state.execute(&command, &mut passed) {
                    Ok(value) => json!({ "return": value, "id": command["id"] }),
                    Err(why) => json!({ "error": { "class": "GenericError", "desc": why }, "id": command["id"] }),
                };
                drop(state);
                (&*client).write_all(format!("{answer}\r\n").as_bytes())?;
                if command["execute"] == "device_del" && answer["error"].is_null() {
                    let mut state = self.state();
                    if !state.stubborn {
                        let id = command["arguments"]["id"].as_str().unwrap_or_default();
                        let id = id.rsplit('/').next().unwrap_or_default().to_owned();
                        Self::delete(&mut state, &id);
                    }
                }
            }
            let mut chunk = [0; 4096];
            let (len, descriptors) = fd_passing::receive(client, &mut chunk)?;
            if len == 0 {
                return Ok(());
            }
            passed.extend(descriptors);
            buffer.extend_from_slice(&chunk[..len]);
        }
    }
}

impl State {
    fn execute(&mut self, command: &Value, passed: &mut Vec<OwnedFd>) -> Result<Value, String> {
        let arguments = &command["arguments"];
        let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
        self.last = command["execute"].as_str().unwrap_or_default().to_owned();
        if self.last.contains("add") || self.last.contains("del") || self.last.contains("remove") {
            let what =
                if self.last == "object-add" { text("id") } else { text("id").replace("/machine/peripheral/", "") };
            self.done.push(format!("{} {what}", self.last));
        }
        match command["execute"].as_str().unwrap_or_default() {
            "qmp_capabilities" => Ok(json!({})),
            "query-memdev" if self.shared => Ok(json!([{ "id": "ram", "share": true }])),
            "human-monitor-command" if self.shared => {
                Ok(json!(if self.backend { "net0: index=0,type=vhost-user" } else { "net0: index=0,type=nic" }))
            }
            "query-status" => Ok(json!({ "status": self.status })),
            "qom-list" if text("path") == "/objects" => {
                Ok(named(self.memories.keys().chain(&self.marks), "memory").into())
            }
            "qom-list" if text("path") == "/chardevs" => Ok(named(self.chardevs.keys(), "chardev-socket").into()),
            "qom-list" => {
                let mut all = named(self.devices.keys(), "ivshmem-plain");
                all.extend(named(self.doorbell.iter().map(|(name, _)| name), "ivshmem-doorbell"));
                Ok(all.into())
            }
            "qom-get" if text("property") == "addr" && text("path").starts_with("/chardevs/") => {
                let name = text("path").rsplit('/').next().unwrap_or_default().to_owned();
                Ok(json!({ "type": "unix", "path": self.chardevs.get(&name).ok_or("no such chardev")? }))
            }
            "qom-get" if text("property") == "chardev" => Ok(json!(self.doorbell.as_ref().map(|(_, chardev)| chardev))),
            "qom-get" => {
                let id = text("path").rsplit('/').next().unwrap_or_default().to_owned();
                if self.shy.take_if(|shy| *shy == id).is_some() {
                    Fake::delete(self, &id);
                }
                let (_, slot) = self.devices.get(&id).ok_or("no such device")?;
                let slot = u64::from_str_radix(slot.trim_start_matches("0x"), 16).map_err(|e| e.to_string())?;
                Ok(json!(slot << 3))
            }
            "query-pci" => {
                let own = self
                    .devices
                    .values()
                    .filter_map(|(_, slot)| u64::from_str_radix(slot.trim_start_matches("0x"), 16).ok());
                let devices: Vec<_> =
                    own.chain(self.foreign.iter().copied()).map(|slot| json!({ "slot": slot })).collect();
                Ok(json!([{ "bus": 0, "devices": devices }]))
            }
            "add-fd" => {
                let fd = passed.pop().ok_or("no descriptor was passed")?;
                self.count += 1;
                self.passed.insert(self.count, fd);
                Ok(json!({ "fdset-id": self.count, "fd": self.count }))
            }
            "remove-fd" => {
                self.passed.remove(&arguments["fdset-id"].as_u64().unwrap_or_default());
                Ok(json!({}))
            }
            "object-add" if text("qom-type") == "secret" => {
                self.marks.insert(text("id"));
                Ok(json!({}))
            }
            "getfd" if self.takes_no_fillers => Err("no such command".into()),
            "getfd" => {
                self.fillers.push(passed.pop().ok_or("no descriptor was passed")?);
                Ok(json!({}))
            }
            "chardev-remove" if self.doorbell.as_ref().is_some_and(|(_, chardev)| *chardev == text("id")) => {
                Err("it is busy".into())
            }
            "chardev-remove" => {
                self.connected = None;
                self.chardevs.remove(&text("id")).map(|_| json!({})).ok_or("no such chardev".into())
            }
            "chardev-add" => {
                let path = arguments["backend"]["data"]["addr"]["data"]["path"].as_str().unwrap_or_default().to_owned();
                let kind = rustix::net::SocketType::STREAM;
                self.connected = Some(fd_passing::connect(Path::new(&path), kind).map_err(|e| e.to_string())?);
                self.chardevs.insert(text("id"), path);
                Ok(json!({}))
            }
            "device_add" if text("driver") == "ivshmem-doorbell" => {
                if let Some(why) = self.refuses_doorbell {
                    return Err(why.into());
                }
                self.doorbell = Some((text("id"), text("chardev")));
                Ok(json!({}))
            }
            "device_del" if self.doorbell.as_ref().is_some_and(|(name, _)| text("id").ends_with(name)) => {
                self.keeps_doorbell.map_or(Ok(json!({})), |why| Err(why.into()))
            }
            "object-add" => {
                let path = text("mem-path");
                let number = path.rsplit('/').next().and_then(|fd| fd.parse().ok()).ok_or("no such path")?;
                let fd =
                    self.passed.get(&number).ok_or("no such descriptor")?.try_clone().map_err(|e| e.to_string())?;
                let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|e| e.to_string())?;
                let readonly = arguments["readonly"] == true;
                if !readonly && self.unsealed {
                    rustix::fs::fcntl_add_seals(&fd, SealFlags::SEAL).map_err(|e| e.to_string())?;
                }
                if !readonly && seals.contains(SealFlags::FUTURE_WRITE) {
                    return Err("unable to map backing store for guest RAM: Operation not permitted".into());
                }
                if let Some(on_own) = self.on_own.as_mut().filter(|_| !readonly) {
                    on_own(&fd);
                }
                self.memories.insert(text("id"), Memory { fd, readonly, seals });
                Ok(json!({}))
            }
            "object-del" if self.marks.remove(&text("id")) => Ok(json!({})),
            "object-del" => {
                let id = text("id");
                if self.devices.values().any(|(memory, _)| *memory == id) {
                    return Err(format!("object '{id}' is in use, can not be deleted"));
                }
                self.memories.remove(&id).map(|_| json!({})).ok_or("object not found".into())
            }
            "device_add" if self.memories.contains_key(&text("memdev")) => {
                if !self.had.insert(text("memdev")) {
                    self.plugged_twice.push(text("memdev"));
                }
                self.devices.insert(text("id"), (text("memdev"), text("addr")));
                Ok(json!({}))
            }
            "device_del" if self.devices.contains_key(&text("id")) => Ok(json!({})),
            other => Err(format!("the fake does not know {other} like this")),
        }
    }
}

fn named<'a>(names: impl Iterator<Item = &'a String>, kind: &str) -> Vec<Value> {
    names.map(|name| json!({ "name": name, "type": format!("child<{kind}>") })).collect()
}
