// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reports on the peer without using either half.

use std::sync::Arc;

use tombolo_domain::{Liveness, Peer};

use crate::end::End;

/// Reports on a channel's peer from any thread, whatever the channel's halves are doing.
///
/// It keeps this endpoint's memory and its link to the peer alive, but does not keep the channel open. Clones report on
/// the same peer.
///
/// # Example
/// ```
/// use tombolo::Liveness;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = format!("local:{}/watched", folder.path().display());
/// # let mut listener = tombolo::listen(&address)?;
/// # let client = std::thread::spawn(move || tombolo::connect(&address));
/// # let _peer = listener.accept()?;
/// let stream = client.join().unwrap()?;
/// let watch = stream.watch();
/// let watching = std::thread::spawn(move || watch.liveness());
/// assert_eq!(watching.join().unwrap(), Liveness::Running);
/// # Ok::<(), tombolo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Watch(Arc<End>);

impl Watch {
    pub(crate) fn new(end: &Arc<End>) -> Self {
        Self(Arc::clone(end))
    }

    /// Returns the peer's identity, as reported by the backend.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.0.peer()
    }

    /// Returns the peer's liveness, which tells a paused peer from one that is gone. May cost a few system calls.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.0.liveness()
    }
}
