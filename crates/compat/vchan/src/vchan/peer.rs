// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an end knows of its peer: whether it is there, and why it is not.

use std::sync::{
    Mutex, OnceLock,
    atomic::{AtomicBool, AtomicU8, Ordering},
};

use tombolo_backends::vchan::{Live, Server, Watch};
use tombolo_os::lock::lock;

use super::{CLOSED, CallMode, OPEN, WAITING};
use crate::{
    border::{Fault, Outcome},
    place::Role,
    server_listener::ServerListener,
};

/// Whether the peer is there, and what a server keeps for the next one.
#[derive(Debug)]
pub(crate) struct PeerState {
    pub(crate) role: Role,
    pub(super) state: AtomicU8,
    /// The peer's domain is gone: nobody will come any more.
    pub(super) lost: AtomicBool,
    /// Why it is over.
    pub(super) reason: Mutex<Fault>,
    /// A server's.
    pub(crate) listener: Mutex<Option<ServerListener>>,
    /// With a peer that runs the original: who is there, and what is this server's in XenStore.
    pub(super) original: OnceLock<Watch>,
    pub(super) server: Mutex<Option<Server>>,
}

impl PeerState {
    pub(super) fn new(role: Role) -> Self {
        Self {
            role,
            state: AtomicU8::new(WAITING),
            lost: AtomicBool::new(false),
            reason: Mutex::new(Fault::new(libc::EPIPE, "the other end has closed")),
            listener: Mutex::default(),
            original: OnceLock::new(),
            server: Mutex::default(),
        }
    }

    /// What a server has to keep as long as it is there.
    pub(crate) fn store_server(&self, server: Server) {
        *lock(&self.server) = Some(server);
    }

    #[inline]
    pub(super) fn is_original(&self) -> bool {
        self.original.get().is_some()
    }

    /// In the layout of the original the page says who is there, and may say so again after it did not.
    pub(super) fn look_who_is_there(&self) {
        if let Some(watch) = self.original.get() {
            let state = match watch.live() {
                Live::Gone => CLOSED,
                Live::Here => OPEN,
                Live::NotYet => WAITING,
            };
            self.state.store(state, Ordering::Release);
        }
    }

    /// The peer went. A server waits for another.
    pub(super) fn note_end(&self, why: Fault) {
        *lock(&self.reason) = why;
        if self.state.compare_exchange(OPEN, CLOSED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && let Some(listener) = &*lock(&self.listener)
        {
            listener.open();
        }
    }

    /// Whether a call may go on without a peer.
    pub(super) fn goes_on(&self, ways: CallMode) -> Outcome<()> {
        if self.state.load(Ordering::Acquire) == CLOSED && !(ways.persist && self.role == Role::Server) {
            return Err(lock(&self.reason).clone());
        }
        Ok(())
    }
}
