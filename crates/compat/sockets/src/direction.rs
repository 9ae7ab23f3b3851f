// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two directions of a connection, as this endpoint sees them.

/// One of the two directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Direction that this endpoint sends.
    Out = 0,
    /// Direction that it receives.
    In = 1,
}

impl Direction {
    /// The two directions.
    pub const BOTH: [Self; 2] = [Self::Out, Self::In];
}
