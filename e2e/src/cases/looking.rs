// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests what `tombolo ls` shows of channels and listeners between machines, and with their host.

use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site, start};
use serde_json::Value;
use std::process::Stdio;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::until;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::process::Process;

pub const CASES: &[Case] =
    &[Case { name: "b20_ls_shows_channels_and_listeners_of_both_machines_and_of_their_host", run: shown }];

/// Sends a word, and then nothing without end.
const SEND: &str = "(echo word; exec tail -f /dev/null) | tombolo cat --wait 60 --connect";
/// Sends nothing without end.
const RECEIVE: &str = "tail -f /dev/null | tombolo cat --listen";

fn shown(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    site.link("a", "host")?;
    let mut host = site.broker.command(&[], &["cat", "--listen", "vm:host/seen"])?;
    let _host = Process::start(host.stdin(Stdio::piped()).stdout(Stdio::null()))?;
    for address in ["vm:b/seen", "vm:b/idle"] {
        site.b.start(&["sh", "-c", &format!("{RECEIVE} {address}")])?;
    }
    for address in ["vm:b/seen", "vm:host/seen"] {
        site.a.start(&["sh", "-c", &format!("{SEND} {address}")])?;
    }
    let done = looked(site);
    for at in [At::A, At::B] {
        _ = site.vm(at).sh("killall tombolo tail", within(60));
    }
    done.map(|()| Verdict::Done)
}

/// Place in which `tombolo ls` runs.
#[derive(Clone, Copy)]
enum Where {
    In(At),
    Host,
}

fn looked(site: &mut Site) -> Result<()> {
    // The sender is in a, the receivers are in b and on the host; five bytes went one way.
    let of_a = await_word(site, Where::In(At::A), "vm:b/seen", 0)?;
    check(&of_a, "b", false)?;
    let of_b = await_word(site, Where::In(At::B), "vm:b/seen", 1)?;
    check(&of_b, "a", true)?;
    ensure!(of_a["machine"]["link"] == of_b["machine"]["link"], "two links: {of_a} {of_b}");
    ensure!(of_a["pipes"][0]["ring"] == of_b["pipes"][1]["ring"], "two rings: {of_a} {of_b}");
    let with_host = await_word(site, Where::In(At::A), "vm:host/seen", 0)?;
    check(&with_host, "host", false)?;
    let of_host = await_word(site, Where::Host, "vm:host/seen", 1)?;
    check(&of_host, "a", true)?;

    let listens = |rows: &[Value]| {
        rows.iter().any(|row| row["type"] == "listener" && row["address"] == "vm:b/idle" && row["command"] == "tombolo")
    };
    let rows = ls(site, Where::In(At::B))?;
    ensure!(listens(&rows), "nobody listens at vm:b/idle: {rows:?}");
    ensure!(!listens(&ls(site, Where::In(At::A))?), "it listens in a");

    // Another user sees nothing that belongs to root.
    let job = start(&mut site.a, "channels::nobody", &["tombolo ls --json"])?;
    let said = site.a.wait(job, within(60))?.success()?;
    ensure!(said.contains("\"summary\"") && !said.contains("vm:"), "somebody sees what is root's: {said}");
    let text = site.a.sh("tombolo ls; tombolo top --once", within(60))?;
    ensure!(text.contains("-> machine b") && text.contains(">b "), "not for people: {text}");

    site.b.qmp.run("stop", &serde_json::json!({}))?;
    let paused = await_row(site, Where::In(At::A), "vm:b/seen", "paused");
    site.b.qmp.run("cont", &serde_json::json!({}))?;
    let life = &paused?["machine"]["life"];
    ensure!(life == "paused", "its machine is {life}");
    await_row(site, Where::In(At::A), "vm:b/seen", "open").map(drop)
}

/// Checks the row of a channel with `machine`.
fn check(row: &Value, machine: &str, listened: bool) -> Result<()> {
    let sound = row["machine"]["name"] == machine
        && row["machine"]["life"] == "running"
        && row["ends"][0]["listened"] == listened
        && row["ends"][0]["command"] == "tombolo"
        && row["age"].is_number();
    if sound { Ok(()) } else { Err(Error::new(format!("{row}"))) }
}

/// Waits until the channel of that address has that state, and returns it.
fn await_row(site: &mut Site, place: Where, address: &str, state: &str) -> Result<Value> {
    await_channel(site, place, address, state, |row| row["state"] == state)
}

/// Waits until the channel of that address is open and its pipe `pipe` has carried a word, and returns it.
fn await_word(site: &mut Site, place: Where, address: &str, pipe: usize) -> Result<Value> {
    await_channel(site, place, address, "open, with a word", |row| {
        let pipe = &row["pipes"][pipe];
        row["state"] == "open" && pipe["bytes"] == 5 && pipe["ring"].as_u64() > Some(0)
    })
}

/// Waits until `is` holds for the channel of that address, and returns it. `wanted` describes the condition.
fn await_channel(
    site: &mut Site,
    place: Where,
    address: &str,
    wanted: &str,
    is: impl Fn(&Value) -> bool,
) -> Result<Value> {
    let mut last = Vec::new();
    let mut found = None;
    let waited = until(within(60), || {
        last = ls(site, place).unwrap_or_default();
        found = last.iter().find(|row| row["type"] == "channel" && row["address"] == address && is(row)).cloned();
        found.is_some()
    });
    waited.context(format!("{address} is not {wanted}: {last:?}"))?;
    found.ok_or_else(|| Error::new("found and lost"))
}

fn ls(site: &mut Site, place: Where) -> Result<Vec<Value>> {
    let text = match place {
        Where::In(at) => site.vm(at).sh("tombolo ls --json", within(60))?,
        Where::Host => site.broker.tombolo(&["ls", "--json"])?,
    };
    Ok(text.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>()?)
}
