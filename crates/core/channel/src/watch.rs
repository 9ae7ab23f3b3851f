// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A look at the peer that needs neither half.

use std::sync::Arc;

use tombolo_domain::{Liveness, Peer};

use crate::end::End;

/// Tells of a channel's peer from any thread, whatever the channel's halves are doing.
///
/// It keeps this endpoint's memory and its endpoint alive, but not the channel open. Clones tell of the same peer.
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

    /// Returns who the peer is, as the backend says.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.0.peer()
    }

    /// Returns what is known of the peer's life now: it tells a paused peer from one that is gone. May cost a few system calls.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        self.0.liveness()
    }
}
