// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Simulates the part of XenStore that this backend uses, with its permissions and watches.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{Arc, Mutex},
    thread,
};

use crate::{
    hypervisor::DomId,
    os::lock,
    wire::{Kind, Message, Parser},
};

type Errno = &'static str;

/// Largest number of watches of a domain other than dom0: xenstored's own default.
const WATCHES_MAX: usize = 128;

/// The daemon.
#[derive(Default)]
pub(super) struct Daemon(Mutex<Tree>);

#[derive(Default)]
struct Tree {
    nodes: BTreeMap<String, Node>,
    connections: HashMap<u32, UnixStream>,
    /// Connection, domain and path of each watch.
    watches: Vec<(u32, DomId, String)>,
    last: u32,
}

#[derive(Clone)]
struct Node {
    value: Vec<u8>,
    /// Owner of the node; `readers` may read it too.
    owner: DomId,
    readers: Vec<DomId>,
}

impl Node {
    fn may_read(&self, id: DomId) -> bool {
        id == 0 || id == self.owner || self.readers.contains(&id)
    }

    fn may_write(&self, id: DomId) -> bool {
        id == 0 || id == self.owner
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

impl Tree {
    fn readable(&self, id: DomId, path: &str) -> Result<&Node, Errno> {
        match self.nodes.get(path) {
            Some(node) if node.may_read(id) => Ok(node),
            Some(_) => Err("EACCES"),
            None if path.is_empty() => Err("ENOENT"),
            // Domains that may read the parent may know whether the node exists.
            None => match self.nodes.get(parent(path)) {
                Some(above) if !above.may_read(id) => Err("EACCES"),
                _ => Err("ENOENT"),
            },
        }
    }

    /// Makes a node and its missing parents, each with the permissions of its parent.
    fn make(&mut self, id: DomId, path: &str) -> Result<&mut Node, Errno> {
        if !self.nodes.contains_key(path) {
            if path.is_empty() {
                return Err("EACCES");
            }
            let above = self.make(id, parent(path))?;
            if !above.may_write(id) {
                return Err("EACCES");
            }
            let (owner, readers) = (if id == 0 { above.owner } else { id }, above.readers.clone());
            self.nodes.insert(path.into(), Node { value: Vec::new(), owner, readers });
        }
        self.nodes.get_mut(path).filter(|node| node.may_write(id) || node.owner == 0).ok_or("EACCES")
    }

    fn below(&self, path: &str) -> Vec<String> {
        let prefix = format!("{path}/");
        self.nodes.keys().filter(|key| key.starts_with(&prefix)).cloned().collect()
    }

    fn fire(&mut self, path: &str, node: &Node) {
        for (connection, id, watched) in &self.watches {
            if (path == watched || path.starts_with(&format!("{watched}/"))) && node.may_read(*id) {
                self.send_watch_event(*connection, path, watched);
            }
        }
    }

    fn send_watch_event(&self, connection: u32, path: &str, token: &str) {
        let event = Message::request(Kind::WatchEvent, 0, &[path, token], b"");
        if let Some(mut stream) = self.connections.get(&connection) {
            let _ = stream.write_all(&event.encode());
        }
    }

    /// Reports to dom0 what happened to a domain.
    fn announce(&self, what: &str) {
        for (connection, _, watched) in self.watches.iter().filter(|(_, id, watched)| *id == 0 && watched == what) {
            self.send_watch_event(*connection, what, watched);
        }
    }

    fn serve(&mut self, connection: u32, id: DomId, request: &Message) -> Result<Vec<u8>, Errno> {
        let mut parts = request.payload.splitn(2, |byte| *byte == 0);
        let path = std::str::from_utf8(parts.next().unwrap_or(b"")).map_err(|_| "EINVAL")?;
        let rest = parts.next().unwrap_or(b"");
        let path = if path.starts_with(['/', '@']) { path.into() } else { format!("/local/domain/{id}/{path}") };
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-/_@".contains(&byte);
        if !path.bytes().all(legal) {
            return Err("EINVAL");
        }
        match request.kind {
            Kind::Directory => {
                self.readable(id, &path)?;
                let below = self.below(&path).into_iter();
                let names = below.filter_map(|node| node.strip_prefix(&format!("{path}/")).map(str::to_owned));
                let names = names.filter(|name| !name.contains('/')).map(|name| name + "\0");
                return Ok(names.collect::<String>().into_bytes());
            }
            Kind::Read => return self.readable(id, &path).map(|node| node.value.clone()),
            Kind::Write | Kind::Mkdir => {
                let fresh = !self.nodes.contains_key(&path);
                let node = self.make(id, &path)?;
                if !node.may_write(id) {
                    return Err("EACCES");
                }
                if request.kind == Kind::Write {
                    node.value = rest.to_vec();
                }
                let node = node.clone();
                if fresh || request.kind == Kind::Write {
                    self.fire(&path, &node);
                }
            }
            Kind::Rm => {
                let node = self.readable(id, &path)?.clone();
                if !node.may_write(id) {
                    return Err("EACCES");
                }
                self.remove(&path);
            }
            Kind::SetPerms => {
                let node = self.nodes.get_mut(&path).filter(|node| node.may_write(id)).ok_or("EACCES")?;
                let text = String::from_utf8_lossy(rest).into_owned();
                let mut perms = text.split('\0').filter(|part| !part.is_empty());
                let owner = perms.next().and_then(|first| first.strip_prefix('n')).ok_or("EINVAL")?;
                node.owner = owner.parse().map_err(|_| "EINVAL")?;
                let readers = perms.map(|part| part.strip_prefix('r').and_then(|id| id.parse().ok()));
                node.readers = readers.collect::<Option<_>>().ok_or("EINVAL")?;
                let node = node.clone();
                self.fire(&path, &node);
            }
            Kind::Watch => {
                if self.watches.contains(&(connection, id, path.clone())) {
                    return Err("EEXIST");
                }
                if id != 0 && self.watches.iter().filter(|watch| watch.1 == id).count() >= WATCHES_MAX {
                    return Err("E2BIG");
                }
                self.watches.push((connection, id, path.clone()));
                self.send_watch_event(connection, &path, &path);
            }
            Kind::Unwatch => {
                let known = self.watches.iter().position(|watch| *watch == (connection, id, path.clone()));
                self.watches.remove(known.ok_or("ENOENT")?);
            }
            Kind::WatchEvent | Kind::Error => return Err("EINVAL"),
        }
        Ok(b"OK\0".to_vec())
    }

    fn remove(&mut self, path: &str) {
        for path in self.below(path).into_iter().rev().chain([path.to_owned()]) {
            if let Some(node) = self.nodes.remove(&path) {
                self.fire(&path, &node);
            }
        }
    }
}

impl Daemon {
    pub(super) fn add(&self, id: DomId) {
        let mut tree = lock(&self.0);
        let base = format!("/local/domain/{id}");
        let node = |value: &str, owner, readers: &[DomId]| Node { value: value.into(), owner, readers: readers.into() };
        for path in ["", "/local", "/local/domain"] {
            tree.nodes.entry(path.into()).or_insert_with(|| node("", 0, &[]));
        }
        let fresh = !tree.nodes.contains_key(&base);
        tree.nodes.entry(base.clone()).or_insert_with(|| node("", 0, &[id]));
        tree.nodes.entry(format!("{base}/domid")).or_insert_with(|| node(&id.to_string(), 0, &[id]));
        tree.nodes.entry(format!("{base}/data")).or_insert_with(|| node("", id, &[]));
        if fresh {
            tree.announce("@introduceDomain");
        }
    }

    pub(super) fn destroy(&self, id: DomId) {
        let mut tree = lock(&self.0);
        tree.remove(&format!("/local/domain/{id}"));
        tree.announce("@releaseDomain");
    }

    pub(super) fn write(&self, id: DomId, path: &str, value: &[u8]) {
        let request = Message::request(Kind::Write, 0, &[path], value);
        lock(&self.0).serve(0, id, &request).expect("a domain may write its own nodes");
    }

    pub(super) fn read(&self, id: DomId, path: &str) -> Option<String> {
        let request = Message::request(Kind::Read, 0, &[path], b"");
        lock(&self.0).serve(0, id, &request).ok().and_then(|value| String::from_utf8(value).ok())
    }

    pub(super) fn below(&self, path: &str) -> Vec<String> {
        lock(&self.0).below(path.trim_end_matches('/'))
    }

    /// Makes a connection for domain `id`.
    pub(super) fn connect(self: &Arc<Self>, id: DomId) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        let mut tree = lock(&self.0);
        tree.last += 1;
        let connection = tree.last;
        tree.connections.insert(connection, ours.try_clone()?);
        drop(tree);
        let daemon = Arc::clone(self);
        thread::Builder::new().name("fake-xenstored".into()).spawn(move || daemon.run(connection, id, ours))?;
        Ok(theirs.into())
    }

    fn run(&self, connection: u32, id: DomId, mut stream: UnixStream) {
        let mut parser = Parser::default();
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = stream.read(&mut buffer) {
            parser.push(&buffer[..len]);
            while let Ok(Some(request)) = parser.message() {
                let mut tree = lock(&self.0);
                let (kind, payload) = match tree.serve(connection, id, &request) {
                    Ok(payload) => (request.kind, payload),
                    Err(error) => (Kind::Error, [error.as_bytes(), b"\0"].concat()),
                };
                let _ = stream.write_all(&Message { kind, request: request.request, payload }.encode());
            }
        }
        let mut tree = lock(&self.0);
        tree.connections.remove(&connection);
        tree.watches.retain(|watch| watch.0 != connection);
    }
}
