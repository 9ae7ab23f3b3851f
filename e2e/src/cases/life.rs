// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Deaths, pauses and restarts of programs, machines and brokers under load. The programs that are left learn of it in
//! time, have all that was published, and continue.

use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site, line, start};
use serde_json::json;
use std::time::{Duration, Instant};
use tombolo::{Deadline, Options, Stream};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::{pass, until};
use tombolo_e2e::line_reader::within;

pub const CASES: &[Case] = &[
    Case { name: "broker_of_the_host_restarts_under_load", run: host_broker },
    Case { name: "broker_of_a_machine_restarts_under_load", run: guest_brokers },
    Case { name: "paused_machine_is_said_to_be_paused", run: paused },
    Case { name: "killed_writer_is_seen_and_nothing_published_is_lost", run: writers },
    Case { name: "killed_reader_is_seen", run: readers },
    Case { name: "v7_link_taken_away_under_programs_is_an_error_and_a_new_one_serves", run: taken_away },
    Case { name: "b21_link_left_under_a_stream_loses_no_byte_that_was_taken", run: left },
    Case { name: "b10_other_links_come_and_go_beside_a_channel", run: others_come_and_go },
    Case { name: "machine_that_is_reset_is_gone_and_comes_back", run: reset },
    Case { name: "machine_that_panics_is_gone_and_comes_back", run: panics },
    Case { name: "machine_that_is_shut_down_is_gone", run: shut_down },
    Case { name: "machine_whose_qemu_is_killed_is_gone_and_comes_back", run: killed },
];
pub const HALVES: &[Half] = &[("life::pour", pour), ("life::drink", drink)];

/// Time within which the death of a program or a machine must be seen under emulation; a pause within twice that.
pub(super) const SEEN: Duration = Duration::from_secs(1);
const ADDRESS: &str = "vm:b/flow";
/// Numbers in a block.
const BLOCK: usize = 512;

/// Writes numbers for ever, and prints its progress. Exits successfully when it learns of an end.
fn pour(args: &[String]) -> Result<()> {
    let address = args.first().ok_or_else(|| Error::new("where?"))?;
    let options = Options::new().wait_for_listener(Duration::from_secs(60));
    let mut stream = tombolo::connect_with::<Stream>(address, &options)?;
    let watch = stream.watch();
    println!("ready");
    let (mut next, mut said) = (0_u64, Instant::now());
    loop {
        let bytes: Vec<u8> = (next..next + BLOCK as u64).flat_map(u64::to_le_bytes).collect();
        let mut taken = 0;
        while taken < bytes.len() {
            match stream.split().1.write_until(&bytes[taken..], Deadline::after(Duration::from_secs(120))) {
                Ok(more) => taken += more,
                Err(why) => {
                    let all = 8 * next + taken as u64;
                    println!("ended {why}; {:?}; {next} written; {all} bytes taken", watch.liveness());
                    return Ok(());
                }
            }
        }
        next += BLOCK as u64;
        if said.elapsed() > Duration::from_millis(50) {
            said = Instant::now();
            println!("written {next}");
        }
    }
}

/// Reads numbers, which must come in order, and prints the peer's liveness. Exits successfully when the stream ends,
/// however it ends.
fn drink(args: &[String]) -> Result<()> {
    let address = args.first().ok_or_else(|| Error::new("where?"))?;
    let mut listener = tombolo::listen(address)?;
    println!("listening");
    let mut stream = listener.accept_until(Deadline::after(Duration::from_secs(120)))?;
    drop(listener);
    let watch = stream.watch();
    std::thread::spawn(move || {
        let mut last = None;
        loop {
            let life = watch.liveness();
            if last.replace(life) != Some(life) {
                println!("life {life:?}");
            }
            pass(Duration::from_millis(10));
        }
    });
    println!("ready");
    let (mut bytes, mut kept, mut next, mut said) = (vec![0; 1 << 16], 0, 0_u64, Instant::now());
    loop {
        let got = match stream.split().0.read_until(&mut bytes[kept..], Deadline::after(Duration::from_secs(120))) {
            Err(why) if why.to_string().contains("revoked") => {
                println!("ended {why}; {next} read");
                return Ok(());
            }
            got => got?,
        };
        if got == 0 {
            let ending = stream.split().0.ending();
            println!("ended {ending:?}; {next} read; {} bytes read", 8 * next + kept as u64);
            return Ok(());
        }
        let whole = (kept + got) / 8 * 8;
        for number in bytes[..whole].chunks_exact(8) {
            let number = u64::from_le_bytes(number.try_into()?);
            ensure!(number == next, "{number} came instead of {next}");
            next += 1;
        }
        bytes.copy_within(whole..kept + got, 0);
        kept = kept + got - whole;
        if said.elapsed() > Duration::from_millis(50) {
            said = Instant::now();
            println!("read {next}");
        }
    }
}

/// Numbers that flow from a to b.
pub(super) struct Flow {
    pour: Job,
    drink: Job,
}

impl Flow {
    pub(super) fn start(site: &mut Site) -> Result<Self> {
        site.link("a", "b")?;
        let drink = start(&mut site.b, "life::drink", &[ADDRESS])?;
        line(&mut site.b, drink, "listening", within(60))?;
        let pour = start(&mut site.a, "life::pour", &[ADDRESS])?;
        line(&mut site.a, pour, "ready", within(60))?;
        line(&mut site.b, drink, "ready", within(60))?;
        Ok(Self { pour, drink })
    }

    /// Waits until more has arrived than what is in flight now.
    fn goes_on(&self, site: &mut Site) -> Result<()> {
        // More than a ring's worth beyond what was read by now.
        let now: u64 = self.latest(site)?;
        loop {
            let read: u64 = line(&mut site.b, self.drink, "read", within(60)).context("nothing flows")?.parse()?;
            if read > now + (1 << 18) {
                return Ok(());
            }
        }
    }

    fn latest(&self, site: &mut Site) -> Result<u64> {
        Ok(line(&mut site.b, self.drink, "read", within(60)).context("nothing flows")?.parse()?)
    }

    /// Checks that no byte that was taken is lost after the flow's link was left.
    pub(super) fn was_left(self, site: &mut Site) -> Result<()> {
        let of_a = line(&mut site.a, self.pour, "ended", within(60)).context("the writer hears nothing")?;
        let of_b = line(&mut site.b, self.drink, "ended", within(60)).context("the reader hears nothing")?;
        let count =
            |ended: &str, word: &str| ended.split("; ").find_map(|it| it.strip_suffix(word)?.parse::<u64>().ok());
        let (taken, read) = (count(&of_a, " bytes taken"), count(&of_b, " bytes read"));
        ensure!(taken.is_some() && taken == read, "{of_a}, and {of_b}");
        ensure!(of_a.contains("is being taken away"), "{of_a}");
        ensure!(of_b.starts_with("Some(Revoked)"), "{of_b}");
        site.a.wait(self.pour, within(60))?.success()?;
        site.b.wait(self.drink, within(60))?.success().map(drop)
    }

    /// Ends the flow, so that the case can continue.
    fn stop(self, site: &mut Site) -> Result<()> {
        site.a.kill(self.pour)?;
        site.a.wait(self.pour, within(60))?;
        site.b.wait(self.drink, within(60))?.success().map(drop)
    }
}

fn host_broker(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    let flow = Flow::start(site)?;
    for _ in 0..3 {
        site.broker.kill()?;
        flow.goes_on(site)?;
        site.broker.restart()?;
        flow.goes_on(site)?;
    }
    // A channel that is set up afterwards works as well, beside the flow.
    small_file(site)?;
    flow.stop(site)?;
    Ok(Verdict::Done)
}

fn guest_brokers(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    let flow = Flow::start(site)?;
    for at in [At::A, At::B, At::A] {
        site.kill_broker(at)?;
        flow.goes_on(site)?;
        site.start_broker(at)?;
        flow.goes_on(site)?;
    }
    small_file(site)?;
    flow.stop(site)?;
    Ok(Verdict::Done)
}

/// Sends a word from a to b over a channel of its own.
pub(super) fn small_file(site: &mut Site) -> Result<()> {
    let listener = site.b.start(&["sh", "-c", "tombolo cat --listen vm:b/word --receive-only"])?;
    site.a.sh("echo word | tombolo cat --connect vm:b/word --wait 60 --send-only", within(90))?;
    let got = site.b.wait(listener, within(60))?.success()?;
    if got == "word" { Ok(()) } else { Err(Error::new(format!("{got} arrived"))) }
}

fn paused(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    let flow = Flow::start(site)?;
    for _ in 0..3 {
        site.a.qmp.run("stop", &json!({}))?;
        let start = Instant::now();
        until_life(site, &flow, "Paused")?;
        let seen = start.elapsed();
        println!("paused, seen after {seen:?}");
        ensure!(seen < 2 * SEEN, "only after {seen:?}");
        site.a.qmp.run("cont", &json!({}))?;
        until_life(site, &flow, "Running")?;
        flow.goes_on(site)?;
    }
    flow.stop(site)?;
    Ok(Verdict::Done)
}

fn until_life(site: &mut Site, flow: &Flow, life: &str) -> Result<()> {
    while line(&mut site.b, flow.drink, "life", within(60)).context(format!("never {life}"))? != life {}
    Ok(())
}

/// Kills the writer at some moment. All that it reported as written arrives, and the reader learns of the death.
fn writers(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    let mut times = Vec::new();
    for round in 0..if super::long() { 200 } else { 8_u64 } {
        let flow = Flow::start(site)?;
        pass(moment(round));
        site.a.kill(flow.pour)?;
        let start = Instant::now();
        let ended = line(&mut site.b, flow.drink, "ended", within(60)).context("the reader hears nothing")?;
        times.push(start.elapsed());
        ensure!(ended.starts_with("Some(ProcessGone)"), "round {round}: {ended}");
        let written = site.a.wait(flow.pour, within(60))?.text;
        let written = numbers(&written, "written ");
        let read = ended.split("; ").nth(1).and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0);
        ensure!(read >= written, "round {round}: {written} were written, {read} arrived");
        site.b.wait(flow.drink, within(60))?.success()?;
    }
    in_time(&mut times, SEEN)?;
    Ok(Verdict::Done)
}

/// Returns the last number that was printed after `word`.
fn numbers(text: &str, word: &str) -> u64 {
    text.lines().filter_map(|line| line.strip_prefix(word)?.parse().ok()).next_back().unwrap_or(0)
}

/// Returns some moment in the course of a flow.
fn moment(round: u64) -> Duration {
    Duration::from_micros(round.wrapping_mul(7_919_113) % 300_000)
}

fn readers(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    let mut times = Vec::new();
    for round in 0..if super::long() { 200 } else { 8_u64 } {
        let flow = Flow::start(site)?;
        pass(moment(round));
        site.b.kill(flow.drink)?;
        let start = Instant::now();
        let ended = line(&mut site.a, flow.pour, "ended", within(60)).context("the writer hears nothing")?;
        times.push(start.elapsed());
        ensure!(ended.contains("the peer is gone; ProcessGone"), "round {round}: {ended}");
        site.a.wait(flow.pour, within(60))?.success()?;
        site.b.wait(flow.drink, within(60))?;
    }
    in_time(&mut times, SEEN)?;
    Ok(Verdict::Done)
}

/// Removes a link while numbers flow, without time to leave it. Both programs get an error or the end, in time, and end
/// by themselves. The devices go, and a new link serves new programs.
fn taken_away(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.broker.configure(&format!("[host]\nleave = \"0s\"\n{}", crate::site::CONFIG))?;
    let verdict = cut(site);
    site.broker.configure(crate::site::CONFIG)?;
    verdict
}

fn cut(site: &mut Site) -> Result<Verdict> {
    let (mut times, mut revoked) = (Vec::new(), 0);
    for round in 0..if super::long() { 50 } else { 3_u64 } {
        let flow = Flow::start(site)?;
        pass(moment(round));
        let start = Instant::now();
        site.broker.link(&["rm", "a", "b"])?;
        let of_a = line(&mut site.a, flow.pour, "ended", within(60)).context("the writer hears nothing")?;
        let of_b = line(&mut site.b, flow.drink, "ended", within(60)).context("the reader hears nothing")?;
        times.push(start.elapsed());
        // The program that learns of it last may see first that the other closed, or is gone.
        for ended in [of_a, of_b].map(|ended| ended.to_lowercase()) {
            let known = ["revoked", "the peer is gone", "processgone", "closed", "does not read any more"]
                .iter()
                .any(|word| ended.contains(word));
            ensure!(known, "round {round}: {ended}");
            revoked += u32::from(ended.contains("revoked"));
        }
        site.a.wait(flow.pour, within(60))?.success()?;
        site.b.wait(flow.drink, within(60))?.success()?;
        site.unlink()?;
        ensure!(site.ends().is_err(), "round {round}: the devices are still there");
        site.link("a", "b")?;
        small_file(site)?;
    }
    println!("{revoked} of {} were told that it was revoked", 2 * times.len());
    ensure!(revoked > 0, "nobody was told what happened");
    in_time(&mut times, SEEN)?;
    Ok(Verdict::Done)
}

/// Removes a link while numbers flow, with time to leave it. The reader gets each byte that was reported to the writer
/// as taken, and then learns that the link was taken away. Leaving takes as long as the programs need, here less than a
/// second, and not all the time that is allowed.
fn left(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.broker.configure(&format!("[host]\nleave = \"30s\"\n{}", crate::site::CONFIG))?;
    let verdict = left_in_time(site);
    site.broker.configure(crate::site::CONFIG)?;
    verdict
}

fn left_in_time(site: &mut Site) -> Result<Verdict> {
    let mut times = Vec::new();
    for round in 0..if super::long() { 50 } else { 3_u64 } {
        let flow = Flow::start(site)?;
        pass(moment(round));
        let start = Instant::now();
        site.broker.link(&["rm", "a", "b"])?;
        times.push(start.elapsed());
        flow.was_left(site).context(format!("round {round}"))?;
        ensure!(times.last() < Some(&Duration::from_secs(30)), "round {round}: nobody left");
        site.unlink()?;
    }
    site.link("a", "b")?;
    small_file(site)?;
    in_time(&mut times, SEEN)?;
    Ok(Verdict::Done)
}

/// Adds and removes the link between a machine and its host while numbers flow between the machines. Devices of that
/// link enter and leave the same bus, and the guest is informed of each that leaves. The flow continues, and nothing of
/// its link is ejected.
fn others_come_and_go(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    let flow = Flow::start(site)?;
    for round in 0..if super::long() { 50 } else { 3_u64 } {
        let machine = if round / 2 % 2 == 0 { "a" } else { "b" };
        site.broker.link(&["add", machine, "host", "--wait", "60"])?;
        pass(moment(round));
        site.broker.link(&["rm", machine, "host"])?;
        // Adds a new link at once, while the guest still releases the devices of the last, or after it has released
        // them.
        if round % 3 != 0 {
            let alone = || site.broker.list(&[]).is_ok_and(|rows| rows.len() == 1);
            until(within(60), alone).context(format!("round {round}: the link does not go"))?;
        }
        flow.goes_on(site).context(format!("round {round}"))?;
        let ejected = site.broker.log().lines().find(|line| line.contains("ejected")).map(str::to_owned);
        ensure!(ejected.is_none(), "round {round}: {ejected:?}");
    }
    flow.stop(site)?;
    site.unlink()?;
    site.link("a", "b")?;
    small_file(site)?;
    Ok(Verdict::Done)
}

/// The median must meet the limit: on a loaded host any single event may be late.
fn in_time(times: &mut [Duration], limit: Duration) -> Result<()> {
    times.sort();
    let (median, last) = (times[times.len() / 2], times[times.len() - 1]);
    println!("seen after {median:?}, at most {last:?}, {} times", times.len());
    ensure!(median < limit, "seen only after {median:?}");
    Ok(())
}

/// Ends machine b, and checks what a program in a sees.
fn ends(site: &mut Site, what: &str, end: impl FnOnce(&mut Site) -> Result<()>) -> Result<()> {
    let flow = Flow::start(site)?;
    flow.goes_on(site)?;
    end(site)?;
    let start = Instant::now();
    let ended = line(&mut site.a, flow.pour, "ended", within(60)).context("the writer hears nothing")?;
    let seen = start.elapsed();
    println!("{what}, seen after {seen:?}: {ended}");
    ensure!(ended.contains("DomainGone"), "{ended}");
    ensure!(seen < SEEN, "only after {seen:?}");
    site.a.wait(flow.pour, within(60))?.success().map(drop)
}

pub(super) fn come_back(site: &mut Site) -> Result<()> {
    site.b.anew()?;
    site.brokers[At::B as usize] = None;
    site.set_up(At::B)?;
    site.link("a", "b")?;
    small_file(site)
}

fn reset(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    for _ in 0..if super::long() { 10 } else { 1 } {
        ends(site, "reset", |site| site.b.qmp.run("system_reset", &json!({})).map(drop))?;
        come_back(site)?;
    }
    Ok(Verdict::Done)
}

fn panics(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    ends(site, "panicked", |site| site.b.start(&["sh", "-c", "echo c > /proc/sysrq-trigger"]).map(drop))?;
    come_back(site)?;
    Ok(Verdict::Done)
}

fn shut_down(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    ends(site, "shut down", |site| site.b.start(&["poweroff", "-f"]).map(drop))?;
    renew(site)?;
    Ok(Verdict::Done)
}

fn killed(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    for _ in 0..if super::long() { 20 } else { 1 } {
        ends(site, "killed", |site| site.b.cut())?;
        renew(site)?;
        // The machine has a link from its first moment on. If its firmware had found the memory, it would not be cached
        // (B-10).
        let cached = site.b.sh("cat /sys/class/misc/tombolo*/write_back", within(60))?;
        let regions = cached.lines().filter(|says| says.trim() == "1").count();
        ensure!(regions == 2, "{regions} of its 2 regions are write-back cached: {cached:?}");
    }
    Ok(Verdict::Done)
}

pub(super) fn renew(site: &mut Site) -> Result<()> {
    site.brokers[At::B as usize] = None;
    site.renew(At::B)?;
    site.link("a", "b")?;
    small_file(site)
}
