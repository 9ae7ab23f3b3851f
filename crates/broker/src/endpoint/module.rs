// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Implements [`Devices`] with the devices of the kernel module.

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
    uapi::{WINDOW_PEER, WindowArgs},
};

use crate::endpoint::{
    connections::Agreement,
    devices::{Devices, Pages, Part, Region},
    host_session::LinkNews,
};

/// The guest's page of the doorbell device's memory, and the host's, each as offset and length (B-3).
const OWN_PAGE: (u64, u64) = (4096, 4096);
const HOST_PAGE: (u64, u64) = (0, 4096);
/// Vector of notifications to and from the host (B-8).
const HOST_VECTOR: u16 = 0;
/// Folder in which device nodes appear.
const NODES: &str = "/dev";

/// The devices of this machine.
#[derive(Debug)]
pub struct Machine {
    doorbell: Node,
    vectors: u16,
    host: ModuleBoxes,
    /// Inotify descriptor that reports new device nodes.
    arrivals: OwnedFd,
}

impl Machine {
    /// Finds the doorbell device and the host's page in it.
    ///
    /// # Errors
    /// States what is missing, and what to do about it.
    pub fn begin() -> io::Result<Self> {
        let (doorbell, vectors, host) = open_doorbell()?;
        let arrivals = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        // ATTRIB reports a node again once udev has given it to the group.
        inotify::add_watch(&arrivals, NODES, inotify::WatchFlags::CREATE | inotify::WatchFlags::ATTRIB)?;
        Ok(Self { doorbell, vectors, host, arrivals })
    }

    fn drain_arrivals(&self) {
        let mut names = [MaybeUninit::uninit(); 4096];
        while rustix::io::read(&self.arrivals, &mut names).is_ok() {}
    }
}

/// Opens the doorbell device. Returns its node, the number of its vectors, and the host's page in it.
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
            // The device went while it was being opened.
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

/// Memory of a link, which consists of two devices.
#[derive(Debug)]
pub struct ModuleRegion {
    link: ModuleLink,
    boxes: ModuleBoxes,
    /// Vector of the peer's doorbell.
    vector: u16,
    /// Readable once for each change of the link. The link itself would stay readable after its end.
    departures: OwnedFd,
    /// Readable once for each time that the kernel held interrupts back.
    alarm: OwnedFd,
    /// Connections whose own window was made, so that the kernel tells the peer when they end.
    announced: BTreeSet<u32>,
}

/// Returns a descriptor that becomes readable once for each time that `link` has the event.
fn once(link: &ModuleLink, event: epoll::EventFlags) -> io::Result<OwnedFd> {
    let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&events, link, epoll::EventData::new_u64(0), event | epoll::EventFlags::ET)?;
    Ok(events)
}

/// Returns the events that a descriptor of [`once`] has had since the last call.
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

    /// Makes the own window of a connection. When it is closed, the kernel tells the peer.
    fn own_window(&self, made: &Agreement) -> io::Result<OwnedFd> {
        self.link.window(WindowArgs {
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
        if let Err(error) = self.link.set_notify_target((doorbell, self.vector)) {
            tracing::error!("a doorbell cannot be changed: {error}");
        }
    }

    fn clear(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.link.clear(offset, len)
    }

    fn clear_ahead(&mut self, offset: u64, len: u64) {
        // The next connection clears what is left, and reports an error if that fails.
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
        self.link.window(WindowArgs { cookie, offset, length, flags: WINDOW_PEER, ..WindowArgs::default() })
    }

    fn held(&mut self) -> io::Result<Vec<Agreement>> {
        came(&self.departures);
        Ok(connections_of(&self.link.windows()?))
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

    /// Does nothing if the kernel did it. A window that was never given to a program is made and closed now, with the
    /// same effect.
    fn close_orphaned(&mut self, made: &Agreement) {
        if !self.announced.remove(&made.serial) && made.own.1 != 0 && made.channel != 0 {
            drop(self.own_window(made));
        }
    }

    fn hang_up(&mut self) {
        // It can only fail if the link has ended, and then the waits have ended as well.
        let _ = self.link.hang_up();
    }
}

/// Returns the connections to which these windows belong, as far as the windows tell. The broker's own windows have no
/// cookie.
fn connections_of(windows: &[WindowArgs]) -> Vec<Agreement> {
    let mut connections: Vec<Agreement> = Vec::new();
    for window in windows {
        let Some(serial) = u32::try_from(window.cookie).ok().filter(|serial| *serial != 0) else { continue };
        let place = connections.iter().position(|made| made.serial == serial).unwrap_or_else(|| {
            connections.push(Agreement { serial, own: (0, 0), theirs: (0, 0), channel: 0 });
            connections.len() - 1
        });
        let made = &mut connections[place];
        if window.flags & WINDOW_PEER != 0 {
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
        let own =
            WindowArgs { cookie: 7, offset: 4096, length: 8192, channel: 4, channels: 3, ..WindowArgs::default() };
        let theirs = WindowArgs { cookie: 7, offset: 12288, length: 4096, flags: WINDOW_PEER, ..WindowArgs::default() };
        let brokers = WindowArgs { length: 1 << 20, channels: 1, ..WindowArgs::default() };
        let lone = WindowArgs { cookie: 9, offset: 0x10000, length: 4096, flags: WINDOW_PEER, ..WindowArgs::default() };
        let found = connections_of(&[theirs, brokers, own, lone]);
        let whole = Agreement { serial: 7, own: (4096, 8192), theirs: (12288, 4096), channel: 4 };
        assert_eq!(found, [whole, Agreement { serial: 9, own: (0, 0), theirs: (0x10000, 4096), channel: 0 }]);
    }
}
