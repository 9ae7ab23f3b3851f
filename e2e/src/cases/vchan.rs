// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libtombolo-vchan between two machines, and between a machine and its host: every function of both spellings.

use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::At;
use std::process::Stdio;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::process::{Process, tied};
use tombolo_e2e::scratch::Scratch;
use tombolo_e2e::vchan::{QUBES, TRIED, XENS, tries};

pub const CASES: &[Case] = &[
    Case {
        name: "vchan_functions_of_xens_spelling_do_what_their_header_says_between_machines",
        run: |rig| machines(rig, XENS, (At::A, 1), (At::B, 2)),
    },
    Case {
        name: "vchan_functions_of_qubes_spelling_do_what_their_header_says_between_machines",
        run: |rig| machines(rig, QUBES, (At::B, 2), (At::A, 1)),
    },
    Case { name: "vchan_functions_of_both_spellings_do_what_they_should_between_a_machine_and_its_host", run: host },
];

/// Numbers of the machines and of the host.
const MAP: &str = "domain 1 vm:a\ndomain 2 vm:b\ndomain 3 vm:host";
const HOST: u16 = 3;
/// Number of vchans that exist at once, on a link of the default size (V-8).
const MANY: u16 = 30;
/// Seconds that a program may take, on a machine with other load.
const PATIENCE: u64 = 120;

fn machines(rig: &mut Rig, program: &str, server: (At, u16), client: (At, u16)) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    let mut start = |role, at: (At, u16), peer: u16| {
        let command = tries(program, &format!("self {}\n{MAP}", at.1), role, peer, at.1, MANY);
        site.vm(at.0).start(&["sh", "-c", &command])
    };
    let (serving, joining) = (start("serve", server, client.1)?, start("join", client, server.1)?);
    for (at, job) in [(client.0, joining), (server.0, serving)] {
        let said = site.vm(at).wait(job, within(PATIENCE))?.success().context(format!("{at:?}"))?;
        ensure!(said.contains(TRIED), "{at:?} says {said}");
    }
    Ok(Verdict::Done)
}

/// The host is the client in one spelling and the server in the other.
fn host(rig: &mut Rig) -> Result<Verdict> {
    let programs = rig.parts.vchans()?.to_vec();
    let site = rig.site()?;
    site.link("a", "host")?;
    let folder = Scratch::new("vchan")?;
    let map = folder.path().join("vchan.conf");
    std::fs::write(&map, format!("self {HOST}\n{MAP}\n"))?;
    for (program, ours, theirs) in [(XENS, "join", "serve"), (QUBES, "serve", "join")] {
        let found = programs.iter().find(|(name, _)| name.ends_with(program));
        let (_, path) = found.ok_or_else(|| Error::new(format!("no {program}")))?;
        let mut command = tied(&[], path);
        command.args([ours, "1", &HOST.to_string(), &MANY.to_string()]).env("TOMBOLO_VCHAN_CONF", &map);
        command.env("TOMBOLO_BROKER", site.broker.socket()).stdout(Stdio::null());
        let mut here = Process::start(&mut command)?;
        let there = tries(program, &format!("self 1\n{MAP}"), theirs, HOST, 1, MANY);
        let job = site.a.start(&["sh", "-c", &there])?;
        let said = site.a.wait(job, within(PATIENCE))?.success().context(program)?;
        ensure!(said.contains(TRIED), "{program} in the machine says {said}");
        ensure!(here.wait()?.success(), "{program} on the host failed");
    }
    Ok(Verdict::Done)
}
