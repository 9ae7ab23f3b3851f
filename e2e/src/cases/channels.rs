// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests the same program on all sides: files cross between machines and their host.

use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site, start};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::process::Process;
use tombolo_e2e::scratch::Scratch;

pub const CASES: &[Case] = &[
    Case { name: "v1_file_crosses_between_machines", run: between_machines },
    Case { name: "file_crosses_from_a_machine_to_its_host", run: to_the_host },
    Case { name: "file_crosses_from_the_host_to_a_machine", run: from_the_host },
    Case { name: "program_without_root_uses_a_channel", run: unprivileged },
    Case { name: "nobody_connects_where_no_rule_allows_it", run: forbidden },
];

pub const HALVES: &[Half] = &[("channels::nobody", nobody)];

/// Returns a command that makes a file of `mib` MiB of random bytes, and prints its checksum.
fn make(mib: u32) -> String {
    format!("head -c {} /dev/urandom > /tmp/file && sha256sum < /tmp/file", mib << 20)
}

fn between_machines(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    for (from, to, name) in [(At::A, At::B, "b"), (At::B, At::A, "a")] {
        let sum = site.vm(from).sh(&make(16), within(120))?;
        let listen = format!("tombolo cat --listen vm:{name}/file --receive-only --output /tmp/copy");
        let listener = site.vm(to).start(&["sh", "-c", &listen])?;
        let connect = format!("tombolo cat --connect vm:{name}/file --wait 60 --send-only /tmp/file");
        site.vm(from).sh(&connect, within(120))?;
        site.vm(to).wait(listener, within(60))?.success().context("who listens")?;
        let copied = site.vm(to).sh("sha256sum < /tmp/copy && rm /tmp/copy", within(120))?;
        ensure!(copied == sum, "{sum} became {copied}");
    }
    Ok(Verdict::Done)
}

fn to_the_host(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "host")?;
    let sum = site.a.sh(&make(16), within(120))?;
    let folder = Scratch::new("copy")?;
    let copy = folder.path().join("copy");
    let output = copy.to_str().unwrap_or_default();
    let listen = ["cat", "--listen", "vm:host/file", "--receive-only", "--output", output];
    let mut listener = Process::start(&mut site.broker.command(&[], &listen)?)?;
    site.a.sh("tombolo cat --connect vm:host/file --wait 60 --send-only /tmp/file", within(120))?;
    ensure!(listener.wait()?.success(), "who listens failed");
    ensure!(host_sum(&copy)? == sum, "another file arrived");
    Ok(Verdict::Done)
}

fn from_the_host(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "host")?;
    let file = std::env::current_exe()?;
    let name = file.to_str().unwrap_or_default();
    let listener = site.a.start(&["sh", "-c", "tombolo cat --listen vm:a/file --receive-only --output /tmp/copy"])?;
    site.broker.tombolo(&["cat", "--connect", "vm:a/file", "--wait", "60", "--send-only", name])?;
    site.a.wait(listener, within(60))?.success().context("who listens")?;
    let copied = site.a.sh("sha256sum < /tmp/copy && rm /tmp/copy", within(120))?;
    ensure!(host_sum(&file)? == copied, "another file arrived");
    Ok(Verdict::Done)
}

fn host_sum(file: &Path) -> Result<String> {
    let output = Command::new("sha256sum").stdin(fs::File::open(file)?).output().context("sha256sum")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Programs need only the right to open the broker's socket.
fn unprivileged(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    let listen = "id -u; exec tombolo cat --listen vm:b/small --receive-only";
    let listener = start(&mut site.b, "channels::nobody", &[listen])?;
    let connect = "echo for you | tombolo cat --connect vm:b/small --wait 60 --send-only";
    let sender = start(&mut site.a, "channels::nobody", &[connect])?;
    site.a.wait(sender, within(60))?.success()?;
    let got = site.b.wait(listener, within(60))?.success()?;
    ensure!(got == "65534\nfor you", "{got}");
    Ok(Verdict::Done)
}

/// Runs a shell command as a user who is not root and in no group.
fn nobody(args: &[String]) -> Result<()> {
    let command = args.first().ok_or_else(|| Error::new("what?"))?;
    let status = Command::new("sh").args(["-c", command]).uid(65534).gid(65534).status()?;
    if status.success() { Ok(()) } else { Err(Error::new(format!("{command}: {status}"))) }
}

/// Rules that are read again apply at once: to machines, and to the services that they name.
fn forbidden(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    let narrow = crate::site::CONFIG.replace("service = \"*\"", "service = \"open\"");
    site.broker.configure(&narrow)?;
    let verdict = narrowed(site);
    site.broker.configure(crate::site::CONFIG)?;
    verdict?;
    // What was forbidden is allowed again.
    let listener = site.b.start(&["sh", "-c", "tombolo cat --listen vm:b/closed --receive-only"])?;
    site.a.sh("echo again | tombolo cat --connect vm:b/closed --wait 60 --send-only", within(90))?;
    let got = site.b.wait(listener, within(60))?.success()?;
    ensure!(got == "again", "{got}");
    Ok(Verdict::Done)
}

fn narrowed(site: &mut Site) -> Result<()> {
    let deadline = within(60);
    let closed = site.b.start(&["sh", "-c", "exec tombolo cat --listen vm:b/closed --receive-only"])?;
    // The rules take a moment to reach the machine.
    let said = loop {
        let connect = ["sh", "-c", "tombolo cat --connect vm:b/closed --wait 0 --send-only < /dev/null"];
        let output = site.a.end(&connect, within(60))?;
        if output.text.contains("not allowed") {
            break output.text;
        }
        ensure!(Instant::now() < deadline, "still let in: {output:?}");
        let again = site.b.start(&["sh", "-c", "exec tombolo cat --listen vm:b/closed --receive-only"])?;
        site.b.kill(again)?;
    };
    site.b.kill(closed)?;
    ensure!(said.contains("vm:b/closed"), "it does not say what: {said}");
    let open = site.b.start(&["sh", "-c", "tombolo cat --listen vm:b/open --receive-only"])?;
    site.a.sh("echo in | tombolo cat --connect vm:b/open --wait 60 --send-only", within(60))?;
    let got = site.b.wait(open, within(60))?.success()?;
    if got == "in" { Ok(()) } else { Err(Error::new(format!("{got} arrived"))) }
}
