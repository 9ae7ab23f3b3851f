// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads what `xentrace` recorded, from the summary of `xenalyze`.

use super::packages::Packages;
use crate::ensure;
use crate::error::{Context, Result};
use crate::image::LIBRARIES;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Reason of an exit that is a hypercall.
pub const VMMCALL: &str = "VMEXIT_VMMCALL";

/// What one domain did during a trace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Share {
    /// Hypercalls by kind. For a domain with hardware virtualization: exits to Xen by reason, of which [`VMMCALL`] are
    /// hypercalls.
    pub hypercalls: BTreeMap<String, u64>,
    /// Number of times that Xen gave a real CPU to one of its CPUs.
    pub switches: u64,
}

impl Share {
    /// Returns the number of all hypercalls, or exits.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.hypercalls.values().sum()
    }
}

/// Summarises a trace, by the domains' numbers.
///
/// # Errors
/// The file is not a trace.
pub fn analyze(packages: &Packages, trace: &Path) -> Result<BTreeMap<u16, Share>> {
    let mut command = Command::new(packages.program("xenalyze")?);
    command.env("LD_LIBRARY_PATH", packages.root.join(LIBRARIES)).args(["--svm-mode", "--summary"]).arg(trace);
    let output = command.output().context("xenalyze")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "xenalyze: {}: {said}", output.status);
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(text: &str) -> BTreeMap<u16, Share> {
    let mut shares: BTreeMap<u16, Share> = BTreeMap::new();
    let mut domain = None;
    let (mut in_cpu, mut in_calls) = (false, false);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("|-- Domain ") {
            domain = rest.split(' ').next().and_then(|number| number.parse().ok());
            (in_cpu, in_calls) = (false, false);
        }
        let Some(share) = domain.map(|number| shares.entry(number).or_default()) else { continue };
        in_cpu |= line.starts_with("-- v");
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["running:", times, ..] if in_cpu => share.switches += times.parse().unwrap_or(0),
            ["hypercall", _] => in_calls = true,
            // ` VMEXIT_HLT    56  2.25s …`; lines below it, indented further, have the details of an exit.
            [reason, count, ..] if line.starts_with(" VMEXIT_") => {
                *share.hypercalls.entry(reason.to_owned()).or_default() += count.parse::<u64>().unwrap_or(0);
            }
            // `evtchn_op [32]: 1170`, or with a space after the bracket.
            [kind, .., count] if in_calls && line.starts_with("    ") && line.contains("]:") => {
                *share.hypercalls.entry(kind.to_owned()).or_default() += count.parse::<u64>().unwrap_or(0);
            }
            _ => in_calls = false,
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_taken_apart_by_domain_and_kind() {
        let text = "Total time: 1 seconds\n|-- Domain 1 --|\n Runstates:\n  full run:    2601 52.81s 4 {2|1|3}\n\
            -- v0 --\n Runstates:\n   running:    2601 52.81s 48 {20|12|39}\n  runnable:    1601 27.95s 4 {1|2|3}\n\
            PV events:\n  page_fault  433\n  hypercall  1173\n    mmu_update                   [ 1]:      3\n\
            \x20   evtchn_op                    [32]:   1170\n  hypercall (subcall)  176\n\
            \x20   other                        [32]:   9\n|-- Domain 2 --|\n-- v0 --\n   running:    7 5s 4 {2|1|3}\n\
            Exit reasons:\n VMEXIT_CPUID    76  0.00s  0.04% 52730 cyc {3|3|1}\n   cpuid       76  0.00s  0.04% 52730 cyc {3|3|1}\n\
            \x20VMEXIT_VMMCALL  601  0.42s 11.01% 1677638 cyc {7|1|4}\nGuest interrupt counts:\n  [243] 226\n";
        let shares = parse(text);
        assert_eq!((shares[&1].total(), shares[&1].switches, shares[&1].hypercalls["mmu_update"]), (1173, 2601, 3));
        assert_eq!((shares[&2].total(), shares[&2].switches, shares[&2].hypercalls[VMMCALL]), (677, 7, 601));
    }
}
