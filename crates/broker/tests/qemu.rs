// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A real QEMU, without a disk or a kernel: its processors need not run for it to take memory and doorbells.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
};

use common::{Daemon, remove, until};
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
    /// With what the broker says that it needs.
    fn start(daemon: &Daemon, name: &str, machine: &str) -> Self {
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
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", control.display()));
        for line in &snippet {
            let Message::Line { line } = line else { panic!("{line:?}") };
            command.args(line.as_str().split(' '));
        }
        let log = fs::File::create(daemon.file(&format!("{name}.log"))).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let stream = until("QEMU listens", || UnixStream::connect(&control).ok());
        let mut qemu = Self { child, own: BufReader::new(stream) };
        qemu.execute("qmp_capabilities");
        qemu
    }

    fn execute(&mut self, command: &str) {
        writeln!(self.own.get_mut(), "{{\"execute\":\"{command}\"}}").unwrap();
        let mut line = String::new();
        while !line.starts_with("{\"return\"") {
            line.clear();
            assert!(self.own.read_line(&mut line).unwrap() > 0, "QEMU is gone");
            assert!(!line.contains("\"error\""), "{line}");
        }
    }

    /// Mappings of regions, with their access.
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
    until("the link is up", || is_up(&daemon));
    for qemu in [&a, &b] {
        assert_eq!(qemu.regions(), ["r--s", "rw-s"]);
    }
    until("paused", || (life(&daemon, "a") == Life::Paused).then_some(()));
    a.execute("cont");
    until("running", || (life(&daemon, "a") == Life::Running).then_some(()));
    a.execute("stop");
    until("paused", || (life(&daemon, "a") == Life::Paused).then_some(()));

    daemon.kill();
    daemon.restart();
    until("the link is up again", || is_up(&daemon));
    until("QEMU is asked again", || (life(&daemon, "a") == Life::Paused).then_some(()));

    // A peer that comes and goes takes doorbells and memory with it, and QEMU bears it.
    let mut b = b;
    for _ in 0..4 {
        drop(b);
        until("b is gone", || (life(&daemon, "b") == Life::DomainGone).then_some(()));
        b = Qemu::start(&daemon, "b", "q35");
        until("the link is up with other memory", || {
            a.execute("system_reset");
            let rows = daemon.client().links();
            rows.iter()
                .any(|row| matches!(row, Message::LinkRow { state: LinkState::Up, quarantined: 0, .. }))
                .then_some(())
        });
        // QEMU unmaps what it gave back a little later, when none of its threads can look at it.
        until("only the new memory is mapped", || (a.regions() == ["r--s", "rw-s"]).then_some(()));
    }

    // There is nobody in the guest to let go of a device; a reset does.
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
