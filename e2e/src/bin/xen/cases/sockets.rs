// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unmodified programs in two domUs, started by `tombolo run`: their TCP connections go through memory. dom0's broker
//! decides who may connect to whom. Nobody gives the programs a name, a number or a right.

use super::neighbours::{ADDRESS, as_neighbours, attach_hook, counted, stream, under_run};
use super::{Case, Verdict};
use crate::rig::{Pair, Rig};
use crate::unmodified::{self, SLEEPLESS};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;

pub const PV: &[Case] = &[Case { name: "pv_s17_s18_programs_in_two_domains_talk_through_memory", run: sockets }];

/// Least ratio of the rate through memory to that over TCP (`tombolo run` between domUs).
const LEAST: f64 = 1.5;

fn sockets(rig: &mut Rig) -> Result<Verdict> {
    if let Some(missing) = unmodified::missing() {
        return Ok(Verdict::Skip { need: "iperf3 and redis", why: format!("no {missing}") });
    }
    as_neighbours(rig, |pair| {
        checked(pair)?;
        iperf(pair)?;
        redis(pair)?;
        // Canary: a program that gets no sequence numbers can prove nothing, and everything goes over TCP.
        pair.sh("B", "tombolo hook detach")?;
        let [tcp, memory] = stream(pair, "/tmp/canary", "1000")?;
        ensure!(tcp > 0 && memory == 0, "without numbers {memory} bytes went through memory");
        attach_hook(pair, "B")
    })
}

/// Checks that at least 95 % of what both ends counted went through memory. Returns the share.
fn ensure_through_memory(pair: &mut Pair, folder: &str) -> Result<f64> {
    let (a, b) = (counted(pair, "A", folder)?, counted(pair, "B", folder)?);
    let (tcp, memory) = (a[0] + b[0], a[1] + b[1]);
    if memory == 0 || memory / 19 < tcp {
        let logs = pair.sh("A", &format!("cat {folder}.log"))? + &pair.sh("B", &format!("cat {folder}.log"))?;
        return Err(Error::new(format!("{folder}: {tcp} bytes over TCP, {memory} through memory\n{logs}")));
    }
    Ok(memory as f64 / (tcp + memory) as f64)
}

fn checked(pair: &mut Pair) -> Result<()> {
    // The ends find each other while little is sent.
    stream(pair, "/tmp/checked", "5000 /tmp/checked.log")?;
    let share = ensure_through_memory(pair, "/tmp/checked")?;
    println!("a stream that is checked: {:.1} % through memory", 100.0 * share);
    Ok(())
}

/// Returns the bytes per second that `iperf3` reports.
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

/// Returns the megabytes per second, under `tombolo run` if it has to count into a folder.
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
    sleepless(pair)?;
    pair.sh("B", "killall redis-server")?;
    pair.at("B")?.wait(server, within(60)).map(drop)
}

/// Runs a client that always has something to do, with a Redis server that is already there: the client must learn of
/// the answers too.
fn sleepless(pair: &mut Pair) -> Result<()> {
    let folder = "/tmp/sleepless";
    let said = pair.sh("A", &under_run(folder, &format!("{SLEEPLESS} {ADDRESS} 3000")))?;
    println!("a client that never sleeps: {said}");
    // The connection with room is in memory too: the kernel is asked about that room as it is before a sleep.
    let log = pair.sh("A", &format!("cat {folder}.log"))?;
    ensure!(log.matches(" joined: ").count() == 2, "not both of its connections were in memory: {log}");
    Ok(())
}
