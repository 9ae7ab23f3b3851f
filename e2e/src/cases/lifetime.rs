// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The module comes and goes.

use super::{Case, Half, Verdict};
use crate::rig::{MODULE, Rig};
use std::fs;
use tombolo_e2e::agent::{load_module, unload_module};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::guest::{Ends, open_node, sys};
use tombolo_e2e::lines::within;
use tombolo_e2e::module;

pub const CASES: &[Case] = &[
    Case { name: "module_describes_its_devices", run: describes },
    Case { name: "module_loads_and_unloads_100_times", run: reloads },
];
pub const HALVES: &[Half] = &[
    ("lifetime::describe", describe),
    ("lifetime::reload", reload),
    ("lifetime::say", say),
    ("lifetime::panic", panic),
];

fn describes(rig: &mut Rig) -> Result<Verdict> {
    rig.solo()?.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

fn describe(args: &[String]) -> Result<()> {
    let (ends, _) = Ends::from_args(args)?;
    let (bell, own) = (sys::info(open_node(&ends.bell)?)?, sys::info(open_node(&ends.own)?)?);
    ensure!(bell.version == 2 && own.version == 2, "{bell:?} {own:?}");
    ensure!(bell.flags & sys::INFO_BELL != 0 && bell.vectors == 4, "{bell:?}");
    ensure!(own.flags & sys::INFO_BELL == 0 && own.vectors == 0, "{own:?}");
    ensure!(own.size == crate::rig::REGION && own.reserved == [0; 3], "{own:?}");
    Ok(())
}

fn reloads(rig: &mut Rig) -> Result<Verdict> {
    let guest = rig.solo()?;
    guest.unload()?;
    guest.end("lifetime::reload", &["100"], within(300))?.success()?;
    guest.load()?;
    guest.run("lifetime::describe", &[])?;
    Ok(Verdict::Done)
}

fn reload(args: &[String]) -> Result<()> {
    let times: u32 = args.last().ok_or_else(|| Error::new("how often?"))?.parse()?;
    for _ in 0..times {
        load_module(MODULE)?;
        unload_module(module::NAME)?;
    }
    Ok(())
}

/// Writes to the kernel's log, as a warning.
fn say(args: &[String]) -> Result<()> {
    Ok(fs::write("/dev/kmsg", format!("<4>{}\n", args.join(" ")))?)
}

fn panic(_: &[String]) -> Result<()> {
    Ok(fs::write("/proc/sysrq-trigger", "c")?)
}
