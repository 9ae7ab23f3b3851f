// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Failures of the command: one line of text each, and an exit code.

use std::{
    error::Error,
    io::{self, Write},
    process::ExitCode,
};

use tombolo::Ending;
pub use tombolo_os::failed_call::{FailedCall, Os};

pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Reason why a verb was not carried out to its end.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Usage(String),
    #[error("cannot open {file}")]
    Open { file: String, source: io::Error },
    #[error("cannot listen at {address}")]
    Listen { address: String, source: tombolo::Error },
    #[error("cannot listen at {place}")]
    Bind { place: String, source: io::Error },
    #[error("cannot connect to {address}")]
    Connect { address: String, source: tombolo::Error },
    #[error("nobody connected to {address} within {seconds} s")]
    Nobody { address: String, seconds: f64 },
    #[error("sending stopped after {bytes} bytes")]
    Sending { bytes: u64, source: tombolo::Error },
    #[error("receiving stopped after {bytes} bytes")]
    Receiving { bytes: u64, source: tombolo::Error },
    #[error("incomplete: {} after {bytes} bytes were received", how(.ending))]
    Truncated { bytes: u64, ending: Ending },
    #[error("nothing moved for {seconds} s, after {sent} bytes sent and {received} received")]
    Silent { seconds: f64, sent: u64, received: u64 },
    #[error("cannot read {file}")]
    Read { file: String, source: io::Error },
    #[error("cannot write {file}")]
    Write { file: String, source: io::Error },
    #[error("interrupted{after}")]
    Interrupted { signal: i32, after: String },
    #[error("{0}")]
    Outcome(String),
    #[error("{why}")]
    Machine { exit: u8, why: String },
    #[error(transparent)]
    Os(#[from] FailedCall),
    #[error(transparent)]
    Inspect(#[from] tombolo_inspect::Error),
    #[error(transparent)]
    Bench(#[from] tombolo_bench::Error),
    #[error(transparent)]
    Net(#[from] tombolo_net::Error),
}

fn how(ending: &Ending) -> &'static str {
    match ending {
        Ending::Closed => "the peer closed",
        Ending::Aborted => "the peer gave up",
        Ending::DomainGone => "the peer's domain died",
        _ => "the peer's process died",
    }
}

impl Failure {
    /// Returns the failure and its causes, in one line.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        text
    }

    /// Returns whether the failure is a protocol violation of the peer.
    pub fn is_protocol_violation(&self) -> bool {
        matches!(self, Self::Sending { source, .. } | Self::Receiving { source, .. } if source.is_protocol_violation())
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Usage(_) | Self::Open { .. } | Self::Listen { .. } | Self::Bind { .. } => 2,
            Self::Connect { source, .. } => match source.kind() {
                io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied => 2,
                _ => 1,
            },
            Self::Machine { exit, .. } => *exit,
            Self::Inspect(tombolo_inspect::Error::NoBroker { .. } | tombolo_inspect::Error::Folder { .. }) => 2,
            Self::Bench(tombolo_bench::Error::Usage(_)) => 2,
            Self::Net(tombolo_net::Error::Removed(_) | tombolo_net::Error::Os(_)) => 1,
            Self::Net(_) => 2,
            _ => 1,
        })
    }
}

/// Prints a line for people. Errors are ignored: a user who closed standard error does not want the line.
pub fn print_line(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_names_each_cause_once() {
        let source = io::Error::from_raw_os_error(28);
        let failure = Failure::Write { file: "/tmp/a".into(), source };
        assert_eq!(failure.chain(), "cannot write /tmp/a: No space left on device (os error 28)");
    }

    #[test]
    fn connect_of_an_unknown_scheme_is_bad_usage_and_nobody_there_is_not() {
        let connect = |address: &str| {
            let source = tombolo::connect(address).unwrap_err();
            let failure = Failure::Connect { address: address.into(), source };
            (format!("{:?}", failure.exit_code()), failure.chain())
        };
        let (code, text) = connect("pigeon:x");
        assert_eq!(code, format!("{:?}", ExitCode::from(2)), "{text}");
        assert!(text.contains("there are: local"), "{text}");
        let (code, text) = connect("local:/nowhere/at/all");
        assert_eq!(code, format!("{:?}", ExitCode::from(1)), "{text}");
    }
}
