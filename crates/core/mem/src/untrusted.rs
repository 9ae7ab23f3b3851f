// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds a peer's word that was not checked yet.

/// A value that the peer chose. It was loaded once, and is accessible only through a check or for a use that can do no
/// harm.
#[derive(Clone, Copy, Debug)]
#[must_use = "a peer's word that nobody checks should not have been loaded"]
pub struct Untrusted<T>(T);

impl<T> Untrusted<T> {
    /// Wraps a value just loaded from a peer.
    pub const fn new(value: T) -> Self {
        Self(value)
    }

    /// Turns the word into a trusted value, or into an error that names the fault.
    ///
    /// # Errors
    /// The error of `check`.
    #[inline]
    pub fn check<R, E>(self, check: impl FnOnce(T) -> Result<R, E>) -> Result<R, E> {
        check(self.0)
    }

    /// Returns the word as a hint, for decisions that are harmless either way (to spin or not, to notify once more).
    #[inline]
    pub fn hint(self) -> T {
        self.0
    }
}
