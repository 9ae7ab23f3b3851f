// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names the call that failed, which an error of the kernel does not tell.

use std::{error::Error, fmt, io};

/// Failure of a call that should not fail.
#[derive(Debug)]
pub struct FailedCall {
    /// Name of the call.
    pub call: &'static str,
    /// Error that the kernel returned.
    pub source: io::Error,
}

impl fmt::Display for FailedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed", self.call)
    }
}

impl Error for FailedCall {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// Adds the name of a call to its error.
pub trait Os<T> {
    /// Turns the error into a [`FailedCall`].
    ///
    /// # Errors
    /// The [`FailedCall`].
    fn os(self, call: &'static str) -> Result<T, FailedCall>;
}

impl<T, E: Into<io::Error>> Os<T> for Result<T, E> {
    #[inline]
    fn os(self, call: &'static str) -> Result<T, FailedCall> {
        self.map_err(|error| FailedCall { call, source: error.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_call_and_then_what_the_kernel_said() {
        let error = Err::<(), _>(rustix::io::Errno::NOSPC).os("write").unwrap_err();
        assert_eq!(error.to_string(), "write failed");
        assert_eq!(error.source().unwrap().to_string(), "No space left on device (os error 28)");
    }
}
