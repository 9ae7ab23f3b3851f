// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps a pair of domUs for interactive use.

use super::host::{Host, Kind, Parts};
use super::packages::Packages;
use crate::control::Control;
use crate::debian::Archive;
use crate::error::Result;
use crate::up::{self, Machines};
use std::path::Path;

/// The running pair.
pub struct RunningPair {
    host: Host,
    kind: Kind,
}

/// Boots a pair and serves it until a client asks to end it.
///
/// # Errors
/// The pair does not come up, or a console shows a fault at the end.
pub fn up(kind: Kind) -> Result<()> {
    let parts = Parts::new(Packages::get(&Archive::open()?)?, &[])?;
    let mut host = Host::boot(&parts)?;
    host.create_pair(kind)?;
    let numbers = host.domus.each_ref().map(|domain| format!("{} is domain {}", domain.name, domain.domid));
    println!("up: {}", numbers.join(", "));
    up::serve(RunningPair { host, kind })
}

impl Machines for RunningPair {
    const NAME: &'static str = "xen";

    fn control(&mut self, at: &str) -> Result<&mut Control> {
        self.host.control(at)
    }

    fn push(&mut self, to: &str, from: &Path, path: &str) -> Result<()> {
        self.host.push(to, from, path)
    }

    fn log(&mut self, of: &str) -> Result<String> {
        match of {
            "dom0" => Ok(self.host.dom0.console.text().join("\n")),
            domu => Ok(self.host.console(domu)?.text().join("\n")),
        }
    }

    fn renew(&mut self, at: &str) -> Result<String> {
        let place = usize::from(at == "B");
        self.host.destroy(place)?;
        self.host.create(place, self.kind, "")?;
        Ok(format!("{} is domain {}", self.host.domus[place].name, self.host.domus[place].domid))
    }

    fn finish(self) -> Result<()> {
        self.host.finish()
    }
}
