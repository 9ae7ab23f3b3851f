// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes that end with this one.

use crate::error::{Context, Result};
use std::ffi::OsStr;
use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, Stdio};

/// A process that is killed when its value is dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts a command.
    ///
    /// # Errors
    /// The program does not exist.
    pub fn start(command: &mut Command) -> Result<Self> {
        let child = command.spawn().context(command.get_program().to_string_lossy())?;
        Ok(Self(child))
    }

    /// Kills the process, like a power cut, and waits until it is gone.
    ///
    /// # Errors
    /// The process does not die.
    pub fn end(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        _ = self.end();
    }
}

/// Returns a command without input, which the kernel kills when the thread that starts it dies. The words `within`
/// precede it, such as those that enter a namespace.
#[must_use]
pub fn tied(within: &[String], program: impl AsRef<OsStr>) -> Command {
    let mut words = within.iter().map(String::as_str).chain(["setpriv", "--pdeathsig", "KILL", "--"]);
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).arg(program).stdin(Stdio::null());
    command
}
