// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Passes notifications between a virtual machine and the programs of this host that have connections with
//! it (V-2, V-3).
//!
//! A machine notifies a link through one eventfd, and the sequence words of its region tell which event channels it
//! meant (B-3). A program has an eventfd for each channel. One thread for each link translates between the two. A
//! machine or a program could fill an eventfd that it shares with the thread, or make it blocking. So the thread reads
//! without waiting, and notifies through a [`Lane`].

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use tombolo_control::{BOX_LEN, CHANNELS, CONNECTION_CHANNELS, SEQUENCE_AT};
use tombolo_os::{
    event::{drain, eventfd, raise},
    lock::lock,
};

use crate::{
    host::{mapped::Mapped, notifier::Lane},
    panics,
};

/// Largest cost of a machine's notifications in each [`WINDOW`] (B-8). A notification that wakes somebody costs 1, any
/// other [`WASTED_COST`].
const BUDGET: u64 = 1 << 18;
const WASTED_COST: u64 = 16;
const WINDOW: Duration = Duration::from_secs(1);
/// Time for which a doorbell is taken away after a storm (B-8).
pub const STORM_PAUSE: Duration = Duration::from_secs(10);
/// Interval at which the sequence words are read while the machine's doorbell is taken away.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Subject of an epoll event: the number of a channel, or one of these.
const DOORBELL: u64 = 1 << 32;
const WAKE: u64 = 2 << 32;

/// One generation of a link, as the host has it.
#[derive(Debug)]
pub struct RelayedLink {
    /// Region that the host's programs write.
    pub own: OwnedFd,
    /// The same region, mapped for the broker: any program can make a write to the file block.
    pub own_memory: Mapped,
    /// Region of the machine, open for reading.
    pub peer: OwnedFd,
    /// Eventfd that notifies the machine.
    pub outgoing: Arc<OwnedFd>,
    /// Lane that writes to `outgoing`.
    pub lane: Lane,
    /// Eventfd through which the machine notifies.
    pub incoming: OwnedFd,
}

/// The eventfds of a connection.
#[derive(Debug)]
pub struct ConnectionEvents {
    /// Eventfds that notify the program.
    pub to: [Arc<OwnedFd>; CONNECTION_CHANNELS as usize],
    /// Eventfds through which the program notifies.
    pub from: [OwnedFd; CONNECTION_CHANNELS as usize],
}

/// The broker's handle of the thread, which ends when this is dropped.
#[derive(Debug)]
pub struct Relay(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    line: Arc<RelayedLink>,
    epoll: OwnedFd,
    /// Signals a change of `orders`.
    wake: OwnedFd,
    orders: Mutex<Orders>,
}

#[derive(Debug, Default)]
struct Orders {
    /// Connections by their first channel.
    wires: BTreeMap<u16, Arc<ConnectionEvents>>,
    /// Channels on which the machine is to be notified.
    pending: BTreeSet<u16>,
    /// Whether the machine is not to be notified.
    muted: bool,
    over: bool,
}

impl Relay {
    /// Starts the thread. It passes channel 0 to `broker` and notifies programs through `programs`. It calls `storm`
    /// when the machine notifies without end.
    ///
    /// # Errors
    /// No descriptor or no thread is available.
    pub fn begin(
        line: Arc<RelayedLink>,
        broker: Arc<OwnedFd>,
        programs: Lane,
        storm: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let (epoll, wake) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, eventfd(0)?);
        epoll::add(&epoll, &line.incoming, epoll::EventData::new_u64(DOORBELL), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared { line, epoll, wake, orders: Mutex::default() });
        // Earlier notifications of the machine are dropped. The host's own sequence words continue at their last
        // values.
        let (seen, words) = (read_sequence(&shared.line.peer)?, read_sequence(&shared.line.own)?);
        let (account, shares) = (Account::new(), Arc::clone(&shared));
        let mut thread = Thread { shared: shares, broker, programs, seen, words, account, storm };
        let what = "notifications of a link are not carried";
        std::thread::Builder::new().name("tombolo-relay".into()).spawn(move || {
            let shared = Arc::clone(&thread.shared);
            let is_over = |rest| panics::is_stopped_within(&shared.wake, rest) && shared.orders().over;
            panics::work_until_done(what, is_over, || thread.run());
        })?;
        Ok(Self(shared))
    }

    fn order<T>(&self, what: impl FnOnce(&mut Orders) -> T) -> T {
        let done = what(&mut self.0.orders());
        raise(&self.0.wake);
        done
    }

    /// Starts to pass on the notifications of a connection.
    ///
    /// # Errors
    /// The program's eventfds cannot be polled.
    pub fn connect(&self, channel: u16, wire: ConnectionEvents) -> io::Result<()> {
        self.disconnect(channel);
        for (channel, from) in (channel..).zip(&wire.from) {
            epoll::add(&self.0.epoll, from, epoll::EventData::new_u64(channel.into()), epoll::EventFlags::IN)?;
        }
        self.0.orders().wires.insert(channel, Arc::new(wire));
        Ok(())
    }

    /// Returns the eventfds of a connection.
    #[must_use]
    pub fn wire(&self, channel: u16) -> Option<Arc<ConnectionEvents>> {
        self.0.orders().wires.get(&channel).cloned()
    }

    /// Forgets a connection.
    pub fn disconnect(&self, channel: u16) {
        if let Some(wire) = self.0.orders().wires.remove(&channel) {
            // The program may have copies, so closing the broker's descriptors does not remove them from epoll.
            for from in &wire.from {
                let _ = epoll::delete(&self.0.epoll, from);
            }
            // The program may have blocked a lane in a write. Without a reader, that write would never return.
            wire.to.iter().for_each(|to| _ = drain(to));
        }
    }

    /// Notifies the machine on these channels.
    pub fn notify_channels(&self, channels: impl IntoIterator<Item = u16>) {
        self.order(|orders| orders.pending.extend(channels));
    }

    /// Stops notifying the machine, or resumes. On resuming, it notifies the machine once, because it may have missed
    /// something (B-8).
    pub fn mute(&self, muted: bool) {
        self.order(|orders| orders.muted = muted);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.order(|orders| orders.over = true);
    }
}

impl Shared {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        lock(&self.orders)
    }
}

type SequenceWords = [u32; CHANNELS as usize];

/// Returns the sequence words of a region.
fn read_sequence(region: &OwnedFd) -> io::Result<SequenceWords> {
    let mut bytes = [0; BOX_LEN];
    if rustix::io::pread(region, &mut bytes[..], SEQUENCE_AT as u64)? != bytes.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut words = [0; CHANNELS as usize];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    Ok(words)
}

/// Cost of a machine's notifications (B-8).
#[derive(Debug)]
struct Account {
    since: Instant,
    spent: u64,
    /// Time until which the machine's doorbell is taken away, if it spent too much.
    stormed: Option<Instant>,
}

impl Account {
    fn new() -> Self {
        Self { since: Instant::now(), spent: 0, stormed: None }
    }

    /// Charges `count` notifications, of which `woke` woke somebody. Returns whether that is a storm, once for each
    /// storm.
    fn charge(&mut self, count: u64, woke: u64, now: Instant) -> bool {
        if now.duration_since(self.since) >= WINDOW {
            (self.since, self.spent) = (now, 0);
            self.stormed = self.stormed.filter(|until| now < *until);
        }
        // A machine can fake any number of notifications.
        let wasted = WASTED_COST.saturating_mul(count.saturating_sub(woke));
        self.spent = self.spent.saturating_add(woke).saturating_add(wasted);
        let new = self.spent > BUDGET && self.stormed.is_none();
        if new {
            self.stormed = Some(now + STORM_PAUSE + WINDOW);
        }
        new
    }
}

struct Thread<S> {
    shared: Arc<Shared>,
    /// Eventfd that notifies the broker.
    broker: Arc<OwnedFd>,
    /// Lane that notifies programs.
    programs: Lane,
    /// Sequence words of the machine, as last seen.
    seen: SequenceWords,
    /// Sequence words of the host.
    words: SequenceWords,
    account: Account,
    storm: S,
}

impl<S: Fn()> Thread<S> {
    fn run(&mut self) -> io::Result<()> {
        loop {
            let mut events = [MaybeUninit::uninit(); 32];
            let timeout = self.account.stormed.map(|_| &POLL_INTERVAL);
            let events: Vec<u64> = match epoll::wait(&self.shared.epoll, &mut events, timeout) {
                Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if events.is_empty() {
                self.forward_notifications(0);
            }
            for about in events {
                match about {
                    DOORBELL => {
                        let count = drain(&self.shared.line.incoming);
                        self.forward_notifications(count);
                    }
                    WAKE => {
                        drain(&self.shared.wake);
                        let mut orders = self.shared.orders();
                        if orders.over {
                            return Ok(());
                        }
                        let pending = std::mem::take(&mut orders.pending);
                        drop(orders);
                        // The machine is notified even without a channel: it may have missed something while it was
                        // muted.
                        self.notify_channels(pending);
                    }
                    channel => self.forward_to_machine(channel as u16),
                }
            }
        }
    }

    /// Returns the connection to which a channel belongs, and the index of the channel in it.
    fn wire(&self, channel: u16) -> Option<(Arc<ConnectionEvents>, usize)> {
        let nth = channel.checked_sub(1)? % CONNECTION_CHANNELS;
        let wire = self.shared.orders().wires.get(&(channel - nth))?.clone();
        Some((wire, nth.into()))
    }

    fn forward_to_machine(&mut self, channel: u16) {
        if let Some((wire, nth)) = self.wire(channel)
            && drain(&wire.from[nth]) != 0
        {
            self.notify_channels([channel]);
        }
    }

    /// Increments the sequence words of the channels, and notifies the machine unless it has complained.
    fn notify_channels(&mut self, channels: impl IntoIterator<Item = u16>) {
        for channel in channels {
            let word = &mut self.words[usize::from(channel)];
            *word = word.wrapping_add(1);
            let at = SEQUENCE_AT as u64 + 4 * u64::from(channel);
            let _ = self.shared.line.own_memory.store(at, &word.to_le_bytes());
        }
        if !self.shared.orders().muted {
            self.shared.line.lane.notify_event(&self.shared.line.outgoing);
        }
    }

    /// Handles `count` notifications of the machine: wakes those whose sequence words have changed.
    fn forward_notifications(&mut self, count: u64) {
        let Ok(words) = read_sequence(&self.shared.line.peer) else { return };
        let mut woke = 0;
        for (channel, (seen, word)) in (0u16..).zip(self.seen.iter_mut().zip(words)) {
            if *seen == word {
                continue;
            }
            *seen = word;
            if channel == 0 {
                woke += u64::from(is_silent(&self.broker));
                raise(&*self.broker);
            } else {
                let nth = (channel - 1) % CONNECTION_CHANNELS;
                let wire = self.shared.orders().wires.get(&(channel - nth)).cloned();
                if let Some(event) = wire.as_ref().map(|wire| &wire.to[usize::from(nth)]) {
                    woke += u64::from(is_silent(event));
                    self.programs.notify_event(event);
                }
            }
        }
        if self.account.charge(count, woke.min(count), Instant::now()) {
            (self.storm)();
        }
    }
}

/// Returns whether an eventfd has no pending notification, so that a new one wakes somebody.
fn is_silent(event: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(event, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok() && !polled[0].revents().contains(PollFlags::IN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::memory;

    fn copy(event: &OwnedFd) -> OwnedFd {
        event.try_clone().unwrap()
    }

    fn wait(event: &OwnedFd) -> bool {
        let mut polled = [PollFd::new(event, PollFlags::IN)];
        let long = Timespec { tv_sec: 20, tv_nsec: 0 };
        poll(&mut polled, Some(&long)).unwrap();
        drain(event) != 0
    }

    /// A relay and the machine on its other side.
    struct World {
        relay: Relay,
        line: Arc<RelayedLink>,
        broker: Arc<OwnedFd>,
        storms: Arc<OwnedFd>,
        words: SequenceWords,
    }

    impl World {
        fn new() -> Self {
            let region = || memory::create("test", 64 << 10).unwrap();
            let (outgoing, incoming) = (Arc::new(eventfd(0).unwrap()), eventfd(0).unwrap());
            let own = region();
            let own_memory = Mapped::new(&own).unwrap();
            let line =
                Arc::new(RelayedLink { own, own_memory, peer: region(), outgoing, lane: Lane::default(), incoming });
            let (broker, storms) = (Arc::new(eventfd(0).unwrap()), Arc::new(eventfd(0).unwrap()));
            let storm = Arc::clone(&storms);
            let relay = Relay::begin(Arc::clone(&line), Arc::clone(&broker), Lane::default(), move || raise(&*storm));
            let relay = relay.unwrap();
            Self { relay, line, broker, storms, words: [0; 512] }
        }

        /// Returns a program's eventfds: those that it notifies, and those that notify it.
        fn open_connection(&self, channel: u16) -> [[OwnedFd; 3]; 2] {
            let events = || [(); 3].map(|()| eventfd(0).unwrap());
            let (to, from) = (events(), events());
            let mine = [from.each_ref().map(copy), to.each_ref().map(copy)];
            self.relay.connect(channel, ConnectionEvents { to: to.map(Arc::new), from }).unwrap();
            mine
        }

        fn count_notification(&mut self, channel: u16) {
            self.words[usize::from(channel)] += 1;
            let word = self.words[usize::from(channel)].to_le_bytes();
            rustix::io::pwrite(&self.line.peer, &word, SEQUENCE_AT as u64 + 4 * u64::from(channel)).unwrap();
        }

        fn notify_from_machine(&mut self, channel: u16) {
            self.count_notification(channel);
            raise(&self.line.incoming);
        }
    }

    #[test]
    fn v2_v3_notifications_reach_the_channel_that_was_meant_both_ways() {
        let mut world = World::new();
        let [from, to] = world.open_connection(4);
        let [_, other] = world.open_connection(7);
        world.notify_from_machine(5);
        assert!(wait(&to[1]));
        world.notify_from_machine(0);
        assert!(wait(&world.broker));
        assert_eq!([&to[0], &to[2], &other[0], &other[1], &other[2]].map(drain), [0; 5]);
        raise(&from[2]);
        assert!(wait(&world.line.outgoing));
        assert_eq!(read_sequence(&world.line.own).unwrap().iter().position(|word| *word == 1), Some(6));
        world.relay.notify_channels([0]);
        assert!(wait(&world.line.outgoing));
        assert_eq!(read_sequence(&world.line.own).unwrap()[0], 1);
        // Notifications of a connection that is over are ignored, though its program continues.
        world.relay.disconnect(4);
        raise(&from[0]);
        world.notify_from_machine(4);
        world.notify_from_machine(7);
        assert!(wait(&other[0]));
        assert_eq!((drain(&to[0]), read_sequence(&world.line.own).unwrap()[4]), (0, 0));
    }

    #[test]
    fn b8_machine_that_storms_is_noticed_once_and_its_connections_go_on() {
        let mut world = World::new();
        let [_, to] = world.open_connection(1);
        let mut polled = [PollFd::new(&*world.storms, PollFlags::IN)];
        let began = Instant::now();
        while poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 0 {
            (0..1000).for_each(|_| raise(&world.line.incoming));
            assert!(began.elapsed() < Duration::from_secs(20), "nobody notices");
        }
        assert_eq!(drain(&world.storms), 1);
        // Its doorbell is taken away: only its sequence words are left, and they are polled.
        world.count_notification(1);
        assert!(wait(&to[0]));
    }

    #[test]
    fn b8_canary_notifications_that_wake_somebody_are_no_storm() {
        let mut account = Account::new();
        let now = account.since;
        assert!((0..BUDGET).all(|_| !account.charge(1, 1, now)));
        let mut account = Account::new();
        assert!((0..BUDGET / WASTED_COST).all(|_| !account.charge(1, 0, now)));
        assert!(account.charge(1, 0, now) && !account.charge(1, 0, now));
        assert!(Account::new().charge(u64::MAX, 1, now), "one that fills its eventfd");
        // Notifications before its doorbell is back belong to this storm.
        assert!(!account.charge(BUDGET, 0, now + STORM_PAUSE));
        assert!(account.charge(BUDGET, 0, now + STORM_PAUSE + 2 * WINDOW));
    }

    #[test]
    fn v2_program_that_makes_its_eventfds_block_does_not_stop_the_others_reads() {
        let mut world = World::new();
        let [from, _] = world.open_connection(1);
        let [_, to] = world.open_connection(4);
        rustix::io::ioctl_fionbio(&from[0], false).unwrap();
        raise(&from[0]);
        assert!(wait(&world.line.outgoing));
        world.notify_from_machine(4);
        assert!(wait(&to[0]));
    }

    #[test]
    fn b8_machine_that_complained_is_not_notified_and_once_it_may_be_is() {
        let world = World::new();
        world.relay.mute(true);
        let [from, _] = world.open_connection(1);
        raise(&from[0]);
        let mut polled = [PollFd::new(&from[0], PollFlags::IN)];
        while poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1 {
            std::thread::yield_now();
        }
        drain(&*world.line.outgoing);
        world.relay.notify_channels([0]);
        world.relay.mute(false);
        assert!(wait(&world.line.outgoing));
    }
}
