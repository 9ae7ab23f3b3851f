// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves the file from one domain to the other.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use serde::Serialize;

use super::{
    domain::{Domain, Kind, handle},
    load::Load,
};
use crate::{
    failure::{Failure, Os, Result},
    human,
    progress::Progress,
    signals::Signals,
};

/// Time between two checks of how far the file has come.
const LOOK: Duration = Duration::from_millis(20);

/// Outcome of a transfer.
#[derive(Debug, Serialize)]
pub struct Moved {
    test: &'static str,
    domains: &'static str,
    bytes: u64,
    seconds: f64,
    sha256_sent: String,
    sha256_received: String,
    identical: bool,
}

/// Moves `load` and waits until both domains are done.
pub fn run(load: &Load, kind: &Kind, signals: &Signals) -> Result<Moved> {
    let folder = tempfile::Builder::new().prefix("tombolo-demo-").tempdir().os("making a folder for the socket")?;
    let address = format!("local:{}/socket", folder.path().display());
    let common = ["--checksum", "--json", "--progress=never", "--wait=10", "--timeout=30", "--ring=4MiB"];
    let receive = [&["--listen", &address, "--receive-only"], &common[..]].concat();
    let send = [&["--connect", &address, "--send-only"], &common[..]].concat();

    let began = Instant::now();
    let mut receiver = Domain::start("receiver", kind, &receive, Stdio::null(), handle(&load.target)?)?;
    let mut sender = Domain::start("sender", kind, &send, handle(&load.source)?, Stdio::null())?;
    let mut progress = Progress::new(Some(load.size));
    // Either domain may fail and leave the other waiting.
    let failed = |ended: Option<std::process::ExitStatus>| ended.is_some_and(|status| !status.success());
    loop {
        signals.check_within(LOOK)?;
        progress.show("arrived", load.target.metadata().os("fstat")?.len());
        let (sent, received) = (sender.ended()?, receiver.ended()?);
        if failed(sent) || failed(received) || (sent.is_some() && received.is_some()) {
            break;
        }
    }
    drop(progress);
    let seconds = began.elapsed().as_secs_f64();
    // A domain that failed is asked first: it knows why, and the other may still wait.
    let (sent, received) = if failed(receiver.ended()?) {
        let received = receiver.report()?;
        (sender.report()?, received)
    } else {
        (sender.report()?, receiver.report()?)
    };
    let missing = || Failure::Outcome("tombolo cat reported no checksum".into());
    let (sha256_sent, sha256_received) = (sent.sha256.ok_or_else(missing)?, received.sha256.ok_or_else(missing)?);
    let arrived = load.target.metadata().os("fstat")?.len();
    let whole = [sent.bytes, received.bytes, arrived] == [load.size; 3];
    Ok(Moved {
        test: "transfer",
        domains: kind.name(),
        bytes: received.bytes,
        seconds: seconds.min(sent.seconds.max(received.seconds)),
        identical: whole && sha256_sent == sha256_received,
        sha256_sent,
        sha256_received,
    })
}

impl Moved {
    pub fn text(&self) -> String {
        let rate = human::rate(self.bytes as f64 / self.seconds);
        let time = human::seconds(Duration::from_secs_f64(self.seconds));
        let (sent, received) = (&self.sha256_sent, &self.sha256_received);
        let verdict = if self.identical { "identical" } else { "DIFFERENT" };
        format!(
            "{} bytes in {time}: {rate}, hashed on both sides and written to a file\n\
             SHA-256 sent      {sent}\nSHA-256 received  {received}\n{verdict}",
            self.bytes
        )
    }

    /// Returns an error if the transfer was not identical.
    pub fn verdict(&self) -> Result<()> {
        if self.identical { Ok(()) } else { Err(Failure::Outcome("what arrived is not what was sent".into())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canary_different_digests_are_a_failure() {
        let moved = |identical| Moved {
            test: "transfer",
            domains: "processes",
            bytes: 1,
            seconds: 1.0,
            sha256_sent: "a".into(),
            sha256_received: "b".into(),
            identical,
        };
        assert!(moved(true).verdict().is_ok() && moved(true).text().ends_with("\nidentical"));
        assert!(moved(false).verdict().is_err() && moved(false).text().ends_with("\nDIFFERENT"));
    }
}
