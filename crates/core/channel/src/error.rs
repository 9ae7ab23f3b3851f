// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of channels, and their mapping to `std::io::ErrorKind` and to error numbers.

use std::io;

use rustix::io::Errno;
use tombolo_domain::Error as DomainError;
use tombolo_layout::{
    handshake::{MessageError, Refusal},
    header::HeaderError,
};
use tombolo_mem::PeerSegment;
use tombolo_ring::{Corrupt, Error as RingError};

use crate::AddressError;

/// The reason why a call on a channel failed, with the relevant numbers. Would-block is never an error.
///
/// It converts into [`std::io::Error`] with the kind that [`kind`](Self::kind) returns.
///
/// # Example
/// ```
/// use tombolo::{BackendError, Error};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let address = &format!("local:{}/nobody", folder.path().display());
/// match tombolo::connect(address) {
///     Err(Error::Domain(BackendError::NotFound(who))) => println!("nobody listens at {who}"),
/// #   Err(error) if { panic!("{error}") } => {}
///     Err(error) => println!("{error}"), // says what to do
///     Ok(_) => println!("connected"),
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not an address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// No backend of this program has the scheme.
    #[error("no backend for {scheme:?} addresses here; there are: {known}")]
    UnknownScheme {
        /// The requested scheme.
        scheme: String,
        /// The schemes that are available.
        known: String,
    },
    /// The address belongs to a backend that this program was built without.
    #[error(
        "{scheme:?} addresses need a backend that this program was built without: build it with the feature \"{scheme}\" of the crate tombolo; there are: {known}"
    )]
    NotBuilt {
        /// The requested scheme, which is also the name of the feature.
        scheme: String,
        /// The schemes that are available.
        known: String,
    },
    /// The backend failed.
    #[error(transparent)]
    Domain(DomainError),
    /// The deadline passed before the call could complete.
    #[error("timed out")]
    TimedOut,
    /// The peer has closed its reading side, or this endpoint has closed its writing side (`EPIPE`).
    #[error("the peer does not read any more")]
    Closed,
    /// The peer's process or domain is gone (`EPIPE`).
    #[error("the peer is gone")]
    PeerGone,
    /// The peer violated the specification; the channel cannot be used any more.
    #[error(transparent)]
    Corrupt(Corrupt),
    /// The peer's control message or memory violated the specification.
    #[error("the peer broke {clause} of the specification: {what}")]
    Malformed {
        /// The violated clause of `spec/`.
        clause: &'static str,
        /// Description of the violation.
        what: String,
    },
    /// The peer refused this channel.
    #[error("the peer refused the channel: {reason}")]
    Refused {
        /// The peer's code for the reason.
        code: Refusal,
        /// The reason in the peer's words.
        reason: String,
    },
    /// The two endpoints have no layout version in common.
    #[error(
        "no common version: this end speaks {ours}, the peer {theirs_min} to {theirs_max}, and begins with its newest; upgrade the older one"
    )]
    VersionMismatch {
        /// The version that this endpoint speaks.
        ours: u16,
        /// The oldest version that the peer speaks.
        theirs_min: u16,
        /// The newest version that the peer speaks.
        theirs_max: u16,
    },
    /// A record that cannot fit into the ring, now or later.
    #[error("a message of {len} bytes does not fit: this channel takes at most {max}; ask for a larger ring")]
    TooLarge {
        /// Length of the message in bytes.
        len: u64,
        /// Length of the largest message that this channel takes, in bytes.
        max: u64,
    },
    /// The caller's buffer is smaller than the next message, which stays in the ring.
    #[error("the next message has {len} bytes, the buffer only {buffer}")]
    BufferTooSmall {
        /// Length of the message in bytes.
        len: u64,
        /// Length of the buffer in bytes.
        buffer: u64,
    },
    /// The peer does not support hand-overs, or one is under way.
    #[error("the ring cannot be changed now: {0}")]
    Handover(&'static str),
}

impl Error {
    /// Returns whether the peer violated the specification. If so, both directions of the channel end (R-19).
    #[must_use]
    pub const fn is_protocol_violation(&self) -> bool {
        matches!(self, Self::Corrupt(_) | Self::Malformed { .. })
    }

    /// Returns a copy of this error if it is a [protocol violation of the peer](Self::is_protocol_violation).
    pub(crate) fn repeat_violation(&self) -> Option<Self> {
        match self {
            Self::Corrupt(corrupt) => Some(Self::Corrupt(*corrupt)),
            Self::Malformed { clause, what } => Some(Self::Malformed { clause, what: what.clone() }),
            _ => None,
        }
    }

    /// Returns a copy of this error if it means that the peer did not agree to the channel.
    pub(crate) fn repeat_refusal(&self) -> Option<Self> {
        match self {
            Self::Refused { code, reason } => Some(Self::Refused { code: *code, reason: reason.clone() }),
            Self::VersionMismatch { ours, theirs_min, theirs_max } => {
                Some(Self::VersionMismatch { ours: *ours, theirs_min: *theirs_min, theirs_max: *theirs_max })
            }
            _ => None,
        }
    }

    /// Returns the kind of this error in `std::io`.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Self::Address(_) | Self::UnknownScheme { .. } | Self::NotBuilt { .. } => Kind::InvalidInput,
            Self::TooLarge { .. } | Self::BufferTooSmall { .. } => Kind::InvalidInput,
            Self::TimedOut => Kind::TimedOut,
            Self::Closed | Self::PeerGone => Kind::BrokenPipe,
            Self::Corrupt(_) | Self::Malformed { .. } | Self::VersionMismatch { .. } => Kind::InvalidData,
            Self::Refused { .. } => Kind::ConnectionRefused,
            Self::Handover(_) => Kind::Unsupported,
            Self::Domain(error) => match error {
                DomainError::BadService { .. } => Kind::InvalidInput,
                DomainError::NotFound(_) => Kind::NotFound,
                DomainError::InUse(_) => Kind::AddrInUse,
                DomainError::Denied(_) => Kind::PermissionDenied,
                DomainError::Limit { .. } | DomainError::Quota(_) | DomainError::Crowded(_) => Kind::OutOfMemory,
                DomainError::Leaving => Kind::BrokenPipe,
                DomainError::Os { source, .. } => source.kind(),
                _ => Kind::Other,
            },
        }
    }
}

impl Error {
    /// Returns the system's error number for this error, such as `EPIPE`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::Address(_) => Errno::INVAL,
            Self::UnknownScheme { .. } | Self::NotBuilt { .. } => Errno::AFNOSUPPORT,
            Self::TooLarge { .. } | Self::BufferTooSmall { .. } => Errno::MSGSIZE,
            Self::TimedOut => Errno::TIMEDOUT,
            Self::Closed | Self::PeerGone => Errno::PIPE,
            Self::Corrupt(_) | Self::Malformed { .. } => Errno::PROTO,
            Self::VersionMismatch { .. } => Errno::PROTONOSUPPORT,
            Self::Refused { .. } => Errno::CONNREFUSED,
            Self::Handover(_) => Errno::OPNOTSUPP,
            Self::Domain(error) => match error {
                DomainError::BadService { .. } => Errno::INVAL,
                DomainError::NotFound(_) => Errno::NOENT,
                DomainError::InUse(_) => Errno::ADDRINUSE,
                DomainError::Denied(_) => Errno::ACCESS,
                DomainError::Limit { .. } | DomainError::Quota(_) | DomainError::Crowded(_) => Errno::NOMEM,
                DomainError::Leaving => Errno::PIPE,
                DomainError::Os { source, .. } if source.kind() == io::ErrorKind::TimedOut => Errno::TIMEDOUT,
                DomainError::Os { source, .. } => return source.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
                _ => Errno::IO,
            },
        };
        errno.raw_os_error()
    }
}

impl From<DomainError> for Error {
    fn from(error: DomainError) -> Self {
        match error {
            DomainError::TimedOut => Self::TimedOut,
            DomainError::PeerGone => Self::PeerGone,
            DomainError::Malformed { clause, what } => Self::Malformed { clause, what },
            other => Self::Domain(other),
        }
    }
}

impl From<RingError> for Error {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Corrupt(corrupt) => Self::Corrupt(corrupt),
            RingError::TooLarge { len, max } => Self::TooLarge { len, max },
            RingError::BufferTooSmall { len, buffer } => Self::BufferTooSmall { len, buffer },
            RingError::Revoked => Self::Domain(DomainError::Revoked),
            _ => Self::Closed,
        }
    }
}

impl Error {
    /// Returns the error for `corrupt`, found in `segment`: a revocation, if the segment was taken away meanwhile
    /// (D-3).
    pub(crate) fn in_segment(corrupt: Corrupt, segment: &PeerSegment) -> Self {
        if segment.is_lost() { Self::Domain(DomainError::Revoked) } else { Self::Corrupt(corrupt) }
    }
}

impl From<MessageError> for Error {
    fn from(MessageError { clause, what }: MessageError) -> Self {
        Self::Malformed { clause, what: what.into() }
    }
}

impl From<HeaderError> for Error {
    fn from(HeaderError { clause, what, found }: HeaderError) -> Self {
        Self::Malformed { clause, what: format!("{what} ({found:#x})") }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::new(error.kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::MemfdFlags;

    use super::*;

    #[test]
    fn d3_what_is_wrong_with_a_segment_that_was_taken_away_is_no_lie() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        let segment = PeerSegment::map_revocable(memory.as_fd(), 0, 4096, ()).unwrap();
        let corrupt = Corrupt { clause: "M-1", what: "magic", found: 0, bound: 0 };
        assert!(matches!(Error::in_segment(corrupt, &segment), Error::Corrupt(_)), "it is there");
        rustix::fs::ftruncate(&memory, 0).unwrap();
        assert_eq!(segment.header::<8>(), [0; 8]);
        assert!(matches!(Error::in_segment(corrupt, &segment), Error::Domain(DomainError::Revoked)));
    }
}
