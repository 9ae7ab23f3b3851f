// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The stand-in for a backend that an agent operates elsewhere.

use std::{
    collections::HashMap,
    fmt,
    io::{BufReader, Read, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{CWD, Mode, OFlags},
};
use tombolo_mem::{OwnSegment, PeerSegment, create_forgeable};

use super::{
    super::{Mortal, support::accept},
    frames::{Body, Op, Parts},
};
use tombolo_domain::{
    Deadline, Doorbell, Endpoint, Listener, Liveness, Memory, Offer, Peer, Received, Rendezvous, Result, Slot, Woken,
};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory on the other side, and its copy here.
struct Copy {
    /// Contents last known to be the same on both sides, for memory that this side's test writes.
    written: Option<Vec<u8>>,
    here: OwnedFd,
    len: usize,
}

struct Line {
    scheme: &'static str,
    out: Mutex<Box<dyn Write + Send>>,
    last: AtomicU64,
    /// Callers that wait for an answer, by request number; `None` once the stream broke.
    asked: Mutex<Option<HashMap<u64, mpsc::Sender<Parts>>>>,
    /// Eventfds that stand for the agent's descriptors, each with the number of its latest look, the only one that
    /// counts.
    watched: Mutex<HashMap<u64, (u64, Arc<OwnedFd>)>>,
    copies: Mutex<HashMap<u64, Copy>>,
}

impl Line {
    fn call(&self, body: &Body) -> Result<Parts> {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let (tell, answer) = mpsc::channel();
        lock(&self.asked).as_mut().expect("the agent is there").insert(number, tell);
        body.send(number, &mut *lock(&self.out)).expect("the agent is there");
        answer.recv().expect("the agent answers").answer()
    }

    /// Sends a request that cannot fail on the other side, and that does not matter if that side is gone.
    fn send_request(&self, body: &Body) {
        if lock(&self.asked).is_some() && !thread::panicking() {
            let _ = self.call(body);
        }
    }

    fn deliver_reply(&self, number: u64, mut parts: Parts) {
        if number == 0 {
            let (key, look) = (parts.number(), parts.number());
            if let Some((_, event)) = lock(&self.watched).get(&key).filter(|(last, _)| *last == look) {
                raise(event);
            }
        } else if let Some(asker) = lock(&self.asked).as_mut().and_then(|asked| asked.remove(&number)) {
            let _ = asker.send(parts);
        }
    }

    /// Makes `event` readable if the agent's descriptor is, or else once that becomes readable.
    fn poll_remote(&self, number: u64, which: u8, event: &Arc<OwnedFd>) {
        let (key, look) = (number << 1 | u64::from(which), self.last.fetch_add(1, Ordering::Relaxed));
        lock(&self.watched).insert(key, (look, Arc::clone(event)));
        let _ = rustix::io::read(event, &mut [0; 8]);
        let asked = Body::of(Op::Readable).number(number).byte(which).number(look);
        if self.call(&asked).expect("looking works").byte() == 1 {
            raise(event);
        }
    }

    fn forget(&self, number: u64) {
        [0, 1].into_iter().for_each(|which| drop(lock(&self.watched).remove(&(number << 1 | which))));
        self.send_request(&Body::of(Op::Forget).number(number));
    }

    /// Brings one copy up to date, in its direction.
    fn sync_copy(&self, number: u64, copy: &mut Copy) {
        match &mut copy.written {
            Some(written) => {
                let now = contents(copy.here.as_fd(), copy.len);
                // The words at the beginning describe the data behind them, so they are stored last.
                for at in (0..copy.len).step_by(4096).rev() {
                    let page = at..copy.len.min(at + 4096);
                    if now[page.clone()] != written[page.clone()] {
                        let store = Body::of(Op::Store).number(number).number(at as u64).bytes(&now[page]);
                        self.send_request(&store);
                    }
                }
                *written = now;
            }
            None => {
                let now = self.call(&Body::of(Op::Load).number(number)).expect("loading works").bytes();
                overwrite(copy.here.as_fd(), &now);
            }
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let _ = Body::of(Op::End).send(0, &mut *lock(&self.out));
    }
}

fn event() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("there are descriptors"))
}

fn raise(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).expect("one fits");
}

fn contents(memory: BorrowedFd<'_>, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let read = rustix::io::pread(memory, &mut bytes, 0);
    assert_eq!(read, Ok(len), "memory is read whole");
    bytes
}

fn overwrite(memory: BorrowedFd<'_>, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(memory, bytes, 0), Ok(bytes.len()), "memory is written whole");
}

/// A backend that an agent on the other side operates.
#[derive(Clone)]
pub struct Remote(Arc<Line>);

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}

impl Remote {
    /// Returns the backend `scheme` of the agent that reads what is written to `requests` and answers in `answers`.
    #[must_use]
    pub fn new(
        scheme: &'static str,
        requests: impl Write + Send + 'static,
        answers: impl Read + Send + 'static,
    ) -> Self {
        let line = Arc::new(Line {
            scheme,
            out: Mutex::new(Box::new(requests)),
            // 0 is the number of messages that answer no request.
            last: AtomicU64::new(1),
            asked: Mutex::new(Some(HashMap::new())),
            watched: Mutex::default(),
            copies: Mutex::default(),
        });
        // The stream ends when this side has dropped the line.
        let listening = Arc::downgrade(&line);
        thread::spawn(move || {
            let mut answers = BufReader::new(answers);
            while let Ok((number, parts)) = Parts::receive(&mut answers) {
                let Some(line) = listening.upgrade() else { return };
                line.deliver_reply(number, parts);
            }
            if let Some(line) = listening.upgrade() {
                *lock(&line.asked) = None;
            }
        });
        Self(line)
    }

    /// Brings the memory of both sides up to date. What was stored here reaches the memory that the other side owns,
    /// and the contents of the other side's mappings reach the copies here.
    pub fn sync_memory(&self) {
        for (number, copy) in &mut *lock(&self.0.copies) {
            self.0.sync_copy(*number, copy);
        }
    }

    /// Starts a mortal peer in a process on the other side. It is connected by a link that `here` accepts at `service`.
    #[must_use]
    pub fn mortal(&self, here: &dyn Rendezvous, service: &str) -> Box<dyn Mortal> {
        let mut listener = here.listen(service).expect("a fresh service is free");
        let actor = self.cast("mortal", service);
        Box::new(RemoteMortal { link: accept(&mut *listener), actor })
    }

    /// Starts a process on the other side that plays `role` at `service`.
    #[must_use]
    pub fn cast(&self, role: &str, service: &str) -> Actor {
        let asked = Body::of(Op::Cast).bytes(role.as_bytes()).bytes(service.as_bytes());
        Actor(self.thing(&asked).expect("a process is started").expect("it has a number"))
    }

    /// Returns the object that the agent keeps under the number in its answer; `None` for 0.
    fn thing(&self, asked: &Body) -> Result<Option<Thing>> {
        let number = self.0.call(asked)?.number();
        Ok((number != 0).then(|| Thing { line: Arc::clone(&self.0), number }))
    }
}

impl Rendezvous for Remote {
    fn scheme(&self) -> &'static str {
        self.0.scheme
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        let thing = self.thing(&Body::of(Op::Listen).bytes(service.as_bytes()))?.expect("a listener");
        Ok(Box::new(RemoteListener { thing, event: event() }))
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        let asked = Body::of(Op::Connect).bytes(service.as_bytes()).deadline(deadline);
        Ok(RemoteLink::boxed(self.thing(&asked)?.expect("a link")))
    }
}

/// An object that the agent keeps until this is dropped.
struct Thing {
    line: Arc<Line>,
    number: u64,
}

impl fmt::Debug for Thing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elsewhere", self.number)
    }
}

impl Thing {
    fn ask(&self, op: Op) -> Body {
        Body::of(op).number(self.number)
    }

    fn call(&self, op: Op) -> Parts {
        self.line.call(&self.ask(op)).expect("this call does not fail")
    }
}

impl Drop for Thing {
    fn drop(&mut self) {
        // The last stores reach the other side before the object is dropped there.
        let copy = lock(&self.line.copies).remove(&self.number);
        if let Some(mut copy) = copy.filter(|copy| copy.written.is_some()) {
            self.line.sync_copy(self.number, &mut copy);
        }
        self.line.forget(self.number);
    }
}

#[derive(Debug)]
struct RemoteListener {
    thing: Thing,
    event: Arc<OwnedFd>,
}

impl Listener for RemoteListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        let remote = Remote(Arc::clone(&self.thing.line));
        Ok(remote.thing(&self.thing.ask(Op::Accept))?.map(RemoteLink::boxed))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.thing.line.poll_remote(self.thing.number, 0, &self.event);
        self.event.as_fd()
    }
}

#[derive(Debug)]
struct RemoteLink {
    thing: Thing,
    event: Arc<OwnedFd>,
}

impl RemoteLink {
    fn boxed(thing: Thing) -> Box<dyn Endpoint> {
        Box::new(Self { thing, event: event() })
    }
}

impl Memory for RemoteLink {
    fn allocate(&mut self, len: usize) -> Result<(OwnSegment, Offer)> {
        let line = &self.thing.line;
        let mut made = line.call(&self.thing.ask(Op::Allocate).number(len as u64))?;
        let [own, offer] = [made.number(), made.number()].map(|number| Thing { line: Arc::clone(line), number });
        let found = made.bytes();
        let (segment, here) = create_forgeable("elsewhere", found.len()).expect("there is memory");
        overwrite(here.as_fd(), &found);
        let len = found.len();
        lock(&line.copies).insert(own.number, Copy { written: Some(found), here, len });
        Ok((segment.guarded(own), Offer::new(offer)))
    }

    fn retire(&mut self, segment: Option<OwnSegment>, offer: Offer) {
        drop(segment);
        let offer: Thing = offer.into_token().expect("an offer made by this backend");
        self.thing.line.send_request(&self.thing.ask(Op::Retire).number(offer.number));
    }

    fn quarantined(&self) -> u64 {
        self.thing.call(Op::Quarantined).number()
    }

    fn outlives_owner(&self) -> bool {
        self.thing.call(Op::OutlivesOwner).byte() == 1
    }
}

impl Endpoint for RemoteLink {
    fn send(&mut self, message: &[u8], offer: Option<&Offer>) -> Result<()> {
        // Earlier stores arrive before the message.
        lock(&self.thing.line.copies)
            .iter_mut()
            .filter(|(_, copy)| copy.written.is_some())
            .for_each(|(number, copy)| self.thing.line.sync_copy(*number, copy));
        let offer = offer.map_or(0, |offer| offer.token::<Thing>().expect("an offer made by this backend").number);
        self.thing.line.call(&self.thing.ask(Op::Send).number(offer).bytes(message)).map(drop)
    }

    fn recv(&mut self, max_segment: u64) -> Result<Option<Received>> {
        let line = &self.thing.line;
        let mut came = line.call(&self.thing.ask(Op::Recv).number(max_segment))?;
        if came.byte() == 0 {
            return Ok(None);
        }
        let (message, number, len, read_only) = (came.bytes(), came.number(), came.number() as usize, came.byte());
        let segment = (number != 0).then(|| {
            let thing = Thing { line: Arc::clone(line), number };
            let (_nobody_writes, here) = create_forgeable("elsewhere", len).expect("there is memory");
            // The copy can be made writable if the original can.
            let access = if read_only == 1 { OFlags::RDONLY } else { OFlags::RDWR };
            let path = format!("/proc/self/fd/{}", here.as_raw_fd());
            let opened = rustix::fs::openat(CWD, path, access | OFlags::CLOEXEC, Mode::empty());
            let opened = opened.expect("one's own memory opens");
            lock(&line.copies).insert(number, Copy { written: None, here, len });
            PeerSegment::map_guarded(opened.as_fd(), len, thing).expect("it maps")
        });
        Ok(Some(Received { message, segment }))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.thing.line.poll_remote(self.thing.number, 0, &self.event);
        self.event.as_fd()
    }

    fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        let remote = Remote(Arc::clone(&self.thing.line));
        let thing = remote.thing(&self.thing.ask(Op::Doorbell)).expect("this call does not fail")?;
        Some(Arc::new(RemoteDoorbell { thing, events: [event(), event()] }))
    }

    fn liveness(&self) -> Liveness {
        self.thing.call(Op::Life).life()
    }

    fn peer(&self) -> Peer {
        Peer { domain: self.thing.call(Op::Peer).text(), ..Peer::default() }
    }

    fn same_kernel(&self) -> bool {
        self.thing.call(Op::SameKernel).byte() == 1
    }
}

#[derive(Debug)]
struct RemoteDoorbell {
    thing: Thing,
    events: [Arc<OwnedFd>; 2],
}

impl Doorbell for RemoteDoorbell {
    fn notify(&self, slot: Slot) {
        self.thing.line.call(&self.thing.ask(Op::Notify).slot(slot)).expect("to notify cannot fail");
    }

    fn wait(&self, slot: Slot, deadline: Deadline) -> Result<Woken> {
        Ok(self.thing.line.call(&self.thing.ask(Op::Wait).slot(slot).deadline(deadline))?.woken())
    }

    fn drain(&self, slot: Slot) {
        self.thing.line.call(&self.thing.ask(Op::Drain).slot(slot)).expect("to drain cannot fail");
    }

    fn fd(&self, slot: Slot) -> BorrowedFd<'_> {
        let event = &self.events[slot.index()];
        self.thing.line.poll_remote(self.thing.number, slot.index() as u8, event);
        event.as_fd()
    }
}

/// A process on the other side, which is killed when this is dropped.
#[derive(Debug)]
pub struct Actor(Thing);

impl Actor {
    /// Kills the process now.
    pub fn kill(&self) {
        self.signal(2);
    }

    fn signal(&self, signal: u8) {
        self.0.line.call(&self.0.ask(Op::Signal).byte(signal)).expect("our own child");
    }
}

struct RemoteMortal {
    link: Box<dyn Endpoint>,
    actor: Actor,
}

impl Mortal for RemoteMortal {
    fn link(&mut self) -> &mut dyn Endpoint {
        &mut *self.link
    }

    fn pause(&mut self) {
        self.actor.signal(0);
    }

    fn resume(&mut self) {
        self.actor.signal(1);
    }

    fn kill(&mut self) {
        self.actor.signal(2);
    }
}
