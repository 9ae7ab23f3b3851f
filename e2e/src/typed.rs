// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two machines and their links for interactive use.

use crate::cases::sockets;
use crate::parts::Parts;
use crate::site::{Purpose, Site};
use std::path::Path;
use tombolo_e2e::control::Control;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::qemu::Vm;
use tombolo_e2e::up::{self, Machines};
use tombolo_e2e::wire::End;

struct Typed(Site);

/// Boots two machines, links them with each other and their host, and serves them until it is told to end them.
pub fn up() -> Result<()> {
    let mut site = sockets::boot(&Parts::get()?, Purpose::Networked)?;
    for (one, other) in [("a", "b"), ("a", "host"), ("b", "host")] {
        site.link(one, other)?;
    }
    println!("up: a, b; programs of the host reach them with TOMBOLO_BROKER={}", site.broker.socket().display());
    up::serve(Typed(site))
}

/// Sends a request to the machines that are up.
pub fn ask(words: &[&str]) -> Result<()> {
    match up::ask::<Typed>(words)? {
        End::Code(0) => Ok(()),
        end => Err(Error::new(format!("{end:?}"))),
    }
}

impl Typed {
    fn vm(&mut self, name: &str) -> Result<&mut Vm> {
        match name {
            "a" => Ok(&mut self.0.a),
            "b" => Ok(&mut self.0.b),
            other => Err(Error::new(format!("there is no {other}, there are a and b"))),
        }
    }
}

impl Machines for Typed {
    const NAME: &'static str = "vm";

    fn control(&mut self, at: &str) -> Result<&mut Control> {
        Ok(&mut self.vm(at)?.control)
    }

    /// Copies the file through a channel, as a user would.
    fn push(&mut self, to: &str, from: &Path, path: &str) -> Result<()> {
        let listen = format!("tombolo cat --listen vm:{to}/pushed --receive-only > {path}.new");
        let job =
            self.vm(to)?.start(&["sh", "-c", &format!("{listen} && chmod 755 {path}.new && mv {path}.new {path}")])?;
        let file = from.to_str().unwrap_or_default();
        let sent = self.0.broker.tombolo(&[
            "cat",
            "--connect",
            &format!("vm:{to}/pushed"),
            "--wait",
            "30",
            "--send-only",
            file,
        ]);
        sent.context(format!("{file} to {to}"))?;
        self.vm(to)?.wait(job, within(60))?.success().context(format!("to {to}")).map(drop)
    }

    fn log(&mut self, of: &str) -> Result<String> {
        Ok(self.vm(of)?.console.text().join("\n"))
    }

    fn renew(&mut self, at: &str) -> Result<String> {
        ensure!(false, "{at} cannot be made anew: `down`, then `up`");
        Ok(String::new())
    }

    fn finish(self) -> Result<()> {
        self.0.finish()
    }
}
