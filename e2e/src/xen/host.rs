// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The host half: a Xen machine and its domUs.

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

/// Seconds that an xl command may take on a loaded machine.
const XL: u64 = 120;
/// Seconds that a domU may take to boot, and the number of attempts: under emulation a PVH domU sometimes hangs.
const BOOT: u64 = 90;
const TRIES: u32 = 3;

/// Mode in which a domU runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Paravirtualized.
    Pv,
    /// With hardware virtualization, which QEMU emulates.
    Pvh,
}

impl Kind {
    /// Returns the name that xl.cfg and reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pv => "pv",
            Self::Pvh => "pvh",
        }
    }
}

/// The parts of a machine, from Debian and from this project. Several machines can boot from them.
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
    /// A file cannot be read.
    pub fn new(packages: Packages, extra: &[Extra]) -> Result<Self> {
        let (dom0, domu) = (images::dom0(&packages, extra)?, images::domu(&packages, extra)?);
        Ok(Self { packages, dom0, domu })
    }
}

/// A running Xen machine.
pub struct Host {
    /// dom0, and with it the machine.
    pub dom0: Vm,
    /// Slots for domUs.
    pub domus: [Domain; 2],
    /// Folder that dom0 sees too.
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

    /// Starts a domU in its slot, with more lines for its xl.cfg, and waits until it is up.
    ///
    /// # Errors
    /// The message of xl, or the domU does not come up.
    pub fn create(&mut self, place: usize, kind: Kind, more: &str) -> Result<()> {
        self.start(place, kind, more)?;
        self.await_or_again(place, kind, more)
    }

    /// Waits until a domU is up. Recreates a domU that does not boot, and prints a message about it.
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
        // Under QEMU 7.2 a PVH domU that shares a processor with dom0 dies of a triple fault in most boots, once with
        // Xen's registers in place of its own. On another processor it did not.
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
            // The domU's kernel may hang, or run and be unreachable: Xen and dom0 show which.
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
    /// The message of xl.
    pub fn destroy(&mut self, place: usize) -> Result<()> {
        self.dom0.run(&["xl", "destroy", self.domus[place].name], within(XL))?;
        Ok(())
    }

    /// Copies a file of the host into a domain: `dom0`, `A` or `B`. A program loses its symbols on the way.
    ///
    /// # Errors
    /// The file or the domain does not exist.
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

    /// Moves a file out of dom0 and passes it to `read` on the host.
    ///
    /// # Errors
    /// The file does not exist, or `read` fails.
    pub fn read_file_of<T>(&mut self, path: &str, read: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let script = format!("cp {path} /share/taken && rm {path}");
        self.dom0.run(&["sh", "-c", &script], within(XL))?;
        let taken = self.share.path().join("taken");
        let result = read(&taken);
        fs::remove_file(taken)?;
        result
    }

    /// Returns the connection that carries commands to a domain.
    ///
    /// # Errors
    /// No domain has that name.
    pub fn control(&mut self, name: &str) -> Result<&mut Control> {
        if name == "dom0" {
            return Ok(&mut self.dom0.control);
        }
        let domain = self.domus.iter_mut().find(|domain| domain.name == name);
        domain.ok_or_else(|| Error::new(format!("no domain {name}")))?.control()
    }

    /// Returns the console output of a domU since its first start.
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

    /// Fails if the console of a domU shows a fault.
    ///
    /// # Errors
    /// The fault on the console.
    pub fn check(&mut self) -> Result<()> {
        for name in self.domus.each_ref().map(|domain| domain.name) {
            let mut console = self.console(name)?;
            let fault = console.fault().map(str::to_owned);
            ensure!(fault.is_none(), "{name}: {}\n    {}", fault.unwrap_or_default(), console.tail(40));
        }
        Ok(())
    }

    /// Ends the machine. Fails if a console shows a fault.
    ///
    /// # Errors
    /// The fault on the console.
    pub fn finish(mut self) -> Result<()> {
        self.check()?;
        self.dom0.finish()
    }
}

fn log_of(name: &str) -> String {
    format!("/var/log/xen/console/guest-{name}.log")
}

/// A slot for a domU.
pub struct Domain {
    /// Name of the domU.
    pub name: &'static str,
    /// Number of the domain, while it runs.
    pub domid: u16,
    line: UnixStream,
    control: Option<Control>,
}

impl Domain {
    const fn new(name: &'static str, line: UnixStream) -> Self {
        Self { name, domid: 0, line, control: None }
    }

    /// Waits for the domU's agent.
    fn open(&mut self) -> Result<()> {
        match &mut self.control {
            Some(control) => control.again(within(BOOT)),
            none => {
                *none = Some(Control::open(self.line.try_clone()?, self.line.try_clone()?, within(BOOT))?);
                Ok(())
            }
        }
    }

    /// Returns the connection that carries commands to the domU.
    ///
    /// # Errors
    /// The domU was never started.
    pub fn control(&mut self) -> Result<&mut Control> {
        self.control.as_mut().ok_or_else(|| Error::new(format!("{} does not run", self.name)))
    }
}
