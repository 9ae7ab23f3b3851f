// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A link that is left before it is taken away: who is told, and whether all have left (B-21).

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, OwnedFd},
};

use tombolo_control::Message;

use crate::endpoint::program;

/// Whether a link is to be left, and which programs understand that.
#[derive(Debug, Default)]
pub(crate) struct Draining {
    /// What programs are told, and whether the host was told that all have left.
    state: Option<(Message, bool)>,
    /// Connections of programs that understand it.
    hear: BTreeSet<u32>,
    /// Connections of which they were told to leave them, and which they have ended since.
    left: BTreeSet<u32>,
}

impl Draining {
    pub(crate) fn is_on(&self) -> bool {
        self.state.is_some()
    }

    /// The link with this memory is to be left within so many milliseconds.
    pub(crate) fn begin(&mut self, (link, generation): (u32, u32), wait: u32) {
        self.state = Some((Message::Leave { link, generation, wait }, false));
    }

    /// The host took that back.
    pub(crate) fn stop(&mut self) {
        self.state = None;
        self.left.clear();
    }

    /// The program of a connection understands it.
    pub(crate) fn admit(&mut self, serial: u32) {
        self.hear.insert(serial);
    }

    /// The program of a connection has ended it.
    pub(crate) fn forget(&mut self, serial: u32) {
        if self.hear.remove(&serial) && self.is_on() {
            self.left.insert(serial);
        }
    }

    /// Whether a connection's program was told and has ended it: it looks at that memory no more, though it may have it mapped.
    pub(crate) fn has_left(&self, serial: u32) -> bool {
        self.left.contains(&serial)
    }

    /// Tells the program of a connection, if there is something to tell and it understands that.
    pub(crate) fn tell_leave(&self, serial: u32, socket: &OwnedFd) {
        if let Some((leave, _)) = self.state.as_ref().filter(|_| self.hear.contains(&serial)) {
            // One that has gone is heard of by its socket.
            let _ = program::send(socket.as_fd(), 0, leave.clone(), &[]);
        }
    }

    /// All have left: whether that is still to be said.
    pub(crate) fn take_end(&mut self) -> bool {
        self.state.as_mut().is_some_and(|(_, said)| !std::mem::replace(said, true))
    }
}
