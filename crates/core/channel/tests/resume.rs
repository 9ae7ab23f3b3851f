// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An endpoint that moves to another process: the process that takes over offers memory of its own, and both pipes
//! resume.

use std::os::fd::AsFd;

use tombolo_layout::{Features, SegmentHeader};
use tombolo_mem::{PeerSegment, create_sealed};
use tombolo_ring::{FenceMode, Fresh, Halves, Mode, Writer, halves};

const RING: u64 = 4096;

/// Returns a sealed segment, as its owner has it and as the peer maps it. Its pipe continues at `start`.
fn segment(start: u64, epoch: u64) -> (Fresh, PeerSegment) {
    let header = SegmentHeader::new(RING, 0, start, Features::HANDOVER, epoch);
    let (own, memory) = create_sealed("tombolo-test", header.segment_len as usize).unwrap();
    let theirs = PeerSegment::map(memory.as_fd(), header.segment_len as usize).unwrap();
    (Fresh::new(own, &header), theirs)
}

/// Returns two endpoints; each writes from its own position.
fn ends(starts: [u64; 2], epochs: [u64; 2]) -> [Halves; 2] {
    let [(a, a_mapped), (b, b_mapped)] = [0, 1].map(|end| segment(starts[end], epochs[end]));
    let mode = Mode { messages: false, ordering: FenceMode::Fences };
    let (first, seen_of_b) = halves(a, &b_mapped, mode).unwrap();
    let (second, seen_of_a) = halves(b, &a_mapped, mode).unwrap();
    assert_eq!([seen_of_a.epoch, seen_of_b.epoch], epochs);
    [first, second]
}

fn byte(position: u64) -> u8 {
    (position * 31 % 251) as u8
}

/// Continues the sequence with `len` bytes from this writer's position.
fn write(writer: &mut Writer<tombolo_mem::Mapped>, len: u64) {
    let begin = writer.position();
    let bytes: Vec<u8> = (begin..begin + len).map(byte).collect();
    assert_eq!(writer.write(&bytes), Ok(Some(bytes.len())));
}

/// Takes `len` bytes, which must continue the sequence.
fn read(reader: &mut tombolo_ring::Reader<tombolo_mem::Mapped>, len: usize) {
    let (begin, mut bytes) = (reader.position(), vec![0; len]);
    assert_eq!(reader.read(&mut bytes), Ok(Some(len)));
    assert!(bytes.iter().zip(begin..).all(|(got, position)| *got == byte(position)), "from {begin} on");
}

#[test]
fn h8_h6_end_that_moves_takes_both_pipes_along_at_their_positions() {
    let [mut leaves, mut stays] = ends([0, 0], [11, 22]);
    // Both directions have unread bytes, and are past the first round of their rings.
    for _ in 0..3 {
        write(&mut leaves.writer, 2500);
        write(&mut stays.writer, 2000);
        read(&mut stays.reader, 2500);
        read(&mut leaves.reader, 2000);
    }
    write(&mut leaves.writer, 3000);
    write(&mut stays.writer, 3500);
    read(&mut stays.reader, 1234);
    read(&mut leaves.reader, 777);

    // The record: this endpoint's reading position, and the bytes that it wrote and the other has not taken.
    let (reads_from, stated) = (leaves.reader.position(), stays.reader.position());
    let mut unread = Vec::new();
    leaves.writer.handover().unread_from(stated, &mut unread).unwrap();
    assert_eq!(unread.len(), 3000 - 1234);
    drop(leaves);

    // The endpoint that stays sends again what the leaving one had not delivered.
    let mut again = Vec::new();
    stays.writer.handover().unread_from(reads_from, &mut again).unwrap();
    let reader_was_at = stays.reader.position();
    drop(stays);

    let [mut arrives, mut goes_on] = ends([stated, reads_from], [33, 44]);
    assert_eq!((arrives.reader.position(), goes_on.reader.position()), (reads_from, reader_was_at));
    assert_eq!(arrives.writer.write(&unread), Ok(Some(unread.len())));
    assert_eq!(goes_on.writer.write(&again), Ok(Some(again.len())));
    write(&mut arrives.writer, 500);
    write(&mut goes_on.writer, 500);
    read(&mut goes_on.reader, unread.len() + 500);
    read(&mut arrives.reader, again.len() + 500);
}
