// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unmodified programs in two domUs, started by `tombolo run`: their TCP connections go through memory. dom0's broker says who may
//! reach whom; nobody gives the programs a name, a number or a right.

use super::{Case, Kind, Verdict};
use crate::rig::{Pair, Rig};
use crate::unmodified;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::stream::sum_reports;

pub const PV: &[Case] = &[Case { name: "pv_s17_s18_programs_in_two_domains_talk_through_memory", run: sockets }];

const DOMAINS: &str = "[xen]\ndomains = [\"A\", \"B\"]\n";
const RULES: &str = "[[allow]]\nfrom = \"A\"\nto = \"B\"\nservice = \"sockets-*\"\n\
    [[allow]]\nfrom = \"B\"\nto = \"A\"\nservice = \"sockets-*\"\n";
const STATE: &str = "/tmp/broker";
/// Where B is.
const ADDRESS: &str = "10.9.0.2";
/// Pages that may be granted, for this case and otherwise.
const PAGES: [usize; 2] = [16384, 1024];
/// How many times as much through memory is the least (`tombolo run` between domUs).
const LEAST: f64 = 1.5;

fn sockets(rig: &mut Rig) -> Result<Verdict> {
    if let Some(missing) = unmodified::missing() {
        return Ok(Verdict::Skip { need: "iperf3 and redis", why: format!("no {missing}") });
    }
    as_neighbours(rig, |pair| {
        checked(pair)?;
        iperf(pair)?;
        redis(pair)?;
        // Canary: who is told no numbers proves nothing, and all goes over TCP.
        pair.sh("B", "tombolo hook detach")?;
        let [tcp, memory] = stream(pair, "/tmp/canary", "1000")?;
        ensure!(tcp > 0 && memory == 0, "without numbers {memory} bytes went through memory");
        attach_hook(pair, "B")
    })
}

/// Does `what` while programs of both domains may find each other; it leaves nothing behind.
fn as_neighbours(rig: &mut Rig, what: impl FnOnce(&mut Pair) -> Result<()>) -> Result<Verdict> {
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

fn allow_pages(pair: &mut Pair, pages: usize) -> Result<()> {
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

/// Writes dom0's configuration.
fn configure(pair: &mut Pair, parts: &[&str]) -> Result<()> {
    let text = parts.concat().replace('\n', "\\n");
    pair.sh("dom0", &format!("mkdir -p {STATE}; printf '%b' '{text}' >{STATE}/toml")).map(drop)
}

/// Until B is told of A.
fn await_record(pair: &mut Pair) -> Result<()> {
    let (a, b) = (pair.number("A"), pair.number("B"));
    pair.sh("dom0", &format!("until xenstore-read /local/domain/{b}/tombolo/{a}; do :; done")).map(drop)
}

/// `program`, counting into `folder`.
fn under_run(folder: &str, program: &str) -> String {
    format!(
        "export TOMBOLO_SOCKETS_XEN=on; exec tombolo run --folder /tmp/meeting --report {folder} --log {folder}.log -- {program}"
    )
}

/// Bytes over TCP and through memory that programs of a domain counted in a folder.
fn counted(pair: &mut Pair, at: &str, folder: &str) -> Result<[u64; 2]> {
    sum_reports(&pair.sh(at, &format!("for it in {folder}/*; do cat $it; echo; done"))?)
}

/// At least 95 % of what both ends counted went through memory.
fn ensure_through_memory(pair: &mut Pair, folder: &str) -> Result<f64> {
    let (a, b) = (counted(pair, "A", folder)?, counted(pair, "B", folder)?);
    let (tcp, memory) = (a[0] + b[0], a[1] + b[1]);
    if memory == 0 || memory / 19 < tcp {
        let logs = pair.sh("A", &format!("cat {folder}.log"))? + &pair.sh("B", &format!("cat {folder}.log"))?;
        return Err(Error::new(format!("{folder}: {tcp} bytes over TCP, {memory} through memory\n{logs}")));
    }
    Ok(memory as f64 / (tcp + memory) as f64)
}

/// A stream that is checked; how much of it its sender counted over TCP and through memory.
fn stream(pair: &mut Pair, folder: &str, millis: &str) -> Result<[u64; 2]> {
    let receiver = pair.start("B", &under_run(folder, "/agent stream-receive"))?;
    let listens = pair.at("B")?.line(receiver, within(60))?;
    ensure!(listens.contains("listens"), "{listens}");
    pair.sh("A", &under_run(folder, &format!("/agent stream-send {ADDRESS} {millis}")))?;
    pair.done("B", receiver)?;
    counted(pair, "A", folder)
}

fn checked(pair: &mut Pair) -> Result<()> {
    // Its ends find each other while little is sent.
    stream(pair, "/tmp/checked", "5000 /tmp/checked.log")?;
    let share = ensure_through_memory(pair, "/tmp/checked")?;
    println!("a stream that is checked: {:.1} % through memory", 100.0 * share);
    Ok(())
}

/// Bytes in a second that `iperf3` says.
fn rate(said: &str) -> Result<f64> {
    let sum = said.split("\"sum_received\":").nth(1).and_then(|rest| rest.split("\"bits_per_second\":").nth(1));
    let number = sum.and_then(|rest| rest.split([',', '}']).next()).map(str::trim);
    Ok(number.ok_or_else(|| Error::new(format!("iperf3 says {said}")))?.parse::<f64>()? / 8.0)
}

fn iperf(pair: &mut Pair) -> Result<()> {
    let plain = iperf_once(pair, None, 4)?;
    let mut memory = iperf_once(pair, Some("/tmp/iperf"), 10)?;
    // On a machine that has no time the ends find each other late.
    let share = ensure_through_memory(pair, "/tmp/iperf").or_else(|_| {
        memory = iperf_once(pair, Some("/tmp/iperf-long"), 40)?;
        ensure_through_memory(pair, "/tmp/iperf-long")
    })?;
    println!("iperf3: {plain:.1} MB/s over vif, {memory:.1} under tombolo run; {:.1} % through memory", 100.0 * share);
    ensure!(memory >= LEAST * plain, "iperf3: {memory:.0} MB/s, and {plain:.0} over TCP");
    Ok(())
}

/// Megabytes in a second, under `tombolo run` where that is to count into a folder.
fn iperf_once(pair: &mut Pair, folder: Option<&str>, seconds: u32) -> Result<f64> {
    let line = |program: &str| folder.map_or_else(|| format!("exec {program}"), |folder| under_run(folder, program));
    let server = pair.start("B", &line("iperf3 -s -1 --forceflush"))?;
    while !pair.at("B")?.line(server, within(60))?.contains("listening") {}
    let said = pair.sh("A", &line(&format!("iperf3 -c {ADDRESS} -t {seconds} -i 0 --json")))?;
    pair.done("B", server)?;
    Ok(rate(&said)? / 1e6)
}

fn redis(pair: &mut Pair) -> Result<()> {
    let server = "redis-server --protected-mode no --save '' --dir /tmp --port 6379";
    let server = pair.start("B", &under_run("/tmp/redis", server))?;
    let ready = format!("until echo PING | nc -w 2 {ADDRESS} 6379 | grep -q PONG; do usleep 100000; done");
    pair.sh("A", &ready).context("redis-server")?;
    let ask = format!("redis-benchmark -h {ADDRESS} -t get -d 500 --csv");
    for (clients, requests) in [(1, 3000), (8, 8000)] {
        let mut rates = [0.0; 2];
        let folder = format!("/tmp/redis{clients}");
        let plain = format!("exec {ask} -c {clients} -n {}", requests / 2);
        let memory = under_run(&folder, &format!("{ask} -c {clients} -n {requests}"));
        for (rate, line) in rates.iter_mut().zip([plain, memory]) {
            let said = pair.sh("A", &line)?;
            let number = said.lines().find(|line| line.starts_with("\"GET\"")).and_then(|line| line.split('"').nth(3));
            *rate = number.ok_or_else(|| Error::new(format!("redis-benchmark says {said}")))?.parse()?;
        }
        let [tcp, shared] = counted(pair, "A", &folder)?;
        let [plain, memory] = rates;
        println!(
            "Redis, {clients} clients: {plain:.0} a second over vif, {memory:.0} under tombolo run; {tcp} and {shared} bytes"
        );
        ensure!(shared / 9 >= tcp, "Redis, {clients} clients: {tcp} bytes over TCP, {shared} through memory");
    }
    pair.sh("B", "killall redis-server")?;
    pair.at("B")?.wait(server, within(60)).map(drop)
}

/// The kernel of `domain` tells programs the numbers of their connections.
fn attach_hook(pair: &mut Pair, domain: &str) -> Result<()> {
    let mount = "mkdir -p /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup";
    let attach = format!("mountpoint -q /sys/fs/cgroup || {{ {mount}; }}; tombolo hook attach");
    pair.sh(domain, &attach).map(drop)
}
