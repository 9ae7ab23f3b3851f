// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `tombolo doctor` says of a domain: that all is well, and what is not, with what mends it.

use super::{Case, Kind, Verdict};
use crate::rig::{Pair, Rig};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};

pub const PV: &[Case] = &[Case { name: "doctor_tells_a_domain_that_is_well_from_ones_that_are_not", run: findings }];

/// A driver's limit, in pages, what it is usually, and the device of another.
const LIMIT: &str = "/sys/module/xen_gntalloc/parameters/limit";
const USUAL: u32 = 1024;
const DEVICE: &str = "/dev/xen/gntdev";
const AWAY: &str = "/dev/gntdev.away";

fn findings(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    // A case before may have raised what the driver begins with.
    pair.sh("A", &format!("echo {USUAL} > {LIMIT}"))?;
    for (at, name) in [("A", "domain"), ("dom0", "dom0, domain")] {
        let number = pair.number(at);
        said(pair, at, "ok", &[&format!("{name} {number}: pages are granted"), "room for 3 ends"])?;
    }
    // Each is mended by what the finding says, and then all is well again.
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

/// The finding about Xen has this grade and these words.
fn said(pair: &mut Pair, at: &str, grade: &str, words: &[&str]) -> Result<()> {
    let text = pair.sh(at, "tombolo doctor --json | grep '\"check\":\"xen\"'").context("no finding about Xen")?;
    ensure!(text.contains(&format!("\"grade\":\"{grade}\"")), "{at}: {grade} was expected: {text}");
    for word in words {
        ensure!(text.contains(word), "{at}: `{word}` was expected: {text}");
    }
    Ok(())
}
