// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A channel whose messages a driver of the kernel's moves. No part of the interface: it may change with any version.

use tombolo_domain::DriverParts;
use tombolo_ring::Record;

use crate::{Messages, Result};

/// What a driver needs of a channel: where its segments are, and the records of the writer and the reader.
#[derive(Debug)]
pub struct Lent {
    /// Where the segments are.
    pub parts: DriverParts,
    /// The writer's record and the reader's.
    pub records: [Record; 2],
}

/// A channel that can be lent to a driver.
pub trait Lend {
    /// Ends this end's turn. It must not use the channel until it took it back. `None` where its memory is none that a
    /// driver can use; nothing changes then.
    fn lend(&mut self) -> Option<Lent>;

    /// Begins a turn of this end where the driver's ended.
    ///
    /// # Errors
    /// The records are none of this channel's.
    fn take_back(&mut self, records: &[Record; 2]) -> Result<()>;
}

impl Lend for Messages {
    fn lend(&mut self) -> Option<Lent> {
        let (sender, receiver) = self.split();
        if sender.0.moves.is_under_way() {
            return None;
        }
        let (sending, receiving) = (&mut sender.0.ring, &mut receiver.0.ring);
        let parts = {
            let shared = receiving.waiter.end().link();
            // The ring of the beginning is the only one: messages keep theirs.
            let [offer] = &shared.offers[..] else { return None };
            shared.link.driver_parts(offer)?
        };
        let records = [sending.half.save(), receiving.half.save()];
        sending.notify_if_owed();
        receiving.notify_if_owed();
        Some(Lent { parts, records })
    }

    fn take_back(&mut self, [writer, reader]: &[Record; 2]) -> Result<()> {
        let (sender, receiver) = self.split();
        sender.0.ring.half.load(writer)?;
        receiver.0.ring.half.load(reader)?;
        Ok(())
    }
}
