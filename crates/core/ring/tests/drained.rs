// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A reader that reads the rest and closes between two looks of its writer has read everything.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use tombolo_layout::state::{Phase, State};
use tombolo_mem::{Mem, OwnData, OwnWord, PeerData, PeerWord, Untrusted};
use tombolo_ring::{Error, FenceMode, OwnRing, Writer, WriterParts};

/// Memory of one thread, in which stores may happen before a word is loaded.
#[derive(Debug)]
enum Staged {}

impl Mem for Staged {
    type OwnWord = Word;
    type PeerWord = Word;
    type OwnData = Bytes;
    type PeerData = Bytes;

    fn fence() {}
    fn light_fence() {}
    fn pause() {}
}

/// Stores that happen before a load, as if the peer did them then.
type Before = Rc<RefCell<Vec<(Word, u64)>>>;

#[derive(Clone, Debug, Default)]
struct Word {
    value: Rc<Cell<u64>>,
    before: Before,
}

impl Word {
    fn load_after_peer(&self) -> Untrusted<u64> {
        let stores = std::mem::take(&mut *self.before.borrow_mut());
        stores.into_iter().for_each(|(word, value)| word.value.set(value));
        Untrusted::new(self.value.get())
    }
}

impl OwnWord for Word {
    fn store_release(&self, value: u64) {
        self.value.set(value);
    }
    fn store_relaxed(&self, value: u64) {
        self.value.set(value);
    }
    fn load(&self) -> u64 {
        self.value.get()
    }
}

impl PeerWord for Word {
    fn load_acquire(&self) -> Untrusted<u64> {
        self.load_after_peer()
    }
    fn load_relaxed(&self) -> Untrusted<u64> {
        self.load_after_peer()
    }
}

/// Data that nothing reads.
#[derive(Debug)]
struct Bytes(usize);

impl OwnData for Bytes {
    fn len(&self) -> usize {
        self.0
    }
    fn copy_in(&mut self, _: usize, _: &[u8]) {}
    fn copy_back(&self, _: usize, _: &mut [u8]) {}
}

impl PeerData for Bytes {
    fn len(&self) -> usize {
        self.0
    }
    fn copy_out(&self, _: usize, _: &mut [u8]) {}
    fn prefetch(&self, _: usize, _: usize) {}
}

/// Returns a writer that wrote eight bytes, and its reader's head and state.
fn written() -> (Writer<Staged>, Word, Word) {
    let (head, reader_state) = (Word::default(), Word::default());
    reader_state.value.set(State::OPEN.encode());
    let mut writer = Writer::<Staged>::new(WriterParts {
        ring: OwnRing::new(Word::default(), Bytes(64)),
        want_space: Word::default(),
        state: Word::default(),
        head: head.clone(),
        want_data: Word::default(),
        reader_state: reader_state.clone(),
        start: 0,
        messages: false,
        ordering: FenceMode::Fences,
    });
    assert_eq!(writer.write(&[7; 8]), Ok(Some(8)));
    assert_eq!(writer.reader().has_read_all(), Ok(false));
    (writer, head, reader_state)
}

#[test]
fn r33_reader_that_reads_the_rest_and_closes_between_two_looks_has_read_everything() {
    let over = |phase| State { phase, ready: 0, current: 0 }.encode();
    for phase in [Phase::Closed, Phase::Aborted] {
        for (last, is_all) in [(8, Ok(true)), (7, Err(Error::Closed))] {
            let (mut writer, head, reader_state) = written();
            // After the writer's look at the head, and before its look at the state.
            let meanwhile = [(head, last), (reader_state.clone(), over(phase))];
            reader_state.before.borrow_mut().extend(meanwhile);
            assert_eq!(writer.reader().has_read_all(), is_all, "{phase:?} at {last}");
        }
    }
}
