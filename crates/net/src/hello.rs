// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encodes and checks the hello, the first message of each endpoint: its features, and what the two may send each other
//! (N-2 to N-6).

use crate::{features::Features, mac::Mac};

/// Length of a hello in bytes.
pub const LEN: usize = 64;
const MAGIC: [u8; 8] = *b"TBNET\0\0\0";
/// Protocol version of this implementation.
pub const VERSION: u16 = 1;
/// Smallest MTU that an interface for IPv4 may have.
pub const MTU_LEAST: u32 = 68;
/// Largest MTU for which a frame's length leaves room.
pub const MTU_MOST: u32 = 65_535;
/// Bytes before a packet in a frame: addresses, type, and the tag of a VLAN.
pub const AROUND: u32 = 14 + 4;
/// Longest frame that this implementation takes: a segment of 64 KiB with the bytes before it.
pub const FRAME_MOST: u32 = MTU_MOST + AROUND;

/// Hello of one endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Features that it takes from its peer.
    pub features: Features,
    /// Its MTU: the longest packet in a frame that need not be divided.
    pub mtu: u32,
    /// Longest frame that it takes.
    pub frame_most: u32,
    /// Hardware address from which its frames come.
    pub mac: Mac,
}

/// Reason for which a hello, or both together, make no link.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// The message has the wrong length.
    #[error("the peer's first message has {len} bytes, a hello 64 (N-2): is it `tombolo net`?")]
    Length {
        /// Length of the message in bytes.
        len: u64,
    },
    /// The message does not begin with the magic of a hello.
    #[error("the peer's first message is no hello (N-2): is it `tombolo net`?")]
    Magic,
    /// The endpoints have no version in common.
    #[error(
        "the peer speaks versions {oldest} to {newest} of the interface, this end {VERSION} (N-3): upgrade the older one"
    )]
    Version {
        /// Oldest version of the peer.
        oldest: u16,
        /// Newest version of the peer.
        newest: u16,
    },
    /// A reserved byte is not 0.
    #[error("the byte at {at:#x} of the peer's hello must be 0 (N-2)")]
    Reserved {
        /// Offset of the byte.
        at: usize,
    },
    /// No interface has such an MTU.
    #[error("the peer's MTU is {mtu}, not within {MTU_LEAST} and {MTU_MOST} (N-5)")]
    Mtu {
        /// MTU in the hello.
        mtu: u32,
    },
    /// Packets of the peer's own MTU would not fit into its longest frame.
    #[error("the peer takes frames of {frame_most} bytes and says its MTU is {mtu} (N-5)")]
    Frame {
        /// Longest frame that the peer takes.
        frame_most: u32,
        /// MTU in the hello.
        mtu: u32,
    },
    /// The peer's address is zero or a multicast address.
    #[error("the peer's address {0} is none of an interface (N-6)")]
    Mac(Mac),
    /// The two interfaces have the same address, so nobody could tell them apart.
    #[error("both ends have the address {0} (N-6): give one of them another with --mac")]
    SameMac(Mac),
    /// The network's rule requires another address.
    #[error(
        "the peer's address is {said}, and in this network it is {expected} (N-14): the rule of the host's gives addresses here"
    )]
    OtherMac {
        /// Address in the peer's hello.
        said: Mac,
        /// Address that the rule requires.
        expected: Mac,
    },
    /// Longer packets of the network would be lost on the way to this peer.
    #[error(
        "the peer has an MTU of {mtu}, and this network one of {network} (N-14): set that of the peer's interface to {network}"
    )]
    SmallerMtu {
        /// MTU of the peer.
        mtu: u32,
        /// MTU of the network.
        network: u32,
    },
}

impl Hello {
    /// Returns the bytes of the message.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..0x08].copy_from_slice(&MAGIC);
        bytes[0x08..0x0a].copy_from_slice(&VERSION.to_le_bytes());
        bytes[0x0a..0x0c].copy_from_slice(&VERSION.to_le_bytes());
        bytes[0x10..0x18].copy_from_slice(&self.features.bits().to_le_bytes());
        bytes[0x18..0x1c].copy_from_slice(&self.mtu.to_le_bytes());
        bytes[0x1c..0x20].copy_from_slice(&self.frame_most.to_le_bytes());
        bytes[0x20..0x26].copy_from_slice(&self.mac.0);
        bytes
    }

    /// Decodes a peer's hello from a private copy of it.
    ///
    /// # Errors
    /// The fault of the hello.
    pub fn decode(bytes: &[u8]) -> Result<Self, HelloError> {
        let bytes: &[u8; LEN] = bytes.try_into().map_err(|_| HelloError::Length { len: bytes.len() as u64 })?;
        if bytes[..8] != MAGIC {
            return Err(HelloError::Magic);
        }
        let (oldest, newest) = (u16_at(bytes, 0x08), u16_at(bytes, 0x0a));
        if !(oldest..=newest).contains(&VERSION) {
            return Err(HelloError::Version { oldest, newest });
        }
        if let Some(at) = (0x0c..0x10).chain(0x26..LEN).find(|at| bytes[*at] != 0) {
            return Err(HelloError::Reserved { at });
        }
        let features = u64::from_le_bytes(bytes[0x10..0x18].try_into().expect("eight bytes"));
        let (mtu, frame_most) = (u32_at(bytes, 0x18), u32_at(bytes, 0x1c));
        if !(MTU_LEAST..=MTU_MOST).contains(&mtu) {
            return Err(HelloError::Mtu { mtu });
        }
        if frame_most < mtu + AROUND {
            return Err(HelloError::Frame { frame_most, mtu });
        }
        let mac = Mac(bytes[0x20..0x26].try_into().expect("six bytes"));
        if !mac.is_unicast() {
            return Err(HelloError::Mac(mac));
        }
        Ok(Self { features: Features::from_bits(features), mtu, frame_most, mac })
    }

    /// Returns the features that may be sent to the endpoint with this hello. Segments are sent only if it takes the
    /// longest of them; otherwise the sender's network stack divides them itself (N-4, N-5).
    #[must_use]
    pub fn gives(&self) -> Features {
        if self.frame_most >= FRAME_MOST { self.features } else { self.features.among(Features::CHECKSUM) }
    }

    /// Checks that this endpoint and its peer can make a link.
    ///
    /// # Errors
    /// Both have the same address.
    pub fn check_peer(&self, peer: &Self) -> Result<(), HelloError> {
        if self.mac == peer.mac { Err(HelloError::SameMac(peer.mac)) } else { Ok(()) }
    }
}

fn u16_at(bytes: &[u8; LEN], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8; LEN], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello { features: Features::all(), mtu: 1500, frame_most: FRAME_MOST, mac: Mac([2, 0, 0, 0, 0, 1]) }
    }

    /// Decodes a hello with other bytes at some place.
    fn changed(at: usize, with: &[u8]) -> Result<Hello, HelloError> {
        let mut bytes = hello().encode();
        bytes[at..at + with.len()].copy_from_slice(with);
        Hello::decode(&bytes)
    }

    #[test]
    fn n2_hello_of_another_length_or_kind_is_refused() {
        assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
        for len in [0, 1, 63] {
            assert_eq!(Hello::decode(&hello().encode()[..len]), Err(HelloError::Length { len: len as u64 }));
        }
        assert_eq!(Hello::decode(&[0; 65]), Err(HelloError::Length { len: 65 }));
        for at in 0..8 {
            assert_eq!(changed(at, b"x"), Err(HelloError::Magic));
        }
        for at in (0x0c..0x10).chain(0x26..LEN) {
            assert_eq!(changed(at, &[1]), Err(HelloError::Reserved { at }));
        }
    }

    #[test]
    fn n3_versions_that_hold_ours_are_taken_and_others_refused() {
        assert_eq!(changed(0x08, &[1, 0, 9, 0]), Ok(hello()));
        assert_eq!(changed(0x08, &[0, 0, 1, 0]), Ok(hello()));
        for (oldest, newest) in [(2, 3), (0, 0), (3, 2), (2, 0x100), (0x100, 0x100)] {
            let [a, b] = [oldest, newest].map(u16::to_le_bytes);
            assert_eq!(changed(0x08, &[a, b].concat()), Err(HelloError::Version { oldest, newest }));
        }
    }

    #[test]
    fn n5_mtu_and_frame_have_bounds() {
        for mtu in [0_u32, 67, 65_536, u32::MAX] {
            assert_eq!(changed(0x18, &mtu.to_le_bytes()), Err(HelloError::Mtu { mtu }));
        }
        for frame_most in [0_u32, 100, 1517] {
            assert_eq!(changed(0x1c, &frame_most.to_le_bytes()), Err(HelloError::Frame { frame_most, mtu: 1500 }));
        }
        assert_eq!(changed(0x1c, &1518_u32.to_le_bytes()).map(|hello| hello.frame_most), Ok(1518));
        assert_eq!(changed(0x1c, &[0xff; 4]).map(|hello| hello.frame_most), Ok(u32::MAX));
        assert_eq!(changed(0x18, &68_u32.to_le_bytes()).map(|hello| hello.mtu), Ok(68));
    }

    #[test]
    fn n4_n5_end_that_takes_no_frame_as_long_as_a_segment_is_sent_none() {
        let gives = |frame_most| Hello { frame_most, ..hello() }.gives();
        assert_eq!([FRAME_MOST, u32::MAX].map(gives), [Features::all(); 2]);
        assert_eq!([1518, 9018, FRAME_MOST - 1].map(gives), [Features::CHECKSUM; 3]);
        let plain = Hello { features: Features::none(), frame_most: 1518, ..hello() };
        assert_eq!(plain.gives(), Features::none());
    }

    #[test]
    fn n6_addresses_are_one_interfaces_and_differ() {
        for mac in [[0; 6], [0xff; 6], [1, 0, 0, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 1]] {
            assert_eq!(changed(0x20, &mac), Err(HelloError::Mac(Mac(mac))));
        }
        let other = Hello { mac: Mac([2, 0, 0, 0, 0, 2]), ..hello() };
        assert_eq!(hello().check_peer(&other), Ok(()));
        assert_eq!(hello().check_peer(&hello()), Err(HelloError::SameMac(hello().mac)));
    }

    proptest! {
        #[test]
        fn n2_any_bytes_are_refused_or_understood(bytes in prop::collection::vec(any::<u8>(), 0..130)) {
            if let Ok(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            }
        }

        #[test]
        fn n2_any_hello_arrives_as_it_was_sent(
            bits in 0..32_u64, mtu in MTU_LEAST..=MTU_MOST, more in 0..100_u32, last in any::<[u8; 5]>(),
        ) {
            let mac = Mac([2, last[0], last[1], last[2], last[3], last[4]]);
            let hello = Hello { features: Features::from_bits(bits), mtu, frame_most: mtu + AROUND + more, mac };
            prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
    }
}
