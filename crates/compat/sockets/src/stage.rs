// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How far a connection is: on its way into shared memory, and on its way back.

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// It may come to be carried by shared memory.
    Candidate,
    /// It has pipes.
    Joined,
    /// It stays on TCP.
    Plain,
}

/// How far a connection is on its way back to TCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReturnStage {
    /// It is there.
    Done,
    /// The peer has to do something first.
    Long,
    /// Bytes are in shared memory that TCP will not carry, as the peer has ended its sending: only this library can read them.
    Lost,
}
