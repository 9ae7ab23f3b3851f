// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands to the hypervisor.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use super::{domain::HarshDomain, end::Event, forger::Forger, ids::Process, world::World};
use tombolo_domain::{Liveness, Result};

/// The third party: it creates domains, knows their states and changes these on command.
#[derive(Clone, Debug, Default)]
pub struct Hypervisor(Arc<World>);

/// Result of a revocation: the bytes that could be revoked, and those that could not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Revocation {
    /// Bytes that no domain maps any more.
    pub freed: u64,
    /// Bytes that the peer still maps: they stay readable, and in quarantine, until it unmaps them.
    pub still_mapped: u64,
}

impl Hypervisor {
    /// Returns a hypervisor without domains.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a fresh process in the domain called `name`. Starts the domain if it does not run.
    ///
    /// # Panics
    /// If `name` is not a valid name: empty, or with a slash.
    #[must_use]
    pub fn domain(&self, name: &str) -> HarshDomain {
        assert!(!name.is_empty() && !name.contains('/'), "{name:?} is no domain's name");
        let process = self.0.state().new_process(name.into());
        HarshDomain { world: Arc::clone(&self.0), process }
    }

    /// Pauses a domain: notifications and messages to it and from it are held until it is resumed, and its peers are
    /// told. The threads that play it continue, and their stores are seen: the test must keep them idle.
    pub fn pause(&self, domain: &HarshDomain) {
        if let Some(domain) = self.0.state().domains.get_mut(domain.name()) {
            domain.paused = true;
        }
    }

    /// Lets a paused domain continue and delivers what was held, in order.
    pub fn resume(&self, domain: &HarshDomain) {
        self.0.state().resume(domain.name());
    }

    /// Kills a process: its links and listeners are gone; its memory can no longer be mapped, but stays readable where
    /// it is mapped. Threads that play the process find every peer gone.
    pub fn kill_process(&self, victim: &HarshDomain) {
        let mut state = self.0.state();
        if let Some(domain) = state.domains.get_mut(victim.name()) {
            domain.processes.remove(&victim.process.number);
        }
        state.kill(|process| *process == victim.process, Liveness::ProcessGone);
        self.0.backlog_changed.notify_all();
    }

    /// Destroys a domain with all processes in it, paused or not.
    pub fn kill_domain(&self, victim: &HarshDomain) {
        let mut state = self.0.state();
        state.resume(victim.name());
        state.kill(|process: &Process| process.domain == victim.process.domain, Liveness::DomainGone);
        state.domains.remove(victim.name());
        self.0.backlog_changed.notify_all();
    }

    /// Notifies all doorbells of a domain spuriously, at full rate, until the storm is dropped.
    #[must_use]
    pub fn storm(&self, victim: &HarshDomain) -> Storm {
        let (notifications, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (hypervisor, victim) = (self.clone(), victim.clone());
        let (count, stop) = (Arc::clone(&notifications), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..NOTIFICATIONS_AT_ONCE {
                    // Counted first, so that a woken waiter finds the notification counted.
                    count.fetch_add(1, Ordering::Relaxed);
                    hypervisor.notify(&victim);
                }
                // The lock is not fair: without this no other thread would get it.
                std::thread::yield_now();
            }
        });
        Storm { notifications, over, thread: Some(thread) }
    }

    /// Notifies all doorbells of a domain once, spuriously.
    pub fn notify(&self, victim: &HarshDomain) {
        self.0.state().notify_ends(victim.name(), None);
    }

    /// Takes back all memory that `owner`'s domain shares with `peer`'s. The peer can no longer map what it has not
    /// mapped yet. It keeps what it maps, as the result tells the caller. The peer's endpoints become unusable: they
    /// return [`Revoked`](tombolo_domain::Error::Revoked) and [`Liveness::Revoked`], and their doorbells wake.
    pub fn revoke(&self, owner: &HarshDomain, peer: &HarshDomain) -> Revocation {
        let mut state = self.0.state();
        let links: Vec<_> = state
            .ends
            .iter()
            .filter(|(_, end)| *end.process.domain == *owner.name() && *end.peer_domain == *peer.name())
            .map(|(id, end)| (*id, end.peer))
            .collect();
        let (freed, still_mapped) = state.grants.end(|_, grant| links.iter().any(|(end, _)| *end == grant.end));
        for (_, theirs) in links {
            state.post(theirs, Event::Over(Liveness::Revoked));
        }
        Revocation { freed, still_mapped }
    }

    /// Returns the bytes of a domain's memory that were retired or revoked while a peer maps them, also after the link
    /// over which they were shared has ended.
    #[must_use]
    pub fn quarantined(&self, owner: &HarshDomain) -> u64 {
        self.0.state().grants.quarantined(|grant| grant.owner.domain == owner.process.domain)
    }

    /// Limits the memory that a domain may share to `bytes`, quarantine included.
    pub fn limit_memory(&self, domain: &HarshDomain, bytes: u64) {
        if let Some(domain) = self.0.state().domains.get_mut(domain.name()) {
            domain.memory_max = bytes;
        }
    }

    /// Returns write access to each segment that a domain shares, in the order in which they were made.
    ///
    /// # Errors
    /// [`Limit`](tombolo_domain::Error::Limit) where descriptors run out.
    pub fn forgers(&self, liar: &HarshDomain) -> Result<Vec<Forger>> {
        let state = self.0.state();
        let own = state.grants.iter().filter(|grant| grant.owner.domain == liar.process.domain);
        own.map(|grant| Forger::new(&grant.memory, grant.len)).collect()
    }

    /// Passes each segment that a domain shares to `lie` and stores the words that it changed, as a hostile owner
    /// would.
    ///
    /// # Errors
    /// [`Limit`](tombolo_domain::Error::Limit) where descriptors run out.
    pub fn mutate(&self, liar: &HarshDomain, mut lie: impl FnMut(&mut [u8])) -> Result<()> {
        for forger in self.forgers(liar)? {
            let mut before = vec![0; forger.len()];
            forger.read(0, &mut before);
            let mut after = before.clone();
            lie(&mut after);
            let words = before.chunks(8).zip(after.chunks(8)).enumerate();
            words.filter(|(_, (old, new))| old != new).for_each(|(at, (_, new))| forger.write(at * 8, new));
        }
        Ok(())
    }
}

/// Number of notifications of a storm before it lets other threads run. On a busy machine it is a long time before it
/// runs again.
const NOTIFICATIONS_AT_ONCE: usize = 64;

/// A storm of spurious notifications, until it is dropped.
#[derive(Debug)]
pub struct Storm {
    notifications: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Storm {
    /// Returns the number of notifications so far.
    #[must_use]
    pub fn notifications(&self) -> u64 {
        self.notifications.load(Ordering::Relaxed)
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
