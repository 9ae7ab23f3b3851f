// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The grant table: which process lets which peer map what.

use std::{collections::BTreeMap, os::fd::OwnedFd};

use super::ids::{EndId, Process, Reference};
use tombolo_domain::{Error, Result};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mapped {
    Never,
    Now,
    Past,
}

#[derive(Debug)]
pub(super) struct Grant {
    pub(super) owner: Process,
    /// The owner's endpoint of the only link over which the reference can be passed.
    pub(super) end: EndId,
    pub(super) len: usize,
    pub(super) memory: OwnedFd,
    mapped: Mapped,
    /// Retired or revoked: it can no longer be mapped, and is removed as soon as the peer does not map it.
    ended: bool,
}

impl Grant {
    fn in_quarantine(&self) -> bool {
        self.ended && self.mapped == Mapped::Now
    }
}

#[derive(Debug, Default)]
pub(super) struct Grants {
    table: BTreeMap<Reference, Grant>,
    made: u64,
}

impl Grants {
    pub(super) fn grant(&mut self, owner: Process, end: EndId, len: usize, memory: OwnedFd) -> Reference {
        let reference = Reference(self.made);
        self.made += 1;
        self.table.insert(reference, Grant { owner, end, len, memory, mapped: Mapped::Never, ended: false });
        reference
    }

    /// Marks `reference`, which came from `from`, as mapped, and opens its memory read-only: a mapping made from that
    /// descriptor cannot be made writable.
    pub(super) fn claim(&mut self, reference: Reference, from: EndId, max: u64) -> Result<(OwnedFd, usize)> {
        let malformed = |what: String| Err(Error::Malformed { clause: "D-9", what });
        let Some(grant) = self.table.get_mut(&reference) else {
            return if reference.0 < self.made {
                Err(Error::Revoked)
            } else {
                malformed(format!("reference {} stands for nothing", reference.0))
            };
        };
        if grant.end != from {
            return malformed(format!("reference {} is not the sender's to pass on", reference.0));
        }
        if grant.ended {
            return Err(Error::Revoked);
        }
        if grant.mapped != Mapped::Never {
            return malformed(format!("reference {} is passed a second time", reference.0));
        }
        if grant.len as u64 > max {
            return malformed(format!("a segment of {} bytes where {max} were agreed", grant.len));
        }
        let memory = read_only(&grant.memory)?;
        grant.mapped = Mapped::Now;
        Ok((memory, grant.len))
    }

    pub(super) fn unmapped(&mut self, reference: Reference) {
        if let Some(grant) = self.table.get_mut(&reference) {
            grant.mapped = Mapped::Past;
            if grant.ended {
                self.table.remove(&reference);
            }
        }
    }

    /// Ends every grant that `which` picks. Returns the bytes that are free now and those that the peer still maps.
    pub(super) fn end(&mut self, mut which: impl FnMut(Reference, &Grant) -> bool) -> (u64, u64) {
        let (mut freed, mut still_mapped) = (0, 0);
        self.table.retain(|reference, grant| {
            if grant.ended || !which(*reference, grant) {
                return true;
            }
            grant.ended = true;
            let sum = if grant.in_quarantine() { &mut still_mapped } else { &mut freed };
            *sum += grant.len as u64;
            grant.in_quarantine()
        });
        (freed, still_mapped)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Grant> {
        self.table.values()
    }

    pub(super) fn quarantined(&self, which: impl Fn(&Grant) -> bool) -> u64 {
        self.iter().filter(|grant| grant.in_quarantine() && which(grant)).map(|grant| grant.len as u64).sum()
    }
}

fn read_only(memory: &OwnedFd) -> Result<OwnedFd> {
    use std::os::fd::AsRawFd;

    use rustix::fs::{Mode, OFlags};

    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|error| Error::os("open", error))
}
