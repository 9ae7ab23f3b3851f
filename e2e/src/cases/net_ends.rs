// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An interface whose peer's machine dies under load: it loses its carrier at once, stays, and connects to the machine
//! that comes back.

use super::life::{SEEN, come_back, renew};
use super::net::{down, load_tun, up, wait_carrier};
use super::net_load::{CONNECTIONS, Load, is_clean};
use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site};
use serde_json::json;
use std::time::Instant;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::line_reader::within;

pub const LONG_CASES: &[Case] = &[Case {
    name: "n10_interface_whose_peer_is_reset_panics_or_is_killed_takes_the_machine_that_comes_back",
    run: dies,
}];

/// One way in which a machine ends: its name, what causes it, and what boots the machine again.
type End = (&'static str, fn(&mut Site) -> Result<()>, fn(&mut Site) -> Result<()>);

const ENDS: [End; 3] = [
    ("panicked", |site| site.b.start(&["sh", "-c", "echo c > /proc/sysrq-trigger"]).map(drop), come_back),
    ("reset", |site| site.b.qmp.run("system_reset", &json!({})).map(drop), come_back),
    ("killed", |site| site.b.cut(), renew),
];

fn dies(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    load_tun(site)?;
    for engine in ["kernel", "tap"] {
        let one = up(site, At::A, "tmb0", "vm:b/net", engine, 9)?;
        let mut other = up(site, At::B, "tmb0", "vm:b/net", engine, 9)?;
        wait_carrier(site, At::A, "tmb0", 1)?;
        let index = site.a.sh("cat /sys/class/net/tmb0/ifindex", within(60))?;
        let mut load = Load::start(site, "10.9.0.2")?;
        load.goes_on(site)?;
        let mut soonest = SEEN;
        for (what, end, boot) in ENDS {
            end(site)?;
            let begun = Instant::now();
            let lost = "until [ \"$(cat /sys/class/net/tmb0/carrier)\" = 0 ]; do usleep 5000; done";
            site.a.sh(lost, within(60)).context(what)?;
            let seen = begun.elapsed();
            ensure!(seen < SEEN, "{what}: the carrier is lost after {seen:?}");
            soonest = soonest.min(seen);
            boot(site).context(what)?;
            load_tun(site)?;
            other = up(site, At::B, "tmb0", "vm:b/net", engine, 9)?;
            wait_carrier(site, At::A, "tmb0", 1).context(what)?;
            load.answer_anew(site)?;
            let again = load.goes_on(site).context(what)?;
            println!("{engine}: {what}: no carrier after {seen:?}; with the next machine all go on after {again:?}");
        }
        // A busy host delays some of these times, but a timeout in the interface would delay all of them. It was 0.7 s
        // until the engine learned of an end at once.
        ensure!(soonest < SEEN / 2, "the carrier is never lost before {soonest:?}");
        // The machine that died knew the connections, and the next one reports that it does not.
        let broken = load.end(site)?;
        ensure!(broken.len() >= CONNECTIONS * ENDS.len(), "they go on with machines that are gone: {broken:?}");
        ensure!(broken.iter().all(|why| why.contains("ConnectionReset")), "{broken:?}");
        let now = site.a.sh("cat /sys/class/net/tmb0/ifindex", within(60))?;
        ensure!(now == index, "another interface: {index}, {now}");
        down(site, At::A, "tmb0", one)?;
        down(site, At::B, "tmb0", other)?;
    }
    site.unlink()?;
    is_clean(site, At::A)?;
    is_clean(site, At::B)?;
    Ok(Verdict::Done)
}
