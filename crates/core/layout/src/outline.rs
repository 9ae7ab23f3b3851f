// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Extracts headers and words, but no data, of the first and the current ring in a window, for tools (B-20).

use alloc::boxed::Box;

use crate::{
    SegmentHeader, header,
    limits::PAGE,
    private::COUNTERS,
    state::State,
    words::{
        HEAD, PEER_EPOCH, READER_COUNTERS, READER_STATE, TAIL, WANT_DATA, WANT_SPACE, WRITER_COUNTERS, WRITER_STATE,
    },
};

/// Offset of the first ring, after the page of the mailbox (V-4).
const BEGIN: u64 = PAGE;
/// Number of words of a header that are not reserved.
const HEADER: usize = 9;
/// Offsets of the live words.
const WORDS: [usize; 6] = [TAIL, HEAD, WANT_DATA, READER_STATE, WANT_SPACE, WRITER_STATE];
/// Number of rings after the first that are examined to find the current one.
const STEPS: usize = 32;

/// Number of words of the first ring's control page, in their order (B-20).
pub const FIRST: usize = HEADER + WORDS.len() + 2 * COUNTERS + 1;
/// Number of words of the current ring: its header and its tail (B-20).
pub const CURRENT: usize = HEADER + 1;
/// Number of words of both (B-20).
pub const OUTLINE: usize = FIRST + CURRENT;

/// Returns the offsets of the first ring's words in its page.
fn places() -> impl Iterator<Item = usize> {
    let row = |at: usize, count: usize| (0..count).map(move |index| at + 8 * index);
    row(0, HEADER)
        .chain(WORDS)
        .chain(row(WRITER_COUNTERS, COUNTERS))
        .chain(row(READER_COUNTERS, COUNTERS))
        .chain([PEER_EPOCH])
}

fn word_at(page: &[u8], at: usize) -> u64 {
    page.get(at..at + 8).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Returns the header if its segment fits into `room` bytes.
fn header_of(page: &[u8], room: u64) -> Option<SegmentHeader> {
    let bytes = page.first_chunk::<{ header::LEN }>()?;
    // Accepts the length in the header, as only the two endpoints know the length of the memory that was passed (M-2).
    let says = SegmentHeader::decode(bytes, word_at(page, header::SEGMENT_LEN)).ok()?;
    (says.segment_len <= room).then_some(says)
}

/// Extracts the outline of a window of `len` bytes; `read` copies the bytes at an offset of it (B-20). Missing words
/// are zero. The words may come from a hostile peer: they are copied once, and decide only how far the search goes.
///
/// # Errors
/// The error of `read`.
pub fn outline<E>(len: u64, mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>) -> Result<[u64; OUTLINE], E> {
    let mut found = [0; OUTLINE];
    let mut page = [0; PAGE as usize];
    let mut at = BEGIN;
    if at + PAGE > len {
        return Ok(found);
    }
    read(at, &mut page)?;
    let Some(first) = header_of(&page, len - at).filter(|first| first.generation == 0) else { return Ok(found) };
    found.iter_mut().zip(places()).for_each(|(word, at)| *word = word_at(&page, at));
    let current = State::decode(word_at(&page, WRITER_STATE)).map_or(0, |state| state.current);
    if current == 0 {
        return Ok(found);
    }
    at += first.segment_len;
    for _ in 0..STEPS {
        if at + PAGE > len {
            break;
        }
        read(at, &mut page)?;
        // A later ring comes after the first, because pages are allocated from the front (V-6).
        let Some(ring) = header_of(&page, len - at).filter(|ring| ring.epoch == first.epoch) else { break };
        if ring.generation == current {
            let words = (0..HEADER).map(|index| 8 * index).chain([TAIL]);
            found[FIRST..].iter_mut().zip(words).for_each(|(word, at)| *word = word_at(&page, at));
            break;
        }
        at += ring.segment_len;
    }
    Ok(found)
}

/// Returns the control pages that an outline was made of, as far as it has them: of the first ring, and of the current
/// one if that is another.
#[must_use]
pub fn pages(outline: &[u64; OUTLINE]) -> [Option<Box<[u8; PAGE as usize]>>; 2] {
    let page = |words: &[u64], places: &mut dyn Iterator<Item = usize>| {
        let mut page = Box::new([0; PAGE as usize]);
        for (word, at) in words.iter().zip(places) {
            page[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        (words[0] != 0).then_some(page)
    };
    let mut current = (0..HEADER).map(|index| 8 * index).chain([TAIL]);
    [page(&outline[..FIRST], &mut places()), page(&outline[FIRST..], &mut current)]
}

#[cfg(test)]
mod tests {
    use core::convert::Infallible;

    use alloc::{vec, vec::Vec};

    use super::*;
    use crate::Features;

    const SLICE: u64 = 1 << 20;

    fn put(memory: &mut [u8], at: u64, bytes: &[u8]) {
        memory[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Returns a slice with rings of these generations, one behind the other; the last is the current one.
    fn slice(generations: &[u16]) -> Vec<u8> {
        let (mut memory, mut at) = (vec![0; SLICE as usize], BEGIN);
        for generation in generations {
            let header = SegmentHeader::new(4096 << generation, *generation, 0, Features::STATISTICS, 7);
            put(&mut memory, at, &header.encode());
            put(&mut memory, at + TAIL as u64, &(100 + u64::from(*generation)).to_le_bytes());
            at += header.segment_len;
        }
        let state = State { current: *generations.last().unwrap_or(&0), ..State::OPEN };
        put(&mut memory, BEGIN + WRITER_STATE as u64, &state.encode().to_le_bytes());
        put(&mut memory, BEGIN + PEER_EPOCH as u64, &9u64.to_le_bytes());
        memory
    }

    fn read(memory: &[u8]) -> [u64; OUTLINE] {
        let look = |at: u64, bytes: &mut [u8]| {
            bytes.copy_from_slice(&memory[at as usize..][..bytes.len()]);
            Ok::<_, Infallible>(())
        };
        outline(SLICE, look).unwrap()
    }

    #[test]
    fn b20_outline_has_the_words_of_the_first_and_of_the_current_ring() {
        let [first, current] = pages(&read(&slice(&[0])));
        let first = first.unwrap();
        assert_eq!((word_at(&first[..], TAIL), word_at(&first[..], PEER_EPOCH)), (100, 9));
        assert!(header_of(&first[..], SLICE).is_some() && current.is_none());
        let [first, current] = pages(&read(&slice(&[0, 1, 2])));
        let current = current.unwrap();
        assert_eq!((word_at(&first.unwrap()[..], TAIL), word_at(&current[..], TAIL)), (100, 102));
        assert_eq!(header_of(&current[..], SLICE).unwrap().generation, 2);
    }

    #[test]
    fn b20_slice_of_a_liar_is_read_within_its_bounds_and_not_without_end() {
        assert!(pages(&read(&vec![0; SLICE as usize])).iter().all(Option::is_none), "nothing is there yet");
        // A current ring that nobody has, a ring that is longer than the slice, and one of another endpoint.
        let mut memory = slice(&[0, 1]);
        let state = State { current: 5, ..State::OPEN };
        put(&mut memory, BEGIN + WRITER_STATE as u64, &state.encode().to_le_bytes());
        assert!(pages(&read(&memory))[1].is_none());
        let long = SegmentHeader::new(1 << 30, 0, 0, Features::NONE, 7);
        put(&mut memory, BEGIN, &long.encode());
        assert!(pages(&read(&memory))[0].is_none());
        let nothing = |_, _: &mut [u8]| -> Result<(), Infallible> { panic!("a slice without room is looked into") };
        assert_eq!(outline(PAGE, nothing).unwrap(), [0; OUTLINE]);
    }
}
