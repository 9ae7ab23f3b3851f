// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests what `tombolo doctor` reports of a domain: that all is well, or what is wrong and how to mend it.

use super::{Case, Kind, Verdict};
use crate::rig::{Pair, Rig};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};

pub const PV: &[Case] = &[Case { name: "doctor_tells_a_domain_that_is_well_from_ones_that_are_not", run: findings }];

/// Limit of one driver, in pages, with its usual value; and the device of another driver.
const LIMIT: &str = "/sys/module/xen_gntalloc/parameters/limit";
const USUAL: u32 = 1024;
const DEVICE: &str = "/dev/xen/gntdev";
const AWAY: &str = "/dev/gntdev.away";

fn findings(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    // An earlier case may have raised the driver's initial limit.
    pair.sh("A", &format!("echo {USUAL} > {LIMIT}"))?;
    for (at, name) in [("A", "domain"), ("dom0", "dom0, domain")] {
        let number = pair.number(at);
        said(pair, at, "ok", &[&format!("{name} {number}: pages are granted"), "room for 3 ends"])?;
    }
    // The text of each finding names its remedy, and after that all is well again.
    pair.sh("A", &format!("echo 100 > {LIMIT}"))?;
    said(pair, "A", "warning", &["room for 0 ends", &format!("echo 100100 > {LIMIT}")])?;
    pair.sh("A", &format!("echo 100100 > {LIMIT}"))?;
    said(pair, "A", "ok", &["room for 385 ends"])?;
    pair.sh("A", &format!("echo {USUAL} > {LIMIT}; mv {DEVICE} {AWAY}"))?;
    said(pair, "A", "warning", &["/dev/xen has no gntdev", "modprobe -a xen-gntdev"])?;
    pair.sh("A", &format!("mv {AWAY} {DEVICE}"))?;
    said(pair, "A", "ok", &[])?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Checks that the finding about Xen has this grade and these words.
fn said(pair: &mut Pair, at: &str, grade: &str, words: &[&str]) -> Result<()> {
    let text = pair.sh(at, "tombolo doctor --json | grep '\"check\":\"xen\"'").context("no finding about Xen")?;
    ensure!(text.contains(&format!("\"grade\":\"{grade}\"")), "{at}: {grade} was expected: {text}");
    for word in words {
        ensure!(text.contains(word), "{at}: `{word}` was expected: {text}");
    }
    Ok(())
}
