// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves one direction of a connection between TCP and its pipe, and back, at an offset (S-1 to S-3).
//!
//! The sender decides where the direction moves. The receiver drains what lies before that point and follows. Two rules
//! keep the bytes in order, and a model finds a counterexample where either is missing (`tests/model.rs`):
//!
//! * At most one move is outstanding: a sender moves again only when the receiver has followed it. So a kernel read
//!   that began before a move can never swallow bytes of the *next* stay on TCP.
//! * A sender moves into the pipe only after the receiver declared itself ready, in a call of its own that reads. So
//!   no thread that reads past this library, or sleeps in the kernel, waits for bytes that come by the pipe.
//!
//! The code is generic over what it touches, so that the model runs the code that ships.

use tombolo_layout::sockets::Followed;

/// Transport that carries a direction at present.
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

/// Fault after which the stream cannot go on: the peer violated the protocol, or bytes bypassed this library.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The peer's word names a number of moves that it cannot have made or followed.
    #[error("the other end broke {clause} of the specification: it says {found}, this end is at {own}")]
    OutOfTurn {
        /// Clause that the peer violated.
        clause: &'static str,
        /// Number of moves that the peer's word names.
        found: u64,
        /// Number of moves that this endpoint knows of.
        own: u64,
    },
    /// What was read does not end where the sender left the transport.
    #[error("the sender left the transport at {boundary}, {read} bytes of it were read")]
    Boundary {
        /// Boundary at which the sender left it.
        boundary: u64,
        /// Number of bytes that were read.
        read: u64,
    },
    /// Bytes came over TCP while the direction is in its pipe.
    #[error("bytes came over TCP while the stream is in shared memory: they did not go through the library")]
    Stray,
    /// The peer recalled what is in the pipe, and its position there is impossible.
    #[error(transparent)]
    Corrupt(#[from] tombolo_ring::Corrupt),
}

/// Outcome of a look for bytes by a receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// Number of bytes found, at least one.
    Bytes(usize),
    /// No bytes yet.
    Nothing,
    /// The end of the stream.
    End,
}

/// State and transports that a sender uses.
pub trait Outgoing {
    /// Loads the receiver's word (S-2).
    fn followed(&mut self) -> u64;
    /// Returns the bytes sent over TCP, the boundary of a stay there; `None` unless that is certain and no call is
    /// sending.
    fn sent_over_tcp(&mut self) -> Option<u64>;
    /// Returns the position in the pipe, the boundary of a stay there.
    fn position(&mut self) -> u64;
    /// Returns how far the receiver, which reads nothing more from the pipe, has read it (S-2). What lies beyond that
    /// goes over TCP, first.
    ///
    /// # Errors
    /// Returns a fault where that is impossible, because other bytes went over TCP that bypassed this library (S-5).
    fn recalled(&mut self) -> Result<u64, Fault>;
    /// Stores the boundary, then the number of moves with release (S-1).
    fn publish(&mut self, boundary: u64, moves: u64);
}

/// The sender of a direction.
#[derive(Clone, Debug, Default)]
pub struct Sender {
    moves: u64,
}

impl Sender {
    /// Returns the sender as the previous process of this endpoint left it, by the number of moves in its own word
    ///
    #[must_use]
    pub fn at(moves: u64) -> Self {
        Self { moves }
    }

    /// Returns the transport of the next byte.
    #[must_use]
    pub fn transport(&self) -> Transport {
        Transport::after(self.moves)
    }

    /// Returns whether the receiver has followed the last move, by its word.
    #[must_use]
    pub fn may_move(&self, followed: u64) -> bool {
        Followed::decode(followed).moves == self.moves
    }

    /// Moves towards `wanted` if that may be done now. Returns the transport of the next byte (S-3).
    ///
    /// # Errors
    /// Returns [`Fault::OutOfTurn`] where the receiver's word is impossible.
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

/// State and transports that a receiver uses. No function here blocks.
pub trait Incoming {
    /// Error of the transports.
    type Error: From<Fault>;
    /// Loads the number of the sender's moves, with acquire (S-1).
    fn moves(&mut self) -> u64;
    /// Loads the boundary of the sender's last move.
    fn boundary(&mut self) -> u64;
    /// Stores the receiver's word (S-2).
    fn publish(&mut self, word: u64);
    /// Returns whether this endpoint may declare itself ready. It must want to, all that was read must be accounted
    /// for, and no other thread or process of this endpoint may be reading in the kernel.
    fn may_be_ready(&mut self) -> bool;
    /// Reads from TCP.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn read_tcp(&mut self) -> Result<Found, Self::Error>;
    /// Returns what a read from TCP would find, and reads nothing.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn look_at_tcp(&mut self) -> Result<Found, Self::Error>;
    /// Reads from the pipe; returns `None` where it is empty.
    ///
    /// # Errors
    /// Returns an error where the peer violates the protocol.
    fn read_pipe(&mut self) -> Result<Option<usize>, Self::Error>;
    /// Returns the bytes read from TCP so far.
    fn received(&mut self) -> u64;
    /// Returns the position in the pipe.
    fn position(&mut self) -> u64;
}

/// The receiver of a direction.
#[derive(Clone, Debug, Default)]
pub struct Receiver {
    moves: u64,
    ready: bool,
    leave: bool,
}

/// State of a sender that has left TCP, as its receiver finds it.
#[derive(Clone, Copy, Debug)]
pub struct LeftTcp {
    /// Number of the sender's moves.
    pub moves: u64,
    /// Number of bytes that the sender ever sent over TCP.
    pub boundary: u64,
    /// Number of these that were read.
    pub received: u64,
}

impl Receiver {
    /// Returns the receiver as the previous process of this endpoint left it, by its own word (S-2, R-26).
    #[must_use]
    pub fn at(word: Followed) -> Self {
        Self { moves: word.moves, ready: word.ready, leave: word.leave }
    }

    /// Returns the transport from which the next byte is expected.
    #[must_use]
    pub fn transport(&self) -> Transport {
        Transport::after(self.moves)
    }

    /// Asks the sender for TCP (`true`), or lets it choose (S-2). Returns whether the sender was asked just now, and so
    /// must be notified.
    pub fn set_leave<I: Incoming>(&mut self, io: &mut I, leave: bool) -> bool {
        let news = self.leave != leave && !self.recalls();
        if news {
            self.leave = leave;
            io.publish(self.word());
        }
        news && leave
    }

    /// Asks the sender for TCP, also for what is in the pipe, which this endpoint reads no further (S-2). The caller
    /// MUST have published how far it has read, and MUST then publish the word that this returns.
    ///
    /// Where the sender has just gone to the pipe, `left` says where it left TCP. Then this endpoint need not read that
    /// far first: all bytes come over TCP (S-3).
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

    /// Returns the number of moves that this endpoint has followed, if it reads the pipe and has not asked for TCP.
    pub(crate) fn moves_within_pipe(&self) -> Option<u64> {
        (self.reads_pipe() && !self.leave).then_some(self.moves)
    }

    /// Returns whether the sender, which has made `moves` moves, has left the transport that this endpoint reads.
    pub(crate) fn is_behind(&self, moves: u64) -> bool {
        moves != self.moves
    }

    /// Returns whether this endpoint is to read what is in the pipe.
    #[must_use]
    pub fn reads_pipe(&self) -> bool {
        self.transport() == Transport::Pipe && !self.recalls()
    }

    /// Returns whether what is left in the pipe beyond `position` was recalled and comes over TCP. The sender has made
    /// `moves` moves, the last one at `boundary`. A sender that moved before it saw the recall has another boundary;
    /// what it left is read in the pipe.
    pub(crate) fn is_paid(&self, moves: u64, boundary: u64, position: u64) -> bool {
        let has_moved = self.recalls() && moves != self.moves && boundary == position;
        self.leave && (self.transport() == Transport::Tcp || has_moved)
    }

    /// Returns where the sender has left the transport that this endpoint reads; `None` if it has not, or if the pipe
    /// was recalled.
    pub(crate) fn left_at<I: Incoming>(&self, io: &mut I) -> Result<Option<u64>, Fault> {
        let left = !self.recalls() && self.behind(io)?;
        Ok(left.then(|| io.boundary()))
    }

    /// Returns whether this endpoint has recalled what is in the pipe, and the direction has not gone on from there.
    pub(crate) fn recalls(&self) -> bool {
        self.transport() == Transport::Pipe && self.ready
    }

    fn word(&self) -> u64 {
        Followed { moves: self.moves, ready: self.ready, leave: self.leave }.encode()
    }

    /// Returns whether the sender has moved and this endpoint has not followed yet.
    fn behind<I: Incoming>(&self, io: &mut I) -> Result<bool, Fault> {
        match io.moves().wrapping_sub(self.moves) {
            0 => Ok(false),
            // No sender may move into a pipe whose receiver is not ready.
            1 if self.transport() == Transport::Pipe || self.ready => Ok(true),
            other => Err(Fault::OutOfTurn { clause: "S-2", found: self.moves.wrapping_add(other), own: self.moves }),
        }
    }

    fn follow<I: Incoming>(&mut self, io: &mut I) {
        self.moves += 1;
        self.ready = false;
        io.publish(self.word());
    }

    /// Reads the next bytes, from whichever transport carries them.
    ///
    /// # Errors
    /// Returns the transport's error, or a [`Fault`] after which nothing more may be read.
    pub fn receive<I: Incoming>(&mut self, io: &mut I) -> Result<Found, I::Error> {
        // A sender can move once each time that this endpoint follows. Only a hostile one does so again and again and
        // sends nothing.
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

    /// Looks at TCP once. Returns `None` after it followed the sender, or where the sender has moved meanwhile.
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
            // The move was published before the connection ended, or before there was nothing more to read.
            Ok(Found::Nothing | Found::End) | Err(_) if !behind && self.behind(io)? => Ok(None),
            Ok(Found::End) if behind => Err(Fault::Boundary { boundary: io.boundary(), read: io.received() }.into()),
            other => other.map(Some),
        }
    }

    /// Looks at the pipe once. Returns `None` as `receive_tcp` does.
    fn receive_pipe<I: Incoming>(&mut self, io: &mut I) -> Result<Option<Found>, I::Error> {
        if self.recalls() {
            let seen = if self.behind(io)? { Found::Nothing } else { io.look_at_tcp()? };
            // What TCP had before the sender moved again comes before the bytes in the pipe.
            match (self.behind(io)?, seen) {
                (true, _) if io.boundary() == io.position() => {
                    self.follow(io);
                    return Ok(None);
                }
                (false, Found::Bytes(_)) if io.received() < io.boundary() => return io.read_tcp().map(Some),
                (false, Found::Bytes(_) | Found::Nothing) => return Ok(Some(Found::Nothing)),
                // The sender moved before it saw the recall, or sends no more. Then what it sent into the pipe is read
                // there.
                (true, _) | (false, Found::End) => {}
            }
        }
        if let Some(n) = io.read_pipe()? {
            return Ok(Some(Found::Bytes(n)));
        }
        if self.behind(io)? {
            // Bytes that were published before the move are visible now.
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
        // Whatever TCP reports came after the bytes in the pipe.
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
