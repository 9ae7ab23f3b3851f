// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unmodified programs in two machines, started by `tombolo run`: their TCP connections go through memory. They find
//! each other through their brokers, and prove their identity by what their kernels know. Nobody gives them a folder, a
//! name or a right.

use super::{Case, Half, Verdict};
use crate::parts::Parts;
use crate::rig::Rig;
use crate::site::{At, CONFIG, Plan, Purpose, Site, line};
use std::path::Path;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::image::Extra;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::network::Network;
use tombolo_e2e::programs::Programs;
use tombolo_e2e::stream::{self, sum_reports};
use tombolo_e2e::vchan;

pub const CASES: &[Case] = &[
    Case { name: "s17_s18_s19_s22_programs_in_two_machines_talk_through_memory_while_there_is_a_link", run: talk },
    Case { name: "s18_connections_that_come_and_go_at_once_hold_nobody_up", run: come_and_go },
    Case { name: "s19_child_that_has_a_connection_leaves_memory_that_goes", run: child },
    Case { name: "s19_what_a_sender_left_before_it_ended_is_read_after_memory_went", run: late },
];

/// Word that precedes the name of a half.
pub const HALF: &str = "guest";
/// Halves of a stream: the sender, and the receiver that checks it.
pub const SEND: &str = "sockets::send";
pub const RECEIVE: &str = "sockets::receive";

pub const HALVES: &[Half] = &[(SEND, stream::send), (RECEIVE, |_| stream::receive())];

pub const IPERF: &str = "/usr/bin/iperf3";
const REDIS: [&str; 2] = ["/usr/bin/redis-server", "/usr/bin/redis-benchmark"];
pub const SOCKPERF: &str = "/usr/bin/sockperf";
/// Programs that fork with a connection, and in which everything happens at once.
const FORKS: &str = "bin/forks";
const STRESS: &str = "bin/stress";

/// Returns the first required program that this host lacks; without these the case shows nothing.
pub fn missing() -> Option<&'static str> {
    [IPERF].into_iter().chain(REDIS).find(|program| !Path::new(program).exists())
}

/// Returns the library, and the programs that this host has.
fn programs() -> Result<Vec<Extra>> {
    let library = Programs::shared("tombolo-preload", "libtombolo_preload.so")?;
    let there = [IPERF, SOCKPERF].into_iter().chain(REDIS).filter(|program| Path::new(program).exists());
    let named = there.map(|program| (program.trim_start_matches("/usr/").to_owned(), program.into()));
    let forks = vchan::compile("forks", &vchan::here("src/forks.c"), |_| ())?;
    let stress = vchan::here("../crates/compat/preload/tests/programs/stress.c");
    let stress = vchan::compile("stress", &stress, |cc| _ = cc.arg("-pthread"))?;
    let ours = [("bin/libtombolo_preload.so", library), (FORKS, forks), (STRESS, stress)];
    Ok(named.chain(ours.map(|(place, file)| (place.to_owned(), file))).collect())
}

/// Boots two machines with a network, and with programs that know nothing of each other.
pub fn boot(parts: &Parts, purpose: Purpose) -> Result<Site> {
    let plan = Plan { purpose, config: CONFIG, modules: &[], programs: &programs()? };
    let mut site = Site::boot_with(parts, &plan, |_| Ok(()))?;
    site.link("a", "b")?;
    Ok(site)
}

/// Bytes that the rings of a busy connection hold, including the previous ring.
pub const RING: u64 = 2 << 20;

/// Returns the bytes over TCP and through memory, of all processes whose counts are in a folder of a machine.
pub fn counted(site: &mut Site, at: At, folder: &str) -> Result<[u64; 2]> {
    sum_reports(&site.vm(at).sh(&format!("for it in {folder}/*; do cat $it; echo; done"), within(60))?)
}

/// Returns the share of bytes through memory that programs in a counted. Fails if it is below 95 %.
pub fn share(site: &mut Site, folder: &str) -> Result<f64> {
    let [tcp, memory] = counted(site, At::A, folder)?;
    ensure!(memory > 0 && memory / 19 >= tcp, "{folder}: {tcp} bytes over TCP, {memory} through memory");
    Ok(memory as f64 / (tcp + memory) as f64)
}

/// Starts a program in a machine. The program's counts go into a folder of its own.
pub fn start(site: &mut Site, at: At, folder: &str, program: &[&str]) -> Result<Job> {
    site.vm(at).start(&[&["tombolo", "run", "--report", folder, "--"], program].concat())
}

fn run(site: &mut Site, name: &str, program: &[&str]) -> Result<String> {
    let job = start(site, At::A, name, program)?;
    site.a.wait(job, within(180))?.success().context(program.join(" "))
}

/// Checks that at least 95 % of what both ends counted went through memory.
fn ensure_through_memory(site: &mut Site, what: &str, folders: [&str; 2]) -> Result<()> {
    let (a, b) = (counted(site, At::A, folders[0])?, counted(site, At::B, folders[1])?);
    let (tcp, memory) = (a[0] + b[0], a[1] + b[1]);
    ensure!(memory > 0 && memory / 19 >= tcp, "{what}: {tcp} bytes over TCP, {memory} through memory");
    Ok(())
}

fn iperf(site: &mut Site, address: &str) -> Result<()> {
    let server = start(site, At::B, "/tmp/iperf", &["iperf3", "-s", "-1", "--forceflush"])?;
    line(&mut site.b, server, "Server listening", within(60))?;
    run(site, "/tmp/iperf", &["iperf3", "-c", address, "-n", "600M"])?;
    site.b.wait(server, within(60))?.success().context("iperf3 -s")?;
    ensure_through_memory(site, "iperf3", ["/tmp/iperf", "/tmp/iperf"])
}

fn start_redis(site: &mut Site, address: &str) -> Result<Job> {
    let words = ["redis-server", "--protected-mode", "no", "--save", "", "--port", "6379"];
    let server = start(site, At::B, "/tmp/redis", &words)?;
    let ready = format!("echo PING | nc -w 2 {address} 6379 | grep -q PONG");
    site.a.sh(&format!("until {ready}; do usleep 100000; done"), within(60)).context("redis-server")?;
    Ok(server)
}

fn redis(site: &mut Site, address: &str) -> Result<()> {
    let server = start_redis(site, address)?;
    for clients in ["1", "8"] {
        let folder = format!("/tmp/redis{clients}");
        let words = ["redis-benchmark", "-h", address, "-n", "6000", "-c", clients, "-t", "set,get", "-d", "500", "-q"];
        run(site, &folder, &words)?;
        share(site, &folder)?;
    }
    site.b.kill(server)?;
    site.b.wait(server, within(60)).map(drop)
}

/// Checks a stream; `meanwhile` happens once it flows. Returns how many bytes went over TCP and through memory.
fn transfer(
    site: &mut Site,
    (address, millis, name): (&str, &str, &str),
    meanwhile: impl FnOnce(&mut Site) -> Result<()>,
) -> Result<[u64; 2]> {
    let receiver = start(site, At::B, name, &["/agent", "guest", "sockets::receive"])?;
    line(&mut site.b, receiver, "listens", within(60))?;
    let sender = start(site, At::A, name, &["/agent", "guest", "sockets::send", address, millis])?;
    meanwhile(site)?;
    site.a.wait(sender, within(120))?.success().context("who sends")?;
    site.b.wait(receiver, within(60))?.success().context("who receives")?;
    let (a, b) = (counted(site, At::A, name)?, counted(site, At::B, name)?);
    // Bytes that were in the ring when the link was left were sent through memory, and received over TCP.
    let recalled = a[1].checked_sub(b[1]);
    let fits = a.iter().sum::<u64>() == b.iter().sum::<u64>() && recalled.is_some_and(|bytes| bytes <= RING);
    ensure!(fits, "{name}: who sends counts {a:?}, who receives {b:?}");
    Ok(a)
}

/// Waits until a process in a uses shared memory: the report is renewed as bytes move.
pub fn until_in_memory(site: &mut Site, folder: &str) -> Result<()> {
    let has = format!("until grep -q '\"joined\":1' {folder}/* 2>/dev/null; do usleep 50000; done");
    site.a.sh(&has, within(60)).context("nothing is joined").map(drop)
}

/// Runs `case` in the two machines with a network, which have a link. They serve all such cases.
pub fn at_site(rig: &mut Rig, case: impl FnOnce(&mut Site) -> Result<Verdict>) -> Result<Verdict> {
    if let Err(why) = Network::open() {
        return Ok(Verdict::Skip { need: "netns", why: why.to_string() });
    }
    let site = rig.site_for(Purpose::Networked, |parts| boot(parts, Purpose::Networked))?;
    site.link("a", "b")?;
    case(site)
}

fn talk(rig: &mut Rig) -> Result<Verdict> {
    if let Some(missing) = missing() {
        return Ok(Verdict::Skip { need: "iperf3", why: format!("no {missing}") });
    }
    at_site(rig, |site| through_it(site).map(|()| Verdict::Done))
}

/// Many connections at once, most of which end before they have sent anything, delay nobody; and those that stay get
/// memory.
fn come_and_go(rig: &mut Rig) -> Result<Verdict> {
    if let Some(missing) = REDIS.into_iter().find(|program| !Path::new(program).exists()) {
        return Ok(Verdict::Skip { need: "redis", why: format!("no {missing}") });
    }
    at_site(rig, |site| many_at_once(site).map(|()| Verdict::Done))
}

/// At each end a child continues its parent's connection while the parent sleeps. The children learn that the link
/// goes, and no byte is lost.
fn child(rig: &mut Rig) -> Result<Verdict> {
    at_site(rig, |site| leave_in_child(site).map(|()| Verdict::Done))
}

fn leave_in_child(site: &mut Site) -> Result<()> {
    let address = site.addresses[1].clone();
    let wrapped = |words: &str| {
        format!(
            "rm -f /tmp/log; SECONDS=8 tombolo run --log /tmp/log --report /tmp/child -- forks {words} /tmp/log /tmp/result"
        )
    };
    let receiver = site.b.start(&["sh", "-c", &wrapped("receive child")])?;
    site.b.sh("until grep -q :0009 /proc/net/tcp; do usleep 50000; done", within(60)).context("nobody listens")?;
    let sender = site.a.start(&["sh", "-c", &wrapped(&format!("send child {address}"))])?;
    for at in [At::A, At::B] {
        let forked = "until [ $(pidof forks | wc -w) = 2 ]; do usleep 50000; done";
        site.vm(at).sh(forked, within(90)).context("it does not fork")?;
    }
    site.unlink()?;
    site.link("a", "b")?;
    site.a.wait(sender, within(120))?.success().context("who sends")?;
    site.b.wait(receiver, within(60))?.success().context("who receives")?;
    for at in [At::A, At::B] {
        let said = site.vm(at).sh("cat /tmp/result", within(60))?;
        ensure!(said.starts_with("ok"), "the child says {said}");
        let lines = site.vm(at).sh("cat /tmp/log", within(60))?;
        ensure!(lines.contains("joined:") && !lines.contains("reset:") && !lines.contains("broken:"), "{lines}");
    }
    Ok(())
}

/// The sender has shut down, or ended, and the receiver has not read everything when the link goes.
fn late(rig: &mut Rig) -> Result<Verdict> {
    at_site(rig, |site| {
        ["late", "gone"].into_iter().try_for_each(|how| read_late(site, how).context(how))?;
        Ok(Verdict::Done)
    })
}

fn read_late(site: &mut Site, how: &str) -> Result<()> {
    let address = site.addresses[1].clone();
    let wrapped = |words: &str| {
        format!(
            "rm -f /tmp/log /tmp/result*; tombolo run --log /tmp/log -- forks {words} /tmp/log /tmp/result; cat /tmp/result"
        )
    };
    let receiver = site.b.start(&["sh", "-c", &wrapped(&format!("receive {how}"))])?;
    site.b.sh("until grep -q :0009 /proc/net/tcp; do usleep 50000; done", within(60)).context("nobody listens")?;
    let sender = site.a.start(&["sh", "-c", &wrapped(&format!("send {how} {address}"))])?;
    let ended = "until netstat -tn | grep -q ':9 .*CLOSE_WAIT'; do usleep 50000; done";
    site.b.sh(ended, within(90)).context("who sends does not end")?;
    site.unlink()?;
    site.link("a", "b")?;
    let in_kernel = "sleep 2; netstat -tn | grep ':9 .*CLOSE_WAIT' | awk '{ print $2 }'; touch /tmp/result.go";
    let in_kernel: u64 = site.b.sh(in_kernel, within(60))?.trim().parse()?;
    let sent = site.a.wait(sender, within(60))?.success()?;
    let received = site.b.wait(receiver, within(60))?.success()?;
    let lines = site.b.sh("cat /tmp/log", within(60))?;
    ensure!(sent.starts_with("ok") && received.contains("ok"), "{sent}, {received}: {lines}");
    let unread = received.lines().find_map(|line| line.strip_suffix(" unread")?.parse().ok()).unwrap_or(0);
    ensure!(unread > in_kernel, "{unread} bytes were unread, {in_kernel} of them the kernel's: {received}: {lines}");
    Ok(())
}

fn many_at_once(site: &mut Site) -> Result<()> {
    let address = site.addresses[1].clone();
    let server = start_redis(site, &address)?;
    for (requests, clients) in [("1", "50"), ("60", "50"), ("1", "120"), ("12000", "50"), ("1", "50")] {
        let folder = format!("/tmp/many{requests}");
        let words = ["redis-benchmark", "-h", &address, "-n", requests, "-c", clients, "-t", "get", "-q"];
        run(site, &folder, &words).context(format!("{clients} clients with {requests} requests"))?;
    }
    let counts = counted(site, At::A, "/tmp/many12000")?;
    // The earlier connections used up the service's credit, so some of these 240 requests of each go first over TCP
    // (ADR 0095): 64 at most.
    ensure!(counts[1] / 2 >= counts[0], "50 clients: {} bytes over TCP, {} through memory", counts[0], counts[1]);
    site.b.kill(server)?;
    site.b.wait(server, within(60)).map(drop)
}

fn through_it(site: &mut Site) -> Result<()> {
    let address = site.addresses[1].clone();
    iperf(site, &address)?;
    redis(site, &address)?;
    // Canary: a program that gets no sequence numbers can prove nothing, and everything goes over TCP.
    site.b.sh("tombolo hook detach", within(60))?;
    let canary = transfer(site, (&address, "1000", "/tmp/canary"), |_| Ok(()))?;
    ensure!(canary[0] > 0 && canary[1] == 0, "without numbers {} bytes went through memory", canary[1]);
    site.b.sh("tombolo hook attach", within(60))?;
    // The link goes under load, and comes back: every byte arrives, over TCP meanwhile.
    let both = transfer(site, (&address, "20000", "/tmp/leave"), |site| {
        until_in_memory(site, "/tmp/leave")?;
        site.unlink()?;
        site.link("a", "b")?;
        let has = "until grep -q '\"joined_again\":1' /tmp/leave/*; do usleep 50000; done";
        site.a.sh(has, within(60)).context("nothing is joined again").map(drop)
    })?;
    ensure!(both[0] > 0 && both[1] > 0, "{} bytes over TCP, {} through memory", both[0], both[1]);
    Ok(())
}
