// SPDX-License-Identifier: Apache-2.0 OR MIT
//! C-1. Addresses: `SCHEME:SERVICE`, the scheme naming the backend, the rest being its own business.

use std::{fmt, str::FromStr};

/// Where a listener is to be found.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Address {
    scheme: String,
    service: String,
}

/// Why a text is no address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no address: it should look like local:NAME or local:/path/to/socket")]
pub struct AddressError {
    /// What was given.
    pub text: String,
}

impl Address {
    /// The backend's name.
    #[must_use]
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// What the backend is asked for.
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
