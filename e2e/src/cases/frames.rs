// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A test peer of an interface that the kernel's module runs. The peer writes its memory itself: invalid frames, frames
//! that change while they are read, positions that no ring can have, and ends amid a burst.

use super::net::{carry, cross, down, load_tun, stat, up, wait_carrier, wait_for};
use super::{Case, Half, Verdict, long};
use crate::rig::Rig;
use crate::site::{At, Site, line, start};
use rustix::mm::ProtFlags;
use rustix::process::{Signal, getpid, kill_process};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use tombolo::{Messages, Options};
use tombolo_channel::driver::Lend;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::sys::Mapping;
use tombolo_e2e::guest::{pass, until};
use tombolo_e2e::line_reader::within;

pub const CASES: &[Case] = &[
    Case { name: "n10_what_a_peer_sent_before_it_ended_is_handed_over_by_the_module", run: ends },
    Case { name: "n12_peer_whose_ring_is_corrupt_ends_its_own_link_and_no_more", run: lies },
    Case { name: "n8_n12_hostile_frames_reach_a_kernel_that_forwards_and_harm_nothing", run: hostile },
];
pub const HALVES: &[Half] = &[("frames::end", end), ("frames::lie", lie), ("frames::hostile", send_hostile)];

const PAGE: usize = 4096;
const RING: u64 = 1 << 20;
/// Offsets of the words in a segment (M-5).
const TAIL: usize = 0x80;
const HEAD: usize = 0x100;
const WANT_DATA: usize = 0x180;
const READER_STATE: usize = 0x188;
const WRITER_STATE: usize = 0x208;
/// Lowest value of a state word's low half at which its side is over.
const CLOSED: u64 = 2;
const ABORTED: u64 = 3;
/// Bytes of virtio's header.
const HEADER: usize = 12;
/// Longest frame that the module takes, in bytes.
const FRAME_MOST: usize = 65_553;
/// Address that this peer announces.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x66];

/// A peer that controls the memory of its channel directly.
struct Peer {
    _channel: Messages,
    doorbell: OwnedFd,
    own: Mapping,
    theirs: Mapping,
    data: usize,
    capacity: u64,
    tail: u64,
}

impl Peer {
    /// Connects to the listener at `address`, and takes the channel's memory from the library.
    fn meet(address: &str, ring: u64) -> Result<Self> {
        let options = Options::new().ring_size(ring).wait_for_listener(Duration::from_secs(60));
        let mut channel: Messages = tombolo::connect_with(address, &options).context(address)?;
        let lent = channel.lend().ok_or_else(|| Error::new("the channel is in no window"))?;
        let (parts, [writer, _]) = (lent.parts, lent.records);
        let head = Mapping::new(&parts.own, parts.own_at, PAGE, ProtFlags::READ, false)?;
        let (data, capacity) = (head.load_word(0x18), head.load_word(0x20));
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let own = Mapping::new(&parts.own, parts.own_at, (data + capacity) as usize, both, false)?;
        let theirs = Mapping::new(&parts.peer, parts.peer_at, PAGE + PAGE, ProtFlags::READ, false)?;
        let tail = writer.position;
        Ok(Self { _channel: channel, doorbell: parts.own, own, theirs, data: data as usize, capacity, tail })
    }

    /// Sends the hello, and waits until the module has begun to read frames. Returns the module's address.
    fn greet(&mut self) -> Result<[u8; 6]> {
        let mut hello = [0; 64];
        hello[..5].copy_from_slice(b"TBNET");
        hello[0x08] = 1;
        hello[0x0a] = 1;
        hello[0x10] = 0x1f;
        hello[0x18..0x1c].copy_from_slice(&1500_u32.to_le_bytes());
        hello[0x1c..0x20].copy_from_slice(&(FRAME_MOST as u32).to_le_bytes());
        hello[0x20..0x26].copy_from_slice(&MAC);
        self.put(&hello);
        self.publish()?;
        until(within(60), || self.theirs.load_word(TAIL) >= 72).context("its hello")?;
        // The module's first message is at the beginning of its ring, which follows the first page of its segment.
        ensure!(self.theirs.load_word(0x18) == PAGE as u64, "its ring begins elsewhere");
        let mac = std::array::from_fn(|at| self.theirs.load(PAGE + 8 + 0x20 + at));
        Ok(mac)
    }

    /// Stores bytes at a position of the ring.
    fn store(&self, position: u64, bytes: &[u8]) {
        let at = (position & (self.capacity - 1)) as usize;
        let first = bytes.len().min(self.capacity as usize - at);
        self.own.store_all(self.data + at, &bytes[..first]);
        self.own.store_all(self.data, &bytes[first..]);
    }

    /// Puts a message after the earlier ones, without publishing it.
    fn put(&mut self, message: &[u8]) {
        self.store(self.tail, &(message.len() as u64).to_le_bytes());
        self.store(self.tail + 8, message);
        self.tail += (8 + message.len() as u64).next_multiple_of(8);
    }

    fn publish(&self) -> Result<()> {
        self.own.store_word(TAIL, self.tail);
        self.ring()
    }

    /// Notifies the module's reader.
    fn ring(&self) -> Result<()> {
        rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.tail.wrapping_sub(self.theirs.load_word(HEAD)))
    }

    /// Consumes all that the module has published, unread.
    fn read_all(&self) {
        self.own.store_word(HEAD, self.theirs.load_word(TAIL));
    }

    fn is_over(&self) -> bool {
        [READER_STATE, WRITER_STATE].iter().any(|at| self.theirs.load_word(*at) & 0xffff_ffff >= CLOSED)
    }
}

/// Returns a broadcast frame of a type that no protocol uses.
fn plain() -> Vec<u8> {
    let mut message = vec![0; HEADER];
    message.extend([0xff; 6]);
    message.extend(MAC);
    message.extend([0x88, 0xb5]);
    message.resize(HEADER + 60, 0);
    message
}

/// Messages of a burst: enough to fill most of a ring.
const BURST: u64 = 10_000;

/// Sends a burst of frames and ends at once, in the way that the argument names.
fn end(args: &[String]) -> Result<()> {
    let [address, how] = args else { return Err(Error::new("where, and how?")) };
    let mut peer = Peer::meet(address, RING)?;
    peer.greet()?;
    // The module reads the first frame, so the link is up.
    let message = plain();
    peer.put(&message);
    peer.publish()?;
    until(within(60), || peer.theirs.load_word(HEAD) == peer.tail).context("a link")?;
    (1..BURST).for_each(|_| peer.put(&message));
    peer.publish()?;
    match how.as_str() {
        "kill" => kill_process(getpid(), Signal::KILL)?,
        "abort" => [WRITER_STATE, READER_STATE].iter().for_each(|at| peer.own.store_word(*at, ABORTED)),
        _ => [WRITER_STATE, READER_STATE].iter().for_each(|at| peer.own.store_word(*at, CLOSED)),
    }
    peer.ring()?;
    until(within(60), || peer.is_over()).context("the other's end")
}

fn number(stat: &str, path: &[&str]) -> Result<u64> {
    let value: serde_json::Value = serde_json::from_str(stat)?;
    let found = path.iter().try_fold(&value, |value, key| value.get(key)).and_then(serde_json::Value::as_u64);
    found.ok_or_else(|| Error::new(format!("no {path:?}: {stat}")))
}

/// Waits until the interface has had `links` links and the last one is over.
fn wait_over(site: &mut Site, links: u64) -> Result<String> {
    let what = format!(
        "tombolo net stat tmb0 --json > /tmp/stat && grep -q '\"links\":{links},' /tmp/stat \
         && grep -q '\"state\":\"waiting\"' /tmp/stat"
    );
    wait_for(site, At::B, &what)?;
    stat(site, At::B)
}

fn ends(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    let listener = up(site, At::B, "tmb0", "vm:b/ends", "kernel", 9)?;
    let (mut lost, mut links) = (Vec::new(), 0);
    for how in ["kill", "close", "kill", "abort", "kill", "kill", "kill", "kill"] {
        let before = number(&stat(site, At::B)?, &["received", "frames"])?;
        let sender = start(&mut site.a, "frames::end", &["vm:b/ends", how])?;
        let ended = site.a.wait(sender, within(120))?;
        ensure!(how == "kill" || ended.success().is_ok(), "who sends failed");
        links += 1;
        let got = number(&wait_over(site, links)?, &["received", "frames"])? - before;
        lost.extend((got != BURST).then(|| format!("{how}: {got} of {BURST} came")));
    }
    down(site, At::B, "tmb0", listener)?;
    ensure!(lost.is_empty(), "{lost:?}");
    Ok(Verdict::Done)
}

/// Ways in which a ring is invalid, and the clause that the module names for each.
const LIES: [(&str, &str); 11] = [
    ("small", "N-1"),
    ("magic", "N-1"),
    ("behind", "R-7"),
    ("beyond", "R-7"),
    ("odd", "R-7"),
    ("head-beyond", "R-8"),
    ("head-behind", "R-8"),
    ("kind", "R-20"),
    ("length", "R-21"),
    ("state", "R-15"),
    ("moves", "R-15"),
];

/// Opens a link, sends valid frames first, and then commits one protocol violation.
fn lie(args: &[String]) -> Result<()> {
    let [address, what] = args else { return Err(Error::new("where, and what?")) };
    let mut peer = Peer::meet(address, if what == "small" { 64 << 10 } else { RING })?;
    if what == "magic" {
        peer.own.store(0, b'X');
    }
    peer.greet()?;
    if !["small", "magic"].contains(&what.as_str()) {
        (0..10).for_each(|_| peer.put(&plain()));
        peer.publish()?;
        until(within(60), || peer.theirs.load_word(HEAD) == peer.tail).context("honest frames")?;
        peer.read_all();
    }
    let read = peer.theirs.load_word(TAIL);
    match what.as_str() {
        "behind" => peer.own.store_word(TAIL, peer.tail - 8),
        "beyond" => peer.own.store_word(TAIL, peer.tail + 2 * peer.capacity),
        "odd" => peer.own.store_word(TAIL, peer.tail + 4),
        "head-beyond" => peer.own.store_word(HEAD, read + (1 << 16)),
        "head-behind" => {
            // Once the module sends again, it has seen how far this side had read.
            until(within(60), || peer.theirs.load_word(TAIL) > read).context("it sends")?;
            peer.own.store_word(HEAD, read - 8);
        }
        "kind" => {
            peer.store(peer.tail, &(1_u64 << 32 | 60).to_le_bytes());
            peer.own.store_word(TAIL, peer.tail + 72);
        }
        "length" => {
            peer.store(peer.tail, &0xffff_fff0_u64.to_le_bytes());
            peer.own.store_word(TAIL, peer.tail + 72);
        }
        "state" => peer.own.store_word(WRITER_STATE, 9),
        "moves" => peer.own.store_word(WRITER_STATE, 1 << 32 | 1),
        _ => {}
    }
    until(within(60), || peer.is_over() || peer.ring().is_err()).context("the other's end")
}

fn lies(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    let listener = up(site, At::B, "tmb0", "vm:b/lies", "kernel", 9)?;
    // Ensures that the module always has something to send.
    let talker = site.b.start(&["sh", "-c", "while :; do ping -c 1 -W 1 10.9.0.1; done > /dev/null 2>&1"])?;
    for (what, clause) in LIES {
        let liar = start(&mut site.a, "frames::lie", &["vm:b/lies", what])?;
        site.a.wait(liar, within(120))?.success().context(what)?;
        let named = format!("tombolo net stat tmb0 --json | grep -q 'the link ended: .*{clause}'");
        wait_for(site, At::B, &named).context(format!("{what}: {clause}"))?;
        wait_carrier(site, At::B, "tmb0", 0)?;
    }
    site.b.kill(talker)?;
    // A valid link comes up as if nothing had happened.
    let honest = up(site, At::A, "tmb0", "vm:b/lies", "kernel", 9)?;
    wait_carrier(site, At::B, "tmb0", 1)?;
    cross(site, 9)?;
    down(site, At::A, "tmb0", honest)?;
    down(site, At::B, "tmb0", listener)?;
    Ok(Verdict::Done)
}

/// Pseudo-random bytes, the same for the same seed.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn is_one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.iter_mut().for_each(|byte| *byte = (self.next() >> 40) as u8);
    }
}

fn sum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let sum = (sum >> 16) + (sum & 0xffff);
    (!((sum >> 16) + (sum & 0xffff)) as u16).to_be_bytes()
}

/// Returns the EtherType of an IP packet, its bytes up to the payload, and the length of its IP header.
fn packet(noise: &mut Noise, payload: usize) -> ([u8; 2], Vec<u8>, usize) {
    let protocol: u8 = noise.pick(&[6, 6, 6, 17, 17, 1, 58, 0, 132]);
    let mut inner = vec![0; if protocol == 6 { 20 } else { 8 }];
    noise.fill(&mut inner);
    inner[..2].copy_from_slice(&1000_u16.to_be_bytes());
    inner[2..4].copy_from_slice(&noise.pick(&[9_u16, 22, 7]).to_be_bytes());
    match protocol {
        6 => {
            inner[12] = noise.pick(&[5, 5, 5, 15, 0, 4]) << 4;
            inner[13] = noise.pick(&[2, 16, 24, 0xff, 0x90]);
        }
        17 => inner[4..6].copy_from_slice(&noise.pick(&[(8 + payload) as u16, 0, 8, 0xffff]).to_be_bytes()),
        _ => inner[0] = noise.pick(&[8, 128, 135, 3]),
    }
    let len = inner.len() + payload;
    if noise.is_one_in(3) {
        let mut head = vec![0x60, 0, 0, 0, 0, 0, protocol, noise.pick(&[64, 1, 255])];
        head[4..6].copy_from_slice(&noise.pick(&[len as u16, len as u16, 0, 0xffff]).to_be_bytes());
        for (net, host) in [(9, 1), (noise.pick(&[9, 8]), noise.pick(&[2, 1, 0x77]))] {
            head.extend([0xfd, 0, 0, 0, 0, 0, 0, net, 0, 0, 0, 0, 0, 0, 0, host]);
        }
        return ([0x86, 0xdd], [head, inner].concat(), 40);
    }
    let mut head = vec![noise.pick(&[0x45, 0x45, 0x45, 0x45, 0x4f, 0x40, 0x46]), 0, 0, 0, 0, 1, 0, 0];
    head[2..4].copy_from_slice(&noise.pick(&[(20 + len) as u16, (20 + len) as u16, 20, 0xffff]).to_be_bytes());
    head[6] = noise.pick(&[0, 0, 0, 0x40, 0x20]);
    head.extend([noise.pick(&[64, 64, 64, 1]), protocol, 0, 0, 10, 9, 0, 1]);
    head.extend(noise.pick(&[[10, 9, 0, 2], [10, 8, 0, 1], [10, 8, 0, 1], [255; 4]]));
    let sum = sum(&head);
    head[10..12].copy_from_slice(&sum);
    ([8, 0], [head, inner].concat(), 20)
}

/// Returns a message that is invalid in some way. `to` is the module's address.
fn message(noise: &mut Noise, to: [u8; 6]) -> Vec<u8> {
    if noise.is_one_in(20) {
        let mut message = vec![0; noise.pick(&[0, 1, 11, 12, 13, 25])];
        noise.fill(&mut message);
        return message;
    }
    if noise.is_one_in(200) {
        // The first length is the longest that the module takes.
        return vec![0; HEADER + noise.pick(&[FRAME_MOST, FRAME_MOST + 1, FRAME_MOST + 5000])];
    }
    let payload = noise.pick(&[0, 0, 1, 1, 20, 100, 100, 100, 1400, 1460, 1460, 9000, 30_000, 65_000]);
    let payload = if payload > 1460 && !noise.is_one_in(8) { 100 } else { payload };
    let (kind, packet, ip) = packet(noise, payload);
    let mut frame = noise.pick(&[to, to, to, [0xff; 6]]).to_vec();
    frame.extend(if noise.is_one_in(16) { to } else { MAC });
    match noise.below(8) {
        0 => frame.extend([0x81, 0, 0, 5]),
        1 => frame.extend([noise.next() as u8, noise.next() as u8]),
        _ => {}
    }
    frame.extend(kind);
    frame.extend(packet);
    frame.resize(frame.len() + payload, b'x');
    if noise.is_one_in(5) {
        for _ in 0..1 + noise.below(5) {
            let at = noise.below(frame.len().min(80));
            frame[at] = noise.next() as u8;
        }
    }
    if noise.is_one_in(16) {
        frame.truncate(14 + noise.below(frame.len() - 13));
    }
    let head = header(noise, kind, ip, frame.len());
    [&head[..], &frame].concat()
}

/// Returns a header for a frame of `len` bytes whose packet has the type `kind` and an IP header of `ip` bytes. Half of
/// the headers make sense.
fn header(noise: &mut Noise, kind: [u8; 2], ip: usize, len: usize) -> [u8; HEADER] {
    let mut head = [0; HEADER];
    if noise.is_one_in(12) {
        noise.fill(&mut head);
        return head;
    }
    let (start, len) = (14 + ip as u16, len as u16);
    let words = if noise.is_one_in(2) {
        head[0] = 1;
        head[1] = noise.pick(&[0, if kind == [8, 0] { 1 } else { 4 }]);
        [start + 20, 1448, start, if len < start + 18 { 6 } else { 16 }, 0]
    } else {
        head[0] = noise.pick(&[0, 1, 1, 1, 1, 2, 3, 4]);
        head[1] = noise.pick(&[0, 1, 1, 1, 4, 4, 5, 0x81, 0x84, 3, 2, 0xff]);
        [
            noise.pick(&[54, 54, 0, 0xffff, len]),
            noise.pick(&[1448, 1448, 1448, 1, 0, 0xffff, 8, 7]),
            noise.pick(&[start, start, start, 0, 14, len.wrapping_sub(1), len, 0xffff]),
            noise.pick(&[16, 16, 6, 6, 0, 0xffff, 0xfffe, 1]),
            noise.pick(&[0, 0, 0, 0, 0, 0, 1, 0xffff]),
        ]
    };
    for (at, word) in words.into_iter().enumerate() {
        head[2 + 2 * at..4 + 2 * at].copy_from_slice(&word.to_le_bytes());
    }
    head
}

/// Counts of the sent messages: all, and those that the module must count as short or as long.
#[derive(Default)]
struct Sent {
    all: u64,
    short: u64,
    long: u64,
}

/// Sends `count` messages, changes them while the module reads them, and prints what it sent.
fn send_hostile(args: &[String]) -> Result<()> {
    let [address, count] = args else { return Err(Error::new("where, and how many?")) };
    let count: u64 = count.parse()?;
    let mut peer = Peer::meet(address, RING)?;
    let to = peer.greet()?;
    println!("begins");
    let (mut noise, mut sent, mut changed) = (Noise(88_172_645_463_325_252), Sent::default(), 0_u64);
    let mut said = Instant::now();
    while sent.all < count {
        let mut fresh = Vec::new();
        for _ in 0..1 + noise.below(40) {
            if peer.room() < 80_000 {
                break;
            }
            let message = message(&mut noise, to);
            fresh.push((peer.tail, message[..message.len().min(120)].to_vec()));
            peer.put(&message);
            sent.all += 1;
            sent.short += u64::from(message.len() < HEADER + 14);
            sent.long += u64::from(message.len() > HEADER + FRAME_MOST);
        }
        peer.own.store_word(TAIL, peer.tail);
        if peer.theirs.load_word(WANT_DATA) & 1 == 1 || noise.is_one_in(8) {
            peer.ring()?;
        }
        // Changes messages while the module reads them; some of the time until it has read all of them.
        let patient = noise.is_one_in(4);
        for round in 0.. {
            let read = peer.theirs.load_word(HEAD);
            fresh.retain(|(position, _)| *position >= read);
            if fresh.is_empty() || (!patient && round >= 20) || round >= 20_000 {
                break;
            }
            let (position, bytes) = &fresh[noise.below(fresh.len())];
            if !bytes.is_empty() {
                let at = noise.below(bytes.len());
                peer.store(position + 8 + at as u64, &[noise.next() as u8]);
                changed += 1;
                // Restores the byte, so that the change lasts only from one look of the module to the next.
                peer.store(position + 8 + at as u64, &bytes[at..=at]);
            }
        }
        peer.read_all();
        ensure!(!peer.is_over(), "the link ended after {} messages", sent.all);
        if peer.room() < 80_000 && said.elapsed() > Duration::from_secs(60) {
            return Err(Error::new(format!("nothing is read any more after {} messages", sent.all)));
        }
        if peer.room() >= 80_000 {
            said = Instant::now();
        }
    }
    until(within(60), || peer.theirs.load_word(HEAD) == peer.tail).context("the last ones are read")?;
    println!("sent {} {} {} {changed}", sent.all, sent.short, sent.long);
    // Runs until it is killed: the case has to read the counters first.
    loop {
        peer.read_all();
        pass(Duration::from_millis(20));
    }
}

fn hostile(rig: &mut Rig) -> Result<Verdict> {
    let count: u64 = if long() { 1_000_000 } else { 100_000 };
    let site = rig.site()?;
    site.link("a", "b")?;
    load_tun(site)?;
    let victim = up(site, At::B, "tmb0", "vm:b/hostile", "kernel", 9)?;
    let honest = [(At::B, "kernel"), (At::A, "tap")].map(|(at, engine)| up(site, at, "tmb1", "vm:b/honest", engine, 8));
    let [honest_b, honest_a] = honest;
    let (honest_b, honest_a): (Job, Job) = (honest_b?, honest_a?);
    wait_carrier(site, At::A, "tmb1", 1)?;
    // This machine has to divide the segments that it forwards: they are longer than the next interface's MTU.
    let set_up = "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding; \
                  ip addr add fd00:0:0:9::2/64 dev tmb0; ip addr add fd00:0:0:8::2/64 dev tmb1; \
                  ip link set tmb1 mtu 1280";
    site.b.sh(set_up, within(60))?;
    site.a.sh("ip addr add fd00:0:0:8::1/64 dev tmb1", within(60))?;
    wait_for(site, At::A, "[ \"$(cat /sys/class/net/tmb1/mtu)\" = 1280 ]")?;
    wait_carrier(site, At::A, "tmb1", 1)?;
    let forwarded = |site: &mut Site| -> Result<u64> {
        Ok(site.b.sh("cat /sys/class/net/tmb1/statistics/tx_packets", within(60))?.trim().parse()?)
    };
    cross(site, 8)?;
    let before = forwarded(site)?;
    let patience = if long() { 3600 } else { 600 };
    let job = start(&mut site.a, "frames::hostile", &["vm:b/hostile", &count.to_string()])?;
    line(&mut site.a, job, "begins", within(60))?;
    // Another link continues meanwhile. Pings would fail: the kernel's answers to hostile frames fill its ICMP socket
    // while it looks for their receivers, and for some seconds afterwards.
    carry(site, 8).context("an honest link beside it")?;
    let sent = line(&mut site.a, job, "sent", within(patience))?;
    let sent: Vec<u64> = sent.split(' ').map(str::parse).collect::<std::result::Result<_, _>>()?;
    let [all, short, too_long, changed] = sent[..] else { return Err(Error::new(format!("{sent:?}"))) };
    let shown = stat(site, At::B)?;
    let of = |why: &str| number(&shown, &["received", "dropped", why]);
    let reasons = ["short", "long", "header", "feature", "source", "refused", "memory"];
    let dropped = reasons.iter().map(|why| of(why)).sum::<Result<u64>>()?;
    let taken = number(&shown, &["received", "frames"])?;
    println!("{all} sent, {changed} changes, {taken} taken, {dropped} dropped: {shown}");
    ensure!(all >= count && changed > all / 10, "{all} sent, {changed} changes");
    ensure!(taken + dropped == all, "{taken} taken and {dropped} dropped of {all}: {shown}");
    ensure!((of("short")?, of("long")?) == (short, too_long), "{short} short, {too_long} long: {shown}");
    for why in ["short", "long", "header", "source", "refused"] {
        ensure!(of(why)? > all / 1000, "hardly any was dropped for {why}: {shown}");
    }
    ensure!(
        taken > all / 20 && number(&shown, &["received", "segments"])? > all / 100,
        "hardly any was taken: {shown}"
    );
    ensure!(shown.contains("\"state\":\"linked\"") && shown.contains("\"links\":1,"), "it did not last: {shown}");
    let forwarded = forwarded(site)? - before;
    ensure!(forwarded > all / 100, "{forwarded} frames were forwarded");
    site.b.sh("[ -z \"$(dmesg | grep -E 'WARNING|BUG|Oops|general protection')\" ]", within(60)).context("dmesg")?;
    carry(site, 8).context("an honest link afterwards")?;
    site.a.kill(job)?;
    wait_carrier(site, At::B, "tmb0", 0)?;
    let clean = "echo 0 > /proc/sys/net/ipv4/ip_forward; echo 0 > /proc/sys/net/ipv6/conf/all/forwarding";
    site.b.sh(clean, within(60))?;
    down(site, At::B, "tmb0", victim)?;
    down(site, At::A, "tmb1", honest_a)?;
    down(site, At::B, "tmb1", honest_b)?;
    Ok(Verdict::Done)
}
