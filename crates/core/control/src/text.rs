// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defines texts that are bounded and whose form is checked when they are made (B-2).

use std::{fmt, net::IpAddr, str::FromStr};

use crate::field::{Fault, Field};

/// Reads a length (`u16`) and as many bytes.
fn take_text<'a>(body: &mut &'a [u8], max: usize) -> Result<&'a str, Fault> {
    let len = usize::from(u16::decode_from(body)?);
    if len > max {
        return Err(Fault::new("B-2", "text is too long"));
    }
    let (text, rest) = body.split_at_checked(len).ok_or(Fault::new("B-2", "body is shorter than its fields"))?;
    *body = rest;
    std::str::from_utf8(text).map_err(|_| Fault::new("B-2", "text is not UTF-8"))
}

fn put_text(text: &str, body: &mut Vec<u8>) {
    (text.len() as u16).encode_into(body);
    body.extend_from_slice(text.as_bytes());
}

/// Defines a text whose form is checked.
macro_rules! checked {
    ($(#[$doc:meta])* $name:ident, $max:expr, $what:expr, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(String);

        impl $name {
            /// Returns the text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Fault;
            fn from_str(text: &str) -> Result<Self, Fault> {
                let check: fn(&str) -> bool = $check;
                if text.len() > $max || !check(text) {
                    return Err(Fault::new("B-2", $what));
                }
                Ok(Self(text.into()))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl Field for $name {
            fn encode_into(&self, body: &mut Vec<u8>) {
                put_text(&self.0, body);
            }
            fn decode_from(body: &mut &[u8]) -> Result<Self, Fault> {
                take_text(body, $max)?.parse()
            }
        }
    };
}

/// Defines a text for people. It is cut to its limit between characters, and freed of control characters, because a
/// stranger may have written it.
macro_rules! free {
    ($(#[$doc:meta])* $name:ident, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Debug, Default)]
        pub struct $name(String);

        impl $name {
            /// Returns the text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                let text = text.replace(char::is_control, "?");
                Self(text[..text.floor_char_boundary($max)].into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self::from(text.as_str())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl Field for $name {
            fn encode_into(&self, body: &mut Vec<u8>) {
                put_text(&self.0, body);
            }
            fn decode_from(body: &mut &[u8]) -> Result<Self, Fault> {
                take_text(body, $max).map(Self::from)
            }
        }
    };
}

checked! {
    /// Name of a domain or a service: 1 to 64 letters, digits, `.`, `_` and `-`, of which the first is neither `.` nor
    /// `-`.
    Name, 64, "a name is 1 to 64 letters, digits, `.`, `_` and `-`, and does not begin with `.` or `-`", is_name
}
checked! {
    /// A pattern of names: a name, the beginning of names followed by `*`, or `*` alone.
    Pattern, 64, "a pattern is a name, the beginning of one with a `*` behind it, or `*`",
    |text| text.strip_suffix('*').map_or_else(|| is_name(text), |start| start.is_empty() || is_name(start))
}
checked! {
    /// Position of a device on a domain's PCI bus: `DEVICE.FUNCTION`, preceded by its port's and a `/` if it is below a
    /// port; or empty.
    Place, 32, "a place is `DEVICE.FUNCTION` in hexadecimal, once or twice, or empty", is_place
}
free! {
    /// Reason for a refusal, or a note: at most 160 bytes.
    Reason, 160
}
free! {
    /// A line of a longer answer: at most 900 bytes.
    Line, 900
}

impl Pattern {
    /// Returns whether the pattern matches `name`.
    #[must_use]
    pub fn matches(&self, name: &Name) -> bool {
        match self.0.strip_suffix('*') {
            Some(start) => name.0.starts_with(start),
            None => name.0 == self.0,
        }
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with(['.', '-'])
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

fn is_place(text: &str) -> bool {
    let hex = |text: &str, max| u8::from_str_radix(text, 16).is_ok_and(|n| n <= max) && !text.starts_with('+');
    let step = |step: &str| step.split_once('.').is_some_and(|(device, function)| hex(device, 31) && hex(function, 7));
    text.is_empty() || (text.split('/').count() <= 2 && text.split('/').all(step))
}

/// Parses an IP address, alone or followed by the bits of its network: `10.9.0.1`, `10.9.0.1/24`, `fd00::1/64`. Returns
/// none if the text has another form, or if the address has no such number of bits.
#[must_use]
pub fn parse_ip(text: &str) -> Option<(IpAddr, Option<u8>)> {
    let (ip, bits) = text.split_once('/').map_or((text, None), |(ip, bits)| (ip, Some(bits)));
    let ip: IpAddr = ip.parse().ok()?;
    let bits = bits.map(str::parse).transpose().ok()?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    bits.is_none_or(|bits| (1..=most).contains(&bits)).then_some((ip, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b2_names_patterns_and_places_have_the_form_stated() {
        for good in ["a", "web-1.b_c", &"n".repeat(64)] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
            assert!(good.parse::<Pattern>().is_ok(), "{good}");
        }
        for bad in ["", ".a", "-a", "a/b", "a b", "ä", "a*", &"n".repeat(65)] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
        for bad in ["", "*a", "a**", "a*b"] {
            assert!(bad.parse::<Pattern>().is_err(), "{bad}");
        }
        for good in ["", "04.0", "1f.7", "1c.3/00.0"] {
            assert!(good.parse::<Place>().is_ok(), "{good}");
        }
        for bad in ["4", "20.0", "04.8", "1/2/3", "04.0/", "00.0/00.0/00.0", "+4.0", "4.+1"] {
            assert!(bad.parse::<Place>().is_err(), "{bad}");
        }
    }

    #[test]
    fn b2_words_of_strangers_have_nothing_that_a_terminal_acts_on() {
        let (hostile, mut body) = ("no\x1b[2J\x1b]0;root\x07\r\n\u{9b}31mü", Vec::new());
        put_text(hostile, &mut body);
        let said = "no?[2J?]0;root????31mü";
        assert_eq!(Reason::decode_from(&mut &body[..]).unwrap().as_str(), said);
        assert_eq!((Line::decode_from(&mut &body[..]).unwrap().as_str(), Reason::from(hostile).as_str()), (said, said));
    }

    #[test]
    fn b2_pattern_matches_what_begins_like_it() {
        let matches = |pattern: &str, name: &str| pattern.parse::<Pattern>().unwrap().matches(&name.parse().unwrap());
        assert!(matches("*", "a") && matches("db-*", "db-1") && matches("db", "db"));
        assert!(!matches("db-*", "db") && !matches("db", "db-1") && !matches("db", "d"));
    }

    #[test]
    fn b2_long_reason_is_cut_between_characters() {
        assert_eq!(Reason::from("é".repeat(100)).as_str().len(), 160);
        assert_eq!(Reason::from(format!("a{}", "é".repeat(100))).as_str().len(), 159);
    }
}
