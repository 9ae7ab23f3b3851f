// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the host's broker as a process: `tombolod` with a configuration and a folder of its own, and `tombolo link` to
//! query it. Both processes end and the folder is removed when the [`Broker`] is dropped.

use crate::console::Console;
use crate::error::{Context, Error, Result};
use crate::guest::until;
use crate::line_reader::within;
use crate::process::{Process, tied};
use crate::programs::Programs;
use crate::scratch::Scratch;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Seconds in which the broker must become ready, or end.
const PATIENCE: u64 = 60;

/// A broker on the host.
pub struct Broker {
    programs: Programs,
    folder: Scratch,
    daemon: Option<Daemon>,
    holder: Process,
}

struct Daemon {
    process: Process,
    log: Console,
}

impl Broker {
    /// Starts a broker with the configuration `text`.
    ///
    /// # Errors
    /// The broker does not become ready. The error has the reason.
    pub fn start(programs: &Programs, text: &str) -> Result<Self> {
        let folder = Scratch::new("broker")?;
        fs::write(folder.path().join("tombolod.toml"), text)?;
        // QEMUs of other users connect to their sockets in this folder.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711))?;
        let mut hold = tied(&[], programs.path("tombolod")?);
        let holder = Process::start(hold.arg("--state").arg(folder.path()).arg("hold"))?;
        let mut broker = Self { programs: programs.clone(), folder, holder, daemon: None };
        until(within(PATIENCE), || broker.folder.path().join("holder.socket").exists()).context("the holder")?;
        broker.restart()?;
        Ok(broker)
    }

    /// Returns the folder with the broker's sockets.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the socket that programs of the host use.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder().join("broker.sock")
    }

    /// Replaces the configuration and makes the broker read it.
    ///
    /// # Errors
    /// The broker is not running, or does not read it in time.
    pub fn configure(&mut self, text: &str) -> Result<()> {
        fs::write(self.folder().join("tombolod.toml"), text)?;
        let daemon = self.daemon.as_mut().ok_or_else(|| Error::new("the broker does not run"))?;
        let mut times_read =
            || daemon.log.text().iter().filter(|line| line.contains("the configuration was read again")).count();
        let before = times_read();
        kill_process(Pid::from_child(&daemon.process), Signal::HUP)?;
        until(within(PATIENCE), || times_read() > before).context("the broker's new configuration")
    }

    /// Starts the daemon, which must not be running, and waits until it is ready.
    ///
    /// # Errors
    /// The daemon is not ready in time. The error has its output.
    pub fn restart(&mut self) -> Result<()> {
        let mut command = tied(&[], self.programs.path("tombolod")?);
        command.arg("--config").arg(self.folder().join("tombolod.toml"));
        command.arg("--state").arg(self.folder()).arg("--no-store");
        let mut process = Process::start(command.stderr(Stdio::piped()))?;
        let log = process.stderr.take().map(Console::of).ok_or_else(|| Error::new("no standard error"))?;
        let daemon = self.daemon.insert(Daemon { process, log });
        let ready = until(within(PATIENCE), || daemon.log.text().iter().any(|line| line.contains("ready in")));
        ready.map_err(|why| Error::new(format!("tombolod is not ready: {why}: {}", self.log())))
    }

    /// Kills the daemon. The descriptor store keeps what must outlive it.
    ///
    /// # Errors
    /// The daemon does not die.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.take().map_or(Ok(()), |mut daemon| daemon.process.end())
    }

    /// Returns the last output of the daemon.
    pub fn log(&mut self) -> String {
        self.daemon.as_mut().map(|daemon| daemon.log.tail(20)).unwrap_or_default()
    }

    /// Returns the process numbers of the daemon, if it runs, and of the descriptor store.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.daemon.iter().map(|daemon| daemon.process.id()).chain([self.holder.id()]).collect()
    }

    /// Runs `tombolo ARGS` on the host with this broker. Returns its standard output and standard error.
    ///
    /// # Errors
    /// The command fails. The error has its standard error.
    pub fn tombolo(&self, args: &[&str]) -> Result<String> {
        let output = self.command(&[], args)?.stdin(Stdio::null()).output().context("tombolo")?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()),
            false => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(Error::new(format!("tombolo {}: {}: {}", args.join(" "), output.status, said.trim())))
            }
        }
    }

    /// Returns the command `tombolo ARGS` on the host, which ends with this process. The words `within` precede it.
    ///
    /// # Errors
    /// The program was not built.
    pub fn command(&self, within: &[String], args: &[&str]) -> Result<Command> {
        let mut command = tied(within, self.programs.path("tombolo")?);
        command.args(args).env("TOMBOLO_BROKER", self.socket());
        Ok(command)
    }

    /// Runs `tombolo link ARGS`.
    ///
    /// # Errors
    /// As [`tombolo`](Self::tombolo).
    pub fn link(&self, args: &[&str]) -> Result<String> {
        let socket = self.folder().join("tombolod.socket");
        let mut all = vec!["link", "--broker", socket.to_str().unwrap_or_default()];
        all.extend(args);
        self.tombolo(&all)
    }

    /// Returns the output of `tombolo link ls`: one object for each link, or for each domain.
    ///
    /// # Errors
    /// As [`tombolo`](Self::tombolo).
    pub fn list(&self, what: &[&str]) -> Result<Vec<Value>> {
        let text = self.link(&[&["ls", "--json"], what].concat())?;
        Ok(text.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>()?)
    }

    /// Returns the arguments that a domain's QEMU needs.
    ///
    /// # Errors
    /// The domain does not exist.
    pub fn snippet(&self, domain: &str) -> Result<Vec<String>> {
        Ok(self.link(&["snippet", domain])?.split_whitespace().map(str::to_owned).collect())
    }
}
