// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two machines and their host, set up as users have them. `tombolod` runs on the host and in each machine. Each
//! machine has a device from boot on, and gets memory at run time. Programs run in the machines and on the host.

use crate::parts::{MODULE, Parts};
use std::path::Path;
use std::time::Instant;
use tombolo_e2e::broker::Broker;
use tombolo_e2e::control::Job;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::{Ends, until};
use tombolo_e2e::image::{Extra, Image};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::modules;
use tombolo_e2e::network::{Network, Place};
use tombolo_e2e::qemu::{Boot, Cpus, Spec, Vm};
use tombolo_e2e::scratch::Scratch;

/// Allows the two machines everything with each other and with their host.
pub const CONFIG: &str = "\
[domain.a]
[domain.b]
[[allow]]
from = \"*\"
to = \"*\"
service = \"*\"
";

/// Purpose of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Kernels with their own checks, and no network.
    Cases,
    /// Kernels with their own checks, and a network between all.
    Networked,
    /// Unchanged kernels, and a network between all.
    Measuring,
}

/// Description of a site to boot.
#[derive(Debug)]
pub struct Plan<'a> {
    /// Purpose of the site.
    pub purpose: Purpose,
    /// Configuration of the host's broker.
    pub config: &'a str,
    /// Kernel modules in the machines; `/modules/order` names their files.
    pub modules: &'a [&'a str],
    /// More programs of this host that the machines get.
    pub programs: &'a [Extra],
}

/// One of the two machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    A,
    B,
}

/// Two machines and their host.
pub struct Site {
    /// The host's broker.
    pub broker: Broker,
    /// First machine.
    pub a: Vm,
    /// Second machine.
    pub b: Vm,
    /// Network between the machines and the host, or the reason why there is none.
    pub network: Result<Network>,
    /// Addresses of the machines in the network.
    pub addresses: [String; 2],
    /// Brokers in the machines.
    pub brokers: [Option<Job>; 2],
    specs: [Spec; 2],
    _logs: Scratch,
}

impl Site {
    /// Boots the site without links.
    pub fn boot(parts: &Parts, purpose: Purpose) -> Result<Self> {
        Self::boot_with(parts, &Plan { purpose, config: CONFIG, modules: &[], programs: &[] }, |_| Ok(()))
    }

    /// Boots the site by a plan; `adjust` may change each machine.
    pub fn boot_with(parts: &Parts, plan: &Plan<'_>, mut adjust: impl FnMut(&mut Spec) -> Result<()>) -> Result<Self> {
        let purpose = plan.purpose;
        let broker = Broker::start(parts.programs()?, plan.config)?;
        let mut network = match purpose {
            Purpose::Networked | Purpose::Measuring => Network::open(),
            Purpose::Cases => Err(Error::new("not wanted")),
        };
        let logs = Scratch::new("logs")?;
        let plan_programs = plan.programs;
        let mut plan = |name: &str| -> Result<(Spec, String)> {
            let place = network.as_mut().map_err(|why| why.clone()).and_then(Network::tap);
            let modules = if place.is_ok() { modules::NETWORK } else { plan.modules };
            let mut spec = spec(parts, name, purpose, (modules, plan_programs))?;
            spec.args.extend(broker.snippet(name)?);
            adjust(&mut spec)?;
            if purpose == Purpose::Measuring {
                // QEMU's trace then sees stores to the doorbell, as it sees those to other devices.
                spec.args.extend(["-global", "ivshmem-doorbell.ioeventfd=off"].map(str::to_owned));
                spec.log = Some(logs.path().join(name));
            }
            let (Ok(network), Ok(Place { address, args })) = (&network, place) else {
                return Ok((spec, String::new()));
            };
            spec.args.extend(args);
            spec.within = network.enter();
            Ok((spec, address))
        };
        let ((spec_a, address_a), (spec_b, address_b)) = (plan("a")?, plan("b")?);
        // Boots both at once: a machine takes seconds to boot, and there are at least two processors.
        let (a, b) = (Boot::start(spec_a.again()?)?, Boot::start(spec_b.again()?)?);
        let (a, b) = (a.up()?, b.up()?);
        let (addresses, specs) = ([address_a, address_b], [spec_a, spec_b]);
        let mut site = Self { broker, a, b, network, addresses, brokers: [None; 2], specs, _logs: logs };
        site.set_up(At::A)?;
        site.set_up(At::B)?;
        Ok(site)
    }

    /// Returns one of the machines.
    pub fn vm(&mut self, at: At) -> &mut Vm {
        match at {
            At::A => &mut self.a,
            At::B => &mut self.b,
        }
    }

    /// Does what a machine's administrator does after each boot: loads the module, and starts the network and the
    /// broker.
    pub fn set_up(&mut self, at: At) -> Result<()> {
        let address = self.addresses[at as usize].clone();
        let vm = self.vm(at);
        vm.run(&["/agent", "insmod", MODULE], within(60))?;
        if !address.is_empty() {
            vm.sh("/agent insmod $(cat /modules/order)", within(60))?;
            vm.sh(&Network::set_up(&Place { address, args: Vec::new() }), within(60))?;
            vm.sh("mount -t cgroup2 none /sys/fs/cgroup", within(60))?;
        }
        self.start_broker(at)
    }

    /// Starts the broker in a machine, and waits until it serves programs.
    pub fn start_broker(&mut self, at: At) -> Result<()> {
        let job = start_broker(self.vm(at))?;
        self.brokers[at as usize] = Some(job);
        Ok(())
    }

    /// Boots a third machine with its broker. The host's broker must know its name.
    pub fn boot_third(&self, parts: &Parts, name: &str, modules: &[&str]) -> Result<Vm> {
        let mut spec = spec(parts, name, Purpose::Cases, (modules, &[]))?;
        spec.args.extend(self.broker.snippet(name)?);
        let mut vm = Vm::boot(spec)?;
        vm.run(&["/agent", "insmod", MODULE], within(60))?;
        start_broker(&mut vm)?;
        Ok(vm)
    }

    /// Starts the brokers that are not running.
    pub fn serve(&mut self) -> Result<()> {
        for at in [At::A, At::B] {
            if self.brokers[at as usize].is_none() {
                self.start_broker(at)?;
            }
        }
        Ok(())
    }

    /// Kills the broker in a machine.
    pub fn kill_broker(&mut self, at: At) -> Result<()> {
        let Some(job) = self.brokers[at as usize].take() else { return Ok(()) };
        let vm = self.vm(at);
        vm.kill(job)?;
        vm.wait(job, within(60)).map(drop)
    }

    /// Boots a machine whose QEMU has ended.
    pub fn renew(&mut self, at: At) -> Result<()> {
        let spec = self.specs[at as usize].again()?;
        *self.vm(at) = Vm::boot(spec)?;
        self.set_up(at)
    }

    /// Returns a QEMU to which a machine can migrate. It has the same machine type, no doorbell, and waits at the
    /// socket `path`. Devices have the same places as in the first QEMU.
    pub fn target(&mut self, at: At, path: &Path) -> Result<Spec> {
        let network = self.network.as_mut().map_err(|why| why.clone())?;
        let Place { args, .. } = network.tap()?;
        let old = &self.specs[at as usize];
        let mut spec = old.again()?;
        spec.args = without_doorbell(&old.args);
        let tap = args.into_iter().find(|arg| arg.starts_with("tap,")).unwrap_or_default();
        for arg in &mut spec.args {
            if arg.starts_with("tap,") {
                arg.clone_from(&tap);
            } else if arg.starts_with("virtio-net-pci,") {
                *arg += ",addr=3";
            }
        }
        spec.args.extend(["-incoming".to_owned(), format!("unix:{}", path.display())]);
        spec.within = network.enter();
        Ok(spec)
    }

    /// Ends everything, and fails if a console shows a fault.
    pub fn finish(self) -> Result<()> {
        self.a.finish()?;
        self.b.finish()
    }

    /// Returns the first fault on a console, with the lines around it.
    pub fn fault(&mut self) -> Option<String> {
        [&mut self.a, &mut self.b].into_iter().find_map(|vm| {
            let fault = vm.console.fault()?.to_owned();
            Some(format!("{}: {fault}\n    {}", vm.name, vm.console.tail(40)))
        })
    }

    /// Returns the last output of the brokers and the state of the host's broker, for the search for a fault.
    pub fn report(&mut self) -> String {
        let mut text = format!("the host's broker:\n{}\n", self.broker.log());
        for what in [&[][..], &["--domains"]] {
            text += &self.broker.link(&[&["ls"], what].concat()).unwrap_or_else(|why| format!("{why}\n"));
        }
        for at in [At::A, At::B] {
            let job = self.brokers[at as usize];
            let vm = self.vm(at);
            text += &vm.ended().map(|why| why + "\n").unwrap_or_default();
            let Some(job) = job else { continue };
            while vm.line(job, Instant::now()).is_ok() {}
            text += &format!("the broker of {}:\n    {}\n", vm.name, vm.printed(job).join("\n    "));
        }
        text
    }

    /// Makes a link between the two, if there is none, and waits until it is up.
    pub fn link(&mut self, one: &str, other: &str) -> Result<()> {
        let joins = |row: &serde_json::Value| {
            let ends = [row["a"].as_str(), row["b"].as_str()];
            ends.contains(&Some(one)) && ends.contains(&Some(other))
        };
        if !self.broker.list(&[])?.iter().any(joins) {
            self.broker.link(&["add", one, other, "--wait", "60"])?;
        }
        let up = || self.broker.list(&[]).is_ok_and(|rows| rows.iter().any(|row| joins(row) && row["state"] == "up"));
        until(within(60), up).context(format!("the link between {one} and {other}"))
    }

    /// Removes all links, and waits until the machines have released them.
    pub fn unlink(&mut self) -> Result<()> {
        // Links that are already leaving cannot be removed again.
        for row in self.broker.list(&[])?.iter().filter(|row| row["state"] != "leaving") {
            let end = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            self.broker.link(&["rm", &end("a"), &end("b")])?;
        }
        // A broker that does not answer is no proof that the links are gone.
        let mut left = Err(Error::new("nobody was asked"));
        let gone = until(within(60), || {
            left = self.broker.list(&[]);
            left.as_ref().is_ok_and(Vec::is_empty)
        });
        gone.map_err(|why| Error::new(format!("links are left: {why}: {left:?}")))
    }

    /// Returns the devices of the only link, in a and in b, for cases that do not use the brokers in the machines. Such
    /// cases notify no peer, because only those brokers know the doorbells.
    pub fn ends(&mut self) -> Result<[Ends; 2]> {
        let rows = self.broker.list(&[])?;
        let row = rows.first().ok_or_else(|| Error::new("no link"))?;
        let memory = format!("{}-{}", row["link"], row["generation"]);
        let ends = |vm: &mut Vm| -> Result<Ends> {
            Ok(Ends {
                own: vm.address(&format!("tombolo-d-{memory}-own"))?,
                peer: vm.address(&format!("tombolo-d-{memory}-peer"))?,
                doorbell: vm.address("tombolo")?,
                notify_peer: 2,
                notify_vector: 1,
                wait_vector: 1,
            })
        };
        Ok([ends(&mut self.a)?, ends(&mut self.b)?])
    }
}

/// Returns the arguments of a QEMU without those of its doorbell.
fn without_doorbell(args: &[String]) -> Vec<String> {
    let is_its = |arg: &String| arg.starts_with("socket,id=tombolo,") || arg.starts_with("ivshmem-doorbell,");
    let mut kept: Vec<String> = Vec::new();
    for arg in args {
        if is_its(arg) {
            // Also removes the option that the argument belongs to.
            kept.pop();
        } else {
            kept.push(arg.clone());
        }
    }
    kept
}

fn start_broker(vm: &mut Vm) -> Result<Job> {
    let job = vm.start(&["tombolod", "--guest"])?;
    line(vm, job, "tombolod: serves", within(60)).context("the broker in a machine")?;
    Ok(job)
}

/// Starts the guest half of a case in a machine.
pub fn start(vm: &mut Vm, half: &str, args: &[&str]) -> Result<Job> {
    vm.start(&[&["/agent", "guest", half], args].concat())
}

/// Waits for a line of a job that begins with a word, and returns what follows the word.
pub fn line(vm: &mut Vm, job: Job, word: &str, deadline: Instant) -> Result<String> {
    loop {
        let line = vm.line(job, deadline).context(format!("waiting for `{word}`"))?;
        if let Some(rest) = line.strip_prefix(word) {
            return Ok(rest.trim().to_owned());
        }
    }
}

/// Describes a machine with everything in it that a user would install.
fn spec(parts: &Parts, name: &str, purpose: Purpose, (modules, programs): (&[&str], &[Extra])) -> Result<Spec> {
    let mut spec = parts.spec_with(name, |image| {
        for program in ["tombolo", "tombolod"] {
            image.add_program(&format!("bin/{program}"), parts.programs()?.path(program)?)?;
        }
        for (name, from) in if purpose == Purpose::Cases { parts.vchans()? } else { &[] } {
            image.add_program(name, from)?;
        }
        image.add_busybox(&parts.archive.file("busybox-static", "bin/busybox")?)?;
        for (name, from) in programs {
            image.add_program(name, from)?;
        }
        add_modules(parts, image, modules)
    })?;
    (spec.cpus, spec.reboots) = (Cpus::One, true);
    if purpose == Purpose::Measuring {
        spec.append.clear();
        spec.memory = 512;
    }
    Ok(spec)
}

/// Adds kernel modules, and a file that lists them in the order of loading.
fn add_modules(parts: &Parts, image: &mut Image, names: &[&str]) -> Result<()> {
    let mut order = Vec::new();
    for file in modules::of(&parts.kernel, names)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let name = format!("modules/{}.ko", name.split('.').next().unwrap_or_default());
        image.add_bytes(&name, &modules::content(&file)?);
        order.push(format!("/{name}"));
    }
    image.add_bytes("modules/order", order.join(" ").as_bytes());
    Ok(())
}
