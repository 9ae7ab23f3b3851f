// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Endpoints that die: programs that are killed and domains that are destroyed while bytes flow, and programs that die
//! between any two steps of connect. The endpoint that is left gets what was published and learns of the death soon;
//! nothing stays mapped.

use super::{Case, Kind, Verdict, long};
use crate::flow::pause_of;
use crate::rig::{Pair, Rig};
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "sender_killed_under_load_is_told_to_the_receiver", run: senders },
    Case { name: "receiver_killed_under_load_is_told_to_the_sender", run: receivers },
    Case { name: "senders_killed_under_load_take_nothing_back", run: |rig| reaped(rig, "flow") },
    Case { name: "receivers_killed_under_load_are_told_to_one_sender", run: |rig| reaped(rig, "sip") },
    Case { name: "caller_killed_at_any_step_of_connect_harms_no_listener", run: |rig| steps(rig, "caller") },
    Case { name: "domain_destroyed_under_load_is_told_to_the_other", run: destroyed },
    Case { name: "death_canary_bytes_that_got_lost_are_missed", run: lost },
];

/// Cases that take longer than a change may wait for.
pub const LONG: &[Case] =
    &[Case { name: "listener_killed_at_any_step_of_connect_is_told_to_the_caller", run: |rig| steps(rig, "listener") }];

/// Seconds within which the other endpoint must learn of it: one second is promised, and the rest is for emulation on a
/// loaded machine.
const TOLD: u64 = 30;
/// Seconds that all deaths between steps may take.
const STEPS: u64 = 1500;

/// Starts a stream of numbered lines from `from` to `to`. Returns the sender's job, and the receiver's.
pub fn flow(pair: &mut Pair, from: &str, to: &str) -> Result<(Job, Job)> {
    let (source, target) = (pair.number(from), pair.number(to));
    let receiver =
        format!("exec tombolo cat --listen xen:{source}/flow --receive-only --output /tmp/flow --timeout 120");
    let receiver = pair.start(to, &receiver)?;
    let sender = pair.start(from, &format!("exec /agent flow xen:{target}/flow /tmp/noted"))?;
    // The stream flows once something has arrived.
    let flows = "until [ \"$(stat -c %s /tmp/flow 2>/dev/null || echo 0)\" -gt 100000 ]; do :; done";
    pair.sh(to, &format!("timeout 60 sh -c '{flows}'"))?;
    Ok((sender, receiver))
}

/// Lets bytes flow for some time.
fn pass(pair: &mut Pair, time: Duration) -> Result<()> {
    pair.sh("dom0", &format!("usleep {}", time.as_micros())).map(drop)
}

/// Returns the number of bytes that the sender noted as published.
fn noted(pair: &mut Pair, at: &str) -> Result<u64> {
    let text = pair.sh(at, "cat /tmp/noted")?;
    text.trim().parse().context(text)
}

/// Checks that the first numbers have arrived in order, up to some byte at or after the last published one.
pub fn check_arrived(pair: &mut Pair, at: &str, published: u64) -> Result<()> {
    let text = "n=$(wc -l < /tmp/flow); head -n $n /tmp/flow | sha256sum; seq 1 $n | sha256sum; wc -c < /tmp/flow; \
                rm /tmp/flow";
    let said = pair.sh(at, text)?;
    let lines: Vec<&str> = said.lines().collect();
    ensure!(lines.len() == 3 && lines[0] == lines[1], "what arrived is not what was sent: {said}");
    let arrived: u64 = lines[2].trim().parse().context(lines[2])?;
    ensure!(arrived > 0 && arrived >= published, "{published} bytes were published, {arrived} arrived");
    Ok(())
}

/// Times until the endpoints that were left noticed.
#[derive(Default)]
pub struct Noticed(Vec<Duration>);

impl Noticed {
    /// Waits until the endpoint that is left ends: soon, with code 1, and with the reason.
    pub fn wait(&mut self, pair: &mut Pair, at: &str, job: Job, words: &str) -> Result<()> {
        let start = Instant::now();
        let output = pair.at(at)?.wait(job, within(TOLD))?;
        self.0.push(start.elapsed());
        ensure!(output.end == End::Code(1), "{at} ended with {:?}: {}", output.end, output.text);
        ensure!(output.text.contains(words), "{at} says nothing of {words}: {}", output.text);
        Ok(())
    }

    pub fn median(&self) -> Duration {
        let mut all = self.0.clone();
        all.sort();
        all[all.len() / 2]
    }

    fn print_times(&self, what: &str) {
        let (count, most) = (self.0.len(), self.0.iter().max().copied().unwrap_or_default());
        println!("{count} {what}: the other end knew after {:.0?} (median), {most:.0?} (most)", self.median());
    }
}

fn senders(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let mut ends = Noticed::default();
    for round in 0..3 {
        let (sender, receiver) = flow(pair, "A", "B")?;
        pass(pair, pause_of(round))?;
        pair.at("A")?.kill(sender)?;
        ends.wait(pair, "B", receiver, "died")?;
        pair.at("A")?.wait(sender, within(TOLD))?;
        let published = noted(pair, "A")?;
        check_arrived(pair, "B", published)?;
    }
    pair.check_clean()?;
    ends.print_times("senders killed");
    Ok(Verdict::Done)
}

fn receivers(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let mut ends = Noticed::default();
    for round in 0..3 {
        let (sender, receiver) = flow(pair, "A", "B")?;
        pass(pair, pause_of(round))?;
        pair.at("B")?.kill(receiver)?;
        pair.at("B")?.wait(receiver, within(TOLD))?;
        ends.wait(pair, "A", sender, "sending stopped")?;
        check_arrived(pair, "B", 0)?;
    }
    pair.check_clean()?;
    ends.print_times("receivers killed");
    Ok(Verdict::Done)
}

/// Stops the receiver until the sender can publish no more. Returns the bytes that the sender has published then.
pub fn fill(pair: &mut Pair, from: &str, to: &str) -> Result<u64> {
    pair.sh(to, "killall -STOP tombolo")?;
    let stands = "a=x; until [ \"$a\" = \"$(cat /tmp/noted)\" ]; do a=$(cat /tmp/noted); usleep 500000; done";
    pair.sh(from, stands)?;
    noted(pair, from)
}

fn destroyed(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let mut ends = Noticed::default();
    for round in 0..if long() { 10 } else { 2 } {
        // The domain that dies sends in one round, and receives in the next.
        let sends = round % 2 == 0;
        let (from, to) = if sends { ("B", "A") } else { ("A", "B") };
        let (sender, receiver) = flow(pair, from, to)?;
        pass(pair, pause_of(round))?;
        // Bytes that are unread when their domain dies are still there.
        let published = if sends { fill(pair, from, to)? } else { 0 };
        pair.host.destroy(1)?;
        if sends {
            pair.sh(to, "killall -CONT tombolo")?;
            ends.wait(pair, "A", receiver, "incomplete")?;
            check_arrived(pair, "A", published)?;
        } else {
            ends.wait(pair, "A", sender, "sending stopped")?;
        }
        pair.renew(1, Kind::Pv)?;
    }
    pair.check_clean()?;
    ends.print_times("domains destroyed");
    Ok(Verdict::Done)
}

fn reaped(rig: &mut Rig, role: &str) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    reaped_in(pair, role, if long() { 100 } else { 5 })?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Kills programs of A one after the other; one program of B is the other endpoint of all of them.
pub fn reaped_in(pair: &mut Pair, role: &str, count: u64) -> Result<Noticed> {
    let (a, b) = (pair.number("A"), pair.number("B"));
    let left = pair.start("B", &format!("exec /agent outlive {role} xen:{a}/reaped {count}"))?;
    let reaper = pair.start("A", &format!("exec /agent reap {role} xen:{b}/reaped {count}"))?;
    let noted = pair.at("A")?.wait(reaper, within(TOLD * count))?.success().context("who kills")?;
    let arrived = pair.at("B")?.wait(left, within(TOLD))?.success().context("who is left")?;
    let (mut ends, mut all) = (Noticed::default(), 0);
    for (noted, arrived) in noted.lines().zip(arrived.lines()) {
        let (bytes, silence) = arrived.split_once(' ').ok_or_else(|| Error::new(arrived))?;
        let (noted, bytes): (u64, u64) = (noted.parse()?, bytes.parse()?);
        ensure!(role != "flow" || bytes >= noted, "{noted} bytes were published, {bytes} arrived");
        ends.0.push(Duration::from_micros(silence.parse()?));
        all += bytes;
    }
    ensure!(ends.0.len() as u64 == count, "{} of {count} ends", ends.0.len());
    ends.print_times(&format!("killed ({role}), {} MB", all / 1_000_000));
    Ok(ends)
}

/// Processes die in B one after the other, each some system calls later on its way to a channel. A process in A
/// outlives all of them.
fn steps(rig: &mut Rig, role: &str) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    // An odd number of stops, so that processes die both before and after calls.
    let every = if long() { 3 } else { 25 };
    let (a, b) = (pair.number("A"), pair.number("B"));
    let left = pair.start("A", &format!("exec pair outlive {role} {b} steps 2>&1"))?;
    pair.at("A")?.line(left, within(TOLD))?;
    let killer = pair.start("B", &format!("exec pair kill {role} {a} steps {every} 2>&1"))?;
    let killer = pair.at("B")?.wait(killer, within(STEPS))?;
    println!("B: {}", killer.text.trim());
    let left = pair.at("A")?.wait(left, within(TOLD))?;
    println!("A: {}", left.text.trim());
    ensure!(killer.end == End::Code(0) && left.end == End::Code(0), "B: {:?}, A: {:?}", killer.end, left.end);
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Canary of the check in the cases above: it fails where a published byte did not arrive.
fn lost(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    for (bytes, whole) in [(1292, true), (1291, false)] {
        pair.sh("B", &format!("seq 1 350 | head -c {bytes} > /tmp/flow"))?;
        let checked = check_arrived(pair, "B", 1292);
        ensure!(checked.is_ok() == whole, "{bytes} of 1292 bytes: {checked:?}");
    }
    Ok(Verdict::Done)
}
