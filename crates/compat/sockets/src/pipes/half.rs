// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How the state of a direction goes from one process of its end to the next.

use tombolo_layout::sockets::Followed;
use tombolo_mem::OwnWord;
use tombolo_ring::{Error, Record};

use super::{Pipes, Rx, Tx};
use crate::{
    direction::Direction,
    family::ForkGroup,
    switch::{Receiver, Sender},
};

/// One direction, as the processes of this end use it in turns.
pub(super) trait Half {
    const DIRECTION: Direction;
    fn behind(&mut self) -> &mut bool;
    /// Goes on from what the process before left, or from what it left in the segment when it died.
    fn resume(&mut self, family: &ForkGroup, record: Option<&Record>) -> Result<(), Error>;
    fn save(&mut self) -> Record;
    fn take_ring(&mut self) -> bool;
    /// After a turn: says to those who look without one what has changed.
    fn publish_hints(&mut self, _: &Pipes) {}
}

impl Half for Tx {
    const DIRECTION: Direction = Direction::Out;

    fn behind(&mut self) -> &mut bool {
        &mut self.behind
    }

    fn resume(&mut self, family: &ForkGroup, record: Option<&Record>) -> Result<(), Error> {
        self.sender = Sender::at(self.moves.load());
        self.recalled = family.recalled();
        match record {
            Some(record) => self.writer.load(record),
            None => caught(self.writer.rebuild()),
        }
    }

    fn save(&mut self) -> Record {
        self.writer.save()
    }

    fn take_ring(&mut self) -> bool {
        self.writer.take_ring()
    }
}

impl Half for Rx {
    const DIRECTION: Direction = Direction::In;

    fn behind(&mut self) -> &mut bool {
        &mut self.behind
    }

    fn resume(&mut self, _: &ForkGroup, record: Option<&Record>) -> Result<(), Error> {
        self.receiver = Receiver::at(Followed::decode(self.followed.load()));
        match record {
            Some(record) => self.reader.load(record),
            None => caught(self.reader.rebuild()),
        }
    }

    fn save(&mut self) -> Record {
        self.reader.save()
    }

    fn take_ring(&mut self) -> bool {
        self.reader.take_ring()
    }

    #[inline]
    fn publish_hints(&mut self, pipes: &Pipes) {
        pipes.note_ring(self);
    }
}

/// A lie that was met while rebuilding is remembered, and met again by the next call.
fn caught(rebuilt: Result<(), Error>) -> Result<(), Error> {
    match rebuilt {
        Err(Error::Corrupt(_)) => Ok(()),
        other => other,
    }
}
