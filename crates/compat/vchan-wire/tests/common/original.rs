// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that behaves as Xen's public header specifies, written from that header alone and sharing no code with the
//! crate: its positions are in the page, it trusts what it reads there, and it waits by the notify bits.

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use tombolo_vchan_wire::ground::{Event, Shared};

use super::{Cells, Channel, World};

/// One side. Its methods are `read`, `write` and `close`.
pub struct Original {
    page: Arc<Cells>,
    left: (Arc<Cells>, usize, u32),
    right: (Arc<Cells>, usize, u32),
    pub channel: Arc<Channel>,
    server: bool,
}

const LEFT: usize = 0;
const RIGHT: usize = 8;

impl Original {
    /// Makes a server with rings of these orders.
    pub fn serve(world: &World, path: &str, left: u32, right: u32) -> Self {
        let channel = world.offered();
        let (reference, page) = world.shared(1);
        page.store32(16, left | right << 16);
        page.store8(20, 2);
        page.store8(21, 1);
        page.store8(22, 1);
        let mut list = 24;
        let mut ring = |order: u32| match order {
            10 | 11 => (Arc::clone(&page), 1usize << order, order),
            _ => {
                let (references, memory) = world.shared(1 << (order - 12));
                for reference in references {
                    page.store32(list, reference);
                    list += 4;
                }
                (memory, 0, order)
            }
        };
        let (left, right) = (ring(left), ring(right));
        let mut nodes = world.nodes.lock().unwrap();
        nodes.insert(format!("{path}/ring-ref"), reference[0].to_string());
        nodes.insert(format!("{path}/event-channel"), channel.port().to_string());
        drop(nodes);
        Self { page, left, right, channel, server: true }
    }

    /// Makes a client.
    pub fn join(world: &World, path: &str) -> Self {
        let page = world.page(path);
        let channel = world.bound(world.node(&format!("{path}/event-channel")).unwrap().parse().unwrap());
        let orders = page.load32(16);
        let mut list = 24;
        let mut ring = |order: u32| match order {
            10 | 11 => (Arc::clone(&page), 1usize << order, order),
            _ => {
                let memory = world.memory(page.load32(list));
                list += 4 << (order - 12);
                (memory, 0, order)
            }
        };
        let (left, right) = (ring(orders & 0xffff), ring(orders >> 16));
        page.store8(20, 1);
        page.store8(23, 1);
        channel.notify();
        Self { page, left, right, channel, server: false }
    }

    pub fn is_open(&self) -> u8 {
        self.page.load8(if self.server { 20 } else { 21 })
    }

    fn ask(&self, bit: u8) {
        self.page.set_bits(if self.server { 22 } else { 23 }, bit);
    }

    fn notify_peer(&self, bit: u8) {
        if self.page.clear_bits(if self.server { 23 } else { 22 }, bit) & bit != 0 {
            self.channel.notify();
        }
    }

    fn wait(&self) {
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        let fd = self.channel.fd();
        let heard = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit));
        assert_eq!(heard, Ok(1), "the original waits for an event that does not come");
        self.channel.clear();
    }

    /// Reads what is there; asks for an event if that is less than wanted.
    fn read_some(&self, to: &mut [u8]) -> usize {
        let (words, ring) = if self.server { (LEFT, &self.left) } else { (RIGHT, &self.right) };
        let ready = || self.page.load32(words + 4).wrapping_sub(self.page.load32(words)) as usize;
        let mut there = ready();
        if there < to.len() {
            self.ask(1);
            there = ready();
        }
        let len = there.min(to.len());
        if len > 0 {
            let from = self.page.load32(words);
            for (index, byte) in to[..len].iter_mut().enumerate() {
                let at = from.wrapping_add(index as u32) & ((1 << ring.2) - 1);
                *byte = ring.0.load8(ring.1 + at as usize);
            }
            self.page.store32(words, from.wrapping_add(len as u32));
            self.notify_peer(2);
        }
        len
    }

    /// Writes as much as there is room for; asks for an event likewise.
    fn write_some(&self, bytes: &[u8]) -> usize {
        let (words, ring) = if self.server { (RIGHT, &self.right) } else { (LEFT, &self.left) };
        let size = 1usize << ring.2;
        let space = || size - self.page.load32(words + 4).wrapping_sub(self.page.load32(words)) as usize;
        let mut room = space();
        if room < bytes.len() {
            self.ask(2);
            room = space();
        }
        let len = room.min(bytes.len());
        if len > 0 {
            let from = self.page.load32(words + 4);
            for (index, byte) in bytes[..len].iter().enumerate() {
                let at = from.wrapping_add(index as u32) & (size as u32 - 1);
                ring.0.store8(ring.1 + at as usize, *byte);
            }
            self.page.store32(words + 4, from.wrapping_add(len as u32));
            self.notify_peer(1);
        }
        len
    }

    /// Reads at least one byte, and waits for it. Returns 0 once the peer is gone.
    pub fn read(&self, to: &mut [u8]) -> usize {
        loop {
            match self.read_some(to) {
                0 if self.is_open() == 0 => return 0,
                0 => self.wait(),
                len => return len,
            }
        }
    }

    /// Writes all bytes. Returns whether the peer was there.
    pub fn write(&self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            if self.is_open() == 0 {
                return false;
            }
            match self.write_some(bytes) {
                0 => self.wait(),
                len => bytes = &bytes[len..],
            }
        }
        true
    }

    /// Writes all bytes and reads so many, whichever can continue: in one thread, as programs of the original do.
    pub fn exchange(&self, mut bytes: &[u8], len: usize) -> Vec<u8> {
        let mut got = vec![0; len];
        let mut done = 0;
        while !bytes.is_empty() || done < len {
            let piece = (done + 5000).min(len);
            let (read, written) = (self.read_some(&mut got[done..piece]), self.write_some(bytes));
            if read == 0 && written == 0 {
                self.wait();
            }
            done += read;
            bytes = &bytes[written..];
        }
        got
    }

    pub fn close(self) {
        self.page.store8(if self.server { 21 } else { 20 }, 0);
        self.channel.notify();
    }
}
