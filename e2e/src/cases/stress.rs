// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Everything at once on connections between two machines, while their link or a broker goes and comes back. Each byte
//! arrives once and in order.

use super::{Case, Verdict, long, sockets};
use crate::rig::Rig;
use crate::site::{At, Site, line};
use std::time::Instant;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[Case { name: "s19_everything_at_once_while_a_link_comes_and_goes", run: at_once }];

/// Largest number of bytes in a stream.
const LEN: &str = "20000000";
const PORT: &str = "15000";
const REPORT: &str = "/tmp/stress";
/// Seconds in which seeds may begin.
const SHORT: u64 = 15;
const LONG: u64 = 600;
/// Seconds in which seeds may begin while no connection has been joined.
const LATEST: u64 = 90;
/// Seconds within which a seed must end: most take three.
const PATIENCE: u64 = 60;

fn at_once(rig: &mut Rig) -> Result<Verdict> {
    sockets::at_site(rig, |site| {
        let (deadline, latest) = (within(if long() { LONG } else { SHORT }), within(LATEST));
        let (mut seed, mut joined) = (0, 0);
        // On a slow machine the first seeds may end before anything is joined.
        while Instant::now() < deadline || joined == 0 && Instant::now() < latest {
            joined += one_seed(site, seed).context(format!("seed {seed}"))?;
            seed += 1;
        }
        // Short streams use up a service's credit, so not all of them are joined.
        ensure!(joined > 0, "none of {seed} runs had a connection in memory");
        println!("{seed} seeds, {joined} connections in memory");
        Ok(Verdict::Done)
    })
}

/// Removes the link and adds it again, or restarts the broker of a machine.
fn disturb(site: &mut Site, seed: usize) -> Result<()> {
    let at = match seed % 4 {
        2 => At::A,
        3 => At::B,
        _ => {
            site.unlink()?;
            site.a.sh("usleep 300000", within(60))?;
            return site.link("a", "b");
        }
    };
    site.kill_broker(at)?;
    site.a.sh("usleep 300000", within(60))?;
    site.start_broker(at)
}

/// Returns where each thread of the program is, and the program's messages.
fn stands(site: &mut Site, at: At) -> Result<String> {
    let look = "for it in $(pidof stress); do echo \"== $it\"; ls -l /proc/$it/fd | sed 's/.* \\([0-9]* ->\\)/\\1/'; \
                for one in /proc/$it/task/*; do cat $one/wchan; echo; cat $one/syscall; done; done; \
                cat /tmp/log; netstat -tn; tombolo ls --json";
    site.vm(at).sh(look, within(60))
}

/// Runs one seed. Returns how often a connection was joined.
fn one_seed(site: &mut Site, seed: usize) -> Result<usize> {
    let (address, number, seed) = (site.addresses[1].clone(), seed, seed.to_string());
    let wrapped =
        |words: &str| format!("rm -rf {REPORT}; exec tombolo run --log /tmp/log --report {REPORT} -- stress {words}");
    let accepts = site.b.start(&["sh", "-c", &wrapped(&format!("{seed} {LEN} {PORT}"))])?;
    line(&mut site.b, accepts, "listens", within(60))?;
    let connects = site.a.start(&["sh", "-c", &wrapped(&format!("{seed} {LEN} {PORT} {address}"))])?;
    let (mut goes_on, deadline) = (true, within(PATIENCE));
    while goes_on {
        if Instant::now() > deadline {
            return Err(Error::new(format!("it stands still\n{}\n{}", stands(site, At::A)?, stands(site, At::B)?)));
        }
        site.a.sh("usleep 700000", within(60))?;
        disturb(site, number)?;
        goes_on = !site.a.sh("pidof stress || true", within(60))?.trim().is_empty();
    }
    let ended = [site.a.wait(connects, within(60))?, site.b.wait(accepts, within(60))?];
    if ended.iter().any(|it| it.end != End::Code(0)) {
        let logs = [At::A, At::B].map(|at| site.vm(at).sh("cat /tmp/log", within(60)).unwrap_or_default());
        return Err(Error::new(format!("{ended:?}\n{}", logs.join("\n"))));
    }
    let mut joined = 0;
    for at in [At::A, At::B] {
        let lines = site.vm(at).sh("cat /tmp/log; rm /tmp/log", within(60))?;
        ensure!(!lines.contains("reset:") && !lines.contains("broken:"), "{lines}");
        joined += lines.matches("joined:").count();
    }
    Ok(joined / 2)
}
