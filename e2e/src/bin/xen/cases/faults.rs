// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rig itself: a fault in a domain's kernel must not go unseen.

use super::{Case, Kind, Verdict};
use crate::rig::Rig;
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;

pub const CASES: &[Case] = &[Case { name: "rig_canary_fault_on_a_domus_console_fails", run: fault }];

/// This case is the last: the fault stays on the console, so the domains are not used again.
fn fault(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pvh)?;
    pair.host.check()?;
    pair.sh("B", "echo '<2>WARNING: planted' > /dev/kmsg")?;
    let why = pair.host.check().err().map(|why| why.to_string()).unwrap_or_default();
    ensure!(why.contains("planted"), "the fault went unseen: {why}");
    rig.forget();
    Ok(Verdict::Done)
}
