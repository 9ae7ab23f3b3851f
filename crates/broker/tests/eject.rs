// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests that eject their devices, at the worst moments (B-10). Their QEMU must not get another device for that
//! memory: that would end it.

mod common;

use common::{Daemon, TRIO, Vm, qmp, until};
use tombolo_control::{LinkState, Message};

/// Returns two machines with a link that is up.
fn linked() -> (Daemon, Vm, Vm) {
    let daemon = Daemon::start(TRIO);
    let (a, b) = (Vm::start(&daemon, "a"), Vm::start(&daemon, "b"));
    daemon.client().link("a", "b");
    let up = |row: &Message| matches!(row, Message::LinkRow { state: LinkState::Up, .. });
    until("the link is up", || daemon.client().links().iter().any(up).then_some(()));
    (daemon, a, b)
}

/// Returns a machine's device that reads what its peer writes. QEMU could open this memory once more.
fn reading(vm: &Vm) -> String {
    let state = vm.qmp.state();
    state.devices.keys().find(|device| device.ends_with("peer")).expect("the link has two").clone()
}

/// Waits until the note says that a region was ejected, and checks that it was not plugged again.
fn is_told_and_not_plugged_again(daemon: &Daemon, vm: &Vm, device: &str) {
    let noted = || {
        let is_ejected = |row: Message| match row {
            Message::LinkRow { note, .. } => note.as_str().contains("ejected a region"),
            _ => false,
        };
        daemon.client().links().into_iter().any(is_ejected)
    };
    until("it is said, or done wrongly", || (noted() || !vm.qmp.state().plugged_twice.is_empty()).then_some(()));
    let state = vm.qmp.state();
    assert!(state.plugged_twice.is_empty(), "{:?} got a second device", state.plugged_twice);
    assert!(!state.devices.contains_key(device), "{device} is there again");
}

#[test]
fn b10_region_that_was_ejected_while_nobody_listened_is_not_plugged_again() {
    let (daemon, a, _b) = linked();
    let device = reading(&a);
    let mut state = a.qmp.state();
    let before = state.conversations;
    qmp::Fake::hang_up(&mut state);
    state.devices.remove(&device);
    drop(state);
    until("the broker is back", || (a.qmp.state().conversations > before).then_some(()));
    is_told_and_not_plugged_again(&daemon, &a, &device);
}

#[test]
fn b10_region_that_is_ejected_while_it_is_looked_at_is_no_loss() {
    let (daemon, a, _b) = linked();
    let device = reading(&a);
    let mut state = a.qmp.state();
    let before = state.conversations;
    state.shy = Some(device.clone());
    drop(state);
    // The broker checks, whichever device went.
    a.qmp.event("DEVICE_DELETED");
    until("it was looked at", || a.qmp.state().shy.is_none().then_some(()));
    is_told_and_not_plugged_again(&daemon, &a, &device);
    assert_eq!(a.qmp.state().conversations, before, "the conversation was given up");
}
