// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Starts the two domains: processes that see neither each other's network nor each other's users, where the kernel
//! allows it.

use std::{
    env,
    fmt::{self, Display, Formatter},
    fs::File,
    io::Read,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
};

use crate::{
    cmd::cat::Report,
    failure::{Failure, Os, Result},
};

/// Command that makes a process a domain of its own: it needs no privilege, and no program that Debian's smallest
/// system lacks.
const UNSHARE: [&str; 5] = ["unshare", "--user", "--map-root-user", "--net", "--"];

/// Kind of the domains on this machine.
#[derive(Debug)]
pub enum Kind {
    Namespaces,
    Plain { why: String },
}

impl Kind {
    /// Tries whether namespaces can be made.
    pub fn probe() -> Self {
        let tried = Command::new(UNSHARE[0]).args(&UNSHARE[1..]).arg("true").stdin(Stdio::null()).output();
        match tried {
            Ok(done) if done.status.success() => Self::Namespaces,
            Ok(done) => Self::Plain { why: String::from_utf8_lossy(&done.stderr).trim().into() },
            Err(error) => Self::Plain { why: format!("cannot start {}: {error}", UNSHARE[0]) },
        }
    }

    fn command(&self) -> Result<Command> {
        let program = env::current_exe().os("finding this program")?;
        Ok(match self {
            Self::Plain { .. } => Command::new(program),
            Self::Namespaces => {
                let mut command = Command::new(UNSHARE[0]);
                command.args(&UNSHARE[1..]).arg(program);
                command
            }
        })
    }

    /// Returns the name of the kind in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Plain { .. } => "processes",
        }
    }
}

impl Display for Kind {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespaces => f.write_str("two processes, each in a user and network namespace of its own"),
            Self::Plain { why } => write!(f, "two plain processes, because namespaces are not to be had ({why})"),
        }
    }
}

/// `tombolo cat` in a domain. It ends when this process does, and when it is dropped.
#[derive(Debug)]
pub struct Domain {
    name: &'static str,
    child: Child,
    said: Option<ChildStderr>,
}

impl Domain {
    pub fn start(name: &'static str, kind: &Kind, arguments: &[&str], input: Stdio, output: Stdio) -> Result<Self> {
        let mut command = kind.command()?;
        command.arg("cat").args(arguments).args(["--parent", &std::process::id().to_string()]);
        let spawned = command.stdin(input).stdout(output).stderr(Stdio::piped()).spawn();
        let mut child = spawned.os("starting tombolo cat")?;
        let said = child.stderr.take();
        Ok(Self { name, child, said })
    }

    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait().os("wait")?)
    }

    /// Returns the domain's report, once it has ended.
    pub fn report(&mut self) -> Result<Report> {
        let status = self.child.wait().os("wait")?;
        let mut said = Vec::new();
        if let Some(mut pipe) = self.said.take() {
            pipe.read_to_end(&mut said).os("read")?;
        }
        let said = String::from_utf8_lossy(&said);
        let words = said.trim().replace('\n', "; ");
        match said.lines().find_map(|line| serde_json::from_str(line).ok()) {
            Some(report) if status.success() => Ok(report),
            _ => Err(Failure::Outcome(format!("the {} ended with {status}: {words}", self.name))),
        }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Neither can fail for a child that was not waited for, and otherwise nothing is left to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a second handle on `file`, for a child.
pub fn handle(file: &File) -> Result<Stdio> {
    Ok(file.try_clone().map(Stdio::from).os("dup")?)
}
