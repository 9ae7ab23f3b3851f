// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accepts clients on a thread. A program that made a vchan may do something else for a while, and its client must not
//! wait for that: with the original, the memory is there and no process has to answer.
//!
//! A server has one client at a time; others wait at its listener. A thread of its own greets each client, so that a
//! silent client delays only those at the same listener.

use std::{
    collections::HashMap,
    mem::MaybeUninit,
    sync::{Arc, LazyLock, Mutex, Weak},
};

use rustix::event::epoll;
use tombolo::{Options, Stream};
use tombolo_os::lock::lock;

use crate::{
    backends,
    border::{Fault, Outcome},
    domains, hello, original,
    place::{Role, VchanAddress},
    server_listener::{self, ServerListener},
    threads::spawn,
    vchan::{Halves, Inner, Vchan},
};

/// Bytes of the ring that a client has unless the server asks for a larger one.
pub(crate) const CLIENTS_RING: u64 = 64 << 10;

/// Returns the size of a ring of at least `min` bytes.
fn ring(min: usize) -> Outcome<u64> {
    let too_large = || Fault::with(libc::EINVAL, format!("a ring of {min} bytes: {} are the most", hello::RING_MOST));
    let ring = (min as u64).max(4096).checked_next_power_of_two().ok_or_else(too_large)?;
    if ring <= hello::RING_MOST { Ok(ring) } else { Err(too_large()) }
}

/// Returns a server at `place`.
pub(crate) fn serve(place: &VchanAddress, read_min: usize, write_min: usize) -> Outcome<Vchan> {
    let vchan = match place {
        VchanAddress::Channel(address) => serve_at(address, read_min, write_min),
        VchanAddress::Original(peer, path) => original::serve(*peer, path, read_min, write_min),
    }?;
    domains::mind(place, &vchan.0)?;
    Ok(vchan)
}

fn serve_at(address: &str, read_min: usize, write_min: usize) -> Outcome<Vchan> {
    let (read, write) = (ring(read_min)?, ring(write_min)?);
    let options = Options::new().ring_size(write).largest_peer_ring(read.max(CLIENTS_RING));
    ACCEPTOR.start()?;
    let listener = backends::listen::<Stream>(address, &options)?;
    let vchan = Vchan::new(Role::Server, read as usize, write as usize)?;
    let listener = ServerListener::new(listener, read);
    let mut servers = lock(&ACCEPTOR.servers);
    servers.retain(|_, server| server.strong_count() > 0);
    servers.insert(listener.id(), Arc::downgrade(&vchan.0));
    drop(servers);
    let mut place = lock(&vchan.0.peer.listener);
    place.insert(listener).open();
    drop(place);
    Ok(vchan)
}

static ACCEPTOR: LazyLock<Acceptor> = LazyLock::new(|| Acceptor { servers: Mutex::default(), runs: Mutex::new(0) });

#[derive(Debug)]
struct Acceptor {
    /// Servers that were not closed when the last one was added, by the numbers of their listeners.
    servers: Mutex<HashMap<u64, Weak<Inner>>>,
    /// Process in which the thread runs: a forked process has no such thread.
    runs: Mutex<u32>,
}

impl Acceptor {
    fn start(&'static self) -> Outcome<()> {
        let mut runs = lock(&self.runs);
        if *runs != std::process::id() {
            spawn("vchan-doors", || self.run())?;
            *runs = std::process::id();
        }
        Ok(())
    }

    fn run(&self) {
        let mut events = [MaybeUninit::uninit(); 16];
        loop {
            let Ok((events, _)) = epoll::wait(server_listener::open_listeners(), &mut events, None) else { continue };
            for event in &*events {
                let server = lock(&self.servers).get(&event.data.u64()).and_then(Weak::upgrade);
                if let Some(server) = server {
                    admit_client(&server);
                }
            }
        }
    }
}

/// Accepts the client at a server's listener and has it greeted.
fn admit_client(server: &Arc<Inner>) {
    let mut place = lock(&server.peer.listener);
    let Some(listener) = &mut *place else { return };
    let Some((stream, ring)) = listener.accept() else { return };
    drop(place);
    let greeted = Arc::downgrade(server);
    let greeting = spawn("vchan-greeting", move || {
        let halves = greet(stream, ring);
        let Some(server) = greeted.upgrade() else { return };
        let place = lock(&server.peer.listener);
        match (&*place, halves) {
            (Some(_), Ok(halves)) => server.arrival.deliver(Ok(halves), &server.poll_descriptor),
            (Some(listener), Err(_)) => listener.open(),
            (None, _) => {}
        }
        drop(place);
        server.meet_meanwhile();
    });
    if greeting.is_err()
        && let Some(listener) = &*lock(&server.peer.listener)
    {
        listener.open();
    }
}

fn greet(stream: Stream, ring: u64) -> Outcome<Halves> {
    let (mut reader, mut writer) = stream.into_split();
    hello::send_hello(&mut writer, ring)?;
    hello::receive_hello(&mut reader)?;
    Ok((Box::new(reader), Box::new(writer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_rounded_up_and_have_an_end() {
        assert_eq!([0, 1, 4096, 4097, 1 << 20].map(|min| ring(min).unwrap()), [4096, 4096, 4096, 8192, 1 << 20]);
        assert_eq!(ring(1 << 30).unwrap(), 1 << 30);
        for min in [(1 << 30) + 1, usize::MAX] {
            assert_eq!(ring(min).unwrap_err().errno, libc::EINVAL);
        }
    }
}
