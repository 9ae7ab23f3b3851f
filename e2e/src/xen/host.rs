// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The host's half: a Xen machine and the domUs in it.

use super::images;
use super::init;
use super::packages::Packages;
use crate::console::Console;
use crate::control::Control;
use crate::ensure;
use crate::error::{Context, Error, Result};
use crate::image::Extra;
use crate::line_reader::within;
use crate::qemu::{Spec, Vm};
use crate::scratch::Scratch;
use std::fs::{self, File};
use std::io::copy;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Seconds for what xl does on a loaded machine.
const XL: u64 = 120;
/// Seconds that a domU may take to boot, and how often that is tried: under emulation a PVH domU hangs now and then.
const BOOT: u64 = 90;
const TRIES: u32 = 3;

/// How a domU runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Paravirtualized.
    Pv,
    /// With hardware's virtualization, which QEMU emulates.
    Pvh,
}

impl Kind {
    /// As xl.cfg and reports call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pv => "pv",
            Self::Pvh => "pvh",
        }
    }
}

/// What a machine is made of: from Debian, from us. Several machines can be booted from it.
#[derive(Debug)]
pub struct Parts {
    /// Xen and the kernel.
    pub packages: Packages,
    dom0: OwnedFd,
    domu: OwnedFd,
}

impl Parts {
    /// Packs the images, with more programs for all domains.
    ///
    /// # Errors
    /// Something cannot be read.
    pub fn new(packages: Packages, extra: &[Extra]) -> Result<Self> {
        let (dom0, domu) = (images::dom0(&packages, extra)?, images::domu(&packages, extra)?);
        Ok(Self { packages, dom0, domu })
    }
}

/// A Xen machine that runs.
pub struct Host {
    /// dom0, and with it the machine.
    pub dom0: Vm,
    /// The places for domUs.
    pub domus: [Domain; 2],
    /// A folder that dom0 sees too.
    share: Scratch,
}

impl Host {
    /// Boots Xen and dom0, with room for two domUs.
    ///
    /// # Errors
    /// dom0 does not come up.
    pub fn boot(parts: &Parts) -> Result<Self> {
        let share = Scratch::new("xen")?;
        fs::copy(&parts.packages.vmlinux, share.path().join("vmlinux"))?;
        let domu = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&parts.domu));
        copy(&mut File::open(domu)?, &mut File::create(share.path().join("domu.cpio"))?)?;
        let mut spec = Spec::new("dom0", parts.packages.vmlinux.clone(), parts.dom0.try_clone()?);
        spec.xen = Some(parts.packages.hypervisor.clone());
        spec.memory = 2048;
        spec.share(init::SHARE, share.path());
        let domus = [Domain::new("A", spec.port("1")?), Domain::new("B", spec.port("2")?)];
        let dom0 = Vm::boot(spec)?;
        Ok(Self { dom0, domus, share })
    }

    /// Starts both domUs.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_pair(&mut self, kind: Kind) -> Result<()> {
        if kind == Kind::Pvh {
            self.dom0.run(&["xl", "vcpu-pin", "Domain-0", "0", "0"], within(XL))?;
        }
        self.start(0, kind, "")?;
        self.start(1, kind, "")?;
        self.await_or_again(0, kind, "")?;
        self.await_or_again(1, kind, "")
    }

    /// Starts a domU in its place, with more lines for its xl.cfg, and waits until it is up.
    ///
    /// # Errors
    /// xl says why not, or it does not come up.
    pub fn create(&mut self, place: usize, kind: Kind, more: &str) -> Result<()> {
        self.start(place, kind, more)?;
        self.await_or_again(place, kind, more)
    }

    /// Waits until a domU is up; one that does not boot is made anew, and that is said.
    fn await_or_again(&mut self, place: usize, kind: Kind, more: &str) -> Result<()> {
        for _ in 1..TRIES {
            match self.await_up(place) {
                Ok(()) => return Ok(()),
                Err(why) => println!("{why}\nonce more"),
            }
            self.destroy(place)?;
            self.start(place, kind, more)?;
        }
        self.await_up(place)
    }

    fn start(&mut self, place: usize, kind: Kind, more: &str) -> Result<()> {
        let domain = &mut self.domus[place];
        let (name, number) = (domain.name, place + 1);
        // Under QEMU 7.2 a PVH domU on a processor that dom0 has too dies of a triple fault in most boots, once with Xen's own
        // registers for its own; on another it did not.
        let cpu = if kind == Kind::Pvh { 1 } else { place };
        let (kind, address, bridge) = (kind.name(), init::address_of(&number.to_string()), init::BRIDGE);
        let config = format!(
            "name=\"{name}\"\ntype=\"{kind}\"\nkernel=\"/share/vmlinux\"\nramdisk=\"/share/domu.cpio\"\n\
             extra=\"console=hvc0 mitigations=off panic=-1 {variable}={address}\"\nmemory=384\nvcpus=1\ncpus=\"{cpu}\"\n\
             tsc_mode=\"native\"\non_crash=\"preserve\"\non_reboot=\"preserve\"\n\
             vif=[\"mac=00:16:3e:00:00:0{number},bridge={bridge},script=/bin/true\"]\n{more}\n",
            variable = init::ADDRESS,
        );
        fs::write(self.share.path().join(format!("{name}.cfg")), config)?;
        self.dom0.run(&["xl", "create", "-q", &format!("/share/{name}.cfg")], within(XL))?;
        let domid = self.dom0.run(&["xl", "domid", name], within(XL))?;
        self.dom0.run(&["/agent", "plug", &number.to_string(), domid.trim()], within(XL))?;
        self.domus[place].domid = domid.trim().parse().context(domid)?;
        Ok(())
    }

    fn await_up(&mut self, place: usize) -> Result<()> {
        let domain = &mut self.domus[place];
        let name = domain.name;
        domain.open().context(format!("{name} does not boot")).map_err(|why| {
            // Its kernel may hang, or run and not be reached: Xen and dom0 tell which.
            let look = format!(
                "tail -n 20 {}; xl vcpu-list; ip link; brctl showmacs {}; arp -an; netstat -tn; \
                 xenstore-ls -f /local/domain | grep vif; dmesg | tail -n 20; xl dmesg | tail -n 20",
                log_of(name),
                init::BRIDGE
            );
            let console = self.dom0.run(&["sh", "-c", &look], within(XL)).unwrap_or_default();
            Error::new(format!("{why}\n{console}"))
        })
    }

    /// Destroys a domU, as if it had crashed.
    ///
    /// # Errors
    /// xl says why not.
    pub fn destroy(&mut self, place: usize) -> Result<()> {
        self.dom0.run(&["xl", "destroy", self.domus[place].name], within(XL))?;
        Ok(())
    }

    /// Puts a file of ours into a domain: `dom0`, `A` or `B`. A program loses its symbols on the way.
    ///
    /// # Errors
    /// There is no such file or domain.
    pub fn push(&mut self, to: &str, from: &Path, path: &str) -> Result<()> {
        let shared = self.share.path().join("pushed");
        let stripped = std::process::Command::new("strip").arg("-o").arg(&shared).arg(from).output();
        if !stripped.is_ok_and(|output| output.status.success()) {
            fs::copy(from, &shared).context(from.display())?;
        }
        let url = format!("http://{}.254/pushed", init::NETWORK);
        let fetch = match to {
            "dom0" => format!("cp /share/pushed {path}.new"),
            _ => format!("wget -q -O {path}.new {url}"),
        };
        let script = format!("{fetch} && chmod 755 {path}.new && mv {path}.new {path}");
        self.control(to)?.run(&["sh", "-c", &script], within(XL)).context(format!("to {to}"))?;
        Ok(fs::remove_file(shared)?)
    }

    /// Takes a file of dom0 away, and gives it to `read` on the host.
    ///
    /// # Errors
    /// There is no such file, or `read` fails.
    pub fn read_file_of<T>(&mut self, path: &str, read: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let script = format!("cp {path} /share/taken && rm {path}");
        self.dom0.run(&["sh", "-c", &script], within(XL))?;
        let taken = self.share.path().join("taken");
        let result = read(&taken);
        fs::remove_file(taken)?;
        result
    }

    /// How commands get to a domain.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn control(&mut self, name: &str) -> Result<&mut Control> {
        if name == "dom0" {
            return Ok(&mut self.dom0.control);
        }
        let domain = self.domus.iter_mut().find(|domain| domain.name == name);
        domain.ok_or_else(|| Error::new(format!("no domain {name}")))?.control()
    }

    /// What a domU said on its console, since it was first started.
    ///
    /// # Errors
    /// dom0 does not answer.
    pub fn console(&mut self, name: &str) -> Result<Console> {
        let script = format!("cat {} 2>/dev/null; true", log_of(name));
        let text = self.dom0.run(&["sh", "-c", &script], within(XL))?;
        let mut console = Console::of(std::io::Cursor::new(text));
        console.drain();
        Ok(console)
    }

    /// Fails if a domU's console tells of a fault.
    ///
    /// # Errors
    /// The fault.
    pub fn check(&mut self) -> Result<()> {
        for name in self.domus.each_ref().map(|domain| domain.name) {
            let mut console = self.console(name)?;
            let fault = console.fault().map(str::to_owned);
            ensure!(fault.is_none(), "{name}: {}\n    {}", fault.unwrap_or_default(), console.tail(40));
        }
        Ok(())
    }

    /// Ends the machine; fails if a console tells of a fault.
    ///
    /// # Errors
    /// The fault.
    pub fn finish(mut self) -> Result<()> {
        self.check()?;
        self.dom0.finish()
    }
}

fn log_of(name: &str) -> String {
    format!("/var/log/xen/console/guest-{name}.log")
}

/// A place for a domU.
pub struct Domain {
    /// Its name.
    pub name: &'static str,
    /// Its number, while it runs.
    pub domid: u16,
    line: UnixStream,
    control: Option<Control>,
}

impl Domain {
    const fn new(name: &'static str, line: UnixStream) -> Self {
        Self { name, domid: 0, line, control: None }
    }

    /// Waits for its agent.
    fn open(&mut self) -> Result<()> {
        match &mut self.control {
            Some(control) => control.again(within(BOOT)),
            none => {
                *none = Some(Control::open(self.line.try_clone()?, self.line.try_clone()?, within(BOOT))?);
                Ok(())
            }
        }
    }

    /// How commands get there.
    ///
    /// # Errors
    /// It was never started.
    pub fn control(&mut self) -> Result<&mut Control> {
        self.control.as_mut().ok_or_else(|| Error::new(format!("{} does not run", self.name)))
    }
}
