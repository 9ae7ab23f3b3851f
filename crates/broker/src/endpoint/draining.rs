// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tracks a link whose connections are to end before it is taken away: which programs are told, and whether all have
//! left (B-21).

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, OwnedFd},
};

use tombolo_control::Message;

use crate::endpoint::program;

/// Whether programs are to leave a link, and which of them understand that.
#[derive(Debug, Default)]
pub(crate) struct Draining {
    /// Message that programs are sent, and whether the host was told that all have left.
    state: Option<(Message, bool)>,
    /// Connections of programs that understand Leave.
    hear: BTreeSet<u32>,
    /// Connections that their programs were told to leave, and have ended since.
    left: BTreeSet<u32>,
}

impl Draining {
    pub(crate) fn is_on(&self) -> bool {
        self.state.is_some()
    }

    /// Records that programs are to leave the link with this memory within `wait` milliseconds.
    pub(crate) fn begin(&mut self, (link, generation): (u32, u32), wait: u32) {
        self.state = Some((Message::Leave { link, generation, wait }, false));
    }

    /// Records that the host took that back.
    pub(crate) fn stop(&mut self) {
        self.state = None;
        self.left.clear();
    }

    /// Records that the program of a connection understands Leave.
    pub(crate) fn admit(&mut self, serial: u32) {
        self.hear.insert(serial);
    }

    /// Records that the program of a connection has ended it.
    pub(crate) fn forget(&mut self, serial: u32) {
        if self.hear.remove(&serial) && self.is_on() {
            self.left.insert(serial);
        }
    }

    /// Returns whether a connection's program was told and has ended it: it no longer uses that memory, but may still
    /// map it.
    pub(crate) fn has_left(&self, serial: u32) -> bool {
        self.left.contains(&serial)
    }

    /// Sends Leave to the program of a connection, if the link is to be left and the program understands it.
    pub(crate) fn tell_leave(&self, serial: u32, socket: &OwnedFd) {
        if let Some((leave, _)) = self.state.as_ref().filter(|_| self.hear.contains(&serial)) {
            // If the program has left, its socket reports that later.
            let _ = program::send(socket.as_fd(), 0, leave.clone(), &[]);
        }
    }

    /// Returns, once all have left, whether the host is still to be told. Later calls return false.
    pub(crate) fn take_end(&mut self) -> bool {
        self.state.as_mut().is_some_and(|(_, said)| !std::mem::replace(said, true))
    }
}
