// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What happens to a process's connections when it forks.
//!
//! Nobody of the process is inside anything here while it forks, so the child finds all of it whole: each lock is held, and
//! what is made at its first use is made before, or under one of those locks. A joined connection
//! goes on in both processes by turns. One that is not joined yet can be joined again once a single process has it.

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

/// A process that is about to fork: everything is held still until it has.
pub struct Forking<'a> {
    process: &'a Process,
    all: &'a [Arc<Connection>],
    members: Vec<Member<'a>>,
    exchange: MutexGuard<'a, Negotiations>,
    waiters: HeldWaiters<'a>,
    instances: HeldInstances<'a>,
    /// The child's limit is what the program set. Taken last, as everywhere, but for what the backend locks by itself.
    limit: MutexGuard<'static, ()>,
    backend: [Option<Held>; 2],
}

struct Member<'a> {
    connection: &'a Arc<Connection>,
    /// None for one that stays on TCP.
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
    /// Before a fork, with all connections that are watched.
    ///
    /// # Errors
    /// Where there is no memory for what the two processes will have in common.
    pub fn before_fork<'a>(&'a self, all: &'a [Arc<Connection>], instances: &'a Instances) -> io::Result<Forking<'a>> {
        spin::prepare();
        self.credits.page();
        let mut exchange = self.exchange.lock_all();
        let waiters = self.waiters.hold_all();
        let mut members = Vec::with_capacity(all.len());
        for connection in all {
            let mut talk = lock(&connection.search.talk);
            // The child would have the same memory.
            let mut spare = lock(&connection.search.spare);
            *spare = Spare::None;
            // Before the group takes over what was counted: what is read meanwhile would be missing there.
            let mut still = connection.pipes.get().map(|pipes| pipes.halves.freeze());
            // After those: who sends over TCP, or receives there, in a turn at the pipes remembers what.
            let history = connection.plain_calls.hold_history();
            let mut place = None;
            if connection.stage() != Stage::Plain {
                let group = connection.members.found_group(|| connection.leaves())?;
                if let (Some(pipes), Some(still)) = (connection.pipes.get(), &mut still) {
                    pipes.halves.hand_on(still, group)?;
                }
                // Two processes will have it; it is claimed again by the one that is left.
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
        // What the child sets is set for this process as well. From here on nothing is remembered until there is one process.
        set_anew();
        let instances = instances.lock_instances();
        let limit = aside::hold();
        let machines = self.machines.as_ref().map(|machines| machines.hold_for_fork());
        let backend = [Some(self.rendezvous.hold_for_fork()), machines];
        Ok(Forking { process: self, all, members, exchange, waiters, instances, limit, backend })
    }
}

impl Forking<'_> {
    /// In the parent: this is the child, or there is none.
    pub fn parent(self, child: Option<u32>) {
        for member in &self.members {
            if let (Some(group), Some(place)) = (member.connection.members.group(), member.place) {
                group.record_birth(place, child.map_or(Birth::Failed, Birth::Child));
            }
        }
    }

    /// In the child: what the parent counted is the parent's, and so are its links and claims.
    pub fn child(self) {
        let Self { process, all, members, mut exchange, waiters, instances, limit, backend } = self;
        // Before anybody here looks at what the parent has mapped.
        tombolo_mem::replace_forgotten_mappings();
        drop((backend, limit));
        fork_group::forget_namespace();
        process.journal.begin_anew();
        process.switch.forget();
        process.connection_table.forget();
        spin::begin_anew();
        for connection in all {
            // The calls that others of the parent were in, and what is shown of it, are the parent's.
            connection.plain_calls.forget_calls();
            connection.row.disown();
        }
        instances.forget();
        waiters.forget();
        for mut member in members {
            // Its copy of what the parent waits at.
            member.seats.clear();
            if let (Some(group), Some(place)) = (member.connection.members.group(), member.place) {
                group.record_birth(place, Birth::Own);
                *member.talk = NegotiationStage::Silent;
            }
        }
        exchange.inherit();
        // Whatever rang while it was made.
        process.exchange.mark_notified();
    }
}

impl Negotiations {
    /// In a child: keeps of the links what tells of a peer's life, where a connection goes over it, and nothing else.
    fn inherit(&mut self) {
        let parents = std::mem::take(self);
        self.inherited = parents.inherited;
        for peer_process in parents.peer_processes {
            let (session, inherited, joined) = peer_process.into_parts();
            // What is mapped of it is not here, and all of its connections have left it.
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
