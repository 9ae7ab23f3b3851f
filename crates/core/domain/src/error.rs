// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can go wrong between two domains, and what to do about it.

use std::io;

/// Why a backend could not do its part, with the numbers that belong to it. Would-block is never an error.
///
/// # Example
/// ```
/// # extern crate tombolo_domain as tombolo;
/// # use tombolo::Error as BackendError;
/// let error = BackendError::NotFound("local:web".into());
/// let text = "nobody listens at local:web: start the listening side first, or check the name";
/// assert_eq!(error.to_string(), text);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The service part of an address makes no sense to this backend.
    #[error("{service:?} is no service name: {why}")]
    BadService {
        /// What was given.
        service: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Nobody listens there.
    #[error("nobody listens at {0}: start the listening side first, or check the name")]
    NotFound(String),
    /// Somebody else listens there already.
    #[error("{0} is in use by another listener")]
    InUse(String),
    /// The system's rules forbid it.
    #[error("not allowed to reach {0}")]
    Denied(String),
    /// The deadline passed first.
    #[error("timed out")]
    TimedOut,
    /// The peer is no longer there.
    #[error("the peer is gone")]
    PeerGone,
    /// The peer sent something that breaks the specification; the link is of no more use.
    #[error("the peer broke {clause} of the specification: {what}")]
    Malformed {
        /// The clause of `spec/`.
        clause: &'static str,
        /// What was found.
        what: String,
    },
    /// A limit was hit.
    #[error("{what} is used up: {remedy}")]
    Limit {
        /// Which limit.
        what: &'static str,
        /// How to raise it.
        remedy: &'static str,
    },
    /// Nobody is let in for now, because of what earlier callers left: why.
    #[error("nobody is let in for now: {0}; later calls may do")]
    Crowded(&'static str),
    /// Whoever gives memory and channels to programs gives no more: which limit was hit, and what to do.
    #[error("{0}")]
    Quota(String),
    /// The memory was taken back by its owner or by the hypervisor.
    #[error("the shared memory was revoked")]
    Revoked,
    /// The link is about to be taken away: nothing new is taken, and what was taken before is still delivered.
    #[error("the link is being taken away: what was written before is delivered, connect anew for the rest")]
    Leaving,
    /// The operating system refused a call for a reason that has no situation of its own.
    #[error("{call} failed{}", .path.as_ref().map(|path| format!(" on {path}")).unwrap_or_default())]
    Os {
        /// The call.
        call: &'static str,
        /// The file it was about, if any.
        path: Option<String>,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// Makes an error of what the system said to `call`; situations that have a name get it.
    #[doc(hidden)]
    pub fn os(call: &'static str, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        match source.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
            Some(rustix::io::Errno::MFILE) => Self::Limit {
                what: "this process's number of open files",
                remedy: "raise it with `ulimit -n` or LimitNOFILE=",
            },
            Some(rustix::io::Errno::NFILE) => {
                Self::Limit { what: "the system's number of open files", remedy: "raise it with `sysctl fs.file-max`" }
            }
            Some(rustix::io::Errno::NOMEM | rustix::io::Errno::NOSPC) => Self::Limit {
                what: "memory for shared segments",
                remedy: "use smaller rings, or raise the memory limit of this process or its cgroup",
            },
            _ => Self::Os { call, path: None, source },
        }
    }
}
