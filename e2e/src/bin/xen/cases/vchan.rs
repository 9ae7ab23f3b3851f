// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libtombolo-vchan between two domUs: with itself, and in the original's layout with Debian's libxenvchan.

use super::{Case, Kind, Verdict};
use crate::compare::TRANSPORTS;
use crate::demo::Serving;
use crate::rig::{Pair, Rig};
use std::time::Instant;
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Result};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::vchan::{QUBES, TRIED, XENS, tries};
use tombolo_e2e::wire::End;
use tombolo_e2e::xen::vchan::{ORIGINAL, OURS};

pub const PV: &[Case] = &[
    Case { name: "vchan_functions_of_xens_spelling_do_what_their_header_says", run: |rig| functions(rig, XENS) },
    Case { name: "vchan_functions_of_qubes_spelling_do_what_their_header_says", run: |rig| functions(rig, QUBES) },
    Case { name: "vchan_between_two_ends_of_ours", run: |rig| rings(rig, Kind::Pv, Which::Ours, Which::Ours) },
    Case {
        name: "vchan_wire_server_of_ours_client_of_the_original",
        run: |rig| rings(rig, Kind::Pv, Which::Wire, Which::Original),
    },
    Case {
        name: "vchan_wire_server_of_the_original_client_of_ours",
        run: |rig| rings(rig, Kind::Pv, Which::Original, Which::Wire),
    },
    Case { name: "vchan_canary_spoiled_bytes_are_found", run: spoiled },
    Case { name: "vchan_proxies_join_tcp_clients_and_a_server_of_two_domains", run: proxied },
    Case { name: "vchan_wire_either_side_killed_under_load_is_told_to_the_other", run: killed },
    Case { name: "vchan_benchmark_measures_the_original_beside_ours", run: measured },
    Case { name: "vchan_domain_that_is_destroyed_is_told_before_and_after_it_connects", run: destroyed },
];
pub const PVH: &[Case] = &[
    Case {
        name: "pvh_vchan_wire_server_of_ours_client_of_the_original",
        run: |rig| short(rig, Which::Wire, Which::Original),
    },
    Case {
        name: "pvh_vchan_wire_server_of_the_original_client_of_ours",
        run: |rig| short(rig, Which::Original, Which::Wire),
    },
];

/// Seconds within which an end must learn of the other's end: one second is promised, and the rest is for emulation on
/// a loaded machine.
const TOLD: u64 = 30;
/// Seconds that each line may take.
const SOON: u64 = 120;
/// Number of simultaneous vchans: more than the original can have.
const MANY: u16 = 30;
/// Ring sizes, and the bytes in each direction, which fill the rings several times.
const RINGS: [(usize, usize); 3] = [(4 << 10, 200_000), (64 << 10, 1_000_000), (1 << 20, 4_000_000)];

/// Library that an end uses, and layout that it speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Which {
    /// Tombolo's library, over channels.
    Ours,
    /// Tombolo's library, in the original's layout.
    Wire,
    /// Debian's library.
    Original,
}

impl Which {
    fn command(self) -> String {
        match self {
            Self::Ours => format!("exec {OURS}"),
            Self::Wire => {
                format!("echo 'default xen:vchan:' >/tmp/wire.conf; TOMBOLO_VCHAN_CONF=/tmp/wire.conf exec {OURS}")
            }
            Self::Original => format!("exec {ORIGINAL}"),
        }
    }
}

/// Starts a server in A, whose first line tells that it is ready.
fn serve(pair: &mut Pair, which: Which, path: &str, ring: usize, work: &str) -> Result<Job> {
    let client = pair.number("B");
    let job = pair.start("A", &format!("{} serve {client} data/{path} {ring} {work}", which.command()))?;
    let line = pair.at("A")?.line(job, within(SOON)).context("a server in A")?;
    ensure!(["serves", "waits"].contains(&line.trim()), "the server in A says {line}");
    Ok(job)
}

/// Starts a client in B.
fn join(pair: &mut Pair, which: Which, path: &str, ring: usize, work: &str) -> Result<Job> {
    let server = pair.number("A");
    pair.start("B", &format!("{} join {server} /local/domain/{server}/data/{path} {ring} {work}", which.command()))
}

/// Runs the same work at both ends, which must both succeed.
fn exchange(pair: &mut Pair, server: Which, client: Which, ring: usize, work: &str) -> Result<()> {
    let serving = serve(pair, server, "exchange", ring, work)?;
    let joining = join(pair, client, "exchange", ring, work)?;
    let what = format!("{server:?} serves {client:?}, rings of {ring}, {work}");
    for (at, job) in [("B", joining), ("A", serving)] {
        let said = pair.done(at, job).context(&what)?;
        ensure!(said.contains("verified"), "{what}: {at} says {said}");
    }
    Ok(())
}

/// Checks that Tombolo's server has removed what it published, and that no grant stays mapped.
fn check_clean(pair: &mut Pair, server: Which) -> Result<()> {
    if server != Which::Original {
        let nodes = pair.sh("dom0", "xenstore-ls -f /local/domain | grep data/exchange/ || true")?;
        ensure!(nodes.is_empty(), "left in XenStore: {nodes}");
    }
    pair.check_clean()
}

/// Tests between two domUs, over channels, and in the opposite direction in the original's layout.
fn functions(rig: &mut Rig, program: &str) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    for (map, server, client, many) in [("default xen", "A", "B", MANY), ("default xen:vchan:", "B", "A", 5)] {
        let (serves, joins) = (pair.number(server), pair.number(client));
        let serving = pair.start(server, &tries(program, map, "serve", joins, serves, many))?;
        let joining = pair.start(client, &tries(program, map, "join", serves, joins, many))?;
        for (at, job) in [(client, joining), (server, serving)] {
            let said = pair.done(at, job).context(format!("{program}, {map}"))?;
            ensure!(said.contains(TRIED), "{program}, {map}: {at} says {said}");
        }
        pair.check_clean()?;
    }
    Ok(Verdict::Done)
}

fn rings(rig: &mut Rig, kind: Kind, server: Which, client: Which) -> Result<Verdict> {
    let pair = rig.pair(kind)?;
    for (ring, bytes) in RINGS {
        exchange(pair, server, client, ring, &format!("both {bytes}"))?;
    }
    exchange(pair, server, client, 16 << 10, "turns 300000")?;
    exchange(pair, server, client, 16 << 10, "packets 300")?;
    check_clean(pair, server)?;
    Ok(Verdict::Done)
}

fn short(rig: &mut Rig, server: Which, client: Which) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pvh)?;
    exchange(pair, server, client, 64 << 10, "both 500000")?;
    check_clean(pair, server)?;
    Ok(Verdict::Done)
}

/// Canary of the check in the cases above: it detects a peer that spoils what it sends.
fn spoiled(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let serving = serve(pair, Which::Wire, "spoiled", 4096, "both 100000")?;
    let joining = join(pair, Which::Original, "spoiled", 4096, "cross 100000")?;
    let output = pair.at("A")?.wait(serving, within(SOON))?;
    ensure!(output.end == End::Code(3) && output.text.contains("instead of"), "spoiled bytes pass: {}", output.text);
    pair.at("B")?.wait(joining, within(SOON))?;
    Ok(Verdict::Done)
}

/// Waits until bytes flow.
fn flows(pair: &mut Pair, at: &str, job: Job) -> Result<()> {
    let line = pair.at(at)?.line(job, within(SOON)).context("nothing flows")?;
    ensure!(line.trim() == "flows", "{at} says {line}");
    Ok(())
}

/// Checks that the end that is left ends soon, and reports that the other is gone.
fn told(pair: &mut Pair, at: &str, job: Job) -> Result<()> {
    let start = Instant::now();
    let output = pair.at(at)?.wait(job, within(TOLD)).context("an end is not told of the other's")?;
    println!("told after {:?}", start.elapsed());
    ensure!(output.end == End::Code(0) && output.text.contains("open 0"), "{at}: {:?}: {}", output.end, output.text);
    Ok(())
}

fn killed(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    for (server, client) in [(Which::Wire, Which::Original), (Which::Original, Which::Wire)] {
        for victim in ["A", "B"] {
            let serving = serve(pair, server, "killed", 64 << 10, "flow")?;
            let joining = join(pair, client, "killed", 64 << 10, "flow")?;
            flows(pair, "A", serving)?;
            flows(pair, "B", joining)?;
            let (dead, left, at) = if victim == "A" { (serving, joining, "B") } else { (joining, serving, "A") };
            pair.at(victim)?.kill(dead)?;
            told(pair, at, left).context(format!("{server:?} serves {client:?}, {victim} killed"))?;
            pair.at(victim)?.wait(dead, within(TOLD))?;
            // A killed process leaves its nodes.
            pair.sh("A", "xenstore-rm data/killed; true")?;
        }
    }
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Tests several clients at once in B and a server in A, with two proxies between them and a vchan for each client.
fn proxied(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let (a, b) = (pair.number("A"), pair.number("B"));
    pair.sh("A", "mkdir -p /tmp/www; dd if=/dev/urandom of=/tmp/www/file bs=64k count=8 2>/dev/null")?;
    let sum = pair.sh("A", "sha256sum </tmp/www/file")?;
    let server = pair.start("A", "exec httpd -f -p 127.0.0.1:8080 -h /tmp/www")?;
    let proxies = [
        ("A", format!("--listen xen:{b}/vchan:data/web-{{n}} --connect tcp:127.0.0.1:8080")),
        (
            "B",
            format!("--listen tcp:127.0.0.1:8000 --connect xen:{a}/vchan:/local/domain/{a}/data/web-{{n}} --wait 60"),
        ),
    ];
    let mut jobs = vec![("A", server)];
    for (at, ends) in proxies {
        let job = pair.start(at, &format!("exec tombolo proxy {ends}"))?;
        let line = pair.at(at)?.line(job, within(SOON)).context("a proxy")?;
        ensure!(line.contains("joined to"), "the proxy in {at} says {line}");
        jobs.push((at, job));
    }
    let fetch = "for i in 1 2 3; do wget -q -O /tmp/got$i http://127.0.0.1:8000/file & done; wait; \
                 for i in 1 2 3; do sha256sum </tmp/got$i; done; rm /tmp/got*";
    let got = pair.sh("B", fetch)?;
    ensure!(got.lines().filter(|line| line.trim() == sum.trim()).count() == 3, "{got} came instead of {sum}");
    for (at, job) in jobs {
        pair.at(at)?.kill(job)?;
        pair.at(at)?.wait(job, within(TOLD))?;
    }
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Checks that the libraries with which `make xen-demo` compares are there, and give figures.
fn measured(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let mut server = Serving::start(pair)?;
    let transports = ["tombolo"].iter().chain(&TRANSPORTS).copied().collect::<Vec<_>>();
    let options = "--test throughput --size 4KiB --ring 64KiB --seconds 0.2 --runs 1 --transport";
    let lines = server.measure(pair, &format!("{options} {}", transports.join(",")))?;
    for transport in transports {
        let line = lines.lines().find(|line| line.contains(&format!(r#""transport":"{transport}""#)));
        ensure!(line.is_some_and(|line| line.contains(r#""median":"#)), "no figure of {transport}: {lines}");
    }
    let said = server.end(pair)?;
    ensure!(said.trim().is_empty(), "{said}");
    pair.check_clean()?;
    Ok(Verdict::Done)
}

/// Starts two servers without a client and two with one; then the client's domain is destroyed.
fn destroyed(rig: &mut Rig) -> Result<Verdict> {
    let pair = rig.pair(Kind::Pv)?;
    let mut left =
        vec![serve(pair, Which::Wire, "awaited", 4096, "await")?, serve(pair, Which::Ours, "awaited", 4096, "await")?];
    for (server, client, path) in [(Which::Wire, Which::Original, "joined"), (Which::Ours, Which::Ours, "joined")] {
        let serving = serve(pair, server, path, 16 << 10, "flow")?;
        join(pair, client, path, 16 << 10, "flow")?;
        flows(pair, "A", serving)?;
        left.push(serving);
    }
    // After more than another second, the servers have checked the domain once.
    pair.sh("dom0", "usleep 2500000")?;
    pair.host.destroy(1)?;
    for (number, job) in left.into_iter().enumerate() {
        told(pair, "A", job).context(format!("server {number}"))?;
    }
    pair.renew(1, Kind::Pv)?;
    pair.check_clean()?;
    Ok(Verdict::Done)
}
