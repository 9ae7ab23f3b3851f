// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stands in for devices if the broker of programs runs on the host: regions are memfds, and the host's broker is in
//! the same process (V-2, V-4).

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use tombolo_control::{Boxes, CONNECTION_CHANNELS, NO_DOORBELL};
use tombolo_domain_ivshmem::{CLOSED, STATE_AT};
use tombolo_os::{
    event::{drain, eventfd, raise},
    lock::lock,
};

use super::{
    relay::{ConnectionEvents, Relay, RelayedLink},
    stored::{Key, StoredConnection, StoredConnections},
};
use crate::{
    endpoint::{
        connections::Agreement,
        devices::{Devices, Pages, Part, Region},
        host_session::LinkNews,
    },
    host::notifier::Lane,
};

/// Number of zero bytes that are written at a time.
const PIECE: usize = 64 << 10;

/// Memory and eventfds of each link of an account, by number and generation. The host's broker adds them before it
/// tells the account of the link.
pub type RelayedLinks = Arc<Mutex<BTreeMap<(u32, u32), Arc<RelayedLink>>>>;

/// Callback for storms; its argument is the link that is notified without end.
pub type Storms = Arc<dyn Fn(u32) + Send + Sync>;

/// A pair of outboxes.
#[derive(Debug)]
pub struct HostPages {
    boxes: Between,
    /// Eventfd that is notified when there is something to receive.
    incoming: Arc<OwnedFd>,
}

#[derive(Debug)]
enum Between {
    /// Outboxes shared with the host's broker: one memory, as in a doorbell device, and the eventfd that notifies that
    /// broker.
    Host { memory: OwnedFd, outgoing: OwnedFd },
    /// Outboxes shared with a machine's broker.
    Link(Arc<RelayedLink>, Arc<Relay>),
}

/// Offset of the account's page in the memory that it shares with the host's broker (B-3).
const OWN_AT: u64 = 4096;

impl Boxes for HostPages {
    fn load(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        let memory = match &self.boxes {
            Between::Host { memory, .. } => memory,
            Between::Link(line, _) => &line.peer,
        };
        match rustix::io::pread(memory, &mut *bytes, offset as u64)? {
            read if read == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        match &self.boxes {
            // Nobody but the broker has this memory.
            Between::Host { memory, .. } => match rustix::io::pwrite(memory, bytes, OWN_AT + offset as u64)? {
                written if written == bytes.len() => Ok(()),
                _ => Err(io::ErrorKind::WriteZero.into()),
            },
            Between::Link(line, _) => line.own_memory.store(offset as u64, bytes),
        }
    }
}

impl Pages for HostPages {
    fn notify(&self) {
        match &self.boxes {
            Between::Host { outgoing, .. } => raise(outgoing),
            Between::Link(_, relay) => relay.notify_channels([0]),
        }
    }

    fn drain(&self) {
        drain(&self.incoming);
    }
}

/// Devices of an account.
pub struct HostDevices {
    host: HostPages,
    lines: RelayedLinks,
    kept: StoredConnections,
    storms: Storms,
    /// Lane that notifies programs.
    lane: Lane,
}

impl HostDevices {
    /// Wraps `memory`, which is like that of a doorbell device. `outgoing` notifies the host's broker, which
    /// notifies through `incoming`. `lane` notifies the account's programs.
    #[must_use]
    pub fn new(
        memory: OwnedFd,
        outgoing: OwnedFd,
        incoming: OwnedFd,
        lines: RelayedLinks,
        kept: StoredConnections,
        storms: Storms,
        lane: Lane,
    ) -> Self {
        let host = HostPages { boxes: Between::Host { memory, outgoing }, incoming: Arc::new(incoming) };
        Self { host, lines, kept, storms, lane }
    }
}

impl Devices for HostDevices {
    type Pages = HostPages;
    type Region = HostRegion;

    fn host(&mut self) -> &mut HostPages {
        &mut self.host
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.host.incoming.as_fd()
    }

    /// Returns none: the host's broker tells of a link once it is there.
    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn open(&mut self, news: &LinkNews) -> io::Result<HostRegion> {
        let lines = lock(&self.lines);
        let line = lines.get(&(news.link, news.generation)).map(Arc::clone).ok_or(io::ErrorKind::NotFound)?;
        // The host's broker takes this lock, too.
        drop(lines);
        let incoming = Arc::new(eventfd(0)?);
        let (storms, link) = (Arc::clone(&self.storms), news.link);
        let relay = Relay::begin(Arc::clone(&line), Arc::clone(&incoming), self.lane.clone(), move || storms(link))?;
        let relay = Arc::new(relay);
        relay.mute(news.doorbell == NO_DOORBELL);
        let (key, kept) = ((news.link, news.generation), self.kept.clone());
        let (mut left, mut sockets) = (Vec::new(), BTreeMap::new());
        for StoredConnection { made, socket, wire } in kept.take_stored(key) {
            // No broker passed on notifications for a while, so both sides are notified once on all channels.
            wire.to.iter().for_each(|event| self.lane.notify_event(event));
            relay.connect(made.channel, wire)?;
            relay.notify_channels(made.channel..made.channel + CONNECTION_CHANNELS);
            sockets.insert(made.serial, socket);
            left.push(made);
        }
        let pages = HostPages { boxes: Between::Link(line, relay), incoming };
        Ok(HostRegion { pages, key, kept, left, sockets })
    }
}

/// Memory of a link, and the notifications of its connections.
#[derive(Debug)]
pub struct HostRegion {
    pages: HostPages,
    key: Key,
    kept: StoredConnections,
    /// Connections of an earlier broker, and in the next field their sockets, until they are asked for.
    left: Vec<Agreement>,
    sockets: BTreeMap<u32, OwnedFd>,
}

impl HostRegion {
    fn parts(&self) -> (&RelayedLink, &Relay) {
        match &self.pages.boxes {
            Between::Link(line, relay) => (line, relay),
            Between::Host { .. } => unreachable!("a region is of a link"),
        }
    }
}

impl Region for HostRegion {
    type Pages = HostPages;

    fn pages(&mut self) -> &mut HostPages {
        &mut self.pages
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.pages.incoming.as_fd()
    }

    fn set_doorbell(&mut self, doorbell: u16) {
        self.parts().1.mute(doorbell == NO_DOORBELL);
    }

    fn clear(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let (line, zeros) = (self.parts().0, [0; PIECE]);
        let mut at = offset;
        while at < offset + len {
            let piece = PIECE.min((offset + len - at) as usize);
            line.own_memory.store(at, &zeros[..piece])?;
            at += piece as u64;
        }
        Ok(())
    }

    /// Gives a program the whole region, which all programs of its account share. A program that is trusted with one
    /// connection is trusted with all of its account (V-2, ADR 0034).
    fn own(&mut self, made: &Agreement) -> io::Result<Vec<OwnedFd>> {
        let (line, relay) = self.parts();
        let events = || -> io::Result<_> { Ok([eventfd(0)?, eventfd(0)?, eventfd(0)?]) };
        let (to, from) = (events()?, events()?);
        let mut own = vec![line.own.try_clone()?];
        for event in from.iter().chain(&to) {
            own.push(event.try_clone()?);
        }
        relay.connect(made.channel, ConnectionEvents { to: to.map(Arc::new), from })?;
        Ok(own)
    }

    fn theirs(&mut self, _made: &Agreement) -> io::Result<OwnedFd> {
        self.parts().0.peer.try_clone()
    }

    /// Returns the connections of an earlier broker. A program has its windows for as long as its socket, or is gone.
    fn held(&mut self) -> io::Result<Vec<Agreement>> {
        Ok(std::mem::take(&mut self.left))
    }

    fn store_connection(&mut self, made: &Agreement, socket: BorrowedFd<'_>) -> io::Result<()> {
        let wire = self.parts().1.wire(made.channel).ok_or(io::ErrorKind::NotFound)?;
        self.kept.store_connection(self.key, made, socket, &wire)?;
        if made.theirs.1 != 0 {
            // The name states what is known of a connection, so the former name is forgotten.
            self.kept.forget(self.key, &Agreement { theirs: (0, 0), ..*made });
        }
        Ok(())
    }

    fn sockets(&mut self) -> BTreeMap<u32, OwnedFd> {
        std::mem::take(&mut self.sockets)
    }

    fn departures(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn peek(&mut self, part: Part, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let line = self.parts().0;
        let memory = if part == Part::Own { &line.own } else { &line.peer };
        match rustix::io::pread(memory, &mut *bytes, offset)? {
            read if read == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn close_orphaned(&mut self, made: &Agreement) {
        let (line, relay) = self.parts();
        // If only the peer knows the connection, its window here may be unknown (B-18).
        if made.own.1 != 0 {
            let _ = line.own_memory.store(made.own.0 + u64::from(STATE_AT), &[CLOSED]);
        }
        if made.channel != 0 {
            relay.notify_channels(made.channel..made.channel + CONNECTION_CHANNELS);
            relay.disconnect(made.channel);
        }
        self.kept.forget(self.key, made);
    }

    /// Does nothing: programs learn of it on their sockets.
    fn hang_up(&mut self) {}
}
