// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rig itself: a fault in a guest's kernel must not go unseen.

use super::{Case, Verdict};
use crate::rig::Rig;
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::qemu::Vm;

pub const CASES: &[Case] = &[
    Case { name: "rig_canary_fault_on_the_console_fails", run: fault },
    Case { name: "rig_canary_guest_that_panics_fails", run: panic },
];

fn fault(rig: &mut Rig) -> Result<Verdict> {
    let mut vm = Vm::boot(rig.parts.spec("faulty")?)?;
    vm.run(&["/agent", "guest", "lifetime::say", "WARNING: planted"], within(60))?;
    let why = vm.finish().err().map(|why| why.to_string()).unwrap_or_default();
    ensure!(why.contains("tells of a fault") && why.contains("planted"), "the fault went unseen: {why}");
    Ok(Verdict::Done)
}

fn panic(rig: &mut Rig) -> Result<Verdict> {
    let mut vm = Vm::boot(rig.parts.spec("panicky")?)?;
    let why = vm.run(&["/agent", "guest", "lifetime::panic"], within(60)).err().map(|why| why.to_string());
    let why = why.unwrap_or_default();
    ensure!(why.contains("the guest is gone"), "the panic went unseen: {why}");
    ensure!(vm.finish().is_err(), "a guest that went passes");
    Ok(Verdict::Done)
}
