// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries a process's connections through a fork.
//!
//! No thread of the process is inside this state while it forks, so the child finds it consistent: each lock is held,
//! and what is made at its first use is made before, or under one of those locks. A joined connection goes on in both
//! processes by turns. One that is not joined yet can be joined again once a single process has it.

use std::{
    io,
    sync::{Arc, MutexGuard},
};

use tombolo_domain::{Held, aside};
use tombolo_os::lock::lock;

use crate::{
    connection::{Connection, set_anew},
    fork_group::{self, Birth, ChildSlot},
    negotiation::{InheritedSession, NegotiationStage, Negotiations},
    pipes::FrozenPipes,
    process::Process,
    proof::History,
    spare::Spare,
    spin,
    stage::Stage,
    tuple::Tuple,
    waiting::{HeldInstances, HeldWaiters, Instance, Instances},
};

/// A process that is about to fork. All locks are held until it has.
pub struct Forking<'a> {
    process: &'a Process,
    all: &'a [Arc<Connection>],
    members: Vec<Member<'a>>,
    exchange: MutexGuard<'a, Negotiations>,
    waiters: HeldWaiters<'a>,
    instances: HeldInstances<'a>,
    /// Lock of the limit of descriptors, so that the child's limit is what the program set. Taken last, as everywhere,
    /// except for the backend's own locks.
    limit: MutexGuard<'static, ()>,
    backend: [Option<Held>; 2],
}

struct Member<'a> {
    connection: &'a Arc<Connection>,
    /// Slot of the child; `None` for a connection that stays on TCP.
    place: Option<ChildSlot>,
    talk: MutexGuard<'a, NegotiationStage>,
    _history: MutexGuard<'a, Option<Box<History>>>,
    _spare: MutexGuard<'a, Spare>,
    _identity: MutexGuard<'a, Option<(Tuple, u64)>>,
    seats: MutexGuard<'a, Vec<Instance>>,
    _still: Option<FrozenPipes<'a>>,
}

impl std::fmt::Debug for Forking<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forking").field("members", &self.members.len()).finish_non_exhaustive()
    }
}

impl Process {
    /// Prepares a fork, with all connections that are watched.
    ///
    /// # Errors
    /// Returns an error where there is no memory for the state that the two processes will share.
    pub fn before_fork<'a>(&'a self, all: &'a [Arc<Connection>], instances: &'a Instances) -> io::Result<Forking<'a>> {
        spin::prepare();
        self.credits.page();
        let mut exchange = self.exchange.lock_all();
        let waiters = self.waiters.hold_all();
        let mut members = Vec::with_capacity(all.len());
        for connection in all {
            let mut talk = lock(&connection.search.talk);
            // The child would have the same memory, so none is kept.
            let mut spare = lock(&connection.search.spare);
            *spare = Spare::None;
            // Before the group takes over the counts: bytes that were read meanwhile would be missing there.
            let mut still = connection.pipes.get().map(|pipes| pipes.halves.freeze());
            // After those: a turn at the pipes that sends or receives over TCP locks the history to keep the bytes.
            let history = connection.plain_calls.hold_history();
            let mut place = None;
            if connection.stage() != Stage::Plain {
                let group = connection.members.found_group(|| connection.leaves())?;
                if let (Some(pipes), Some(still)) = (connection.pipes.get(), &mut still) {
                    pipes.halves.hand_on(still, group)?;
                }
                // Two processes will have it. The one that is left claims it again.
                if matches!(*talk, NegotiationStage::Claimed(_)) {
                    exchange.withdraw(connection, &mut talk);
                }
                place = Some(group.reserve_slot());
            }
            let identity = connection.identity.lock_identity();
            let seats = connection.seats.lock_instances();
            members.push(Member {
                connection,
                place,
                talk,
                _history: history,
                _spare: spare,
                _identity: identity,
                seats,
                _still: still,
            });
        }
        // An option that the child sets is set for this process as well. No answer is remembered from here on until
        // there is one process.
        set_anew();
        let instances = instances.lock_instances();
        let limit = aside::hold();
        let machines = self.machines.as_ref().map(|machines| machines.hold_for_fork());
        let backend = [Some(self.rendezvous.hold_for_fork()), machines];
        Ok(Forking { process: self, all, members, exchange, waiters, instances, limit, backend })
    }
}

impl Forking<'_> {
    /// Ends the fork in the parent. `child` is the number of the child; `None` if there is none.
    pub fn parent(self, child: Option<u32>) {
        for member in &self.members {
            if let (Some(group), Some(place)) = (member.connection.members.group(), member.place) {
                group.record_birth(place, child.map_or(Birth::Failed, Birth::Child));
            }
        }
    }

    /// Ends the fork in the child. Counts, sessions and claims of the parent stay the parent's.
    pub fn child(self) {
        let Self { process, all, members, mut exchange, waiters, instances, limit, backend } = self;
        // Before any thread here looks at what the parent has mapped.
        tombolo_mem::replace_forgotten_mappings();
        drop((backend, limit));
        fork_group::forget_namespace();
        process.journal.begin_anew();
        process.switch.forget();
        process.connection_table.forget();
        spin::begin_anew();
        for connection in all {
            // The calls of the parent's other threads, and the row in its connection table, are the parent's.
            connection.plain_calls.forget_calls();
            connection.row.disown();
        }
        instances.forget();
        waiters.forget();
        for mut member in members {
            // Copies of the instances at which the parent waits.
            member.seats.clear();
            if let (Some(group), Some(place)) = (member.connection.members.group(), member.place) {
                group.record_birth(place, Birth::Own);
                *member.talk = NegotiationStage::Silent;
            }
        }
        exchange.inherit();
        // For notifications that came while the child was made.
        process.exchange.mark_notified();
    }
}

impl Negotiations {
    /// Keeps, in a child, the sessions that a connection uses, as far as they report the peer's liveness, and nothing
    /// else.
    fn inherit(&mut self) {
        let parents = std::mem::take(self);
        self.inherited = parents.inherited;
        for peer_process in parents.peer_processes {
            let (session, inherited, joined) = peer_process.into_parts();
            // The child has no mapping of its memory, and all of its connections have left it.
            if let Some(session) = session.as_ref().filter(|session| !session.is_inherited()) {
                session.gone.store(true, std::sync::atomic::Ordering::SeqCst);
                continue;
            }
            if let Some(session) = session.filter(|session| Arc::strong_count(session) > 1) {
                *lock(&session.inherited) = inherited;
                self.inherited.push(InheritedSession { session: Arc::downgrade(&session), joined });
            }
        }
    }
}
