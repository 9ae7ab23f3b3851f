// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ends that die while bytes flow: programs that are killed, domains that are destroyed. Who is left gets what was
//! published, is told soon, and nothing stays mapped.

use super::{Case, Kind, Verdict, long};
use crate::rig::{Pair, Rig};
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::Result;
use tombolo_e2e::lines::within;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "sender_killed_under_load_is_told_to_the_receiver", run: senders },
    Case { name: "receiver_killed_under_load_is_told_to_the_sender", run: receivers },
    Case { name: "domain_destroyed_under_load_is_told_to_the_other", run: destroyed },
];

/// How long the other end may take: one second is promised, the rest is for emulation on a loaded machine.
const TOLD: u64 = 30;

/// Numbers that look random, the same in each run.
fn pause_of(round: u32) -> Duration {
    let mixed = (round + 1).wrapping_mul(2_654_435_761) >> 16;
    Duration::from_millis(u64::from(mixed % 700))
}

/// A stream of numbered lines from `from` to `to`, until somebody dies: the sender's job, and the receiver's.
fn flow(pair: &mut Pair, from: &str, to: &str) -> Result<(Job, Job)> {
    let (source, target) = (pair.number(from), pair.number(to));
    let receiver =
        format!("exec tombolo cat --listen xen:{source}/flow --receive-only --output /tmp/flow --timeout 120");
    let receiver = pair.start(to, &receiver)?;
    let sender = pair.start(
        from,
        &format!(
            "seq 1 2000000000 | (exec tombolo cat --connect xen:{target}/flow --wait 60 --send-only --timeout 120)"
        ),
    )?;
    // It flows when something has arrived.
    let flows = "until [ \"$(stat -c %s /tmp/flow 2>/dev/null || echo 0)\" -gt 100000 ]; do :; done";
    pair.sh(to, &format!("timeout 60 sh -c '{flows}'"))?;
    Ok((sender, receiver))
}

/// Waits as long as bytes flow: for nothing but time.
fn pass(pair: &mut Pair, time: Duration) -> Result<()> {
    pair.sh("dom0", &format!("usleep {}", time.as_micros())).map(drop)
}

/// What has arrived are the first numbers, in order, up to some byte.
fn check_arrived(pair: &mut Pair, at: &str) -> Result<()> {
    let text = "n=$(wc -l < /tmp/flow); head -n $n /tmp/flow | sha256sum; seq 1 $n | sha256sum; echo $n; rm /tmp/flow";
    let said = pair.sh(at, text)?;
    let lines: Vec<&str> = said.lines().collect();
    ensure!(lines.len() == 3 && lines[0] == lines[1] && lines[2] != "0", "what arrived is not what was sent: {said}");
    Ok(())
}

/// The end that is left ends soon, with code 1, and says why.
fn told(pair: &mut Pair, at: &str, job: Job, words: &str) -> Result<()> {
    let start = Instant::now();
    let output = pair.at(at)?.wait(job, within(TOLD))?;
    println!("told after {:?}", start.elapsed());
    ensure!(output.end == End::Code(1), "{at} ended with {:?}: {}", output.end, output.text);
    ensure!(output.text.contains(words), "{at} says nothing of {words}: {}", output.text);
    Ok(())
}

fn senders(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    for round in 0..if long() { 100 } else { 3 } {
        let (sender, receiver) = flow(pair, "A", "B")?;
        pass(pair, pause_of(round))?;
        pair.sh("A", "killall -KILL tombolo")?;
        told(pair, "B", receiver, "died")?;
        pair.at("A")?.wait(sender, within(TOLD))?;
        check_arrived(pair, "B")?;
    }
    pair.check_clean()?;
    Ok(Verdict::Done)
}

fn receivers(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    for round in 0..if long() { 100 } else { 3 } {
        let (sender, receiver) = flow(pair, "A", "B")?;
        pass(pair, pause_of(round))?;
        pair.at("B")?.kill(receiver)?;
        pair.at("B")?.wait(receiver, within(TOLD))?;
        told(pair, "A", sender, "sending stopped")?;
        check_arrived(pair, "B")?;
    }
    pair.check_clean()?;
    Ok(Verdict::Done)
}

fn destroyed(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    for round in 0..if long() { 10 } else { 2 } {
        // The one that dies sends in one round, and receives in the other.
        let sends = round % 2 == 0;
        let (from, to) = if sends { ("B", "A") } else { ("A", "B") };
        let (sender, receiver) = flow(pair, from, to)?;
        pass(pair, pause_of(round))?;
        pair.host.destroy(1)?;
        let (left, words) = if sends { (receiver, "incomplete") } else { (sender, "sending stopped") };
        told(pair, "A", left, words)?;
        if sends {
            check_arrived(pair, "A")?;
        }
        pair.renew(1, Kind::Pv)?;
    }
    pair.check_clean()?;
    Ok(Verdict::Done)
}
