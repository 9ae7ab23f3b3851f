// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of a rig, as sentences.

use std::fmt;

/// A sentence. No code acts on its kind: a step of a test fails, and somebody reads the reason.
#[derive(Debug, Clone)]
pub struct Error(String);

/// The result of a step.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Makes an error with the text `what`.
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for Error {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// Adds to an error what the program was doing.
pub trait Context<T> {
    /// Puts `doing` in front of the error.
    ///
    /// # Errors
    /// The same error, with more words.
    fn context(self, doing: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, doing: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Error(format!("{doing}: {error}")))
    }
}

/// Fails with a sentence unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($why:tt)+) => {
        if !$condition {
            return Err($crate::error::Error::new(format!($($why)+)));
        }
    };
}
