// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that changes its pages between any two calls, as the input says (R-7, R-8, R-15, R-20, R-21, H-5).
#![no_main]

#[path = "../../crates/core/ring/tests/common/mod.rs"]
mod common;

use libfuzzer_sys::fuzz_target;
use tombolo_layout::words;
use tombolo_mem::{OwnData, PeerWord};
use tombolo_ring::{Error, Side};

const CAPACITY: u64 = 4096;

/// The input as a script: single bytes and words, zeros at its end.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let Some((byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *byte
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn len(&mut self) -> usize {
        usize::from(u16::from_le_bytes([self.byte(), self.byte()])) % 6000
    }
}

/// What a call may say: the victim's own limits, an end, or the clause that was broken.
fn expected<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(Error::Closed | Error::TooLarge { .. } | Error::BufferTooSmall { .. }) => None,
        Err(Error::Corrupt(corrupt)) => {
            assert!(["R-7", "R-8", "R-15", "R-20", "R-21", "H-5", "H-6"].contains(&corrupt.clause), "{corrupt}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fuzz_target!(|input: &[u8]| {
    let mut script = Script(input);
    let mode = script.byte();
    let messages = mode & 1 != 0;
    let start = if mode & 2 != 0 { script.word() & !7 } else { 0 };
    let (mut halves, mut pages) = common::victim(CAPACITY, messages, start);
    pages.set_tail(start);
    pages.set(words::HEAD, start);
    let (reader, writer) = (&mut halves.reader, &mut halves.writer);
    let (mut tail, mut head, mut moved) = (start, start, false);
    let mut buffer = vec![0; 6000];
    while !script.0.is_empty() {
        match script.byte() % 24 {
            // The peer.
            0 => tail = script.word(),
            1 => head = script.word(),
            2 => tail = tail.wrapping_add(u64::from(script.byte()) * 8),
            3 => head = head.wrapping_add(u64::from(script.byte()) * 8),
            4 => head = pages.victim.word(words::TAIL).load_relaxed().hint(),
            5 => pages.set(words::WRITER_STATE, script.word()),
            6 => pages.set(words::READER_STATE, script.word()),
            7 => pages.set(words::READER_STATE, u64::from(script.byte() % 4) | u64::from(script.byte() % 3) << 16),
            8 => {
                let (phase, ready, current) = (script.byte() % 4, script.byte() % 3, script.byte() % 3);
                pages.set(words::WRITER_STATE, u64::from(phase) | u64::from(ready) << 16 | u64::from(current) << 32);
            }
            9 => pages.set([words::WANT_DATA, words::WANT_SPACE][usize::from(script.byte() % 2)], script.word()),
            10 => pages.data.put_word((script.len() % 4096) & !7, script.word()),
            11 => pages.data.put_word(reader.position() as usize & 4095 & !7, u64::from(script.byte()) * 17),
            // The victim.
            12 | 13 => {
                let len = script.len();
                let result = if messages { reader.recv(&mut buffer[..len]) } else { reader.read(&mut buffer[..len]) };
                expected(result);
            }
            14 => {
                if let Some(Some((first, second))) = expected(reader.in_place().peek()) {
                    let len = first.len() + second.len();
                    first.copy_to(&mut buffer[..first.len()]);
                    second.copy_to(&mut buffer[first.len()..len]);
                    if script.byte() & 1 != 0 {
                        expected(reader.refresh());
                    }
                    reader.in_place().consume(if messages { 0 } else { script.len().min(len) });
                }
            }
            15 | 16 => {
                let bytes = &buffer[..script.len()];
                expected(if messages { writer.send(bytes).map(drop) } else { writer.write(bytes).map(drop) });
            }
            17 => {
                let len = script.len();
                if let Some(Some((first, second))) = expected(writer.in_place().reserve(len)) {
                    first.fill(1);
                    second.fill(2);
                    expected(writer.in_place().commit(script.len().min(len)));
                }
            }
            18 => drop(expected(reader.finished())),
            19 => {
                if expected(reader.handover().announced()) == Some(Some(1)) {
                    expected(reader.handover().prepare(1, common::next_ring(CAPACITY, 1).1));
                }
            }
            20 => {
                if expected(writer.handover().can_offer()) == Some(true) {
                    writer.handover().announce();
                }
            }
            21 => {
                if expected(writer.handover().reader_ready()) == Some(true) {
                    writer.handover().switch_to(common::next_ring(CAPACITY, 1).0);
                    moved = true;
                }
            }
            22 => {
                reader.arm(1 + script.len() as u64 % CAPACITY);
                reader.before_sleep();
                expected(reader.ready(1));
                writer.arm(1 + script.len() as u64 % CAPACITY);
                writer.before_sleep();
                expected(writer.ready(1));
            }
            _ => drop(expected(writer.handover().unread_from(script.word(), &mut Vec::new()))),
        }
        pages.set_tail(tail);
        pages.set(words::HEAD, head);
        let _ = (reader.take_notification(), writer.take_notification());
        assert!(reader.available() <= CAPACITY);
        assert!(writer.in_flight() <= CAPACITY || moved);
    }
});
