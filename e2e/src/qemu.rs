// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A virtual machine under QEMU.
//!
//! Console, control line and QMP are socket pairs that QEMU inherits, so there is no file to wait for or to clean up.
//! QEMU is killed when its [`Vm`] is dropped, and by the kernel if we are killed first.

use crate::console::Console;
use crate::control::{Control, Job, Output};
use crate::ensure;
use crate::error::{Context, Error, Result};
use crate::guest::tsc;
use crate::ivshmem::Region;
use crate::line_reader::within;
use crate::process::{Process, tied};
use crate::qmp::Qmp;
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The program.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// Seconds that a boot may take on a loaded machine.
const BOOT: u64 = 180;
/// Seconds that plugging and unplugging may take.
const PLUG: u64 = 60;
/// glibc takes `rep movsb` where a CPU claims to be good at it; emulation is not.
const LINUX_CPU: &str = "max,-erms,-fsrm";
/// Without SMAP, which this QEMU checks wrongly where dom0 returns to its programs, and without what Xen would have to
/// switch lazily: emulation mixes it up.
const XEN_CPU: &str = "max,-erms,-fsrm,-smap,-avx,-avx2,-fma,-f16c,-xsave,-xsaveopt,-pku,-mpx";
const LINUX: &str = "console=ttyS0 loglevel=6 mitigations=off tsc=reliable no_timer_check noreplace-smp panic=-1";
/// Xen's own command line. Its console is the first serial line; dom0 has the second.
const XEN: &str = "console=com1 com1=115200,8n1 loglvl=warning guest_loglvl=warning noreboot no-real-mode \
    dom0_mem=768M,max:768M dom0_max_vcpus=1 spec-ctrl=no,eager-fpu=1 xpti=0 pv-l1tf=0 watchdog=0 cpuidle=0 \
    cpufreq=none conring_size=1m";
const DOM0: &str = "console=hvc0 loglevel=6 mitigations=off clocksource=xen";

/// The guest's CPUs. Never one alone: with a maximum of one QEMU emulates no atomics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cpus {
    /// One: for pairs, where each guest has a CPU of the host.
    One,
    /// Two: for races within a guest.
    Two,
}

/// A machine to be.
#[derive(Debug)]
pub struct Spec {
    /// A name for reports.
    pub name: String,
    /// The kernel.
    pub kernel: PathBuf,
    /// What is added to its command line.
    pub append: String,
    /// The initramfs.
    pub initramfs: OwnedFd,
    /// How many CPUs.
    pub cpus: Cpus,
    /// Mebibytes of memory.
    pub memory: u32,
    /// Use the host's virtualization.
    pub kvm: bool,
    /// QEMU's name of the board: `pc` or `q35`.
    pub board: &'static str,
    /// Boot this hypervisor, and the kernel as its dom0.
    pub xen: Option<PathBuf>,
    /// More arguments for QEMU.
    pub args: Vec<String>,
    /// Words before QEMU's name, which say where it is to run.
    pub within: Vec<String>,
    /// Where QEMU writes what it is told to trace.
    pub log: Option<PathBuf>,
    /// Whether a guest that ends its life begins another; else its QEMU ends with it.
    pub reboots: bool,
    /// Descriptors that those arguments name, by [`inherit`](Self::inherit).
    fds: Vec<OwnedFd>,
}

impl Spec {
    /// A machine with nothing special.
    #[must_use]
    pub fn new(name: &str, kernel: PathBuf, initramfs: OwnedFd) -> Self {
        Self {
            name: name.to_owned(),
            kernel,
            append: String::new(),
            initramfs,
            cpus: Cpus::Two,
            memory: 256,
            kvm: false,
            board: "pc",
            xen: None,
            args: Vec::new(),
            within: Vec::new(),
            reboots: false,
            log: None,
            fds: Vec::new(),
        }
    }

    /// The same machine once more, without the descriptors that it was given.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn again(&self) -> Result<Self> {
        Ok(Self {
            name: self.name.clone(),
            kernel: self.kernel.clone(),
            append: self.append.clone(),
            initramfs: self.initramfs.try_clone()?,
            args: self.args.clone(),
            within: self.within.clone(),
            log: self.log.clone(),
            xen: self.xen.clone(),
            fds: Vec::new(),
            ..*self
        })
    }

    /// Hands a descriptor to QEMU and returns the number under which it finds it.
    ///
    /// # Errors
    /// Never, practically.
    pub fn inherit(&mut self, fd: OwnedFd) -> Result<i32> {
        fcntl_setfd(&fd, FdFlags::empty())?;
        let number = fd.as_raw_fd();
        self.fds.push(fd);
        Ok(number)
    }

    /// Has QEMU run as another user, which only root can do. Not for machines that are made [`again`](Self::again).
    ///
    /// # Errors
    /// There is no kernel.
    pub fn run_as(&mut self, user: u32) -> Result<()> {
        // That user may not reach the place where it is.
        let kernel = File::open(&self.kernel).context(self.kernel.display())?;
        self.kernel = format!("/proc/self/fd/{}", self.inherit(kernel.into())?).into();
        let words = [format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".into(), "--".into()];
        self.within.push("setpriv".into());
        self.within.extend(words);
        Ok(())
    }

    /// Adds an ivshmem-doorbell device whose server is at the other end of `line`.
    ///
    /// # Errors
    /// Never, practically.
    pub fn doorbell(&mut self, line: OwnedFd, vectors: usize) -> Result<()> {
        let fd = self.inherit(line)?;
        self.args.extend(["-chardev".into(), format!("socket,id=doorbell,fd={fd}")]);
        self.args
            .extend(["-device".into(), format!("ivshmem-doorbell,id=doorbell,chardev=doorbell,vectors={vectors}")]);
        Ok(())
    }

    /// Adds a virtio-serial port that has that `name` in the guest too. Returns our end of it.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn port(&mut self, name: &str) -> Result<UnixStream> {
        let id = format!("port-{name}");
        let ours = self.socket(&id)?;
        if !self.args.iter().any(|arg| arg.starts_with("virtio-serial-pci")) {
            self.args.extend(["-device".into(), "virtio-serial-pci,disable-legacy=on".into()]);
        }
        self.args.extend(["-device".into(), format!("virtserialport,chardev={id},name={name}")]);
        Ok(ours)
    }

    /// Shares a folder of the host by 9p.
    pub fn share(&mut self, tag: &str, folder: &Path) {
        let path = folder.display();
        self.args.extend(["-fsdev".into(), format!("local,id={tag},path={path},security_model=none")]);
        self.args.extend(["-device".into(), format!("virtio-9p-pci,fsdev={tag},mount_tag={tag},disable-legacy=on")]);
    }

    fn socket(&mut self, id: &str) -> Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let fd = self.inherit(theirs.into())?;
        self.args.extend(["-chardev".into(), format!("socket,id={id},fd={fd}")]);
        Ok(ours)
    }

    fn command(&mut self) -> Result<Command> {
        let initramfs = self.initramfs.try_clone()?;
        let initramfs = format!("/proc/self/fd/{}", self.inherit(initramfs)?);
        let (accel, cpu) = match (self.kvm, &self.xen) {
            (true, _) => ("kvm", "host"),
            (false, None) => ("tcg,thread=multi", LINUX_CPU),
            (false, Some(_)) => ("tcg,thread=multi", XEN_CPU),
        };
        let cpus = match self.cpus {
            Cpus::One => "1,maxcpus=2",
            Cpus::Two => "2",
        };
        let (kernel, append, initrd) = match &self.xen {
            None => (&self.kernel, format!("{LINUX} tsc_early_khz={} {}", tsc::khz()?, self.append), initramfs),
            Some(xen) => {
                // Multiboot: the first module is dom0's kernel with its command line, a comma separates.
                let modules = format!("{} {DOM0} {},{initramfs}", self.kernel.display(), self.append);
                (xen, XEN.to_owned(), modules)
            }
        };
        let mut command = tied(&self.within, PROGRAM);
        command.args(["-name", &self.name, "-nodefaults", "-no-user-config", "-display", "none"]);
        if let Some(log) = &self.log {
            command.arg("-D").arg(log);
        }
        if !self.reboots {
            command.arg("-no-reboot");
        }
        command.args(["-M", self.board, "-accel", accel, "-cpu", cpu, "-smp", cpus, "-m", &self.memory.to_string()]);
        command.arg("-kernel").arg(kernel).args(["-initrd", &initrd]);
        command.args(["-append", &append, "-serial", "chardev:console", "-serial", "chardev:control"]);
        command.args(["-mon", "chardev=qmp,mode=control"]).args(&self.args);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        Ok(command)
    }
}

/// What a machine may do with a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    Write,
    /// Read; QEMU drops stores.
    Read,
}

/// A machine that runs.
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Its console.
    pub console: Console,
    /// Its QEMU.
    pub qmp: Qmp,
    /// Where QEMU writes what it is told to trace.
    pub log: Option<PathBuf>,
    /// How commands get there.
    pub control: Control,
    process: Process,
    stderr: Option<Console>,
    fdsets: u64,
}

/// A machine on its way up.
pub struct Boot {
    name: String,
    process: Process,
    stderr: Option<Console>,
    console: Console,
    control: UnixStream,
    qmp: UnixStream,
    log: Option<PathBuf>,
    deadline: Instant,
}

impl Boot {
    /// Starts a machine.
    ///
    /// # Errors
    /// There is no QEMU, or no descriptor is left.
    pub fn start(mut spec: Spec) -> Result<Self> {
        let (console, control, qmp) = (spec.socket("console")?, spec.socket("control")?, spec.socket("qmp")?);
        let mut process = Process::start(&mut spec.command()?)?;
        let stderr = process.stderr.take().map(Console::of);
        // Our copies of QEMU's descriptors go with the specification: else its end of a socket would never be the last.
        Ok(Self {
            name: spec.name,
            process,
            stderr,
            console: Console::of(console),
            control,
            qmp,
            log: spec.log,
            deadline: within(BOOT),
        })
    }

    /// Waits until its agent is up.
    ///
    /// # Errors
    /// It does not come up in time; says what QEMU and its console said.
    pub fn up(self) -> Result<Vm> {
        let Self { name, mut process, stderr, mut console, control, qmp, log, deadline } = self;
        let up = Qmp::open(qmp).and_then(|qmp| Ok((qmp, Control::open(control.try_clone()?, control, deadline)?)));
        match up {
            Ok((qmp, control)) => Ok(Vm { name, console, qmp, log, control, process, stderr, fdsets: 0 }),
            Err(why) => {
                process.end()?;
                let said = stderr.map(|mut said| said.tail(5)).unwrap_or_default();
                Err(Error::new(format!("{name} does not boot: {why}\n{said}\n    {}", console.tail(20))))
            }
        }
    }
}

impl Vm {
    /// Boots a machine and waits until its agent is up.
    ///
    /// # Errors
    /// As [`Boot::start`] and [`Boot::up`].
    pub fn boot(spec: Spec) -> Result<Self> {
        Boot::start(spec)?.up()
    }

    /// Runs a command to its end and returns what it printed.
    ///
    /// # Errors
    /// It fails, or still runs at the deadline.
    pub fn run(&mut self, argv: &[&str], deadline: Instant) -> Result<String> {
        self.end(argv, deadline)?.success().context(format!("{}: {}", self.name, argv.join(" ")))
    }

    /// Runs a command to its end, whatever that is.
    ///
    /// # Errors
    /// It still runs at the deadline.
    pub fn end(&mut self, argv: &[&str], deadline: Instant) -> Result<Output> {
        let job = self.start(argv)?;
        self.wait(job, deadline).context(format!("{}: {}", self.name, argv.join(" ")))
    }

    /// Runs a shell's command to its end and returns what it printed.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn sh(&mut self, command: &str, deadline: Instant) -> Result<String> {
        self.run(&["sh", "-c", command], deadline)
    }

    /// The number of QEMU's process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process.id()
    }

    /// Has the machine migrate to a QEMU that waits for it by `-incoming` at the socket `path`, and goes on there. How long that took.
    ///
    /// # Errors
    /// A QEMU refuses, or it takes too long.
    pub fn migrate(&mut self, target: Spec, path: &Path) -> Result<std::time::Duration> {
        let boot = Boot::start(target)?;
        // A QEMU that answers listens.
        let mut qmp = Qmp::open(boot.qmp)?;
        let (began, deadline) = (Instant::now(), within(PLUG));
        self.qmp.run("migrate", &json!({ "uri": format!("unix:{}", path.display()) }))?;
        loop {
            let now = self.qmp.run("query-migrate", &json!({}))?;
            match now["status"].as_str() {
                Some("completed") => break,
                Some("failed" | "cancelled") => return Err(Error::new(format!("the migration: {now}"))),
                _ => ensure!(Instant::now() < deadline, "the migration is not over: {now}"),
            }
            std::thread::yield_now();
        }
        while qmp.run("query-status", &json!({}))?["status"] != "running" {
            ensure!(Instant::now() < deadline, "the machine does not run where it arrived");
        }
        let took = began.elapsed();
        self.control.go_on(boot.control.try_clone()?, boot.control);
        self.process.end()?;
        (self.qmp, self.process, self.stderr) = (qmp, boot.process, boot.stderr);
        self.console.drain();
        self.console = boot.console;
        Ok(took)
    }

    /// Starts a command.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn start(&mut self, argv: &[&str]) -> Result<Job> {
        let job = self.control.start(argv);
        self.explained(job)
    }

    /// Waits for a line of a command.
    ///
    /// # Errors
    /// See [`Control::line`].
    pub fn line(&mut self, job: Job, deadline: Instant) -> Result<String> {
        let line = self.control.line(job, deadline);
        self.explained(line)
    }

    /// All that a command printed so far.
    #[must_use]
    pub fn printed(&self, job: Job) -> &[String] {
        self.control.printed(job)
    }

    /// Waits for the end of a command.
    ///
    /// # Errors
    /// See [`Control::wait`].
    pub fn wait(&mut self, job: Job, deadline: Instant) -> Result<Output> {
        let output = self.control.wait(job, deadline);
        self.explained(output)
    }

    /// Kills a command.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn kill(&mut self, job: Job) -> Result<()> {
        self.control.kill(job)
    }

    /// Plugs a region in as an ivshmem-plain device `id`, and returns the device's PCI address in the guest.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn plug(&mut self, id: &str, region: &Region, access: Access) -> Result<String> {
        self.fdsets += 1;
        let added = self.qmp.run_with(region.as_fd(), "add-fd", &json!({ "fdset-id": self.fdsets }))?;
        let fd = added["fd"].as_i64().ok_or_else(|| Error::new(format!("add-fd: {added}")))?;
        let memory = json!({
            "qom-type": "memory-backend-file", "id": format!("{id}-mem"), "mem-path": format!("/proc/self/fd/{fd}"),
            "size": region.size, "share": true, "readonly": access == Access::Read,
        });
        self.qmp.run("object-add", &memory)?;
        let device = json!({ "driver": "ivshmem-plain", "id": id, "memdev": format!("{id}-mem") });
        self.qmp.run("device_add", &device)?;
        self.qmp.run("remove-fd", &json!({ "fdset-id": self.fdsets }))?;
        self.address(id)
    }

    /// Unplugs a device and waits until the guest has let go of it.
    ///
    /// # Errors
    /// The guest does not.
    pub fn unplug(&mut self, id: &str) -> Result<()> {
        self.qmp.run("device_del", &json!({ "id": id }))?;
        let gone = |event: &Value| event["event"] == "DEVICE_DELETED" && event["data"]["device"] == id;
        self.qmp.event(gone, within(PLUG)).context(format!("unplugging {id}"))?;
        self.qmp.run("object-del", &json!({ "id": format!("{id}-mem") }))?;
        Ok(())
    }

    /// The PCI address that a device has in the guest.
    ///
    /// # Errors
    /// There is no such device.
    pub fn address(&mut self, id: &str) -> Result<String> {
        let buses = self.qmp.run("query-pci", &json!({}))?;
        let device = buses.as_array().into_iter().flatten().find_map(|bus| device_on(&bus["devices"], id));
        let device = device.ok_or_else(|| Error::new(format!("QEMU has no PCI device {id}")))?;
        let number = |key: &str| device[key].as_u64().unwrap_or(0);
        Ok(format!("0000:{:02x}:{:02x}.{}", number("bus"), number("slot"), number("function")))
    }

    /// Waits until a guest that was reset is up again; what ran in it is gone, and what its console said is forgotten.
    ///
    /// # Errors
    /// It does not come up before the deadline.
    pub fn anew(&mut self) -> Result<()> {
        let up = self.control.again(within(BOOT));
        up.map_err(|why| Error::new(format!("{}: {why}\n    {}", self.name, self.console.tail(20))))?;
        self.console.forget();
        Ok(())
    }

    /// Switches an event of QEMU's own trace on or off; it is written to [`Vm::log`].
    ///
    /// # Errors
    /// QEMU knows no such event.
    pub fn trace(&mut self, event: &str, on: bool) -> Result<()> {
        let line = format!("trace-event {event} {}", if on { "on" } else { "off" });
        let said = self.qmp.run("human-monitor-command", &json!({ "command-line": line }))?;
        ensure!(said == "", "{line}: {said}");
        Ok(())
    }

    /// Kills QEMU, as a power cut would.
    ///
    /// # Errors
    /// It does not die.
    pub fn cut(&mut self) -> Result<()> {
        self.process.end()
    }

    /// How QEMU ended and what it said, if it ended by itself.
    pub fn ended(&mut self) -> Option<String> {
        let status = self.process.try_wait().ok()??;
        let said = self.stderr.as_mut().map(|said| said.tail(5)).unwrap_or_default();
        Some(format!("QEMU of {} ended by itself: {status}\n    {said}\n    {}", self.name, self.console.tail(10)))
    }

    /// Ends the machine, and fails if its console tells of a fault.
    ///
    /// # Errors
    /// The fault, with the lines around it.
    pub fn finish(mut self) -> Result<()> {
        let alive = self.process.try_wait()?.is_none();
        // The guest's last word: what its kernel said before that has left it.
        if alive {
            self.run(&["/agent", "flush"], within(PLUG))?;
        }
        self.cut()?;
        self.console.drain();
        let fault = self.console.fault().map(str::to_owned);
        let (name, tail) = (self.name.clone(), self.console.tail(40));
        ensure!(fault.is_none(), "the console of {name} tells of a fault: {}\n    {tail}", fault.unwrap_or_default());
        ensure!(alive, "{name} went by itself\n    {tail}");
        Ok(())
    }

    /// Adds the fault on the console, if there is one, to an error.
    fn explained<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|why| match self.console.fault().map(str::to_owned) {
            Some(fault) => {
                Error::new(format!("{why} (console of {}: {fault})\n    {}", self.name, self.console.tail(40)))
            }
            None => why,
        })
    }
}

/// A device among those of a bus and behind its bridges.
fn device_on<'a>(devices: &'a Value, id: &str) -> Option<&'a Value> {
    devices.as_array().into_iter().flatten().find_map(|device| match device["qdev_id"] == id {
        true => Some(device),
        false => device_on(&device["pci_bridge"]["devices"], id),
    })
}
