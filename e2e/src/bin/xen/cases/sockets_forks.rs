// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unmodified programs of a domU that fork while a connection with another domain is in memory.

use super::neighbours::{ADDRESS, as_neighbours, counted, under_run};
use super::{Case, Verdict, long};
use crate::rig::{Pair, Rig};
use crate::unmodified;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::line_reader::within;

pub const PV: &[Case] = &[Case { name: "pv_x24_programs_fork_with_connections_and_lose_nothing", run: forks }];

/// The program that forks.
const FORKS: &str = unmodified::FORKS;

/// A program with a connection in memory forks. Whichever process continues then, each byte arrives once and in order.
fn forks(rig: &mut Rig) -> Result<Verdict> {
    as_neighbours(rig, |pair| {
        let turns = ["child", "daemon", "parent"].into_iter().flat_map(|how| [(how, true), (how, false)]);
        let turns: Vec<_> = turns.chain([("both", true), ("ended", false)]).collect();
        for (how, sends) in turns.repeat(if long() { 10 } else { 1 }) {
            // On a machine that has no time the other end may be late.
            let mut memory = 0;
            for _ in 0..3 {
                memory = if memory == 0 { fork_in(pair, how, sends)? } else { memory };
            }
            let role = if sends { "sender" } else { "receiver" };
            println!("{how}, by the {role}: {memory} bytes through memory");
            ensure!(memory > 0, "{how}, by the {role}: nothing was in memory when it forked");
        }
        Ok(())
    })
}

/// Runs one such stream. Returns how many of its bytes went through memory.
fn fork_in(pair: &mut Pair, how: &str, sends: bool) -> Result<u64> {
    let folder = format!("/tmp/{how}{}", u8::from(sends));
    let result = format!("{folder}.result");
    // Removes what an earlier stream left.
    ["A", "B"].into_iter().try_for_each(|at| pair.sh(at, &format!("rm -rf {folder} {folder}.*")).map(drop))?;
    let receive =
        if sends { "/agent stream-receive".into() } else { format!("{FORKS} receive {how} {folder}.log {result}") };
    let receiver = pair.start("B", &under_run(&folder, &receive))?;
    ensure!(pair.at("B")?.line(receiver, within(60))?.contains("listens"), "{receive}");
    let send = match how {
        // The sender has ended, and what it left in memory is unread.
        "ended" => format!("{FORKS} send late {ADDRESS} {folder}.log {result}"),
        _ if sends => format!("{FORKS} send {how} {ADDRESS} {folder}.log {result}"),
        _ => format!("/agent stream-send {ADDRESS} 3000 {folder}.log"),
    };
    let sender = pair.start("A", &under_run(&folder, &send))?;
    // Waits first for the result of the program that forks.
    let forked = if sends { "A" } else { "B" };
    // No process waits for a daemon: what is left of it then, a zombie, no longer counts as a program.
    let ended = format!("[ -s {result} ] && ! grep -qs '(forks) [^Z]' /proc/[0-9]*/stat");
    let over = format!("for it in $(seq 600); do {ended} && break; usleep 100000; done; cat {result} || true");
    let said = pair.sh(forked, &over)?;
    if !said.starts_with("ok") {
        let logs = pair.sh("A", &format!("cat {folder}.log"))? + &pair.sh("B", &format!("cat {folder}.log"))?;
        return Err(Error::new(format!("{folder}: {said}{logs}")));
    }
    pair.done("A", sender)?;
    pair.done("B", receiver)?;
    Ok(counted(pair, "A", &folder)?[1])
}
