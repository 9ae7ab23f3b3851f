// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two ends in one process, each with the other's segment mapped read-only.
#![allow(dead_code)]

use std::os::fd::AsFd;

use tombolo_layout::{Features, SegmentHeader, limits};
use tombolo_mem::{Mapped, PeerSegment, create_sealed};
use tombolo_ring::{Fresh, Mode, Ordering, Reader, Writer, halves};

/// Writer of one pipe and its reader; the other direction is dropped.
pub struct Pair {
    pub writer: Writer<Mapped>,
    pub reader: Reader<Mapped>,
}

/// A pipe with a ring of `capacity` bytes, fences on both sides.
pub fn pair(capacity: u64, messages: bool) -> Pair {
    pair_at(capacity, messages, 0)
}

/// As [`pair`], the first byte having position `start`.
pub fn pair_at(capacity: u64, messages: bool, start: u64) -> Pair {
    let len = (limits::CONTROL_LEN + capacity) as usize;
    let make = || {
        let (segment, fd) = create_sealed("tombolo-test", len).unwrap();
        let header = SegmentHeader::new(capacity, 0, start, Features::NONE, 1);
        (Fresh::new(segment, &header), PeerSegment::map(fd.as_fd(), len).unwrap())
    };
    let ((a_own, a_seen), (b_own, b_seen)) = (make(), make());
    let mode = Mode { messages, ordering: Ordering::Fences };
    let (a, _) = halves(a_own, &b_seen, mode).unwrap();
    let (b, _) = halves(b_own, &a_seen, mode).unwrap();
    Pair { writer: a.writer, reader: b.reader }
}
