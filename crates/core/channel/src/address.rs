// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses: `SCHEME:SERVICE`. The scheme names the backend, and only this backend interprets the rest (C-1).

use std::{fmt, str::FromStr};

/// Address of a listener: `SCHEME:SERVICE`, such as `local:web`. The scheme names the backend.
///
/// # Example
/// ```
/// use tombolo::Address;
///
/// let address: Address = "local:web".parse()?;
/// assert_eq!((address.scheme(), address.service()), ("local", "web"));
/// assert_eq!(address.to_string(), "local:web");
/// # Ok::<(), tombolo::AddressError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Address {
    scheme: String,
    service: String,
}

/// Error for a text that is not an address: it has no valid scheme, no service, or a NUL.
///
/// # Example
/// ```
/// let error = "web".parse::<tombolo::Address>().unwrap_err();
/// assert_eq!(error.text, "web");
/// ```
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no address: it should look like local:NAME or local:/path/to/socket")]
pub struct AddressError {
    /// The text that was given.
    pub text: String,
}

impl Address {
    /// Returns the scheme, which is the backend's name: `local`, `vm` or `xen`.
    #[must_use]
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Returns the service, which is everything after the first colon. The backend interprets it.
    #[must_use]
    pub fn service(&self) -> &str {
        &self.service
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bad = || AddressError { text: text.into() };
        let (scheme, service) = text.split_once(':').ok_or_else(bad)?;
        let scheme_ok = !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if !scheme_ok || service.is_empty() || service.contains('\0') {
            return Err(bad());
        }
        Ok(Self { scheme: scheme.into(), service: service.into() })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.scheme, self.service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c1_address_is_scheme_colon_service() {
        let address: Address = "local:/run/a:b.sock".parse().unwrap();
        assert_eq!((address.scheme(), address.service()), ("local", "/run/a:b.sock"));
        assert_eq!(address.to_string(), "local:/run/a:b.sock");
    }

    #[test]
    fn c1_text_without_scheme_or_service_is_refused() {
        for text in ["", "local", "local:", ":x", "LOCAL:x", "lo cal:x", "local:a\0b"] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }
}
