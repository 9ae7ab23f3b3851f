// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests what `tombolo ls` and `tombolo doctor` show of a channel to another domain: both endpoints' view, and memory
//! that waits in quarantine while the other endpoint still maps it.

use super::{Case, Kind, Verdict};
use crate::rig::{Pair, Rig};
use std::path::Path;
use std::thread;
use std::time::Instant;
use tombolo::{Options, Stream};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;

pub const PV: &[Case] = &[Case { name: "ls_shows_a_channel_and_what_its_peer_keeps_mapped", run: shown }];

/// File that tells the listening program to close.
const WORD: &str = "/tmp/close";
/// Ring size of the channel in bytes; with the words before it the ring has 257 pages.
const RING: u64 = 1 << 20;

fn shown(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let (a, b) = (pair.number("A"), pair.number("B"));
    let keeper = pair.start("A", &format!("rm -f {WORD}; exec /agent keep xen:{b}/kept {WORD}"))?;
    let caller = pair.start("B", &format!("sleep 600 | tombolo cat --connect xen:{a}/kept --wait 60 --send-only"))?;
    ensure!(pair.at("A")?.line(keeper, within(60))? == "open", "nobody met");
    lists(pair, "A", &[&format!("xen:{b}/kept  open"), &format!("-> domain {b}")])?;
    lists(pair, "B", &[&format!("xen:{a}/kept  open"), &format!("domain {a} ->")])?;
    ensure!(!pair.sh("A", "tombolo ls")?.contains("quarantine"), "quarantine of a channel that is open");
    // A stopped program does not unmap.
    pair.sh("B", "killall -STOP tombolo")?;
    pair.sh("A", &format!("touch {WORD}"))?;
    ensure!(pair.at("A")?.line(keeper, within(60))? == "closed", "it does not close");
    lists(pair, "A", &[&format!("xen:{b}/kept  closed"), "quarantine 1.00 MiB"])?;
    let doctor = pair.sh("A", "tombolo doctor | grep -w xen")?;
    ensure!(doctor.contains("257 in quarantine"), "{doctor}");
    pair.sh("B", "killall -CONT tombolo")?;
    let deadline = within(60);
    while pair.sh("A", "tombolo ls")?.contains("quarantine") {
        ensure!(Instant::now() < deadline, "the other end unmapped it, and it is in quarantine for ever");
    }
    pair.sh("B", "killall sleep")?;
    pair.at("B")?.wait(caller, within(60))?;
    pair.at("A")?.kill(keeper)?;
    pair.at("A")?.wait(keeper, within(60))?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Checks that the list contains these words.
fn lists(pair: &mut Pair, at: &str, words: &[&str]) -> Result<()> {
    let list = pair.sh(at, "tombolo ls")?;
    let missing = words.iter().find(|word| !list.contains(**word));
    missing.map_or(Ok(()), |word| Err(Error::new(format!("{at}: `{word}` was expected: {list}"))))
}

/// Listens, keeps its channel until the file `word` exists, and continues to run after it has closed the channel.
pub fn hold_channel(address: &str, word: &str) -> Result<()> {
    let options = Options::new().ring_size(RING);
    let stream: Stream = tombolo::listen_with(address, &options)?.accept()?;
    println!("open");
    let deadline = within(300);
    while !Path::new(word).try_exists().context(word)? {
        ensure!(Instant::now() < deadline, "nobody says that it is to close");
        thread::yield_now();
    }
    drop(stream);
    println!("closed");
    loop {
        thread::park();
    }
}
