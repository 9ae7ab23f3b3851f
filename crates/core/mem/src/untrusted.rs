// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer's word before it was checked.

/// A value that the peer chose. It was loaded once; the only ways to it are a check and a use that cannot do harm.
#[derive(Clone, Copy, Debug)]
#[must_use = "a peer's word that nobody checks should not have been loaded"]
pub struct Untrusted<T>(T);

impl<T> Untrusted<T> {
    /// Wraps what was just loaded from a peer.
    pub const fn new(value: T) -> Self {
        Self(value)
    }

    /// Turns the word into something trusted, or into the error that names what is wrong with it.
    ///
    /// # Errors
    /// Whatever `check` says.
    #[inline]
    pub fn check<R, E>(self, check: impl FnOnce(T) -> Result<R, E>) -> Result<R, E> {
        check(self.0)
    }

    /// The word as a hint: for decisions that cannot hurt whichever way they go (to spin or not, to ring once more).
    #[inline]
    pub fn hint(self) -> T {
        self.0
    }
}
