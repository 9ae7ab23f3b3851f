// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Common parts of the cases with unmodified programs in two domUs: dom0's broker and its rules, hooks, `tombolo run`,
//! and its counts.

use super::{Kind, Verdict};
use crate::rig::{Pair, Rig};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::stream::sum_reports;

pub const DOMAINS: &str = "[xen]\ndomains = [\"A\", \"B\"]\n";
pub const RULES: &str = "[[allow]]\nfrom = \"A\"\nto = \"B\"\nservice = \"sockets-*\"\n\
    [[allow]]\nfrom = \"B\"\nto = \"A\"\nservice = \"sockets-*\"\n";
const STATE: &str = "/tmp/broker";
/// Address of B.
pub const ADDRESS: &str = "10.9.0.2";
/// Limits of granted pages: the one for these cases, and the usual one.
pub const PAGES: [usize; 2] = [16384, 1024];

/// Runs `what` while programs of both domains may find each other; leaves nothing behind.
pub fn as_neighbours(rig: &mut Rig, what: impl FnOnce(&mut Pair) -> Result<()>) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    allow_pages(pair, PAGES[0])?;
    let broker = start_broker(pair)?;
    for domain in ["A", "B"] {
        attach_hook(pair, domain)?;
    }
    what(pair)?;
    for domain in ["A", "B"] {
        pair.sh(domain, "tombolo hook detach")?;
    }
    pair.at("dom0")?.kill(broker)?;
    pair.sh("dom0", &format!("killall tombolod; rm -r {STATE}; for id in $(xenstore-list /local/domain); do xenstore-rm /local/domain/$id/tombolo; done"))?;
    allow_pages(pair, PAGES[1])?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}

pub fn allow_pages(pair: &mut Pair, pages: usize) -> Result<()> {
    let raise = format!("echo {pages} > /sys/module/xen_gntalloc/parameters/limit");
    ["A", "B"].into_iter().try_for_each(|domain| pair.sh(domain, &raise).map(drop))
}

fn start_broker(pair: &mut Pair) -> Result<Job> {
    configure(pair, &[DOMAINS, RULES])?;
    let broker = pair.start("dom0", &format!("exec tombolod --config {STATE}/toml --state {STATE}"))?;
    let deadline = within(60);
    while !pair.at("dom0")?.line(broker, deadline).context("tombolod")?.contains("told names") {}
    await_record(pair)?;
    Ok(broker)
}

/// Writes the configuration of dom0's broker.
pub fn configure(pair: &mut Pair, parts: &[&str]) -> Result<()> {
    let text = parts.concat().replace('\n', "\\n");
    pair.sh("dom0", &format!("mkdir -p {STATE}; printf '%b' '{text}' >{STATE}/toml")).map(drop)
}

/// Waits until the broker has told B about A.
pub fn await_record(pair: &mut Pair) -> Result<()> {
    let (a, b) = (pair.number("A"), pair.number("B"));
    pair.sh("dom0", &format!("until xenstore-read /local/domain/{b}/tombolo/{a}; do :; done")).map(drop)
}

/// Returns the command that runs `program` and counts into `folder`.
pub fn under_run(folder: &str, program: &str) -> String {
    format!(
        "export TOMBOLO_SOCKETS_XEN=on; exec tombolo run --folder /tmp/meeting --report {folder} --log {folder}.log -- {program}"
    )
}

/// Returns the bytes over TCP and through memory that programs of a domain counted in a folder.
pub fn counted(pair: &mut Pair, at: &str, folder: &str) -> Result<[u64; 2]> {
    sum_reports(&pair.sh(at, &format!("for it in {folder}/*; do cat $it; echo; done"))?)
}

/// Sends a stream that is checked. Returns how many of its bytes the sender counted over TCP and through memory.
pub fn stream(pair: &mut Pair, folder: &str, millis: &str) -> Result<[u64; 2]> {
    let receiver = pair.start("B", &under_run(folder, "/agent stream-receive"))?;
    let listens = pair.at("B")?.line(receiver, within(60))?;
    ensure!(listens.contains("listens"), "{listens}");
    pair.sh("A", &under_run(folder, &format!("/agent stream-send {ADDRESS} {millis}")))?;
    pair.done("B", receiver)?;
    counted(pair, "A", folder)
}

/// Makes the kernel of `domain` tell programs the sequence numbers of their connections.
pub fn attach_hook(pair: &mut Pair, domain: &str) -> Result<()> {
    let mount = "mkdir -p /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup";
    let attach = format!("mountpoint -q /sys/fs/cgroup || {{ {mount}; }}; tombolo hook attach");
    pair.sh(domain, &attach).map(drop)
}
