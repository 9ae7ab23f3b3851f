// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker in dom0: domains by their names, what no rule allows, and pauses.

use super::{Case, Kind, Verdict};
use crate::rig::{Pair, Rig};
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::line_reader::within;

pub const PV: &[Case] =
    &[Case { name: "pv_names_of_dom0s_broker_lead_where_rules_allow_and_pauses_are_told", run: names }];

/// Configuration of the broker: the domUs may connect to each other and to dom0, but not to every service.
const CONFIG: &str = "[xen]\ndomains = [\"A\", \"B\"]\n[[allow]]\nfrom = \"A\"\nto = \"B\"\nservice = \"file\"\n\
    [[allow]]\nfrom = \"A\"\nto = \"B\"\nservice = \"life\"\n[[allow]]\nfrom = \"*\"\nto = \"host\"\nservice = \"log\"\n";
const STATE: &str = "/tmp/broker";
/// Time within which a pause is told, and the number of pauses that are tried.
const TOLD: Duration = Duration::from_secs(2);
const PAUSES: usize = 3;

fn names(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let broker = start(pair)?;
    for (from, to, service) in [("A", "B", "file"), ("B", "host", "log")] {
        transfer(pair, from, to, service)?;
    }
    // The listener is there, but it has no listener page for a domain that may not connect; nor is anything told in the
    // other direction.
    let listener = pair.start("A", "exec tombolo cat --listen vm:file --receive-only")?;
    let refused = pair.at("B")?.start(&["sh", "-c", "tombolo cat --connect vm:A/file --send-only </dev/null 2>&1"])?;
    let refused = pair.at("B")?.wait(refused, within(60))?;
    ensure!(refused.text.contains("not allowed to reach vm:A/file"), "what no rule allows: {}", refused.text);
    pair.at("A")?.kill(listener)?;
    let deadline = within(60);
    let watcher = pair.start("A", "exec /agent lives vm:B/life")?;
    let peer = pair.start("B", "exec tombolo cat --listen vm:life --receive-only")?;
    let seen = |pair: &mut Pair, life: &str| -> Result<String> {
        loop {
            let line = pair.at("A")?.line(watcher, deadline).context(format!("waiting for {life}"))?;
            if line.starts_with(life) {
                return Ok(line);
            }
        }
    };
    seen(pair, "Running")?;
    // The machine is shared, and under emulation xl alone may take a second of it, so the best of a few pauses counts.
    let mut told = Vec::new();
    while told.iter().all(|told| *told >= TOLD) {
        ensure!(told.len() < PAUSES, "a pause was told after {told:.1?}, not within {TOLD:?}");
        pair.sh("dom0", "xl pause B")?;
        let paused = Instant::now();
        seen(pair, "Paused")?;
        told.push(paused.elapsed());
        pair.sh("dom0", "xl unpause B")?;
        seen(pair, "Running")?;
    }
    println!("A knew {told:.1?} after `xl pause` had returned");
    // Endpoints do not believe a broker that was killed, but its death breaks nothing: the channel continues, and names
    // lead where they led.
    pair.at("dom0")?.kill(broker)?;
    seen(pair, "Unknown")?;
    transfer(pair, "A", "B", "file")?;
    let broker = start(pair)?;
    seen(pair, "Running")?;
    pair.at("B")?.kill(peer)?;
    seen(pair, "ProcessGone")?;
    pair.done("A", watcher)?;
    pair.at("dom0")?.kill(broker)?;
    pair.sh("dom0", &format!("killall tombolod; rm -r {STATE}; for id in $(xenstore-list /local/domain); do xenstore-rm /local/domain/$id/tombolo; done"))?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Starts the broker in dom0, and waits until it has told the domains what it must.
fn start(pair: &mut Pair) -> Result<Job> {
    let command = format!(
        "mkdir -p {STATE}; printf '%b' '{}' >{STATE}/toml; exec tombolod --config {STATE}/toml --state {STATE}",
        CONFIG.replace('\n', "\\n")
    );
    let broker = pair.start("dom0", &command)?;
    let deadline = within(60);
    loop {
        if pair.at("dom0")?.line(broker, deadline).context("tombolod")?.contains("told names") {
            break;
        }
    }
    let (a, b) = (pair.number("A"), pair.number("B"));
    pair.sh("dom0", &format!("until xenstore-read /local/domain/{b}/tombolo/{a}; do :; done"))?;
    Ok(broker)
}

/// Sends a small file to a service; the side that connects is there first.
fn transfer(pair: &mut Pair, from: &str, to: &str, service: &str) -> Result<()> {
    let at = if to == "host" { "dom0" } else { to };
    let text = pair.sh(from, "head -c 100000 /dev/urandom >/tmp/named; sha256sum </tmp/named")?;
    let sum = text.split(' ').next().unwrap_or_default();
    let caller =
        pair.start(from, &format!("tombolo cat --connect vm:{to}/{service} --wait 60 --send-only /tmp/named"))?;
    let listener = pair.start(at, &format!("tombolo cat --listen vm:{service} --receive-only | sha256sum"))?;
    pair.done(from, caller)?;
    let got = pair.done(at, listener)?;
    ensure!(got.starts_with(sum), "{sum} went from {from} to {to}/{service}, and {got} arrived");
    Ok(())
}
