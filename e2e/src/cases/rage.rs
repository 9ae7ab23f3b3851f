// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hostile machine beside an honest one: it accesses the devices itself, without Tombolo's driver and broker. Its own
//! links suffer; those of others, the host's broker and the honest machine's kernel do not.

use super::unplug::SIGBUS;
use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site, line, start};
use rustix::fs::{Mode, OFlags, open};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};
use tombolo::{Options, Stream};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::sys::Mapping;
use tombolo_e2e::guest::until;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::process::Process;
use tombolo_e2e::scratch::Scratch;
use tombolo_e2e::wire::End;

pub const CASES: &[Case] = &[
    Case { name: "b5_machine_that_writes_whatever_it_can_reach_harms_only_its_own_links", run: noise },
    Case { name: "b14_machine_that_calls_ten_thousand_times_and_hangs_up_never_is_bounded", run: calls },
];
pub const LONG_CASES: &[Case] =
    &[Case { name: "b8_machine_that_storms_doorbells_loses_them_and_it_is_said", run: storm }];
pub const HALVES: &[Half] = &[("rage::storm", guest_storm), ("rage::noise", guest_noise), ("rage::call", guest_call)];

/// Offset of the doorbell register among a device's registers.
const DOORBELL: usize = 12;
/// Number of peers that it tries to notify: the host's broker is 0, and peers have numbers above 1.
const PEERS: u32 = 16;
/// How long it notifies one of them without a break.
const STRETCH: Duration = Duration::from_secs(2);
/// Number of times that interrupts must be held back before a storm counts as a lasting one.
const HELD: u64 = 32;
/// Budget for interrupts: the usual one, and one for emulation, which delivers only some hundreds of interrupts in a
/// second.
const USUAL: u32 = 1024;
const SLOW: u32 = 48;
/// Length of a run in seconds.
const LONG: u64 = 10;
/// Growth of the host's broker that is allowed, in KiB.
const GROWTH: u64 = 16 << 10;

/// Resources that the host's broker uses: KiB of memory, and ticks of processor time.
struct Use(u64, u64);

impl Use {
    fn of(site: &Site) -> Result<Self> {
        let mut all = Self(0, 0);
        for process in site.broker.processes() {
            let status = fs::read_to_string(format!("/proc/{process}/status"))?;
            let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
            let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
            let times = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
            all.0 += resident.unwrap_or("0").parse::<u64>()?;
            all.1 += times.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>();
        }
        Ok(all)
    }

    /// Checks the growth and the processor time since this measurement, for the time that passed.
    fn is_bounded(&self, site: &Site, time: Duration) -> Result<()> {
        let now = Self::of(site)?;
        let (grown, busy) = (now.0.saturating_sub(self.0), Duration::from_millis(10 * (now.1 - self.1)));
        println!("the host's broker grew by {grown} KiB and was busy for {busy:?} of {time:?}");
        ensure!(grown < GROWTH, "the host's broker grew by {grown} KiB");
        ensure!(busy < time * 3 / 4, "the host's broker was busy for {busy:?} of {time:?}");
        Ok(())
    }
}

/// Sends a file from a to the host, which must arrive whole whatever b does.
fn transfer(site: &mut Site) -> Result<()> {
    let sum = site.a.sh("head -c 4194304 /dev/urandom > /tmp/mine && sha256sum < /tmp/mine", within(120))?;
    let folder = Scratch::new("mine")?;
    let copy = folder.path().join("copy");
    let listen = ["cat", "--listen", "vm:host/mine", "--receive-only", "--output", copy.to_str().unwrap_or_default()];
    let mut listener = Process::start(&mut site.broker.command(&[], &listen)?)?;
    site.a.sh("tombolo cat --connect vm:host/mine --wait 60 --send-only /tmp/mine", within(120))?;
    ensure!(listener.wait()?.success(), "who listens failed");
    let output = Command::new("sha256sum").stdin(fs::File::open(&copy)?).output().context("sha256sum")?;
    ensure!(String::from_utf8_lossy(&output.stdout).trim() == sum, "another file arrived");
    Ok(())
}

/// Makes links between all three, so that b has peers to harm.
fn links(site: &mut Site) -> Result<()> {
    [("a", "b"), ("a", "host"), ("b", "host")].iter().try_for_each(|(one, other)| site.link(one, other))
}

/// Boots the hostile machine anew. The honest one has its link with it again.
fn heal(site: &mut Site) -> Result<()> {
    site.b.cut()?;
    site.brokers[At::B as usize] = None;
    site.renew(At::B)?;
    links(site)?;
    let listener = site.b.start(&["sh", "-c", "tombolo cat --listen vm:b/well --receive-only"])?;
    site.a.sh("echo well | tombolo cat --connect vm:b/well --wait 60 --send-only", within(90))?;
    let got = site.b.wait(listener, within(60))?.success()?;
    ensure!(got == "well", "{got} arrived");
    Ok(())
}

/// Returns the number of storms that the module of machine a counted.
fn storms(site: &mut Site) -> Result<u64> {
    Ok(site.a.sh("cat /sys/class/misc/tombolo*/storms | sort -n | tail -n 1", within(60))?.trim().parse()?)
}

/// Sets the budget for interrupts of machine a within a tick.
fn set_budget(site: &mut Site, budget: u32) -> Result<()> {
    site.a.sh(&format!("echo {budget} > /sys/module/tombolo_ivshmem/parameters/budget"), within(60)).map(drop)
}

fn storm(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    set_budget(site, SLOW)?;
    let verdict = stormed(site)?;
    set_budget(site, USUAL)?;
    Ok(verdict)
}

fn stormed(site: &mut Site) -> Result<Verdict> {
    links(site)?;
    let (before, used, began) = (storms(site)?, Use::of(site)?, Instant::now());
    let job = start(&mut site.b, "rage::storm", &[&(9 * LONG).to_string()])?;
    line(&mut site.b, job, "ringing", within(60))?;
    let mut noted = String::new();
    let said = until(within(8 * LONG), || {
        let rows = site.broker.list(&[]).unwrap_or_default();
        noted = rows.iter().filter_map(|row| row["note"].as_str()).collect::<Vec<_>>().join("; ");
        noted.contains("b rings a without end: its doorbell is taken away")
    });
    if said.is_err() {
        let counted = storms(site)? - before;
        ensure!(counted < HELD, "interrupts were held back {counted} times, and `link ls` says only: {noted}");
        heal(site)?;
        let why = format!("emulation is too slow now: what b rang had to be held back only {counted} times");
        return Ok(Verdict::Skip { need: "speed", why });
    }
    println!("said after {:?}: {noted}", began.elapsed());
    transfer(site)?;
    used.is_bounded(site, began.elapsed())?;
    let counted = storms(site)?;
    ensure!(counted > before, "the module of a counts {before}, then {counted}");
    let doctor = site.a.sh("tombolo doctor || true", within(60))?;
    ensure!(doctor.contains("a peer rang without end"), "doctor does not say so:\n{doctor}");
    site.b.kill(job)?;
    site.b.wait(job, within(60))?;
    heal(site)?;
    Ok(Verdict::Done)
}

fn noise(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    links(site)?;
    let (used, began) = (Use::of(site)?, Instant::now());
    let mut job = start(&mut site.b, "rage::noise", &[&(2 * LONG).to_string()])?;
    line(&mut site.b, job, "writing", within(60))?;
    transfer(site)?;
    transfer(site)?;
    let reached = loop {
        let ended = site.b.wait(job, within(120))?;
        // The host has taken a device away from the program, which restarts with the devices that are left.
        if ended.end != End::Signal(SIGBUS) {
            break ended.success()?;
        }
        let left = (2 * LONG).saturating_sub(began.elapsed().as_secs()).max(1);
        job = start(&mut site.b, "rage::noise", &[&left.to_string()])?;
    };
    println!("{}", reached.lines().last().unwrap_or_default());
    used.is_bounded(site, began.elapsed())?;
    transfer(site)?;
    heal(site)?;
    Ok(Verdict::Done)
}

fn calls(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    links(site)?;
    let (used, began) = (Use::of(site)?, Instant::now());
    // Starts a listener that accepts every connection, and never closes one either.
    let listener = start(&mut site.a, "rage::call", &["listen", "vm:a/open"])?;
    line(&mut site.a, listener, "listening", within(60))?;
    let job = start(&mut site.b, "rage::call", &["connect", "vm:a/open", "10000"])?;
    line(&mut site.b, job, "calling", within(60))?;
    transfer(site)?;
    let said = site.b.wait(job, within(600))?.success()?;
    println!("{}", said.lines().last().unwrap_or_default());
    transfer(site)?;
    used.is_bounded(site, began.elapsed())?;
    site.a.kill(listener)?;
    site.a.wait(listener, within(60))?;
    // The link has room again, without a new incarnation of either machine.
    let small = site.b.start(&["sh", "-c", "tombolo cat --listen vm:b/again --receive-only"])?;
    site.a.sh("echo again | tombolo cat --connect vm:b/again --wait 60 --send-only", within(90))?;
    let got = site.b.wait(small, within(60))?.success()?;
    ensure!(got == "again", "{got} arrived");
    Ok(Verdict::Done)
}

/// A Tombolo device without Tombolo's driver.
struct Raw(String);

impl Raw {
    /// Takes all devices from the driver. Returns these and those that were taken before.
    fn all() -> Result<Vec<Self>> {
        let mut taken = Vec::new();
        for entry in fs::read_dir("/sys/bus/pci/devices")? {
            let device = entry?.path();
            let is = |what, number: &str| fs::read_to_string(device.join(what)).is_ok_and(|said| said.trim() == number);
            if is("vendor", "0x1af4") && is("device", "0x1110") {
                let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if device.join("driver").exists() {
                    fs::write(device.join("driver/unbind"), &name)?;
                    fs::write(device.join("enable"), "1")?;
                }
                taken.push(Self(name));
            }
        }
        ensure!(!taken.is_empty(), "there are no devices");
        Ok(taken)
    }

    /// Maps a resource of the device for reading and writing, if the device has it.
    fn window(&self, number: u32) -> Option<Mapping> {
        let path = format!("/sys/bus/pci/devices/{}/resource{number}", self.0);
        let len = usize::try_from(fs::metadata(&path).ok()?.len()).ok()?;
        let file = open(&path, OFlags::RDWR | OFlags::SYNC, Mode::empty()).ok()?;
        Mapping::writable(&file, len).ok()
    }
}

/// Returns the time at which the program must end.
fn end(args: &[String]) -> Result<Instant> {
    let seconds: u64 = args.first().ok_or_else(|| Error::new("how long?"))?.parse()?;
    Ok(Instant::now() + Duration::from_secs(seconds))
}

/// Notifies all possible peers as fast as it can, one after the other. The peers' numbers are unknown, because they
/// went with the broker. If it notified all at once, each would get too few notifications for a storm.
fn guest_storm(args: &[String]) -> Result<()> {
    let end = end(args)?;
    let registers: Vec<Mapping> = Raw::all()?.iter().filter_map(|device| device.window(0)).collect();
    println!("ringing");
    let mut rings = 0_u64;
    while Instant::now() < end {
        for peer in (2..PEERS).chain(0..2) {
            let next = end.min(Instant::now() + STRETCH);
            while Instant::now() < next {
                for registers in registers.iter().flat_map(|registers| [registers; 256]) {
                    registers.store_register(DOORBELL, peer << 16);
                }
                rings += 256;
            }
        }
    }
    println!("rang {rings} times");
    Ok(())
}

/// Writes random bytes to all memory that it can reach, and notifies the peers so that they notice.
fn guest_noise(args: &[String]) -> Result<()> {
    let end = end(args)?;
    let devices = Raw::all()?;
    let memories: Vec<Mapping> = devices.iter().filter_map(|device| device.window(2)).collect();
    let registers: Vec<Mapping> = devices.iter().filter_map(|device| device.window(0)).collect();
    ensure!(!memories.is_empty(), "there is no memory to write to");
    println!("writing");
    let (mut seed, mut stores) = (0x9e37_79b9_7f4a_7c15_u64, 0_u64);
    while Instant::now() < end {
        for memory in &memories {
            for _ in 0..4096 {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                // Half of the stores go to the first page of each memory, where brokers and drivers look.
                let within = if seed & 1 == 0 { 4096 } else { memory.size() };
                memory.store((seed >> 8) as usize % within, (seed >> 56) as u8);
                stores += 1;
            }
        }
        registers.iter().for_each(|registers| registers.store_register(DOORBELL, (seed as u32 % PEERS) << 16));
    }
    println!("{stores} stores into {} memories", memories.len());
    Ok(())
}

/// Connects so many times and keeps the connections; or accepts all connections and keeps them.
fn guest_call(args: &[String]) -> Result<()> {
    let mut kept: Vec<Stream> = Vec::new();
    match args {
        [what, address] if what == "listen" => {
            let mut listener = tombolo::listen(address)?;
            println!("listening");
            loop {
                kept.extend(listener.accept().ok());
            }
        }
        [what, address, times] if what == "connect" => {
            println!("calling");
            let (mut refused, mut last) = (0_u32, String::new());
            let wait = Options::new();
            for _ in 0..times.parse::<u32>()? {
                match tombolo::connect_with::<Stream>(address, &wait) {
                    Ok(stream) => kept.push(stream),
                    Err(why) => (refused, last) = (refused + 1, why.to_string()),
                }
            }
            ensure!(!kept.is_empty() && refused > 0, "{} kept, {refused} refused: {last}", kept.len());
            println!("{} kept, {refused} refused: {last}", kept.len());
            Ok(())
        }
        other => Err(Error::new(format!("{other:?}"))),
    }
}
