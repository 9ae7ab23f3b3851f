// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of the backends, with remedies.

use std::io;

/// The reason why a backend failed, with the relevant numbers. Would-block is never an error.
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
    /// The service part of an address is not valid for this backend.
    #[error("{service:?} is no service name: {why}")]
    BadService {
        /// The service that was given.
        service: String,
        /// The reason why it is not valid.
        why: &'static str,
    },
    /// Nobody listens there.
    #[error("nobody listens at {0}: start the listening side first, or check the name")]
    NotFound(String),
    /// Another listener uses the address already.
    #[error("{0} is in use by another listener")]
    InUse(String),
    /// The rules of the system forbid it.
    #[error("not allowed to reach {0}")]
    Denied(String),
    /// The deadline passed before the call could complete.
    #[error("timed out")]
    TimedOut,
    /// The peer is no longer there.
    #[error("the peer is gone")]
    PeerGone,
    /// The peer violated the specification; the link cannot be used any more.
    #[error("the peer broke {clause} of the specification: {what}")]
    Malformed {
        /// The violated clause of `spec/`.
        clause: &'static str,
        /// Description of the violation.
        what: String,
    },
    /// A limit was reached.
    #[error("{what} is used up: {remedy}")]
    Limit {
        /// The limit.
        what: &'static str,
        /// The way to raise it.
        remedy: &'static str,
    },
    /// Nobody is let in for now, because of what earlier callers left. Gives the reason.
    #[error("nobody is let in for now: {0}; later calls may do")]
    Crowded(&'static str),
    /// The authority that gives memory and channels to programs gives no more. Names the limit and the remedy.
    #[error("{0}")]
    Quota(String),
    /// The memory was taken back by its owner or by the hypervisor.
    #[error("the shared memory was revoked")]
    Revoked,
    /// The link is about to be taken away: it takes nothing new, and still delivers what it took before.
    #[error("the link is being taken away: what was written before is delivered, connect anew for the rest")]
    Leaving,
    /// The operating system refused a call for a reason that has no variant of its own.
    #[error("{call} failed{}", .path.as_ref().map(|path| format!(" on {path}")).unwrap_or_default())]
    Os {
        /// The call.
        call: &'static str,
        /// The file that the call was about, if any.
        path: Option<String>,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    /// Makes an error from the system's error of `call`. Reasons that have their own variant get it.
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
