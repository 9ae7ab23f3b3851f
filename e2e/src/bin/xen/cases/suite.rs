// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guarantees of every backend, and the attacks of hostile peers, between two real domains. The example `pair` of
//! `tombolo-domain-xen` is an agent in one domain, and runs its tests in the other.

use super::{Case, Kind, Verdict};
use crate::rig::{Pair, Rig};
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::wire::End;
use tombolo_e2e::xen::init::address_of;

pub const PV: &[Case] = &[
    Case { name: "pv_conformance_of_two_domus", run: |rig| conformance(rig, Kind::Pv, "A", "B") },
    Case { name: "pv_conformance_of_a_domu_and_dom0", run: |rig| conformance(rig, Kind::Pv, "A", "dom0") },
    Case { name: "pv_hostile_peers_harm_nobody_else", run: |rig| hostile(rig, Kind::Pv) },
    Case { name: "suite_canary_of_domains_that_do_not_meet_fails", run: fails },
];
pub const PVH: &[Case] =
    &[Case { name: "pvh_conformance_of_two_domus", run: |rig| conformance(rig, Kind::Pvh, "A", "B") }];
/// Cases that take longer than a change may wait for.
pub const PVH_LONG: &[Case] = &[
    Case { name: "pvh_conformance_of_a_domu_and_dom0", run: |rig| conformance(rig, Kind::Pvh, "B", "dom0") },
    Case { name: "pvh_hostile_peers_harm_nobody_else", run: |rig| hostile(rig, Kind::Pvh) },
];

/// Port at which agents listen.
const PORT: u16 = 7100;
/// Seconds that one test may take, and one test of hostile peers: the longest takes 8 where nothing else runs.
const TEST: u64 = 180;
const HOSTILE: u64 = 300;
/// Seconds within which a killed program is gone.
const GONE: u64 = 20;

/// Runs the whole suite, so that each side listens once: about forty tests, twice.
fn conformance(rig: &mut Rig, kind: Kind, here: &str, there: &str) -> Result<Verdict> {
    let pair = rig.pair(kind)?;
    passes(pair, "suite", here, there, 80)?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Runs all attacks of hostile peers.
fn hostile(rig: &mut Rig, kind: Kind) -> Result<Verdict> {
    let pair = rig.pair(kind)?;
    passes(pair, "hostile", "A", "B", 20)?;
    // What killed listeners left in their own domain's folder belongs to their domain. The case checks the victim's
    // folder, and all grants.
    let folder = format!("/local/domain/{}/data/tombolo/{}", pair.number("B"), pair.number("A"));
    pair.sh("dom0", &format!("for node in $(xenstore-list {folder}); do xenstore-rm {folder}/$node; done"))?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}

fn passes(pair: &mut Pair, tests: &str, here: &str, there: &str, least: usize) -> Result<()> {
    let (end, passed) = run(pair, tests, here, there, pair.number(there), "")?;
    ensure!(end == End::Code(0) && passed >= least, "{end:?}, {passed} passed of at least {least}");
    Ok(())
}

/// Runs those of `tests` with one of `words` in one domain against an agent in the other, which is taken to be domain
/// `number`. Returns how the run ended and how many tests passed.
fn run(pair: &mut Pair, tests: &str, here: &str, there: &str, number: u16, words: &str) -> Result<(End, usize)> {
    let place = match there {
        "A" => "1",
        "B" => "2",
        _ => "254",
    };
    let limit = if tests == "hostile" { HOSTILE } else { TEST };
    let address = format!("{}:{PORT}", address_of(place));
    let own = pair.number(here);
    let agent = pair.start(there, &format!("exec pair agent {address} {own}"))?;
    pair.at(there)?.line(agent, within(limit))?;
    let job = pair.start(here, &format!("exec pair {tests} {address} {number} {words} 2>&1"))?;
    let control = pair.at(here)?;
    let (mut passed, mut last) = (0, String::new());
    while let Ok(line) = control.line(job, within(limit)) {
        passed += usize::from(line.starts_with("test ") && line.contains("... ok"));
        if !line.contains("... ok") {
            println!("{here}: {line}");
        }
        last = line;
    }
    if !control.ended(job) {
        println!("{here}: no test ended within {limit} s after: {last}");
        // A domain that died prints nothing, but Xen prints why.
        println!("{}", pair.host.dom0.console.tail(30));
        pair.at(here)?.kill(job)?;
    }
    let end = pair.at(here)?.wait(job, within(GONE))?.end;
    pair.at(there)?.kill(agent)?;
    let said = pair.at(there)?.wait(agent, within(GONE))?;
    if end != End::Code(0) {
        println!("{there}: {}", said.text);
    }
    Ok((end, passed))
}

/// A suite whose tests cannot succeed must fail.
fn fails(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let (end, passed) = run(pair, "suite", "A", "B", 0, "here::d4_any_number_of_notifications_is_kept")?;
    ensure!(end == End::Code(1), "{end:?} with {passed} passed, though the agent's domain is another");
    Ok(Verdict::Done)
}
