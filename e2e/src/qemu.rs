// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a virtual machine under QEMU.
//!
//! The console, the control connection and QMP are socket pairs that QEMU inherits, so there is no file to wait for or
//! to remove. QEMU is killed when its [`Vm`] is dropped; the kernel kills it if this process is killed first.

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

/// Name of the program.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// Seconds that a boot may take on a loaded machine.
const BOOT: u64 = 180;
/// Seconds that plugging and unplugging may take.
const PLUG: u64 = 60;
/// CPU without `erms` and `fsrm`: glibc uses `rep movsb` on CPUs that claim to be good at it, and emulation is slow at
/// it.
const LINUX_CPU: &str = "max,-erms,-fsrm";
/// CPU without SMAP, which this QEMU checks wrongly where dom0 returns to its programs. It also lacks the state that
/// Xen would switch lazily, because emulation confuses it.
const XEN_CPU: &str = "max,-erms,-fsrm,-smap,-avx,-avx2,-fma,-f16c,-xsave,-xsaveopt,-pku,-mpx";
const LINUX: &str = "console=ttyS0 loglevel=6 mitigations=off tsc=reliable no_timer_check noreplace-smp panic=-1";
/// Command line of Xen itself. Its console is the first serial line; dom0 has the second.
const XEN: &str = "console=com1 com1=115200,8n1 loglvl=warning guest_loglvl=warning noreboot no-real-mode \
    dom0_mem=768M,max:768M dom0_max_vcpus=1 spec-ctrl=no,eager-fpu=1 xpti=0 pv-l1tf=0 watchdog=0 cpuidle=0 \
    cpufreq=none conring_size=1m";
const DOM0: &str = "console=hvc0 loglevel=6 mitigations=off clocksource=xen";

/// CPUs of the guest. The maximum is never one, because QEMU would then emulate no atomics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cpus {
    /// One CPU: for pairs, where each guest has one CPU of the host.
    One,
    /// Two CPUs: for races within a guest.
    Two,
}

/// Description of a machine to boot.
#[derive(Debug)]
pub struct Spec {
    /// Name for reports.
    pub name: String,
    /// Kernel to boot.
    pub kernel: PathBuf,
    /// Words added to the kernel's command line.
    pub append: String,
    /// Descriptor of the initramfs.
    pub initramfs: OwnedFd,
    /// Number of CPUs.
    pub cpus: Cpus,
    /// Memory in mebibytes.
    pub memory: u32,
    /// Whether QEMU uses the host's virtualization.
    pub kvm: bool,
    /// QEMU's machine type: `pc` or `q35`.
    pub board: &'static str,
    /// Hypervisor to boot, with the kernel as its dom0.
    pub xen: Option<PathBuf>,
    /// More arguments for QEMU.
    pub args: Vec<String>,
    /// Words before QEMU's name that decide where it runs.
    pub within: Vec<String>,
    /// File to which QEMU writes its trace.
    pub log: Option<PathBuf>,
    /// Whether a guest that resets or panics boots again; otherwise its QEMU ends with it.
    pub reboots: bool,
    /// Descriptors that those arguments name, by [`inherit`](Self::inherit).
    fds: Vec<OwnedFd>,
}

impl Spec {
    /// Returns a machine without special properties.
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

    /// Returns the same machine once more, without the descriptors that it inherited.
    ///
    /// # Errors
    /// This process has no descriptor left.
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

    /// Passes a descriptor to QEMU and returns the number by which QEMU finds it.
    ///
    /// # Errors
    /// Practically never.
    pub fn inherit(&mut self, fd: OwnedFd) -> Result<i32> {
        fcntl_setfd(&fd, FdFlags::empty())?;
        let number = fd.as_raw_fd();
        self.fds.push(fd);
        Ok(number)
    }

    /// Makes QEMU run as another user, which only root can do. A machine made by [`again`](Self::again) must not use
    /// it.
    ///
    /// # Errors
    /// The kernel's file cannot be opened.
    pub fn run_as(&mut self, user: u32) -> Result<()> {
        // That user may have no access to the folder of the kernel's file.
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
    /// Practically never.
    pub fn doorbell(&mut self, line: OwnedFd, vectors: usize) -> Result<()> {
        let fd = self.inherit(line)?;
        self.args.extend(["-chardev".into(), format!("socket,id=doorbell,fd={fd}")]);
        self.args
            .extend(["-device".into(), format!("ivshmem-doorbell,id=doorbell,chardev=doorbell,vectors={vectors}")]);
        Ok(())
    }

    /// Adds a virtio-serial port that has the same `name` in the guest. Returns the host's end of it.
    ///
    /// # Errors
    /// This process has no descriptor left.
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
                // Multiboot: the first module is dom0's kernel with its command line, and a comma separates the
                // modules.
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

/// Access of a machine to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The machine reads and writes.
    Write,
    /// The machine reads; QEMU drops its stores.
    Read,
}

/// A running machine.
pub struct Vm {
    /// Name of the machine.
    pub name: String,
    /// Console of the machine.
    pub console: Console,
    /// QMP connection to its QEMU.
    pub qmp: Qmp,
    /// File to which QEMU writes its trace.
    pub log: Option<PathBuf>,
    /// Connection that carries commands to the guest.
    pub control: Control,
    process: Process,
    stderr: Option<Console>,
    fdsets: u64,
}

/// A machine that is booting.
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
    /// QEMU is missing, or this process has no descriptor left.
    pub fn start(mut spec: Spec) -> Result<Self> {
        let (console, control, qmp) = (spec.socket("console")?, spec.socket("control")?, spec.socket("qmp")?);
        let mut process = Process::start(&mut spec.command()?)?;
        let stderr = process.stderr.take().map(Console::of);
        // This process's copies of QEMU's descriptors are closed with `spec`; otherwise QEMU's end of a socket would
        // never be the last.
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

    /// Waits until the agent of the machine is up.
    ///
    /// # Errors
    /// The agent does not come up in time. The error has the output of QEMU and of the console.
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
    /// The command fails, or still runs at the deadline.
    pub fn run(&mut self, argv: &[&str], deadline: Instant) -> Result<String> {
        self.end(argv, deadline)?.success().context(format!("{}: {}", self.name, argv.join(" ")))
    }

    /// Runs a command to its end, whether or not it succeeds.
    ///
    /// # Errors
    /// The command still runs at the deadline.
    pub fn end(&mut self, argv: &[&str], deadline: Instant) -> Result<Output> {
        let job = self.start(argv)?;
        self.wait(job, deadline).context(format!("{}: {}", self.name, argv.join(" ")))
    }

    /// Runs a shell command to its end and returns what it printed.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn sh(&mut self, command: &str, deadline: Instant) -> Result<String> {
        self.run(&["sh", "-c", command], deadline)
    }

    /// Returns the number of QEMU's process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process.id()
    }

    /// Migrates the machine to a QEMU that waits with `-incoming` at the socket `path`, where the machine continues.
    /// Returns how long that took.
    ///
    /// # Errors
    /// One of the QEMUs refuses, or the migration takes too long.
    pub fn migrate(&mut self, target: Spec, path: &Path) -> Result<std::time::Duration> {
        let boot = Boot::start(target)?;
        // A QEMU that answers QMP already listens at the socket.
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
    /// The guest has ended.
    pub fn start(&mut self, argv: &[&str]) -> Result<Job> {
        let job = self.control.start(argv);
        self.explained(job)
    }

    /// Waits for the next line of a command.
    ///
    /// # Errors
    /// See [`Control::line`].
    pub fn line(&mut self, job: Job, deadline: Instant) -> Result<String> {
        let line = self.control.line(job, deadline);
        self.explained(line)
    }

    /// Returns all that a command has printed so far.
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
    /// The guest has ended.
    pub fn kill(&mut self, job: Job) -> Result<()> {
        self.control.kill(job)
    }

    /// Plugs a region in as an ivshmem-plain device `id`. Returns the PCI address of the device in the guest.
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

    /// Unplugs a device and waits until the guest has released it.
    ///
    /// # Errors
    /// The guest does not release it.
    pub fn unplug(&mut self, id: &str) -> Result<()> {
        self.qmp.run("device_del", &json!({ "id": id }))?;
        let gone = |event: &Value| event["event"] == "DEVICE_DELETED" && event["data"]["device"] == id;
        self.qmp.event(gone, within(PLUG)).context(format!("unplugging {id}"))?;
        self.qmp.run("object-del", &json!({ "id": format!("{id}-mem") }))?;
        Ok(())
    }

    /// Returns the PCI address of a device in the guest.
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

    /// Waits until a guest that was reset is up again. Its processes are gone, and its console's earlier output is
    /// dropped.
    ///
    /// # Errors
    /// The guest does not come up before the deadline.
    pub fn anew(&mut self) -> Result<()> {
        let up = self.control.again(within(BOOT));
        up.map_err(|why| Error::new(format!("{}: {why}\n    {}", self.name, self.console.tail(20))))?;
        self.console.forget();
        Ok(())
    }

    /// Switches an event of QEMU's own trace on or off. QEMU writes the trace to [`Vm::log`].
    ///
    /// # Errors
    /// QEMU knows no such event.
    pub fn trace(&mut self, event: &str, on: bool) -> Result<()> {
        let line = format!("trace-event {event} {}", if on { "on" } else { "off" });
        let said = self.qmp.run("human-monitor-command", &json!({ "command-line": line }))?;
        ensure!(said == "", "{line}: {said}");
        Ok(())
    }

    /// Kills QEMU, like a power cut.
    ///
    /// # Errors
    /// QEMU does not die.
    pub fn cut(&mut self) -> Result<()> {
        self.process.end()
    }

    /// Returns how QEMU ended and what it printed, if it ended by itself.
    pub fn ended(&mut self) -> Option<String> {
        let status = self.process.try_wait().ok()??;
        let said = self.stderr.as_mut().map(|said| said.tail(5)).unwrap_or_default();
        Some(format!("QEMU of {} ended by itself: {status}\n    {said}\n    {}", self.name, self.console.tail(10)))
    }

    /// Ends the machine, and fails if its console shows a fault.
    ///
    /// # Errors
    /// The fault, with the lines around it.
    pub fn finish(mut self) -> Result<()> {
        let alive = self.process.try_wait()?.is_none();
        // The guest's last output: its kernel's earlier messages have left the guest by then.
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

/// Finds a device on a bus and behind its bridges.
fn device_on<'a>(devices: &'a Value, id: &str) -> Option<&'a Value> {
    devices.as_array().into_iter().flatten().find_map(|device| match device["qdev_id"] == id {
        true => Some(device),
        false => device_on(&device["pci_bridge"]["devices"], id),
    })
}
