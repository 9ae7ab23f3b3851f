// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net` between two machines: packets cross, and the carrier goes and comes back with the peer. Frames go
//! through a process on both sides, through the kernel's module on both, or through one of each.

use super::{Case, Half, Verdict};
use crate::rig::Rig;
use crate::site::{At, CONFIG, Site, line, start};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::qemu::Vm;

pub const CASES: &[Case] = &[
    Case { name: "n7_n10_n11_packets_cross_between_machines_while_both_are_there", run: processes },
    Case { name: "b28_machines_of_a_network_find_each_other_by_the_hosts_rule_alone", run: by_rule },
];

/// Cases that take longer than they are worth where time is short.
pub const LONG_CASES: &[Case] =
    &[Case { name: "n14_network_of_many_is_one_interface_whose_ports_the_module_moves", run: ports }];

/// Cases of the module's engine.
pub const ENGINE_CASES: &[Case] =
    &[Case { name: "n12_the_module_moves_the_frames_and_either_engine_may_be_the_other_end", run: kernel }];

pub const HALVES: &[Half] = &[("net::send", send), ("net::receive", receive)];

/// Returns the bytes for a connection: pseudo-random, the same each time.
fn sent() -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..500_000).flat_map(|_| next().to_le_bytes()).collect()
}

/// Connects to the second machine in the network that its argument names.
fn send(args: &[String]) -> Result<()> {
    let mut stream = TcpStream::connect(listening_address(args)?)?;
    stream.set_write_timeout(Some(Duration::from_secs(60)))?;
    stream.write_all(&sent())?;
    Ok(stream.shutdown(Shutdown::Write)?)
}

fn listening_address(args: &[String]) -> Result<(String, u16)> {
    let net = args.first().ok_or_else(|| Error::new("which network?"))?;
    Ok((format!("10.{net}.0.2"), 9))
}

fn receive(args: &[String]) -> Result<()> {
    let listener = TcpListener::bind(listening_address(args)?)?;
    println!("listens");
    let mut stream = listener.accept()?.0;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut came = Vec::new();
    stream.read_to_end(&mut came)?;
    ensure!(came == sent(), "{} bytes came, or others", came.len());
    Ok(())
}

/// Waits in a machine until a shell condition holds.
pub fn wait_for(site: &mut Site, at: At, what: &str) -> Result<String> {
    let script = format!("until {what}; do usleep 100000; done");
    site.vm(at).sh(&script, within(60)).context(what)
}

/// Starts an interface of a machine at a place where the second machine listens. Once the interface is there, gives it
/// an address of the network 10.`net`.
pub fn up(site: &mut Site, at: At, name: &str, place: &str, engine: &str, net: u8) -> Result<Job> {
    let (how, number) = if at == At::B { ("--listen", 2) } else { ("--connect", 1) };
    let job = site.vm(at).start(&["tombolo", "net", "up", name, how, place, "--engine", engine])?;
    wait_for(site, at, &format!("test -e /sys/class/net/{name}"))?;
    site.vm(at).sh(&format!("ip addr add 10.{net}.0.{number}/24 dev {name}"), within(60))?;
    Ok(job)
}

/// Starts the interface that most cases need.
fn up_one(site: &mut Site, at: At, engine: &str) -> Result<Job> {
    up(site, at, "tmb0", "vm:b/net", engine, 9)
}

pub fn wait_carrier(site: &mut Site, at: At, name: &str, on: u8) -> Result<String> {
    wait_for(site, at, &format!("[ \"$(cat /sys/class/net/{name}/carrier)\" = {on} ]"))
}

/// Checks that each machine reaches the other, with one packet and with many.
pub fn cross(site: &mut Site, net: u8) -> Result<()> {
    let to = format!("10.{net}.0.2");
    site.a.sh(&format!("ping -c 2 -W 20 {to} && ping -c 2 -W 20 -s 20000 {to}"), within(120))?;
    carry(site, net)
}

/// Checks the same without a ping.
pub fn carry(site: &mut Site, net: u8) -> Result<()> {
    let net = net.to_string();
    let receiver = start(&mut site.b, "net::receive", &[&net])?;
    line(&mut site.b, receiver, "listens", within(60))?;
    let sender = start(&mut site.a, "net::send", &[&net])?;
    site.a.wait(sender, within(120))?.success().context("who sends")?;
    site.b.wait(receiver, within(60))?.success().context("who receives")?;
    Ok(())
}

fn processes(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    load_tun(site)?;
    let (a, b) = (up_one(site, At::A, "tap")?, up_one(site, At::B, "tap")?);
    wait_carrier(site, At::A, "tmb0", 1)?;
    cross(site, 9)?;
    let b = kill_and_start(site, b, "tap")?;
    cross(site, 9)?;
    let stat = stat(site, At::A)?;
    ensure!(stat.contains("\"links\":2") && stat.contains("\"state\":\"linked\""), "{stat}");
    down(site, At::A, "tmb0", a)?;
    down(site, At::B, "tmb0", b)?;
    Ok(Verdict::Done)
}

pub fn load_tun(site: &mut Site) -> Result<()> {
    [&mut site.a, &mut site.b].into_iter().try_for_each(load_tun_of)
}

/// Loads the modules in one machine.
pub fn load_tun_of(vm: &mut Vm) -> Result<()> {
    vm.sh("[ -e /dev/net/tun ] || /agent insmod $(cat /modules/order)", within(60)).map(drop)
}

pub fn stat(site: &mut Site, at: At) -> Result<String> {
    site.vm(at).sh("tombolo net stat tmb0 --json", within(60))
}

pub fn down(site: &mut Site, at: At, name: &str, job: Job) -> Result<()> {
    site.vm(at).sh(&format!("tombolo net down {name}"), within(60))?;
    site.vm(at).wait(job, within(60))?.success().context("who was ended in order")?;
    Ok(())
}

/// Kills the process of B's interface: A loses the carrier. Starts it again with this engine: the carrier comes back.
fn kill_and_start(site: &mut Site, job: Job, engine: &str) -> Result<Job> {
    site.b.kill(job)?;
    wait_carrier(site, At::A, "tmb0", 0)?;
    wait_for(site, At::B, "[ ! -e /sys/class/net/tmb0 ]")?;
    let job = up_one(site, At::B, engine)?;
    wait_carrier(site, At::A, "tmb0", 1)?;
    Ok(job)
}

/// A network of both machines.
const RULE: &str = "[[net]]\nname = \"tmb0\"\ndomains = [\"a\", \"b\"]\n\
                    addresses = { a = \"10.9.0.1/24\", b = \"10.9.0.2/24\" }\n";

/// The machines do nothing except what their units do.
fn by_rule(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    load_tun(site)?;
    let mut following = Vec::new();
    for at in [At::A, At::B] {
        following.push((at, site.vm(at).start(&["tombolo", "net", "follow"])?));
    }
    site.broker.configure(&format!("{CONFIG}{RULE}"))?;
    wait_carrier(site, At::A, "tmb0", 1)?;
    cross(site, 9)?;
    // No broker is needed meanwhile, and no broker removes anything when it is back.
    site.broker.kill()?;
    for at in [At::A, At::B] {
        site.kill_broker(at)?;
    }
    cross(site, 9)?;
    site.broker.restart()?;
    site.serve()?;
    cross(site, 9)?;
    let stat = stat(site, At::A)?;
    ensure!(stat.contains("\"links\":1,") && stat.contains("\"by_rule\":true"), "{stat}");
    site.broker.configure(CONFIG)?;
    for (at, job) in following {
        wait_for(site, at, "[ ! -e /sys/class/net/tmb0 ]")?;
        site.vm(at).kill(job)?;
        site.vm(at).wait(job, within(60))?;
    }
    Ok(Verdict::Done)
}

/// A network that may have more than two machines.
const LAN: &str = "[[net]]\nname = \"lan\"\ndomains = [\"*\"]\n\
                   addresses = { a = \"10.9.0.1/24\", b = \"10.9.0.2/24\" }\n";

/// Tests one interface with ports whose frames the module moves; and, in a machine without bridges, an interface for
/// each peer.
fn ports(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    load_tun(site)?;
    if site.a.sh("/agent rmmod bridge", within(60)).is_err() {
        let why = "this kernel has no module bridge".into();
        return Ok(Verdict::Skip { need: "kernel", why });
    }
    let follow = ["tombolo", "net", "follow"];
    let (plain, b) = (site.a.start(&follow)?, site.b.start(&follow)?);
    site.broker.configure(&format!("{CONFIG}{LAN}"))?;
    wait_carrier(site, At::A, "lan-b", 1)?;
    wait_carrier(site, At::B, "lan", 1)?;
    site.a.sh("[ ! -e /sys/class/net/lan ]", within(60))?;
    cross(site, 9)?;
    // The kernel can make bridges now, and the program that makes the interfaces starts anew.
    site.a.kill(plain)?;
    site.a.wait(plain, within(60))?;
    site.a.sh("/agent insmod $(tr ' ' '\\n' < /modules/order | grep /bridge.ko)", within(60))?;
    let a = site.a.start(&follow)?;
    for at in [At::A, At::B] {
        wait_carrier(site, at, "lan", 1)?;
        let port = if at == At::A { "lan-b" } else { "lan-a" };
        let set = format!("cd /sys/class/net/{port}/brport && cat isolated learning unicast_flood | tr -d '\\n'");
        let set = site.vm(at).sh(&set, within(60))?;
        ensure!(set.trim() == "100", "{port}: {set}");
    }
    cross(site, 9)?;
    let stat = site.a.sh("tombolo net stat lan-b --json && tombolo net stat lan --json", within(60))?;
    for word in ["\"engine\":\"kernel\"", "\"network\":\"lan\"", "\"kind\":\"network\"", "1 of 1 ports linked"] {
        ensure!(stat.contains(word), "{word}: {stat}");
    }
    ensure!(stat.matches("\"source\":0").count() == 2, "{stat}");
    // A program that dies leaves its interface, which the next one finds.
    site.b.kill(b)?;
    site.b.wait(b, within(60))?;
    wait_carrier(site, At::A, "lan", 0)?;
    let index = site.b.sh("cat /sys/class/net/lan/ifindex", within(60))?;
    let b = site.b.start(&follow)?;
    wait_carrier(site, At::A, "lan", 1)?;
    cross(site, 9)?;
    ensure!(site.b.sh("cat /sys/class/net/lan/ifindex", within(60))? == index, "another interface");
    site.broker.configure(CONFIG)?;
    for (at, job) in [(At::A, a), (At::B, b)] {
        wait_for(site, at, "[ ! -e /sys/class/net/lan ]")?;
        site.vm(at).kill(job)?;
        site.vm(at).wait(job, within(60))?;
    }
    Ok(Verdict::Done)
}

fn kernel(rig: &mut Rig) -> Result<Verdict> {
    let site = rig.site()?;
    site.link("a", "b")?;
    load_tun(site)?;
    let (a, b) = (up_one(site, At::A, "kernel")?, up_one(site, At::B, "auto")?);
    wait_carrier(site, At::A, "tmb0", 1)?;
    cross(site, 9)?;
    for at in [At::A, At::B] {
        let stat = stat(site, at)?;
        ensure!(stat.contains("\"engine\":\"kernel\""), "{stat}");
        // Segments crossed whole, and all frames of the peer were accepted.
        ensure!(stat.matches("\"segments\":0,").count() < 2, "{stat}");
        for why in ["short", "long", "header", "feature", "source", "refused"] {
            ensure!(stat.matches(&format!("\"{why}\":0")).count() == 2, "{why}: {stat}");
        }
    }
    // An interface that was switched off and on continues, and a new link tells the peer of another MTU.
    site.a.sh("ip link set tmb0 down && ip link set tmb0 up", within(60))?;
    cross(site, 9)?;
    site.a.sh("ip link set tmb0 mtu 9000", within(60))?;
    wait_for(site, At::A, "tombolo net stat tmb0 --json | grep -q '\"links\":2'")?;
    wait_carrier(site, At::A, "tmb0", 1)?;
    cross(site, 9)?;
    // The other end may be a process, and the module looks for it again.
    let b = kill_and_start(site, b, "tap")?;
    cross(site, 9)?;
    let b = kill_and_start(site, b, "kernel")?;
    cross(site, 9)?;
    down(site, At::A, "tmb0", a)?;
    wait_carrier(site, At::B, "tmb0", 0)?;
    down(site, At::B, "tmb0", b)?;
    for at in [At::A, At::B] {
        site.vm(at).sh("[ ! -e /sys/class/net/tmb0 ]", within(60))?;
    }
    Ok(Verdict::Done)
}
