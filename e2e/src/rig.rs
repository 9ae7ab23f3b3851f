// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The machines in which cases run. A machine boots when the first case needs it and serves all later cases. It is
//! discarded after a case that fails.

use crate::parts::{MODULE, Parts};
use crate::site::{CONFIG, Plan, Purpose, Site};
use std::time::Instant;
use tombolo_e2e::control::{Job, Output};
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::Ends;
use tombolo_e2e::ivshmem::{Region, Switchboard};
use tombolo_e2e::line_reader::within;
use tombolo_e2e::module;
use tombolo_e2e::qemu::{Access, Cpus, Spec, Vm};
use tombolo_e2e::runner::{self, Case, Lacking, Verdict};

/// Bytes of a region that a guest or the host writes.
pub const REGION: u64 = 4 << 20;
/// Bytes of a doorbell device's memory, which nothing here uses.
const DOORBELL_REGION: u64 = 1 << 16;
/// Number of vectors at which a guest can be notified.
pub const VECTORS: usize = 4;
/// Kernel modules in the machines with brokers, for the cases that load them.
const MODULES: &[&str] = &["tun", "bridge"];

/// State that cases share.
pub struct Rig {
    /// Parts from which machines are made.
    pub parts: Parts,
    solo: Option<Guest>,
    site: Option<(Purpose, Site)>,
}

impl runner::Rig for Rig {
    const NEED: &'static str = "vm";

    /// Gets the kernel and builds the module; boots no machine yet.
    fn prepare() -> std::result::Result<Self, Lacking> {
        Ok(Self { parts: Parts::prepare()?, solo: None, site: None })
    }

    fn run(&mut self, case: &Case<Self>) -> Result<Verdict> {
        let verdict = (case.run)(self);
        let fault = self.solo.as_mut().and_then(Guest::fault);
        let fault = fault.or_else(|| self.site.as_mut().and_then(|(_, site)| site.fault()));
        if verdict.is_ok() && fault.is_none() {
            return verdict;
        }
        let heard = self.site.as_mut().map(|(_, site)| site.report()).unwrap_or_default();
        (self.solo, self.site) = (None, None);
        match (verdict, fault) {
            (Ok(_), Some(fault)) => Err(Error::new(fault)),
            (Err(why), _) if !heard.is_empty() => Err(Error::new(format!("{why}\n{heard}"))),
            (verdict, _) => verdict,
        }
    }

    fn finish(mut self) -> Result<()> {
        self.rest()
    }
}

impl Rig {
    /// Ends the running machines, for a case with machines of its own: the host may have as few as two processors.
    pub fn rest(&mut self) -> Result<()> {
        self.solo.take().map_or(Ok(()), |guest| guest.vm.finish())?;
        self.site.take().map_or(Ok(()), |(_, site)| site.finish())
    }

    /// Returns the two machines with brokers, and boots them when they are first needed. The case must leave them as
    /// they were.
    pub fn site(&mut self) -> Result<&mut Site> {
        let plan = Plan { purpose: Purpose::Cases, config: CONFIG, modules: MODULES, programs: &[] };
        self.site_for(plan.purpose, |parts| Site::boot_with(parts, &plan, |_| Ok(())))
    }

    /// Returns the two machines for a purpose; `boot` boots them when they are first needed. The case must leave them
    /// as they were.
    pub fn site_for(&mut self, purpose: Purpose, boot: impl FnOnce(&Parts) -> Result<Site>) -> Result<&mut Site> {
        if self.site.as_ref().is_none_or(|(of, _)| *of != purpose) {
            self.rest()?;
            self.site = Some((purpose, boot(&self.parts)?));
        }
        let (_, site) = self.site.as_mut().ok_or_else(|| Error::new("no site"))?;
        site.serve()?;
        Ok(site)
    }

    /// Boots a third machine for a case that ends it. The host's broker must know its name.
    pub fn third(&mut self, name: &str) -> Result<Vm> {
        self.site()?;
        let (_, site) = self.site.as_ref().ok_or_else(|| Error::new("no site"))?;
        site.boot_third(&self.parts, name, MODULES)
    }

    /// Returns the guest that shares regions with the host, with its module loaded.
    pub fn solo(&mut self) -> Result<&mut Guest> {
        if self.solo.is_none() {
            let mut board = Switchboard::new(VECTORS);
            let mut guest = Guest::boot(self.parts.spec("solo")?, &mut board)?;
            let host = board.join_host()?;
            let (own, peer) = (Region::new(REGION)?, Region::new(REGION)?);
            guest.attach(own, peer, host, Access::Read)?;
            guest.board = Some((board, host));
            self.solo = Some(guest);
        }
        self.solo.as_mut().ok_or_else(|| Error::new("no guest"))
    }

    /// Returns two guests that share regions with each other, with their modules loaded.
    pub fn pair(&self) -> Result<(Guest, Guest, Switchboard)> {
        let mut board = Switchboard::new(VECTORS);
        let (mut spec_a, mut spec_b) = (self.parts.spec("a")?, self.parts.spec("b")?);
        (spec_a.cpus, spec_b.cpus) = (Cpus::One, Cpus::One);
        let mut a = Guest::boot(spec_a, &mut board)?;
        let mut b = Guest::boot(spec_b, &mut board)?;
        let (of_a, of_b) = (Region::new(REGION)?, Region::new(REGION)?);
        let (id_a, id_b) = (a.id, b.id);
        a.attach(of_a.share()?, of_b.share()?, id_b, Access::Read)?;
        b.attach(of_b, of_a, id_a, Access::Read)?;
        Ok((a, b, board))
    }
}

/// A machine with a doorbell and the two regions of one link.
pub struct Guest {
    /// The machine.
    pub vm: Vm,
    /// Number of the machine among the peers that can be notified.
    pub id: u16,
    /// Region that the machine writes.
    pub own: Option<Region>,
    /// Region that the machine reads.
    pub peer: Option<Region>,
    /// Devices of the machine, and the peer that they notify.
    pub ends: Option<Ends>,
    /// Doorbells, and the host's number, where the host is the peer.
    pub board: Option<(Switchboard, u16)>,
    _doorbell: Region,
}

impl Guest {
    /// Boots the machine with a doorbell device.
    fn boot(mut spec: Spec, board: &mut Switchboard) -> Result<Self> {
        let doorbell = Region::new(DOORBELL_REGION)?;
        let (id, line) = board.join(&doorbell)?;
        spec.doorbell(line, VECTORS)?;
        let vm = Vm::boot(spec)?;
        Ok(Self { vm, id, own: None, peer: None, ends: None, board: None, _doorbell: doorbell })
    }

    /// Loads the module and plugs the regions in.
    fn attach(&mut self, own: Region, peer: Region, notify_peer: u16, access: Access) -> Result<()> {
        self.load()?;
        let ends = Ends {
            own: self.vm.plug("own", &own, Access::Write)?,
            peer: self.vm.plug("peer", &peer, access)?,
            doorbell: self.vm.address("doorbell")?,
            notify_peer,
            notify_vector: 1,
            wait_vector: 1,
        };
        (self.own, self.peer, self.ends) = (Some(own), Some(peer), Some(ends));
        Ok(())
    }

    /// Loads the module.
    pub fn load(&mut self) -> Result<()> {
        self.vm.run(&["/agent", "insmod", MODULE], within(60)).map(drop)
    }

    /// Unloads the module.
    pub fn unload(&mut self) -> Result<()> {
        self.vm.run(&["/agent", "rmmod", module::NAME], within(60)).map(drop)
    }

    /// Returns the first fault on the console, with the lines around it.
    fn fault(&mut self) -> Option<String> {
        let fault = self.vm.console.fault()?.to_owned();
        Some(format!("{fault}\n    {}", self.vm.console.tail(40)))
    }

    /// Returns the devices of the link.
    pub fn ends(&self) -> Result<&Ends> {
        self.ends.as_ref().ok_or_else(|| Error::new("no link"))
    }

    /// Returns the region that the guest writes.
    pub fn own(&self) -> Result<&Region> {
        self.own.as_ref().ok_or_else(|| Error::new("no region"))
    }

    /// Returns the region that the guest reads.
    pub fn peer(&self) -> Result<&Region> {
        self.peer.as_ref().ok_or_else(|| Error::new("no region"))
    }

    /// Returns the host's doorbells.
    pub fn board(&self) -> Result<(&Switchboard, u16)> {
        self.board.as_ref().map(|(board, host)| (board, *host)).ok_or_else(|| Error::new("the host is no peer"))
    }

    /// Waits until the guest notifies the host.
    pub fn wait_notified(&self, deadline: Instant) -> Result<()> {
        let (board, host) = self.board()?;
        board.wait(host, 1, deadline)
    }

    /// Consumes earlier notifications: a window that is closed notifies too.
    pub fn quiet(&self) -> Result<()> {
        while self.wait_notified(Instant::now()).is_ok() {}
        Ok(())
    }

    /// Starts a guest half with the devices as its first arguments.
    pub fn start(&mut self, half: &str, more: &[&str]) -> Result<Job> {
        let ends = self.ends()?.to_args();
        let mut argv = vec!["/agent", "guest", half];
        argv.extend(ends.iter().map(String::as_str));
        argv.extend(more);
        self.vm.start(&argv)
    }

    /// Runs a guest half to its end, whether or not it succeeds.
    pub fn end(&mut self, half: &str, more: &[&str], deadline: Instant) -> Result<Output> {
        let job = self.start(half, more)?;
        self.vm.wait(job, deadline).context(format!("{half} in {}", self.vm.name))
    }

    /// Runs a guest half that must succeed, and returns what it printed.
    pub fn run(&mut self, half: &str, more: &[&str]) -> Result<String> {
        self.end(half, more, within(120))?.success().context(format!("{half} in {}", self.vm.name))
    }
}
