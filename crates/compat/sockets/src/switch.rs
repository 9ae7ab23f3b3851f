// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moving one direction of a connection between TCP and its pipe, and back, at an offset (S-1 to S-3).
//!
//! The sender decides where it moves; the receiver drains what lies before that point and follows. Two rules keep the
//! bytes in order, and a model refutes each in its absence (`tests/model.rs`):
//!
//! * At most one move is outstanding: a sender moves again only when the receiver has followed it. So a kernel read that
//!   began before a move can never swallow bytes of the *next* stay on TCP.
//! * A sender moves into the pipe only after the receiver declared itself ready, in a call of its own that reads. So
//!   nobody who reads past this library, or sleeps in the kernel, is left waiting for bytes that come another way.
//!
//! The code is generic over what it touches, so that the model runs what ships.

use tombolo_layout::sockets::Followed;

/// What carries a direction for the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// The kernel's connection.
    Tcp,
    /// Shared memory.
    Pipe,
}

impl Transport {
    fn after(moves: u64) -> Self {
        if moves % 2 == 0 { Self::Tcp } else { Self::Pipe }
    }
}

/// The stream can not go on: what the other end says is impossible, or bytes went past this library.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The other end's word is out of turn.
    #[error("the other end broke {clause} of the specification: it says {found}, this end is at {own}")]
    OutOfTurn {
        /// The clause.
        clause: &'static str,
        /// What it says.
        found: u64,
        /// What this end knows.
        own: u64,
    },
    /// What was read does not end where the sender left the transport.
    #[error("the sender left the transport at {boundary}, {read} bytes of it were read")]
    Boundary {
        /// Where it left.
        boundary: u64,
        /// How much was read.
        read: u64,
    },
    /// Bytes came over TCP while the direction is in its pipe.
    #[error("bytes came over TCP while the stream is in shared memory: they did not go through the library")]
    Stray,
}

/// What a receiver found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The end of the stream.
    End,
}

/// What a sender touches.
pub trait Outgoing {
    /// Loads the receiver's word (S-2).
    fn followed(&mut self) -> u64;
    /// Bytes sent over TCP, if that is known beyond doubt and nobody is sending: where a stay there ends.
    fn sent_over_tcp(&mut self) -> Option<u64>;
    /// Position in the pipe: where a stay there ends.
    fn position(&mut self) -> u64;
    /// The receiver reads nothing more from the pipe: how far it has read (S-2). What lies behind that goes over TCP,
    /// first.
    ///
    /// # Errors
    /// Where that cannot be, as other bytes went there that did not go through here (S-5).
    fn recalled(&mut self) -> Result<u64, Fault>;
    /// Stores the boundary, then the number of moves with release (S-1).
    fn publish(&mut self, boundary: u64, moves: u64);
}

/// The sending end of a direction.
#[derive(Clone, Debug, Default)]
pub struct Sender {
    moves: u64,
}

impl Sender {
    /// The sender as the last process of this end left it: after so many moves, by its own word.
    #[must_use]
    pub fn at(moves: u64) -> Self {
        Self { moves }
    }

    /// What carries the next byte.
    #[must_use]
    pub fn transport(&self) -> Transport {
        Transport::after(self.moves)
    }

    /// Whether the receiver has followed the last move, by its word.
    #[must_use]
    pub fn may_move(&self, followed: u64) -> bool {
        Followed::decode(followed).moves == self.moves
    }

    /// Moves towards `wanted` if that may be done now, and says what carries the next byte (S-3).
    ///
    /// # Errors
    /// [`Fault::OutOfTurn`] where the receiver's word is impossible.
    #[inline]
    pub fn steer(&mut self, io: &mut impl Outgoing, wanted: Transport) -> Result<Transport, Fault> {
        let followed = Followed::decode(io.followed());
        if followed.moves != self.moves {
            if followed.moves.wrapping_add(1) != self.moves {
                return Err(Fault::OutOfTurn { clause: "S-2", found: followed.moves, own: self.moves });
            }
            return Ok(self.transport()); // One move at a time.
        }
        let wanted = if followed.leave { Transport::Tcp } else { wanted };
        match (self.transport(), wanted) {
            (Transport::Tcp, Transport::Pipe) if followed.ready => {
                if let Some(boundary) = io.sent_over_tcp() {
                    self.go(io, boundary);
                }
            }
            (Transport::Pipe, Transport::Tcp) => {
                let boundary = if followed.recalls() { io.recalled()? } else { io.position() };
                self.go(io, boundary);
            }
            _ => {}
        }
        Ok(self.transport())
    }

    fn go(&mut self, io: &mut impl Outgoing, boundary: u64) {
        self.moves += 1;
        io.publish(boundary, self.moves);
    }
}

/// What a receiver touches. Nothing here blocks.
pub trait Incoming {
    /// What a transport can fail with.
    type Error: From<Fault>;
    /// Loads the number of the sender's moves, with acquire (S-1).
    fn moves(&mut self) -> u64;
    /// Loads where the last move was.
    fn boundary(&mut self) -> u64;
    /// Stores the receiver's word (S-2).
    fn publish(&mut self, word: u64);
    /// Whether this end may declare itself ready: it wants to, all that was read is accounted for, and nobody else of
    /// this end is reading in the kernel.
    fn may_be_ready(&mut self) -> bool;
    /// Reads from TCP.
    ///
    /// # Errors
    /// What the kernel says.
    fn read_tcp(&mut self) -> Result<Found, Self::Error>;
    /// Looks what a read from TCP would give, and reads nothing.
    ///
    /// # Errors
    /// What the kernel says.
    fn look_at_tcp(&mut self) -> Result<Found, Self::Error>;
    /// Reads from the pipe; `None` where it is empty.
    ///
    /// # Errors
    /// Where the peer lies.
    fn read_pipe(&mut self) -> Result<Option<usize>, Self::Error>;
    /// Bytes read from TCP so far.
    fn received(&mut self) -> u64;
    /// Position in the pipe.
    fn position(&mut self) -> u64;
}

/// The receiving end of a direction.
#[derive(Clone, Debug, Default)]
pub struct Receiver {
    moves: u64,
    ready: bool,
    leave: bool,
}

/// A sender that has left TCP, as its receiver finds it.
#[derive(Clone, Copy, Debug)]
pub struct LeftTcp {
    /// The sender's moves.
    pub moves: u64,
    /// Bytes that it ever sent over TCP.
    pub boundary: u64,
    /// How many of these were read.
    pub received: u64,
}

impl Receiver {
    /// The receiver as the last process of this end left it, by its own word (S-2, R-26).
    #[must_use]
    pub fn at(word: Followed) -> Self {
        Self { moves: word.moves, ready: word.ready, leave: word.leave }
    }

    /// What the next byte is expected from.
    #[must_use]
    pub fn transport(&self) -> Transport {
        Transport::after(self.moves)
    }

    /// Asks the sender for TCP (`true`), or lets it choose (S-2). Says whether it was asked just now: it is to be notified then.
    pub fn set_leave<I: Incoming>(&mut self, io: &mut I, leave: bool) -> bool {
        let news = self.leave != leave && !self.recalls();
        if news {
            self.leave = leave;
            io.publish(self.word());
        }
        news && leave
    }

    /// Asks the sender for TCP, also for what is in the pipe: this end reads no more of that (S-2). It MUST have
    /// published how far it has read, and then publishes the word that this gives.
    ///
    /// Where the sender has just gone to the pipe, `left` says where it left TCP. Then this end needs not read so far before: all
    /// that comes, comes over TCP (S-3).
    pub fn recall(&mut self, left: LeftTcp) -> Option<u64> {
        let is_ahead = self.transport() == Transport::Tcp && self.ready && left.moves == self.moves + 1;
        if is_ahead && left.received <= left.boundary {
            self.moves += 1;
            (self.ready, self.leave) = (true, true);
            return Some(self.word());
        }
        let news = self.transport() == Transport::Pipe && !self.recalls();
        if news {
            (self.ready, self.leave) = (true, true);
        }
        news.then(|| self.word())
    }

    /// The moves that this end has followed, where it reads the pipe and wants nothing else.
    pub(crate) fn moves_within_pipe(&self) -> Option<u64> {
        (self.reads_pipe() && !self.leave).then_some(self.moves)
    }

    /// Whether the sender, which has made so many moves, has left the transport that this end reads.
    pub(crate) fn is_behind(&self, moves: u64) -> bool {
        moves != self.moves
    }

    /// Whether what is in the pipe is this end's to read there.
    #[must_use]
    pub fn reads_pipe(&self) -> bool {
        self.transport() == Transport::Pipe && !self.recalls()
    }

    /// Whether what is left in the pipe behind `position` was recalled, and comes over TCP: the sender has made so many moves, the
    /// last at `boundary`. One that moved before it was asked left at another one, and what it left is to be read in the pipe.
    pub(crate) fn is_paid(&self, moves: u64, boundary: u64, position: u64) -> bool {
        let has_moved = self.recalls() && moves != self.moves && boundary == position;
        self.leave && (self.transport() == Transport::Tcp || has_moved)
    }

    /// Where the sender has left the transport that this end reads, if it has, and this end reads it up to there.
    pub(crate) fn left_at<I: Incoming>(&self, io: &mut I) -> Result<Option<u64>, Fault> {
        let left = !self.recalls() && self.behind(io)?;
        Ok(left.then(|| io.boundary()))
    }

    /// Whether it was asked for what is in the pipe, and has not gone on from there.
    pub(crate) fn recalls(&self) -> bool {
        self.transport() == Transport::Pipe && self.ready
    }

    fn word(&self) -> u64 {
        Followed { moves: self.moves, ready: self.ready, leave: self.leave }.encode()
    }

    /// Whether the sender has moved and this end has not followed yet.
    fn behind<I: Incoming>(&self, io: &mut I) -> Result<bool, Fault> {
        match io.moves().wrapping_sub(self.moves) {
            0 => Ok(false),
            // Nobody moves into a pipe whose receiver is not ready.
            1 if self.transport() == Transport::Pipe || self.ready => Ok(true),
            other => Err(Fault::OutOfTurn { clause: "S-2", found: self.moves.wrapping_add(other), own: self.moves }),
        }
    }

    fn follow<I: Incoming>(&mut self, io: &mut I) {
        self.moves += 1;
        self.ready = false;
        io.publish(self.word());
    }

    /// Reads what comes next, from wherever it comes.
    ///
    /// # Errors
    /// What the transport says, or a [`Fault`] after which nothing more may be read.
    pub fn receive<I: Incoming>(&mut self, io: &mut I) -> Result<Found, I::Error> {
        // A sender can move once for each time that this end follows; who does so without sending is up to no good.
        for _ in 0..8 {
            let found = match self.transport() {
                Transport::Tcp => self.receive_tcp(io)?,
                Transport::Pipe => self.receive_pipe(io)?,
            };
            if let Some(found) = found {
                return Ok(found);
            }
        }
        Ok(Found::Nothing)
    }

    /// One look at TCP; `None` after it followed the sender, or where the sender has moved meanwhile.
    fn receive_tcp<I: Incoming>(&mut self, io: &mut I) -> Result<Option<Found>, I::Error> {
        let behind = self.behind(io)?;
        if behind {
            let (boundary, read) = (io.boundary(), io.received());
            if read == boundary {
                self.follow(io);
                return Ok(None);
            }
            if read > boundary {
                return Err(Fault::Boundary { boundary, read }.into());
            }
        } else if !self.ready && !self.leave && io.may_be_ready() {
            self.ready = true;
            io.publish(self.word());
        }
        match io.read_tcp() {
            Ok(Found::Bytes(n)) => Ok(Some(Found::Bytes(n))),
            // Published before the connection ended, or before there was nothing more to read.
            Ok(Found::Nothing | Found::End) | Err(_) if !behind && self.behind(io)? => Ok(None),
            Ok(Found::End) if behind => Err(Fault::Boundary { boundary: io.boundary(), read: io.received() }.into()),
            other => other.map(Some),
        }
    }

    /// One look at the pipe; `None` as above.
    fn receive_pipe<I: Incoming>(&mut self, io: &mut I) -> Result<Option<Found>, I::Error> {
        if self.recalls() {
            let seen = if self.behind(io)? { Found::Nothing } else { io.look_at_tcp()? };
            // What TCP had before the sender moved again came before the pipe.
            match (self.behind(io)?, seen) {
                (true, _) if io.boundary() == io.position() => {
                    self.follow(io);
                    return Ok(None);
                }
                (false, Found::Bytes(_)) if io.received() < io.boundary() => return io.read_tcp().map(Some),
                (false, Found::Bytes(_) | Found::Nothing) => return Ok(Some(Found::Nothing)),
                // It moved before it was asked, or sends no more: then what it sent into the pipe is to be read there.
                (true, _) | (false, Found::End) => {}
            }
        }
        if let Some(n) = io.read_pipe()? {
            return Ok(Some(Found::Bytes(n)));
        }
        if self.behind(io)? {
            // What was published before the move is visible now.
            if let Some(n) = io.read_pipe()? {
                return Ok(Some(Found::Bytes(n)));
            }
            let (boundary, read) = (io.boundary(), io.position());
            if read != boundary {
                return Err(Fault::Boundary { boundary, read }.into());
            }
            self.follow(io);
            return Ok(None);
        }
        let looked = io.look_at_tcp();
        if matches!(looked, Ok(Found::Nothing)) {
            return Ok(Some(Found::Nothing));
        }
        // Whatever TCP has to say came after what is in the pipe.
        if let Some(n) = io.read_pipe()? {
            return Ok(Some(Found::Bytes(n)));
        }
        if self.behind(io)? {
            return Ok(None);
        }
        match looked? {
            Found::Bytes(_) => Err(Fault::Stray.into()),
            other => Ok(Some(other)),
        }
    }
}
