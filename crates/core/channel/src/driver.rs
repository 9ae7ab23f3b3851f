// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lends a message channel to a kernel driver that moves its messages. Not part of the interface: it may change with
//! any version.

use tombolo_domain::DriverParts;
use tombolo_ring::Record;

use crate::{Messages, Result};

/// The parts of a channel that a driver needs: the place of its segments, and the records of the writer and the reader
///
#[derive(Debug)]
pub struct Lent {
    /// Place of the segments.
    pub parts: DriverParts,
    /// Record of the writer, then of the reader.
    pub records: [Record; 2],
}

/// A channel that can be lent to a driver.
pub trait Lend {
    /// Ends this endpoint's turn. The endpoint must not use the channel until it has taken it back. Returns `None` if a
    /// driver cannot use the channel's memory; nothing changes then.
    fn lend(&mut self) -> Option<Lent>;

    /// Begins a turn of this endpoint where the driver's turn ended.
    ///
    /// # Errors
    /// If the records do not belong to this channel.
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
            // The first ring is the only one, because messages keep theirs.
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
