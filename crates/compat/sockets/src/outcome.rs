// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What becomes of a process's connections: counted, and said in the log.

use rustix::io::Errno;

use crate::{
    Reason, connection::Connection, direction::Direction, pipes::Broken, process::Process, stage::Stage,
    switch::Transport,
};

/// What the log says of a connection that had to go back to TCP and could not in time.
pub const RESET_LINE: &str = "reset: it could not go back to TCP in time";

impl Process {
    /// Bytes of the program moved.
    pub(crate) fn moved(&self, direction: Direction, carrier: Transport, n: usize) {
        self.counters.move_bytes(direction, carrier, n);
        self.report_now_and_then(n);
    }

    /// Bytes of the program moved by the kernel, before the connection had a choice.
    pub fn moved_plain(&self, direction: Direction, n: usize) {
        self.moved(direction, Transport::Tcp, n);
    }

    /// A stream cannot go on: what its program hears.
    pub(crate) fn broken(&self, connection: &Connection, broken: Broken) -> Errno {
        // A program may try again for ever.
        if connection.ending.mark_broken() {
            self.log(connection, &format!("broken: {broken}"));
        }
        connection.leave(Reason::Corrupt);
        Errno::CONNRESET
    }

    /// The connection stays on TCP.
    pub fn stays(&self, connection: &Connection, reason: Reason) {
        if connection.stay_plain(reason) {
            self.counters.stay(reason);
            self.log(connection, &format!("stays on TCP: {}", reason.words()));
        }
    }

    /// The connection goes back to TCP.
    pub fn leaves(&self, connection: &Connection, reason: Reason) {
        if connection.stage() == Stage::Joined && connection.reason().is_none() {
            connection.leave(reason);
            self.log(connection, &format!("goes back to TCP: {}", reason.words()));
        } else {
            self.stays(connection, reason);
        }
    }

    /// The connection had to be on TCP, and could not: it is to be ended. Says whether this is news.
    #[must_use]
    pub fn gives_up(&self, connection: &Connection) -> bool {
        let news = connection.ending.give_up();
        if news {
            self.log(connection, RESET_LINE);
        }
        news
    }
}
