// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps what a sender that has ended left in the pipe, once the pipe's memory is taken away (S-19). All processes that
//! this endpoint is by then, or becomes, share it and read it in turns (S-9).

use std::io::{self, IoSliceMut};

use tombolo_mem::CommonSegment;

use super::Read;

/// Offset of the bytes. Before them is the number of bytes that were taken.
const BEGIN: usize = 8;

/// Bytes that were taken out of the pipe, and that the program has not read.
#[derive(Debug)]
pub(super) struct Leftover {
    memory: CommonSegment,
    len: usize,
}

impl Leftover {
    /// Makes an empty one with room for `len` bytes.
    ///
    /// # Errors
    /// Returns an error where there is no memory for them.
    pub fn with_room(len: usize) -> io::Result<Self> {
        Ok(Self { memory: CommonSegment::among_processes(BEGIN + len)?, len: 0 })
    }

    /// Appends bytes, for which there must be room.
    pub fn push(&mut self, bytes: &[u8]) {
        self.memory.copy_in(BEGIN + self.len, bytes);
        self.len += bytes.len();
    }

    /// Returns the number of bytes that are left.
    pub fn unread(&self) -> usize {
        self.len - self.taken()
    }

    fn taken(&self) -> usize {
        self.memory.load32(0) as usize
    }

    /// Reads what there is room for, within a turn. Returns the number of bytes read, or for a look the number that is
    /// there.
    pub fn read(&self, to: &mut [IoSliceMut<'_>], read: Read) -> usize {
        if read == Read::Look {
            return self.unread();
        }
        let (before, mut at) = (self.taken(), self.taken());
        for part in to {
            let n = part.len().min(self.len - at);
            self.memory.copy_out(BEGIN + at, &mut part[..n]);
            at += n;
        }
        if read == Read::Take {
            self.memory.store32(0, u32::try_from(at).expect("a ring has less"));
        }
        at - before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s19_what_is_left_is_read_once_and_shown_as_often_as_one_likes() {
        let mut leftover = Leftover::with_room(12).unwrap();
        leftover.push(b"what ");
        leftover.push(b"is left");
        let mut room = [[0; 3], [0; 3]];
        let mut read = |how| {
            let [first, second] = &mut room;
            let n = leftover.read(&mut [IoSliceMut::new(first), IoSliceMut::new(second)], how);
            (n, room.concat())
        };
        assert_eq!(read(Read::Look).0, 12);
        assert_eq!(read(Read::Peek), (6, b"what i".to_vec()));
        assert_eq!(read(Read::Take), (6, b"what i".to_vec()));
        assert_eq!(read(Read::Take), (6, b"s left".to_vec()));
        assert_eq!((read(Read::Take).0, read(Read::Look).0, leftover.unread()), (0, 0, 0));
    }
}
