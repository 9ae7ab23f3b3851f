// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A real QEMU, without a disk or a kernel: it takes memory and doorbells without running processors.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use common::{Daemon, remove, until};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};
use tombolo_broker::{fd_passing, host::memory};
use tombolo_control::{Form, Life, LinkState, Message};

const QEMU: &str = "qemu-system-x86_64";

fn skipped(test: &str) -> bool {
    let quiet = || Command::new(QEMU).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let missing = !quiet().is_ok_and(|status| status.success());
    if missing {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs qemu): no {QEMU}: `apt install qemu-system-x86`");
    }
    missing
}

struct Qemu {
    child: Child,
    own: BufReader<UnixStream>,
}

impl Qemu {
    /// Starts QEMU with the options that the broker prints.
    fn start(daemon: &Daemon, name: &str, machine: &str) -> Self {
        Self::start_with(daemon, name, machine, &[])
    }

    /// As `start`, with further options for a guest.
    fn start_with(daemon: &Daemon, name: &str, machine: &str, more: &[&str]) -> Self {
        let control = daemon.file(&format!("{name}.test"));
        let domain = name.parse().unwrap();
        let snippet = daemon.client().ask(Message::Snippet { form: Form::Qemu, domain });
        let mut command = Command::new(QEMU);
        command.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-accel",
            "tcg",
            "-m",
            "32",
            "-S",
            "-M",
            machine,
        ]);
        command.args(more);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", control.display()));
        for line in &snippet {
            let Message::Line { line } = line else { panic!("{line:?}") };
            command.args(line.as_str().split(' '));
        }
        let log = fs::File::create(daemon.file(&format!("{name}.log"))).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let stream = until("QEMU listens", || UnixStream::connect(&control).ok());
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut qemu = Self { child, own: BufReader::new(stream) };
        qemu.execute("qmp_capabilities");
        qemu
    }

    fn execute(&mut self, command: &str) {
        let answer = self.ask(&json!({ "execute": command }), &[]);
        assert!(answer["error"].is_null(), "{answer}");
    }

    /// Sends the Hello of the guest's broker, as far as its host can tell: through files that QEMU has open.
    fn greet(&self, name: &str) {
        let pidfd = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).unwrap();
        let files = fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().map(|entry| entry.unwrap().path());
        let all: Vec<_> = files.filter_map(|file| Some((fs::read_link(&file).ok()?, file))).collect();
        let of = |what: &str| -> Vec<OwnedFd> {
            let them = all.iter().filter(|(is, _)| is.to_string_lossy().contains(what));
            let number = |file: &Path| file.file_name()?.to_str()?.parse().ok();
            them.map(|(_, file)| pidfd_getfd(&pidfd, number(file).unwrap(), PidfdGetfdFlags::empty()).unwrap())
                .collect()
        };
        // Only QEMU knows which of them notifies the host; notifications of the others mean nothing.
        let (memory, doorbells) = (of("memfd:tombolo-device").remove(0), of("[eventfd]"));
        common::greet(&memory, name, || {
            for doorbell in &doorbells {
                let _ = rustix::io::write(doorbell, &1u64.to_ne_bytes());
            }
        });
    }

    /// Returns the answer to a command that comes with descriptors.
    fn ask(&mut self, command: &Value, descriptors: &[BorrowedFd<'_>]) -> Value {
        assert!(fd_passing::send(self.own.get_ref(), format!("{command}\n").as_bytes(), descriptors).unwrap());
        loop {
            let mut line = String::new();
            assert!(self.own.read_line(&mut line).unwrap() > 0, "QEMU is gone");
            let answer: Value = serde_json::from_str(&line).unwrap();
            if answer["QMP"].is_null() && answer["event"].is_null() {
                return answer;
            }
        }
    }

    /// Makes a memory of a descriptor. Returns the reason if QEMU refuses.
    fn take_memory(&mut self, memory: &OwnedFd, id: &str, readonly: bool) -> Option<String> {
        let added = self.ask(&json!({ "execute": "add-fd" }), &[memory.as_fd()]);
        let path = format!("/proc/self/fd/{}", added["return"]["fd"]);
        let object = json!({
            "qom-type": "memory-backend-file", "id": id, "mem-path": path, "size": 65536, "share": true, "readonly": readonly,
        });
        self.ask(&json!({ "execute": "object-add", "arguments": object }), &[])["error"]["desc"]
            .as_str()
            .map(String::from)
    }

    /// Returns the access of the mappings of regions.
    fn regions(&self) -> Vec<String> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap();
        let mut access: Vec<_> = maps
            .lines()
            .filter(|line| line.contains("/memfd:tombolo-") && !line.contains("tombolo-device"))
            .map(|line| line.split(' ').nth(1).unwrap().to_owned())
            .collect();
        access.sort();
        access
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn life(daemon: &Daemon, domain: &str) -> Life {
    let rows = daemon.client().domains();
    rows.iter()
        .find_map(|row| match row {
            Message::DomainRow { name, life, .. } if name.as_str() == domain => Some(*life),
            _ => None,
        })
        .unwrap()
}

fn is_up(daemon: &Daemon) -> Option<()> {
    let links = daemon.client().links();
    links.iter().any(|row| matches!(row, Message::LinkRow { state: LinkState::Up, .. })).then_some(())
}

#[test]
fn b10_b12_b16_real_qemus_take_regions_and_tell_their_lives() {
    if skipped("b10_b12_b16_real_qemus_take_regions_and_tell_their_lives") {
        return;
    }
    let config =
        "[domain.a]\n[domain.b]\nmachine = \"q35\"\nports = 4\n[[allow]]\nfrom = \"a\"\nto = \"b\"\nservice = \"*\"\n";
    let mut daemon = Daemon::start(config);
    let (mut a, b) = (Qemu::start(&daemon, "a", "pc"), Qemu::start(&daemon, "b", "q35"));
    daemon.client().link("a", "b");
    b.greet("b");
    until("it has its region", || (b.regions() == ["rw-s"]).then_some(()));
    assert_eq!(a.regions(), [""; 0], "its firmware may not have begun yet");
    a.greet("a");
    until("the link is up", || is_up(&daemon));
    for qemu in [&a, &b] {
        assert_eq!(qemu.regions(), ["r--s", "rw-s"]);
    }
    until("paused", || (life(&daemon, "a") == Life::Paused).then_some(()));
    for (command, means) in
        [("cont", Life::Running), ("stop", Life::Paused), ("cont", Life::Running), ("stop", Life::Paused)]
    {
        let before = Instant::now();
        a.execute(command);
        until(command, || (life(&daemon, "a") == means).then_some(()));
        assert!(before.elapsed() < Duration::from_secs(2), "{command} took {:?}", before.elapsed());
    }

    daemon.kill();
    daemon.restart();
    until("the link is up again", || is_up(&daemon));
    until("QEMU is asked again", || (life(&daemon, "a") == Life::Paused).then_some(()));

    // A peer that comes and goes takes doorbells and memory with it, and QEMU survives that.
    let mut b = b;
    for _ in 0..4 {
        drop(b);
        until("b is gone", || (life(&daemon, "b") == Life::DomainGone).then_some(()));
        b = Qemu::start(&daemon, "b", "q35");
        b.greet("b");
        until("the link is up with other memory", || {
            a.execute("system_reset");
            let rows = daemon.client().links();
            rows.iter()
                .any(|row| matches!(row, Message::LinkRow { state: LinkState::Up, quarantined: 0, .. }))
                .then_some(())
        });
        // QEMU unmaps released memory a little later, when none of its threads can look at it.
        until("only the new memory is mapped", || (a.regions() == ["r--s", "rw-s"]).then_some(()));
    }

    // The guest runs nothing that could release a device; a reset releases it.
    assert_eq!(daemon.client().ask(remove("a", "b")), []);
    until("its own QEMU was asked", || {
        a.execute("system_reset");
        a.regions().is_empty().then_some(())
    });
    assert_eq!(life(&daemon, "a"), Life::DomainGone);
    drop(a);
    drop(b);
    until("both are gone", || (daemon.client().links().is_empty() && daemon.kept().is_empty()).then_some(()));
}

/// Returns a boot sector with the code of a minimal guest.
fn sector(code: &[u8]) -> Vec<u8> {
    let mut sector = code.to_vec();
    // Halt, and again.
    sector.extend([0xf4, 0xeb, 0xfd]);
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

#[test]
fn b12_real_guests_that_reset_panic_or_shut_down_are_gone() {
    let test = "b12_real_guests_that_reset_panic_or_shut_down_are_gone";
    if skipped(test) {
        return;
    }
    // A byte to the keyboard's controller, to the panic device, and a word to the power management's.
    let guests: [(&str, &str, &[u8]); 4] = [
        ("idle", "pc", &[]),
        ("reset", "pc", &[0xb0, 0xfe, 0xe6, 0x64]),
        ("panic", "pc", &[0xba, 0x05, 0x05, 0xb0, 0x01, 0xee]),
        ("shutdown", "pc", &[0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef]),
    ];
    let config: String =
        guests.iter().map(|(name, machine, _)| format!("[domain.{name}]\nmachine = \"{machine}\"\n")).collect();
    let daemon = Daemon::start(&config);
    let mut idle = None;
    for (name, machine, code) in guests {
        let disk = daemon.file(&format!("{name}.disk"));
        fs::write(&disk, sector(code)).unwrap();
        let drive = format!("file={},format=raw,if=ide", disk.display());
        // A guest that shut down or panicked is kept, to be examined.
        let more = ["-drive", &drive, "-device", "pvpanic", "-no-shutdown", "-action", "panic=pause"];
        let mut qemu = Qemu::start_with(&daemon, name, machine, &more);
        until("paused", || (life(&daemon, name) == Life::Paused).then_some(()));
        qemu.execute("cont");
        if name == "idle" {
            idle = Some(qemu);
            continue;
        }
        until(name, || (life(&daemon, name) == Life::DomainGone).then_some(()));
        assert!(qemu.child.try_wait().unwrap().is_none(), "its QEMU is there");
    }
    // The canary: the same firmware, and a disk that does nothing, for longer than the others took.
    assert_eq!(life(&daemon, "idle"), Life::Running);
    drop(idle);
}

/// The guest's firmware never used the regions, and QEMU keeps their names for ever.
#[test]
fn b10_guest_that_ejects_its_regions_is_told_of_and_its_qemu_lives() {
    if skipped("b10_guest_that_ejects_its_regions_is_told_of_and_its_qemu_lives") {
        return;
    }
    let config = "[domain.a]\n[domain.b]\n[[allow]]\nfrom = \"a\"\nto = \"b\"\nservice = \"*\"\n";
    let daemon = Daemon::start(config);
    let disk = daemon.file("a.disk");
    // Writes the two last slots, in turns and without end, to the register that ejects.
    let eject = [
        0x66, 0xb8, 0x00, 0x00, 0x00, 0x80, 0xba, 0x08, 0xae, 0x66, 0xef, 0x66, 0x35, 0x00, 0x00, 0x00, 0xc0, 0xeb,
        0xf6,
    ];
    fs::write(&disk, sector(&eject)).unwrap();
    let drive = format!("file={},format=raw,if=ide", disk.display());
    let mut a = Qemu::start_with(&daemon, "a", "pc", &["-drive", &drive]);
    let mut b = Qemu::start(&daemon, "b", "pc");
    a.greet("a");
    b.greet("b");
    a.execute("cont");
    daemon.client().link("a", "b");
    let noted = |what: &str| {
        let rows = daemon.client().links();
        rows.iter()
            .any(|row| matches!(row, Message::LinkRow { note, .. } if note.as_str().contains(what)))
            .then_some(())
    };
    until("it is said", || noted("ejected a region"));
    a.execute("stop");

    assert_eq!(daemon.client().ask(remove("a", "b")), []);
    until("the regions are given back", || {
        for qemu in [&mut a, &mut b] {
            qemu.execute("system_reset");
        }
        daemon.client().links().is_empty().then_some(())
    });
    daemon.client().link("a", "b");
    until("the link is up", || is_up(&daemon));
    until("only the new memory is mapped", || (a.regions() == ["r--s", "rw-s"]).then_some(()));
}

/// Shows why the order of B-10 is as it is, and that each of its steps is needed.
#[test]
fn b10_canary_region_sealed_too_early_is_refused_and_one_never_sealed_can_be_written() {
    if skipped("b10_canary_region_sealed_too_early_is_refused_and_one_never_sealed_can_be_written") {
        return;
    }
    let daemon = Daemon::start("[domain.a]\n");
    let mut qemu = Qemu::start(&daemon, "a", "pc");
    let sealed = memory::create("tombolo-canary", 64 << 10).unwrap();
    memory::seal_against_writing(&sealed).unwrap();
    let why = qemu.take_memory(&sealed, "early", false).expect("a refusal");
    assert!(why.contains("Operation not permitted"), "{why}");
    assert_eq!(qemu.take_memory(&sealed, "late", true), None);
    // A QEMU that was taken over opens what it was given once more, for writing.
    let open = memory::create("tombolo-canary", 64 << 10).unwrap();
    assert_eq!(qemu.take_memory(&open, "peer", true), None);
    let reach = |memory: &OwnedFd| {
        let inode = rustix::fs::fstat(memory).unwrap().st_ino;
        let folder = format!("/proc/{}/fd", qemu.child.id());
        let mut files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let path = files
            .find(|path| fs::metadata(path).is_ok_and(|meta| std::os::unix::fs::MetadataExt::ino(&meta) == inode))
            .expect("QEMU has it open");
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        std::os::unix::fs::FileExt::write_at(&file, b"spoilt", 0)
    };
    assert_eq!(reach(&open).unwrap(), 6);
    assert_eq!(reach(&sealed).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
}
