// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs an interface and the link behind it: meets the peer, exchanges hellos, moves frames, and starts again when the
//! link ends.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use tombolo::{BackendError, Ending, Error as ChannelError, Listener, Messages, Options};
use tombolo_os::lock::lock;

use crate::{
    config::{Config, Place},
    counters::Counters,
    error::{Error, Os, Result},
    flag::{Flag, is_ready, wait_any},
    frame::Limits,
    greeting::{Callers, Failed, PATIENCE},
    handle::{Handle, IpConfig, PortConfig},
    hello::{self, FRAME_MOST, Hello},
    kernel::Kernel,
    nic::Nic,
    pump::{End, Pump},
    status::{PeerStatus, State, Status},
    tap::Tap,
};

/// Longest time for one attempt to meet the peer, so that a request to end the interface is soon noticed.
const TRY: Duration = Duration::from_millis(250);
/// Shortest and longest pause between failing attempts; the pause grows from one to the other (N-11).
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// Interval between checks of the peer's liveness. Every fourth also checks the interface, which its administrator may
/// have changed.
const LOOK: Duration = Duration::from_millis(250);
const LOOKS_EACH: u32 = 4;
/// Time that the module may take for what a peer sent before its side ended, if the peer's kernel reported the end, and
/// if the broker did. In the first case the module sees the end too.
const REST: [Duration; 2] = [Duration::from_secs(3), Duration::from_millis(500)];
/// Largest number of would-be peers refused at a time while the interface has a peer.
const CALLERS_EACH: usize = 64;
/// Time to wait for the engine's end, which nothing but the kernel can delay.
const STOP: Duration = Duration::from_secs(10);
/// Callback that receives a line for people when something changes.
pub type Report = Box<dyn Fn(&str) + Send>;

/// State that the engine's thread shares with other threads.
#[derive(Debug)]
struct Shared {
    stop: Flag,
    ended: Flag,
    counters: Counters,
    nic: Nic,
    /// The bridge port that the interface is, if any; below, its IP address.
    port: Option<PortConfig>,
    ip: Option<IpConfig>,
    status: Mutex<Status>,
}

/// An interface that runs in threads of its own.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    thread: thread::JoinHandle<Result<()>>,
}

impl Engine {
    /// Makes the interface, begins to listen if it is to, and starts the thread that moves its frames.
    ///
    /// # Errors
    /// The interface or the address cannot be used. A peer that is not there yet is no error.
    pub fn start(config: Config, report: Report) -> Result<Self> {
        let address = config.place.address();
        let failed = |source| Error::Address { address: address.into(), source };
        tombolo::address(address).map_err(failed)?;
        let options = options(config.ring);
        let listener = match &config.place {
            Place::Connect(_) => None,
            Place::Listen(_) => Some(tombolo::listen_with::<Messages>(address, &options).map_err(failed)?),
        };
        let nic = Nic::open(&config)?;
        let link = nic.handle().link()?;
        let status = Status::new(&config, nic.engine(), link.mac, link.mtu);
        let shared = Arc::new(Shared {
            stop: Flag::new().os("eventfd")?,
            ended: Flag::new().os("eventfd")?,
            counters: Counters::default(),
            nic,
            port: config.nic.port.clone(),
            ip: config.nic.ip,
            status: Mutex::new(status),
        });
        let supervisor = Supervisor {
            shared: Arc::clone(&shared),
            wanted_mtu: link.mtu,
            told: String::new(),
            options,
            listener,
            callers: Callers::new(config.member.clone()),
            config,
            complained: None,
            report,
        };
        let run = || supervisor.run();
        let thread = thread::Builder::new().name("net".into()).spawn(run).os("clone")?;
        Ok(Self { shared, thread })
    }

    /// Returns the current status.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut status = lock(&self.shared.status).clone();
        [status.sent, status.received] = self.shared.nic.figures(&self.shared.counters);
        status.seconds = status.since.map_or(0, |since| since.elapsed().as_secs());
        status
    }

    /// Makes the interface a bridge port again if it no longer is one, and restores how its peer is reached: the kernel
    /// forgets that when an interface is switched off. Returns whether it was no port. Call this now and then.
    ///
    /// # Errors
    /// The bridge is not in the interface's namespace, or the kernel refuses to make the interface its port.
    pub fn keep_port(&self) -> Result<bool> {
        let Shared { nic, port, ip, .. } = &*self.shared;
        port.as_ref().map_or(Ok(false), |port| nic.handle().keep_port(port, *ip))
    }

    /// Returns a descriptor that polls readable when the engine has ended by itself.
    #[must_use]
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.shared.ended.as_fd()
    }

    /// Ends the engine, or returns why it has ended by itself.
    ///
    /// # Blocking
    /// Until its threads have ended and the interface is gone. No peer can delay that. If the kernel takes more than
    /// ten seconds, this returns all the same.
    ///
    /// # Errors
    /// The reason for which the engine had to end.
    pub fn stop(self) -> Result<()> {
        self.shared.stop.raise();
        wait_any(&[self.ended()], Some(STOP)).os("poll")?;
        if !self.shared.ended.is_raised() {
            return Ok(());
        }
        self.thread.join().expect("the engine does not panic")
    }
}

fn options(ring: u64) -> Options {
    let options = Options::new().ring_size(ring).handshake_timeout(PATIENCE);
    match thread::available_parallelism() {
        // With one CPU no other thread can run while this one spins.
        Ok(cpus) if cpus.get() == 1 => options.spin(Duration::ZERO),
        _ => options,
    }
}

/// The thread that owns the interface.
struct Supervisor {
    shared: Arc<Shared>,
    config: Config,
    options: Options,
    listener: Option<Listener<Messages>>,
    /// Callers that have connected and not sent a hello yet.
    callers: Callers,
    /// Time of the last report of a caller's fault.
    complained: Option<Instant>,
    report: Report,
    /// MTU that the interface's administrator wants; a link may have a smaller one.
    wanted_mtu: u32,
    /// Last line that was reported.
    told: String,
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if let Some(port) = &self.shared.port {
            self.shared.nic.handle().leave(port);
        }
        self.shared.ended.raise();
    }
}

impl Supervisor {
    fn run(mut self) -> Result<()> {
        let mut pause = PAUSES[0];
        while !self.shared.stop.is_raised() {
            let own = self.own_hello()?;
            let lasted = match self.link_once(&own) {
                Ok(Some(lasted)) => lasted?,
                Ok(None) => continue,
                // The next caller need not wait because of what this one did.
                Err(failed) if failed.is_callers() && self.is_listening() => {
                    self.complain(&failed);
                    continue;
                }
                Err(failed) => {
                    self.report_line(State::Waiting, &failed.line(&self.config.place));
                    // If no peer listened, `connect` has paused already.
                    if failed.is_absence() { PAUSES[1] } else { Duration::ZERO }
                }
            };
            // Pauses longer each time for a peer whose links fail, or end at once.
            pause = if lasted < PAUSES[1] { (pause * 2).min(PAUSES[1]) } else { PAUSES[0] };
            wait_any(&[self.shared.stop.as_fd()], Some(pause)).os("poll")?;
        }
        Ok(())
    }

    /// Meets the peer and runs one link with it. Returns how long the link lasted, or `None` if no peer came.
    fn link_once(&mut self, own: &Hello) -> Result<Option<Result<Duration>>, Failed> {
        let Some((channel, peer)) = self.meet(own)? else { return Ok(None) };
        let begun = Instant::now();
        let end = self.run_link(channel, own, &peer);
        Ok(Some(end.map(|end| {
            self.report_end(&end);
            begun.elapsed()
        })))
    }

    /// Makes this side's hello from the interface as it is now (N-6).
    fn own_hello(&mut self) -> Result<Hello> {
        let link = self.shared.nic.handle().link()?;
        self.wanted_mtu = link.mtu.clamp(hello::MTU_LEAST, hello::MTU_MOST);
        let mut status = lock(&self.shared.status);
        (status.mac, status.mtu) = (link.mac, link.mtu);
        Ok(Hello { features: self.shared.nic.takes(), mtu: self.wanted_mtu, frame_most: FRAME_MOST, mac: link.mac })
    }

    fn is_listening(&self) -> bool {
        matches!(self.config.place, Place::Listen(_))
    }

    /// Meets the peer and exchanges hellos with it. Returns `None` if no peer has come so far, or its hello is still
    /// awaited.
    fn meet(&mut self, own: &Hello) -> Result<Option<(Messages, Hello)>, Failed> {
        self.callers.keep_only_greeted_with(own);
        if !self.is_listening() && self.callers.is_empty() {
            let Some(channel) = self.connect()? else { return Ok(None) };
            self.callers.add(channel, own);
        }
        let until = Instant::now() + TRY;
        loop {
            // Callers that are connected already come first.
            if let Some(heard) = self.callers.receive_caller() {
                return heard.map(Some);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.shared.stop.is_raised() {
                break;
            }
            let is_watched = self.is_listening() && self.accept_callers(own)?;
            let most = if self.is_listening() && !is_watched { left.min(PAUSES[0]) } else { left };
            let mut fds = self.callers.fds();
            fds.extend(self.listener.as_ref().filter(|_| is_watched).map(AsFd::as_fd));
            fds.push(self.shared.stop.as_fd());
            wait_any(&fds, Some(most)).map_err(|error| Failed::Meeting(BackendError::os("poll", error).into()))?;
        }
        // The last peer's fault stays readable until another peer comes.
        if self.is_listening() && self.callers.is_empty() && lock(&self.shared.status).reason.is_empty() {
            self.report_line(State::Waiting, &format!("waits at {} for its peer", self.config.place.address()));
        }
        Ok(None)
    }

    /// Connects in a separate thread, because a listener may delay that, and the engine must still be able to end.
    /// Returns `None` if it is to end.
    fn connect(&self) -> Result<Option<Messages>, Failed> {
        let address = self.config.place.address().to_owned();
        let options = self.options.clone().wait_for_listener(TRY);
        let is_over = Arc::new(Flag::new().map_err(Failed::Thread)?);
        let (gives, gets) = mpsc::channel();
        let connect = {
            let is_over = Arc::clone(&is_over);
            move || {
                // The receiver is gone if the interface is to end.
                let _ = gives.send(tombolo::connect_with(&address, &options));
                is_over.raise();
            }
        };
        thread::Builder::new().name("net-meets".into()).spawn(connect).map_err(Failed::Thread)?;
        wait_any(&[is_over.as_fd(), self.shared.stop.as_fd()], None).map_err(Failed::Thread)?;
        gets.try_recv().map_or(Ok(None), |met| met.map(Some).map_err(Failed::Meeting))
    }

    /// Accepts callers as long as there is room. Returns whether it is useful to watch the listener afterwards.
    fn accept_callers(&mut self, own: &Hello) -> Result<bool, Failed> {
        let listener = match self.listener.take() {
            Some(listener) => listener,
            None => tombolo::listen_with(self.config.place.address(), &self.options).map_err(Failed::Meeting)?,
        };
        let listener = self.listener.insert(listener);
        while self.callers.make_room() {
            match listener.try_accept() {
                Ok(Some(channel)) => self.callers.add(channel, own),
                Ok(None) => return Ok(true),
                Err(ChannelError::Domain(BackendError::Crowded(_) | BackendError::Limit { .. })) => break,
                Err(error) => {
                    // For example, a broker that was restarted must be told of the listener again.
                    self.listener = None;
                    return Err(Failed::Meeting(error));
                }
            }
        }
        Ok(false)
    }

    /// Runs one link, from the two hellos to its end (N-10).
    fn run_link(&mut self, channel: Messages, own: &Hello, peer: &Hello) -> Result<End> {
        // No packet may be longer than the MTU of either interface (N-5).
        let mtu = own.mtu.min(peer.mtu);
        let shared = Arc::clone(&self.shared);
        let handle = shared.nic.handle();
        handle.set_mtu(mtu)?;
        let end = match &shared.nic {
            Nic::Tap(tap) => self.run_tap(tap, channel, own, peer),
            Nic::Kernel(kernel) => self.run_kernel(kernel, channel, own, peer),
        };
        handle.settle_carrier(shared.port.as_ref());
        if let Ok(End::Interface(error)) = &end
            && Errno::from_io_error(error) == Some(Errno::BADFD)
        {
            return Err(Error::Removed(handle.name()));
        }
        // The MTU of the link ends with it; one that the administrator set meanwhile stays (N-5).
        let restore_mtu = || match handle.link()?.mtu {
            now if now == mtu => handle.set_mtu(self.wanted_mtu),
            _ => Ok(()),
        };
        let restored = restore_mtu();
        end.and_then(|end| restored.map(|()| end))
    }

    fn run_tap(&mut self, tap: &Tap, channel: Messages, own: &Hello, peer: &Hello) -> Result<End> {
        tap.set_offload(peer.gives())?;
        let shared = Arc::clone(&self.shared);
        let counters = &shared.counters;
        counters.sent.stale.add(tap.discard_waiting());
        let over = Flag::new().os("eventfd")?;
        let watch = channel.watch();
        let (sender, mut receiver) = channel.into_split();
        tap.set_carrier(true)?;
        tap.handle().settle_carrier(shared.port.as_ref());
        self.report_link(&watch.peer(), own, peer);
        let to_peer = Limits::new(peer, None);
        let source = Some(peer.mac).filter(|_| !self.config.any_source);
        let from_peer = Limits::new(own, source);
        let first_end = Mutex::new(None::<End>);
        // The thread that notices the peer's end does this itself: another thread would have to wake, and might wait
        // for a CPU.
        let lose_carrier = || {
            let off = tap.set_carrier(false);
            tap.handle().settle_carrier(shared.port.as_ref());
            off
        };
        let finish = |end: End| {
            let is_news = !matches!(end, End::Stopped) && lock(&first_end).is_none();
            lock(&first_end).get_or_insert(end);
            if is_news {
                // Repeated below, where an error is reported.
                let _ = lose_carrier();
            }
            over.raise();
        };
        let pump = Pump { tap, over: &over };
        let looked = thread::scope(|scope| {
            // The sender is dropped, and so closed, when its thread ends: the peer learns that now, not when both
            // threads have ended.
            scope.spawn(|| finish(pump.send(&mut { sender }, &to_peer, &counters.sent)));
            scope.spawn(|| finish(pump.receive(&mut receiver, &from_peer, &counters.received)));
            let looked = self.watch_link(over.as_fd(), None, &watch, own, peer);
            let looked = looked.map(|end| end.into_iter().for_each(&finish));
            over.raise();
            looked.and(lose_carrier())
        });
        let end = lock(&first_end).take().unwrap_or(End::Stopped);
        if end.is_peers() {
            pump.receive_rest(&mut receiver, &from_peer, &counters.received);
        }
        let end = end.judged_by(&mut receiver);
        match end {
            End::Interface(_) => Ok(end),
            end => looked.map(|()| end),
        }
    }

    /// Runs a link whose frames the module moves; this process checks the peer's liveness and the interface.
    fn run_kernel(&mut self, kernel: &Kernel, mut channel: Messages, own: &Hello, peer: &Hello) -> Result<End> {
        let watch = channel.watch();
        let lent = match kernel.begin(&mut channel, own, peer, self.config.any_source)? {
            Ok(lent) => lent,
            Err(end) => return Ok(end),
        };
        kernel.handle().settle_carrier(self.shared.port.as_ref());
        self.report_link(&watch.peer(), own, peer);
        let looked = self.watch_link(kernel.as_fd(), Some(lent.parts.news.as_fd()), &watch, own, peer);
        if matches!(looked, Ok(Some(End::Peer(_)))) {
            // The module does not notice that a machine ended. An older module refuses this call, and switches the
            // carrier off once the channel is taken back.
            let _ = kernel.handle().lose_carrier();
        }
        kernel.handle().settle_carrier(self.shared.port.as_ref());
        // The module may still be passing on what the peer had sent (N-10).
        let rest = match &looked {
            Ok(Some(End::Peer(Ending::ProcessGone))) => REST[0],
            Ok(Some(End::Peer(Ending::DomainGone))) => REST[1],
            _ => Duration::ZERO,
        };
        let waited = wait_any(&[kernel.as_fd(), self.shared.stop.as_fd()], Some(rest));
        let ended = kernel.finish(&mut channel, &lent)?;
        let looked = looked.and_then(|end| Ok(waited.os("poll").map(|()| end)?))?;
        let end = ended.or(looked).unwrap_or(End::Stopped);
        Ok(end.judged_by(channel.split().1))
    }

    fn watch_link(
        &mut self,
        over: BorrowedFd<'_>,
        news: Option<BorrowedFd<'_>>,
        watch: &tombolo::Watch,
        own: &Hello,
        peer: &Hello,
    ) -> Result<Option<End>> {
        let shared = Arc::clone(&self.shared);
        let mtu = own.mtu.min(peer.mtu);
        LinkWatch { handle: shared.nic.handle(), over, news, stop: &shared.stop, watch, own, mtu }
            .run(&mut self.listener)
    }

    fn report_link(&mut self, peer: &tombolo::Peer, own: &Hello, hello: &Hello) {
        let mtu = own.mtu.min(hello.mtu);
        let features = hello.features.names().join(" ");
        let line = format!(
            "linked with {} at {}, {}, MTU {mtu}, it takes {}",
            peer.domain,
            self.config.place.address(),
            hello.mac,
            if features.is_empty() { "plain frames" } else { &features }
        );
        {
            let mut status = lock(&self.shared.status);
            (status.since, status.mtu) = (Some(Instant::now()), mtu);
            status.links += 1;
            status.peer = Some(PeerStatus {
                domain: peer.domain.clone(),
                mac: hello.mac,
                mtu: hello.mtu,
                features: hello.features.names(),
            });
        }
        self.report_line(State::Linked, &line);
    }

    fn report_end(&mut self, end: &End) {
        {
            let mut status = lock(&self.shared.status);
            (status.peer, status.since) = (None, None);
        }
        let why = match end {
            End::Stopped => return,
            End::Peer(Ending::Closed) => "the peer closed".to_owned(),
            End::Peer(Ending::Aborted) => "the peer gave up".to_owned(),
            End::Peer(Ending::DomainGone) => "the peer's domain died".to_owned(),
            End::Peer(Ending::Revoked) => "the memory was taken back".to_owned(),
            End::Peer(_) => "the peer's process died".to_owned(),
            End::Channel(error) => error.to_string(),
            End::Interface(error) => format!("the interface failed: {error}"),
            End::Changed(what) => (*what).to_owned(),
            End::Unfit => "the peer's ring has less than 256 KiB, or is broken (N-1)".to_owned(),
            End::Corrupt(clause) => format!("the peer broke the specification: R-{clause}"),
        };
        self.report_line(State::Waiting, &format!("the link ended: {why}"));
    }

    /// Reports a caller's fault. Callers can cause faults as often as they like, so not each is reported.
    fn complain(&mut self, failed: &Failed) {
        let line = failed.line(&self.config.place);
        if self.complained.is_none_or(|at| at.elapsed() >= PAUSES[1]) {
            self.complained = Some(Instant::now());
            self.report_line(State::Waiting, &line);
        } else {
            self.set_state(State::Waiting, &line);
        }
    }

    fn set_state(&self, state: State, line: &str) {
        let mut status = lock(&self.shared.status);
        (status.state, status.reason) = (state, line.into());
    }

    /// Reports a line unless it is the same as the last one.
    fn report_line(&mut self, state: State, line: &str) {
        self.set_state(state, line);
        if self.told != line {
            (self.report)(&format!("{}: {line}", self.shared.nic.handle().name()));
            self.told = line.into();
        }
    }
}

/// Everything that is checked while a link lasts.
struct LinkWatch<'a> {
    handle: &'a Handle,
    /// Polls readable once the link is over.
    over: BorrowedFd<'a>,
    /// Polls readable when the peer's liveness may have changed.
    news: Option<BorrowedFd<'a>>,
    stop: &'a Flag,
    watch: &'a tombolo::Watch,
    own: &'a Hello,
    mtu: u32,
}

impl LinkWatch<'_> {
    /// Waits until the link is over. Returns how it ended if this check ended it.
    fn run(&self, listener: &mut Option<Listener<Messages>>) -> Result<Option<End>> {
        // A `news` descriptor that has just woken this thread is left out of the next wait: a peer may notify it for
        // nothing.
        let mut has_heard = false;
        for looks in 1_u32.. {
            let news = self.news.filter(|_| !has_heard);
            let fds: Vec<_> = [self.over, self.stop.as_fd()].into_iter().chain(news).collect();
            wait_any(&fds, Some(LOOK)).os("poll")?;
            has_heard = news.map_or(Ok(false), is_ready).os("poll")?;
            if self.stop.is_raised() || is_ready(self.over).os("poll")? {
                break;
            }
            // A peer that is paused keeps its link (N-10).
            match self.watch.liveness() {
                tombolo::Liveness::ProcessGone => return Ok(Some(End::Peer(Ending::ProcessGone))),
                tombolo::Liveness::DomainGone => return Ok(Some(End::Peer(Ending::DomainGone))),
                tombolo::Liveness::Revoked => return Ok(Some(End::Peer(Ending::Revoked))),
                _ => {}
            }
            // A second peer is refused at once, because the interface has one (N-11).
            if let Some(listener) = listener {
                // Each channel closes as it is dropped.
                let _ = (0..CALLERS_EACH).find(|_| !matches!(listener.try_accept(), Ok(Some(_))));
            }
            if looks % LOOKS_EACH == 0 {
                let link = self.handle.link()?;
                let changes = [
                    (link.mac != self.own.mac, "its address was changed"),
                    (link.mtu != self.mtu, "its MTU was changed"),
                ];
                if let Some((_, what)) = changes.into_iter().find(|(changed, _)| *changed) {
                    return Ok(Some(End::Changed(what)));
                }
            }
        }
        Ok(None)
    }
}
