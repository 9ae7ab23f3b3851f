// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An interface of the module under load, while the case does everything to it that can be done. Bytes arrive as they
//! were sent. Connections continue, or fail with an error of TCP itself where the other machine has lost them.

use super::net::{down, up, wait_carrier, wait_for};
use super::{Case, Half, Verdict, long};
use crate::rig::Rig;
use crate::site::{At, Site, line, start};
use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::{pass, until};
use tombolo_e2e::line_reader::within;

pub const CASES: &[Case] =
    &[Case { name: "n6_n10_n12_interface_of_the_module_is_changed_under_load_and_connections_go_on", run: changed }];
pub const HALVES: &[Half] = &[("net_load::pour", pour), ("net_load::answer", answer)];

/// Number of simultaneous connections, each busy in both directions.
pub(super) const CONNECTIONS: usize = 4;
const PORT: u16 = 10;
/// Words of eight bytes that a connection writes at once.
const WORDS: usize = 2048;
/// Marks the end of the answering side's words; the number of words that it received follows.
const END: u64 = u64::MAX;
/// File whose existence tells the sender to end.
const STOP: &str = "/tmp/net-stop";
/// Time without data after which a connection counts as stalled. Where a machine was gone for half a minute, TCP tries
/// again only a minute after it went.
const PATIENCE: Duration = Duration::from_secs(150);

/// Returns the word at a position of a stream. It differs for each connection and direction.
fn word(seed: u64, at: u64) -> u64 {
    (at ^ seed << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1
}

/// Compares words with the expected ones, from a position on.
fn check(seed: u64, from: u64, bytes: &[u8]) -> Result<()> {
    for (at, chunk) in (from..).zip(bytes.chunks_exact(8)) {
        let (came, wanted) = (u64::from_le_bytes(chunk.try_into()?), word(seed, at));
        ensure!(came == wanted, "word {at} of stream {seed} is {came:#x}, not {wanted:#x}");
    }
    Ok(())
}

/// Reason why a connection ended early.
#[derive(Debug)]
enum Failed {
    /// TCP reported an error.
    Broken(std::io::Error),
    /// The data are wrong, or the connection stalls.
    Wrong(Error),
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::UnexpectedEof => Self::Wrong(error.into()),
            _ => Self::Broken(error),
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Wrong(error)
    }
}

fn is_whole(kept: usize) -> Result<()> {
    ensure!(kept == 0, "a stream ends within a word");
    Ok(())
}

fn has_come(counted: u64, written: u64) -> Result<()> {
    ensure!(counted == written, "{counted} of {written} words came");
    Ok(())
}

/// Incoming words, compared as they arrive.
struct Words {
    stream: TcpStream,
    seed: u64,
    words: u64,
    kept: usize,
    room: Vec<u8>,
}

impl Words {
    fn new(stream: TcpStream, seed: u64) -> Self {
        Self { stream, seed, words: 0, kept: 0, room: vec![0; 8 * WORDS] }
    }

    /// Reads once. Returns the word that follows [`END`], or zero at the end of the stream; else nothing.
    fn read(&mut self) -> std::result::Result<Option<u64>, Failed> {
        let got = self.stream.read(&mut self.room[self.kept..])?;
        is_whole(if got == 0 { self.kept } else { 0 })?;
        let all = self.kept + got;
        let whole = &self.room[..all / 8 * 8];
        let end = whole.chunks_exact(8).position(|chunk| chunk == END.to_le_bytes());
        let words = end.unwrap_or(whole.len() / 8);
        check(self.seed, self.words, &whole[..8 * words])?;
        self.words += words as u64;
        if end.is_some() {
            let mut count = [0; 8];
            let rest = &self.room[8 * words + 8..all];
            count[..rest.len()].copy_from_slice(rest);
            self.stream.read_exact(&mut count[rest.len()..])?;
            return Ok(Some(u64::from_le_bytes(count)));
        }
        self.room.copy_within(8 * words..all, 0);
        self.kept = all - 8 * words;
        if got == 0 { Ok(Some(0)) } else { Ok(None) }
    }
}

/// Writes words until `is_over` holds. Returns the number of words.
fn write_words(stream: &mut TcpStream, seed: u64, is_over: impl Fn() -> bool) -> std::io::Result<u64> {
    let mut next = 0;
    while !is_over() {
        let bytes: Vec<u8> = (next..next + WORDS as u64).flat_map(|at| word(seed, at).to_le_bytes()).collect();
        stream.write_all(&bytes)?;
        next += WORDS as u64;
    }
    Ok(next)
}

fn set_patience(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// Sends words over each connection, reads those of the other direction, and prints its progress. Replaces a connection
/// that fails.
fn pour(args: &[String]) -> Result<()> {
    let address = args.first().ok_or_else(|| Error::new("where?"))?;
    let read: [AtomicU64; CONNECTIONS] = std::array::from_fn(|_| AtomicU64::new(0));
    _ = std::fs::remove_file(STOP);
    thread::scope(|scope| {
        let all: Vec<_> =
            (1_u64..).zip(&read).map(|(seed, read)| scope.spawn(move || go_on(address, seed, read))).collect();
        while all.iter().any(|thread| !thread.is_finished()) {
            let counts: Vec<String> = read.iter().map(|read| read.load(Ordering::Relaxed).to_string()).collect();
            println!("read {}", counts.join(" "));
            pass(Duration::from_millis(100));
        }
        all.into_iter().try_for_each(|thread| thread.join().map_err(|_| Error::new("a thread panicked"))?)
    })
}

/// Makes one connection after the other, until the stop file exists.
fn go_on(address: &str, seed: u64, read: &AtomicU64) -> Result<()> {
    while !Path::new(STOP).exists() {
        let Ok(stream) = TcpStream::connect((address, PORT)) else {
            pass(Duration::from_millis(100));
            continue;
        };
        match talk(stream, seed, read) {
            Ok(words) => println!("whole {seed} {words}"),
            Err(Failed::Broken(error)) => println!("broken {seed} {:?}", error.kind()),
            Err(Failed::Wrong(why)) => return Err(why),
        }
    }
    Ok(())
}

fn talk(mut stream: TcpStream, seed: u64, read: &AtomicU64) -> std::result::Result<u64, Failed> {
    set_patience(&stream)?;
    stream.write_all(&seed.to_le_bytes())?;
    let (mut words, mut seen) = (Words::new(stream.try_clone()?, seed + 100), 0);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let written = write_words(&mut stream, seed, || Path::new(STOP).exists())?;
            stream.shutdown(Shutdown::Write)?;
            Ok::<_, std::io::Error>(written)
        });
        let counted = loop {
            match words.read() {
                Ok(None) => _ = read.fetch_add(words.words - seen, Ordering::Relaxed),
                Ok(Some(counted)) => break Ok(counted),
                Err(why) => break Err(why),
            }
            seen = words.words;
        };
        if counted.is_err() {
            _ = words.stream.shutdown(Shutdown::Both);
        }
        let written = writer.join().map_err(|_| Error::new("a thread panicked"))?;
        has_come(counted?, written?)?;
        Ok(words.words)
    })
}

/// Accepts connections for ever, and answers each with words until it has received all that is sent.
fn answer(_: &[String]) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    println!("listens");
    loop {
        let stream = listener.accept()?.0;
        thread::spawn(move || {
            if let Err(why) = answer_one(stream) {
                println!("failed {why:?}");
            }
        });
    }
}

fn answer_one(mut stream: TcpStream) -> std::result::Result<(), Failed> {
    set_patience(&stream)?;
    let mut seed = [0; 8];
    stream.read_exact(&mut seed)?;
    let seed = u64::from_le_bytes(seed);
    let mut words = Words::new(stream.try_clone()?, seed);
    let is_over = AtomicU64::new(0);
    thread::scope(|scope| {
        let writer = scope.spawn(|| write_words(&mut stream, seed + 100, || is_over.load(Ordering::Relaxed) == 1));
        let all = loop {
            match words.read() {
                Ok(None) => {}
                Ok(Some(_)) => break Ok(()),
                Err(why) => break Err(why),
            }
        };
        is_over.store(1, Ordering::Relaxed);
        if all.is_err() {
            _ = words.stream.shutdown(Shutdown::Both);
        }
        writer.join().map_err(|_| Error::new("a thread panicked"))??;
        all
    })?;
    let end = [END, words.words].map(u64::to_le_bytes).concat();
    stream.write_all(&end)?;
    Ok(stream.shutdown(Shutdown::Write)?)
}

/// Connections between the machines that are busy all the time.
pub(super) struct Load {
    pour: Job,
    answer: Job,
}

impl Load {
    pub(super) fn start(site: &mut Site, address: &str) -> Result<Self> {
        let answer = start_answer(site)?;
        let pour = start(&mut site.a, "net_load::pour", &[address])?;
        Ok(Self { pour, answer })
    }

    /// Starts answering in the machine that replaced the earlier one.
    pub(super) fn answer_anew(&mut self, site: &mut Site) -> Result<()> {
        self.answer = start_answer(site)?;
        Ok(())
    }

    fn latest(&self, site: &mut Site) -> Result<Vec<u64>> {
        let said = line(&mut site.a, self.pour, "read", within(90)).context("it says nothing more")?;
        Ok(said.split(' ').map(str::parse).collect::<std::result::Result<_, _>>()?)
    }

    /// Waits until each connection has received more than it had at the call. Returns how long that took.
    pub(super) fn goes_on(&self, site: &mut Site) -> Result<Duration> {
        let begun = Instant::now();
        while site.a.line(self.pour, Instant::now()).is_ok() {}
        let before = self.latest(site)?;
        loop {
            let now = self.latest(site)?;
            if before.iter().zip(&now).all(|(before, now)| now > before) {
                return Ok(begun.elapsed());
            }
            if begun.elapsed() > PATIENCE {
                let shown = [At::A, At::B].map(|at| {
                    let what = "cat /proc/net/tcp; ip addr show tmb0; tombolo net stat tmb0 --json; \
                        for it in /proc/[0-9]*/task/*; do grep -q agent $it/comm && \
                        echo $it $(cut -d' ' -f3,14,15 $it/stat) $(cat $it/wchan) $(cat $it/syscall); done; true";
                    site.vm(at).sh(what, within(60)).unwrap_or_else(|why| why.to_string())
                });
                let heard = site.a.printed(self.pour).iter().filter(|line| line.starts_with("broken"));
                let heard: Vec<_> = heard.chain(site.b.printed(self.answer)).cloned().collect();
                return Err(Error::new(format!(
                    "nothing came any more: {before:?}, then {now:?}; {heard:?}\n{}",
                    shown.join("\n")
                )));
            }
        }
    }

    /// Ends the load in order. Returns the errors of connections that broke.
    pub(super) fn end(self, site: &mut Site) -> Result<Vec<String>> {
        site.a.sh(&format!("touch {STOP}"), within(60))?;
        let said = site.a.wait(self.pour, within(120))?.success().context("who sends")?;
        site.b.kill(self.answer)?;
        let answered = site.b.wait(self.answer, within(60))?.text;
        let whole: u64 =
            said.lines().filter_map(|line| line.strip_prefix("whole ")?.rsplit(' ').next()?.parse::<u64>().ok()).sum();
        println!("{} MiB came back over connections that ended in order", whole >> 17);
        ensure!(said.matches("whole ").count() == CONNECTIONS, "not all ended in order: {answered}");
        Ok(said.lines().filter_map(|line| line.strip_prefix("broken ")).map(str::to_owned).collect())
    }
}

fn start_answer(site: &mut Site) -> Result<Job> {
    let answer = start(&mut site.b, "net_load::answer", &[])?;
    line(&mut site.b, answer, "listens", within(60))?;
    Ok(answer)
}

/// Returns the interfaces, and the module's reference count.
fn held(site: &mut Site, at: At) -> String {
    let what = "ls /sys/class/net; cat /sys/module/tombolo_ivshmem/refcnt";
    site.vm(at).sh(what, within(60)).unwrap_or_else(|why| why.to_string())
}

/// Checks that nothing is left: no interface, and no user of the module once its broker has ended.
pub(super) fn is_clean(site: &mut Site, at: At) -> Result<()> {
    let before = held(site, at);
    site.kill_broker(at)?;
    let mut held = String::new();
    let clean = until(within(30), || {
        held = self::held(site, at);
        held == "lo\n0"
    });
    ensure!(held != before, "who uses the module is not seen: {before}");
    clean.context(format!("what is left of interfaces, and of who uses the module: {held}"))?;
    let faults = "WARNING|BUG|Oops|general protection|unregister_netdevice|timed out";
    sh(site, at, &format!("[ -z \"$(dmesg | grep -E '{faults}')\" ]")).context("dmesg")
}

/// Disturbs the interface in some way, and checks that the load continues afterwards.
fn disturb(site: &mut Site, load: &Load, what: &str, how: impl FnOnce(&mut Site) -> Result<()>) -> Result<()> {
    let begun = Instant::now();
    how(site).context(what)?;
    let took = begun.elapsed();
    let again = load.goes_on(site).context(what)?;
    println!("{what}: {:.1} s, and all connections go on {:.1} s later", took.as_secs_f64(), again.as_secs_f64());
    Ok(())
}

fn sh(site: &mut Site, at: At, command: &str) -> Result<()> {
    site.vm(at).sh(command, within(60)).map(drop)
}

/// Switches the interface off and on.
fn off_and_on(site: &mut Site, at: At) -> Result<()> {
    sh(site, at, "ip link set tmb0 down && usleep 500000 && ip link set tmb0 up")
}

/// Sets another MTU, which both ends soon have.
fn set_mtu(site: &mut Site, at: At, mtu: u32) -> Result<()> {
    sh(site, at, &format!("ip link set tmb0 mtu {mtu}"))?;
    for at in [At::A, At::B] {
        wait_for(site, at, &format!("[ \"$(cat /sys/class/net/tmb0/mtu)\" = {mtu} ]"))?;
        wait_carrier(site, at, "tmb0", 1)?;
    }
    Ok(())
}

/// Moves the interface into another network namespace, uses it there with an address of its own, and moves it back.
/// Addresses do not move with an interface. With the same address there, that namespace would end connections that it
/// does not know.
fn to_namespace_and_back(site: &mut Site, at: At) -> Result<()> {
    let (number, other) = (at as u8 + 1, if at == At::A { At::B } else { At::A });
    let there = other as u8 + 1;
    sh(site, other, &format!("ip addr add 10.8.0.{there}/24 dev tmb0"))?;
    let held = site.vm(at).start(&["unshare", "-n", "sh", "-c", "echo $$; exec sleep 600"])?;
    let space = site.vm(at).line(held, within(60))?;
    sh(site, at, &format!("ip link set tmb0 netns {space}"))?;
    let within_it = format!("nsenter -t {space} -n");
    sh(site, at, &format!("{within_it} ip link set tmb0 up && {within_it} ip addr add 10.8.0.{number}/24 dev tmb0"))?;
    wait_for(site, at, &format!("{within_it} ping -c 1 -W 1 10.8.0.{there} > /dev/null"))?;
    // The interface's program checks it there, and tells the peer of changes.
    sh(site, at, &format!("{within_it} ip link set tmb0 mtu 1300"))?;
    wait_for(site, other, "[ \"$(cat /sys/class/net/tmb0/mtu)\" = 1300 ]")?;
    sh(site, at, &format!("{within_it} ip link set tmb0 mtu 1500 netns 1 && ip link set tmb0 up"))?;
    sh(site, at, &format!("ip addr add 10.9.0.{number}/24 dev tmb0"))?;
    wait_for(site, other, "[ \"$(cat /sys/class/net/tmb0/mtu)\" = 1500 ]")?;
    sh(site, other, &format!("ip addr del 10.8.0.{there}/24 dev tmb0"))?;
    site.vm(at).kill(held)?;
    site.vm(at).wait(held, within(60)).map(drop)
}

/// Kills the process that has the interface, and starts another one that makes it anew.
fn die_and_start(site: &mut Site, at: At, job: &mut Job, engine: &str) -> Result<()> {
    site.vm(at).kill(*job)?;
    site.vm(at).wait(*job, within(60))?;
    wait_for(site, at, "[ ! -e /sys/class/net/tmb0 ]")?;
    *job = up(site, at, "tmb0", "vm:b/net", engine, 9)?;
    wait_carrier(site, at, "tmb0", 1).map(drop)
}

/// Removes the memory below the interface, and adds it again.
fn unlink_and_link(site: &mut Site) -> Result<()> {
    site.unlink()?;
    for at in [At::A, At::B] {
        wait_carrier(site, at, "tmb0", 0)?;
    }
    site.link("a", "b")?;
    for at in [At::A, At::B] {
        wait_carrier(site, at, "tmb0", 1)?;
    }
    Ok(())
}

fn pause(site: &mut Site) -> Result<()> {
    site.b.qmp.run("stop", &json!({}))?;
    pass(Duration::from_secs(3));
    site.b.qmp.run("cont", &json!({})).map(drop)
}

fn kill_brokers(site: &mut Site) -> Result<()> {
    site.broker.kill()?;
    for at in [At::A, At::B] {
        site.kill_broker(at)?;
    }
    site.broker.restart()?;
    site.serve()
}

fn changed(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    super::net::load_tun(site)?;
    let mut jobs =
        [up(site, At::A, "tmb0", "vm:b/net", "kernel", 9)?, up(site, At::B, "tmb0", "vm:b/net", "kernel", 9)?];
    wait_carrier(site, At::A, "tmb0", 1)?;
    let load = Load::start(site, "10.9.0.2")?;
    load.goes_on(site)?;
    for round in 0..if long() { 10 } else { 1 } {
        for at in [At::A, At::B] {
            disturb(site, &load, "switched off and on", |site| off_and_on(site, at))?;
        }
        // Both have the smaller MTU while the link lasts (N-5).
        disturb(site, &load, "a smaller MTU", |site| set_mtu(site, At::A, 1400))?;
        disturb(site, &load, "the usual MTU", |site| set_mtu(site, At::A, 1500))?;
        disturb(site, &load, "a process for the module", |site| die_and_start(site, At::B, &mut jobs[1], "tap"))?;
        disturb(site, &load, "the module again", |site| die_and_start(site, At::B, &mut jobs[1], "kernel"))?;
        disturb(site, &load, "the other one died", |site| die_and_start(site, At::A, &mut jobs[0], "kernel"))?;
        disturb(site, &load, "the link was removed and added", unlink_and_link)?;
        disturb(site, &load, "all brokers died", kill_brokers)?;
        disturb(site, &load, "a machine was paused", pause)?;
        let at = if round % 2 == 0 { At::A } else { At::B };
        disturb(site, &load, "to a namespace and back", |site| to_namespace_and_back(site, at))?;
    }
    let broken = load.end(site)?;
    ensure!(broken.is_empty(), "connections broke: {broken:?}");
    for (at, job) in [At::A, At::B].into_iter().zip(jobs) {
        down(site, at, "tmb0", job)?;
    }
    site.unlink()?;
    is_clean(site, At::A)?;
    is_clean(site, At::B)?;
    Ok(Verdict::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canary_words_that_are_lost_doubled_or_changed_are_found() {
        let bytes = |from: u64, to: u64| (from..to).flat_map(|at| word(3, at).to_le_bytes()).collect::<Vec<u8>>();
        assert!(check(3, 5, &bytes(5, 50)).is_ok());
        assert!(check(4, 5, &bytes(5, 50)).is_err(), "another stream's");
        assert!(check(3, 6, &bytes(5, 50)).is_err(), "one is doubled");
        assert!(check(3, 5, &[bytes(5, 20), bytes(21, 50)].concat()).is_err(), "one is lost");
        for at in 0..8 * 45 {
            let mut changed = bytes(5, 50);
            changed[at] ^= 1;
            assert!(check(3, 5, &changed).is_err(), "byte {at}");
        }
        assert!((0..1 << 20).all(|at| word(1, at) != END));
    }
}
