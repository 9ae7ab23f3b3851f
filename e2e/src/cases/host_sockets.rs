// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unmodified programs of the host and of a machine, started by `tombolo run`. Those of the host are in a network
//! namespace without the host's broker, as in a container. They are in a control group of their own whose programs get
//! sequence numbers.

use super::sockets::{self, HALF, RECEIVE, SEND};
use super::{Case, Verdict};
use crate::rig::Rig;
use crate::site::{At, Site, line};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tombolo_e2e::control::Job;
use tombolo_e2e::ensure;
use tombolo_e2e::error::{Context, Error, Result};
use tombolo_e2e::guest::until;
use tombolo_e2e::line_reader::{LineReader, within};
use tombolo_e2e::process::{Process, tied};
use tombolo_e2e::scratch::Scratch;

pub const CASES: &[Case] =
    &[Case { name: "s21_programs_of_host_and_machine_talk_through_memory_until_the_link_goes", run: talk }];

/// Places where cgroup version 2 may be mounted.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Processes of the host that the kernel tells the sequence numbers of their connections.
struct Group(PathBuf);

impl Group {
    /// Makes a group. The error has the reason why there can be none.
    fn new(site: &Site) -> Result<Self> {
        let root = ROOTS.into_iter().map(Path::new).find(|path| path.join("cgroup.controllers").exists());
        let root = root.ok_or_else(|| Error::new("no cgroup version 2"))?;
        let group = Self(root.join(format!("tombolo-e2e-{}", std::process::id())));
        fs::create_dir(&group.0).context(group.0.display())?;
        site.broker.tombolo(&["hook", "attach", "--cgroup", &group.0.to_string_lossy()])?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The group's processes have been killed, and take a moment to end.
        _ = until(within(20), || fs::remove_dir(&self.0).is_ok());
    }
}

/// Folder where programs of the host meet and leave their counts, and the group that they are in.
pub struct Place {
    group: Option<Group>,
    scratch: Scratch,
}

impl Place {
    /// Makes a place whose programs get sequence numbers. The error has the reason why there can be none.
    pub fn new(site: &Site) -> Result<Self> {
        let scratch = Scratch::new("host-sockets")?;
        fs::create_dir(scratch.path().join("meeting"))?;
        Ok(Self { group: Some(Group::new(site)?), scratch })
    }

    /// Returns the bytes over TCP and through memory that programs counted into the folder `name`.
    pub fn counted(&self, name: &str) -> Result<[u64; 2]> {
        let mut text = String::new();
        for file in fs::read_dir(self.scratch.path().join(name)).context(name)? {
            text += &(fs::read_to_string(file?.path())? + "\n");
        }
        tombolo_e2e::stream::sum_reports(&text)
    }

    /// Starts a program unchanged in the network of the machines; under `tombolo run` if it has to count into the
    /// folder `name`.
    pub fn start(&self, site: &Site, name: Option<&str>, program: &[&str]) -> Result<Running> {
        let mut words = site.network.as_ref().map_err(Clone::clone)?.enter();
        if let Some(group) = &self.group {
            let join = format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", group.0.display());
            words.extend(["sh", "-c", &join].map(str::to_owned));
        }
        let folder = |name: &str| self.scratch.path().join(name).to_string_lossy().into_owned();
        let command = match name {
            Some(name) => {
                let (meeting, report) = (folder("meeting"), folder(name));
                let ours = ["run", "--folder", &meeting, "--report", &report, "--"];
                site.broker.command(&words, &[&ours, program].concat())?
            }
            None => {
                let mut command = tied(&words, program[0]);
                command.args(&program[1..]);
                command
            }
        };
        Running::of(command)
    }
}

/// A program of the host, with its output.
pub struct Running {
    process: Process,
    lines: LineReader,
    errors: LineReader,
}

impl Running {
    fn of(mut command: Command) -> Result<Self> {
        let mut process = Process::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
        let missing = || Error::new("no standard output");
        let lines = process.stdout.take().map(LineReader::of).ok_or_else(missing)?;
        let errors = process.stderr.take().map(LineReader::of).ok_or_else(missing)?;
        Ok(Self { process, lines, errors })
    }

    /// Waits for a line that begins with a word.
    pub fn wait_for_line(&self, word: &str) -> Result<String> {
        loop {
            let line = self.lines.next_before(within(60));
            let line = line.map_err(|why| Error::new(format!("waiting for `{word}`: {why:?}")))?;
            if line.starts_with(word) {
                return Ok(line);
            }
        }
    }

    /// Waits until the program has ended successfully. Returns the rest of its output.
    pub fn finish(mut self) -> Result<Vec<String>> {
        until(within(120), || matches!(self.process.try_wait(), Ok(Some(_)))).context("it does not end")?;
        let status = self.process.wait()?;
        let errors: Vec<String> = self.errors.ready().collect();
        ensure!(status.success(), "{status}: {}", errors.join("; "));
        Ok(self.lines.ready().collect())
    }
}

/// Directions of a stream between a and the host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    ToHost,
    FromHost,
}

/// Checks a stream; `meanwhile` happens once it flows. Returns how many bytes the sender sent over TCP and through
/// memory.
fn transfer(
    site: &mut Site,
    place: &Place,
    (way, millis, name): (Way, &str, &str),
    meanwhile: impl FnOnce(&mut Site) -> Result<()>,
) -> Result<[u64; 2]> {
    let (own, folder) = (std::env::current_exe()?, format!("/tmp/{name}"));
    let own = own.to_string_lossy();
    let address = match way {
        Way::ToHost => site.network.as_ref().map_err(Clone::clone)?.host(),
        Way::FromHost => site.addresses[0].clone(),
    };
    let on_host = |site: &Site, half: &[&str]| place.start(site, Some(name), &[&[own.as_ref(), HALF], half].concat());
    let in_machine = |site: &mut Site, half: &[&str]| -> Result<Job> {
        sockets::start(site, At::A, &folder, &[&["/agent", HALF], half].concat())
    };
    let (end, job) = match way {
        Way::ToHost => {
            let end = on_host(site, &[RECEIVE])?;
            end.wait_for_line("listens")?;
            (end, in_machine(site, &[SEND, &address, millis])?)
        }
        Way::FromHost => {
            let job = in_machine(site, &[RECEIVE])?;
            line(&mut site.a, job, "listens", within(60))?;
            (on_host(site, &[SEND, &address, millis])?, job)
        }
    };
    meanwhile(site)?;
    site.a.wait(job, within(120))?.success().context("the machine's end")?;
    end.finish().context("the host's end")?;
    let (guest, host) = (sockets::counted(site, At::A, &folder)?, place.counted(name)?);
    let [sent, came] = if way == Way::ToHost { [guest, host] } else { [host, guest] };
    // Bytes that were in the ring when the link was left were sent through memory, and received over TCP.
    let recalled = sent[1].checked_sub(came[1]);
    let fits = sent.iter().sum::<u64>() == came.iter().sum::<u64>() && recalled.is_some_and(|it| it <= sockets::RING);
    ensure!(fits, "{name}: who sends counts {sent:?}, who receives {came:?}");
    Ok(sent)
}

fn talk(rig: &mut Rig) -> Result<Verdict> {
    if let Some(missing) = sockets::missing() {
        return Ok(Verdict::Skip { need: "iperf3", why: format!("no {missing}") });
    }
    sockets::at_site(rig, |site| {
        site.link("a", "host")?;
        match Place::new(site) {
            Ok(place) => through_it(site, place).map(|()| Verdict::Done),
            Err(why) => Ok(Verdict::Skip { need: "bpf", why: why.to_string() }),
        }
    })
}

fn through_it(site: &mut Site, mut place: Place) -> Result<()> {
    // Canary: a program that gets no sequence numbers can prove nothing, and everything goes over TCP.
    let group = place.group.take();
    let canary = transfer(site, &place, (Way::ToHost, "700", "host-canary"), |_| Ok(()))?;
    ensure!(canary[0] > 0 && canary[1] == 0, "without numbers {} bytes went through memory", canary[1]);
    place.group = group;
    for (way, name) in [(Way::ToHost, "to-host"), (Way::FromHost, "from-host")] {
        let [tcp, memory] = transfer(site, &place, (way, "2500", name), |_| Ok(()))?;
        ensure!(memory > 0 && memory / 19 >= tcp, "{name}: {tcp} bytes over TCP, {memory} through memory");
    }
    // The link goes under load: every byte arrives, the rest over TCP.
    let both = transfer(site, &place, (Way::ToHost, "8000", "host-leave"), |site| {
        sockets::until_in_memory(site, "/tmp/host-leave")?;
        site.broker.link(&["rm", "a", "host"]).map(drop)
    })?;
    ensure!(both[0] > 0 && both[1] > 0, "{} bytes over TCP, {} through memory", both[0], both[1]);
    Ok(())
}
