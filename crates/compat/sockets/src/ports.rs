// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Services whose connections may be joined.
//!
//! A service's port is the one that a connection was made to: the peer's at the endpoint that connected, the own one at
//! the other.

use std::{ops::RangeInclusive, str::FromStr};

/// List of ports as a user writes it: `80,443,8000-8080`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct List(Vec<RangeInclusive<u16>>);

/// Error in a list of ports.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{part:?} is no port and no range of ports: write numbers from 1 to 65535, as in 80,443,8000-8080")]
pub struct NoPorts {
    /// Part that is wrong.
    pub part: String,
}

impl FromStr for List {
    type Err = NoPorts;

    fn from_str(text: &str) -> Result<Self, NoPorts> {
        let one = |part: &str| {
            let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port != 0);
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = port(first).zip(port(last)).filter(|(first, last)| first <= last);
            range.map(|(first, last)| first..=last).ok_or_else(|| NoPorts { part: part.trim().into() })
        };
        text.split(',').map(one).collect::<Result<_, _>>().map(Self)
    }
}

impl List {
    fn has(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }
}

/// Ports whose connections are joined: all if there is neither list.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ports {
    /// Only these.
    pub only: Option<List>,
    /// None of these.
    pub not: Option<List>,
}

impl Ports {
    /// Parses both lists, where they are given. If one is invalid, nothing is joined, as it is unknown which ports were
    /// meant to be left alone.
    #[must_use]
    pub fn parse(only: Option<&str>, not: Option<&str>) -> Self {
        let list = |text: Option<&str>| text.map(str::parse::<List>).transpose();
        match (list(only), list(not)) {
            (Ok(only), Ok(not)) => Self { only, not },
            _ => Self { only: Some(List::default()), not: None },
        }
    }

    /// Returns whether connections to a service at this port may be joined.
    #[must_use]
    pub fn admit(&self, port: u16) -> bool {
        self.only.as_ref().is_none_or(|list| list.has(port)) && !self.not.as_ref().is_some_and(|list| list.has(port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_a_list_are_admitted_and_others_not() {
        let ports = Ports::parse(Some("80, 443,8000-8080"), Some("8001-8002"));
        let admitted: Vec<u16> = [79, 80, 443, 7999, 8000, 8001, 8002, 8003, 8080, 8081]
            .into_iter()
            .filter(|port| ports.admit(*port))
            .collect();
        assert_eq!(admitted, [80, 443, 8000, 8003, 8080]);
        assert!(Ports::default().admit(1) && Ports::default().admit(65535));
        assert!(Ports::parse(None, Some("1-65535")).not.is_some_and(|list| list.has(1) && list.has(65535)));
    }

    #[test]
    fn list_that_makes_no_sense_names_the_part_and_admits_nothing() {
        for (text, part) in
            [("", ""), ("80,", ""), ("http", "http"), ("0", "0"), ("65536", "65536"), ("9-8", "9-8"), ("80,1-", "1-")]
        {
            assert_eq!(text.parse::<List>().unwrap_err().part, part, "{text:?}");
            assert!(!Ports::parse(Some(text), None).admit(80) && !Ports::parse(None, Some(text)).admit(80), "{text:?}");
        }
    }
}
