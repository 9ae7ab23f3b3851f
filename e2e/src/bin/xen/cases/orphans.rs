// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A domain with `tombolod`: `tombolo ls` and `tombolo doctor` show the pages of a program that died for as long as its
//! peer maps them. The peer learns of the death as usual.

use super::{Case, Kind, Verdict, death};
use crate::rig::{Pair, Rig};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::line_reader::within;

pub const PV: &[Case] =
    &[Case { name: "pages_of_a_killed_sender_are_kept_until_its_peer_unmaps_them", run: |rig| kept(rig, Kind::Pv) }];

/// Cases that take longer than a change may wait for.
pub const PVH_LONG: &[Case] = &[Case {
    name: "pvh_pages_of_a_killed_sender_are_kept_until_its_peer_unmaps_them",
    run: |rig| kept(rig, Kind::Pvh),
}];

/// Time within which the other endpoint of a program that died is told.
const TOLD: Duration = Duration::from_secs(1);
/// Seconds for commands that take one second on an idle machine.
const SOON: u64 = 60;

fn kept(rig: &mut Rig, kind: Kind) -> Result<Verdict> {
    let pair = rig.pair(kind)?;
    let reaper = begin(pair)?;
    // One more descriptor does not delay the news of the death.
    let told = death::reaped_in(pair, "flow", 5)?.median();
    ensure!(told < TOLD, "the other end knew after {told:?}, at the median");
    until(pair, "what they left is let go of", |kept, _| kept.is_empty())?;
    pair.check_clean()?;

    let (sender, receiver) = death::flow(pair, "A", "B")?;
    let published = death::fill(pair, "A", "B")?;
    pair.at("A")?.kill(sender)?;
    pair.at("A")?.wait(sender, within(SOON))?;
    until(pair, "it is kept", |kept, _| !kept.is_empty())?;
    // A stopped program does not unmap the pages, however often the case checks.
    until(pair, "it is still kept", |kept, _| kept.iter().all(|one| one["age"].as_f64() > Some(1.0)))?;
    let b = pair.number("B");
    let (found, doctor) = seen(pair)?;
    let pages: u64 = found.iter().filter_map(|one| one["pages"].as_u64()).sum();
    let of = |key: &str| {
        found.iter().map(|one| one[key].to_string()).collect::<BTreeSet<_>>().into_iter().collect::<String>()
    };
    let whose = (of("address"), of("peer_domain"), of("command"), of("uid"));
    let expected = (format!("\"xen:{b}/flow\""), b.to_string(), "\"agent\"".to_owned(), "0".to_owned());
    ensure!(whose == expected && pages > 0, "{whose:?}, not {expected:?}: {found:?}");
    ensure!(doctor.contains(&format!("tombolod keeps {pages} of programs that died")), "{pages}: {doctor}");
    let mapped = pair.mapped()?.iter().filter(|line| line.ends_with(&format!(" {b}"))).count() as u64;
    // Canary of the check that nothing is left: Xen counts at least the kept pages, except for the list's page, which
    // nobody maps any more.
    ensure!(mapped + 1 >= pages, "{pages} pages are kept, and Xen says that {b} maps {mapped}");
    println!("{pages} pages were kept while the peer was stopped; Xen listed {mapped} that it maps");

    pair.sh("B", "killall -CONT tombolo")?;
    death::Noticed::default().wait(pair, "B", receiver, "died")?;
    death::check_arrived(pair, "B", published)?;
    until(pair, "it is let go of", |kept, doctor| kept.is_empty() && !doctor.contains("keeps"))?;
    pair.check_clean()?;
    pair.sh("A", "killall tombolod")?;
    pair.done("A", reaper)?;
    let doctor = seen(pair)?.1;
    ensure!(doctor.contains("no tombolod tells"), "{doctor}");
    Ok(Verdict::Done)
}

/// Starts `tombolod` in A.
fn begin(pair: &mut Pair) -> Result<Job> {
    let reaper = pair.start("A", "exec tombolod --guest --no-hook 2>&1")?;
    let said = pair.at("A")?.line(reaper, within(SOON)).context("tombolod")?;
    ensure!(said.contains("keeps pages"), "{said}");
    Ok(reaper)
}

/// Returns the kept pages in A, as `tombolo ls` lists them, and the line of `tombolo doctor`.
fn seen(pair: &mut Pair) -> Result<(Vec<Value>, String)> {
    let text = pair.sh("A", "tombolo ls --json && tombolo doctor | grep -w xen")?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let kept = lines.filter(|line| line["type"] == "kept").collect();
    Ok((kept, text.lines().last().unwrap_or_default().to_owned()))
}

fn until(pair: &mut Pair, what: &str, is: impl Fn(&[Value], &str) -> bool) -> Result<()> {
    let deadline = within(SOON);
    loop {
        let (kept, doctor) = seen(pair)?;
        if is(&kept, &doctor) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it never came to pass that {what}: {kept:?}, {doctor}");
    }
}
