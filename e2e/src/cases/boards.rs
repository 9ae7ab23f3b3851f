// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Machines of other kinds than those of the other cases.

use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::{CONFIG, Plan, Purpose, Site};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use tombolo_e2e::console::Console;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::until;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::process::{Process, tied};
use tombolo_e2e::qemu::{Spec, Vm};
use tombolo_e2e::scratch::Scratch;

pub const CASES: &[Case] = &[Case { name: "links_work_on_q35_without_a_display", run: q35 }];

pub const LONG_CASES: &[Case] = &[
    Case { name: "b10_virtiofsd_serves_while_links_come_and_go", run: beside_virtiofsd },
    Case { name: "b10_link_that_would_end_virtiofsd_or_open_its_memory_is_refused", run: refused },
];

/// A user who owns nothing here.
const SOMEBODY: u32 = 54321;
/// Debian's virtiofsd, of the package qemu-system-common.
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// With no other device behind its bridges, firmware gives a root port a window that begins at any MiB. A region still
/// has to fit in at a multiple of its size.
fn q35(rig: &mut Rig) -> Result<Verdict> {
    rig.rest()?;
    let config = CONFIG.replace("[domain.a]", "[domain.a]\nmachine = \"q35\"");
    let config = config.replace("[domain.b]", "[domain.b]\nmachine = \"q35\"");
    let plan = Plan { purpose: Purpose::Cases, config: &config, modules: &[], programs: &[] };
    let mut site = Site::boot_with(&rig.parts, &plan, |spec| {
        spec.board = "q35";
        Ok(())
    })?;
    let done = speak(&mut site);
    finished(site, done)
}

/// Checks that words go both ways over a link between the machines.
fn speak(site: &mut Site) -> Result<()> {
    site.link("a", "b")?;
    site.link("a", "host")?;
    let listener = site.b.start(&["sh", "-c", "tombolo cat --listen vm:b/word --receive-only"])?;
    site.a.sh("echo word | tombolo cat --connect vm:b/word --wait 30 --send-only", within(60))?;
    let got = site.b.wait(listener, within(60))?.success().context("who listens in b")?;
    ensure!(got == "word", "{got}");
    let listener = site.a.start(&["sh", "-c", "tombolo cat --listen vm:a/word --receive-only"])?;
    site.b.sh("echo back | tombolo cat --connect vm:a/word --wait 30 --send-only", within(60))?;
    let got = site.a.wait(listener, within(60))?.success().context("who listens in a")?;
    ensure!(got == "back", "{got}");
    Ok(())
}

/// A backend that maps all of its guest's shared memory, and the folder that it shares.
struct Shown {
    folder: Scratch,
    _process: Process,
    _said: Console,
}

impl Shown {
    /// Starts a backend for the described machine, whose QEMU runs as `user`.
    fn start(spec: &mut Spec, user: u32) -> Result<Self> {
        let folder = Scratch::new("shown")?;
        let socket = folder.path().join("socket");
        fs::create_dir(folder.path().join("files"))?;
        let mut command = tied(&[], VIRTIOFSD);
        command.arg(format!("--socket-path={}", socket.display()));
        command.args(["-o", &format!("source={}", folder.path().join("files").display()), "-o", "sandbox=chroot"]);
        let mut process = Process::start(command.stdout(Stdio::null()).stderr(Stdio::piped()))?;
        let mut said = process.stderr.take().map(Console::of).ok_or_else(|| Error::new("no standard error"))?;
        until(within(60), || socket.exists())
            .map_err(|why| Error::new(format!("{VIRTIOFSD}: {why}: {}", said.tail(9))))?;
        chown(&socket, Some(user), None)?;
        chown(folder.path(), Some(user), None)?;
        let memory = format!("memory-backend-memfd,id=ram,size={}M,share=on", spec.memory);
        let words = ["-object", &memory, "-machine", "memory-backend=ram"];
        spec.args.extend(words.map(str::to_owned));
        spec.args.extend(["-chardev".into(), format!("socket,id=shown,path={}", socket.display())]);
        spec.args.extend(["-device", "vhost-user-fs-pci,id=shown,chardev=shown,tag=shown"].map(str::to_owned));
        Ok(Self { folder, _process: process, _said: said })
    }

    /// Checks that the guest sees a file of the host, and the host a file of the guest.
    fn check(&self, vm: &mut Vm, number: u32) -> Result<()> {
        let files = self.folder.path().join("files");
        fs::write(files.join(format!("down-{number}")), number.to_string())?;
        let command = format!("cat /mnt/down-{number} && echo {number} > /mnt/up-{number}");
        let got = vm.sh(&command, within(60)).context("files of the host in the guest")?;
        ensure!(got == number.to_string(), "{got} instead of {number}");
        let up = fs::read_to_string(files.join(format!("up-{number}")))?;
        ensure!(up.trim() == number.to_string(), "{up} came up");
        Ok(())
    }
}

/// Returns a skip if there is no backend to try.
fn no_virtiofsd() -> Option<Verdict> {
    let skip = |need, why: &str| Some(Verdict::Skip { need, why: why.into() });
    if !Path::new(VIRTIOFSD).exists() {
        return skip("virtiofsd", "no virtiofsd (package qemu-system-common of Debian 12)");
    }
    if rustix::process::geteuid().is_root() {
        None
    } else {
        skip("root", "virtiofsd and a QEMU of another user need root")
    }
}

/// Boots two machines whose QEMUs run as `users`, each with files of the host by virtiofsd.
fn with_virtiofsd(rig: &mut Rig, users: [u32; 2]) -> Result<(Site, Vec<Shown>, Scratch)> {
    rig.rest()?;
    let sockets = Scratch::new("qmp")?;
    fs::set_permissions(sockets.path(), fs::Permissions::from_mode(0o1777))?;
    let domain = |name: &str, user: u32| {
        let user = if user == 0 { String::new() } else { format!("\nuser = {user}") };
        format!("[domain.{name}]\nqmp = \"{}/{name}\"{user}", sockets.path().display())
    };
    let config = CONFIG.replace("[domain.a]", &domain("a", users[0])).replace("[domain.b]", &domain("b", users[1]));
    let mut shown = Vec::new();
    let plan = Plan { purpose: Purpose::Cases, config: &config, modules: &["virtio_pci", "virtiofs"], programs: &[] };
    let mut site = Site::boot_with(&rig.parts, &plan, |spec| {
        let user = users[usize::from(spec.name == "b")];
        shown.push(Shown::start(spec, user)?);
        if user != 0 {
            spec.run_as(user)?;
        }
        Ok(())
    })?;
    for vm in [&mut site.a, &mut site.b] {
        let mount = "/agent insmod $(cat /modules/order) && mkdir /mnt && mount -t virtiofs shown /mnt";
        vm.sh(mount, within(60))?;
    }
    Ok((site, shown, sockets))
}

/// Each user's QEMU has a backend, links come and go, and a reader of memory cannot open it for writing.
fn beside_virtiofsd(rig: &mut Rig) -> Result<Verdict> {
    if let Some(skip) = no_virtiofsd() {
        return Ok(skip);
    }
    let (mut site, shown, _sockets) = with_virtiofsd(rig, [SOMEBODY, SOMEBODY + 1])?;
    let done = come_and_go(&mut site, &shown);
    finished(site, done)
}

fn come_and_go(site: &mut Site, shown: &[Shown]) -> Result<()> {
    for round in 0..3 {
        check(site, shown, 2 * round)?;
        speak(site)?;
        only_owners_write(&site.b, SOMEBODY + 1, "-a ")?;
        only_owners_write(&site.a, SOMEBODY, "-b ")?;
        check(site, shown, 2 * round + 1)?;
        site.unlink()?;
    }
    check(site, shown, 6)
}

fn check(site: &mut Site, shown: &[Shown], number: u32) -> Result<()> {
    shown[0].check(&mut site.a, number)?;
    shown[1].check(&mut site.b, number)
}

/// Checks that the user of a QEMU can read and cannot write the memory whose name contains `name`.
fn only_owners_write(vm: &Vm, user: u32, name: &str) -> Result<()> {
    let look = format!(
        "for fd in /proc/{}/fd/*; do case \"$(readlink $fd)\" in */memfd:tombolo-*'{name}'*) \
         head -c 1 $fd >/dev/null && echo read; ( : >>$fd ) 2>/dev/null && echo written;; esac; done; true",
        vm.process()
    );
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={user}"), format!("--regid={user}")]).args(["--clear-groups", "sh", "-c", &look]);
    let output = command.output().context("setpriv")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        said.trim() == "read",
        "user {user} has of memory *{name}: {said} {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Root's QEMU as a reader could open the memory for writing unless the memory is sealed, and a backend does not work
/// with sealed memory.
fn refused(rig: &mut Rig) -> Result<Verdict> {
    if let Some(skip) = no_virtiofsd() {
        return Ok(skip);
    }
    let (mut site, shown, _sockets) = with_virtiofsd(rig, [SOMEBODY, 0])?;
    let done = stays_wanted(&mut site, &shown);
    finished(site, done)
}

fn stays_wanted(site: &mut Site, shown: &[Shown]) -> Result<()> {
    let added = site.broker.link(&["add", "a", "b", "--wait", "10"]);
    ensure!(
        added.is_err_and(|why| why.to_string().contains("vhost-user")),
        "the link came up, or the cause is not named"
    );
    let mut rows = Vec::new();
    until(within(60), || {
        rows = site.broker.list(&[]).unwrap_or_default();
        rows.iter().any(|row| row["note"].as_str().is_some_and(|note| note.contains("vhost-user")))
    })
    .context(format!("no cause is named: {rows:?}"))?;
    let row = &rows[0];
    ensure!(row["state"] == "wanted" && row["note"].to_string().contains("run it as a user of its own"), "{row}");
    check(site, shown, 1)?;
    // With the host, whose root may do everything, each machine has its link.
    site.link("b", "host")?;
    site.unlink()?;
    check(site, shown, 2)
}

/// Ends the machines. Adds the brokers' output to the error where the case failed.
fn finished(mut site: Site, done: Result<()>) -> Result<Verdict> {
    let report = site.report();
    done.map_err(|why| Error::new(format!("{why}\n{report}")))?;
    site.finish()?;
    Ok(Verdict::Done)
}
