// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects a client to its server: at once, or once the server is there.

use std::{sync::Arc, thread, time::Duration};

use tombolo::{Options, Stream};

use crate::{
    acceptor::CLIENTS_RING,
    backends,
    border::{Fault, Outcome},
    domains::{self, Domain},
    hello, original,
    place::{Role, VchanAddress},
    threads::spawn,
    vchan::{Halves, Inner, Vchan},
};

/// Time that a client waits for a server before it checks whether to give up.
const TURN: Duration = Duration::from_millis(200);

/// Returns a client of the server at `place`, which must be there.
pub(crate) fn join(place: &VchanAddress) -> Outcome<Vchan> {
    joined(place, meet(place, None, || true)?)
}

fn joined(place: &VchanAddress, halves: Halves) -> Outcome<Vchan> {
    let vchan = Vchan::new(Role::Client, halves.0.capacity(), halves.1.capacity())?;
    vchan.0.arrival.deliver(Ok(halves), &vchan.0.poll_descriptor);
    vchan.0.meet()?;
    mind(place, &vchan.0)?;
    Ok(vchan)
}

/// Watches the peer's domain for the original's layout only: for channels the backend reports its end.
fn mind(place: &VchanAddress, vchan: &Arc<Inner>) -> Outcome<()> {
    if matches!(place, VchanAddress::Original(..)) { domains::mind(place, vchan) } else { Ok(()) }
}

/// Returns whether the server is not there yet, or was there and is gone again.
fn is_early(met: &Outcome<Halves>) -> bool {
    matches!(met, Err(Fault { errno: libc::ENOENT | libc::ECONNRESET, .. }))
}

/// Returns a client that waits for its server in the background.
pub(crate) fn join_later(place: VchanAddress) -> Outcome<Vchan> {
    let vchan = Vchan::new(Role::Client, 4096, CLIENTS_RING as usize)?;
    let waiting = Arc::downgrade(&vchan.0);
    spawn("vchan-joining", move || {
        let mut domain = Domain::of(&place);
        while waiting.strong_count() > 0 {
            let met = meet(&place, Some(TURN), || waiting.strong_count() > 0);
            let Some(inner): Option<Arc<Inner>> = waiting.upgrade() else { return };
            if let Some(met) = in_time(met, &mut domain) {
                let met = met.and_then(|halves| mind(&place, &inner).map(|()| halves));
                return inner.arrival.deliver(met, &inner.poll_descriptor);
            }
        }
    })?;
    Ok(vchan)
}

/// Returns a client that waits for its server, however long that takes.
pub(crate) fn join_in_time(place: &VchanAddress) -> Outcome<Vchan> {
    let mut domain = Domain::of(place);
    loop {
        if let Some(met) = in_time(meet(place, Some(TURN), || true), &mut domain) {
            return joined(place, met?);
        }
    }
}

/// Returns the outcome of looking for a server, or `None` where it may still come. A server whose domain is gone is not
/// waited for.
fn in_time(met: Outcome<Halves>, domain: &mut Option<Domain>) -> Option<Outcome<Halves>> {
    if !is_early(&met) {
        return Some(met);
    }
    domain.as_mut().and_then(|domain| domain.is_gone().then(|| Err(domain.fault())))
}

fn meet(place: &VchanAddress, wait: Option<Duration>, wanted: impl Fn() -> bool) -> Outcome<Halves> {
    match place {
        VchanAddress::Channel(address) => meet_at(address, wait, wanted),
        VchanAddress::Original(peer, path) => {
            let met = original::meet(*peer, path);
            if let (true, Some(wait)) = (is_early(&met), wait) {
                thread::park_timeout(wait);
            }
            met
        }
    }
}

/// Connects, and again with a larger ring if the server asks for that. The server does not admit a client that gave up
/// meanwhile.
fn meet_at(address: &str, wait: Option<Duration>, wanted: impl Fn() -> bool) -> Outcome<Halves> {
    let mut ring = CLIENTS_RING;
    loop {
        let mut options = Options::new().ring_size(ring);
        if let Some(wait) = wait {
            options = options.wait_for_listener(wait);
        }
        let (mut reader, mut writer) = backends::connect::<Stream>(address, &options)?.into_split();
        let asked = hello::receive_hello(&mut reader)?;
        if !wanted() {
            return Err(Fault::new(libc::ECANCELED, "the search for a server was given up"));
        }
        if asked <= ring {
            hello::send_hello(&mut writer, 0)?;
            return Ok((Box::new(reader), Box::new(writer)));
        }
        ring = asked;
    }
}
