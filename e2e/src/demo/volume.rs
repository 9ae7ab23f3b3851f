// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moves a volume in writes of 32 KiB, over a channel and over TCP. Counts the device accesses, how often processes had
//! to wait, and who used the processors. QEMU's own trace counts the devices' events; the guests count interrupts of
//! doorbells.

use super::goals::{Goal, Goals};
use super::table::spread;
use super::word;
use crate::site::{At, Site};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};
use tombolo::{Options, PipeStatistics, Stream};
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::qemu::Vm;

/// Bytes of a write.
const WRITE: usize = 32 << 10;
/// Events that are counted: stores to the doorbell, and notifications of a virtio device in both directions.
const EVENTS: [&str; 3] = ["memory_region_ops_write", "virtio_queue_notify", "virtio_notify"];
/// File whose existence tells the sender to begin.
const BEGIN: &str = "/tmp/begin";

/// Costs of one transfer.
struct Taken {
    seconds: f64,
    /// Voluntary context switches of the two processes.
    waits: f64,
    /// Context switches of the two machines, beyond those when idle.
    switches: f64,
    kicks: f64,
    interrupts: f64,
    /// Processor seconds of the machines, and of the brokers.
    machines: f64,
    brokers: f64,
    /// Counters of a channel's two endpoints: the sender's, the receiver's.
    ends: [String; 2],
}

/// A row: its title, its value, the decimal places, and the goal for the ratio of TCP's value to Tombolo's.
type Row = (&'static str, fn(&Taken) -> f64, usize, Option<Goal>);
/// Goal for the brokers' share of all processor time, in percent.
const BROKERS: Goal = Goal::Most(1.0);

/// Moves the volume over both transports and prints the table.
pub fn show(site: &mut Site, volume: u64, times: u32, goals: &mut Goals) -> Result<()> {
    let idle = idle(site)?;
    let place = format!("{}:{}", site.addresses[1], super::PORT + 1);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // Alternates, so that other load on this machine affects both.
    for _ in 0..times {
        ours.push(taken(site, "vm:b/volume", volume, idle)?);
        theirs.push(taken(site, &place, volume, idle)?);
    }
    let title = format!("{} MiB from a to b in writes of {} KiB, {times} times", volume >> 20, WRITE >> 10);
    println!("{title:<58} {:>26} {:>30} {:>9}", "Tombolo (least to most)", "TCP (least to most)", "times");
    let rows: [Row; 8] = [
        ("seconds", |it| it.seconds, 2, None),
        ("stores to the doorbell, kicks of virtio", |it| it.kicks, 0, None),
        ("interrupts of these devices", |it| it.interrupts, 0, None),
        ("device accesses: the sum of both", |it| it.kicks + it.interrupts, 0, Some(Goal::Least(31.6))),
        ("voluntary context switches of the two processes", |it| it.waits, 0, Some(Goal::Least(50.0))),
        ("context switches of both machines, less those when idle", |it| it.switches, 0, None),
        ("processor seconds of both machines", |it| it.machines, 2, None),
        ("processor seconds of the host's brokers", |it| it.brokers, 2, None),
    ];
    for (what, of, digits, goal) in rows {
        let (ours, theirs) = (spread(ours.iter().map(of).collect()), spread(theirs.iter().map(of).collect()));
        let cell = |[median, least, most]: [f64; 3]| format!("{median:.digits$} ({least:.digits$} to {most:.digits$})");
        let ratio = theirs[0] / ours[0];
        let times = if ours[0] > 0.0 { format!("{ratio:.1}") } else { String::new() };
        let goal = goals.beside(what, ratio, goal);
        println!("{what:<58} {:>26} {:>30} {times:>9}  {goal}", cell(ours), cell(theirs));
    }
    let brokers: f64 = ours.iter().map(|it| it.brokers).sum();
    let machines: f64 = ours.iter().map(|it| it.machines).sum();
    let share = 100.0 * brokers / (machines + brokers);
    for it in &ours {
        println!("{:.2} s: sender {}; receiver {}", it.seconds, it.ends[0], it.ends[1]);
    }
    let goal = goals.beside("percent of the processor time that brokers took", share, Some(BROKERS));
    println!("brokers on the host: {share:.2} % of the processor time ({goal})\n");
    Ok(())
}

/// Returns the context switches of both machines in a second in which they do nothing.
fn idle(site: &mut Site) -> Result<f64> {
    let (before, start) = (switches(site)?, Instant::now());
    site.a.sh("sleep 3", within(60))?;
    Ok((switches(site)? - before) as f64 / start.elapsed().as_secs_f64())
}

fn taken(site: &mut Site, place: &str, volume: u64, idle: f64) -> Result<Taken> {
    let receiver = crate::site::start(&mut site.b, "volume::receive", &[place])?;
    word(&mut site.b, receiver, "listening")?;
    let sender = crate::site::start(&mut site.a, "volume::send", &[place, &volume.to_string()])?;
    word(&mut site.a, sender, "connected")?;
    // Both ends exist and wait: the counts from here on are those of the transfer and of the command to begin.
    let interrupts = rung(site)?;
    let machines = [site.a.process(), site.b.process()];
    let (switched, used, brokers) = (switches(site)?, processors(&machines)?, site.broker.processes());
    let (brokered, start) = (processors(&brokers)?, Instant::now());
    let counts = [Count::start(&mut site.a)?, Count::start(&mut site.b)?];
    site.a.sh(&format!("touch {BEGIN}"), within(60))?;
    let sent = numbers(&word(&mut site.a, sender, "sent")?)?;
    let received = numbers(&word(&mut site.b, receiver, "received")?)?;
    let ends = if place.starts_with("vm:") {
        [word(&mut site.a, sender, "counted")?, word(&mut site.b, receiver, "counted")?]
    } else {
        Default::default()
    };
    let mut counted = [0; 2];
    for (count, at) in counts.into_iter().zip([At::A, At::B]) {
        let new = count.stop(site.vm(at))?;
        (counted[0], counted[1]) = (counted[0] + new[0], counted[1] + new[1]);
    }
    let taken = Taken {
        seconds: received[0],
        waits: sent[2] + received[2],
        switches: ((switches(site)? - switched) as f64 - idle * start.elapsed().as_secs_f64()).max(0.0),
        kicks: counted[0] as f64,
        interrupts: (counted[1] + rung(site)? - interrupts) as f64,
        machines: processors(&machines)? - used,
        brokers: processors(&brokers)? - brokered,
        ends,
    };
    site.a.wait(sender, within(60))?.success()?;
    site.b.wait(receiver, within(60))?.success()?;
    site.a.sh(&format!("rm {BEGIN}"), within(60))?;
    ensure!(sent[1] == received[1] && sent[1] >= volume as f64, "{sent:?} sent, {received:?} received");
    Ok(taken)
}

/// Parses the seconds, bytes and waits of a process.
fn numbers(text: &str) -> Result<[f64; 3]> {
    let numbers = text.split(' ').map(str::parse).collect::<std::result::Result<Vec<f64>, _>>().context(text)?;
    <[f64; 3]>::try_from(numbers).map_err(|_| Error::new(format!("not three numbers: {text}")))
}

/// Returns the context switches of both machines since they booted.
fn switches(site: &mut Site) -> Result<u64> {
    sum(site, "sed -n 's/^ctxt //p' /proc/stat")
}

/// Returns the interrupts that doorbells caused in both machines since they booted.
pub fn rung(site: &mut Site) -> Result<u64> {
    sum(site, "sed -n '/tombolo/{s/^ *[0-9]*: *//;s/ .*//;p}' /proc/interrupts")
}

/// Returns the sum of the numbers that a command prints in both machines.
fn sum(site: &mut Site, command: &str) -> Result<u64> {
    let mut sum = 0;
    for at in [At::A, At::B] {
        for line in site.vm(at).sh(command, within(60))?.lines() {
            sum += line.trim().parse::<u64>().context(line)?;
        }
    }
    Ok(sum)
}

/// Returns the processor seconds that processes of the host have used.
pub fn processors(processes: &[u32]) -> Result<f64> {
    let mut ticks = 0;
    for process in processes {
        let text = fs::read_to_string(format!("/proc/{process}/stat")).context("stat")?;
        let fields: Vec<&str> = text.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        for at in [11, 12] {
            ticks += fields.get(at).ok_or_else(|| Error::new("a short stat"))?.parse::<u64>()?;
        }
    }
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// QEMU's trace of a machine's devices while the trace is switched on.
pub struct Count {
    /// Length of the trace at the start.
    from: u64,
}

impl Count {
    /// Starts counting.
    pub fn start(vm: &mut Vm) -> Result<Self> {
        let from = fs::metadata(trace(vm)?).map_or(0, |file| file.len());
        EVENTS.iter().try_for_each(|event| vm.trace(event, true))?;
        Ok(Self { from })
    }

    /// Stops counting. Returns the stores and kicks, and the interrupts of virtio.
    pub fn stop(self, vm: &mut Vm) -> Result<[u64; 2]> {
        EVENTS.iter().try_for_each(|event| vm.trace(event, false))?;
        let bytes = fs::read(trace(vm)?)?;
        let text = String::from_utf8_lossy(bytes.get(self.from as usize..).unwrap_or_default());
        let count = |of: fn(&str) -> bool| text.lines().filter(|line| of(line)).count() as u64;
        Ok([
            count(|line| line.contains("virtio_queue_notify ") || line.contains("'ivshmem-mmio'")),
            count(|line| line.contains("virtio_notify ")),
        ])
    }
}

fn trace(vm: &Vm) -> Result<&Path> {
    vm.log.as_deref().ok_or_else(|| Error::new("this machine's QEMU keeps no log"))
}

/// Returns how often the threads of this program had to wait.
fn waits() -> Result<u64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    Ok(line.ok_or_else(|| Error::new("no context switches"))?.trim().parse()?)
}

fn address(args: &[String]) -> Result<&str> {
    Ok(args.first().ok_or_else(|| Error::new("where?"))?)
}

/// Sends `volume` bytes over a channel or TCP, once the file tells it to begin.
pub fn send(args: &[String]) -> Result<()> {
    let volume: u64 = args.get(1).ok_or_else(|| Error::new("how much?"))?.parse()?;
    let place = address(args)?;
    if !place.starts_with("vm:") {
        return pour(&mut TcpStream::connect(place)?, volume);
    }
    let options = Options::new().wait_for_listener(Duration::from_secs(60));
    let mut stream = tombolo::connect_with::<Stream>(place, &options)?;
    pour(&mut stream, volume)?;
    print_waits(&stream.statistics().sent);
    Ok(())
}

fn pour(end: &mut impl Write, volume: u64) -> Result<()> {
    println!("connected");
    tombolo_e2e::guest::until(within(300), || Path::new(BEGIN).exists())?;
    let (before, start, mut block) = (waits()?, Instant::now(), vec![0x5a; WRITE]);
    let mut sent: u64 = 0;
    while sent < volume {
        block[..8].copy_from_slice(&sent.to_le_bytes());
        end.write_all(&block)?;
        sent += WRITE as u64;
    }
    end.flush()?;
    println!("sent {} {sent} {}", start.elapsed().as_secs_f64(), waits()? - before);
    Ok(())
}

/// Receives all bytes of a channel or TCP connection, and checks the number of each block.
pub fn receive(args: &[String]) -> Result<()> {
    let place = address(args)?;
    if !place.starts_with("vm:") {
        let listener = TcpListener::bind(place)?;
        println!("listening");
        return drain(&mut listener.accept()?.0);
    }
    let mut listener = tombolo::listen(place)?;
    println!("listening");
    let mut stream = listener.accept()?;
    drain(&mut stream)?;
    print_waits(&stream.statistics().received);
    Ok(())
}

/// Prints how an endpoint of a channel waited.
fn print_waits(pipe: &PipeStatistics) {
    let it = pipe.counters;
    println!(
        "counted {} stalls, {} spins that paid and {} that did not, {} sleeps, {} notifications sent and {} saved",
        it.stalls, it.spins_paid, it.spins_wasted, it.sleeps, it.notifications_sent, it.notifications_suppressed
    );
}

fn drain(end: &mut impl Read) -> Result<()> {
    let mut buffer = vec![0; 2 * WRITE];
    let mut got = end.read(&mut buffer)?;
    let (before, start, mut total, mut next) = (waits()?, Instant::now(), 0_u64, 0_u64);
    while got > 0 {
        // Checks the number of each block that begins in the received bytes, unless the number was cut.
        while next < total + got as u64 {
            let at = (next - total) as usize;
            if let Some(number) = buffer[..got].get(at..at + 8) {
                ensure!(number == next.to_le_bytes(), "block {next} begins with {number:?}");
            }
            next += WRITE as u64;
        }
        total += got as u64;
        got = end.read(&mut buffer)?;
    }
    println!("received {} {total} {}", start.elapsed().as_secs_f64(), waits()? - before);
    Ok(())
}
