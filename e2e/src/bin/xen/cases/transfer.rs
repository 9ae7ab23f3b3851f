// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files from one domain to another by `tombolo cat`, and many channels at once.

use super::{Case, Kind, Verdict, long};
use crate::many;
use crate::rig::{Pair, Rig};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;

pub const PV: &[Case] = &[
    Case { name: "pv_file_arrives_whole_in_the_other_domu", run: |rig| files(rig, Kind::Pv, "A", "B") },
    Case { name: "pv_file_arrives_whole_in_dom0", run: |rig| files(rig, Kind::Pv, "A", "dom0") },
    Case { name: "pv_file_arrives_whole_from_dom0", run: |rig| files(rig, Kind::Pv, "dom0", "B") },
    Case { name: "pv_many_channels_are_open_at_once", run: at_once },
    Case { name: "transfer_canary_file_that_was_changed_is_told_apart", run: changed },
    Case { name: "transfer_canary_grants_that_are_mapped_are_seen", run: seen },
];
pub const PVH: &[Case] = &[
    Case { name: "pvh_file_arrives_whole_in_the_other_domu", run: |rig| files(rig, Kind::Pvh, "A", "B") },
    Case { name: "pvh_file_arrives_whole_in_dom0", run: |rig| files(rig, Kind::Pvh, "B", "dom0") },
];

/// The end that is there first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Listener,
    Caller,
}

/// Sends a file of pseudo-random bytes, with either end there first. Nothing is left afterwards.
fn files(rig: &mut Rig, kind: Kind, from: &str, to: &str) -> Result<Verdict> {
    let pair = rig.pair(kind)?;
    for first in [First::Listener, First::Caller] {
        transfer(pair, from, to, first)?;
    }
    pair.check_clean()?;
    Ok(Verdict::Done)
}

fn transfer(pair: &mut Pair, from: &str, to: &str, first: First) -> Result<()> {
    let (source, target) = (pair.number(from), pair.number(to));
    let listen =
        format!("rm -f /tmp/got; tombolo cat --listen xen:{source}/file --receive-only --output /tmp/got --checksum");
    let connect = format!("tombolo cat --connect xen:{target}/file --wait 60 --send-only --checksum /tmp/file");
    pair.sh(from, "dd if=/dev/urandom of=/tmp/file bs=64k count=64 2>/dev/null; printf tail >> /tmp/file")?;
    let sum = pair.sh(from, "sha256sum </tmp/file")?;
    let sum = sum.split(' ').next().unwrap_or_default();
    let (listener, caller) = if first == First::Listener {
        let listener = pair.start(to, &listen)?;
        // The listener is there when its node is.
        pair.sh("dom0", &format!("until xenstore-read /local/domain/{target}/data/tombolo/{source}/file; do :; done"))?;
        (listener, pair.start(from, &connect)?)
    } else {
        let caller = pair.start(from, &connect)?;
        // The connecting side has looked for the listener once it has opened XenStore's device; from then on it looks
        // again and again.
        pair.sh(from, "until ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q xenbus; do :; done")?;
        (pair.start(to, &listen)?, caller)
    };
    let (sent, received) = (pair.done(from, caller)?, pair.done(to, listener)?);
    ensure!(sent.contains(sum) && received.contains(sum), "sent {sum}: {sent}; received: {received}");
    arrived(pair, to, sum).context(format!("{first:?} first, from {from}"))
}

/// Checks that what arrived has this checksum.
fn arrived(pair: &mut Pair, to: &str, sum: &str) -> Result<()> {
    let got = pair.sh(to, "sha256sum </tmp/got")?;
    ensure!(got.starts_with(sum), "{got} arrived in {to} instead of {sum}");
    Ok(())
}

/// Canary of the check in the cases above: it fails where one byte more has arrived than was sent.
fn changed(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    transfer(pair, "A", "B", First::Listener)?;
    let sum = pair.sh("A", "sha256sum </tmp/file")?;
    let sum = sum.split(' ').next().unwrap_or_default();
    arrived(pair, "B", sum)?;
    pair.sh("B", "printf X >> /tmp/got")?;
    ensure!(arrived(pair, "B", sum).is_err(), "a changed file passes for what was sent");
    Ok(Verdict::Done)
}

/// Opens many channels, in the long form as many as a domain's event channels allow; all of them are in use at once,
/// and none is left.
fn at_once(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    println!("{}", many::show(pair, if long() { 1000 } else { 100 })?.trim());
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Canary of the search for what is left behind: it finds an open channel.
fn seen(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let (a, b) = (pair.number("A"), pair.number("B"));
    let listener = pair.start("A", &format!("exec tombolo cat --listen xen:{b}/open --receive-only"))?;
    let caller = pair.start("B", &format!("sleep 600 | tombolo cat --connect xen:{a}/open --wait 60 --send-only"))?;
    let deadline = within(60);
    loop {
        let mapped = pair.mapped()?;
        let by = |mapper: u16| mapped.iter().any(|grant| grant.ends_with(&format!(" {mapper}")));
        if by(a) && by(b) {
            break;
        }
        if std::time::Instant::now() > deadline {
            return Err(Error::new(format!("an open channel is not among the grants {mapped:?}")));
        }
    }
    ensure!(pair.check_clean().is_err(), "an open channel passes for nothing");
    pair.at("A")?.kill(listener)?;
    // The sender notices the end, and the pipeline ends with it; its first half still sleeps.
    pair.sh("B", "killall sleep")?;
    pair.at("B")?.wait(caller, within(60))?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}
