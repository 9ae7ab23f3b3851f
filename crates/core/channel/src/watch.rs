// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A look at the peer that needs neither half.

use std::sync::Arc;

use tombolo_domain::{Liveness, Peer};

use crate::end::End;

/// Tells of a channel's peer, from any thread, whatever the channel's halves are doing. It keeps this end's memory and
/// its link alive, but not the channel open.
#[derive(Clone, Debug)]
pub struct Watch(Arc<End>);

impl Watch {
    pub(crate) fn new(end: &Arc<End>) -> Self {
        Self(Arc::clone(end))
    }

    /// Who the peer is, said by the backend.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.0.peer()
    }

    /// What is known of the peer's life now: tells one that is paused from one that is gone.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.0.liveness()
    }
}
