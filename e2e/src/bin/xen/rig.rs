// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The domains in which cases run. The host boots when the first case needs it and serves all later cases. It is
//! discarded after a case that fails.

use crate::bench;
use crate::unmodified;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use tombolo_e2e::control::{Control, Job};
use tombolo_e2e::debian::Archive;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::image::Extra;
use tombolo_e2e::line_reader::within;
use tombolo_e2e::programs::Programs;
use tombolo_e2e::qemu;
use tombolo_e2e::runner::{self, Case, Lacking, Verdict};
use tombolo_e2e::vchan as ours;
use tombolo_e2e::xen::host::{Host, Kind, Parts};
use tombolo_e2e::xen::packages::Packages;
use tombolo_e2e::xen::vchan;

/// Seconds for commands that take one second on an idle machine.
const SOON: u64 = 120;

/// State that cases share.
pub struct Rig {
    parts: Parts,
    programs: Programs,
    host: Option<(Kind, Pair)>,
}

/// Two domUs of one kind, and dom0.
pub struct Pair {
    /// The machine.
    pub host: Host,
    /// Grants of the domUs that dom0 itself had mapped when they had just booted.
    grants: BTreeSet<String>,
}

impl runner::Rig for Rig {
    const NEED: &'static str = "xen";

    fn prepare() -> std::result::Result<Self, Lacking> {
        Self::with(|packages| {
            let mut programs = vchan::programs(packages)?;
            programs.extend(bench::programs(packages)?);
            programs.extend(ours::apart()?);
            programs.extend(unmodified::programs()?);
            let pair = Programs::example("tombolo-domain-xen", "pair")?;
            programs.push(("bin/pair".into(), pair.path("pair")?.to_owned()));
            Ok(programs)
        })
    }

    fn run(&mut self, case: &Case<Self>) -> Result<Verdict> {
        let verdict = (case.run)(self);
        let fault = self.host.as_mut().and_then(|(_, pair)| pair.host.check().err());
        if verdict.is_ok() && fault.is_none() {
            return verdict;
        }
        self.host = None;
        fault.map_or(verdict, Err)
    }

    fn finish(self) -> Result<()> {
        self.host.map_or(Ok(()), |(_, pair)| pair.host.finish())
    }
}

impl Rig {
    /// Makes a rig with more programs in its domains.
    fn with(more: fn(&Packages) -> Result<Vec<Extra>>) -> std::result::Result<Self, Lacking> {
        let need = |why: Error| Lacking::Need(why.to_string());
        for (program, package) in [(qemu::PROGRAM, "qemu-system-x86"), ("xz", "xz-utils"), ("strip", "binutils")] {
            let version = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
            version.context(format!("no {program} (package {package})")).map_err(need)?;
        }
        let packages = Archive::open().and_then(|archive| Packages::get(&archive)).map_err(need)?;
        let programs = Programs::build().map_err(Lacking::Fault)?;
        let mut extra = more(&packages).map_err(Lacking::Fault)?;
        let tombolo = programs.path("tombolo").map_err(Lacking::Fault)?;
        extra.push(("bin/tombolo".into(), tombolo.to_owned()));
        let broker = programs.path("tombolod").map_err(Lacking::Fault)?;
        extra.push(("bin/tombolod".into(), broker.to_owned()));
        let parts = Parts::new(packages, &extra).map_err(Lacking::Fault)?;
        Ok(Self { parts, programs, host: None })
    }

    /// Makes a rig with the benchmark that knows libxenvchan.
    fn with_bench() -> Result<Self> {
        Self::with(bench::programs).map_err(|why| match why {
            Lacking::Need(why) => Error::new(why),
            Lacking::Fault(why) => why,
        })
    }

    /// Makes the same rig with a running pair, for results in the folder `to`, which must not contain the file `text`
    /// yet.
    pub fn for_results(to: &Path, text: &str, kind: Kind) -> Result<Self> {
        ensure!(!to.join(text).exists(), "{} has results already: choose another folder", to.display());
        fs::create_dir_all(to).context(to.display())?;
        let mut rig = Self::with_bench()?;
        rig.pair(kind)?.grant_more()?;
        Ok(rig)
    }

    /// Returns the path of `tombolo` for this machine.
    pub fn tombolo(&self) -> Result<&Path> {
        self.programs.path("tombolo")
    }

    /// Returns the running pair, and the packages with which its trace is read.
    pub fn traced(&mut self) -> Result<(&Packages, &mut Pair)> {
        let pair = self.host.as_mut().map(|(_, pair)| pair).ok_or_else(|| Error::new("no pair"))?;
        Ok((&self.parts.packages, pair))
    }

    /// Returns two domUs of that kind, for a case that leaves them as they were.
    pub fn pair(&mut self, kind: Kind) -> Result<&mut Pair> {
        // A PVH domU does not always boot after PV domUs were destroyed, so another kind gets another machine.
        if self.host.as_ref().is_none_or(|(there, _)| *there != kind) {
            self.host = None;
            let mut pair = Pair { host: Host::boot(&self.parts)?, grants: BTreeSet::new() };
            pair.create(kind)?;
            self.host = Some((kind, pair));
        }
        self.host.as_mut().map(|(_, pair)| pair).ok_or_else(|| Error::new("no pair"))
    }

    /// Discards the domains, because a case has deliberately left them in an odd state.
    pub fn forget(&mut self) {
        self.host = None;
    }
}

impl Pair {
    fn create(&mut self, kind: Kind) -> Result<()> {
        self.host.create_pair(kind)?;
        self.grants = self.mapped()?;
        Ok(())
    }

    /// Lets programs of both domUs grant more pages than anything here needs: rings that keep messages of 1 MiB apart
    /// take four of them, and there may be a thousand channels.
    pub fn grant_more(&mut self) -> Result<()> {
        let raise = |name| self.sh(name, "echo 16384 > /sys/module/xen_gntalloc/parameters/limit");
        ["A", "B"].map(raise).into_iter().try_for_each(|raised| raised.map(drop))
    }

    /// Recreates a destroyed domU in the same slot.
    pub fn renew(&mut self, place: usize, kind: Kind) -> Result<()> {
        self.host.create(place, kind, "")?;
        self.grants = self.mapped()?;
        Ok(())
    }

    /// Returns the connection that carries commands to a domain.
    pub fn at(&mut self, name: &str) -> Result<&mut Control> {
        self.host.control(name)
    }

    /// Runs a shell command in a domain to its end.
    pub fn sh(&mut self, at: &str, command: &str) -> Result<String> {
        self.at(at)?.run(&["sh", "-c", command], within(SOON)).context(format!("{at}: {command}"))
    }

    /// Starts a shell command.
    pub fn start(&mut self, at: &str, command: &str) -> Result<Job> {
        self.at(at)?.start(&["sh", "-c", command])
    }

    /// Waits for a command that has to succeed.
    pub fn done(&mut self, at: &str, job: Job) -> Result<String> {
        self.at(at)?.wait(job, within(SOON)).context(at)?.success().context(at)
    }

    /// Returns the number of a domain.
    pub fn number(&self, name: &str) -> u16 {
        self.host.domus.iter().find(|domain| domain.name == name).map_or(0, |domain| domain.domid)
    }

    /// Returns the mapped grants as Xen itself lists them: by granting domain, reference and mapping domain.
    pub fn mapped(&mut self) -> Result<BTreeSet<String>> {
        let text = self.sh("dom0", "xl dmesg -c >/dev/null; xl debug-keys g; xl dmesg")?;
        ensure!(text.contains("gnttab_usage_print_all ] done"), "Xen did not list its grants to the end: {text}");
        Ok(active(&text))
    }

    /// Fails unless all mapped grants were mapped before any channel was made, and no node of a channel is left.
    pub fn check_clean(&mut self) -> Result<()> {
        let deadline = within(20);
        loop {
            let more: Vec<String> = self.mapped()?.difference(&self.grants).cloned().collect();
            let nodes = self.sh("dom0", "xenstore-ls -f /local/domain | grep /data/tombolo/[0-9]*/ || true")?;
            if more.is_empty() && nodes.is_empty() {
                return Ok(());
            }
            ensure!(std::time::Instant::now() < deadline, "left behind: grants {more:?}, nodes {nodes}");
        }
    }
}

/// Returns the lines of Xen's list, each with the granting domain: `d1 [0x208] 0`.
fn active(text: &str) -> BTreeSet<String> {
    let mut granter = "";
    let mut found = BTreeSet::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        match words[..] {
            ["grant-table", "for", "remote", domain, ..] => granter = domain,
            [reference, mapper, ..] if reference.starts_with("[0x") => {
                found.insert(format!("{granter} {reference} {mapper}"));
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_grants_are_read_from_xens_list() {
        let text = "(XEN) [ref] localdom mfn      pin          localdom gmfn     flags\n\
            (XEN) grant-table for remote d1 (v1)\n(XEN)   2 frames (64 max), 0 maptrack frames (1024 max)\n\
            (XEN) [0x208]      0 0x6e4c2 0x00000001          0 0x06e4c2 0x19\n\
            (XEN) grant-table for remote d3 (v1)\n(XEN) [0x20a]      1 0x32298 0x00000001          1 0x032298 0x1d\n";
        assert_eq!(active(text).into_iter().collect::<Vec<_>>(), ["d1 [0x208] 0", "d3 [0x20a] 1"]);
    }
}
