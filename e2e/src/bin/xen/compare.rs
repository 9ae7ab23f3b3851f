// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `xen vchan`: compares libtombolo-vchan, over channels and in the original's layout, with the original. The
//! comparison is between the same two domUs, with rings of the same size, in one run.

use crate::demo::{self, Serving};
use crate::rig::Rig;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use tombolo_e2e::error::Result;
use tombolo_e2e::runner;
use tombolo_e2e::xen::host::Kind;

/// The original, its functions over channels, and Tombolo's implementation of its layout.
pub const TRANSPORTS: [&str; 3] = ["libxenvchan", "tombolo-vchan", "tombolo-wire"];
const TABLES: [(&str, &str); 2] = [
    ("throughput", "--size 64,1KiB,4KiB,16KiB,64KiB,1MiB --seconds 0.25 --runs 5"),
    ("latency", "--size 64,1KiB,4KiB --wait sleep --think 300 --seconds 0.25 --runs 5"),
];
/// Number of messages that are sent while Xen counts their cost, and their sizes.
const MESSAGES: usize = 20_000;
const COUNTED: [usize; 3] = [64, 1024, 4096];

/// Runs the whole comparison. Lines of JSON, the text and charts are written to the folder `to`.
pub fn run(to: &Path) -> Result<()> {
    let mut rig = Rig::for_results(to, "vchan.txt", Kind::Pv)?;
    let mut server = Serving::start(rig.pair(Kind::Pv)?)?;
    let mut text = String::new();
    for ring in ["64KiB", "1MiB"] {
        let mut lines = String::new();
        for (test, options) in TABLES {
            eprintln!("{test}, rings of {ring}");
            let options = format!("--test {test} {options} --ring {ring} --transport {}", TRANSPORTS.join(","));
            lines += &server.measure(rig.pair(Kind::Pv)?, &options)?;
        }
        text += &demo::tables(&rig, to, ring, &lines)?;
        // Keeps the results even if a later part fails.
        fs::write(to.join("so-far.txt"), &text)?;
    }
    text += &events(&mut rig, &mut server)?;
    let pair = rig.pair(Kind::Pv)?;
    pair.host.check()?;
    text += &server.end(pair)?;
    fs::rename(to.join("so-far.txt"), to.join("vchan.txt"))?;
    fs::write(to.join("vchan.txt"), &text)?;
    println!("{text}\nLines of JSON, charts and this text are in {}.", to.display());
    runner::Rig::finish(rig)
}

/// Measures the event channel operations that messages cost, by Xen's own count: events sent and unmasked, of both
/// domUs.
fn events(rig: &mut Rig, server: &mut Serving) -> Result<String> {
    let mut text = format!("event channel operations for each of {MESSAGES} messages, rings of 64 KiB\n");
    writeln!(text, "{:<16}{:>10}{:>10}{:>10}", "", COUNTED[0], COUNTED[1], COUNTED[2])?;
    for transport in TRANSPORTS {
        write!(text, "{transport:<16}")?;
        for size in COUNTED {
            eprintln!("events: {transport}, {size} bytes");
            let volume = size * MESSAGES / 1024;
            let options = format!(
                "--test switches --volume {volume}KiB --size {size} --runs 1 --ring 64KiB --transport {transport}"
            );
            let share = demo::trace(rig, |pair| server.measure(pair, &options).map(drop))?;
            let operations = share.hypercalls.get("evtchn_op").copied().unwrap_or_default();
            write!(text, "{:>10.3}", operations as f64 / MESSAGES as f64)?;
        }
        text += "\n";
    }
    Ok(text + "\n")
}
