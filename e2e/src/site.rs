// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two machines and their host as users have them: `tombolod` on the host, a device for each machine from boot, memory
//! plugged at run time, programs in the machines.

use crate::rig::{MODULE, Rig};
use std::time::Instant;
use tombolo_e2e::broker::Broker;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::{Ends, until};
use tombolo_e2e::image::Image;
use tombolo_e2e::lines::within;
use tombolo_e2e::network::{Network, Place};
use tombolo_e2e::qemu::{Boot, Cpus, Spec, Vm};

/// The two machines may do everything with each other and with their host.
pub const CONFIG: &str = "\
[domain.a]
[domain.b]
[[allow]]
from = \"*\"
to = \"*\"
service = \"*\"
";

/// What a site is to be like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Kernels that check what they do, and no network.
    Cases,
    /// Kernels as they are, and a network between all.
    Measuring,
}

/// Two machines and their host.
pub struct Site {
    /// The host's broker.
    pub broker: Broker,
    /// A machine.
    pub a: Vm,
    /// Another.
    pub b: Vm,
    /// What joins them besides, or why nothing does.
    pub network: Result<Network>,
    /// The machines' addresses there.
    pub addresses: [String; 2],
}

impl Site {
    /// Boots all of it, without links.
    pub fn boot(rig: &Rig, purpose: Purpose) -> Result<Self> {
        let broker = Broker::start(rig.programs()?, CONFIG)?;
        let mut network = match purpose {
            Purpose::Measuring => Network::open(),
            Purpose::Cases => Err(Error::new("not wanted")),
        };
        let mut addresses = [String::new(), String::new()];
        let mut specs = Vec::new();
        for (name, address) in ["a", "b"].into_iter().zip(&mut addresses) {
            let place = network.as_mut().map_err(|why| why.clone()).and_then(Network::tap);
            let mut spec = spec(rig, name, purpose, place.is_ok())?;
            spec.args.extend(broker.snippet(name)?);
            if let (Ok(network), Ok(Place { address: at, args })) = (&network, place) {
                *address = at;
                spec.args.extend(args);
                spec.within = network.enter();
            }
            specs.push(spec);
        }
        // Both at once: a machine takes seconds to boot, and there are two processors at least.
        let boots = specs.into_iter().map(Boot::start).collect::<Result<Vec<_>>>()?;
        let booted = boots.into_iter().map(Boot::up).collect::<Result<Vec<_>>>()?;
        let Ok([a, b]) = <[Vm; 2]>::try_from(booted) else { return Err(Error::new("not two machines")) };
        let mut site = Self { broker, a, b, network, addresses };
        for at in 0..2 {
            site.set_up(at)?;
        }
        Ok(site)
    }

    fn set_up(&mut self, at: usize) -> Result<()> {
        let address = self.addresses[at].clone();
        let vm = if at == 0 { &mut self.a } else { &mut self.b };
        vm.run(&["/agent", "insmod", MODULE], within(60))?;
        if !address.is_empty() {
            vm.sh("/agent insmod $(cat /modules/order)", within(60))?;
            vm.sh(&Network::set_up(&Place { address, args: Vec::new() }), within(60))?;
        }
        Ok(())
    }

    /// Ends everything, and fails if a console tells of a fault.
    pub fn finish(self) -> Result<()> {
        self.a.finish()?;
        self.b.finish()
    }

    /// The first fault that a console tells of, with the lines around it.
    pub fn fault(&mut self) -> Option<String> {
        [&mut self.a, &mut self.b].into_iter().find_map(|vm| {
            let fault = vm.console.fault()?.to_owned();
            Some(format!("{}: {fault}\n    {}", vm.name, vm.console.tail(40)))
        })
    }

    /// Makes the link between the machines, if there is none, and waits until it is up.
    pub fn link(&mut self) -> Result<()> {
        if self.broker.list(&[])?.is_empty() {
            self.broker.link(&["add", "a", "b", "--wait", "60"])?;
        }
        Ok(())
    }

    /// Takes all links away, and waits until the machines have let go.
    pub fn unlink(&mut self) -> Result<()> {
        for row in self.broker.list(&[])? {
            let end = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            self.broker.link(&["rm", &end("a"), &end("b")])?;
        }
        let mut left = Vec::new();
        let gone = until(within(60), || {
            left = self.broker.list(&[]).unwrap_or_default();
            left.is_empty()
        });
        gone.context(format!("links are left: {left:?}"))
    }

    /// The devices of the only link, in a and in b, for cases that do without the machines' own brokers. Bells and vectors
    /// are those that the first link gets (B-8).
    pub fn ends(&mut self) -> Result<[Ends; 2]> {
        let rows = self.broker.list(&[])?;
        let row = rows.first().ok_or_else(|| Error::new("no link"))?;
        let memory = format!("{}-{}", row["link"], row["generation"]);
        let ends = |vm: &mut Vm| -> Result<Ends> {
            Ok(Ends {
                own: vm.address(&format!("tombolo-d-{memory}-own"))?,
                peer: vm.address(&format!("tombolo-d-{memory}-peer"))?,
                bell: vm.address("tombolo")?,
                ring_peer: 2,
                ring_vector: 1,
                wait_vector: 1,
            })
        };
        Ok([ends(&mut self.a)?, ends(&mut self.b)?])
    }

    /// Runs a guest half in a machine to its success; the devices are its first arguments.
    pub fn half(vm: &mut Vm, ends: &Ends, half: &str, more: &[&str], deadline: Instant) -> Result<String> {
        let args = ends.to_args();
        let mut argv = vec!["/agent", "guest", half];
        argv.extend(args.iter().map(String::as_str));
        argv.extend(more);
        vm.run(&argv, deadline)
    }
}

/// A machine with everything in it that a user would install.
fn spec(rig: &Rig, name: &str, purpose: Purpose, network: bool) -> Result<Spec> {
    let mut spec = rig.spec_with(name, |image| {
        for program in ["tombolo", "tombolod"] {
            image.add_program(&format!("bin/{program}"), rig.programs()?.path(program)?)?;
        }
        image.add_busybox(&rig.archive.file("busybox-static", "bin/busybox")?)?;
        if network { add_network(rig, image) } else { Ok(()) }
    })?;
    spec.cpus = Cpus::One;
    if purpose == Purpose::Measuring {
        spec.append.clear();
        spec.memory = 512;
    }
    Ok(spec)
}

/// The modules of the network card, and a file that says in which order they are loaded.
fn add_network(rig: &Rig, image: &mut Image) -> Result<()> {
    let mut order = Vec::new();
    for file in tombolo_e2e::modules::of(&rig.kernel, tombolo_e2e::modules::NETWORK)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let name = format!("modules/{}.ko", name.split('.').next().unwrap_or_default());
        image.add_bytes(&name, &tombolo_e2e::modules::content(&file)?);
        order.push(format!("/{name}"));
    }
    image.add_bytes("modules/order", order.join(" ").as_bytes());
    Ok(())
}
