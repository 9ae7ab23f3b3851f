// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hardware addresses of interfaces.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};

/// Hardware address of an Ethernet interface.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Returns whether it can be the address of one interface.
    #[must_use]
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }

    /// Returns this machine's address for these words: always the same, and a different one for other words (N-6).
    #[must_use]
    pub fn derived(machine: &[u8], words: [&str; 3]) -> Self {
        let mut hash = Sha256::new_with_prefix(b"tombolo net\0");
        for part in [machine, words[0].as_bytes(), words[1].as_bytes(), words[2].as_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self::local(hash.finalize()[..6].try_into().expect("six bytes"))
    }

    /// Makes a unicast, locally administered address of these bytes.
    #[must_use]
    pub fn local(mut bytes: [u8; 6]) -> Self {
        bytes[0] = bytes[0] & 0xfc | 2;
        Self(bytes)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address of one interface, such as 02:00:00:00:00:01");
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit()));
            *byte = u8::from_str_radix(part.ok_or_else(wrong)?, 16).map_err(|_| wrong())?;
        }
        match parts.next() {
            None if Self(bytes).is_unicast() => Ok(Self(bytes)),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_they_are_read() {
        let mac: Mac = "02:00:0a:ff:00:01".parse().unwrap();
        assert_eq!((mac.to_string().as_str(), mac.0), ("02:00:0a:ff:00:01", [2, 0, 10, 255, 0, 1]));
        for bad in [
            "",
            "02",
            "02:00:0a:ff:00",
            "02:00:0a:ff:00:01:02",
            "03:00:00:00:00:01",
            "00:00:00:00:00:00",
            "02:00:0a:ff:00:0g",
            "2:0:a:f:0:1",
            "02-00-0a-ff-00-01",
            "+2:00:00:00:00:01",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }

    #[test]
    fn n6_derived_addresses_stay_and_differ_by_every_word() {
        let mac = Mac::derived(b"machine", ["connect", "local:x", "tmb0"]);
        assert_eq!(mac, Mac::derived(b"machine", ["connect", "local:x", "tmb0"]));
        assert!(mac.is_unicast() && mac.0[0] & 2 == 2, "{mac}");
        for (machine, words) in [
            ("machines", ["connect", "local:x", "tmb0"]),
            ("machine", ["listen", "local:x", "tmb0"]),
            ("machine", ["connect", "local:y", "tmb0"]),
            ("machine", ["connect", "local:x", "tmb1"]),
            ("machine", ["connect", "local:xt", "mb0"]),
        ] {
            assert_ne!(mac, Mac::derived(machine.as_bytes(), words), "{words:?}");
        }
    }
}
