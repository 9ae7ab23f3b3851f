// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State that an endpoint keeps of its peer: whether it is there, and why it is not.

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

/// Whether the peer is there, and what a server keeps for the next peer.
#[derive(Debug)]
pub(crate) struct PeerState {
    pub(crate) role: Role,
    pub(super) state: AtomicU8,
    /// Whether the peer's domain is gone: no peer will come any more.
    pub(super) lost: AtomicBool,
    /// Reason why the connection ended.
    pub(super) reason: Mutex<Fault>,
    /// Listener of a server.
    pub(crate) listener: Mutex<Option<ServerListener>>,
    /// With a peer that runs the original: the watch of who is there, and this server's nodes in XenStore.
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

    /// Stores what a server has to keep as long as it exists.
    pub(crate) fn store_server(&self, server: Server) {
        *lock(&self.server) = Some(server);
    }

    #[inline]
    pub(super) fn is_original(&self) -> bool {
        self.original.get().is_some()
    }

    /// Updates the state from the page in the original's layout, where a peer may come back after it was gone.
    pub(super) fn update_from_page(&self) {
        if let Some(watch) = self.original.get() {
            let state = match watch.live() {
                Live::Gone => CLOSED,
                Live::Here => OPEN,
                Live::NotYet => WAITING,
            };
            self.state.store(state, Ordering::Release);
        }
    }

    /// Records that the peer went. A server waits for another.
    pub(super) fn note_end(&self, why: Fault) {
        *lock(&self.reason) = why;
        if self.state.compare_exchange(OPEN, CLOSED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && let Some(listener) = &*lock(&self.listener)
        {
            listener.open();
        }
    }

    /// Returns whether a call may go on without a peer; the error is the reason why not.
    pub(super) fn goes_on(&self, ways: CallMode) -> Outcome<()> {
        if self.state.load(Ordering::Acquire) == CLOSED && !(ways.persist && self.role == Role::Server) {
            return Err(lock(&self.reason).clone());
        }
        Ok(())
    }
}
