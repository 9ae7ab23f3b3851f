// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The devices of this machine, by the kernel module.

use std::{
    collections::BTreeSet,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    event::{Timespec, epoll},
    fs::inotify,
};
use tombolo_control::{HOST_DOORBELL, vector_of};
use tombolo_domain_ivshmem::{
    CLOSED, ModuleBoxes, STATE_AT,
    module::{ModuleLink, Node},
    uapi::{SLICE_PEER, SliceArgs},
};

use crate::endpoint::{
    connections::Agreement,
    devices::{Devices, Pages, Part, Region},
    host_session::LinkNews,
};

/// The guest's page of the doorbell device's memory, and the host's (B-3).
const OWN_PAGE: (u64, u64) = (4096, 4096);
const HOST_PAGE: (u64, u64) = (0, 4096);
/// The vector of the host, there and here (B-8).
const HOST_VECTOR: u16 = 0;
/// Where nodes of devices come.
const NODES: &str = "/dev";

/// The devices.
#[derive(Debug)]
pub struct Machine {
    doorbell: Node,
    vectors: u16,
    host: ModuleBoxes,
    /// Tells of new nodes.
    arrivals: OwnedFd,
}

impl Machine {
    /// Finds the doorbell device and the host's page in it.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    pub fn begin() -> io::Result<Self> {
        let (doorbell, vectors, host) = open_doorbell()?;
        let arrivals = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        // A node that udev has not given to the group yet comes a second time.
        inotify::add_watch(&arrivals, NODES, inotify::WatchFlags::CREATE | inotify::WatchFlags::ATTRIB)?;
        Ok(Self { doorbell, vectors, host, arrivals })
    }

    fn drain_arrivals(&self) {
        let mut names = [MaybeUninit::uninit(); 4096];
        while rustix::io::read(&self.arrivals, &mut names).is_ok() {}
    }
}

/// The doorbell device, its vectors, and the host's page in it.
fn open_doorbell() -> io::Result<(Node, u16, ModuleBoxes)> {
    let doorbell = Node::doorbell()?;
    let vectors = u16::try_from(doorbell.info()?.vectors).map_err(io::Error::other)?;
    let link = doorbell.link(OWN_PAGE, &doorbell, HOST_PAGE, &doorbell, (HOST_DOORBELL, HOST_VECTOR), HOST_VECTOR)?;
    let host = ModuleBoxes::open(&link)?;
    Ok((doorbell, vectors, host))
}

impl Pages for ModuleBoxes {
    fn notify(&self) {
        Self::notify(self);
    }

    fn drain(&self) {
        Self::drain(self);
    }
}

impl Devices for Machine {
    type Pages = ModuleBoxes;
    type Region = ModuleRegion;

    fn host(&mut self) -> &mut ModuleBoxes {
        &mut self.host
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.host.fd()
    }

    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        Some(self.arrivals.as_fd())
    }

    fn renew(&mut self) -> Option<io::Result<()>> {
        self.drain_arrivals();
        let gone = Some(rustix::io::Errno::NODEV.raw_os_error());
        Some(match open_doorbell() {
            Ok((doorbell, vectors, host)) => {
                (self.doorbell, self.vectors, self.host) = (doorbell, vectors, host);
                Ok(())
            }
            // One that goes while it is looked at.
            Err(error) if error.raw_os_error() == gone => Err(io::ErrorKind::NotFound.into()),
            Err(error) => Err(error),
        })
    }

    fn open(&mut self, news: &LinkNews) -> io::Result<ModuleRegion> {
        self.drain_arrivals();
        let (own, theirs) = (Node::at(news.own.as_str())?, Node::at(news.theirs.as_str())?);
        for node in [&own, &theirs] {
            let size = node.info()?.size;
            if size != news.size {
                return Err(io::Error::other(format!("a region has {size} bytes, the host said {}", news.size)));
            }
        }
        let (whole, vector, wait) =
            ((0, news.size), vector_of(news.link, news.vectors), vector_of(news.link, self.vectors));
        let link = own.link(whole, &theirs, whole, &self.doorbell, (news.doorbell, vector), wait)?;
        ModuleRegion::begin(link, vector)
    }
}

/// Memory of a link: two devices.
#[derive(Debug)]
pub struct ModuleRegion {
    link: ModuleLink,
    boxes: ModuleBoxes,
    /// The peer's vector.
    vector: u16,
    /// Readable once for each change of the link: at its end the link itself would be readable for good.
    departures: OwnedFd,
    /// Readable once each time that interrupts had to be held back.
    alarm: OwnedFd,
    /// Connections whose own window was made: the kernel tells their ends.
    announced: BTreeSet<u32>,
}

/// A descriptor that is readable once for each time that `link` has such an event.
fn once(link: &ModuleLink, event: epoll::EventFlags) -> io::Result<OwnedFd> {
    let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&events, link, epoll::EventData::new_u64(0), event | epoll::EventFlags::ET)?;
    Ok(events)
}

/// The events of such a descriptor that came since this was asked last.
fn came(events: &OwnedFd) -> epoll::EventFlags {
    let (mut room, now) = ([MaybeUninit::uninit(); 1], Timespec { tv_sec: 0, tv_nsec: 0 });
    let (came, _) = epoll::wait(events, &mut room, Some(&now)).unwrap_or_default();
    came.first().map_or(epoll::EventFlags::empty(), |event| event.flags)
}

impl ModuleRegion {
    fn begin(link: ModuleLink, vector: u16) -> io::Result<Self> {
        let boxes = ModuleBoxes::open(&link)?;
        let (departures, alarm) = (once(&link, epoll::EventFlags::IN)?, once(&link, epoll::EventFlags::PRI)?);
        Ok(Self { link, boxes, vector, departures, alarm, announced: BTreeSet::new() })
    }

    /// The own window of a connection, whose end the kernel tells the peer.
    fn own_window(&self, made: &Agreement) -> io::Result<OwnedFd> {
        self.link.slice(SliceArgs {
            cookie: made.serial.into(),
            offset: made.own.0,
            length: made.own.1,
            flags: 0,
            channel: made.channel.into(),
            channels: tombolo_control::CONNECTION_CHANNELS.into(),
            below: CLOSED.into(),
            closed: CLOSED.into(),
            state: [STATE_AT; 2],
        })
    }
}

impl Region for ModuleRegion {
    type Pages = ModuleBoxes;

    fn pages(&mut self) -> &mut ModuleBoxes {
        &mut self.boxes
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.boxes.fd()
    }

    fn set_doorbell(&mut self, doorbell: u16) {
        if let Err(error) = self.link.notify_other((doorbell, self.vector)) {
            tracing::error!("a doorbell cannot be changed: {error}");
        }
    }

    fn clear(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.link.clear(offset, len)
    }

    fn clear_ahead(&mut self, offset: u64, len: u64) {
        // Who gets it next clears what is left, and hears of it if that fails.
        let _ = self.link.clear(offset, len);
    }

    fn own(&mut self, made: &Agreement) -> io::Result<Vec<OwnedFd>> {
        let own = self.own_window(made)?;
        self.announced.insert(made.serial);
        Ok(vec![own])
    }

    fn theirs(&mut self, made: &Agreement) -> io::Result<OwnedFd> {
        let (offset, length) = made.theirs;
        let cookie = made.serial.into();
        self.link.slice(SliceArgs { cookie, offset, length, flags: SLICE_PEER, ..SliceArgs::default() })
    }

    fn held(&mut self) -> io::Result<Vec<Agreement>> {
        came(&self.departures);
        Ok(connections_of(&self.link.slices()?))
    }

    fn departures(&self) -> Option<BorrowedFd<'_>> {
        Some(self.departures.as_fd())
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        Some(self.alarm.as_fd())
    }

    fn is_stormed(&mut self) -> bool {
        came(&self.alarm).contains(epoll::EventFlags::PRI)
    }

    fn peek(&mut self, part: Part, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.link.peek(part == Part::Theirs, offset, bytes)
    }

    /// The kernel did it, unless the windows were never given to anybody: then what it does at their end is done now.
    fn bequeath(&mut self, made: &Agreement) {
        if !self.announced.remove(&made.serial) && made.own.1 != 0 && made.channel != 0 {
            drop(self.own_window(made));
        }
    }

    fn hang_up(&mut self) {
        // What it could fail at is what it brings about.
        let _ = self.link.hang_up();
    }
}

/// The connections whose windows these are, as far as the windows say. What the broker has itself has no cookie.
fn connections_of(windows: &[SliceArgs]) -> Vec<Agreement> {
    let mut connections: Vec<Agreement> = Vec::new();
    for window in windows {
        let Some(serial) = u32::try_from(window.cookie).ok().filter(|serial| *serial != 0) else { continue };
        let place = connections.iter().position(|made| made.serial == serial).unwrap_or_else(|| {
            connections.push(Agreement { serial, own: (0, 0), theirs: (0, 0), channel: 0 });
            connections.len() - 1
        });
        let made = &mut connections[place];
        if window.flags & SLICE_PEER != 0 {
            made.theirs = (window.offset, window.length);
        } else {
            made.own = (window.offset, window.length);
            made.channel = u16::try_from(window.channel).unwrap_or_default();
        }
    }
    connections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b16_connections_are_found_again_by_their_windows() {
        let own = SliceArgs { cookie: 7, offset: 4096, length: 8192, channel: 4, channels: 3, ..SliceArgs::default() };
        let theirs = SliceArgs { cookie: 7, offset: 12288, length: 4096, flags: SLICE_PEER, ..SliceArgs::default() };
        let brokers = SliceArgs { length: 1 << 20, channels: 1, ..SliceArgs::default() };
        let lone = SliceArgs { cookie: 9, offset: 0x10000, length: 4096, flags: SLICE_PEER, ..SliceArgs::default() };
        let found = connections_of(&[theirs, brokers, own, lone]);
        let whole = Agreement { serial: 7, own: (4096, 8192), theirs: (12288, 4096), channel: 4 };
        assert_eq!(found, [whole, Agreement { serial: 9, own: (0, 0), theirs: (0x10000, 4096), channel: 0 }]);
    }
}
