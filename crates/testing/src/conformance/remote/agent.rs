// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The side that operates a backend by order.

use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader, Read, Write},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    process::{Pid, Signal, kill_process},
};
use tombolo_mem::{OwnBytes, OwnData, PeerData, PeerSegment};

use super::{
    super::{memory::is_read_only, support::readable},
    frames::{Body, Op, Parts},
};
use tombolo_domain::{Doorbell, Endpoint, Listener, Offer, Rendezvous, Result, Slot};

/// An object on this side, which has a number on the other side.
enum Thing {
    Listener(Box<dyn Listener>),
    Link(Box<dyn Endpoint>),
    Bell(Arc<dyn Doorbell>),
    Own(OwnBytes),
    Peer(PeerSegment),
    Offer(Offer),
    Actor(Child),
}

/// Returns the command for a process that plays a role at a service.
type Cast = Box<dyn Fn(&str, &str) -> Command>;

struct Agent<W> {
    backend: Arc<dyn Rendezvous>,
    cast: Cast,
    things: HashMap<u64, Thing>,
    last: u64,
    out: Arc<Mutex<W>>,
    watches: Arc<Watches>,
}

/// Carries out the requests from `requests` with `backend` and answers to `answers`, until a request ends it, or the
/// stream ends. `cast` returns the command for a process that plays a role at a service, and that is killed when it is
/// no longer wanted. The process prints a line that ends in `ready` once it plays. The suite needs two roles: a
/// `mortal` connects and runs [`mortal_peer`](super::super::mortal_peer), a `listener` listens.
///
/// # Blocking
/// Until then.
///
/// # Errors
/// Errors of the stream; its end is none.
pub fn serve(
    requests: impl Read,
    answers: impl Write + Send + 'static,
    backend: Arc<dyn Rendezvous>,
    cast: impl Fn(&str, &str) -> Command + 'static,
) -> io::Result<()> {
    let out = Arc::new(Mutex::new(answers));
    let watches = Arc::new(Watches::new()?);
    let (watching, tell) = (Arc::clone(&watches), Arc::clone(&out));
    let watcher =
        thread::spawn(move || watching.run(|key, look| send(&tell, 0, &Body::default().number(key).number(look))));
    let mut agent = Agent { backend, cast: Box::new(cast), things: HashMap::new(), last: 0, out, watches };
    let mut requests = BufReader::new(requests);
    let ended = loop {
        match Parts::receive(&mut requests) {
            Ok((number, mut parts)) => match parts.op() {
                Op::End => break Ok(()),
                op => agent.serve(number, op, parts),
            },
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    drop(agent);
    watcher.join().expect("the watcher does not panic");
    ended
}

fn send(out: &Mutex<impl Write>, number: u64, body: &Body) {
    // The other side may be gone; the next request shows that.
    let _ = body.send(number, &mut *out.lock().unwrap_or_else(PoisonError::into_inner));
}

impl<W: Write + Send + 'static> Agent<W> {
    fn serve(&mut self, number: u64, op: Op, mut parts: Parts) {
        if op == Op::Wait {
            // The only call that blocks.
            let (doorbell, out) = (Arc::clone(self.doorbell(parts.number())), Arc::clone(&self.out));
            thread::spawn(move || {
                let woken = doorbell.wait(parts.slot(), parts.deadline());
                send(&out, number, &Body::answer(woken.map(|woken| Body::default().woken(woken))));
            });
            return;
        }
        let answer = Body::answer(self.act(op, parts));
        send(&self.out, number, &answer);
    }

    fn store_thing(&mut self, thing: Thing) -> u64 {
        self.last += 1;
        self.things.insert(self.last, thing);
        self.last
    }

    fn link(&mut self, number: u64) -> &mut dyn Endpoint {
        match self.things.get_mut(&number) {
            Some(Thing::Link(link)) => &mut **link,
            _ => panic!("{number} is no link"),
        }
    }

    fn doorbell(&self, number: u64) -> &Arc<dyn Doorbell> {
        match self.things.get(&number) {
            Some(Thing::Bell(doorbell)) => doorbell,
            _ => panic!("{number} is no doorbell"),
        }
    }

    fn act(&mut self, op: Op, mut parts: Parts) -> Result<Body> {
        let body = Body::default();
        Ok(match op {
            Op::Listen => {
                let listener = self.backend.listen(&parts.text())?;
                body.number(self.store_thing(Thing::Listener(listener)))
            }
            Op::Connect => {
                let (service, deadline) = (parts.text(), parts.deadline());
                let link = self.backend.connect(&service, deadline)?;
                body.number(self.store_thing(Thing::Link(link)))
            }
            Op::Accept => {
                let Some(Thing::Listener(listener)) = self.things.get_mut(&parts.number()) else {
                    panic!("no listener")
                };
                let link = listener.accept()?;
                body.number(link.map_or(0, |link| self.store_thing(Thing::Link(link))))
            }
            Op::Forget => {
                let number = parts.number();
                self.watches.forget(number);
                if let Some(Thing::Actor(mut child)) = self.things.remove(&number) {
                    let _ = child.kill();
                    let _ = child.wait();
                }
                body
            }
            Op::Allocate => {
                let (own, offer) = self.link(parts.number()).allocate(parts.number() as usize)?;
                let (_no_words, data) = own.split(0);
                let mut contents = vec![0xee; data.len()];
                data.copy_back(0, &mut contents);
                let (own, offer) = (self.store_thing(Thing::Own(data)), self.store_thing(Thing::Offer(offer)));
                body.number(own).number(offer).bytes(&contents)
            }
            Op::Retire => {
                let (link, offer) = (parts.number(), parts.number());
                let Some(Thing::Offer(offer)) = self.things.remove(&offer) else { panic!("no offer") };
                self.link(link).retire(None, offer);
                body
            }
            Op::Quarantined => body.number(self.link(parts.number()).quarantined()),
            Op::OutlivesOwner => body.byte(self.link(parts.number()).outlives_owner().into()),
            Op::Send => {
                let (link, offer, message) = (parts.number(), parts.number(), parts.bytes());
                let kept = self.things.remove(&offer);
                let sent = match &kept {
                    Some(Thing::Offer(offer)) => self.link(link).send(&message, Some(offer)),
                    _ => self.link(link).send(&message, None),
                };
                self.things.extend(kept.map(|thing| (offer, thing)));
                sent?;
                body
            }
            Op::Recv => {
                let received = self.link(parts.number()).recv(parts.number())?;
                let Some(received) = received else { return Ok(body.byte(0)) };
                let body = body.byte(1).bytes(&received.message);
                match received.segment {
                    Some(segment) => {
                        let (len, read_only) = (segment.len() as u64, is_read_only(&segment));
                        body.number(self.store_thing(Thing::Peer(segment))).number(len).byte(read_only.into())
                    }
                    None => body.number(0).number(0).byte(0),
                }
            }
            Op::Readable => {
                let (number, which, look) = (parts.number(), parts.byte(), parts.number());
                let fd = match &self.things[&number] {
                    Thing::Listener(listener) => listener.fd(),
                    Thing::Link(link) => link.fd(),
                    Thing::Bell(doorbell) => doorbell.fd(Slot::ALL[usize::from(which)]),
                    _ => panic!("{number} has no descriptor"),
                };
                let is = readable(fd);
                if !is {
                    self.watches.arm(number << 1 | u64::from(which), look, fd);
                }
                body.byte(is.into())
            }
            Op::Doorbell => {
                let doorbell = self.link(parts.number()).doorbell();
                body.number(doorbell.map_or(0, |doorbell| self.store_thing(Thing::Bell(doorbell))))
            }
            Op::Life => body.life(self.link(parts.number()).liveness()),
            Op::Peer => body.bytes(self.link(parts.number()).peer().domain.as_bytes()),
            Op::SameKernel => body.byte(self.link(parts.number()).same_kernel().into()),
            Op::Notify => {
                self.doorbell(parts.number()).notify(parts.slot());
                body
            }
            Op::Drain => {
                self.doorbell(parts.number()).drain(parts.slot());
                body
            }
            Op::Store => {
                let Some(Thing::Own(data)) = self.things.get_mut(&parts.number()) else { panic!("no own memory") };
                data.copy_in(parts.number() as usize, &parts.bytes());
                body
            }
            Op::Load => {
                let Some(Thing::Peer(segment)) = self.things.get(&parts.number()) else { panic!("no peer's memory") };
                let data = segment.data(0);
                let mut contents = vec![0; data.len()];
                data.copy_out(0, &mut contents);
                body.bytes(&contents)
            }
            Op::Cast => {
                let role = parts.text();
                let mut child = (self.cast)(&role, &parts.text())
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .spawn()
                    .expect("a process can be started");
                let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
                let ready = lines.map_while(io::Result::ok).any(|line| line.ends_with("ready"));
                assert!(ready, "{role} ended before it was ready");
                body.number(self.store_thing(Thing::Actor(child)))
            }
            Op::Signal => {
                let Some(Thing::Actor(child)) = self.things.get_mut(&parts.number()) else { panic!("no process") };
                let signal = [Signal::STOP, Signal::CONT, Signal::KILL][usize::from(parts.byte())];
                kill_process(Pid::from_child(child), signal).expect("our own child");
                if signal == Signal::KILL {
                    child.wait().expect("our own child");
                }
                body
            }
            Op::Wait | Op::End => unreachable!("not answered here"),
        })
    }
}

impl<W> Drop for Agent<W> {
    fn drop(&mut self) {
        self.watches.end();
        for thing in self.things.values_mut() {
            if let Thing::Actor(child) = thing {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// Descriptors that were not readable at a look, and whose readiness must be reported.
struct Watches {
    epoll: OwnedFd,
    over: OwnedFd,
    /// For each descriptor, by the number of its object and its index there: the look to be reported, and a copy of the
    /// descriptor.
    armed: Mutex<HashMap<u64, (u64, OwnedFd)>>,
}

/// Key that belongs to no object.
const OVER: u64 = u64::MAX;

impl Watches {
    fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let over = eventfd(0, EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &over, epoll::EventData::new_u64(OVER), epoll::EventFlags::IN)?;
        Ok(Self { epoll, over, armed: Mutex::default() })
    }

    fn arm(&self, key: u64, look: u64, fd: BorrowedFd<'_>) {
        let copy = fd.try_clone_to_owned().expect("there are descriptors");
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        self.remove(armed.remove(&key));
        let once = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        epoll::add(&self.epoll, &copy, epoll::EventData::new_u64(key), once).expect("it can be polled");
        armed.insert(key, (look, copy));
    }

    fn forget(&self, number: u64) {
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        [0, 1].into_iter().for_each(|which| self.remove(armed.remove(&(number << 1 | which))));
    }

    /// Removes a descriptor from the epoll set before it is closed: otherwise the copy's entry would stay with the open
    /// file.
    fn remove(&self, armed: Option<(u64, OwnedFd)>) {
        if let Some((_, copy)) = armed {
            epoll::delete(&self.epoll, copy.as_fd()).expect("it was added");
        }
    }

    fn end(&self) {
        rustix::io::write(&self.over, &1u64.to_ne_bytes()).expect("one fits");
    }

    fn run(&self, tell: impl Fn(u64, u64)) {
        loop {
            let mut events = [MaybeUninit::uninit(); 8];
            let ready = match epoll::wait(&self.epoll, &mut events, None) {
                Ok((ready, _)) => ready,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => panic!("epoll_wait: {error}"),
            };
            for event in ready {
                let key = event.data.u64();
                if key == OVER {
                    return;
                }
                let armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
                let look = armed.get(&key).map(|(look, _)| *look);
                drop(armed);
                if let Some(look) = look {
                    tell(key, look);
                }
            }
        }
    }
}
