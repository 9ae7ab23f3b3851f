// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs in two machines, the brokers of both, and the host's between them: all as they ship.

use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::Site;
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::lines::within;
use tombolo_e2e::qemu::Vm;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "v1_programs_in_two_machines_talk", run: talk },
    Case { name: "b18_channel_goes_on_without_its_brokers", run: alone },
    Case { name: "v7_killed_program_is_noticed_in_the_other_machine", run: killed },
    Case { name: "v7_link_taken_away_is_an_error_and_no_signal", run: taken_away },
];

/// Bytes of what is sent.
const LEN: u64 = 4 << 20;

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

/// Sends a file from a to b, and compares.
fn send(site: &mut Site, service: &str) -> Result<()> {
    let Site { a, b, .. } = site;
    let receiver = receive(b, service, "/tmp/got")?;
    a.sh(&format!("head -c {LEN} /dev/urandom >/tmp/sent"), within(60))?;
    let address = format!("vm:b/{service}");
    let sent = a.run(&["/bin/tombolo", "cat", "--send-only", "--connect", &address, "/tmp/sent"], within(120));
    let got = b.wait(receiver, within(60))?;
    sent.and_then(|_| got.success()).context("the file did not go")?;
    same(site)
}

fn receive(vm: &mut Vm, service: &str, file: &str) -> Result<Job> {
    let address = format!("vm:{service}");
    vm.sh(&format!("rm -f {file}"), within(60))?;
    vm.start(&["/bin/tombolo", "cat", "--receive-only", "--listen", &address, "--output", file])
}

/// What was sent arrived.
fn same(site: &mut Site) -> Result<()> {
    let sums = [("/tmp/sent", &mut site.a), ("/tmp/got", &mut site.b)]
        .map(|(file, vm)| vm.sh(&format!("sha256sum <{file}"), within(60)));
    match sums {
        [Ok(sent), Ok(got)] if sent == got => Ok(()),
        sums => Err(Error::new(format!("another file arrived: {sums:?}"))),
    }
}

/// Waits until a file has so many bytes.
fn grown(vm: &mut Vm, file: &str, bytes: u64) -> Result<()> {
    let wait = format!("until [ \"$(stat -c %s {file} 2>/dev/null || echo 0)\" -ge {bytes} ]; do sleep 0.05; done");
    vm.sh(&wait, within(120)).map(drop)
}

fn talk(rig: &mut Rig) -> Result<Verdict> {
    let guests = Guests::start(rig)?;
    send(guests.site, "file")?;
    guests.finish()?;
    Ok(Verdict::Done)
}

/// Both brokers are killed while a channel is up, and it goes on; those that come after them know of it.
fn alone(rig: &mut Rig) -> Result<Verdict> {
    let mut guests = Guests::start(rig)?;
    let site = &mut *guests.site;
    site.a.sh(&format!("rm -f /tmp/go; head -c {LEN} /dev/urandom >/tmp/sent"), within(60))?;
    let receiver = receive(&mut site.b, "long", "/tmp/got")?;
    let sender = "(head -c 1000000 /tmp/sent; until [ -e /tmp/go ]; do sleep 0.05; done; tail -c +1000001 /tmp/sent) \
                  | /bin/tombolo cat --send-only --connect vm:b/long";
    let sender = site.a.start(&["sh", "-c", sender])?;
    grown(&mut site.b, "/tmp/got", 1_000_000)?;
    for (vm, job) in [&mut site.a, &mut site.b].into_iter().zip(&mut guests.brokers) {
        vm.kill(*job)?;
        vm.wait(*job, within(60))?;
        *job = broker(vm)?;
    }
    // A channel of now takes nothing of the one of before.
    let other = receive(&mut site.b, "other", "/tmp/other")?;
    let sent = ["/bin/tombolo", "cat", "--send-only", "--connect", "vm:b/other", "/agent"];
    site.a.run(&sent, within(120)).context("a call by the new brokers")?;
    site.b.wait(other, within(60))?.success()?;
    site.a.sh("touch /tmp/go", within(60))?;
    site.a.wait(sender, within(120))?.success().context("the sender")?;
    site.b.wait(receiver, within(60))?.success().context("the receiver")?;
    same(site)?;
    guests.finish()?;
    Ok(Verdict::Done)
}

/// A stream without end from a to b: who sends, and who receives.
fn stream(site: &mut Site, service: &str) -> Result<[Job; 2]> {
    let receiver = format!(
        "rm -f /tmp/begun; /bin/tombolo cat --receive-only --listen vm:{service} \\
         | (head -c 3000000 >/tmp/begun; cat >/dev/null)"
    );
    let sender = format!("exec /bin/tombolo cat --send-only --connect vm:b/{service} </dev/zero");
    let (receiver, sender) = (site.b.start(&["sh", "-c", &receiver])?, site.a.start(&["sh", "-c", &sender])?);
    grown(&mut site.b, "/tmp/begun", 3_000_000)?;
    Ok([sender, receiver])
}

fn killed(rig: &mut Rig) -> Result<Verdict> {
    let guests = Guests::start(rig)?;
    let site = &mut *guests.site;
    let [sender, receiver] = stream(site, "short")?;
    let start = Instant::now();
    site.a.kill(sender)?;
    site.b.wait(receiver, within(60))?;
    let took = start.elapsed();
    println!("noticed {took:?} after the order to kill");
    ensure!(took < Duration::from_secs(5), "noticed after {took:?}");
    site.a.wait(sender, within(60))?;
    send(site, "after")?;
    guests.finish()?;
    Ok(Verdict::Done)
}

/// The regions are unplugged while programs use them.
fn taken_away(rig: &mut Rig) -> Result<Verdict> {
    let guests = Guests::start(rig)?;
    let site = &mut *guests.site;
    let [sender, receiver] = stream(site, "taken")?;
    site.unlink()?;
    let ended = site.a.wait(sender, within(60))?;
    ensure!(matches!(ended.end, End::Code(1..)), "the sender ended as if nothing was: {ended:?}");
    site.b.wait(receiver, within(60))?;
    println!("the sender said: {}", ended.text.trim());
    site.link()?;
    send(site, "anew")?;
    guests.finish()?;
    Ok(Verdict::Done)
}
