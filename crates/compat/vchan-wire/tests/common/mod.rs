// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A world in one process: memory made of atomics, event channels made of eventfds, nodes in a map.
#![allow(dead_code, reason = "each test program uses its part of this")]

pub mod original;

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, eventfd};
use tombolo_vchan_wire::ground::{Event, Ground, Shared};

pub const PAGE: usize = 4096;
pub const SOON: Duration = Duration::from_secs(20);

/// Waits for a condition; a test that waits in vain fails here.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < until, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// Pages as words.
#[derive(Debug)]
pub struct Cells(Vec<AtomicU32>);

impl Cells {
    pub fn new(pages: usize) -> Self {
        Self((0..pages * PAGE / 4).map(|_| AtomicU32::new(0)).collect())
    }

    fn byte(at: usize) -> (usize, u32) {
        (at / 4, (at % 4) as u32 * 8)
    }
}

impl Shared for Cells {
    fn len(&self) -> usize {
        self.0.len() * 4
    }
    fn load8(&self, at: usize) -> u8 {
        let (word, shift) = Self::byte(at);
        (self.0[word].load(SeqCst) >> shift) as u8
    }
    fn store8(&self, at: usize, value: u8) {
        let (word, shift) = Self::byte(at);
        let change = |old| Some(old & !(0xff << shift) | u32::from(value) << shift);
        self.0[word].fetch_update(SeqCst, SeqCst, change).unwrap();
    }
    fn set_bits(&self, at: usize, bits: u8) -> u8 {
        let (word, shift) = Self::byte(at);
        (self.0[word].fetch_or(u32::from(bits) << shift, SeqCst) >> shift) as u8
    }
    fn clear_bits(&self, at: usize, bits: u8) -> u8 {
        let (word, shift) = Self::byte(at);
        (self.0[word].fetch_and(!(u32::from(bits) << shift), SeqCst) >> shift) as u8
    }
    fn load32(&self, at: usize) -> u32 {
        assert_eq!(at % 4, 0);
        self.0[at / 4].load(SeqCst)
    }
    fn store32(&self, at: usize, value: u32) {
        assert_eq!(at % 4, 0);
        self.0[at / 4].store(value, SeqCst);
    }
    fn copy_in(&self, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.len(), "{} bytes at {at:#x}", from.len());
        from.iter().enumerate().for_each(|(index, byte)| self.store8(at + index, *byte));
    }
    fn copy_out(&self, at: usize, to: &mut [u8]) {
        assert!(at + to.len() <= self.len(), "{} bytes at {at:#x}", to.len());
        to.iter_mut().enumerate().for_each(|(index, byte)| *byte = self.load8(at + index));
    }
}

/// One side of an event channel. It counts the events that it sent.
#[derive(Debug)]
pub struct Channel {
    port: u32,
    event: OwnedFd,
    peer: Mutex<Weak<Channel>>,
    pub sent: AtomicU64,
}

impl Event for Channel {
    fn port(&self) -> u32 {
        self.port
    }
    fn notify(&self) {
        self.sent.fetch_add(1, SeqCst);
        let peer = self.peer.lock().unwrap().upgrade();
        if let Some(peer) = peer {
            rustix::io::write(&peer.event, &1u64.to_ne_bytes()).unwrap();
        }
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
    fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

/// The memory, channels and nodes of both domains.
#[derive(Debug, Default)]
pub struct World {
    pages: Mutex<HashMap<u32, (Arc<Cells>, usize)>>,
    channels: Mutex<HashMap<u32, Arc<Channel>>>,
    nodes: Mutex<HashMap<String, String>>,
    last: AtomicU32,
}

impl World {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn number(&self) -> u32 {
        self.last.fetch_add(1, SeqCst) + 1
    }

    fn channel(&self) -> Arc<Channel> {
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        Arc::new(Channel { port: self.number(), event, peer: Mutex::default(), sent: AtomicU64::new(0) })
    }

    pub fn node(&self, path: &str) -> Option<String> {
        self.nodes.lock().unwrap().get(path).cloned()
    }

    pub fn nodes(&self) -> usize {
        self.nodes.lock().unwrap().len()
    }

    /// Returns the memory that a reference stands for.
    pub fn memory(&self, reference: u32) -> Arc<Cells> {
        Arc::clone(&self.pages.lock().unwrap()[&reference].0)
    }

    /// Returns the page of the vchan at a path; its peer may write it at will.
    pub fn page(&self, path: &str) -> Arc<Cells> {
        self.memory(self.node(&format!("{path}/ring-ref")).unwrap().parse().unwrap())
    }

    pub fn bound(&self, port: u32) -> Arc<Channel> {
        let offered = Arc::clone(&self.channels.lock().unwrap()[&port]);
        let channel = self.channel();
        *channel.peer.lock().unwrap() = Arc::downgrade(&offered);
        *offered.peer.lock().unwrap() = Arc::downgrade(&channel);
        channel
    }

    pub fn offered(&self) -> Arc<Channel> {
        let channel = self.channel();
        self.channels.lock().unwrap().insert(channel.port, Arc::clone(&channel));
        channel
    }

    pub fn shared(&self, pages: usize) -> (Vec<u32>, Arc<Cells>) {
        let memory = Arc::new(Cells::new(pages));
        let references: Vec<u32> = (0..pages).map(|_| self.number()).collect();
        let named = references.iter().enumerate().map(|(page, reference)| (*reference, (Arc::clone(&memory), page)));
        self.pages.lock().unwrap().extend(named);
        (references, memory)
    }
}

/// A domain.
#[derive(Clone, Debug)]
pub struct Domain(pub Arc<World>);

impl Ground for Domain {
    fn share(&self, pages: usize, _: Option<(usize, u32)>) -> io::Result<(Vec<u32>, Arc<dyn Shared>)> {
        let (references, memory) = self.0.shared(pages);
        Ok((references, memory))
    }
    fn map(&self, references: &[u32], _write: bool, _: Option<(usize, u32)>) -> io::Result<Arc<dyn Shared>> {
        let pages = self.0.pages.lock().unwrap();
        let mut found = None;
        for (index, reference) in references.iter().enumerate() {
            let (memory, page) = pages.get(reference).ok_or(io::ErrorKind::NotFound)?;
            if *page != index || memory.len() != references.len() * PAGE {
                // Pages of different memory cannot be mapped in a row here; under Xen they can.
                return Err(io::ErrorKind::NotFound.into());
            }
            found = Some(Arc::clone(memory));
        }
        Ok(found.ok_or(io::ErrorKind::NotFound)?)
    }
    fn offer(&self) -> io::Result<Arc<dyn Event>> {
        Ok(self.0.offered())
    }
    fn bind(&self, port: u32) -> io::Result<Arc<dyn Event>> {
        if !self.0.channels.lock().unwrap().contains_key(&port) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(self.0.bound(port))
    }
    fn publish(&self, path: &str, nodes: &[(&str, String)]) -> io::Result<()> {
        let named = nodes.iter().map(|(node, value)| (format!("{path}/{node}"), value.clone()));
        self.0.nodes.lock().unwrap().extend(named);
        Ok(())
    }
    fn withdraw(&self, path: &str) {
        self.0.nodes.lock().unwrap().retain(|node, _| !node.starts_with(path));
    }
    fn look_up(&self, path: &str, node: &str) -> io::Result<Option<String>> {
        Ok(self.0.node(&format!("{path}/{node}")))
    }
}

/// Returns bytes that repeat late.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
