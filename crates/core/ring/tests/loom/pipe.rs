// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pipes over the model's memory, and the loops by which both endpoints use them, as in a channel.

use std::time::Duration;

use tombolo_layout::{record, state::Phase};
use tombolo_mem::Mem;
use tombolo_ring::{
    Deadline, Error, FenceMode, FlushPolicy, OwnRing, PeerRing, Reader, ReaderParts, Side, Spin, WaitContext, Waited,
    Writer, WriterParts, wait,
};

use crate::{
    doorbell::Doorbells,
    memory::{Bytes, LoomMem, Sound, Word},
};

/// The kind of a pipe.
#[derive(Clone, Copy)]
pub struct Kind {
    pub capacity: usize,
    pub messages: bool,
    pub start: u64,
}

/// A pipe for records with a ring of `capacity` bytes.
pub const fn messages(capacity: usize) -> Kind {
    Kind { capacity, messages: true, start: 0 }
}

/// A pipe for a stream with a ring of `capacity` bytes.
pub const fn stream(capacity: usize) -> Kind {
    Kind { capacity, messages: false, start: 0 }
}

/// Never checks for a sleeping reader before it must.
pub const BATCH: FlushPolicy = FlushPolicy::Batch { bytes: u64::MAX, time: Duration::MAX };

/// The words of a pipe as their owner and as the peer see them. Mutants alter one of the views.
pub struct Views {
    pub own: Word,
    pub peer: Word,
}

impl Views {
    fn new(value: u64) -> Self {
        let own = Word::new(value);
        Self { peer: own.clone(), own }
    }
}

/// Memory of the model, with any kind of fences.
pub trait Modelled: Mem<OwnWord = Word, PeerWord = Word, OwnData = Bytes, PeerData = Bytes> {}

impl<M: Mem<OwnWord = Word, PeerWord = Word, OwnData = Bytes, PeerData = Bytes>> Modelled for M {}

/// A pipe before its halves are taken.
pub struct Pipe {
    pub kind: Kind,
    pub tail: Views,
    pub head: Views,
    pub want_data: Views,
    pub want_space: Views,
    pub writer_state: Views,
    pub reader_state: Views,
    data: Bytes,
}

impl Pipe {
    pub fn new(kind: Kind) -> Self {
        let zero = || Views::new(0);
        Self {
            kind,
            tail: Views::new(kind.start),
            head: Views::new(kind.start),
            want_data: zero(),
            want_space: zero(),
            writer_state: zero(),
            reader_state: zero(),
            data: Bytes::new(kind.capacity),
        }
    }

    pub fn writer<const FENCED: bool>(&self) -> Writer<LoomMem<FENCED>> {
        self.writer_of(FenceMode::Fences)
    }

    pub fn reader<const FENCED: bool>(&self) -> Reader<LoomMem<FENCED>> {
        self.reader_of(FenceMode::Fences)
    }

    pub fn writer_of<M: Modelled>(&self, ordering: FenceMode) -> Writer<M> {
        Writer::new(WriterParts {
            ring: OwnRing::new(self.tail.own.clone(), self.data.clone()),
            want_space: self.want_space.own.clone(),
            state: self.writer_state.own.clone(),
            head: self.head.peer.clone(),
            want_data: self.want_data.peer.clone(),
            reader_state: self.reader_state.peer.clone(),
            start: self.kind.start,
            messages: self.kind.messages,
            ordering,
        })
    }

    pub fn reader_of<M: Modelled>(&self, ordering: FenceMode) -> Reader<M> {
        Reader::new(ReaderParts {
            ring: PeerRing::new(self.tail.peer.clone(), self.data.clone()),
            head: self.head.own.clone(),
            want_data: self.want_data.own.clone(),
            state: self.reader_state.own.clone(),
            want_space: self.want_space.peer.clone(),
            writer_state: self.writer_state.peer.clone(),
            start: self.kind.start,
            messages: self.kind.messages,
            ordering,
        })
    }
}

/// Returns a ring to move to, as both endpoints see it.
pub fn next_ring(capacity: usize) -> (OwnRing<Sound>, PeerRing<Sound>) {
    let (tail, data) = (Word::new(0), Bytes::new(capacity));
    (OwnRing::new(tail.clone(), data.clone()), PeerRing::new(tail, data))
}

/// Sleeps without spinning and without a deadline.
pub fn sleep_until<S: Side>(side: &mut S, doorbells: &mut Doorbells, need: u64) -> Result<(), Error> {
    let waited = wait(side, doorbells, &mut Spin::new(Duration::ZERO), need, Deadline::NEVER)?;
    assert_eq!(waited, Waited::Ready);
    Ok(())
}

/// Notifies if `side` must.
pub fn notify_if_owed<S: Side>(side: &mut S, doorbells: &mut Doorbells) {
    if side.take_notification() {
        doorbells.notify();
    }
}

/// Sends one record, waiting for room.
pub fn send<M: Mem>(writer: &mut Writer<M>, doorbells: &mut Doorbells, record: &[u8]) -> Result<(), Error> {
    loop {
        let sent = writer.send(record)?;
        notify_if_owed(writer, doorbells);
        match sent {
            Some(()) => return Ok(()),
            None => sleep_until(writer, doorbells, record::span(record.len() as u64))?,
        }
    }
}

/// Writes all of `bytes`, waiting for room.
pub fn write_all<M: Mem>(writer: &mut Writer<M>, doorbells: &mut Doorbells, mut bytes: &[u8]) -> Result<(), Error> {
    while !bytes.is_empty() {
        let written = writer.write(bytes)?;
        notify_if_owed(writer, doorbells);
        match written {
            Some(n) => bytes = &bytes[n..],
            None => sleep_until(writer, doorbells, 1)?,
        }
    }
    Ok(())
}

/// Receives one record, and waits for it. Returns the phase if the pipe has ended instead.
pub fn recv<M: Mem>(reader: &mut Reader<M>, doorbells: &mut Doorbells) -> Result<Result<Vec<u8>, Phase>, Error> {
    let mut record = vec![0; reader.message_max() as usize];
    loop {
        let received = reader.recv(&mut record)?;
        notify_if_owed(reader, doorbells);
        if let Some(len) = received {
            record.truncate(len);
            return Ok(Ok(record));
        }
        if let Some(phase) = reader.finished()? {
            return Ok(Err(phase));
        }
        let need = reader.need()?;
        sleep_until(reader, doorbells, need)?;
    }
}

/// Reads up to `at_most` bytes at a time until the end, or until `enough` have come.
pub fn read<M: Mem>(
    reader: &mut Reader<M>,
    doorbells: &mut Doorbells,
    at_most: usize,
    enough: usize,
) -> Result<(Vec<u8>, Option<Phase>), Error> {
    let (mut all, mut piece) = (Vec::new(), vec![0; at_most]);
    while all.len() < enough {
        let got = reader.read(&mut piece)?;
        notify_if_owed(reader, doorbells);
        if let Some(n) = got {
            all.extend_from_slice(&piece[..n]);
        } else if let Some(phase) = reader.finished()? {
            return Ok((all, Some(phase)));
        } else {
            sleep_until(reader, doorbells, 1)?;
        }
    }
    Ok((all, None))
}

/// Sends two records and waits until both were read.
pub fn write_and_drain<M: Mem>(writer: &mut Writer<M>, doorbells: &mut Doorbells) {
    (0..2).for_each(|i| send(writer, doorbells, &[i; 3]).unwrap());
    while !writer.reader().has_read_all().unwrap() {
        let whole = writer.capacity();
        sleep_until(writer, doorbells, whole).unwrap();
    }
}

/// Receives two records, wants no more, and does not check for more.
pub fn read_two_and_close<M: Mem>(reader: &mut Reader<M>, doorbells: &mut Doorbells) {
    (0..2).for_each(|i| assert_eq!(recv(reader, doorbells), Ok(Ok(vec![i; 3]))));
    reader.close();
    notify_if_owed(reader, doorbells);
}
