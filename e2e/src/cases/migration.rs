// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine migrates: its links are left, its devices go, and it gets new ones at its destination (B-26, B-27).

use super::life::{Flow, small_file};
use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, Purpose, Site, line};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Error, Result};
use tombolo_e2e::guest::pass;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::scratch::Scratch;

pub const CASES: &[Case] = &[Case { name: "b26_b27_machine_with_links_migrates_under_load", run: migrates }];
pub const HALVES: &[Half] = &[("migration::serve", serve), ("migration::watch", watch)];

const PORT: u16 = 5000;
/// File that exists once enough numbers have come.
const ENOUGH: &str = "/tmp/enough";

fn migrates(rig: &mut Rig) -> Result<Verdict> {
    rig.rest()?;
    let mut site = Site::boot(&rig.parts, Purpose::Measuring)?;
    if let Err(why) = &site.network {
        return Ok(Verdict::Skip { need: "netns", why: why.to_string() });
    }
    match travel(&mut site) {
        Ok(()) => site.finish().map(|()| Verdict::Done),
        Err(why) => Err(Error::new(format!("{why}\n{}", site.report()))),
    }
}

fn travel(site: &mut Site) -> Result<()> {
    let numbers = Numbers::start(site, |site, at, words| site.vm(at).start(words))?;
    let flow = Flow::start(site)?;
    // Canary: a machine without preparation cannot migrate.
    let refused = site.a.qmp.run("migrate", &json!({ "uri": "unix:/nowhere" })).err().map(|why| why.to_string());
    ensure!(refused.as_ref().is_some_and(|why| why.contains("Migration is disabled")), "{refused:?}");

    let ready = prepare(site)?;
    flow.was_left(site)?;
    ensure!(site.broker.link(&["add", "a", "host"]).is_err(), "it gets a link though it is ready to migrate");
    println!("ready after {} ms, {}", ready["ms"], leave(site)?);
    small_file(site)?;

    // A machine that stays after all. Its emulated QEMU would end at the next device if nothing prevented that.
    tombolo_vm(site, "prepare-migration")?;
    match tombolo_vm(site, "cancel-migration") {
        Ok(_) => {
            site.link("a", "b")?;
            site.unlink()?;
            site.link("a", "b")?;
            small_file(site)?;
        }
        // Something else was opened in the moment in which its descriptor numbers were free: the machine continues
        // without links.
        Err(why) if why.to_string().contains("would not survive another device") => println!("no way back: {why}"),
        Err(why) => return Err(why),
    }
    ensure!(site.a.ended().is_none(), "its QEMU did not survive");

    println!("{}", numbers.end(site)?);
    Ok(())
}

/// A connection from b to a that carries numbers.
pub struct Numbers {
    serving: Job,
    watching: Job,
}

impl Numbers {
    /// Starts both programs with `start`.
    pub fn start(site: &mut Site, start: impl Fn(&mut Site, At, &[&str]) -> Result<Job>) -> Result<Self> {
        let serving = start(site, At::A, &["/agent", "guest", "migration::serve"])?;
        line(&mut site.a, serving, "listening", within(60))?;
        let address = format!("{}:{PORT}", site.addresses[At::A as usize]);
        let watching = start(site, At::B, &["/agent", "guest", "migration::watch", &address])?;
        line(&mut site.b, watching, "connected", within(60))?;
        Ok(Self { serving, watching })
    }

    /// Ends the connection, and returns a text with the longest silence.
    pub fn end(self, site: &mut Site) -> Result<String> {
        site.b.sh(&format!("touch {ENOUGH}"), within(60))?;
        let silence = line(&mut site.b, self.watching, "silence", within(120))?;
        site.b.wait(self.watching, within(60))?.success()?;
        site.a.kill(self.serving)?;
        site.a.wait(self.serving, within(60))?;
        Ok(format!("numbers of a TCP connection came in order, the longest silence was {silence}"))
    }
}

/// Makes a, with its one link, ready to leave.
pub fn prepare(site: &Site) -> Result<Value> {
    let ready = tombolo_vm(site, "prepare-migration")?;
    ensure!(ready["links"] == 1 && ready["cut"] == 0, "{ready}");
    Ok(ready)
}

/// Moves a, which is ready, to another QEMU. Returns a text with the times.
pub fn leave(site: &mut Site) -> Result<String> {
    wait_for_guest(site, "this machine's doorbell device was taken away")?;
    let folder = Scratch::new("migration")?;
    let socket = folder.path().join("socket");
    let target = site.target(At::A, &socket)?;
    let began = Instant::now();
    let took = site.a.migrate(target, &socket)?;
    wait_for_guest(site, "this machine has a doorbell device again")?;
    site.link("a", "b")?;
    Ok(format!("migrated in {took:?}, the link is up {:?} later", began.elapsed() - took))
}

/// Returns the output of `tombolo vm WHAT a`.
fn tombolo_vm(site: &Site, what: &str) -> Result<Value> {
    let socket = site.broker.folder().join("tombolod.socket");
    let socket = socket.to_str().unwrap_or_default();
    Ok(serde_json::from_str(site.broker.tombolo(&["vm", "--broker", socket, what, "a", "--json"])?.trim())?)
}

/// Waits until the broker in a prints a line with these words.
fn wait_for_guest(site: &mut Site, words: &str) -> Result<()> {
    let broker = site.brokers[At::A as usize].ok_or_else(|| Error::new("no broker in a"))?;
    let deadline = within(60);
    while !site.a.line(broker, deadline)?.contains(words) {}
    Ok(())
}

/// Sends numbers to one client, in order and without end.
fn serve(_args: &[String]) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    println!("listening");
    let mut stream = listener.accept()?.0;
    for block in (0_u64..).step_by(64) {
        let bytes: Vec<u8> = (block..block + 64).flat_map(u64::to_le_bytes).collect();
        if stream.write_all(&bytes).is_err() {
            break;
        }
        pass(Duration::from_millis(2));
    }
    Ok(())
}

/// Reads numbers in order until there are enough, and prints the longest silence.
fn watch(args: &[String]) -> Result<()> {
    let address = args.first().ok_or_else(|| Error::new("where?"))?;
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    println!("connected");
    let (mut number, mut last, mut longest) = ([0; 8], Instant::now(), Duration::ZERO);
    for next in 0_u64.. {
        stream.read_exact(&mut number)?;
        let got = u64::from_le_bytes(number);
        ensure!(got == next, "{got} came instead of {next}");
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if next % 64 == 0 && Path::new(ENOUGH).exists() {
            break;
        }
    }
    println!("silence {longest:?}");
    Ok(())
}
