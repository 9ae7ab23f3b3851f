// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Functions that the records of both halves share.

use tombolo_layout::private::{COUNTERS, Half, Record};
use tombolo_mem::Mem;

use crate::{Error, notify::Notifier, wait::Waits};

/// Checks that `record` belongs to this half of this pipe.
pub(crate) fn check_half(record: &Record, half: Half, start: u64) -> Result<(), Error> {
    if record.half != half {
        let what = "0 is a writer, 1 a reader";
        return Err(Error::ForeignRecord { what, found: record.half as u64, own: half as u64 });
    }
    if record.start != start {
        return Err(Error::ForeignRecord { what: "start of the pipe", found: record.start, own: start });
    }
    Ok(())
}

/// Checks that the bytes between two positions fit into the ring that is mapped here.
pub(crate) fn check_fits(len: u64, capacity: u64) -> Result<(), Error> {
    if len <= capacity {
        return Ok(());
    }
    Err(Error::ForeignRecord { what: "bytes in the ring", found: len, own: capacity })
}

/// Checks that the pipe is in the ring that is mapped here.
pub(crate) fn check_ring(at: u16, mapped: u16) -> Result<(), Error> {
    if at == mapped { Ok(()) } else { Err(Error::Elsewhere { at, mapped }) }
}

/// Takes over the counters of a record, and returns the number of records or calls.
pub(crate) fn set_counters<M: Mem>(from: &[u64; COUNTERS], notifier: &mut Notifier<M>, waits: &mut Waits) -> u64 {
    let [records, sent, suppressed, received, spurious, spins_paid, spins_wasted, sleeps, stalls] = *from;
    (notifier.sent, notifier.suppressed) = (sent, suppressed);
    *waits = Waits { received, spurious, spins_paid, spins_wasted, sleeps, stalls };
    records
}
