// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines the addresses of services: `DOMID/NAME`.

use std::fmt;

use tombolo_domain::{Error, Result};
use tombolo_layout::xen::NAME_MAX;

use crate::hypervisor::DomId;

/// Largest number of a domain: Xen gives larger ones meanings of their own.
pub(crate) const DOMID_MAX: DomId = 0x7fef;

/// Numbers by which two domains that know each other by name recognise each other as those that were meant: the number
/// that this one shows, and the one that the other must show. Both are 0 if no names were used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Pair {
    pub shows: u64,
    pub expects: u64,
}

/// Address of a service between this domain and another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ServiceAddress {
    /// The other domain.
    pub peer: DomId,
    pub service: String,
    pub pair: Pair,
}

impl ServiceAddress {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let bad = |why| Err(Error::BadService { service: text.into(), why });
        let Some((peer, service)) = text.split_once('/') else {
            return bad("it should look like DOMID/NAME, with the other domain's number");
        };
        let digits = !peer.is_empty() && peer.bytes().all(|byte| byte.is_ascii_digit());
        let Some(peer) = peer.parse().ok().filter(|peer| digits && *peer <= DOMID_MAX) else {
            return bad("the other domain's number is one from 0 to 32751");
        };
        if service.is_empty() || service.len() > NAME_MAX {
            return bad("a name has 1 to 64 characters");
        }
        if !service.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)) {
            return bad("a name is made of letters, digits, `_` and `-`: XenStore knows no others");
        }
        Ok(Self { peer, service: service.into(), pair: Pair::default() })
    }

    /// Returns the same address for the two domains that have these numbers.
    pub(crate) fn of_pair(self, pair: Pair) -> Self {
        Self { pair, ..self }
    }

    /// Returns the address as users write it.
    pub(crate) fn shown(&self) -> String {
        format!("xen:{self}")
    }
}

impl fmt::Display for ServiceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.peer, self.service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x1_service_is_a_domain_and_a_name() {
        assert_eq!(
            ServiceAddress::parse("0/web-1_A").unwrap(),
            ServiceAddress { peer: 0, service: "web-1_A".into(), pair: Pair::default() }
        );
        assert_eq!(ServiceAddress::parse("32751/a").unwrap().shown(), "xen:32751/a");
        let long = format!("1/{}", "n".repeat(65));
        for bad in
            ["", "/", "1", "1/", "/a", "+1/a", "-1/a", "32752/a", "99999/a", "1/a/b", "1/a.b", "1/a@2", "1/ä", &long]
        {
            assert!(matches!(ServiceAddress::parse(bad), Err(Error::BadService { .. })), "{bad:?}");
        }
    }
}
