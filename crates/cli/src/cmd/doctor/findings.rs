// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Judges the facts, and names remedies for what is wrong.

use super::{
    facts::{Facts, Folder, Found, Membarrier},
    finding::{Finding, Grade},
    guest, host, net, xen,
};
use crate::{human, memory::Limit};

/// Oldest kernel that has everything that is needed.
const OLDEST: (u32, u32) = (5, 8);
/// Descriptors that one endpoint of a channel takes.
const DESCRIPTORS: u64 = 9;
/// Descriptors that a program needs besides.
const OTHER_DESCRIPTORS: u64 = 16;
/// Number of endpoints that a program should have room for.
const ENDS: u64 = 100;
/// Memory of a channel with rings of the usual size, and the number of such channels that is enough.
const CHANNEL: u64 = 2 * ((1 << 20) + 4096);
const CHANNELS: u64 = 32;

/// Judges the facts. Returns one finding for each thing that was checked, always in this order.
pub fn examine(facts: &Facts) -> Vec<Finding> {
    vec![
        kernel(&facts.kernel),
        tried("proc", &facts.proc, "/proc is there", "mount -t proc proc /proc"),
        tried("memfd", &facts.memfd, "memory can be sealed and mapped read-only", UPGRADE),
        tried("eventfd", &facts.eventfd, "doorbells ring: eventfd, epoll, RWF_NOWAIT", UPGRADE),
        membarrier(facts.membarrier),
        folder(&facts.folder),
        channel(facts),
        files(facts.files),
        memory(facts),
        cpus(facts),
        namespaces(facts),
        memlock(facts.memlock),
        shm(facts.shm),
        guest::ivshmem(&facts.guest),
        guest::interrupts(&facts.guest),
        guest::broker(&facts.guest),
        host::machines(&facts.host),
        net::tun(&facts.interfaces),
        net::interfaces(&facts.interfaces),
        xen::xen(facts.xen.as_ref()),
    ]
}

const UPGRADE: &str = "apt install linux-image-amd64, or allow the call in the sandbox's filter";

fn tried(check: &'static str, tried: &Result<(), String>, works: &str, remedy: &str) -> Finding {
    match tried {
        Ok(()) => Finding::new(check, Grade::Ok, works),
        Err(why) => Finding::new(check, Grade::Failure, format!("does not work: {why}")).mend(remedy),
    }
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    let version = numbers.next().zip(numbers.next());
    let (major, minor) = OLDEST;
    match version {
        Some(version) if version >= OLDEST => Finding::new("kernel", Grade::Ok, format!("Linux {release}")),
        Some(_) => Finding::new("kernel", Grade::Failure, format!("Linux {release} is older than {major}.{minor}"))
            .mend("apt install linux-image-amd64 && reboot"),
        None => Finding::new("kernel", Grade::Warning, format!("nobody knows what {release} can do"))
            .mend(format!("uname -r; {major}.{minor} or newer is needed")),
    }
}

fn membarrier(barriers: Membarrier) -> Finding {
    if barriers.global_expedited && barriers.registers {
        let says = "the sleeper pays for the fence: expedited membarrier";
        Finding::new("membarrier", Grade::Ok, says)
    } else {
        let slow = if barriers.global { ", only the slow kind is there" } else { "" };
        let says = format!("no expedited membarrier{slow}: each write pays for a fence of its own");
        Finding::new("membarrier", Grade::Warning, says).mend(
            "docker run --security-opt seccomp=FILE with membarrier allowed; otherwise a kernel with CONFIG_MEMBARRIER",
        )
    }
}

fn folder(folder: &Folder) -> Finding {
    let Folder { path, named, own_uid, found } = folder;
    let path = path.display();
    let elsewhere = "export TOMBOLO_DIR=$(mktemp -d)";
    let failure = |says: String| Finding::new("folder", Grade::Failure, says);
    match found {
        Found::Folder { uid, .. } if !named && uid != own_uid => {
            failure(format!("{path} belongs to user {uid}, and is not used")).mend(elsewhere)
        }
        Found::Folder { mode, .. } if !named && mode & 0o022 != 0 => {
            failure(format!("{path} can be written by others (mode {mode:o}), and is not used"))
                .mend(format!("chmod go-w {path}"))
        }
        Found::Folder { writable: false, .. } => {
            Finding::new("folder", Grade::Warning, format!("{path} can be connected in, not listened in by this user"))
                .mend(elsewhere)
        }
        Found::Folder { mode, .. } => {
            Finding::new("folder", Grade::Ok, format!("services are in {path} (mode {mode:o})"))
        }
        Found::Nothing { parent_writable: true } => {
            Finding::new("folder", Grade::Ok, format!("services will be in {path}; the first listener makes it"))
        }
        Found::Nothing { parent_writable: false } => failure(format!(
            "{path} is not there and cannot be made: its parent is missing or not this user's to write"
        ))
        .mend(elsewhere),
        Found::SomethingElse => {
            failure(format!("{path} is a link or a file, and is not used")).mend(format!("rm {path}"))
        }
        Found::Unreadable(why) => failure(format!("{path} cannot be looked at: {why}")).mend(elsewhere),
    }
}

fn channel(facts: &Facts) -> Finding {
    match &facts.channel {
        Ok(()) => Finding::new("channel", Grade::Ok, "a channel was opened, and bytes came through"),
        Err(why) => Finding::new("channel", Grade::Failure, format!("no channel could be opened: {why}"))
            .mend("mend what is named above; without any such, TMPDIR=/var/tmp tombolo doctor"),
    }
}

fn files((soft, hard): (u64, u64)) -> Finding {
    let ends = soft.saturating_sub(OTHER_DESCRIPTORS) / DESCRIPTORS;
    let says = format!("{soft} descriptors for each process: room for {ends} ends of channels");
    let remedy = if hard > soft {
        format!("ulimit -n {}", hard.min(65536))
    } else {
        "ulimit -Hn 65536 as root; in a systemd unit LimitNOFILE=65536".into()
    };
    match ends {
        0 => Finding::new("files", Grade::Failure, says).mend(remedy),
        1..ENDS => Finding::new("files", Grade::Warning, says).mend(remedy),
        _ => Finding::new("files", Grade::Ok, says),
    }
}

fn memory(facts: &Facts) -> Finding {
    let tightest = facts.limits.iter().min_by_key(|limit| limit.left());
    let left = tightest.map(Limit::left).into_iter().chain(facts.memory).min();
    let Some(left) = left else {
        return Finding::new("memory", Grade::Info, "nobody can tell how much memory there is");
    };
    let bound = tightest.filter(|limit| limit.left() == left);
    let place = bound.map_or("on this machine".into(), |limit| format!("in the cgroup {}", limit.group.display()));
    let says = format!("{} left {place}: room for {} channels", human::bytes(left), left / CHANNEL);
    let remedy = match bound {
        Some(limit) => format!("echo {} > {}/memory.max", limit.most + (1 << 30), limit.group.display()),
        None => "ps aux --sort -rss | head: see who has it; smaller rings need less".into(),
    };
    match left / CHANNEL {
        0 => Finding::new("memory", Grade::Failure, says).mend(remedy),
        1..CHANNELS => Finding::new("memory", Grade::Warning, says).mend(remedy),
        _ => Finding::new("memory", Grade::Ok, says),
    }
}

fn cpus(facts: &Facts) -> Finding {
    let (online, allowed) = facts.cpus;
    let warning = |says: String| Finding::new("cpus", Grade::Warning, says);
    if allowed < 2 {
        let says = format!("this process may use {allowed} of {online} CPUs: both ends share it, and nobody spins");
        let last = online.saturating_sub(1);
        return warning(says).mend(match online {
            0 | 1 => "give this machine a second CPU".into(),
            _ => format!("taskset -p -c 0-{last} $$, or a wider cpuset.cpus of the cgroup"),
        });
    }
    match &facts.quota {
        Some((cpus, group)) if *cpus < 2.0 => {
            let group = group.display();
            warning(format!("the cgroup {group} allows the time of {cpus:.2} CPUs: who spins is stopped in between"))
                .mend(format!("echo max > {group}/cpu.max"))
        }
        _ => Finding::new("cpus", Grade::Ok, format!("{allowed} of {online} CPUs may be used")),
    }
}

fn namespaces(facts: &Facts) -> Finding {
    match &facts.namespaces {
        Ok(()) => Finding::new("namespaces", Grade::Ok, "user and network namespaces can be made (for the demo)"),
        Err(why) => Finding::new("namespaces", Grade::Warning, format!("no namespaces for the demo: {why}"))
            .mend("sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000"),
    }
}

fn memlock(most: Option<u64>) -> Finding {
    let most = most.map_or("any amount".into(), human::bytes);
    Finding::new("memlock", Grade::Info, format!("{most} may be locked; nothing is: no channel needs it"))
}

fn shm(there: bool) -> Finding {
    let there = if there { "is there" } else { "is not there" };
    Finding::new("shm", Grade::Info, format!("/dev/shm {there}; no channel needs it"))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            guest::{Device, Driven, Guest},
            net::Interfaces,
            xen::{self, Domain},
        },
        *,
    };

    fn doorbell() -> Device {
        Device {
            address: "0000:00:02.0".into(),
            driver: Some("tombolo_ivshmem".into()),
            is_doorbell: true,
            memory: 1 << 30,
            driven: Some(Driven { node: "tombolo0".into(), write_back: true, interrupts: 9, storms: 0 }),
        }
    }

    fn region(memory: u64) -> Device {
        Device { address: "0000:00:1e.0".into(), is_doorbell: false, memory, ..doorbell() }
    }

    fn healthy() -> Facts {
        Facts {
            kernel: "6.1.0-13-amd64".into(),
            proc: Ok(()),
            memfd: Ok(()),
            eventfd: Ok(()),
            membarrier: Membarrier { global: true, global_expedited: true, registers: true },
            channel: Ok(()),
            folder: Folder {
                path: "/run/user/7/tombolo".into(),
                named: false,
                own_uid: 7,
                found: Found::Folder { uid: 7, mode: 0o700, writable: true },
            },
            files: (1024, 4096),
            memlock: None,
            memory: Some(1 << 30),
            limits: vec![],
            cpus: (4, 4),
            quota: None,
            namespaces: Ok(()),
            shm: true,
            host: None,
            interfaces: Interfaces { tun: true, statuses: vec![] },
            guest: Guest {
                devices: vec![doorbell(), region(1 << 40)],
                module: true,
                closed: None,
                broker: Some(Ok("a".into())),
            },
            xen: Some(Domain {
                controls: false,
                devices: [xen::Device::There; 4],
                tried: Some(Ok(7)),
                limit: Some(1024),
                granted: 0,
                quarantine: 0,
                kept: None,
            }),
        }
    }

    #[test]
    fn healthy_machine_has_nothing_to_mend() {
        for finding in examine(&healthy()) {
            assert!(finding.grade <= Grade::Info && finding.remedy.is_none(), "{finding:?}");
        }
    }

    type Spoil = fn(&mut Facts);

    fn found(facts: &mut Facts, found: Found) {
        facts.folder.found = found;
    }

    fn domain(facts: &mut Facts) -> &mut Domain {
        facts.xen.as_mut().unwrap()
    }

    /// Each fault, the check that notices it, its grade, and a word of the remedy.
    const CANARIES: &[(Spoil, &str, Grade, &str)] = &[
        (|facts| facts.kernel = "5.7.19".into(), "kernel", Grade::Failure, "linux-image"),
        (|facts| facts.kernel = "4.19".into(), "kernel", Grade::Failure, "linux-image"),
        (|facts| facts.kernel = "odd".into(), "kernel", Grade::Warning, "uname"),
        (|facts| facts.proc = Err("no".into()), "proc", Grade::Failure, "mount -t proc"),
        (|facts| facts.memfd = Err("no".into()), "memfd", Grade::Failure, "linux-image"),
        (|facts| facts.eventfd = Err("no".into()), "eventfd", Grade::Failure, "linux-image"),
        (|facts| facts.membarrier.registers = false, "membarrier", Grade::Warning, "seccomp"),
        (|facts| facts.membarrier.global_expedited = false, "membarrier", Grade::Warning, "seccomp"),
        (|facts| facts.channel = Err("no".into()), "channel", Grade::Failure, "TMPDIR"),
        (|facts| facts.folder.own_uid = 8, "folder", Grade::Failure, "TOMBOLO_DIR"),
        (
            |facts| found(facts, Found::Folder { uid: 7, mode: 0o770, writable: true }),
            "folder",
            Grade::Failure,
            "chmod go-w /run/user/7/tombolo",
        ),
        (
            |facts| found(facts, Found::Folder { uid: 7, mode: 0o500, writable: false }),
            "folder",
            Grade::Warning,
            "TOMBOLO_DIR",
        ),
        (|facts| found(facts, Found::Nothing { parent_writable: false }), "folder", Grade::Failure, "TOMBOLO_DIR"),
        (|facts| found(facts, Found::SomethingElse), "folder", Grade::Failure, "rm /run/user/7/tombolo"),
        (|facts| found(facts, Found::Unreadable("no".into())), "folder", Grade::Failure, "TOMBOLO_DIR"),
        (|facts| facts.files = (20, 20), "files", Grade::Failure, "LimitNOFILE"),
        (|facts| facts.files = (256, 4096), "files", Grade::Warning, "ulimit -n 4096"),
        (|facts| facts.memory = Some(1 << 20), "memory", Grade::Failure, "ps aux"),
        (|facts| facts.memory = Some(8 << 20), "memory", Grade::Warning, "ps aux"),
        (
            |facts| facts.limits = vec![Limit { group: "/g".into(), most: 5 << 20, used: 4 << 20 }],
            "memory",
            Grade::Failure,
            "> /g/memory.max",
        ),
        (|facts| facts.cpus = (4, 1), "cpus", Grade::Warning, "taskset -p -c 0-3"),
        (|facts| facts.cpus = (1, 1), "cpus", Grade::Warning, "second CPU"),
        (|facts| facts.quota = Some((0.5, "/g".into())), "cpus", Grade::Warning, "/g/cpu.max"),
        (|facts| facts.guest.module = false, "ivshmem", Grade::Warning, "modprobe tombolo_ivshmem"),
        (|facts| facts.guest.devices[1].driver = None, "ivshmem", Grade::Warning, "echo 0000:00:1e.0 >"),
        (|facts| facts.guest.devices[0].driver = Some("uio".into()), "ivshmem", Grade::Warning, "driver/unbind"),
        (|facts| drop(facts.guest.devices.remove(0)), "ivshmem", Grade::Warning, "tombolo link snippet"),
        (
            |facts| {
                let region = &mut facts.guest.devices[1];
                (region.memory, region.driven) = (0xfe00_0000, None);
            },
            "ivshmem",
            Grade::Warning,
            "1 GiB",
        ),
        (
            |facts| facts.guest.devices[1].driven.iter_mut().for_each(|driven| driven.write_back = false),
            "ivshmem",
            Grade::Warning,
            "/proc/mtrr",
        ),
        (
            |facts| {
                facts.guest.broker = Some(Err("no".into()));
                facts.guest.closed = Some("/dev/tombolo0 is for user 0 and group 998".into());
            },
            "broker",
            Grade::Warning,
            "group 998",
        ),
        (|facts| facts.guest.broker = Some(Err("no".into())), "broker", Grade::Warning, "tombolod --guest"),
        (|facts| facts.host = Some(Err("no".into())), "machines", Grade::Warning, "systemctl start tombolod"),
        (|facts| domain(facts).devices[0] = xen::Device::Missing, "xen", Grade::Warning, "modprobe -a xen-gntalloc"),
        (|facts| domain(facts).devices[3] = xen::Device::Missing, "xen", Grade::Warning, "XENBUS_FRONTEND"),
        (|facts| domain(facts).devices[1] = xen::Device::Denied, "xen", Grade::Warning, "rw /dev/xen/gntdev"),
        (|facts| domain(facts).tried = Some(Err("no".into())), "xen", Grade::Warning, "gntalloc/parameters/limit"),
        (
            |facts| {
                domain(facts).controls = true;
                domain(facts).tried = Some(Err("no".into()));
            },
            "xen",
            Grade::Warning,
            "systemctl start xenstored",
        ),
        (|facts| domain(facts).granted = 1000, "xen", Grade::Warning, "echo 101024 >"),
        (|facts| facts.namespaces = Err("no".into()), "namespaces", Grade::Warning, "unprivileged_userns_clone"),
        (|facts| facts.interfaces.tun = false, "tun", Grade::Warning, "modprobe tun"),
        (
            |facts| facts.interfaces.statuses = vec![serde_json::json!({ "interface": "tmb0", "reason": "no link" })],
            "interfaces",
            Grade::Warning,
            "net stat tmb0",
        ),
    ];

    #[test]
    fn canary_each_thing_that_is_wrong_is_found_with_its_remedy_and_nothing_else() {
        for (spoil, check, grade, remedy) in CANARIES {
            let mut facts = healthy();
            spoil(&mut facts);
            let wrong: Vec<_> = examine(&facts).into_iter().filter(|finding| finding.grade > Grade::Info).collect();
            assert!(wrong.len() == 1 && wrong[0].check == *check && wrong[0].grade == *grade, "{check}: {wrong:?}");
            assert!(wrong[0].remedy.as_ref().is_some_and(|text| text.contains(remedy)), "{remedy}: {wrong:?}");
        }
    }

    #[test]
    fn every_finding_that_can_be_wrong_has_a_case_in_which_it_is() {
        let only_informed = ["interrupts", "memlock", "shm"];
        for finding in examine(&healthy()) {
            let tested = CANARIES.iter().any(|(_, check, ..)| *check == finding.check);
            assert!(tested != only_informed.contains(&finding.check), "{}", finding.check);
        }
    }

    #[test]
    fn interrupts_that_were_held_back_are_said() {
        let mut facts = healthy();
        assert_eq!(guest::interrupts(&facts.guest).grade, Grade::Ok);
        facts.guest.devices[0].driven.iter_mut().for_each(|driven| driven.storms = 3);
        let found = guest::interrupts(&facts.guest);
        assert!(found.grade == Grade::Info && found.says.contains("held back 3 times"), "{found:?}");
    }

    #[test]
    fn folder_that_was_named_is_its_users_business() {
        let mut facts = healthy();
        facts.folder.named = true;
        found(&mut facts, Found::Folder { uid: 9, mode: 0o777, writable: true });
        assert_eq!(folder(&facts.folder).grade, Grade::Ok);
        found(&mut facts, Found::Nothing { parent_writable: true });
        assert_eq!(folder(&facts.folder).grade, Grade::Ok);
    }

    #[test]
    fn machine_without_xen_has_nothing_to_mend() {
        let xen = xen::xen(None);
        assert!(xen.grade == Grade::Info && xen.remedy.is_none(), "{xen:?}");
    }
}
