// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reasons for which a connection stays on TCP (S-8).

/// Reason for which a connection is not, or no longer, carried by shared memory. The number appears in refusals and
/// logs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum Reason {
    /// A number that this version does not know.
    Unknown = 0,
    /// No endpoint with the mirrored addresses claimed the connection.
    NoPeer = 1,
    /// Another endpoint claims the same addresses (S-5).
    Ambiguous = 2,
    /// The endpoints are in two network namespaces, and the address means something else in each.
    LocalAddress = 3,
    /// The kernels' byte counts of the two endpoints do not fit each other (S-5).
    Counts = 4,
    /// The proofs of the two endpoints differ (S-6).
    Hash = 5,
    /// Too few bytes have passed to distinguish the endpoints of two connections.
    TooLittle = 6,
    /// Bytes bypassed the library: standard I/O, system calls of the program's own, `io_uring`.
    Bypassed = 7,
    /// Memory or descriptors are used up.
    Resources = 8,
    /// The program used the socket in a way that needs the kernel.
    Usage = 9,
    /// Two processes use this endpoint.
    Shared = 10,
    /// The peer's process, or the path to it, is gone.
    PeerGone = 11,
    /// The peer violated the protocol.
    Corrupt = 12,
    /// Both endpoints are in one network namespace, and the user has switched that off.
    Loopback = 13,
    /// The folder where endpoints meet is not safe to use (S-7).
    Folder = 14,
    /// The peer is another user's (S-7).
    User = 15,
    /// The folder's configuration requires sequence numbers, and the kernel does not provide them (S-6).
    Sequences = 16,
    /// The folder where endpoints meet cannot be used: it does not exist, or the file system refuses access (S-7).
    Unreachable = 17,
    /// This process was switched off (S-7).
    Off = 18,
    /// This program was told not to join connections of its port.
    Port = 19,
    /// It ended before enough had passed to search for its peer.
    Brief = 20,
    /// The memory between the two machines is taken away (B-21).
    TakenAway = 21,
}

impl Reason {
    /// Number of reasons.
    pub const COUNT: usize = 22;

    const ALL: [Self; Self::COUNT] = [
        Self::Unknown,
        Self::NoPeer,
        Self::Ambiguous,
        Self::LocalAddress,
        Self::Counts,
        Self::Hash,
        Self::TooLittle,
        Self::Bypassed,
        Self::Resources,
        Self::Usage,
        Self::Shared,
        Self::PeerGone,
        Self::Corrupt,
        Self::Loopback,
        Self::Folder,
        Self::User,
        Self::Sequences,
        Self::Unreachable,
        Self::Off,
        Self::Port,
        Self::Brief,
        Self::TakenAway,
    ];

    /// Returns the reason with this number; [`Reason::Unknown`] for a number of a later version.
    #[must_use]
    pub fn from_number(number: u16) -> Self {
        Self::ALL.into_iter().find(|reason| *reason as u16 == number).unwrap_or(Self::Unknown)
    }

    /// Returns whether the reason may be gone after a while, for an endpoint that was joined before (S-22). Reasons
    /// that concern the program, the proof or the peer's protocol violations stay.
    pub(crate) fn may_pass(self) -> bool {
        matches!(
            self,
            Self::NoPeer
                | Self::Ambiguous
                | Self::Resources
                | Self::PeerGone
                | Self::Unreachable
                | Self::Off
                | Self::TakenAway
        )
    }

    /// Returns the reason in a few words, for the log.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Unknown => "for a reason this version does not know",
            Self::NoPeer => "the other end did not claim it: no program under tombolo, or another folder",
            Self::Ambiguous => "another end claims the same addresses",
            Self::LocalAddress => "the address means something else in the other network namespace",
            Self::Counts => "the two ends' byte counts do not fit",
            Self::Hash => "the two ends saw different bytes or sequence numbers",
            Self::TooLittle => "too few bytes passed to tell it from another",
            Self::Bypassed => "bytes went past the library",
            Self::Resources => "no memory or descriptors left",
            Self::Usage => "the socket is used in a way that needs the kernel",
            Self::Shared => "two processes use it",
            Self::PeerGone => "the peer is gone",
            Self::Corrupt => "the peer broke the specification",
            Self::Loopback => "both ends are in one network namespace, and that is switched off",
            Self::Folder => "the folder where ends meet can be written to by others, or is not this user's",
            Self::User => "the other end is a program of another user",
            Self::Sequences => {
                "its sequence numbers are asked for: `tombolo hook attach`, as root, makes the kernel tell them"
            }
            Self::Unreachable => "the folder where ends meet cannot be used; the log says why",
            Self::Off => "`tombolo run --off` holds for this process",
            Self::Port => "its port is left alone (--only, --not)",
            Self::Brief => "it ended before enough had passed to look for the other end",
            Self::TakenAway => "the link between the two machines is taken away",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s8_reasons_keep_their_numbers_and_unknown_ones_are_unknown() {
        for (number, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, number);
            assert_eq!(Reason::from_number(number as u16), reason);
        }
        assert_eq!(Reason::from_number(999), Reason::Unknown);
    }
}
