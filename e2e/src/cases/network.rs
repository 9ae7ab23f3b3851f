// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks the network that channels are compared with: if it were not as it should be, no comparison would be valid.

use super::{Case, Verdict};
use crate::demo;
use crate::rig::Rig;
use crate::site::{Purpose, Site};
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::network::Network;

pub const CASES: &[Case] = &[Case { name: "network_joins_machines_and_host_in_large_segments", run: joins }];

pub const LONG_CASES: &[Case] = &[
    Case { name: "demo_moves_a_file_and_compares", run: demo },
    Case { name: "sockets_demo_compares_and_migrates", run: sockets },
];

fn joins(rig: &mut Rig) -> Result<Verdict> {
    rig.rest()?;
    let mut site = Site::boot(&rig.parts, Purpose::Measuring)?;
    let host = match &site.network {
        Ok(network) => network.host(),
        Err(why) => return Ok(Verdict::Skip { need: "netns", why: why.to_string() }),
    };
    for target in [site.addresses[1].clone(), host] {
        site.a.sh(&format!("ping -c 3 -W 20 {target}"), within(60))?;
    }
    // The card supports segments beyond an Ethernet frame: it is as good as QEMU offers.
    let features = site.a.sh("cat /sys/class/net/eth0/device/features", within(20))?;
    for bit in [11, 7, 0, 1] {
        ensure!(features.as_bytes().get(bit) == Some(&b'1'), "the card cannot do {bit}: {features}");
    }
    site.finish()?;
    Ok(Verdict::Done)
}

/// Runs what `make vm-demo` shows, with samples too short to mean anything.
fn demo(rig: &mut Rig) -> Result<Verdict> {
    if let Err(why) = Network::open() {
        return Ok(Verdict::Skip { need: "netns", why: why.to_string() });
    }
    rig.rest()?;
    demo::run(&rig.parts, demo::QUICK, &demo::PARTS)?;
    Ok(Verdict::Done)
}

/// Runs what `make vm-sockets-demo` shows, once.
fn sockets(rig: &mut Rig) -> Result<Verdict> {
    if let Some(missing) = super::sockets::missing() {
        return Ok(Verdict::Skip { need: "iperf3", why: format!("no {missing}") });
    }
    if let Err(why) = Network::open() {
        return Ok(Verdict::Skip { need: "netns", why: why.to_string() });
    }
    rig.rest()?;
    demo::sockets::run(&rig.parts, 1).map(|()| Verdict::Done)
}
