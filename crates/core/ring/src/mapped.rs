// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pipes over mapped segments: which word of which segment goes where.

use tombolo_layout::{Features, Geometry, HeaderError, SegmentHeader, header, limits, words};
use tombolo_mem::{Mapped, MappedOwnWord, MappedPeerWord, OwnControl, OwnSegment, OwnWord, PeerSegment};

use crate::{Corrupt, FenceMode, OwnRing, PeerRing, Reader, ReaderParts, StatsPage, Writer, WriterParts};

/// How both pipes of a channel are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mode {
    /// Records instead of a stream of bytes.
    pub messages: bool,
    /// Who fences.
    pub ordering: FenceMode,
}

/// A segment of one's own with its header written, nothing said in it yet.
#[derive(Debug)]
pub struct Fresh {
    control: OwnControl,
    ring: OwnRing<Mapped>,
    start: u64,
    /// Whether it has a stats page (C-12).
    has_board: bool,
}

impl Fresh {
    /// Writes `header` into a zeroed segment (M-1 to M-6).
    ///
    /// # Panics
    /// If the header describes another size than the segment has.
    #[must_use]
    pub fn new(segment: OwnSegment, header: &SegmentHeader) -> Self {
        assert_eq!(segment.len() as u64, header.segment_len, "the header describes another segment");
        let (control, data) = segment.split(header.geometry().data_offset);
        control.write_header(&header.encode());
        let ring = OwnRing::<Mapped>::new(control.word(words::TAIL), data);
        // The peer may look before this endpoint has begun.
        ring.tail.store_relaxed(header.start);
        let has_board = header.features.has(Features::STATISTICS);
        Self { control, ring, start: header.start, has_board }
    }

    /// A word of this segment's control page that a layer above gives a meaning (S-1, S-2); none of the ring's own.
    ///
    /// # Panics
    /// If it lies outside the part that the ring leaves free (M-5).
    #[must_use]
    pub fn spare_word(&self, offset: usize) -> MappedOwnWord {
        assert!(offset >= words::RESERVED, "word {offset:#x} is the ring's");
        self.control.word(offset)
    }

    /// The ring alone, for a pipe that moves to it (H-1).
    #[must_use]
    pub fn into_ring(self) -> OwnRing<Mapped> {
        self.ring
    }
}

/// One end's half of each of the two pipes of a channel.
#[derive(Debug)]
pub struct Halves {
    /// Writes into the own segment.
    pub writer: Writer<Mapped>,
    /// Reads from the peer's.
    pub reader: Reader<Mapped>,
    /// Where this endpoint says on which CPU it runs.
    pub own_cpu: MappedOwnWord,
    /// Where the peer says so.
    pub peer_cpu: MappedPeerWord,
    /// Where the writer and the reader publish what they count, if that was offered (C-12).
    pub boards: Option<(StatsPage, StatsPage)>,
    /// Where it stands how the ring of the writer follows its load, likewise (C-12).
    pub growth: Option<MappedOwnWord>,
}

/// Joins the own segment and the peer's into two pipes.
///
/// # Errors
/// [`Corrupt`] where the peer's header is none, of a ring that is not the first, or begins inside a record.
pub fn halves(own: Fresh, peer: &PeerSegment, mode: Mode) -> Result<(Halves, SegmentHeader), Corrupt> {
    let (theirs, ring) = checked(peer, 0)?;
    if mode.messages && theirs.start % limits::RECORD_ALIGN != 0 {
        let what = "start inside a word";
        return Err(Corrupt { clause: "M-4", what, found: theirs.start, bound: limits::RECORD_ALIGN });
    }
    let control = own.control;
    let boards = own.has_board.then(|| {
        control.word(words::PEER_EPOCH).store_relaxed(theirs.epoch);
        let board = |at| StatsPage::new(&control, at);
        (board(words::WRITER_COUNTERS), board(words::READER_COUNTERS))
    });
    let growth = own.has_board.then(|| control.word(words::RING_GROWTH));
    let writer = Writer::new(WriterParts {
        ring: own.ring,
        want_space: control.word(words::WANT_SPACE),
        state: control.word(words::WRITER_STATE),
        head: peer.word(words::HEAD),
        want_data: peer.word(words::WANT_DATA),
        reader_state: peer.word(words::READER_STATE),
        start: own.start,
        messages: mode.messages,
        ordering: mode.ordering,
    });
    let reader = Reader::new(ReaderParts {
        ring,
        head: control.word(words::HEAD),
        want_data: control.word(words::WANT_DATA),
        state: control.word(words::READER_STATE),
        want_space: peer.word(words::WANT_SPACE),
        writer_state: peer.word(words::WRITER_STATE),
        start: theirs.start,
        messages: mode.messages,
        ordering: mode.ordering,
    });
    let (own_cpu, peer_cpu) = (control.word(words::CPU), peer.word(words::CPU));
    Ok((Halves { writer, reader, own_cpu, peer_cpu, boards, growth }, theirs))
}

/// The ring that the peer's pipe moves to (H-1).
///
/// # Errors
/// [`Corrupt`] where its header is none, or of another ring than `generation`.
pub fn follow(peer: &PeerSegment, generation: u16) -> Result<(PeerRing<Mapped>, SegmentHeader), Corrupt> {
    checked(peer, generation).map(|(header, ring)| (ring, header))
}

/// Copies a peer's header once, checks it, and never reads it again (M-8).
fn checked(peer: &PeerSegment, generation: u16) -> Result<(SegmentHeader, PeerRing<Mapped>), Corrupt> {
    let len = peer.len() as u64;
    if len < limits::CONTROL_LEN + limits::CAPACITY_MIN {
        let what = "segment smaller than a control page and the smallest ring";
        return Err(Corrupt { clause: "M-2", what, found: len, bound: limits::CONTROL_LEN + limits::CAPACITY_MIN });
    }
    let theirs = SegmentHeader::decode(&peer.header::<{ header::LEN }>(), len).map_err(|error| {
        let HeaderError { clause, what, found } = error;
        Corrupt { clause, what, found, bound: len }
    })?;
    if theirs.generation != generation {
        let (found, bound) = (theirs.generation.into(), generation.into());
        return Err(Corrupt { clause: "H-1", what: "segment of another ring", found, bound });
    }
    let Geometry { data_offset, .. } = theirs.geometry();
    let ring = PeerRing::new(peer.word(words::TAIL), peer.data(data_offset));
    Ok((theirs, ring))
}
