// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs in two machines, the brokers of both, and the host's between them: all as they ship.

use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::Site;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::lines::within;
use tombolo_e2e::qemu::Vm;

pub const CASES: &[Case] = &[Case { name: "v1_programs_in_two_machines_talk", run: talk }];

/// The two machines with their brokers, and a link.
struct Guests<'a> {
    site: &'a mut Site,
    brokers: [Job; 2],
}

impl<'a> Guests<'a> {
    fn start(rig: &'a mut Rig) -> Result<Self> {
        let site = rig.site()?;
        site.link()?;
        let brokers = [broker(&mut site.a)?, broker(&mut site.b)?];
        Ok(Self { site, brokers })
    }

    /// Ends the brokers.
    fn finish(self) -> Result<()> {
        for (vm, broker) in [&mut self.site.a, &mut self.site.b].into_iter().zip(self.brokers) {
            vm.kill(broker)?;
            vm.wait(broker, within(60))?;
        }
        Ok(())
    }
}

/// Starts the broker of a machine.
fn broker(vm: &mut Vm) -> Result<Job> {
    let broker = vm.start(&["/bin/tombolod", "--guest"])?;
    let line = vm.line(broker, within(60))?;
    match line.contains("serves programs") {
        true => Ok(broker),
        false => Err(Error::new(format!("the broker of {}: {line}", vm.name))),
    }
}

fn talk(rig: &mut Rig) -> Result<Verdict> {
    let guests = Guests::start(rig)?;
    let Site { a, b, .. } = &mut *guests.site;
    let receiver =
        b.start(&["/bin/tombolo", "cat", "--receive-only", "--listen", "vm:file", "--output", "/tmp/got"])?;
    a.sh("head -c 8388608 /dev/urandom >/tmp/sent", within(60))?;
    let sent = a.run(&["/bin/tombolo", "cat", "--send-only", "--connect", "vm:b/file", "/tmp/sent"], within(120));
    let got = b.wait(receiver, within(60))?;
    sent.and_then(|_| got.success()).context("the file did not go")?;
    let sums = [a.sh("sha256sum </tmp/sent", within(60))?, b.sh("sha256sum </tmp/got", within(60))?];
    ensure!(sums[0] == sums[1], "{sums:?}");
    guests.finish()?;
    Ok(Verdict::Done)
}
