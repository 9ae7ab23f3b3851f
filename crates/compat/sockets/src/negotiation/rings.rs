// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves directions to rings that fit their load: sends rings over the session, and looks at idle ones (S-20).

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tombolo_domain::aside;
use tombolo_growth::{Growth, GrowthRule, RingBudget, RingChoice};
use tombolo_layout::{
    SegmentHeader, limits,
    sockets::{Message, RING_MAX},
};
use tombolo_mem::Mapped;
use tombolo_os::clock::coarse_time;
use tombolo_ring::{Fresh, OwnRing};

use super::peer_process::PeerProcess;
use crate::{
    connection::Connection,
    exchange::Exchange,
    pipes::{Pipes, Tx},
    quota::{Lease, Quota},
    session::Session,
};

/// Largest segment that is offered, in bytes.
const PEER_MAPS: u64 = limits::CONTROL_LEN + RING_MAX;
/// Time between two looks for large rings that are idle.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Memory that rings of this process may use, and the time of the next look at large ones.
#[derive(Debug)]
pub(crate) struct RingMemory {
    quota: Quota,
    /// State that rings with a growth policy share about the machine's memory.
    budget: RingBudget,
    has_large_rings: AtomicBool,
    /// Time at which these are looked at again, in milliseconds.
    look_due: AtomicU64,
}

impl RingMemory {
    /// Makes the state for a process that makes `most` bytes of shared memory.
    pub fn new(most: u64) -> Self {
        Self {
            quota: Quota::new(most),
            budget: RingBudget::new(u64::MAX),
            has_large_rings: AtomicBool::new(false),
            look_due: AtomicU64::new(0),
        }
    }

    /// Returns the quota against which all memory of the process counts.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Returns the policy by which a ring of `first` bytes grows to `most`, and tries a still larger one if `tries` is
    /// set. Returns `None` if it does neither.
    pub fn growth(&self, first: u64, most: u64, tries: bool) -> Option<Growth> {
        let rule = GrowthRule::connection(first);
        let growth = Growth::new(rule, self.budget.clone(), most, PEER_MAPS, coarse_time());
        let tried = RingChoice::of_this_machine().tried();
        let growth = if tries { growth.trying(tried, RingChoice::trial_budget().clone()) } else { growth };
        (growth.state().target > first).then_some(growth)
    }

    /// Handles a send that found its ring full. Offers a larger ring for bulk, or the previous one where a larger one
    /// was tried in vain.
    #[cold]
    pub fn grow_ring(&self, exchange: &Exchange, connection: &Connection) {
        let Some(pipes) = connection.pipes.get() else { return };
        if !pipes.halves.with_tx(&connection.members, Tx::may_change_ring).unwrap_or(false) {
            return;
        }
        // If the lock is taken, bulk is detected again, in this call or a later one.
        let Some(mut exchange) = exchange.try_lock_all() else { return };
        let room = find_session(&mut exchange.peer_processes, pipes).map_or(0, |peer| peer.room_for_ring());
        offer_over(&mut exchange.peer_processes, &self.quota, pipes, |offer| {
            let _ = pipes.halves.with_tx(&connection.members, |tx| {
                if !pipes.hints().is_detached() {
                    tx.change_ring(connection, room, pipes.epochs.own, offer);
                }
            });
        });
        if let Some(connection) = connection.own.get() {
            exchange.with_large_rings.retain(|other| !Weak::ptr_eq(other, connection));
            exchange.with_large_rings.push(Weak::clone(connection));
        }
        self.has_large_rings.store(true, Ordering::Relaxed);
    }

    /// Offers small rings, before a sleep, in place of large ones that are idle.
    pub fn shrink_idle_rings(&self, exchange: &Exchange) {
        if !self.has_large_rings.load(Ordering::Relaxed) {
            return;
        }
        let (now, due) = (coarse_time().as_millis() as u64, self.look_due.load(Ordering::Relaxed));
        if now < due {
            return;
        }
        self.look_due.store(now + LOOK_EVERY.as_millis() as u64, Ordering::Relaxed);
        let Some(mut exchange) = exchange.try_lock_all() else { return };
        let all = std::mem::take(&mut exchange.with_large_rings);
        let kept = all.into_iter().filter(|connection| {
            let Some(connection) = connection.upgrade() else { return false };
            let Some(pipes) = connection.pipes.get() else { return false };
            let mut done = true;
            offer_over(&mut exchange.peer_processes, &self.quota, pipes, |offer| {
                let shrink = |tx: &mut Tx| {
                    pipes.hints().is_detached() || tx.shrink_idle_ring(&connection, pipes.epochs.own, offer)
                };
                done = pipes.halves.with_tx(&connection.members, shrink).unwrap_or(true);
            });
            !done
        });
        let kept: Vec<_> = kept.collect();
        self.has_large_rings.store(!kept.is_empty(), Ordering::Relaxed);
        exchange.with_large_rings = kept;
    }
}

/// Returns the session that `pipes` belong to, unless its memory will be taken away (S-19).
fn find_session<'a>(peer_processes: &'a mut [PeerProcess], pipes: &Pipes) -> Option<&'a mut PeerProcess> {
    let is_its = |session: &Arc<Session>| Arc::ptr_eq(session, &pipes.session) && !session.is_leaving();
    peer_processes.iter_mut().find(|peer| peer.session.as_ref().is_some_and(is_its))
}

/// Has `offer` offer a ring over the session that `pipes` belong to, if there is one.
fn offer_over(
    peer_processes: &mut [PeerProcess],
    quota: &Quota,
    pipes: &Pipes,
    offer: impl FnOnce(&mut dyn FnMut(&SegmentHeader) -> Option<(OwnRing<Mapped>, Lease)>),
) {
    let mut peer = find_session(peer_processes, pipes);
    offer(&mut |header| peer.as_mut()?.send_ring(quota, header, pipes.epochs.peer));
}

impl PeerProcess {
    /// Makes a ring and sends it to the peer's endpoint with the number `to`. Returns `None` where there is no room for
    /// it now.
    fn send_ring(&mut self, quota: &Quota, header: &SegmentHeader, to: u64) -> Option<(OwnRing<Mapped>, Lease)> {
        self.send_waiting().ok()?;
        if !self.outbox.is_empty() || !self.outbox.is_open() {
            return None;
        }
        let lease = quota.reserve_bytes(header.segment_len)?;
        // The segment has a descriptor until the peer has been sent one.
        aside::lifted(|| {
            let (segment, offer) = self.link.allocate(header.segment_len as usize).ok()?;
            let next = Fresh::new(segment, header).into_ring();
            let message = Message::Ring { to, generation: header.generation };
            let sent = self.outbox.try_send(|| self.link.send(&message.encode(), Some(&offer)));
            self.link.retire(None, offer);
            matches!(sent, Ok(true)).then_some((next, lease))
        })
    }
}
